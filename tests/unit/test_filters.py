"""The filters keep the sets that Transformers' warpers keep, ties included, and weigh exactly."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as oracle

from fuel_core.contracts import SamplingParams
from fuel_core.kernels.reference.selection import RowFilters, draw_weighted, kept_weights, scale

CPU = torch.device("cpu")
LARGEST_UNIFORM = 1 - 2.0**-53


def random_logits(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2  # [rows, vocab]


def tied_logits(rows: int, vocab: int) -> Tensor:
    return random_logits(rows, vocab, seed=1).round_()  # about 15 different values


def weigh(logits: Tensor, *params: SamplingParams, **options: Any) -> Tensor:
    """The weights of float32 ``[R, V]``, with one set of parameters per row, or one for all."""
    rows = params if len(params) == len(logits) else params * len(logits)
    return kept_weights(logits.double(), RowFilters.of(rows, logits.shape[1], CPU), **options)


def kept(logits: Tensor, **params: Any) -> Tensor:
    return weigh(logits, SamplingParams(**{"temperature": 1.0, **params})) > 0


def kept_by(warper: Callable[..., Tensor], logits: Tensor) -> Tensor:
    return warper(None, logits.clone()) > -torch.inf


def with_ties(mask: Tensor, logits: Tensor) -> Tensor:
    """``mask`` and every token whose logit equals one in it."""
    smallest = logits.masked_fill(~mask, torch.inf).amin(-1, keepdim=True)
    return logits >= smallest


@pytest.mark.parametrize("k", [1, 2, 17, 199, 200, 5000])
@pytest.mark.parametrize("make", [random_logits, tied_logits])
def test_top_k_keeps_what_transformers_keeps(k: int, make: Callable[[int, int], Tensor]) -> None:
    logits = make(50, 200)
    assert torch.equal(kept(logits, top_k=k), kept_by(oracle.TopKLogitsWarper(k), logits))


def test_another_k_is_told_apart() -> None:
    logits = random_logits(50, 200)
    assert not torch.equal(kept(logits, top_k=18), kept_by(oracle.TopKLogitsWarper(17), logits))


@pytest.mark.parametrize("p", [1e-300, 1e-4, 0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("make", [random_logits, tied_logits])
def test_top_p_keeps_what_transformers_keeps_and_its_ties(
    p: float, make: Callable[[int, int], Tensor]
) -> None:
    logits = make(50, 200)
    expected = with_ties(kept_by(oracle.TopPLogitsWarper(p), logits), logits)
    assert torch.equal(kept(logits, top_p=p), expected)


def test_another_p_is_told_apart() -> None:
    logits = random_logits(50, 200)
    assert not torch.equal(kept(logits, top_p=0.92), kept_by(oracle.TopPLogitsWarper(0.9), logits))


def test_transformers_keeps_only_some_of_the_ties_in_top_p() -> None:
    logits = tied_logits(50, 200)
    some = kept_by(oracle.TopPLogitsWarper(0.5), logits)
    assert not torch.equal(with_ties(some, logits), some)


@pytest.mark.parametrize("p", [1e-4, 0.02, 0.5, 1.0])
@pytest.mark.parametrize("make", [random_logits, tied_logits])
def test_min_p_keeps_what_transformers_keeps(p: float, make: Callable[[int, int], Tensor]) -> None:
    logits = make(50, 200)
    assert torch.equal(kept(logits, min_p=p), kept_by(oracle.MinPLogitsWarper(p), logits))


def test_another_min_p_is_told_apart() -> None:
    logits = random_logits(50, 200)
    assert not torch.equal(kept(logits, min_p=0.03), kept_by(oracle.MinPLogitsWarper(0.02), logits))


def test_the_filters_in_a_row_keep_what_transformers_keeps_in_its_order() -> None:
    logits = random_logits(200, 200)
    scores = oracle.TemperatureLogitsWarper(1.7)(None, logits)
    scores = oracle.TopKLogitsWarper(40)(None, scores)
    scores = oracle.TopPLogitsWarper(0.9)(None, scores)
    scores = oracle.MinPLogitsWarper(0.11)(None, scores)
    ours = kept(logits, temperature=1.7, top_k=40, top_p=0.9, min_p=0.11)
    assert torch.equal(ours, scores > -torch.inf)
    by_top_p = kept(logits, temperature=1.7, top_k=40, top_p=0.9).sum(-1)
    by_min_p = kept(logits, temperature=1.7, top_k=40, min_p=0.11).sum(-1)
    assert (by_top_p < by_min_p).any(), "top_p decides some rows"
    assert (by_min_p < by_top_p).any(), "min_p decides others"


def test_top_p_counts_the_mass_that_top_k_has_left() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert kept(logits, top_k=2, top_p=0.5).tolist() == [[True, False, False, False]]
    assert kept(logits, top_p=0.5).tolist() == [[True, True, False, False]]


def test_top_p_adds_tokens_until_the_mass_is_reached_and_not_passed() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log2()
    params = {"temperature": 1 / math.log(2)}  # weights are powers of two, and their sums exact shares
    assert kept(logits, top_p=0.5, **params).sum() == 1
    assert kept(logits, top_p=0.5001, **params).sum() == 2
    assert kept(logits, top_p=0.76, **params).sum() == 4, "the two smallest are a tie"


@pytest.mark.parametrize("p", [1e-4, 0.3, 0.9, 0.999999])
@pytest.mark.parametrize("k", [0, 60])
def test_top_p_does_not_depend_on_how_many_it_looks_at_first(p: float, k: int) -> None:
    logits = torch.cat([random_logits(20, 3000), tied_logits(20, 3000), torch.zeros(1, 3000)])
    params = SamplingParams(temperature=1.3, top_p=p, top_k=k)
    whole = weigh(logits, params, selection=3000)
    for selection in (1, 7, 512, 10**6):
        assert torch.equal(weigh(logits, params, selection=selection), whole)


def test_a_selection_of_one_is_too_small_for_these_rows() -> None:
    logits = random_logits(20, 3000)
    assert (kept(logits, temperature=1.3, top_p=0.9).sum(-1) > 256).all(), "two rounds or more are needed"


def test_rows_with_their_own_filters_equal_rows_alone() -> None:
    logits = torch.cat([random_logits(4, 4001), tied_logits(3, 4001)])
    params = [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.0, top_k=5),
        SamplingParams(temperature=2.0, top_p=0.8),
        SamplingParams(temperature=1.1, top_k=900, top_p=0.95, min_p=0.001),
        SamplingParams(temperature=1e-4, min_p=0.5),
        SamplingParams(temperature=1e6, top_k=4000),
        SamplingParams(temperature=0.9, top_p=1e-4),
    ]
    together = weigh(logits, *params)
    for row, one in enumerate(params):
        assert torch.equal(weigh(logits[row : row + 1], one)[0], together[row])


def test_weights_do_not_depend_on_the_rows_beside_them_at_a_real_vocabulary() -> None:
    logits = random_logits(7, 49_153) * 2
    params = SamplingParams(temperature=0.8, top_p=0.95)
    together = weigh(logits, params)
    for row in range(7):
        assert torch.equal(weigh(logits[row : row + 1].clone(), params)[0], together[row])


def test_sums_of_weights_are_exact_in_any_order() -> None:
    logits = random_logits(3, 100_000)
    weights = weigh(logits, SamplingParams(temperature=0.8))
    shuffled = weights[:, torch.randperm(100_000, generator=torch.Generator().manual_seed(0))]
    exact = [sum(int(value) for value in row) for row in weights.tolist()]
    assert all(total < 2**53 for total in exact)
    assert shuffled.cumsum(-1)[:, -1].tolist() == exact == weights.sum(-1).tolist()


def test_sums_of_plain_probabilities_are_not() -> None:
    probabilities = random_logits(3, 100_000).double().softmax(-1)
    shuffled = probabilities[:, torch.randperm(100_000, generator=torch.Generator().manual_seed(0))]
    assert not torch.equal(shuffled.cumsum(-1)[:, -1], probabilities.cumsum(-1)[:, -1])


@pytest.mark.parametrize("vocab", [1, 2, 255, 256, 49_152, 151_936, 262_144])
def test_a_row_of_equal_logits_stays_below_2_to_the_53(vocab: int) -> None:
    assert scale(vocab) * vocab <= 2**53
    assert scale(vocab) * vocab >= 2**52, "no resolution is given away"


def test_weights_are_the_softmax_up_to_their_resolution() -> None:
    logits = random_logits(5, 1000)
    weights = weigh(logits, SamplingParams(temperature=0.6))
    expected = (logits.double() / 0.6).softmax(-1)
    ours = weights / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(ours, expected, rtol=0, atol=500 / scale(1000))


@pytest.mark.parametrize("params", [{"temperature": 1e-4}, {"temperature": 1e-300}, {"top_p": 1e-4}])
def test_extreme_parameters_are_nearly_greedy_and_finite(params: dict[str, float]) -> None:
    logits = random_logits(50, 200)
    weights = weigh(logits, SamplingParams(**{"temperature": 1.0, **params}))
    assert weights.isfinite().all()
    assert torch.equal(weights.argmax(-1), logits.argmax(-1))
    assert (weights > 0).sum(-1).max() == 1


@pytest.mark.parametrize("temperature", [1e-300, 1e-4, 1e6])
def test_huge_logits_overflow_nothing(temperature: float) -> None:
    logits = torch.tensor([[1e30, -1e30, 3.4e38, -torch.inf], [-1e30, -3.4e38, -torch.inf, -1e30]])
    weights = weigh(logits, SamplingParams(temperature=temperature, top_p=0.99))
    assert (weights > 0).tolist() == [[False, False, True, False], [True, False, False, True]]


def test_banned_tokens_are_never_kept_even_when_top_k_reaches_them() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 1.0, -torch.inf]])
    assert kept(logits, top_k=3).tolist() == [[True, False, True, False]]
    assert kept(torch.tensor([[0.0, -9.0, 1.0, -9.0]]), top_k=3).all(), "finite ones are, as a tie"


@pytest.mark.parametrize("uniform", [0.0, 2.0**-53, 0.5, LARGEST_UNIFORM])
def test_a_draw_never_lands_on_a_weight_of_zero(uniform: float) -> None:
    logits = torch.full((64, 130), -torch.inf)
    for row in range(64):
        logits[row, 1 + row] = logits[row, 2 * row + 2] = 0.1 * row
    weights = weigh(logits, SamplingParams(temperature=1.0))
    weights = torch.cat([weights, weights * (2.0**53 // weights.sum(-1, keepdim=True))])
    tokens = draw_weighted(weights, torch.full((128, 1), uniform, dtype=torch.float64))  # [128]
    assert (weights.gather(1, tokens[:, None]) > 0).all()


@pytest.mark.parametrize("total", [1, 2, 3, 2**51 + 1, 2**52 - 1, 2**52, 2**52 + 1, 2**53 - 1, 2**53])
def test_the_largest_uniform_finds_the_last_token(total: int) -> None:
    weights = torch.tensor([[0.0, total - 1.0, 1.0, 0.0]], dtype=torch.float64)
    assert draw_weighted(weights, torch.tensor([[LARGEST_UNIFORM]], dtype=torch.float64)).tolist() == [2]
    first = 1 if total > 1 else 2
    assert draw_weighted(weights, torch.zeros(1, 1, dtype=torch.float64)).tolist() == [first]


def test_a_draw_is_the_inverse_of_the_cumulative_distribution() -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0, 2.0, 1.0]], dtype=torch.float64).expand(8, -1).contiguous()
    uniforms = torch.tensor([0.0, 0.24, 0.25, 0.5, 0.74, 0.75, 0.9, LARGEST_UNIFORM], dtype=torch.float64)
    assert draw_weighted(weights, uniforms[:, None]).tolist() == [1, 1, 3, 3, 3, 4, 4, 4]
