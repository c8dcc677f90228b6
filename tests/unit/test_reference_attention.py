"""The reference kernels for rotation, the write into the cache, and attention, against float64 by hand."""

from __future__ import annotations

import math

import pytest
import torch
from support_kernels import NARROW, WIDE, check, draw, error, every_dtype, norm_by_hand
from torch import Tensor

from fuel_core.kernels import reference

# Rotation and the write into the cache.


def rotate_by_hand(x: Tensor, angles: Tensor) -> Tensor:
    """``x [T, H, D]`` as complex numbers ``x_i + j x_(i + D/2)``, turned by ``angles [T, D/2]``."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(
        torch.ones_like(angles), angles
    )[:, None].to(torch.complex128)
    return torch.cat((turned.real, turned.imag), dim=-1)


class Case:
    """New rows of several sessions, cache slots for them, and what should come out."""

    def __init__(
        self,
        counts: tuple[int, ...],
        hq: int,
        hkv: int,
        dim: int,
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
        norm: bool,
    ) -> None:
        total = sum(counts)
        self.qkv = draw(total, (hq + 2 * hkv) * dim, dtype=dtype)
        self.angles = torch.rand(total, dim // 2, generator=torch.Generator().manual_seed(1)).double() * 6
        self.gains = (1 + draw(dim, seed=2, dtype=dtype), 1 + draw(dim, seed=3, dtype=dtype), 1e-3)
        self.norm = self.gains if norm else None
        # Slots lie in the middle of larger buffers, whose other places are poisoned.
        self.k_buffers = [torch.full((hkv, n + 9, dim), math.nan, dtype=cache_dtype) for n in counts]
        self.v_buffers = [torch.full((hkv, n + 9, dim), math.nan, dtype=cache_dtype) for n in counts]
        self.spans = [slice(5, 5 + n) for n in counts]
        rows = self.qkv.double().view(total, -1, dim)
        q, k, self.v = rows[:, :hq], rows[:, hq:-hkv], rows[:, -hkv:]
        if norm:
            q = norm_by_hand(q, self.gains[0].double(), 1e-3)
            k = norm_by_hand(k, self.gains[1].double(), 1e-3)
        self.q, self.k = rotate_by_hand(q, self.angles), rotate_by_hand(k, self.angles)

    def run(self) -> Tensor:
        slots = [
            [buffer[:, span] for buffer, span in zip(buffers, self.spans, strict=True)]
            for buffers in (self.k_buffers, self.v_buffers)
        ]
        return reference.write_kv(
            self.qkv, self.angles.cos().float(), self.angles.sin().float(), *slots, self.norm
        )


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [(WIDE, WIDE), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (WIDE, torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("norm", [False, True], ids=["no norm", "norm"])
@pytest.mark.parametrize("counts", [(1,), (6,), (1, 1, 1), (4, 1, 2)], ids=str)
@pytest.mark.parametrize(("hq", "hkv"), [(1, 1), (3, 1), (6, 2)])
def test_write_kv_norms_rotates_and_writes_each_session_where_it_belongs(
    hq: int, hkv: int, counts: tuple[int, ...], norm: bool, dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    case = Case(counts, hq, hkv, 10, dtype, cache_dtype, norm)
    q = case.run()
    limit = {WIDE: 1e-6, **{narrow: 4 * cost for narrow, cost in NARROW.items()}}
    assert q.shape == (sum(counts), hq, 10)
    assert q.dtype == dtype
    assert error(q, case.q) <= limit[dtype]
    start = 0
    for n, span, k, v in zip(counts, case.spans, case.k_buffers, case.v_buffers, strict=True):
        rows = slice(start, start + n)
        for buffer, truth in ((k, case.k[rows]), (v, case.v[rows])):
            written = torch.isfinite(buffer).all(-1)  # [Hkv, slots]
            assert written[:, span].all()
            assert written.sum() == hkv * n
            assert error(buffer[:, span].transpose(0, 1), truth) <= max(limit[dtype], limit[cache_dtype])
        start += n


def test_values_are_written_as_they_are() -> None:
    case = Case((4, 1, 2), 6, 2, 10, WIDE, WIDE, norm=True)
    case.run()
    written = torch.cat(
        [v[:, span].transpose(0, 1) for v, span in zip(case.v_buffers, case.spans, strict=True)]
    )
    assert torch.equal(written.double(), case.v)


@pytest.mark.parametrize(
    "fault", ["no rotation", "other way", "neighbours", "no norm", "gains swapped", "rows shifted"]
)
def test_faults_of_rotation_and_norm_are_seen(fault: str) -> None:
    case = Case((4, 2), 3, 1, 10, WIDE, WIDE, norm=True)
    if fault == "no rotation":
        case.angles = torch.zeros_like(case.angles)
    elif fault == "other way":
        case.angles = -case.angles
    elif fault == "neighbours":
        case.qkv = case.qkv.view(6, 5, 5, 2).transpose(2, 3).reshape(6, 50)
    elif fault == "no norm":
        case.norm = None
    elif fault == "gains swapped":
        case.norm = (case.gains[1], case.gains[0], case.gains[2])
    else:
        case.qkv = case.qkv.roll(1, 0)
    assert error(case.run(), case.q) > 1e-2


# Attention.


def attend_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every query head, position and key in a loop; the softmax written out."""
    new, hq, dim = q.shape
    hkv, total, _ = k.shape
    out = torch.zeros(new, hq, dim, dtype=q.dtype)
    for row in range(new):
        for head in range(hq):
            kv_head = head // (hq // hkv)
            visible = total - new + row + 1
            scores = [(q[row, head] * k[kv_head, place]).sum() / math.sqrt(dim) for place in range(visible)]
            top = max(float(score) for score in scores)
            weights = [torch.exp(score - top) for score in scores]
            for place, weight in enumerate(weights):
                out[row, head] += weight / sum(weights) * v[kv_head, place]
    return out.reshape(new, hq * dim)


