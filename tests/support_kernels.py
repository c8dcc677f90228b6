"""How near a kernel must be to float64 arithmetic written out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

NARROW = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Narrow types and what rounding to them costs at most."""

WIDE = torch.float32
FLOOR = 2.0**-24


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = WIDE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(ours: Tensor, truth: Tensor) -> float:
    assert ours.shape == truth.shape
    assert truth.dtype == torch.float64
    return float((ours.double() - truth).abs().max() / truth.abs().max())


def check(ours: Tensor, truth: Callable[..., Tensor], *args: Any) -> None:
    """Within four times what the formula by hand loses in float32, or a few roundings of a narrow type."""
    exact = truth(*(widen(arg, torch.float64) for arg in args))
    if ours.dtype in NARROW:
        assert error(ours, exact) <= 4 * NARROW[ours.dtype]
        return
    assert ours.dtype == WIDE
    noise = error(truth(*(widen(arg, WIDE) for arg in args)), exact)
    assert noise < 1e-5  # or the limit would mean nothing
    assert error(ours, exact) <= 4 * noise + FLOOR


def widen(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value


every_dtype = pytest.mark.parametrize("dtype", [WIDE, *NARROW], ids=str)


def norm_by_hand(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x)
    for place in range(x.numel() // x.shape[-1]):
        row = x.reshape(-1, x.shape[-1])[place]
        total = sum((value * value for value in row), start=torch.zeros((), dtype=x.dtype))
        out.view(-1, x.shape[-1])[place] = row / (total / len(row) + eps).sqrt() * gain
    return out
