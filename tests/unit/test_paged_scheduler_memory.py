"""Nothing is reserved: who cannot grow finishes, nobody else does, and every block comes back."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support_models import BreakableDecoder, once, raising, tiny
from support_paged import every_family, ids, model_of, poison_free, standing
from support_paged_sessions import (
    WalkingPagedModel,
    assert_as_alone,
    drawn,
    from_scratch,
    paged_scheduler,
    taken,
    watched,
)

from fuel_core.contracts import FinishReason
from fuel_core.contracts.errors import OutOfBlocksError
from fuel_core.schedule import PagedDecodePlan, PagedSessionScheduler


def held(scheduler: PagedSessionScheduler) -> int:
    """Blocks that a session or a prefix holds, counted one by one."""
    core = scheduler.pool.core
    blocks = {b for s in core._tables for b in core.session_blocks(s) if b is not None}
    return len(blocks.union(*(core.prefix_blocks(prefix) for prefix in core._prefixes)))


# --- admission


def test_any_number_of_sessions_is_taken_and_no_block_is_reserved() -> None:
    scheduler = paged_scheduler(WalkingPagedModel(), num_blocks=1)
    taken_in = [scheduler.add_session([1] * 4, max_new_tokens=2**40) for _ in range(50)]
    assert taken_in == list(range(50))
    assert (scheduler.session_count, scheduler.kv_free_blocks) == (50, 1)


def test_blocks_are_taken_as_tokens_come() -> None:
    scheduler = paged_scheduler(WalkingPagedModel(), num_blocks=9)
    scheduler.add_session([1, 2, 3], max_new_tokens=8)
    used = []
    while not scheduler.is_all_finished:
        scheduler.step()
        used.append(9 - scheduler.kv_free_blocks)
    assert used == [1, 2, 2, 2, 2, 3, 3]  # after 4, 5, ... 10 tokens


def test_a_session_with_no_end_in_sight_runs_as_long_as_it_fits() -> None:
    model = model_of()
    scheduler = paged_scheduler(model, num_blocks=3)
    id = watched(scheduler, ids(3), 250)
    scheduler.run_to_completion()
    assert isinstance(scheduler.session(id).error, OutOfBlocksError)
    rows = taken(scheduler, id)
    assert len(rows) == 10
    assert rows.equal(from_scratch(model, ids(3), 10)[1])


def test_a_plan_is_no_wider_than_the_pool() -> None:
    model = WalkingPagedModel()
    scheduler = paged_scheduler(model, num_blocks=3)
    scheduler.add_session([1, 2, 3], max_new_tokens=2**40)
    scheduler.step()
    assert model.widths == [3]


# --- exhaustion


@pytest.mark.parametrize("arm", ["serial", "replan", "batched"])
def test_the_session_that_cannot_grow_finishes_and_no_other(arm: str) -> None:
    model = model_of()
    scheduler = paged_scheduler(model, num_blocks=8)
    if arm == "replan":
        scheduler.plan = PagedDecodePlan.REPLAN
    cases = [(ids(7, seed), 6, seed) for seed in range(3)]  # three blocks each; one is lacking
    watch = [watched(scheduler, *case) for case in cases]
    reports = []
    while not scheduler.is_all_finished:
        reports.append(scheduler.step_batched(4) if arm == "batched" else scheduler.step())
        poison_free(scheduler.pool)
    [(loser, error)] = [each for report in reports for each in report.errored]
    assert loser == watch[2]
    assert isinstance(error, OutOfBlocksError)
    assert error.need > error.have
    reasons = [scheduler.session(id).finish_reason for id in watch]
    assert reasons == [FinishReason.ERROR if id == loser else FinishReason.LENGTH for id in watch]
    for id, case in list(zip(watch, cases, strict=True))[:2]:
        assert_as_alone(scheduler, id, model, *case, within=1e-4 if arm == "batched" else None)
    scheduler.reap_finished()
    assert scheduler.kv_free_blocks == 8


@pytest.mark.parametrize(("free", "grow"), [(0, 0), (1, 1), (2, 2), (3, 3)])
def test_those_that_fit_go_on_together_and_the_rest_are_told_before_the_pass(free: int, grow: int) -> None:
    model = WalkingPagedModel()
    scheduler = paged_scheduler(model, num_blocks=3 + free)
    sessions = [scheduler.add_session([9, 8, token], max_new_tokens=9) for token in (5, 6, 7)]
    scheduler.step()  # four tokens each: every block is full
    model.passes.clear()
    report = scheduler.step_batched(3)
    assert report.advanced == sessions[:grow]
    assert [(id, type(error)) for id, error in report.errored] == [
        (id, OutOfBlocksError) for id in sessions[grow:]
    ]
    assert [(error.need, error.have) for _, error in report.errored] == [(1, 0)] * (3 - grow)
    assert report.finished == sessions[grow:]
    passes = {0: [], 1: [("serial", (4,))]}.get(grow, [("batched", (4,) * grow)])
    assert model.passes == passes
    assert report.used_batched_arm == (grow > 1)


def test_a_prompt_that_does_not_fit_fails_and_one_that_does_runs() -> None:
    model = model_of()
    scheduler = paged_scheduler(model, num_blocks=3)
    first = watched(scheduler, ids(7, 1), 2)
    long = scheduler.add_session(ids(9), max_new_tokens=2)  # three blocks, of which one is free
    report = scheduler.step()
    assert [(id, type(error)) for id, error in report.errored] == [(long, OutOfBlocksError)]
    assert scheduler.session_new_tokens(long) == []
    assert_as_alone(scheduler, first, model, ids(7, 1), 2)
    scheduler.reap_finished()
    assert scheduler.kv_free_blocks == 3
    short = watched(scheduler, ids(7), 5)
    scheduler.run_to_completion()
    assert_as_alone(scheduler, short, model, ids(7), 5)


def test_a_pool_of_one_block_serves_what_fits_into_it() -> None:
    model = model_of()
    scheduler = paged_scheduler(model, block_size=17, num_blocks=1)
    for seed in range(3):
        id = watched(scheduler, ids(9, seed), 9, seed)  # 17 tokens are fed
        scheduler.run_to_completion()
        assert_as_alone(scheduler, id, model, ids(9, seed), 9, seed)
        scheduler.reap_finished()
    id = scheduler.add_session(ids(9), max_new_tokens=10)
    scheduler.run_to_completion()
    assert isinstance(scheduler.session(id).error, OutOfBlocksError)
    assert len(scheduler.session_new_tokens(id) or []) == 9


# --- interrupts


def _interrupt(*_: object) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("place", ["within a layer", "after the pass"])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("turn", [0, 1, 4])  # the prompt, and later tokens
def test_after_an_interrupt_no_token_is_lost_or_fed_twice(
    monkeypatch: pytest.MonkeyPatch, turn: int, batched: bool, place: str
) -> None:
    model = BreakableDecoder(tiny())
    scheduler = paged_scheduler(model)
    step = (lambda: scheduler.step_batched(2)) if batched else scheduler.step
    sessions = [scheduler.add_session(ids(3, seed), drawn(seed), max_new_tokens=9) for seed in (1, 2)]
    for _ in range(turn):
        step()
    before = standing(scheduler.pool)
    where: Any = (model, "layer") if place == "within a layer" else ("fuel_core.schedule.table.sample",)
    with monkeypatch.context() as patch:
        patch.setattr(*where, _interrupt)
        with pytest.raises(KeyboardInterrupt):
            step()
    assert standing(scheduler.pool) == before
    while not scheduler.is_all_finished:
        step()
    for id, seed in zip(sessions, (1, 2), strict=True):
        assert scheduler.session_new_tokens(id) == from_scratch(model_of(), ids(3, seed), 9, seed)[0]
        assert scheduler.session(id).finish_reason is FinishReason.LENGTH


# --- what comes back


@every_family
def test_reaping_gives_back_every_block(family: str) -> None:
    scheduler = paged_scheduler(model_of(family))
    id = scheduler.add_session(ids(3), max_new_tokens=5)
    scheduler.run_to_completion()
    assert (scheduler.kv_free_blocks, scheduler.session_count) == (62, 1)
    assert [each for each, _ in scheduler.reap_finished()] == [id]
    assert (scheduler.kv_free_blocks, scheduler.session_count) == (64, 0)
    assert scheduler.reap_finished() == []


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_cancelled_session_keeps_its_tokens_runs_no_more_and_is_reaped(steps: int) -> None:
    model = model_of()
    scheduler = paged_scheduler(model)
    id, other = watched(scheduler, ids(5), 9), watched(scheduler, ids(5, 2), 4)
    for _ in range(steps):
        scheduler.step()
    tail = scheduler.session_new_tokens(id)
    scheduler.cancel(id)
    assert id not in scheduler.step().advanced
    scheduler.run_to_completion()
    scheduler.cancel(other)
    assert scheduler.session(other).finish_reason is FinishReason.LENGTH
    assert scheduler.session(id).finish_reason is FinishReason.CANCELLED
    assert_as_alone(scheduler, other, model, ids(5, 2), 4)
    assert dict(scheduler.reap_finished())[id] == [*ids(5), *(tail or [])]
    assert scheduler.kv_free_blocks == 64


def test_a_session_that_fails_within_its_prompt_gives_back_its_blocks_when_reaped() -> None:
    model = WalkingPagedModel(faults={7: once(raising(RuntimeError("broken")))})
    scheduler = paged_scheduler(model)
    scheduler.add_session([1] * 9 + [7], max_new_tokens=4)
    scheduler.step()
    assert scheduler.kv_free_blocks < 64
    scheduler.reap_finished()
    assert scheduler.kv_free_blocks == 64


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_asked_free_and_held_are_all_and_outputs_are_those_of_lone_runs(seed: int) -> None:
    """Sessions, prefixes, evictions and cancels at random, in a pool that is too small for them."""
    model, choose = model_of(), random.Random(seed)
    scheduler = paged_scheduler(model, num_blocks=14)
    cases, prefixes, done = {}, [], 0
    for turn in range(60):
        live = [id for id in cases if scheduler.session_new_tokens(id) is not None]
        suspended = [id for id in live if scheduler.is_suspended(id)]
        running = [id for id in live if scheduler.session(id).is_ready and id not in suspended]
        if choose.random() < 0.4 and len(live) < 6:
            shared = choose.choice([None, *prefixes])
            prompt = (ids(4, 0) if shared is not None else ()) + ids(choose.randint(1, 9), turn)
            prompt = ids(4, 0) + prompt if choose.random() < 0.3 and shared is None else prompt
            case = prompt, choose.randint(1, 8), choose.choice([None, turn])
            cases[watched(scheduler, *case, prefix=shared)] = case
        donors = [id for id in running if cases[id][0][:4] == ids(4, 0) and scheduler.session_new_tokens(id)]
        if donors and choose.random() < 0.2:
            prefixes.append(scheduler.register_prefix(choose.choice(donors), 4))
        if prefixes and choose.random() < 0.1:
            scheduler.release_prefix(prefixes.pop(choose.randrange(len(prefixes))))
        if running and choose.random() < 0.25:
            scheduler.evict_session(choose.choice(running))
        if suspended and choose.random() < 0.5:
            id = choose.choice(suspended)
            if scheduler.session(id).is_ready:
                try:
                    scheduler.restore_session(id)
                except OutOfBlocksError:
                    assert scheduler.is_suspended(id)
        if running and choose.random() < 0.05:
            scheduler.cancel(choose.choice(running))
        poison_free(scheduler.pool)
        report = scheduler.step_batched(choose.randint(1, 4))
        assert {type(error) for _, error in report.errored} <= {OutOfBlocksError}
        assert scheduler.kv_free_blocks + held(scheduler) == 14
        for id, tokens in scheduler.reap_finished():
            prompt, max_new, drawn_by = cases.pop(id)
            assert (
                tokens[len(prompt) :]
                == from_scratch(model, prompt, max_new, drawn_by)[0][: len(tokens) - len(prompt)]
            )
            done += 1
    assert done > 10
    for id in cases:
        scheduler.cancel(id)
    scheduler.reap_finished()
    for prefix in prefixes:
        scheduler.release_prefix(prefix)
    assert (scheduler.kv_free_blocks, scheduler.session_count) == (14, 0)
