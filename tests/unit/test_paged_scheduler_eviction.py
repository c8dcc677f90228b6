"""A session that is moved to the host and back goes on bit for bit, whatever ran meanwhile."""

from __future__ import annotations

import pytest
from support_models import distance
from support_paged import every_block_size, every_family, ids, model_of, poison_free, untouched
from support_paged_sessions import assert_as_alone, from_scratch, paged_scheduler, taken, watched

from fuel_core.contracts import FinishReason
from fuel_core.contracts.errors import InvalidRequestError, OutOfBlocksError
from fuel_core.schedule import PagedDecodePlan, PagedSessionScheduler, SessionId


def suspend(scheduler: PagedSessionScheduler, id: SessionId) -> None:
    """Evict, and let nothing of it survive in the pool."""
    scheduler.evict_session(id)
    poison_free(scheduler.pool)


@every_family
@every_block_size
def test_a_session_evicted_before_every_step_goes_on_bit_for_bit(family: str, block_size: int) -> None:
    model = model_of(family)
    scheduler = paged_scheduler(model, block_size=block_size)
    id = watched(scheduler, ids(5), 7, 3)
    blocks = set()
    while not scheduler.is_all_finished:
        handle = scheduler.session(id).handle
        held = scheduler.pool.core.session_blocks(handle)
        blocks.add(held)
        free = scheduler.kv_free_blocks
        suspend(scheduler, id)
        assert scheduler.is_suspended(id)
        assert scheduler.kv_free_blocks == free + len(held) == 64
        other = scheduler.add_session(ids(3, len(blocks)), max_new_tokens=1)
        report = scheduler.step()
        assert report.advanced == [other]
        scheduler.restore_session(id)  # into other blocks, since these are held
        assert [each for each, _ in scheduler.reap_finished()] == [other]
        assert not scheduler.is_suspended(id)
        assert scheduler.session(id).decode_session.plan is None
        scheduler.step()
    assert len(blocks) > 2
    assert_as_alone(scheduler, id, model, ids(5), 7, 3)


def test_a_session_that_came_back_with_other_bytes_is_seen() -> None:
    model = model_of()
    scheduler = paged_scheduler(model)
    id = watched(scheduler, ids(9), 7)
    scheduler.step()
    scheduler.evict_session(id)
    suspended = scheduler.session(id).suspended
    assert suspended is not None
    first, second = (suspended.saved[slot][:, 0] for slot in (0, 1))  # K, [layers, slots, Hkv, D]
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)
    scheduler.restore_session(id)
    scheduler.run_to_completion()
    assert distance(taken(scheduler, id), from_scratch(model, ids(9), 7)[1]) > 0.01


@pytest.mark.parametrize("arm", ["serial", "replan", "batched"])
def test_a_suspended_session_waits_and_the_others_do_not(arm: str) -> None:
    model = model_of()
    scheduler = paged_scheduler(model)
    cases = [(ids(5, seed), 8, seed) for seed in range(3)]
    watch = [watched(scheduler, *case) for case in cases]
    if arm == "replan":
        scheduler.plan = PagedDecodePlan.REPLAN

    def step() -> list[SessionId]:
        return (scheduler.step_batched(4) if arm == "batched" else scheduler.step()).advanced

    step()
    suspend(scheduler, watch[1])
    before = scheduler.session_new_tokens(watch[1])
    for _ in range(3):
        assert step() == [watch[0], watch[2]]
    assert scheduler.session_new_tokens(watch[1]) == before
    scheduler.restore_session(watch[1])
    while not scheduler.is_all_finished:
        step()
    for id, case in zip(watch, cases, strict=True):
        assert_as_alone(scheduler, id, model, *case, within=1e-4 if arm == "batched" else None)


def test_a_session_may_be_evicted_before_its_prompt_has_run() -> None:
    model = model_of()
    scheduler = paged_scheduler(model)
    id = watched(scheduler, ids(5), 4)
    suspend(scheduler, id)
    assert scheduler.step().advanced == []
    assert scheduler.session_new_tokens(id) == []
    scheduler.restore_session(id)
    scheduler.run_to_completion()
    assert_as_alone(scheduler, id, model, ids(5), 4)


