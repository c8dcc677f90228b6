"""Every session's tokens follow its own parameters and its own stream, in any company."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from fuel_core.contracts import SamplingParams
from fuel_core.contracts.errors import InvalidRequestError, ModelContractError, SamplingError
from fuel_core.sampling import Outcome, SamplerState, sample

INF = math.inf
EOS = frozenset({2})


def state(
    vocab: int, prompt: Sequence[int] = (), eos_ids: frozenset[int] = EOS, **params: Any
) -> SamplerState:
    return SamplerState(SamplingParams(**params), prompt, eos_ids=eos_ids, vocab_size=vocab)


def random_logits(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2


def one(logits: Sequence[float], of: SamplerState) -> Outcome:
    return sample(torch.tensor([logits]), [of])[0]


def chi_squared(tokens: Sequence[Outcome], probabilities: Tensor) -> float:
    """Standard deviations of the statistic above its mean, over the tokens expected 5 times or more."""
    counts = Counter(tokens)
    expected = {
        token: len(tokens) * p for token, p in enumerate(probabilities.tolist()) if len(tokens) * p > 5
    }
    statistic = sum((counts[token] - mean) ** 2 / mean for token, mean in expected.items())
    freedom = len(expected) - 1
    return float((statistic - freedom) / math.sqrt(2 * freedom))


def draws(logits: Tensor, sessions: int = 500, steps: int = 40, **params: Any) -> list[Outcome]:
    states = [state(len(logits), seed=seed, **params) for seed in range(sessions)]
    rows = logits.expand(sessions, -1)
    return [token for _ in range(steps) for token in sample(rows, states)]


# --- the distribution


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.9])
def test_draws_follow_the_softmax_of_the_divided_logits(temperature: float) -> None:
    logits = random_logits(40)
    tokens = draws(logits, temperature=temperature)
    assert chi_squared(tokens, (logits.double() / temperature).softmax(-1)) < 4
    assert chi_squared(tokens, (logits.double() / (temperature * 1.1)).softmax(-1)) > 8, "its power"


def test_draws_follow_the_renormalised_softmax_of_what_the_filters_keep() -> None:
    logits = torch.tensor([0.05, 0.3, 0.04, 0.2, 0.11, 0.25, 0.05]).log()
    kept = torch.tensor([0.0, 0.3, 0.0, 0.2, 0.0, 0.25, 0.0], dtype=torch.float64) / 0.75
    for filters in ({"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.5}):
        tokens = draws(logits, temperature=1.0, **filters)
        assert set(tokens) == {1, 3, 5}
        assert chi_squared(tokens, kept) < 4


def test_one_session_draws_independently_step_after_step() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    session = state(3, temperature=1.0, seed=11)
    tokens = [sample(logits, [session])[0] for _ in range(3001)]
    pairs = [3 * int(a) + int(b) for a, b in pairwise(tokens)]
    single = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    assert chi_squared(pairs, torch.outer(single, single).flatten()) < 4


# --- streams


def mixed_params() -> list[dict[str, Any]]:
    return [
        {"temperature": 0.7, "seed": 1},
        {"temperature": 1.0, "top_k": 5, "seed": 2},
        {},
        {"temperature": 1.3, "top_p": 0.8, "seed": 3, "presence_penalty": 0.3, "frequency_penalty": 0.1},
        {"repetition_penalty": 1.2, "min_new_tokens": 30, "logit_bias": {4: 1.5, 9: -INF}},
        {"temperature": 1.1, "top_k": 300, "top_p": 0.95, "min_p": 0.01, "seed": 4, "logit_bias": {3: 2.0}},
        {"temperature": 2.0, "min_p": 0.02, "seed": 5, "repetition_penalty": 1.1, "min_new_tokens": 10},
    ]


def test_a_session_has_the_same_stream_alone_and_in_company() -> None:
    def sessions() -> list[SamplerState]:
        return [state(997, [1, 5, 5, 8], **params) for params in mixed_params()]

    steps = [random_logits(7, 997, seed=seed) for seed in range(500)]
    company, alone = sessions(), sessions()
    together = [sample(logits, company) for logits in steps]
    apart = [[sample(logits[i : i + 1], [alone[i]])[0] for i in range(7)] for logits in steps]
    assert together == apart
    assert len({tuple(row[i] for row in together) for i in range(7)}) == 7


def test_a_session_has_the_same_stream_in_any_place_of_any_batch() -> None:
    steps = [random_logits(1, 501, seed=seed) for seed in range(100)]
    alone = state(501, temperature=1.0, top_p=0.9, seed=9)
    expected = [sample(logits, [alone])[0] for logits in steps]
    moving = state(501, temperature=1.0, top_p=0.9, seed=9)
    for step, logits in enumerate(steps):
        others = [state(501, temperature=1.5, top_k=3 + step) for _ in range(step % 5)]
        place = step % (len(others) + 1)
        batch = [*others[:place], moving, *others[place:]]
        assert sample(logits.expand(len(batch), -1), batch)[place] == expected[step]


def test_the_same_seed_gives_the_same_stream_and_another_seed_another() -> None:
    logits = random_logits(1, 200)

    def stream(seed: int | None) -> list[Outcome]:
        session = state(200, temperature=1.0, seed=seed)
        return [sample(logits, [session])[0] for _ in range(20)]

    assert stream(5) == stream(5)
    seeds = [0, 1, 5, 2**32, 2**32 + 5, 2**64 - 1, None, None]
    assert len({tuple(stream(seed)) for seed in seeds}) == len(seeds)


def test_a_seed_that_was_drawn_is_kept_and_repeats_its_stream() -> None:
    logits = random_logits(1, 200)
    session = state(200, temperature=1.0)
    again = state(200, temperature=1.0, seed=session.seed)
    assert [sample(logits, [session]) for _ in range(20)] == [sample(logits, [again]) for _ in range(20)]


def test_greedy_sessions_consume_no_random_number_and_others_one_per_token() -> None:
    greedy, drawn, fresh = (state(50, seed=3, temperature=t) for t in (0.0, 1.0, 1.0))
    for seed in range(5):
        sample(random_logits(2, 50, seed=seed), [greedy, drawn])
    numbers = [fresh.uniform() for _ in range(6)]
    assert greedy.uniform() == numbers[0]
    assert drawn.uniform() == numbers[5]


# --- greedy, biases, penalties, masks


def test_greedy_takes_the_largest_and_of_a_tie_the_lowest_id() -> None:
    logits = random_logits(33, 49_153)
    logits[:, 40_000] = logits[:, 7] = logits[:, 49_152] = 50.0
    assert sample(logits, [state(49_153) for _ in range(33)]) == [7] * 33
    assert sample(logits, [state(49_153, logit_bias={7: -1}) for _ in range(33)]) == [40_000] * 33


def test_a_bias_is_added_and_minus_infinity_bans() -> None:
    assert one([1.0, 2.0, 3.0], state(3)) == 2
    assert one([1.0, 2.0, 3.0], state(3, logit_bias={0: 2.5})) == 0
    assert one([1.0, 2.0, 3.0], state(3, logit_bias={2: -INF})) == 1
    banned = state(3, logit_bias={2: -INF, 0: -INF}, temperature=100.0, seed=0)
    assert {one([1.0, 2.0, 3.0], banned) for _ in range(50)} == {1}
    assert len({one([1.0, 2.0, 3.0], state(3, temperature=100.0)) for _ in range(50)}) == 3


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    logits = random_logits(300, 30)
    history = torch.randint(0, 30, (300, 12), generator=torch.Generator().manual_seed(1))  # [300, 12]
    states = [state(30, row[:7], repetition_penalty=penalty) for row in history.tolist()]
    for session, row in zip(states, history.tolist(), strict=True):
        for token in row[7:]:
            session.record(token)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(history, logits).argmax(-1).tolist()
    assert sample(logits, states) == expected
    assert expected != logits.argmax(-1).tolist()
    assert expected != RepetitionPenaltyLogitsProcessor(penalty)(history[:, :7], logits).argmax(-1).tolist()


@pytest.mark.parametrize("repetition", [1.0, 1.2])
def test_presence_and_frequency_are_subtracted_for_generated_tokens_only(repetition: float) -> None:
    logits = random_logits(300, 30)
    output = torch.randint(0, 30, (300, 20), generator=torch.Generator().manual_seed(1))  # [300, 20]
    prompt = list(range(10))
    penalties = {"presence_penalty": 0.8, "frequency_penalty": 0.5, "repetition_penalty": repetition}
    states = [state(30, prompt, **penalties) for _ in output]
    for session, row in zip(states, output.tolist(), strict=True):
        for token in row:
            session.record(token)
    seen = torch.cat([torch.tensor(prompt).expand(300, -1), output], dim=1)
    repeated = RepetitionPenaltyLogitsProcessor(repetition)(seen, logits)
    counts = torch.zeros(300, 30).scatter_add_(1, output, torch.ones(300, 20))
    tokens = sample(logits, states)
    assert tokens == (repeated - 0.5 * counts - 0.8 * (counts > 0)).argmax(-1).tolist()
    for wrong in (repeated - 0.5 * counts, repeated - 0.8 * (counts > 0), repeated - 0.5 * counts - 0.8):
        assert tokens != wrong.argmax(-1).tolist()


def test_the_bias_comes_before_the_repetition_penalty() -> None:
    assert one([4.0, 3.0], state(2, [0], repetition_penalty=2.0, logit_bias={0: 3.0})) == 0  # (4 + 3) / 2 > 3
    assert (
        one([4.0, 3.0], state(2, [0], repetition_penalty=2.0, logit_bias={0: 1.5})) == 1
    )  # (4 + 1.5) / 2 < 3


def test_penalties_see_the_tokens_that_sample_itself_recorded() -> None:
    session = state(4, presence_penalty=1.0)
    assert [one([3.0, 2.5, 2.4, 0.0], session) for _ in range(4)] == [0, 1, 2, 0]


def test_negative_penalties_encourage() -> None:
    session = state(3, frequency_penalty=-1.0)
    session.record(2)
    assert one([1.0, 1.0, 0.5], session) == 2
    assert one([1.0, 1.0, 0.5], state(3)) == 0


@pytest.mark.parametrize("temperature", [0.0, 1e-4])
def test_eos_is_masked_until_the_minimum_is_generated(temperature: float) -> None:
    session = state(5, eos_ids=frozenset({2, 3, 99}), min_new_tokens=3, temperature=temperature, seed=0)
    assert [one([0.0, 1.0, 5.0, 4.0, 0.0], session) for _ in range(5)] == [1, 1, 1, 2, 2]


def test_a_mask_outlasts_a_bias_toward_eos() -> None:
    session = state(3, min_new_tokens=1, logit_bias={2: 100.0, 0: 2.0})
    assert [one([0.0, 1.0, 0.0], session) for _ in range(2)] == [0, 2]


# --- faults


FAULTY = {
    "hold NaN": [0.0, math.nan, INF, 1.0],
    "hold \\+inf": [0.0, INF, 1.0, -INF],
    "no finite maximum": [-INF] * 4,
}


@pytest.mark.parametrize("text", FAULTY)
@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.0, "top_p": 0.9, "top_k": 2, "seed": 1}, {"presence_penalty": 1.0}]
)
def test_a_faulty_row_gets_its_error_and_disturbs_no_other(text: str, params: dict[str, Any]) -> None:
    good = random_logits(3, 4)
    neighbours = [state(4, temperature=1.0, top_p=0.9, seed=7), state(4), state(4, temperature=1.0, seed=8)]
    twins = [state(4, temperature=1.0, top_p=0.9, seed=7), state(4), state(4, temperature=1.0, seed=8)]
    bad = state(4, **params)
    logits = torch.cat([good[:1], torch.tensor([FAULTY[text]]), good[1:]])
    outcome = sample(logits, [neighbours[0], bad, *neighbours[1:]])
    error = outcome.pop(1)
    assert outcome == sample(good, twins)
    assert isinstance(error, SamplingError)
    with pytest.raises(SamplingError, match=text):
        raise error
    assert (error.row, error.generated, bad.generated) == (1, 0, 0)
    assert [session.generated for session in neighbours] == [1, 1, 1]


def test_nothing_left_after_bans_and_masks_is_an_error_of_that_row() -> None:
    everything = state(3, logit_bias={0: -INF, 1: -INF}, min_new_tokens=1)
    error, token = sample(torch.zeros(2, 3), [everything, state(3)])
    assert isinstance(error, SamplingError)
    assert "min_new_tokens" in str(error)
    assert token == 0
    everything.record(0)
    assert one([0.0, 0.0, 0.0], everything) == 2, "EOS is free again"


def test_a_banned_token_hides_no_fault() -> None:
    session = state(3, logit_bias={1: -INF})
    assert isinstance(one([0.0, math.nan, 1.0], session), SamplingError)
    assert isinstance(one([0.0, INF, 1.0], session), SamplingError)
    assert one([0.0, -INF, 1.0], session) == 2


def test_logits_of_1e30_are_no_fault() -> None:
    params = [
        {},
        {"temperature": 1e-4, "seed": 0},
        {"repetition_penalty": 1e6, "temperature": 1.0, "seed": 0},
    ]
    logits = torch.tensor([[-1e30, 1e30, -3e38, 9e29]])
    assert sample(logits.expand(3, -1), [state(4, [1], **p) for p in params]) == [1, 1, 3]


@pytest.mark.parametrize(
    "logits",
    [torch.zeros(1, 4), torch.zeros(2, 5), torch.zeros(4), torch.zeros(2, 4).double(), torch.zeros(2, 4, 1)],
)
def test_logits_that_do_not_fit_are_refused_before_anything_is_drawn(logits: Tensor) -> None:
    states = [state(4, temperature=1.0, seed=1), state(4)]
    with pytest.raises(ModelContractError, match="2 sessions of vocabulary \\[4\\]"):
        sample(logits, states)
    assert states[0].uniform() == state(4, seed=1).uniform()
    assert [session.generated for session in states] == [0, 0]


def test_no_sessions_have_no_outcomes() -> None:
    assert sample(torch.zeros(0, 4), []) == []


def test_ids_outside_the_vocabulary_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError, match="logit_bias for token 4"):
        state(4, logit_bias={4: 1.0})
    for prompt in ([0, 4], [-1, 0]):
        with pytest.raises(InvalidRequestError, match=f"prompt holds the token {min(prompt) or 4}"):
            state(4, prompt, repetition_penalty=1.1)
    session = state(4, presence_penalty=1.0)
    for token in (-1, 4):
        with pytest.raises(InvalidRequestError, match=f"token holds the token {token}"):
            session.record(token)
    assert session.generated == 0
    assert session.history is not None
    assert session.history.entries()[0].numel() == 0


# --- the caller's side


@pytest.mark.parametrize("layout", ["rows", "columns", "expanded"])
def test_logits_of_any_layout_are_read_and_not_changed(layout: str) -> None:
    rows = random_logits(6, 40)
    logits = {"rows": rows, "columns": rows.T.contiguous().T, "expanded": rows[:1].expand(6, -1)}[layout]
    before = logits.clone()
    only_greedy, only_drawn = (
        mixed_params()[2:3] * 6,
        [p for p in mixed_params() if "seed" in p] + [{"seed": 7}],
    )
    for params in (only_greedy, [{"temperature": 1.0, **p} for p in only_drawn], mixed_params()[:6]):
        outcomes = sample(logits, [state(40, **p) for p in params])
        assert torch.equal(logits, before)
        assert outcomes == sample(before.contiguous(), [state(40, **p) for p in params])


def test_it_does_not_matter_who_is_in_inference_mode() -> None:
    def stream(build: bool, run: bool) -> list[list[Outcome]]:
        with torch.inference_mode(build):
            states = [state(40, [1, 2], **params) for params in mixed_params()]
        outcomes = []
        for step in range(6):
            with torch.inference_mode(run == (step % 2 == 0)):
                outcomes.append(sample(random_logits(7, 40, seed=step), states))
        return outcomes

    assert stream(True, False) == stream(False, True) == stream(False, False)


def test_a_session_without_penalties_keeps_no_history() -> None:
    assert state(10**12, [1, 2, 3], temperature=1.0, top_k=5, min_new_tokens=4).history is None
    assert state(10**12, [1, 2, 3], repetition_penalty=1.1).history is not None


def test_only_a_repetition_penalty_looks_at_the_prompt() -> None:
    for params, entries in (({"presence_penalty": 1.0}, []), ({"repetition_penalty": 1.1}, [3, 1])):
        history = state(4, [3, 1, 3], **params).history
        assert history is not None
        assert history.entries()[0].tolist() == entries
