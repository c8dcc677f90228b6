"""Sessions that share a last block or have lost one, in a pass of many: as few end as in the serial arm."""

from __future__ import annotations

from collections import defaultdict
from functools import cache

import pytest
from support_paged import TOLERANCE, ids, model_of, opened, poison_free
from support_paged_sessions import assert_as_alone, from_scratch, paged_scheduler, watched

from fuel_core.contracts.errors import OutOfBlocksError, SessionNotResidentError
from fuel_core.schedule import PagedSessionScheduler, SessionId, StepReport

PROMPT, MAX_NEW = ids(6), 6


@cache
def seeds() -> list[int]:
    """Seeds whose first token is one and the same and whose second is not: what is shared then is theirs."""
    streams = {seed: from_scratch(model_of(), PROMPT, 2, seed)[0] for seed in range(150)}
    by_first: dict[int, dict[int, int]] = defaultdict(dict)
    for seed, (first, second) in streams.items():
        by_first[first].setdefault(second, seed)
    return list(max(by_first.values(), key=len).values())


def sharers(count: int) -> tuple[PagedSessionScheduler, list[SessionId]]:
    """Sessions of seven tokens in the same two blocks of four; each writes to the second next."""
    scheduler = paged_scheduler(model_of())
    sessions = [watched(scheduler, PROMPT, MAX_NEW, seed) for seed in seeds()[:count]]
    assert len(sessions) == count
    scheduler.step()
    core, (first, *rest) = scheduler.pool.core, [scheduler.session(id).handle for id in sessions]
    for handle in rest:
        core.truncate(handle, 0)
        core.splice(first, handle, 0, 2)
    return scheduler, sessions


def leave(scheduler: PagedSessionScheduler, free: int) -> None:
    """Take all blocks but ``free``, and let nothing survive in those."""
    pool = scheduler.pool
    opened(pool, (pool.core.free_blocks - free) * pool.geometry.block_size)
    poison_free(pool)


def stepped(scheduler: PagedSessionScheduler, arm: str) -> StepReport:
    return scheduler.step_batched(8) if arm == "batched" else scheduler.step()


@pytest.mark.parametrize("arm", ["serial", "batched"])
@pytest.mark.parametrize(
    ("count", "free", "grow"), [(2, 1, 2), (3, 2, 3), (4, 3, 4), (2, 0, 0), (3, 1, 1), (4, 2, 2), (4, 9, 4)]
)
def test_the_last_to_write_to_a_shared_block_keeps_it(count: int, free: int, grow: int, arm: str) -> None:
    """Who has ended still holds the block until it is reaped, so that nobody behind it keeps it either."""
    scheduler, sessions = sharers(count)
    leave(scheduler, free)
    report = stepped(scheduler, arm)
    assert report.advanced == sessions[:grow]
    assert [(id, type(error)) for id, error in report.errored] == [
        (id, OutOfBlocksError) for id in sessions[grow:]
    ]
    assert scheduler.kv_free_blocks == free - min(grow, count - 1)
    assert report.used_batched_arm == (arm == "batched" and grow > 1)
    for id, seed in list(zip(sessions, seeds(), strict=False))[:grow]:
        tokens, _ = from_scratch(model_of(), PROMPT, 3, seed)
        assert scheduler.session_new_tokens(id) == tokens


@pytest.mark.parametrize("arm", ["serial", "batched"])
@pytest.mark.parametrize("free", [2, 3])
def test_where_one_that_does_not_write_shares_too_each_writer_needs_a_copy(free: int, arm: str) -> None:
    scheduler, sessions = sharers(4)
    scheduler.evict_session(sessions[0])  # what it shares stays where it is, and its own
    leave(scheduler, free)
    report = stepped(scheduler, arm)
    assert report.advanced == sessions[1 : 1 + free]
    assert [id for id, _ in report.errored] == sessions[1 + free :]
    assert scheduler.kv_free_blocks == 0


def test_sharers_that_part_in_one_pass_go_on_as_if_each_were_alone() -> None:
    scheduler, sessions = sharers(3)
    leave(scheduler, 2 + 3)
    while not scheduler.is_all_finished:
        report = scheduler.step_batched(3)
        assert report.used_batched_arm
        assert not report.errored
    for id, seed in zip(sessions, seeds(), strict=False):
        assert_as_alone(scheduler, id, model_of(), PROMPT, MAX_NEW, seed, within=TOLERANCE)


# --- blocks that left through the pool


@pytest.mark.parametrize("arm", ["serial", "batched"])
@pytest.mark.parametrize("slots", [[1], [0], [0, 1]])
@pytest.mark.parametrize("loser", [0, 1, 2])
def test_a_session_whose_block_was_evicted_through_the_pool_ends_and_no_other(
    loser: int, slots: list[int], arm: str
) -> None:
    scheduler = paged_scheduler(model_of())
    cases = [(ids(5, seed), 6, seed) for seed in range(3)]
    watch = [watched(scheduler, *case) for case in cases]
    scheduler.step()
    scheduler.pool.core.evict_blocks(scheduler.session(watch[loser]).handle, slots)
    poison_free(scheduler.pool)
    report = stepped(scheduler, arm)
    [(lost, error)] = report.errored
    assert lost == watch[loser]
    assert isinstance(error, SessionNotResidentError)
    assert error.slot == slots[0]
    assert report.advanced == [id for id in watch if id != lost]
    while not scheduler.is_all_finished:
        assert not stepped(scheduler, arm).errored
    for id, case in zip(watch, cases, strict=True):
        if id != lost:
            within = TOLERANCE if arm == "batched" else None
            assert_as_alone(scheduler, id, model_of(), *case, within=within)
    scheduler.reap_finished()
    assert scheduler.kv_free_blocks == 64


def test_an_evicted_full_last_block_ends_its_session_alone() -> None:
    scheduler = paged_scheduler(model_of())
    watch = [scheduler.add_session(ids(7, seed), max_new_tokens=6) for seed in range(3)]
    scheduler.step()  # eight tokens each
    scheduler.pool.core.evict_blocks(scheduler.session(watch[1]).handle, [1])
    report = scheduler.step_batched(3)
    assert [id for id, _ in report.errored] == [watch[1]]
    assert report.advanced == [watch[0], watch[2]]


def test_one_that_has_lost_its_blocks_takes_no_room_from_the_others() -> None:
    scheduler = paged_scheduler(model_of())
    watch = [scheduler.add_session(ids(7, seed), max_new_tokens=6) for seed in range(3)]
    scheduler.step()
    scheduler.pool.core.evict_blocks(scheduler.session(watch[0]).handle, [0])
    leave(scheduler, 2)
    report = scheduler.step_batched(3)
    assert report.advanced == watch[1:]
    assert [id for id, _ in report.errored] == watch[:1]
