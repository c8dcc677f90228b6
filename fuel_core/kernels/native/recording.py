"""Kernel calls recorded once and made again without Python between them.

A recording holds addresses, so it is true only while every value that goes into it lies where it lay. Its
inputs are buffers that the caller fills anew; what is computed on the way lies in an arena. What
PyTorch computes in between, but for a sum of two tensors, cannot be recorded: then there is no recording.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fuel_core import _native

_here = threading.local()


def empty(*shape: int) -> Tensor:
    """A float32 tensor, from the arena of the recording that this thread makes, if it makes one."""
    arena: Arena | None = getattr(_here, "arena", None)
    return torch.empty(shape) if arena is None else arena.empty(shape)


class Arena:
    """Buffers that recordings share, since one runs at a time and leaves nothing behind for the next.

    Attributes:
        lock: held while one runs, until its result has been used.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._free: defaultdict[int, list[np.ndarray[Any, Any]]] = defaultdict(list)
        self._all: list[np.ndarray[Any, Any]] = []

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """A tensor whose memory is taken again once PyTorch has let go of it."""
        count = math.prod(shape)
        size = 1 << max(4, (count - 1).bit_length())
        if not self._free[size]:
            self._all.append(np.empty(size, dtype=np.float32))
            self._free[size].append(self._all[-1])
        buffer = self._free[size].pop()
        lent = buffer[:count]
        weakref.finalize(lent, self._free[size].append, buffer).atexit = False
        return torch.from_numpy(lent).view(shape)

    def record(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Recording | None]:
        """Run ``compute`` and record what this thread calls; see :class:`protocols.Arena`."""
        tape, watch = _native.Tape(), _Watch()
        _here.arena = self
        tape.start()
        try:
            with watch:
                out = compute()
        finally:
            tape.stop()
            _here.arena = None
        return out, Recording(tape, out) if watch.whole else None


class Recording:
    """The calls of one run, and where its result lies."""

    def __init__(self, tape: _native.Tape, out: Tensor) -> None:
        self._tape, self._out = tape, out

    def __len__(self) -> int:
        return len(self._tape)

    def run(self) -> Tensor:
        """Make the calls again; the result is overwritten by the next run."""
        self._tape.run()
        return self._out

    def run_timed(self) -> list[tuple[str, int]]:
        """Make the calls again; the kernel of each, and the nanoseconds that it took."""
        return self._tape.run_timed()


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what PyTorch itself computes, and has sums of two tensors recorded.

    Attributes:
        whole: whether nothing else was computed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.whole = True


def _see(watch: _Watch, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    if func is torch.ops.aten.add.Tensor and not kwargs and _summable(*args):
        out = empty(*args[0].shape)
        _native.add(args[0].data_ptr(), args[1].data_ptr(), out.numel(), out.data_ptr())
        return out
    out = func(*args, **(kwargs or {}))
    may_view = func.is_view or func is torch.ops.aten.detach.default
    watch.whole &= may_view and _lies_in(out, args[0])
    return out


# Where a class is made with it, PyTorch wraps it so that its first call imports the whole compiler.
_Watch.__torch_dispatch__ = _see  # type: ignore[assignment, method-assign]


def _lies_in(out: Any, x: Any) -> bool:
    """Whether all of a result is the argument's memory: a cast or a reshape may view it, and may copy it."""
    parts = out if isinstance(out, (list, tuple)) else (out,)
    tensors = all(isinstance(each, Tensor) for each in (x, *parts))
    return tensors and all(
        part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for part in parts
    )


def _summable(x: Any, y: Any) -> bool:
    tensors = isinstance(x, Tensor) and isinstance(y, Tensor)
    plain = tensors and all(t.dtype is torch.float32 and t.is_contiguous() for t in (x, y))
    return bool(plain and x.shape == y.shape)
