"""Who decodes together, what each gets from it, and how a pass fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support_models import (
    Fault,
    LockstepModel,
    RecordingModel,
    ReshapingModel,
    SwappedCaches,
    distance,
    feed,
    filled,
    lone_run,
    once,
    raising,
    scheduler_of,
    tiny,
)

from fuel_core.contracts import DecodeModel, FinishReason, ModelDims, SamplingParams
from fuel_core.contracts.errors import (
    InvalidRequestError,
    SamplingError,
)
from fuel_core.schedule import Batched, RoundRobin, SessionId, SessionScheduler, SessionState
from fuel_core.schedule.policy import batches
from fuel_core.schedule.scheduler import lockstep

PROMPTS = ((1, 2, 3), (4, 5, 6), (7, 8, 9))
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model() -> DecodeModel:
    return tiny(seed=12)


def drain(scheduler: SessionScheduler) -> list[bool]:
    used = []
    while not scheduler.is_all_finished:
        used.append(scheduler.step().used_batched_arm)
    return used


def farthest(
    recording: RecordingModel, model: DecodeModel, prompts: Sequence[Sequence[int]], policy: Batched
) -> float:
    """Serve ``prompts`` together; the largest distance of any logits from those of a lone run."""
    scheduler = scheduler_of(recording, policy)
    ids = [scheduler.add_session(prompt, max_new_tokens=6) for prompt in prompts]
    drain(scheduler)
    runs = [recording.served(scheduler, id)[1] for id in ids]
    lone = [lone_run(model, prompt, 6)[1] for prompt in prompts]
    return max(distance(run, expected) for run, expected in zip(runs, lone, strict=True))


@pytest.mark.parametrize("heads", [(6, 6), (6, 2), (6, 1)])
def test_three_sessions_in_lockstep_are_three_lone_ones_at_any_grouping_of_heads(
    heads: tuple[int, int],
) -> None:
    model = tiny(seed=12, num_attention_heads=heads[0], num_key_value_heads=heads[1])
    recording = RecordingModel(model)
    scheduler = scheduler_of(recording, Batched(4))
    ids = [scheduler.add_session(prompt, max_new_tokens=6) for prompt in PROMPTS]
    assert drain(scheduler) == [True] * 5
    assert [call.lengths for call in recording.batched_calls()] == [(n,) * 3 for n in range(3, 8)]
    for id, prompt in zip(ids, PROMPTS, strict=True):
        tokens, logits = recording.served(scheduler, id)
        expected = lone_run(model, prompt, 6)
        assert tokens == expected[0]
        assert distance(logits, expected[1]) < TOLERANCE


def test_the_comparison_with_lone_runs_sees_sessions_that_share_their_neighbour_s_cache(
    model: DecodeModel,
) -> None:
    assert farthest(RecordingModel(model), model, PROMPTS, Batched(4)) < TOLERANCE
    assert farthest(SwappedCaches(model), model, PROMPTS, Batched(4)) > 0.01


def new_token_from(tokens: Sequence[int], start: int) -> int:
    """The first place from ``start`` on whose token has not been generated before."""
    return next(i for i in range(start, len(tokens)) if tokens[i] not in tokens[:i])


def test_sessions_move_between_the_serial_arm_and_the_batch_as_others_finish(model: DecodeModel) -> None:
    lone = [lone_run(model, prompt, 9) for prompt in PROMPTS]
    ends = [new_token_from(lone[0][0], 2), new_token_from(lone[1][0], 5), 8]
    assert ends[0] < ends[1] < ends[2]
    recording = RecordingModel(model)
    scheduler = scheduler_of(recording, Batched(2))
    ids = [
        scheduler.add_session(prompt, eos_ids=[lone[i][0][ends[i]]] if i < 2 else (), max_new_tokens=9)
        for i, prompt in enumerate(PROMPTS)
    ]
    # The prompts come in serially, and token t > 0 of a session comes from its step t.
    assert drain(scheduler) == [True] * ends[1] + [False] * (8 - ends[1])
    apart, late = ["batched"] * ends[1], ["serial"] * (8 - ends[1])
    arms = [recording.arms(scheduler.session(id).cache) for id in ids]
    assert arms[0] == ["serial", *["batched"] * ends[0]]
    assert arms[1] == ["serial", *apart]
    assert arms[2] == ["serial"] * (1 + ends[0]) + ["batched"] * (ends[1] - ends[0]) + late
    assert {len(call.lengths) for call in recording.batched_calls()} == {2}
    assert len(recording.batched_calls()) == ends[1]
    reasons = [scheduler.session(id).finish_reason for id in ids]
    assert reasons == [FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH]
    for id, (tokens, logits), end in zip(ids, lone, ends, strict=True):
        served = recording.served(scheduler, id)
        assert served[0] == tokens[: end + 1]
        assert distance(served[1], logits[: end + 1]) < TOLERANCE


def test_the_staggered_runs_have_no_near_ties_that_a_rounding_could_turn(model: DecodeModel) -> None:
    for prompt in PROMPTS:
        best = lone_run(model, prompt, 9)[1].topk(2).values  # [9, 2]
        assert float((best[:, 0] - best[:, 1]).min()) > 10 * TOLERANCE


def test_only_sessions_of_one_length_and_capacity_stand_in_a_pass() -> None:
    model = LockstepModel()
    scheduler = scheduler_of(model, Batched(8))
    sizes = [(3, 4), (3, 4), (2, 4), (2, 5), (2, 5), (5, 4), (3, 6)]
    ids = [scheduler.add_session([1] * prompt, max_new_tokens=new) for prompt, new in sizes]
    assert scheduler.step().used_batched_arm
    assert model.batched == [(3, 3), (2, 2)]
    assert model.calls[len(sizes) :] == [(2,), (5,), (3,)]
    drain(scheduler)
    for id, (prompt, new) in zip(ids, sizes, strict=True):
        assert scheduler.session_new_tokens(id) == list(range(prompt, prompt + new))


def state_of(model: DecodeModel, prompt: Sequence[int], size: int, dtype: torch.dtype) -> SessionState:
    """A session past its prompt."""
    sampling, dims = SamplingParams(), ModelDims.from_model(model)
    state = SessionState(
        SessionId(0), dims, 96, prompt, sampling, max_new_tokens=size - len(prompt), dtype=dtype
    )
    feed(model, state.cache, *prompt)
    return state


def test_sessions_that_differ_in_length_capacity_or_dtype_are_never_grouped(model: DecodeModel) -> None:
    base = [state_of(model, (1, 2, 3), 9, torch.float32) for _ in range(2)]
    apart = [
        state_of(model, (1, 2), 9, torch.float32),
        state_of(model, (1, 2, 3), 8, torch.float32),
        state_of(model, (1, 2, 3), 9, torch.bfloat16),
    ]
    passes = list(batches([base[0], *apart, base[1]], lockstep, 4))
    assert passes == [base, *([state] for state in apart)]
    assert list(batches([base[0]], lockstep, 4)) == [[base[0]]]
    assert list(batches([], lockstep, 4)) == []


@pytest.mark.parametrize(
    ("max_batch", "passes"), [(1, []), (2, [2, 2]), (3, [3, 2]), (4, [4]), (5, [5]), (99, [5])]
)
def test_a_pass_holds_no_more_than_its_limit_and_a_rest_of_one_runs_alone(
    max_batch: int, passes: list[int]
) -> None:
    model = LockstepModel()
    scheduler = scheduler_of(model, Batched(max_batch))
    for i in range(5):
        scheduler.add_session([i, i], max_new_tokens=2)
    report = scheduler.step()
    assert [len(lengths) for lengths in model.batched] == passes
    assert model.calls.count((2,)) == 5 - sum(passes)
    assert report.used_batched_arm == bool(passes)
    assert sorted(report.finished) == list(range(5))


def test_the_policy_may_change_between_steps() -> None:
    model = LockstepModel()
    scheduler = scheduler_of(model, RoundRobin())
    for i in range(2):
        scheduler.add_session([i, i], max_new_tokens=9)
    used = []
    for policy in (RoundRobin(), Batched(2), RoundRobin(), Batched(2)):
        scheduler.policy = policy
        used.append(scheduler.step().used_batched_arm)
    assert used == [False, True, False, True]
    drain(scheduler)
    assert [tokens[2:] for _, tokens in scheduler.reap_finished()] == [list(range(2, 11))] * 2


@pytest.mark.parametrize("max_batch", [0, -1, True, 2.0, "2", None])
def test_a_limit_that_is_no_positive_integer_is_refused(max_batch: Any) -> None:
    with pytest.raises(InvalidRequestError, match="max_batch"):
        Batched(max_batch)


# --- a pass that fails


def failing(model: LockstepModel, max_new: int = 4) -> tuple[SessionScheduler, list[SessionId], Any]:
    """Sessions 1 and 2 in one pass and 3 and 4 in another, after a first step; and its report."""
    scheduler = scheduler_of(model, Batched(2))
    ids = [scheduler.add_session([i] * (2 if i < 3 else 3), max_new_tokens=max_new) for i in (1, 2, 3, 4)]
    model.calls.clear()
    return scheduler, ids, scheduler.step()


@pytest.mark.parametrize("who", [1, 2])
def test_a_pass_that_raises_ends_its_sessions_without_a_second_try(who: int) -> None:
    boom = RuntimeError("boom")
    model = LockstepModel(faults={who: once(raising(boom), after=1)})
    scheduler, ids, report = failing(model)
    assert report.errored == [(ids[0], boom), (ids[1], boom)]
    assert report.finished == ids[:2]
    assert report.used_batched_arm  # by the other pass
    assert model.batched == [(2, 2), (3, 3)]
    assert len(model.calls) == 4  # the prompts
    drain(scheduler)
    assert len(model.calls) == 4
    for id in ids[:2]:
        session = scheduler.session(id)
        assert (session.finish_reason, session.error, session.new_tokens) == (FinishReason.ERROR, boom, [2])
    assert [scheduler.session_new_tokens(id) for id in ids[2:]] == [[3, 4, 5, 6]] * 2
    scheduler.reap_finished()
    assert scheduler.kv_free_blocks == 4096


@pytest.mark.parametrize(
    "reshape",
    [
        lambda rows: rows[:-1],
        lambda rows: torch.cat((rows, rows[:1])),
        lambda rows: rows[:, :-1],
        lambda rows: rows[0],
        lambda rows: rows[None],
        lambda rows: rows.double(),
        lambda rows: list(rows),
        lambda rows: None,
        raising(RuntimeError("boom")),
    ],
)
def test_a_pass_that_returns_other_than_a_row_per_session_ends_them_all(reshape: Fault) -> None:
    model = ReshapingModel(reshape)
    scheduler, ids, report = failing(model)
    assert [id for id, _ in report.errored] == report.finished == ids
    assert not report.used_batched_arm
    assert report.advanced == ids  # their first tokens
    assert (len(model.batched), len(model.calls)) == (2, 4)
    assert scheduler.is_all_finished


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_with_nothing_to_choose_fails_that_session_only(value: float) -> None:
    model = LockstepModel(faults={2: once(filled(value), after=1)})
    scheduler, ids, report = failing(model)
    assert [(id, type(error)) for id, error in report.errored] == [(ids[1], SamplingError)]
    assert report.finished == [ids[1]]
    assert report.used_batched_arm
    drain(scheduler)
    tails = [scheduler.session_new_tokens(id) for id in ids]
    assert tails == [[2, 3, 4, 5], [2], [3, 4, 5, 6], [3, 4, 5, 6]]


def test_an_interrupt_in_a_pass_passes_through_and_loses_no_session() -> None:
    # Session 1 stands first in its pass, so no cache was advanced when it came.
    model = LockstepModel(faults={1: once(raising(KeyboardInterrupt()), after=1)})
    scheduler = scheduler_of(model, Batched(2))
    ids = [scheduler.add_session([i, i], max_new_tokens=4) for i in (1, 2)]
    with pytest.raises(KeyboardInterrupt):
        scheduler.step()
    assert not scheduler.is_all_finished
    assert all(drain(scheduler))
    assert [scheduler.session_new_tokens(id) for id in ids] == [[2, 3, 4, 5]] * 2