def test_another_session_runs_in_the_room_and_the_first_finishes_after() -> None:
    model = model_of()
    scheduler = paged_scheduler(model, num_blocks=4)
    first = watched(scheduler, ids(9, 1), 5, 1)
    scheduler.step()
    suspend(scheduler, first)
    second = watched(scheduler, ids(12, 2), 4, 2)
    out = dict(scheduler.run_to_completion())  # comes back though the first can still go on
    assert len(out[second]) == 16
    assert scheduler.is_suspended(first)
    assert not scheduler.is_all_finished
    assert scheduler.reap_finished() == [(second, out[second])]
    scheduler.restore_session(first)
    assert len(dict(scheduler.run_to_completion())[first]) == 14
    assert scheduler.is_all_finished
    assert_as_alone(scheduler, first, model, ids(9, 1), 5, 1)


@pytest.mark.parametrize("batched", [False, True])
def test_a_loop_while_a_step_has_something_to_do_ends_with_only_suspended_sessions_left(
    batched: bool,
) -> None:
    model = model_of()
    scheduler = paged_scheduler(model)
    assert not scheduler.can_advance  # nobody is there
    cases = [(ids(5, seed), 4, seed) for seed in range(3)]
    watch = [watched(scheduler, *case) for case in cases]
    assert scheduler.can_advance  # though no prompt has run
    scheduler.step()
    suspend(scheduler, watch[1])
    steps = 0
    while scheduler.can_advance:
        assert steps < 9
        steps += 1
        report = scheduler.step_batched(4) if batched else scheduler.step()
        assert report.advanced == [watch[0], watch[2]]
    assert steps == 2
    assert not scheduler.is_all_finished
    assert scheduler.step().advanced == scheduler.step_batched(4).advanced == []
    scheduler.restore_session(watch[1])
    assert scheduler.can_advance
    scheduler.run_to_completion()
    assert (scheduler.can_advance, scheduler.is_all_finished) == (False, True)
    for id, case in zip(watch, cases, strict=True):
        assert_as_alone(scheduler, id, model, *case, within=1e-4 if batched else None)


def test_a_suspended_session_that_is_cancelled_is_waited_for_no_longer() -> None:
    scheduler = paged_scheduler(model_of())
    id = scheduler.add_session(ids(5), max_new_tokens=4)
    suspend(scheduler, id)
    assert (scheduler.can_advance, scheduler.is_all_finished) == (False, False)
    scheduler.cancel(id)
    assert (scheduler.can_advance, scheduler.is_all_finished) == (False, True)


def test_evicting_again_does_nothing() -> None:
    model = model_of()
    scheduler = paged_scheduler(model)
    id = watched(scheduler, ids(5), 4)
    scheduler.step()
    suspend(scheduler, id)
    saved = scheduler.session(id).suspended
    free = scheduler.kv_free_blocks
    scheduler.evict_session(id)
    assert scheduler.session(id).suspended is saved
    assert scheduler.kv_free_blocks == free
    scheduler.restore_session(id)
    scheduler.run_to_completion()
    assert_as_alone(scheduler, id, model, ids(5), 4)


def test_what_has_finished_is_not_evicted_and_what_is_there_not_restored() -> None:
    scheduler = paged_scheduler(model_of())
    id = scheduler.add_session(ids(5), max_new_tokens=2)
    with untouched(scheduler.pool, InvalidRequestError):
        scheduler.restore_session(id)
    scheduler.run_to_completion()
    with untouched(scheduler.pool, InvalidRequestError) as caught:
        scheduler.evict_session(id)
    assert "finished" in str(caught.value)
    with untouched(scheduler.pool, InvalidRequestError):
        scheduler.restore_session(id)
    cancelled = scheduler.add_session(ids(5), max_new_tokens=2)
    scheduler.cancel(cancelled)
    with untouched(scheduler.pool, InvalidRequestError):
        scheduler.evict_session(cancelled)


