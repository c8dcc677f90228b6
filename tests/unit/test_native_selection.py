"""The native selection takes the tokens that the reference takes, on every instruction set, row by row."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_native import every_isa, on_threads
from torch import Tensor

from fuel_core import _native
from fuel_core.contracts import SamplingParams
from fuel_core.kernels import native, reference

pytestmark = pytest.mark.usefixtures("native")

VOCABULARIES = (1, 2, 7, 8, 9, 63, 64, 65, 130, 1000, 4099)
FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 2},
    {"top_k": 40},
    {"top_k": 1500},
    {"top_p": 1e-300},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.01},
]


def logits_of(rows: int, vocab: int, seed: int, *, tied: bool = False) -> Tensor:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 4  # [rows, vocab]
    return logits.round() if tied else logits


def uniforms(count: int, seed: int = 0) -> list[float]:
    inner = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).tolist()
    return [0.0, 1 - 2.0**-53, *inner][:count]


def params(temperature: float = 0.8, **filters: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, **filters)  # type: ignore[arg-type]


def both(logits: Tensor, rows: list[SamplingParams], numbers: list[float]) -> tuple[Tensor, Tensor]:
    return native.draw(logits, rows, numbers), reference.draw(logits, rows, numbers)


@every_isa
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_draw_is_that_of_the_reference(filters: dict[str, float], dtype: torch.dtype, isa: str) -> None:
    _native.use(isa)
    for at, vocab in enumerate(VOCABULARIES):
        logits = logits_of(40, vocab, at, tied=at % 2 == 1).to(dtype)
        ours, expected = both(logits, [params(**filters)] * 40, uniforms(40, at))
        assert torch.equal(ours, expected), vocab


def test_another_number_another_filter_and_another_temperature_draw_otherwise() -> None:
    logits, numbers = logits_of(200, 300, 0), uniforms(200)
    drawn = native.draw(logits, [params()] * 200, numbers)
    for other in (params(top_k=20), params(top_p=0.9), params(min_p=0.1), params(0.7)):
        assert not torch.equal(native.draw(logits, [other] * 200, numbers), drawn)
    assert not torch.equal(native.draw(logits, [params()] * 200, numbers[::-1]), drawn)


@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.integers(1, 700),
    temperature=st.floats(1e-3, 5),
    top_k=st.integers(0, 800),
    top_p=st.floats(1e-6, 1),
    min_p=st.floats(0, 1),
    tied=st.booleans(),
    banned=st.floats(0, 0.9),
)
@settings(max_examples=200, deadline=None)
def test_any_filters_draw_what_the_reference_draws(
    seed: int,
    vocab: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    tied: bool,
    banned: float,
) -> None:
    logits = logits_of(5, vocab, seed, tied=tied)
    mask = torch.rand(5, vocab, generator=torch.Generator().manual_seed(seed)) < banned
    logits = logits.masked_fill(mask, -torch.inf)
    logits[:, 0] = 1
    rows = [params(temperature, top_k=top_k, top_p=top_p, min_p=min_p)] * 5
    ours, expected = both(logits, rows, uniforms(5, seed))
    assert torch.equal(ours, expected)


@every_isa
def test_rows_of_their_own_filters_are_drawn_as_alone_on_any_number_of_threads(isa: str) -> None:
    _native.use(isa)
    logits, numbers = logits_of(22, 5000, 1), uniforms(22)
    rows = [params(0.5 + at / 20, **filters) for at, filters in enumerate(FILTERS * 2)]
    alone = torch.cat([native.draw(logits[at : at + 1], [rows[at]], [numbers[at]]) for at in range(22)])
    for count in (1, 2, 3):
        with on_threads(count):
            assert torch.equal(native.draw(logits, rows, numbers), alone)
    assert torch.equal(alone, reference.draw(logits, rows, numbers))


@every_isa
@pytest.mark.parametrize(("top_p", "last"), [(0.5, 0), (0.5 + 2.0**-40, 2)])
def test_tokens_that_reach_the_mass_exactly_are_enough(top_p: float, last: int, isa: str) -> None:
    _native.use(isa)
    logits = torch.tensor([[0.0, -math.log(2), -math.log(2)]], dtype=torch.float64)
    numbers = [1 - 2.0**-53]
    ours, expected = both(logits, [params(1.0, top_p=top_p)], numbers)
    assert ours.tolist() == expected.tolist() == [last]


@pytest.mark.parametrize("temperature", [1e-300, 1e-9, 1e6])
def test_no_temperature_overflows(temperature: float) -> None:
    logits = logits_of(30, 500, 2) * 1e30
    assert torch.equal(*both(logits, [params(temperature)] * 30, uniforms(30)))


@every_isa
@pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_a_faulty_row_gives_some_id_and_leaves_the_others(
    fault: float, filters: dict[str, float], isa: str
) -> None:
    _native.use(isa)
    logits, numbers, rows = logits_of(9, 400, 3), uniforms(9), [params(**filters)] * 9
    sound = native.draw(logits, rows, numbers)
    logits[4, :: 2 if math.isnan(fault) else 1] = fault
    drawn = native.draw(logits, rows, numbers)
    assert 0 <= drawn[4] < 400
    drawn[4] = sound[4]
    assert torch.equal(drawn, sound)


@every_isa
def test_the_largest_is_that_of_pytorch(isa: str) -> None:
    _native.use(isa)
    for at, vocab in enumerate(VOCABULARIES):
        logits = logits_of(12, vocab, at, tied=True)
        logits[1], logits[2] = -torch.inf, 0.0
        logits[3, vocab // 2] = torch.inf
        logits[4, vocab // 3 :] = torch.nan
        logits[5, -1] = torch.nan
        ids, values = native.largest(logits)
        assert torch.equal(ids, logits.argmax(-1)), vocab
        expected = logits.gather(1, ids[:, None])[:, 0]
        torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)


@every_isa
@pytest.mark.parametrize("other", [math.inf, -math.inf, 0.0])
def test_a_nan_is_larger_than_all_and_an_infinity_than_all_numbers(other: float, isa: str) -> None:
    _native.use(isa)
    for at in (0, 5, 16, 32):
        logits = logits_of(3, 33, at)
        logits[0, at], logits[0, (at + 1) % 33], logits[0, 20] = math.nan, math.inf, other
        logits[1, at] = math.inf
        logits[2] = -math.inf
        logits[2, at] = math.nan
        assert torch.equal(native.largest(logits)[0], torch.tensor([at, at, at]))


def test_what_the_kernels_do_not_take_goes_to_the_reference() -> None:
    logits = logits_of(6, 50, 4)
    numbers = uniforms(6)
    turned = logits.T.contiguous().T
    assert torch.equal(native.largest(turned)[0], logits.argmax(-1))
    assert torch.equal(native.largest(logits.double())[0], logits.argmax(-1))
    assert torch.equal(
        native.draw(turned, [params()] * 6, numbers), native.draw(logits, [params()] * 6, numbers)
    )
