"""What each layer of a model keeps between two steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

import attrs

from fuel_core.contracts.errors import ModelContractError, NonUniformStateError

if TYPE_CHECKING:
    import torch


@attrs.frozen
class KeyValue:
    """Keys and values per KV head: two tensors ``[n_kv_heads, tokens, head_dim]``."""

    n_kv_heads: int
    head_dim: int


@attrs.frozen
class StateSlot:
    """One named-by-position tensor of a layer's state; ``dtype`` None means the cache's own."""

    trailing_shape: tuple[int, ...]
    dtype: torch.dtype | None = None


@attrs.frozen
class Slots:
    """State that is not per-head KV: MLA latents, convolution windows, SSM states."""

    slots: tuple[StateSlot, ...]


LayerStateSpec: TypeAlias = KeyValue | Slots


def collapse_uniform(specs: Sequence[LayerStateSpec]) -> tuple[int, int]:
    """Return the one ``(n_kv_heads, head_dim)`` that all layers keep.

    Raises:
        NonUniformStateError: there are no layers, a layer keeps slots, or two layers differ.
    """
    if not specs:
        raise NonUniformStateError(
            "a model with no layers",
            needed="at least one layer of per-head KV",
            remedy="mend its layer_state_specs()",
        )
    first = specs[0]
    for layer, spec in enumerate(specs):
        if not isinstance(spec, KeyValue):
            raise NonUniformStateError(
                f"layer {layer} keeps {spec}, which is not per-head KV",
                needed="KeyValue(n_kv_heads, head_dim) in every layer",
                remedy="serve this model with a scheduler that holds its own kind of state",
                layer=layer,
            )
        if spec != first:
            raise NonUniformStateError(
                f"layers {layer - 1} and {layer} differ: {specs[layer - 1]} and {spec}",
                needed="the same KeyValue(n_kv_heads, head_dim) in every layer",
                remedy="serve this model with a scheduler that sizes each layer's cache",
                layers=(layer - 1, layer),
            )
    assert isinstance(first, KeyValue)
    return first.n_kv_heads, first.head_dim


class HasLayerState(Protocol):
    """What :meth:`ModelDims.from_model` asks of a model."""

    def n_layers(self) -> int: ...
    def layer_state_specs(self) -> Sequence[LayerStateSpec]: ...


@attrs.frozen
class ModelDims:
    """The geometry of a uniform per-head KV cache."""

    n_layers: int
    n_kv_heads: int
    head_dim: int

    @classmethod
    def from_model(cls, model: HasLayerState) -> ModelDims:
        """Collapse the model's per-layer state.

        Raises:
            NonUniformStateError: the layers are not uniform per-head KV.
            ModelContractError: the model counts its layers in two ways.
        """
        specs = model.layer_state_specs()
        dims = cls(model.n_layers(), *collapse_uniform(specs))
        if len(specs) != dims.n_layers:
            raise ModelContractError(
                f"layer_state_specs() has {len(specs)} entries",
                needed=f"{dims.n_layers}, as n_layers() says",
                remedy="return one entry per layer",
            )
        return dims
