"""Sessions in one pool: each does what it does alone, and the scheduler says how."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support_models import CoreOnlyModel, MlaShapedModel, distance, filled, lone_run, once, raising, tiny
from support_paged import TOLERANCE, every_block_size, every_family, ids, model_of
from support_paged_sessions import (
    WalkingPagedModel,
    assert_as_alone,
    from_scratch,
    paged_scheduler,
    taken,
    watched,
)

from fuel_core.contracts import FinishReason, SamplingParams
from fuel_core.contracts.errors import (
    InvalidRequestError,
    ModelContractError,
    NonUniformStateError,
    UnknownSessionError,
    UnsupportedTierError,
)
from fuel_core.kv import KvBudget
from fuel_core.schedule import PagedDecodePlan, PagedSessionScheduler, SessionId, SessionPhase

REPLAN, PLAN_ONCE = PagedDecodePlan.REPLAN, PagedDecodePlan.PLAN_ONCE


# --- which models


def test_a_model_without_the_paged_tier_is_declined_when_the_scheduler_is_made() -> None:
    with pytest.raises(UnsupportedTierError, match="CoreOnlyModel") as caught:
        PagedSessionScheduler(CoreOnlyModel(), KvBudget(4, 2**50))  # type: ignore[arg-type]
    assert "SessionScheduler" in str(caught.value)


def test_a_model_without_per_head_state_is_declined_before_anything_is_allocated() -> None:
    class PagedMla(MlaShapedModel, WalkingPagedModel):
        pass

    with pytest.raises(NonUniformStateError, match="not per-head KV"):
        PagedSessionScheduler(PagedMla(), KvBudget(4, 2**50))


def test_the_pool_is_the_models_in_the_budget_and_type_asked_for() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        scheduler = PagedSessionScheduler(model_of(), KvBudget(4, 9), dtype=dtype)
        assert scheduler.pool.pool_shape == (9, 4, 2, 8)
        assert (scheduler.pool.dtype, scheduler.pool.geometry.n_layers) == (dtype, 2)
        assert scheduler.kv_free_blocks == 9


# --- alone and in company


@every_family
@every_block_size
def test_a_session_runs_to_its_budget_as_it_does_in_a_cache(family: str, block_size: int) -> None:
    model, prompt = model_of(family), ids(6)
    scheduler = paged_scheduler(model, block_size=block_size)
    id = watched(scheduler, prompt, 7)
    tokens, logits = lone_run(model, prompt, 7)
    assert scheduler.run_to_completion() == [(id, [*prompt, *tokens])]
    assert distance(taken(scheduler, id), logits) < 1e-5
    assert scheduler.session(id).finish_reason is FinishReason.LENGTH
    assert scheduler.session_new_tokens(id) == tokens


@every_family
def test_sessions_beside_each_other_do_what_each_does_alone(family: str) -> None:
    model = model_of(family)
    cases = [(ids(3, 1), 9, None), (ids(4, 2), 6, 1), (ids(1, 3), 8, 2), (ids(9, 4), 4, None)]
    scheduler = paged_scheduler(model)
    watch = [(watched(scheduler, *case), case) for case in cases[:2]]
    scheduler.step()
    watch += [(watched(scheduler, *case), case) for case in cases[2:]]  # those that come later join
    scheduler.run_to_completion()
    for id, case in watch:
        assert_as_alone(scheduler, id, model, *case)


def test_the_same_comparison_sees_a_neighbours_keys() -> None:
    model = model_of()
    scheduler = paged_scheduler(model)
    a, b = watched(scheduler, ids(6, 1), 5), watched(scheduler, ids(6, 2), 5)
    scheduler.step()
    pool = scheduler.pool
    blocks = [pool.core.resident_block(scheduler.session(id).handle, 0) for id in (a, b)]
    pool.copy_block(*blocks)
    scheduler.run_to_completion()
    assert_as_alone(scheduler, a, model, ids(6, 1), 5)
    assert distance(taken(scheduler, b), from_scratch(model, ids(6, 2), 5)[1]) > 0.01


def test_a_session_stops_at_any_eos_and_keeps_it() -> None:
    model, prompt = model_of(), ids(3)
    tokens, _ = from_scratch(model, prompt, 8, 5)
    last = next(i for i in range(1, 8) if tokens[i] not in tokens[:i])
    for eos_ids in ([tokens[last]], [95 - tokens[last], tokens[last]]):
        scheduler = paged_scheduler(model)
        id = watched(scheduler, prompt, 8, 5, eos_ids=[e for e in eos_ids if e not in tokens[:last]])
        other = watched(scheduler, prompt, 8, 5)
        out = dict(scheduler.run_to_completion())
        assert out[id] == [*prompt, *tokens[: last + 1]]
        assert out[other] == [*prompt, *tokens]
        reasons = [scheduler.session(each).finish_reason for each in (id, other)]
        assert reasons == [FinishReason.STOP, FinishReason.LENGTH]


def test_a_prompt_is_fed_token_by_token_and_then_each_token_once() -> None:
    model = WalkingPagedModel()
    scheduler = paged_scheduler(model)
    id = scheduler.add_session([5, 6, 7], max_new_tokens=3)
    report = scheduler.step()
    assert report.advanced == [id, id]
    assert not report.used_batched_arm
    assert scheduler.session_new_tokens(id) == [3, 4]
    report = scheduler.step()
    assert (report.advanced, report.finished, report.errored) == ([id], [id], [])
    assert model.passes == [("prefill", (t,)) for t in (5, 6, 7)] + [("serial", (t,)) for t in (3, 4)]
    assert scheduler.step().advanced == []


# --- together


@every_family
def test_sessions_at_one_position_advance_in_one_pass_within_tolerance(family: str) -> None:
    model = model_of(family)
    cases = [(ids(6, seed), 7, seed) for seed in range(3)] + [(ids(4, 9), 5, None)]
    scheduler = paged_scheduler(model)
    watch = [(watched(scheduler, *case), case) for case in cases]
    fired = 0
    while not scheduler.is_all_finished:
        fired += scheduler.step_batched(8).used_batched_arm
    assert fired == 6
    for id, case in watch:
        assert_as_alone(scheduler, id, model, *case, within=TOLERANCE)


@pytest.mark.parametrize(
    ("max_batch", "sizes"), [(1, []), (2, [2, 2]), (3, [3, 2]), (4, [4]), (5, [5]), (9, [5])]
)
def test_passes_hold_two_or_more_at_one_position_up_to_the_limit(max_batch: int, sizes: list[int]) -> None:
    model = WalkingPagedModel()
    scheduler = paged_scheduler(model)
    for first in range(10, 15):
        scheduler.add_session([first, 1, 2], max_new_tokens=9)
    scheduler.add_session([20], max_new_tokens=9)  # alone at its position
    scheduler.step_batched(max_batch)
    model.passes.clear()
    report = scheduler.step_batched(max_batch)
    assert [len(tokens) for arm, tokens in model.passes if arm == "batched"] == sizes
    assert [arm for arm, _ in model.passes].count("serial") == 6 - sum(sizes)
    assert sorted(report.advanced) == list(range(6))
    assert report.used_batched_arm == bool(sizes)


@pytest.mark.parametrize("max_batch", [0, -1, 1.5, True, None])
def test_a_limit_that_is_none_is_refused(max_batch: Any) -> None:
    scheduler = paged_scheduler(WalkingPagedModel())
    scheduler.add_session([1], max_new_tokens=3)
    with pytest.raises(InvalidRequestError, match="max_batch"):
        scheduler.step_batched(max_batch)
    assert scheduler.session_new_tokens(SessionId(0)) == []


# --- failures


@pytest.mark.parametrize("fault", [raising(RuntimeError("broken")), filled(float("nan"))])
def test_a_session_that_fails_finishes_and_no_other_does(fault: Any) -> None:
    for token, expected in ((6, []), (3, [3])):  # in the prompt, and while it decodes
        scheduler = paged_scheduler(WalkingPagedModel(faults={token: once(fault)}))
        bad = scheduler.add_session([5, 7, 6], max_new_tokens=4)
        good = scheduler.add_session([8, 9], max_new_tokens=2)
        report = scheduler.step()
        assert [id for id, _ in report.errored] == [bad]
        assert bad in report.finished
        assert scheduler.session(bad).error is report.errored[0][1]
        assert scheduler.session_new_tokens(bad) == expected
        assert scheduler.run_to_completion()[1] == (good, [8, 9, 2, 3])
        assert [id for id, _ in scheduler.reap_finished()] == [bad, good]
        assert scheduler.kv_free_blocks == 64


def test_a_pass_that_raises_finishes_its_sessions_without_another_try() -> None:
    model = WalkingPagedModel(faults={3: once(raising(RuntimeError("broken")), after=1)})
    scheduler = paged_scheduler(model)
    sessions = [scheduler.add_session([9, 8, 7], max_new_tokens=5) for _ in range(4)]
    report = scheduler.step_batched(2)
    assert [id for id, _ in report.errored] == sessions[:2]
    assert model.passes[-2:] == [("batched", (3, 3))] * 2
    assert [scheduler.session(id).phase for id in sessions[2:]] == [SessionPhase.DECODE] * 2


@pytest.mark.parametrize("change", [lambda x: x[:1], lambda x: x[:, :-1], lambda x: x.double()])
def test_logits_of_another_shape_or_type_finish_the_pass(
    monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    model = WalkingPagedModel()
    real = model.forward_paged_step_batched
    monkeypatch.setattr(model, "forward_paged_step_batched", lambda *args: change(real(*args)))
    scheduler = paged_scheduler(model)
    pair = [watched(scheduler, [9, 8], 5) for _ in range(2)]
    report = scheduler.step_batched(2)
    assert [type(error) for _, error in report.errored] == [ModelContractError] * 2
    assert not report.used_batched_arm
    assert [len(taken(scheduler, id)) for id in pair] == [1, 1]


# --- what can be asked


def test_a_session_that_was_never_there_or_is_gone_is_unknown() -> None:
    scheduler = paged_scheduler(model_of())
    gone = scheduler.add_session(ids(3), max_new_tokens=1)
    scheduler.run_to_completion()
    scheduler.reap_finished()
    for id in (gone, SessionId(gone + 1), SessionId(-1)):
        assert scheduler.session_new_tokens(id) is None
        assert scheduler.session_realize_count(id) is None
        assert scheduler.take_captured_logits(id) is None
        calls = (
            scheduler.capture_logits,
            scheduler.is_suspended,
            scheduler.evict_session,
            scheduler.restore_session,
            scheduler.cancel,
            lambda each: scheduler.register_prefix(each, 4),
        )
        for call in calls:
            with pytest.raises(UnknownSessionError):
                call(id)


@pytest.mark.parametrize(
    ("prompt", "changes"),
    [
        ([], {}),
        ([1, 96], {}),
        ([-1], {}),
        ([1], {"max_new_tokens": 0}),
        ([1], {"sampling": SamplingParams(logit_bias={96: 1.0})}),
        ([1], {"sampling": SamplingParams(min_new_tokens=9)}),
        ([1] * 12, {"max_new_tokens": 5}),
    ],
)
def test_a_session_that_is_refused_takes_no_id_and_no_block(
    prompt: list[int], changes: dict[str, Any]
) -> None:
    scheduler = paged_scheduler(tiny(max_position_embeddings=16))
    first = scheduler.add_session([1, 2], max_new_tokens=2)
    sessions = set(scheduler.pool.core._tables)
    with pytest.raises(InvalidRequestError):
        scheduler.add_session(prompt, **{"max_new_tokens": 3, **changes})
    assert set(scheduler.pool.core._tables) == sessions
    assert (scheduler.session_count, scheduler.kv_free_blocks) == (1, 64)
    assert scheduler.add_session([1] * 12, max_new_tokens=4) == first + 1
    assert [len(tokens) for _, tokens in scheduler.run_to_completion()] == [4, 16]
