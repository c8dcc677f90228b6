"""The reference kernels against float64 arithmetic written out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gguf
import pytest
import torch
from support_gguf import random_blocks
from torch import Tensor

from fuel_core.contracts import BLOCK_TYPES, QuantizedTensor
from fuel_core.kernels import reference
from fuel_core.kernels.reference.linear import _TILE_VALUES

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


# Norm and activation.


def norm_by_hand(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x)
    for place in range(x.numel() // x.shape[-1]):
        row = x.reshape(-1, x.shape[-1])[place]
        total = sum((value * value for value in row), start=torch.zeros((), dtype=x.dtype))
        out.view(-1, x.shape[-1])[place] = row / (total / len(row) + eps).sqrt() * gain
    return out


@every_dtype
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
@pytest.mark.parametrize("shape", [(1, 1), (3, 51), (2, 3, 10)], ids=str)
def test_rms_norm_is_the_formula(shape: tuple[int, ...], eps: float, dtype: torch.dtype) -> None:
    x, gain = draw(*shape, dtype=dtype), 1 + draw(shape[-1], seed=1, dtype=dtype)
    ours = reference.rms_norm(x, gain, eps)
    assert ours.dtype == dtype
    check(ours, norm_by_hand, x, gain, eps)


def test_an_epsilon_of_another_size_is_seen() -> None:
    x, gain = draw(3, 51), torch.ones(51)
    with pytest.raises(AssertionError):
        check(reference.rms_norm(x, gain, 1e-4), norm_by_hand, x, gain, 1e-6)


@pytest.mark.parametrize("scale", [1e-12, 1e15])
def test_rms_norm_of_the_very_small_and_large_is_finite(scale: float) -> None:
    x, gain = draw(2, 40) * scale, torch.ones(40)
    check(reference.rms_norm(x, gain, 1e-30), norm_by_hand, x, gain, 1e-30)


def test_rms_norm_of_large_halves_does_not_overflow_in_the_square() -> None:
    x = torch.full((1, 64), 6e4, dtype=torch.float16)
    assert torch.equal(reference.rms_norm(x, torch.ones(64, dtype=torch.float16), 1e-6), torch.ones_like(x))


def gate_by_hand(gate_up: Tensor) -> Tensor:
    half = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :half], gate_up[..., half:]
    return gate / (1 + torch.exp(-gate)) * up


@every_dtype
@pytest.mark.parametrize("shape", [(1, 2), (5, 70), (3, 2 * 257)], ids=str)
def test_silu_mul_is_the_formula_with_the_gate_first(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = 3 * draw(*shape, dtype=dtype)
    ours = reference.silu_mul(x)
    assert ours.dtype == dtype
    check(ours, gate_by_hand, x)


def test_up_before_gate_is_seen() -> None:
    x = 3 * draw(5, 70)
    with pytest.raises(AssertionError):
        check(reference.silu_mul(x.roll(35, -1)), gate_by_hand, x)


# Products.


def product_by_hand(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = (x[:, None, :] * weight[None]).sum(-1)
    return out if bias is None else out + bias


def blocks_of(name: str, rows: int, columns: int, seed: int = 0) -> tuple[QuantizedTensor, Tensor]:
    """A matrix of small random blocks, and its values as the ``gguf`` library expands them, in float64."""
    block = BLOCK_TYPES[name]
    data = random_blocks(block, rows, columns, seed)
    values = torch.from_numpy(gguf.quants.dequantize(data.numpy(), gguf.GGMLQuantizationType[name]))
    return QuantizedTensor(data, block, columns), values.double()


@every_dtype
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 51), (97, 64)])
def test_linear_of_a_plain_matrix_is_the_formula(
    rows: int, columns: int, bias: bool, dtype: torch.dtype
) -> None:
    x, weight = draw(5, columns, dtype=dtype), draw(rows, columns, seed=1, dtype=dtype)
    offset = draw(rows, seed=2, dtype=dtype) if bias else None
    ours = reference.linear(x, weight, offset)
    assert ours.dtype == dtype
    check(ours, product_by_hand, x, weight, offset)
    if offset is not None:
        with pytest.raises(AssertionError):
            check(reference.linear(x, weight), product_by_hand, x, weight, offset)


@pytest.mark.parametrize("name", [name for name, block in BLOCK_TYPES.items() if block.length > 1])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_linear_of_blocks_is_the_formula_on_what_the_blocks_stand_for(name: str, bias: bool) -> None:
    weight, values = blocks_of(name, 19, 512)
    # Random halves are of any size; rows of one size are compared with one another.
    scale = values.abs().amax(dim=1)
    x = draw(4, 512)
    offset = draw(19, seed=2) * scale.float() if bias else None
    ours = reference.linear(x, weight, offset).double() / scale
    exact = product_by_hand(x.double(), values, None if offset is None else offset.double()) / scale
    assert error(ours, exact) < 2e-6
    other = product_by_hand(x.double(), values.roll(1, 0), None) / scale
    assert error(other, exact) > 1e-2


@pytest.mark.parametrize("dtype", list(NARROW), ids=str)
def test_linear_of_blocks_computes_in_the_type_of_its_input(dtype: torch.dtype) -> None:
    weight, _ = blocks_of("Q8_0", 19, 64)
    tame = quantize(draw(19, 64, seed=3))
    x = draw(4, 64, dtype=dtype)
    ours = reference.linear(x, tame)
    assert ours.dtype == dtype
    exact = product_by_hand(x.double(), values_of(tame).double(), None)
    assert error(ours, exact) <= 4 * NARROW[dtype]
    assert weight.shape == tame.shape


def quantize(values: Tensor, name: str = "Q8_0") -> QuantizedTensor:
    data = gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType[name])
    return QuantizedTensor(torch.from_numpy(data), BLOCK_TYPES[name], values.shape[1])


def values_of(weight: QuantizedTensor) -> Tensor:
    kind = gguf.GGMLQuantizationType[weight.block_type.name]
    return torch.from_numpy(gguf.quants.dequantize(weight.data.numpy(), kind))


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_a_matrix_of_many_tiles_is_the_same_product(bias: bool) -> None:
    columns = 2048
    rows = 2 * (_TILE_VALUES // columns) + 37  # two whole tiles and a ragged one
    assert rows * columns > _TILE_VALUES
    block = BLOCK_TYPES["Q8_0"]
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, 256, (rows, columns // 32, 34), generator=generator, dtype=torch.uint8)
    data[:, :, :2] = torch.tensor([0, 0x1C], dtype=torch.uint8)  # a scale of 1/256
    weight = QuantizedTensor(data.view(rows, -1), block, columns)
    x = draw(3, columns)
    offset = 100 * draw(rows, seed=1) if bias else None
    ours = reference.linear(x, weight, offset)
    quants = data[:, :, 2:].contiguous().view(torch.int8).view(rows, columns)
    exact = x.double() @ quants.double().T / 256
    exact = exact if offset is None else exact + offset.double()
    assert error(ours, exact) < 2e-6
    for row in (0, 2047, 2048, 4095, 4096, rows - 1):  # the seams, summed by hand
        by_hand = (x.double() * quants[row].double()).sum(-1) / 256 + (0 if offset is None else offset[row])
        assert float((ours[:, row].double() - by_hand).abs().max() / exact.abs().max()) < 2e-6


def test_a_row_wider_than_a_tile_is_a_tile_of_its_own() -> None:
    columns = _TILE_VALUES + 32
    data = torch.zeros(3, columns // 32, 34, dtype=torch.uint8)
    data[:, :, 1] = 0x3C  # a scale of 1
    data[:, -1, -1] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    weight = QuantizedTensor(data.view(3, -1), BLOCK_TYPES["Q8_0"], columns)
    x = torch.zeros(1, columns)
    x[0, -1] = 2.0
    assert reference.linear(x, weight).tolist() == [[2.0, 4.0, 6.0]]


def test_inputs_of_any_stride_and_leading_shape_give_the_same_product() -> None:
    weight = quantize(draw(19, 64, seed=3))
    x = draw(6, 128)[::2, ::2]
    ours = reference.linear(x, weight)
    assert torch.allclose(ours, reference.linear(x.contiguous(), weight), atol=1e-5)
    assert torch.allclose(reference.linear(x[None], weight)[0], ours, atol=1e-5)


@every_dtype
@pytest.mark.parametrize("name", [None, "Q4_1", "Q8_0"])
def test_embedding_is_the_rows_that_the_ids_name(name: str | None, dtype: torch.dtype) -> None:
    values = draw(23, 64)
    weight = values if name is None else quantize(values, name)
    table = values if isinstance(weight, Tensor) else values_of(weight)
    ids = torch.tensor([22, 0, 0, 7])
    ours = reference.embedding(ids, weight, dtype)
    assert ours.dtype == dtype
    assert torch.equal(ours, torch.stack([table[i] for i in ids]).to(dtype))
    assert not torch.equal(ours, table[ids.flip(0)].to(dtype))


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
