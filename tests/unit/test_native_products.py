"""The native products are what float64 makes of the same weights, on every instruction set, row by row."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support_kernels import draw
from support_native import (
    FORMATS,
    PLAIN,
    ROUNDING,
    Weight,
    alone,
    as_bytes,
    every_format,
    every_isa,
    every_quantized,
    exact_inputs,
    inputs,
    loss,
    matrix,
    on_threads,
    tiles,
    truth,
    unit,
)
from torch import Tensor

from fuel_core import _native
from fuel_core.contracts import QuantizedTensor
from fuel_core.kernels.native import tiled_product
from fuel_core.kernels.reference import product as reference_product
from fuel_core.kernels.reference.linear import PlainProduct

pytestmark = pytest.mark.usefixtures("native")

ROWS = (1, 15, 16, 17, 37)
COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 31, 96, 97, 100)


def columns_of(name: str) -> tuple[int, ...]:
    """One block, some, and more than are unpacked at a time; for plain weights also what no block divides."""
    if name in PLAIN:
        return 1, 7, 32, 77, 300, 600
    return (256, 512, 1536) if unit(name) == 256 else (32, 96, 1056)


def shapes(name: str) -> list[tuple[int, int, int]]:
    """Rows of the matrix, columns, and rows of the input: each with some of the others."""
    every = columns_of(name)
    return [
        (ROWS[at % len(ROWS)], every[(at + at // len(every)) % len(every)], count)
        for at, count in enumerate(COUNTS * 2)
    ]


@every_isa
@every_format
def test_a_product_is_that_of_float64(name: str, isa: str) -> None:
    _native.use(isa)
    for rows, columns, count in shapes(name):
        weight, x = matrix(name, rows, columns, rows), exact_inputs(count, columns, count)
        assert loss(tiles(weight)(x), truth(x, weight), x, weight) <= ROUNDING, (rows, columns, count)


@every_isa
@every_quantized
def test_inputs_are_rounded_to_a_byte(name: str, isa: str) -> None:
    _native.use(isa)
    weight, x = matrix(name, 37, 512), inputs(9, 512)
    out = tiles(weight)(x)
    assert loss(truth(as_bytes(x), weight), truth(x, weight), x, weight) > 100 * ROUNDING
    assert loss(out, truth(as_bytes(x), weight), x, weight) <= ROUNDING
    assert loss(out, truth(x, weight), x, weight) < 0.02


@pytest.mark.parametrize("name", PLAIN)
def test_plain_weights_round_no_input(name: str) -> None:
    weight, x = matrix(name, 37, 500), inputs(9, 500)
    assert loss(tiles(weight)(x), truth(x, weight), x, weight) <= ROUNDING


def nibbles_swapped(weight: QuantizedTensor) -> QuantizedTensor:
    data = weight.data.clone().view(-1, weight.block_type.bytes)
    half = slice(data.shape[1] // 2, data.shape[1] // 2 + 8)  # of each format's quants some
    data[:, half] = data[:, half] << 4 | data[:, half] >> 4
    return QuantizedTensor(data.view(weight.data.shape), weight.block_type, weight.columns)


def rows_shifted(weight: QuantizedTensor) -> QuantizedTensor:
    return QuantizedTensor(weight.data.roll(1, 0), weight.block_type, weight.columns)


def one_scale_off(weight: QuantizedTensor) -> QuantizedTensor:
    data = weight.data.clone().view(-1, weight.block_type.bytes)
    at = 209 if weight.block_type.name == "Q6_K" else 1
    data[0, at] ^= 4  # a bit of the exponent of one block's scale
    return QuantizedTensor(data.view(weight.data.shape), weight.block_type, weight.columns)


@every_quantized
@pytest.mark.parametrize("fault", [nibbles_swapped, rows_shifted, one_scale_off])
def test_faults_of_the_weights_are_seen(name: str, fault: object) -> None:
    assert callable(fault)
    weight, x = matrix(name, 37, 512), exact_inputs(5, 512)
    assert isinstance(weight, QuantizedTensor)
    assert loss(tiles(fault(weight))(x), truth(x, weight), x, weight) > 1000 * ROUNDING


# --- several maps


@every_isa
def test_maps_of_any_formats_stand_side_by_side_each_with_its_bias(isa: str) -> None:
    _native.use(isa)
    weights = [matrix(name, 3 + 7 * at, 512, at) for at, name in enumerate(FORMATS)]
    biases = [draw(w.shape[0], seed=at) if at % 3 else None for at, w in enumerate(weights)]
    x = exact_inputs(6, 512)
    out = tiles(*weights, biases=biases)(x)
    expected = [
        truth(x, w) + (0 if bias is None else bias.double()) for w, bias in zip(weights, biases, strict=True)
    ]
    assert loss(out, torch.cat(expected, dim=1), x, *weights) <= ROUNDING
    each = [tiles(w, biases=[bias])(x) for w, bias in zip(weights, biases, strict=True)]
    assert torch.equal(out, torch.cat(each, dim=1))


def test_a_bias_of_a_narrow_type_is_added_in_float32() -> None:
    weight, x, bias = matrix("BF16", 5, 40), exact_inputs(3, 40), draw(5, dtype=torch.bfloat16)
    out = tiles(weight, biases=[bias])(x)
    assert loss(out, truth(x, weight) + bias.double(), x, weight) <= ROUNDING
    assert loss(tiles(weight)(x), truth(x, weight) + bias.double(), x, weight) > 1000 * ROUNDING


# --- a row depends on its own input alone


@every_isa
@every_format
def test_a_row_is_the_same_to_the_bit_alone_and_in_any_company(name: str, isa: str) -> None:
    _native.use(isa)
    product, x = tiles(matrix(name, 21, columns_of(name)[-1])), inputs(100, columns_of(name)[-1])
    expected = alone(product, x)
    for count in range(1, 101):
        assert torch.equal(product(x[:count]), expected[:count]), count
    assert torch.equal(product(x.flip(0)), expected.flip(0))


@every_format
def test_the_number_of_threads_changes_no_bit(name: str) -> None:
    product = tiles(matrix(name, 333, 512), matrix("Q8_0", 50, 512))
    for count in (1, 6, 100):
        x = inputs(count, 512)
        with on_threads(1):
            expected = product(x)
        for threads in (2, 3, 4):
            with on_threads(threads):
                assert all(torch.equal(product(x), expected) for _ in range(3))


@every_isa
@every_format
@pytest.mark.parametrize("fault", [torch.nan, torch.inf, -torch.inf])
def test_a_fault_in_a_row_is_in_all_of_its_results_and_in_no_others(
    name: str, isa: str, fault: float
) -> None:
    _native.use(isa)
    product = tiles(matrix(name, 37, 512))
    for count in (1, 2, 5, 14, 98):
        x = inputs(count, 512)
        sound, at = product(x), count // 2
        x[at, 300] = fault
        out = product(x)
        assert not torch.isfinite(out[at]).any()
        assert torch.isnan(out[at]).all() or name in PLAIN
        others = torch.arange(count) != at
        assert torch.equal(out[others], sound[others])


# --- sizes


@every_isa
@every_format
def test_zeros_give_zero_or_the_bias(name: str, isa: str) -> None:
    _native.use(isa)
    weight, bias = matrix(name, 19, 256), draw(19)
    x = exact_inputs(7, 256)
    x[3] = 0
    assert not tiles(weight)(x)[3].any()
    assert torch.equal(tiles(weight, biases=[bias])(x)[3], bias)
    x[2, 64:192] = 0  # whole blocks of a row
    assert loss(tiles(weight)(x), truth(x, weight), x, weight) <= ROUNDING


@every_isa
@every_format
def test_inputs_too_small_to_divide_by_are_as_good_as_nothing(name: str, isa: str) -> None:
    _native.use(isa)
    weight, x = matrix(name, 19, 256), exact_inputs(5, 256)
    x[1:3] *= 1e-42
    x[3, :96] = 1e-42
    out = tiles(weight)(x)
    assert out[1:3].abs().max() < 1e-35
    assert loss(out, truth(x, weight), x, weight) <= ROUNDING


@every_isa
@every_format
@pytest.mark.parametrize("power", [-80, 80])
def test_the_size_of_the_inputs_is_that_of_the_results(name: str, isa: str, power: int) -> None:
    _native.use(isa)
    product, x = tiles(matrix(name, 19, 256)), exact_inputs(5, 256)
    assert torch.equal(product(x * 2.0**power), product(x) * 2.0**power)


def test_scales_that_are_zero_subnormal_or_huge_are_taken_as_they_are() -> None:
    from support_gguf import random_blocks

    from fuel_core.contracts import BLOCK_TYPES

    for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"):
        weight = QuantizedTensor(random_blocks(BLOCK_TYPES[name], 40, 256, 3), BLOCK_TYPES[name], 256)
        x = exact_inputs(3, 256)
        out, exact = tiles(weight)(x), truth(x, weight)
        size = exact.abs().amax(0) + 1e-30  # of each row of weights, which differ by powers of ten
        assert ((out.double() - exact).abs() / size).max() < 1e-4, name


# --- what is taken


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["Q4_1", "F16"])
def test_results_are_in_the_type_of_the_inputs(name: str, dtype: torch.dtype) -> None:
    product, x = tiles(matrix(name, 37, 96)), draw(5, 96, dtype=dtype)
    out = product(x)
    assert out.dtype == dtype
    assert torch.equal(out, product(x.float()).to(dtype))


def test_inputs_and_weights_with_gaps_are_read_where_they_lie() -> None:
    x, weight = draw(5, 128), draw(96, 37)
    gaps = x[:, ::2][:, :64]
    product = tiles(draw(9, 64))
    assert torch.equal(product(gaps), product(gaps.contiguous()))
    assert torch.equal(tiles(weight.T)(x[:, :96]), tiles(weight.T.contiguous())(x[:, :96].contiguous()))


@every_format
def test_a_product_needs_its_weights_no_more(name: str) -> None:
    weight, x = matrix(name, 37, 512), inputs(5, 512)
    product = tiles(weight)
    before = product(x)
    (weight if isinstance(weight, Tensor) else weight.data).zero_()
    assert torch.equal(product(x), before)


def test_the_pages_of_a_mapped_file_can_be_read_again(tmp_path: Path) -> None:
    values = draw(64, 512)
    (tmp_path / "weights").write_bytes(values.numpy().tobytes())
    mapped = torch.from_file(str(tmp_path / "weights"), size=64 * 512).view(64, 512)
    x = inputs(5, 512)
    assert torch.equal(tiles(mapped)(x), tiles(values)(x))
    assert torch.equal(mapped, values)
    assert torch.equal(tiles(mapped[3:50])(x), tiles(values[3:50])(x))


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "IQ4_NL", "float64"])
@pytest.mark.parametrize("fused", [False, True])
def test_formats_that_they_do_not_have_are_multiplied_by_the_reference(name: str, fused: bool) -> None:
    odd: Weight = draw(7, 256, dtype=torch.float64) if name == "float64" else matrix(name, 7, 256)
    weights = [matrix("Q4_0", 5, 256), odd] if fused else [odd]
    biases = [None] * len(weights)
    x, product = inputs(3, 256), tiled_product(weights, biases)
    assert isinstance(product, PlainProduct)
    assert torch.equal(product(x), reference_product(weights, biases)(x))


def test_rows_that_are_no_whole_number_of_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="whole number of blocks"):
        _native.Matrix(48).add(_native.Kind.Q4_0, 0, 1)