LENGTHS = [(1, 1), (1, 2), (1, 37), (5, 5), (2, 3), (4, 37), (36, 37)]


@every_dtype
@pytest.mark.parametrize(("hq", "hkv"), [(1, 1), (3, 1), (6, 2), (4, 4)])
@pytest.mark.parametrize(("new", "total"), LENGTHS)
def test_attention_is_the_formula(new: int, total: int, hq: int, hkv: int, dtype: torch.dtype) -> None:
    q = 2 * draw(new, hq, 10, dtype=dtype)
    k, v = draw(hkv, total, 10, seed=1, dtype=dtype), draw(hkv, total, 10, seed=2, dtype=dtype)
    ours = reference.attention(q, k, v)
    assert ours.dtype == dtype
    check(ours, attend_by_hand, q, k, v)


@pytest.mark.parametrize(("new", "total"), LENGTHS)
def test_what_lies_outside_the_views_changes_nothing(new: int, total: int) -> None:
    """Views of larger caches, the places around them poisoned: bit for bit what a clean cache gives."""
    q = draw(new, 6, 10)
    clean = [torch.zeros(3, 2, total + 21, 10) for _ in range(2)]
    poisoned = [torch.full_like(buffer, math.nan) for buffer in clean]
    for seed, buffers in enumerate(zip(clean, poisoned, strict=True)):
        values = draw(2, total, 10, seed=seed + 1)
        for buffer in buffers:
            buffer[1, :, :total] = values
    ours, theirs = (
        reference.attention(q, *(buffer[1, :, :total] for buffer in buffers)) for buffers in (poisoned, clean)
    )
    assert torch.isfinite(ours).all()
    assert torch.equal(ours, theirs)
    reached = reference.attention(q, *(buffer[1, :, : total + 1] for buffer in poisoned))
    assert torch.isnan(reached).any()


@pytest.mark.parametrize("fault", ["unscaled", "wrong heads", "sees ahead", "sees less"])
def test_faults_of_attention_are_seen(fault: str) -> None:
    q, k, v = 2 * draw(4, 6, 10), draw(2, 37, 10, seed=1), draw(2, 37, 10, seed=2)
    wrong = {
        "unscaled": lambda: reference.attention(q * math.sqrt(10), k, v),
        "wrong heads": lambda: reference.attention(q, k.flip(0), v.flip(0)),
        "sees ahead": lambda: torch.cat([reference.attention(q[i : i + 1], k, v) for i in range(4)]),
        "sees less": lambda: reference.attention(q, k[:, 1:], v[:, 1:]),
    }[fault]()
    exact = attend_by_hand(q.double(), k.double(), v.double())
    assert error(reference.attention(q, k, v), exact) < 1e-6
    assert error(wrong, exact) > 1e-3


def test_a_cache_of_another_type_is_attended_in_the_type_of_the_queries() -> None:
    q, k, v = draw(4, 6, 10), draw(2, 37, 10, seed=1), draw(2, 37, 10, seed=2)
    narrow = reference.attention(q, k.bfloat16(), v.bfloat16())
    assert narrow.dtype == torch.float32
    assert torch.equal(narrow, reference.attention(q, k.bfloat16().float(), v.bfloat16().float()))


def test_scores_of_any_size_keep_the_softmax_finite() -> None:
    q, k, v = 100 * draw(4, 6, 10), 100 * draw(2, 37, 10, seed=1), draw(2, 37, 10, seed=2)
    exact = attend_by_hand(q.double(), k.double(), v.double())
    assert error(reference.attention(q, k, v), exact) < 1e-3


@pytest.mark.parametrize("length", [1, 3, 30])
@pytest.mark.parametrize("part", ["q", "k", "v"])
def test_a_nan_in_what_is_attended_shows_in_the_output(part: str, length: int) -> None:
    parts = {"q": torch.ones(length, 4, 8), "k": torch.ones(2, length, 8), "v": torch.ones(2, length, 8)}
    assert reference.attention(**parts).isfinite().all(), "the control: without it all is finite"
    parts[part].view(-1)[0] = torch.nan
    assert reference.attention(**parts).isnan().any()
