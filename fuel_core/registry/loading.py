"""Loads a model through its family, and holds the family to what it claims."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from fuel_core.contracts.checkpoint import Checkpoint
from fuel_core.contracts.errors import CheckpointError, FuelError, InvalidRequestError, PluginError
from fuel_core.contracts.family import ModelFamily
from fuel_core.registry.naming import one_line

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


def check_format(family: ModelFamily, checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint of a format that the family does not load.

    Raises:
        CheckpointError: naming the family's formats.
    """
    formats = family.capabilities.weight_formats
    if checkpoint.format not in formats:
        raise CheckpointError(
            f"{checkpoint.source} is a {checkpoint.format} checkpoint for the family {family.name!r}",
            needed=f"one of {', '.join(formats)}",
            remedy="fetch the model in one of these formats, or install a plugin that loads this one",
            family=family.name,
            format=checkpoint.format,
        )


def check_placement(family: ModelFamily, device: str | torch.device, dtype: torch.dtype) -> None:
    """Refuse a device or an element type that the family does not compute on.

    Raises:
        InvalidRequestError: naming the family's devices or types.
    """
    device_type, dtype_name = str(device).partition(":")[0], str(dtype).removeprefix("torch.")
    _check_choice(family, "device", device_type, family.capabilities.devices)
    _check_choice(family, "dtype", dtype_name, family.capabilities.dtypes)


def _check_choice(family: ModelFamily, parameter: str, given: str, known: tuple[str, ...]) -> None:
    if given not in known:
        raise InvalidRequestError(
            f"{parameter} {given!r} for the family {family.name!r}",
            needed=f"one of {', '.join(known)}",
            remedy=f"choose another {parameter}",
            parameter=parameter,
            family=family.name,
        )


def call_plugin(call: Callable[[], T], what: str, label: str) -> T:
    """Run a plugin's function, whose own typed errors pass and whose other errors name it.

    Raises:
        PluginError: from any exception that is no FuelError, a call of ``sys.exit`` among them.
    """
    try:
        return call()
    except (FuelError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise PluginError(
            f"{what} of {label} failed: {one_line(error)}",
            needed="a result or a typed error",
            remedy=f"report it to the authors of {label}",
            what=what,
            plugin=label,
        ) from error
