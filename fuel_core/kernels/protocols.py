"""What kernels hand out and layers keep."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor


class Product(Protocol):
    """``x [T, in]`` → ``[T, sum of outs]``: the outputs of every map, biases added, side by side."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """In the dtype of ``x``, added to ``residual`` where given; a row depends on its own input alone."""
        ...


class Recording(Protocol):
    """The kernel calls of one run, to be made again on the same buffers."""

    def run(self) -> Tensor:
        """Make them again; the result is overwritten by the next run."""
        ...

    def run_timed(self) -> list[tuple[str, int]]:
        """Make them again; the kernel of each, in order, and the nanoseconds that it took."""
        ...


class Arena(Protocol):
    """Memory that recordings share."""

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Held from the start of a run until its result has been used."""
        ...

    def record(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Recording | None]:
        """Run ``compute`` once; the recording is None where it did something that cannot be recorded."""
        ...
