"""A session takes what is sampled until an EOS or its budget, and refuses what it could not serve."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from fuel_core.contracts import FinishReason, ModelDims, SamplingParams
from fuel_core.contracts.errors import CapacityError, FuelError, InvalidRequestError, SamplingError
from fuel_core.contracts.requests import check_context, check_lengths, check_request, check_tokens
from fuel_core.schedule import SessionId, SessionPhase, SessionState

DIMS = ModelDims(n_layers=2, n_kv_heads=2, head_dim=4)
VOCAB = 8
# No machine has the memory for a cache of so many tokens: a refusal that comes first built none.
IMPOSSIBLE = 2**56


def session(
    prompt: Sequence[int] = (1, 2),
    *,
    eos_ids: Iterable[int] = (),
    max_new_tokens: int = 5,
    **sampling: Any,
) -> SessionState:
    return SessionState(
        SessionId(0),
        DIMS,
        VOCAB,
        prompt,
        SamplingParams(**sampling),
        eos_ids=eos_ids,
        max_new_tokens=max_new_tokens,
    )


def peak(token: int) -> torch.Tensor:
    """Logits ``[vocab]`` whose largest is at ``token``, among others that are not zero."""
    logits = torch.linspace(-1, 1, VOCAB)
    logits[token] = 3.0
    return logits


def take(state: SessionState, *tokens: int) -> None:
    for token in tokens:
        state.last_logits = peak(token)
        assert state.sample_and_append() == token


# --- a new session


def test_a_new_session_waits_for_its_prompt_with_nothing_generated() -> None:
    state = session([1, 2, 3], max_new_tokens=4)
    assert state.tokens == [1, 2, 3]
    assert state.new_tokens == []
    assert (state.prompt_len, state.remaining) == (3, 4)
    assert state.phase is SessionPhase.PREFILL
    assert state.is_ready
    assert (state.finish_reason, state.error, state.last_logits) == (None, None, None)
    assert (state.decode_session.plan, state.decode_session.rebinds) == (None, 0)


def test_the_cache_has_room_for_prompt_and_output_and_no_more() -> None:
    cache = session([1, 2, 3], max_new_tokens=4).cache
    assert (cache.dims, cache.max_seq_len, cache.cached_len) == (DIMS, 7, 0)


def test_a_session_shares_no_list_with_its_caller() -> None:
    prompt = [1, 2]
    state = session(prompt)
    take(state, 3)
    prompt[0] = 7
    assert state.tokens == [1, 2, 3]
    assert len(prompt) == 2


@pytest.mark.parametrize(
    ("prompt", "changes", "says"),
    [
        ([], {}, "no tokens"),
        ([1, -1], {}, "-1 at position 1"),
        ([VOCAB, 1], {}, f"{VOCAB} at position 0"),
        ([1, 2.0], {}, "2.0 at position 1"),
        (["1"], {}, "'1' at position 0"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens = 0"),
        ([1], {"max_new_tokens": -IMPOSSIBLE}, "max_new_tokens"),
        ([1], {"max_new_tokens": True}, "max_new_tokens = True"),
        ([1], {"max_new_tokens": 1.5}, "max_new_tokens = 1.5"),
        ([1], {"min_new_tokens": IMPOSSIBLE + 1}, "min_new_tokens"),
        ([1], {"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
    ],
)
def test_a_request_that_no_session_could_serve_is_refused_before_a_cache_is_built(
    prompt: list[Any], changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        session(prompt, **{"max_new_tokens": IMPOSSIBLE, **changes})


def test_the_size_that_refusals_are_tried_with_is_impossible() -> None:
    with pytest.raises(CapacityError, match="KV cache of shape"):
        session([1], max_new_tokens=IMPOSSIBLE)


# --- sampling


def test_greedy_takes_the_largest_logit_and_counts_the_budget_down() -> None:
    state = session([1, 2], max_new_tokens=2)
    state.last_logits = torch.tensor([0.0, 0.1, 0.2, 0.9, 0.3, -5, 0, 0])
    assert state.sample_and_append() == 3
    assert state.tokens == [1, 2, 3]
    assert state.remaining == 1
    assert state.phase is SessionPhase.DECODE
    state.last_logits = torch.tensor([0.9, 0, 0, 0, 0, 0, 0, 0])
    assert state.sample_and_append() == 0
    assert state.new_tokens == [3, 0]
    assert state.remaining == 0
    assert (state.phase, state.finish_reason) == (SessionPhase.FINISHED, FinishReason.LENGTH)
    assert not state.is_ready


def test_without_logits_nothing_is_sampled() -> None:
    state = session()
    assert state.sample_and_append() is None
    assert state.tokens == [1, 2]
    assert (state.remaining, state.phase) == (5, SessionPhase.PREFILL)


def test_logits_are_sampled_once() -> None:
    state = session()
    take(state, 3)
    assert state.last_logits is None
    assert state.sample_and_append() is None
    assert state.new_tokens == [3]


def test_a_finished_session_samples_no_more() -> None:
    state = session(max_new_tokens=1)
    take(state, 3)
    state.last_logits = peak(4)
    assert state.sample_and_append() is None
    assert state.new_tokens == [3]


@pytest.mark.parametrize("fault", [torch.nan, torch.inf, -torch.inf])
def test_logits_with_nothing_to_choose_raise_and_leave_the_session_as_it_was(fault: float) -> None:
    state = session()
    take(state, 3)
    bad = torch.full((VOCAB,), fault)
    state.last_logits = bad
    for _ in range(2):
        with pytest.raises(SamplingError):
            state.sample_and_append()
    assert state.last_logits is bad
    assert (state.new_tokens, state.remaining, state.phase) == ([3], 4, SessionPhase.DECODE)
    take(state, 5)
    assert state.new_tokens == [3, 5]


# --- where it ends


@pytest.mark.parametrize(
    "eos_ids", [(3,), (5, 7, 3), (3, 3, 5), [3, 5], {5, 3}, frozenset({3}), iter((5, 3))]
)
def test_any_listed_eos_stops_and_is_kept(eos_ids: Iterable[int]) -> None:
    state = session([1], eos_ids=eos_ids, max_new_tokens=10)
    take(state, 2)
    assert state.is_ready
    take(state, 3)
    assert state.new_tokens == [2, 3]
    assert (state.phase, state.finish_reason) == (SessionPhase.FINISHED, FinishReason.STOP)


@pytest.mark.parametrize("eos_ids", [(0, 1, 2), (4,), (-1, VOCAB, 99)])
def test_a_token_that_is_not_listed_does_not_stop(eos_ids: Iterable[int]) -> None:
    state = session([1], eos_ids=eos_ids, max_new_tokens=10)
    take(state, 3)
    assert state.phase is SessionPhase.DECODE


@pytest.mark.parametrize("empty", [(), [], set(), frozenset(), iter(())])
def test_no_eos_is_one_thing_however_it_is_spelled(empty: Iterable[int]) -> None:
    state = session([1], eos_ids=empty, max_new_tokens=VOCAB)
    assert state.eos_ids == session([1]).eos_ids == frozenset()
    take(state, *range(VOCAB))
    assert state.finish_reason is FinishReason.LENGTH


def test_an_eos_in_the_prompt_does_not_stop() -> None:
    state = session([3, 3], eos_ids=(3,))
    take(state, 2)
    assert state.is_ready


def test_an_eos_as_the_last_token_of_the_budget_is_a_stop() -> None:
    state = session([1], eos_ids=(3,), max_new_tokens=1)
    take(state, 3)
    assert state.finish_reason is FinishReason.STOP


def test_an_ignored_eos_is_a_token_like_any_other() -> None:
    state = session([1], eos_ids=(3,), max_new_tokens=2, ignore_eos=True)
    take(state, 3)
    assert state.is_ready
    take(state, 3)
    assert (state.new_tokens, state.finish_reason) == ([3, 3], FinishReason.LENGTH)


def test_an_eos_is_not_sampled_before_the_least_number_of_tokens() -> None:
    state = session([1], eos_ids=(3,), max_new_tokens=5, min_new_tokens=2)
    for _ in range(2):
        state.last_logits = peak(3)
        assert state.sample_and_append() == VOCAB - 1  # the second largest
    take(state, 3)
    assert state.finish_reason is FinishReason.STOP


def test_the_first_reason_to_finish_stands() -> None:
    state, error = session(), RuntimeError("late")
    state.last_logits = peak(1)
    state.finish(FinishReason.CANCELLED)
    state.finish(FinishReason.ERROR, error)
    assert (state.finish_reason, state.error, state.last_logits) == (FinishReason.CANCELLED, None, None)


# --- the tail


def test_unread_tokens_are_told_once_and_the_prompt_never() -> None:
    state = session([1, 2])
    assert state.take_unread() == []
    take(state, 3, 4)
    assert state.take_unread() == [3, 4]
    assert state.take_unread() == []
    take(state, 5)
    assert state.take_unread() == [5]
    assert state.new_tokens == [3, 4, 5]


def test_a_tail_that_was_read_is_the_reader_s_own() -> None:
    state = session()
    take(state, 3)
    state.new_tokens.append(9)
    assert state.tokens == [1, 2, 3]


# --- what a request must be


@pytest.mark.parametrize("ids", [[0], [VOCAB - 1, 0], (3,), np.array([0, VOCAB - 1]), range(VOCAB)])
def test_ids_of_the_vocabulary_pass_in_any_sequence(ids: Sequence[int]) -> None:
    check_tokens(ids, VOCAB)


@pytest.mark.parametrize("bad", [-1, -VOCAB, VOCAB, VOCAB + 1, 2**70])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_first_id_out_of_range_is_named_with_its_place(bad: int, place: int) -> None:
    ids = [1, 1, 1, -9]
    ids[place] = bad
    with pytest.raises(InvalidRequestError) as caught:
        check_tokens(ids, VOCAB)
    assert (caught.value.token, caught.value.place) == (bad, place)  # type: ignore[attr-defined]


def test_a_length_at_the_context_passes_and_one_beyond_does_not() -> None:
    check_context(16, 16)
    check_context(10**9, None)
    with pytest.raises(InvalidRequestError) as caught:
        check_context(17, 16)
    assert (caught.value.total, caught.value.max_context) == (17, 16)  # type: ignore[attr-defined]


def test_as_many_least_tokens_as_tokens_pass_and_one_more_does_not() -> None:
    check_lengths(SamplingParams(min_new_tokens=4), 4)
    with pytest.raises(InvalidRequestError, match="min_new_tokens = 5"):
        check_lengths(SamplingParams(min_new_tokens=5), 4)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prompt": []}, "no tokens"),
        ({"prompt": [1, VOCAB]}, f"{VOCAB} at position 1"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"sampling": SamplingParams(min_new_tokens=5)}, "min_new_tokens"),
        ({"sampling": SamplingParams(logit_bias={VOCAB: 1.0})}, "logit_bias"),
        ({"max_context": 5}, "6 tokens"),
    ],
)
def test_a_request_passes_only_if_every_part_of_it_does(changes: dict[str, Any], says: str) -> None:
    sound: dict[str, Any] = {
        "prompt": [0, VOCAB - 1],
        "sampling": SamplingParams(logit_bias={VOCAB - 1: 1.0}, min_new_tokens=4),
        "max_new_tokens": 4,
        "vocab_size": VOCAB,
        "max_context": 6,
    }
    check_request(**sound)
    with pytest.raises(InvalidRequestError, match=says):
        check_request(**{**sound, **changes})


@pytest.mark.parametrize("raised", [lambda: check_tokens([], 4), lambda: check_context(2, 1)])
def test_refusals_are_one_line_with_a_remedy(raised: Any) -> None:
    with pytest.raises(FuelError) as caught:
        raised()
    assert "\n" not in str(caught.value)
    assert caught.value.needed
    assert caught.value.remedy