def test_one_that_does_not_fit_stays_suspended_and_restorable() -> None:
    model = model_of()
    scheduler = paged_scheduler(model, num_blocks=4)
    first = watched(scheduler, ids(9, 1), 5, 1)
    scheduler.step()
    suspend(scheduler, first)
    second = watched(scheduler, ids(5, 2), 4, 2)
    scheduler.step()
    for _ in range(2):
        with untouched(scheduler.pool, OutOfBlocksError) as caught:
            scheduler.restore_session(first)
        assert (caught.value.need, caught.value.have) == (3, 2)
        assert scheduler.is_suspended(first)
    assert scheduler.step().advanced == [second]
    scheduler.run_to_completion()
    scheduler.reap_finished()
    poison_free(scheduler.pool)
    scheduler.restore_session(first)
    scheduler.run_to_completion()
    assert_as_alone(scheduler, first, model, ids(9, 1), 5, 1)


def test_a_sharer_keeps_its_prefix_where_it_is_and_moves_the_rest() -> None:
    model = model_of()
    scheduler = paged_scheduler(model)
    donor = watched(scheduler, ids(8), 9, 1)
    scheduler.step()
    prompt = ids(8) + ids(3, 5)
    id = watched(scheduler, prompt, 6, 2, prefix=scheduler.register_prefix(donor, 8))
    scheduler.step()
    for each in (id, donor):
        free = scheduler.kv_free_blocks
        suspend(scheduler, each)
        assert scheduler.kv_free_blocks == free + 1
        scheduler.step()
        scheduler.restore_session(each)
    scheduler.run_to_completion()
    assert_as_alone(scheduler, id, model, prompt, 6, 2)
    assert_as_alone(scheduler, donor, model, ids(8), 9, 1)


def test_a_plan_is_built_anew_after_an_eviction() -> None:
    scheduler = paged_scheduler(model_of())
    id = scheduler.add_session(ids(5), max_new_tokens=9)
    scheduler.step()
    scheduler.step()
    assert scheduler.session_realize_count(id) == 1
    suspend(scheduler, id)
    assert scheduler.session_realize_count(id) is None
    scheduler.restore_session(id)
    assert scheduler.session_realize_count(id) is None
    for count in (0, 1):
        scheduler.step()
        assert scheduler.session_realize_count(id) == count


def test_a_suspended_session_that_is_cancelled_is_reaped_with_all_it_held() -> None:
    model = model_of()
    scheduler = paged_scheduler(model)
    donor = scheduler.add_session(ids(8), max_new_tokens=9)
    scheduler.step()
    prefix = scheduler.register_prefix(donor, 8)
    id = scheduler.add_session_sharing_prefix(prefix, ids(8) + ids(3, 5), max_new_tokens=6)
    scheduler.step()
    for each in (id, donor):
        suspend(scheduler, each)
        scheduler.cancel(each)
    assert scheduler.is_all_finished
    assert {scheduler.session(each).finish_reason for each in (id, donor)} == {FinishReason.CANCELLED}
    assert [each for each, _ in scheduler.reap_finished()] == [donor, id]
    assert scheduler.kv_free_blocks == 62
    scheduler.release_prefix(prefix)
    assert scheduler.kv_free_blocks == 64


def test_a_copy_that_fails_leaves_the_session_running(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    scheduler = paged_scheduler(model)
    id = watched(scheduler, ids(5), 6, 3)
    scheduler.step()

    def failing(*_: object, **__: object) -> None:
        raise MemoryError("no host memory")

    with untouched(scheduler.pool, MemoryError), monkeypatch.context() as patch:
        patch.setattr("torch.Tensor.to", failing)
        scheduler.evict_session(id)
    assert not scheduler.is_suspended(id)
    scheduler.run_to_completion()
    assert_as_alone(scheduler, id, model, ids(5), 6, 3)
