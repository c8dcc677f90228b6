"""The record by which a plugin declares a model family."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from fuel_core.contracts.errors import PluginError

if TYPE_CHECKING:
    import torch

    from fuel_core.contracts.checkpoint import Checkpoint
    from fuel_core.contracts.tiers import DecodeModel

API_VERSION = "1.0"
"""The version of these contracts. A plugin states the one that it was written for."""

TIERS = ("decode", "batched", "paged", "ragged")
"""The names of the tiers, each adding to the one before (``batched`` is an arm of ``decode``)."""

DTYPES = ("float32", "bfloat16", "float16")
"""The names of the element types that a family may compute in."""


class LoadModel(Protocol):
    """The signature of :attr:`ModelFamily.load`."""

    def __call__(
        self, checkpoint: Checkpoint, *, device: str | torch.device, dtype: torch.dtype
    ) -> DecodeModel: ...


def _known(kind: str, known: tuple[str, ...]) -> Any:
    def check(_: object, __: object, names: tuple[str, ...]) -> None:
        unknown = sorted(set(names) - set(known))
        if unknown:
            raise PluginError(
                f"capabilities name the {kind} {', '.join(map(repr, unknown))}",
                needed=f"names out of {', '.join(known)}",
                remedy="correct the family's Capabilities",
            )

    return check


def _names(names: Iterable[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


@attrs.frozen(kw_only=True)
class Capabilities:
    """What a family can do; the claims are checked against its class when it is first loaded.

    Attributes:
        tiers: names from :data:`TIERS`; ``decode`` is always among them.
        dtypes: names from :data:`DTYPES`, the preferred one first.
        devices: torch device types.
        weight_formats: checkpoint formats.
    """

    tiers: tuple[str, ...] = attrs.field(converter=_names, validator=_known("tiers", TIERS))
    dtypes: tuple[str, ...] = attrs.field(
        default=("float32",), converter=_names, validator=_known("dtypes", DTYPES)
    )
    devices: tuple[str, ...] = attrs.field(default=("cpu",), converter=_names)
    weight_formats: tuple[str, ...] = attrs.field(default=("safetensors",), converter=_names)

    def __attrs_post_init__(self) -> None:
        if "decode" not in self.tiers:
            raise PluginError(
                f"capabilities with the tiers {self.tiers}",
                needed="'decode', which every servable model has",
                remedy="add it to the family's Capabilities",
            )


@attrs.frozen(kw_only=True)
class ModelFamily:
    """One family of models, as its plugin declares it. Holds no weights and imports no torch.

    Attributes:
        name: unique among all installed plugins.
        architectures: Hugging Face ``architectures`` that it loads.
        gguf_architectures: GGUF ``general.architecture`` values that it loads.
        capabilities: what its models can do.
        api_version: the ``fuel_core.contracts.API_VERSION`` that it was written for.
        load: ``(checkpoint, *, device, dtype)`` -> model. Imports what it needs when called.
        tiny: ``(seed=0, **overrides)`` -> a small random float32 model for tests.
    """

    name: str
    architectures: tuple[str, ...] = attrs.field(default=(), converter=_names)
    gguf_architectures: tuple[str, ...] = attrs.field(default=(), converter=_names)
    capabilities: Capabilities
    api_version: str
    load: LoadModel
    tiny: Callable[..., DecodeModel]
