"""Norm, activation, embedding and selection: by the formulas, and row by row."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch
from support_gguf import random_blocks
from support_kernels import draw, error
from support_native import QUANTIZED, every_isa, every_quantized, matrix, on_threads
from torch import Tensor

from fuel_core import _native
from fuel_core.contracts import BLOCK_TYPES, QuantizedTensor
from fuel_core.kernels import reference

SIZES = (1, 7, 16, 33, 576)
every_size = pytest.mark.parametrize("n", SIZES)


def normed(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain


@every_isa
@every_size
@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_a_norm_is_the_formula(eps: float, n: int, isa: str, native: ModuleType) -> None:
    _native.use(isa)
    x, gain = 3 * draw(70, n), 1 + draw(n, seed=1)
    x[3] = 0
    out = native.rms_norm(x, gain, eps)
    assert error(out, normed(x.double(), gain.double(), eps)) <= 1e-6
    assert all(torch.equal(native.rms_norm(x[i : i + 1], gain, eps)[0], out[i]) for i in range(0, 70, 9))
    heads = native.rms_norm(x.view(10, 7, n), gain, eps)
    assert torch.equal(heads, out.view(10, 7, n))
    assert error(out, normed(x.double(), gain.double(), 2 * eps)) > 1e-5 or n > 1


@every_isa
@every_size
def test_an_activation_is_the_formula(n: int, isa: str, native: ModuleType) -> None:
    _native.use(isa)
    gate_up = 30 * draw(9, 2 * n)
    gate_up[1, :n] = torch.linspace(-200, 200, n)
    gate, up = gate_up.double().chunk(2, dim=1)
    out = native.silu_mul(gate_up)
    assert out.shape == (9, n)
    assert error(out, gate * gate.sigmoid() * up) <= 1e-6
    assert error(out, up * up.sigmoid() * gate) > 0.01
    small = native.silu_mul(gate_up / 1000)
    assert error(small, gate / 1000 * (gate / 1000).sigmoid() * up / 1000) <= 1e-6


@every_isa
@pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf])
def test_a_fault_stays_in_its_row_and_is_seen_there(fault: float, isa: str, native: ModuleType) -> None:
    _native.use(isa)
    x, gain = draw(9, 66), 1 + draw(66, seed=1)
    for at in (0, 32, 65):
        bad = x.clone()
        bad[4, at] = fault
        for function in (lambda x: native.rms_norm(x, gain, 1e-5), native.silu_mul):
            out, sound = function(bad), function(x)
            assert not torch.isfinite(out[4]).all()
            others = torch.arange(9) != 4
            assert torch.equal(out[others], sound[others])


def test_the_number_of_threads_changes_no_bit(native: ModuleType) -> None:
    x, gain = draw(301, 700), draw(700, seed=1)
    with on_threads(1):
        expected = native.rms_norm(x, gain, 1e-5), native.silu_mul(x)
    with on_threads(3):
        assert torch.equal(native.rms_norm(x, gain, 1e-5), expected[0])
        assert torch.equal(native.silu_mul(x), expected[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_types_and_gaps_go_to_the_reference(dtype: torch.dtype, native: ModuleType) -> None:
    x, gain = draw(9, 66, dtype=dtype), draw(66, seed=1, dtype=dtype)
    assert torch.equal(native.rms_norm(x, gain, 1e-5), reference.rms_norm(x, gain, 1e-5))
    assert torch.equal(native.silu_mul(x), reference.silu_mul(x))
    gaps = draw(9, 132)[:, ::2]
    assert error(native.rms_norm(gaps, gain.float(), 1e-5), normed(gaps.double(), gain.double(), 1e-5)) < 1e-2
    assert torch.equal(native.rms_norm(gaps, draw(66), 1e-5), reference.rms_norm(gaps, draw(66), 1e-5))
    assert torch.equal(native.silu_mul(gaps), reference.silu_mul(gaps))


# --- embedding


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


@every_quantized
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_an_embedded_row_is_the_row_expanded_to_the_bit(
    dtype: torch.dtype, name: str, native: ModuleType
) -> None:
    block = BLOCK_TYPES[name]
    weight = QuantizedTensor(random_blocks(block, 40, 512), block, 512)
    ids = torch.tensor([39, 0, 7, 7, 20])
    ours, theirs = (kernels.embedding(ids, weight, dtype) for kernels in (native, reference))
    assert ours.dtype == dtype
    assert torch.equal(bits(ours), bits(theirs))
    assert not torch.equal(bits(ours), bits(reference.embedding(ids.flip(0), weight, dtype)))


@pytest.mark.parametrize("name", ["Q2_K", "IQ4_NL", "F32", "BF16", "columns", "rows"])
def test_other_matrices_are_embedded_by_the_reference(name: str, native: ModuleType) -> None:
    weight = matrix(name if name in ("Q2_K", "IQ4_NL", "F32", "BF16") else "Q8_0", 40, 256)
    if isinstance(weight, QuantizedTensor) and name == "columns":  # rows that lie apart
        weight = QuantizedTensor(weight.data[:, :136], weight.block_type, 128)
    elif isinstance(weight, QuantizedTensor) and name == "rows":
        weight = weight.select_rows(slice(3, None, 2))
    ids = torch.tensor([3, 0, 17])
    assert torch.equal(
        native.embedding(ids, weight, torch.float32), reference.embedding(ids, weight, torch.float32)
    )


def test_the_formats_here_are_all_that_the_kernels_name() -> None:
    assert {*QUANTIZED, "F32", "BF16", "F16"} == {kind.name for kind in _native.Kind}
