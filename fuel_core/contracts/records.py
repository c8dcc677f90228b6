"""The records that plugins register beside model families."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from fuel_core.contracts.checkpoint import Checkpoint


@attrs.frozen(kw_only=True)
class WeightFormat:
    """A checkpoint format on disk.

    Attributes:
        name: what ``Checkpoint.format`` of such a checkpoint says.
        matches: whether a file or directory is of this format, by looking at its name, its first
            bytes or the files in it. Never raises for a readable path.
        open: opens it. Raises CheckpointError.
    """

    name: str
    matches: Callable[[Path], bool]
    open: Callable[[Path], Checkpoint]


@attrs.frozen(kw_only=True)
class KernelBackend:
    """A set of kernels for ``fuel_core.kernels.ops``.

    Attributes:
        name: what ``FUEL_KERNELS`` and ``fuel doctor`` call it.
        devices: the torch device types that it serves.
        load: imports and returns the module whose functions are named like those of ``ops``; an op
            that it lacks falls to the reference.
    """

    name: str
    devices: tuple[str, ...]
    load: Callable[[], ModuleType]
