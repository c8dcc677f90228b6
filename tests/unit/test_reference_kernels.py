"""The reference kernels for norm, activation and products against float64 arithmetic by hand."""

from __future__ import annotations

import gguf
import pytest
import torch
from support_gguf import random_blocks
from support_kernels import NARROW, check, draw, error, every_dtype, norm_by_hand
from torch import Tensor

from fuel_core.contracts import BLOCK_TYPES, QuantizedTensor
from fuel_core.kernels import reference
from fuel_core.kernels.reference.linear import _TILE_VALUES

# Norm and activation.


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


@pytest.mark.parametrize("stored", list(NARROW), ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_linear_of_a_matrix_of_another_type_computes_in_the_type_of_its_input(
    stored: torch.dtype, bias: bool
) -> None:
    x, weight = draw(5, 51), draw(19, 51, seed=1).to(stored)
    offset = draw(19, seed=2) if bias else None
    ours = reference.linear(x, weight, offset)
    assert ours.dtype == torch.float32
    check(ours, product_by_hand, x, weight, offset)


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


@pytest.mark.parametrize("stored", list(NARROW), ids=str)
def test_a_matrix_of_another_type_and_of_many_tiles_is_the_same_product(stored: torch.dtype) -> None:
    columns = 2048
    weight = draw(2 * (_TILE_VALUES // columns) + 37, columns).to(stored)
    x = draw(3, columns, seed=1)
    assert error(reference.linear(x, weight), x.double() @ weight.double().T) < 2e-6


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
@pytest.mark.parametrize("name", ["F32", "BF16", "Q4_1", "Q8_0"])
def test_embedding_is_the_rows_that_the_ids_name(name: str, dtype: torch.dtype) -> None:
    values = draw(23, 64)
    weight = {"F32": values, "BF16": values.bfloat16()}.get(name)
    weight = quantize(values, name) if weight is None else weight
    table = weight.float() if isinstance(weight, Tensor) else values_of(weight)
    ids = torch.tensor([22, 0, 0, 7])
    ours = reference.embedding(ids, weight, dtype)
    assert ours.dtype == dtype
    assert torch.equal(ours, torch.stack([table[i] for i in ids]).to(dtype))
    assert not torch.equal(ours, table[ids.flip(0)].to(dtype))
