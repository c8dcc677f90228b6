"""What was evicted comes back once, from its own handle, into its own session, to where it was."""

from __future__ import annotations

import copy
import gc
import weakref

from support_block_pool import make_pool, opened, refused

from fuel_core.contracts.errors import InvalidRequestError, OutOfBlocksError


def test_a_restored_session_has_a_block_in_every_slot_and_says_which_are_new() -> None:
    pool = make_pool(num_blocks=4, block_size=4)
    session = opened(pool, 10)
    handle = pool.evict_blocks(session, [2, 0]).handle
    other = opened(pool, 1)
    pairs = pool.restore(session, handle)
    assert [slot for slot, _ in pairs] == [0, 2]
    table = pool.session_block_table(session)
    assert [(slot, table[slot]) for slot in (0, 2)] == pairs
    assert table[1] == 1
    assert len({*table, *pool.session_block_table(other)}) == 4
    assert (pool.filled_tokens(session), pool.free_blocks) == (10, 0)


def test_restoring_does_not_reset_a_fill_that_grew_meanwhile() -> None:
    pool = make_pool(num_blocks=6, block_size=4)
    session = opened(pool, 8)
    handle = pool.evict_blocks(session, [0]).handle
    pool.append(session, 5)
    before = pool.session_blocks(session)
    pool.restore(session, handle)
    assert pool.filled_tokens(session) == 13
    assert pool.session_block_table(session)[1:] == before[1:]


def test_a_restore_that_does_not_fit_leaves_the_handle_good() -> None:
    pool = make_pool(num_blocks=4, block_size=4)
    session = opened(pool, 12)
    handle = pool.evict(session).handle
    hog = opened(pool, 8)
    with refused(pool, OutOfBlocksError) as caught:
        pool.restore(session, handle)
    assert (caught.value.need, caught.value.have) == (3, 2)
    pool.truncate(hog, 4)
    assert len(pool.restore(session, handle)) == 3


def test_a_handle_restores_once() -> None:
    pool = make_pool(num_blocks=4, block_size=4)
    session = opened(pool, 8)
    handle = pool.evict(session).handle
    pool.restore(session, handle)
    with refused(pool, InvalidRequestError):
        pool.restore(session, handle)
    again = pool.evict(session).handle
    with refused(pool, InvalidRequestError):
        pool.restore(session, handle)
    pool.restore(session, again)


def test_a_handle_restores_only_into_its_own_session_and_stays_good_when_another_is_named() -> None:
    pool = make_pool(num_blocks=6, block_size=4)
    session, other = opened(pool, 8), opened(pool, 8)
    handle = pool.evict(session).handle
    pool.evict(other)
    with refused(pool, InvalidRequestError) as caught:
        pool.restore(other, handle)
    assert caught.value.session == other
    pool.restore(session, handle)


def test_a_handle_of_another_pool_or_a_copy_of_one_restores_nothing() -> None:
    pool, twin = make_pool(4, 4), make_pool(4, 4)
    session, same_number = opened(pool, 8), opened(twin, 8)
    assert session == same_number
    handle, theirs = pool.evict(session).handle, twin.evict(same_number).handle
    for stranger in (theirs, copy.copy(handle)):
        with refused(pool, InvalidRequestError):
            pool.restore(session, stranger)
    pool.restore(session, handle)


def test_a_report_in_place_of_its_handle_is_told_from_a_spent_one_and_the_handle_stays_good() -> None:
    pool = make_pool(num_blocks=4, block_size=4)
    session = opened(pool, 8)
    report = pool.evict(session)
    for stranger, name in ((report, "EvictReport"), (None, "NoneType"), ([], "list")):
        with refused(pool, InvalidRequestError) as caught:
            pool.restore(session, stranger)  # type: ignore[arg-type]
        assert caught.value.given.startswith(name)
        assert caught.value.remedy == "pass report.handle"
    assert len(pool.restore(session, report.handle)) == 2
    with refused(pool, InvalidRequestError) as caught:
        pool.restore(session, report.handle)
    assert "report.handle" not in caught.value.remedy


def test_handles_of_one_session_restore_in_any_order_and_only_what_each_took() -> None:
    pool = make_pool(num_blocks=6, block_size=4)
    session = opened(pool, 24)
    first, second = (pool.evict_range(session, start, start + 2).handle for start in (0, 3))
    assert [slot for slot, _ in pool.restore(session, second)] == [3, 4]
    assert pool.session_blocks(session)[:2] == (None, None)
    assert [slot for slot, _ in pool.restore(session, first)] == [0, 1]
    assert sorted(pool.session_block_table(session)) == list(range(6))


def test_a_slot_that_was_truncated_away_is_not_restored() -> None:
    pool = make_pool(num_blocks=6, block_size=4)
    session = opened(pool, 12)
    handle = pool.evict(session).handle
    pool.truncate(session, 5)
    assert pool.free_blocks == 6
    assert [slot for slot, _ in pool.restore(session, handle)] == [0, 1]
    assert len(pool.session_block_table(session)) == 2


def test_a_slot_that_was_truncated_away_and_grew_again_belongs_to_no_old_handle() -> None:
    pool = make_pool(num_blocks=6, block_size=4)
    session = opened(pool, 12)
    old = pool.evict_blocks(session, [1, 2]).handle
    pool.truncate(session, 4)
    pool.append(session, 8)
    grown = pool.session_block_table(session)
    new = pool.evict_blocks(session, [2]).handle
    assert pool.restore(session, old) == []
    assert pool.session_blocks(session) == (*grown[:2], None)
    assert [slot for slot, _ in pool.restore(session, new)] == [2]


def test_a_pool_remembers_no_handle_that_is_restored_or_that_nobody_can_restore() -> None:
    pool = make_pool(num_blocks=6, block_size=4)
    session = opened(pool, 4)
    kept = pool.evict(session).handle
    dropped = [weakref.ref(pool.evict(session).handle) for _ in range(3)]
    gc.collect()
    assert [handle() for handle in dropped] == [None] * 3
    assert len(pool.restore(session, kept)) == 1
    spent = weakref.ref(kept)
    del kept
    gc.collect()
    assert spent() is None
