"""A session's plan is built once and bound again: counted, bit for bit, and watched by its logits."""

from __future__ import annotations

import torch
from support_paged import TOLERANCE, every_block_size, every_family, ids, model_of, same
from support_paged_sessions import (
    WalkingPagedModel,
    assert_as_alone,
    from_scratch,
    paged_scheduler,
    taken,
    watched,
)

from fuel_core.schedule import PagedDecodePlan

REPLAN, PLAN_ONCE = PagedDecodePlan.REPLAN, PagedDecodePlan.PLAN_ONCE


def test_planning_once_is_the_default_and_is_what_runs() -> None:
    model = model_of()
    scheduler = paged_scheduler(model)
    assert scheduler.plan is PLAN_ONCE
    id = watched(scheduler, ids(3), 6)
    assert scheduler.session_realize_count(id) is None
    for count in (0, 1, 2, 3, 4):
        scheduler.step()
        assert scheduler.session_realize_count(id) == count
    assert scheduler.is_all_finished
    assert_as_alone(scheduler, id, model, ids(3), 6)


@every_family
@every_block_size
def test_planned_once_and_anew_are_the_same_bits_and_may_be_changed_at_any_time(
    family: str, block_size: int
) -> None:
    model = model_of(family)
    for plans in ([REPLAN], [PLAN_ONCE], [PLAN_ONCE, PLAN_ONCE, REPLAN, PLAN_ONCE, PLAN_ONCE, REPLAN]):
        scheduler = paged_scheduler(model, block_size=block_size)
        cases = [(ids(5, 1), 9, 3), (ids(2, 2), 9, None)]
        watch = [(watched(scheduler, *case), case) for case in cases]
        counts = []
        while not scheduler.is_all_finished:
            scheduler.plan = plans[len(counts) % len(plans)]
            scheduler.step()
            counts.append(scheduler.session_realize_count(watch[0][0]))
        expected = {1: [None] * 8 if plans == [REPLAN] else list(range(8)), 6: [0, 1, None, 0, 1, None, 0, 1]}
        assert counts == expected[len(plans)]
        for id, case in watch:
            assert_as_alone(scheduler, id, model, *case)


def test_a_session_is_planned_for_all_that_it_may_come_to_hold() -> None:
    model = WalkingPagedModel()
    scheduler = paged_scheduler(model)
    for prompt, max_new in ((3, 5), (3, 6), (1, 2)):
        scheduler.add_session([1] * prompt, max_new_tokens=max_new)
    scheduler.step()
    assert model.widths == [2, 3, 1]


def test_passes_of_many_leave_a_plan_as_it_is() -> None:
    model = model_of()
    scheduler = paged_scheduler(model)
    pair = [watched(scheduler, ids(5, seed), 8, seed) for seed in (1, 2)]
    scheduler.step()
    scheduler.step_batched(2)
    assert [scheduler.session_realize_count(id) for id in pair] == [0, 0]
    scheduler.step()
    assert [scheduler.session_realize_count(id) for id in pair] == [1, 1]
    scheduler.run_to_completion()
    for id, seed in zip(pair, (1, 2), strict=True):
        assert_as_alone(scheduler, id, model, ids(5, seed), 8, seed, within=TOLERANCE)


def test_logits_are_captured_from_when_it_is_asked_until_they_are_taken() -> None:
    model, prompt = model_of(), ids(4)
    tokens, logits = from_scratch(model, prompt, 8, 2)
    scheduler = paged_scheduler(model)
    id = watched(scheduler, prompt, 8, 2)
    scheduler.step()
    scheduler.capture_logits(id)  # again: nothing happens
    early = taken(scheduler, id)
    assert early.dtype == torch.float32
    assert scheduler.take_captured_logits(id) is None
    scheduler.step()
    assert scheduler.take_captured_logits(id) is None
    scheduler.capture_logits(id)
    assert scheduler.take_captured_logits(id) == []
    scheduler.capture_logits(id)
    scheduler.run_to_completion()
    assert same(early, logits[:2])
    assert same(taken(scheduler, id), logits[3:])
    assert scheduler.session_new_tokens(id) == tokens


def test_captured_logits_are_copies_that_a_model_cannot_change() -> None:
    buffer = torch.empty(64)
    model = WalkingPagedModel()
    real = model._advance_paged
    model._advance_paged = lambda *args: buffer.copy_(real(*args))  # type: ignore[method-assign]
    scheduler = paged_scheduler(model)
    id = watched(scheduler, (5, 6, 7), 4)
    assert scheduler.run_to_completion() == [(id, [5, 6, 7, 3, 4, 5, 6])]
    assert taken(scheduler, id).argmax(-1).tolist() == [3, 4, 5, 6]
