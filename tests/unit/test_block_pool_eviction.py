"""Only what a session holds alone leaves the pool."""

from __future__ import annotations

import pytest
from support_block_pool import make_pool, opened, refused

from fuel_core.contracts.errors import (
    BadBlockIndexError,
    InvalidRequestError,
    SessionNotResidentError,
    UnknownSessionError,
)
from fuel_core.kv import Fidelity, SessionHandle, StateKind

# -- evicting --------------------------------------------------------------------------------------


def test_an_evicted_session_keeps_its_fill_and_frees_its_blocks() -> None:
    pool = make_pool(num_blocks=4, block_size=4)
    session = opened(pool, 10)
    report = pool.evict(session)
    assert (report.freed, report.still_shared, pool.free_blocks) == (3, 0, 4)
    assert pool.session_blocks(session) == (None, None, None)
    assert pool.filled_tokens(session) == 10
    assert pool.kv_bytes_resident == 0


def test_a_handle_says_whose_state_it_is_and_what_it_promises() -> None:
    pool = make_pool(num_blocks=4, block_size=4)
    opened(pool, 1)
    session = opened(pool, 10)
    handle = pool.evict_blocks(session, [2, 0]).handle
    assert (handle.session, handle.slots) == (session, (0, 2))
    assert handle.covers == (StateKind.KV_BLOCKS,)
    assert handle.fidelity is Fidelity.LOSSY
    assert set(Fidelity) == {Fidelity.LOSSY, Fidelity.EXACT}


def test_a_block_that_another_session_shares_stays() -> None:
    pool = make_pool(num_blocks=4, block_size=4)
    session, sharer = opened(pool, 9), pool.open()
    pool.splice(session, sharer, 0, 2)
    report = pool.evict(session)
    assert (report.freed, report.still_shared, report.handle.slots) == (1, 2, (2,))
    assert pool.session_block_table(sharer) == (0, 1)
    assert pool.session_blocks(session) == (0, 1, None)


def test_a_block_that_a_prefix_owns_stays_even_when_no_other_session_shares_it() -> None:
    pool = make_pool(num_blocks=4, block_size=4)
    session = opened(pool, 9)
    prefix = pool.register_prefix(session, 8)
    report = pool.evict(session)
    assert (report.freed, report.still_shared) == (1, 2)
    assert pool.prefix_blocks(prefix) == (0, 1)
    pool.release_prefix(prefix)
    assert pool.evict(session).freed == 2, "without the prefix they are the session's own"


def test_a_block_that_a_session_holds_in_two_slots_stays() -> None:
    pool = make_pool(num_blocks=4, block_size=4)
    session = opened(pool, 4)
    pool.splice(session, session, 0, 1)
    report = pool.evict(session)
    assert (report.freed, report.still_shared) == (0, 2)
    assert pool.session_block_table(session) == (0, 0)


def test_what_was_evicted_before_is_passed_over_and_counts_as_neither() -> None:
    pool = make_pool(num_blocks=4, block_size=4)
    session = opened(pool, 12)
    first = pool.evict_blocks(session, [1]).handle
    report = pool.evict_blocks(session, [0, 1])
    assert (report.freed, report.still_shared, report.handle.slots) == (1, 0, (0,))
    everything = pool.evict(session)
    assert (everything.freed, everything.handle.slots) == (1, (2,))
    assert [slot for slot, _ in pool.restore(session, first)] == [1]


def test_an_eviction_that_frees_nothing_still_gives_a_handle_that_restores_once() -> None:
    pool = make_pool(num_blocks=4, block_size=4)
    session = pool.open()
    report = pool.evict(session)
    assert (report.freed, report.still_shared, report.handle.slots) == (0, 0, ())
    assert pool.evict_blocks(session, []).freed == 0
    assert pool.restore(session, report.handle) == []
    with refused(pool, InvalidRequestError):
        pool.restore(session, report.handle)


@pytest.mark.parametrize("slots", [[3], [-1], [0, 3], [1, 1], [2, 0, 2], [10**9]])
def test_an_index_out_of_range_or_named_twice_evicts_nothing(slots: list[int]) -> None:
    pool = make_pool(num_blocks=4, block_size=4)
    session = opened(pool, 12)
    with refused(pool, BadBlockIndexError):
        pool.evict_blocks(session, slots)


def test_a_range_is_evicted_up_to_its_end_which_stays() -> None:
    pool = make_pool(num_blocks=6, block_size=4)
    session = opened(pool, 20)
    assert pool.evict_range(session, 1, 3).handle.slots == (1, 2)
    assert pool.session_blocks(session) == (0, None, None, 3, 4)
    assert pool.evict_range(session, 3, 3).handle.slots == ()
    assert pool.evict_range(session, 0, 5).freed == 3


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (2, 1), (0, 4), (4, 4), (-2, -1)])
def test_a_range_that_the_session_does_not_have_evicts_nothing(start: int, end: int) -> None:
    pool = make_pool(num_blocks=4, block_size=4)
    session = opened(pool, 12)
    with refused(pool, BadBlockIndexError) as caught:
        pool.evict_range(session, start, end)
    assert (caught.value.start, caught.value.end) == (start, end)


@pytest.mark.parametrize("session", [SessionHandle(7), SessionHandle(-1)])
def test_an_unknown_session_is_neither_evicted_nor_restored(session: SessionHandle) -> None:
    pool = make_pool(num_blocks=4, block_size=4)
    handle = pool.evict(opened(pool, 4)).handle
    for call in (
        lambda: pool.evict(session),
        lambda: pool.evict_blocks(session, []),
        lambda: pool.evict_range(session, 0, 0),
        lambda: pool.restore(session, handle),
    ):
        with refused(pool, UnknownSessionError) as caught:
            call()
        assert caught.value.session == session


# -- living on, evicted ----------------------------------------------------------------------------


def test_a_session_whose_partly_filled_last_block_is_away_does_not_grow() -> None:
    pool = make_pool(num_blocks=4, block_size=4)
    session = opened(pool, 6)
    pool.evict_blocks(session, [1])
    for call in (lambda: pool.append(session, 1), lambda: pool.blocks_required_for(session, 1)):
        with refused(pool, SessionNotResidentError) as caught:
            call()
        assert caught.value.slot == 1
    pool.append(session, 0)
    assert pool.blocks_required_for(session, 0) == 0


def test_a_session_whose_last_block_is_full_grows_though_it_is_away() -> None:
    pool = make_pool(num_blocks=4, block_size=4)
    session = opened(pool, 8)
    pool.evict(session)
    assert pool.blocks_required_for(session, 1) == 1
    pool.append(session, 1)
    assert pool.filled_tokens(session) == 9
    [*away, new] = pool.session_blocks(session)
    assert away == [None, None]
    assert new is not None


def test_a_session_whose_first_block_is_away_grows_in_its_last() -> None:
    pool = make_pool(num_blocks=4, block_size=4)
    session = opened(pool, 6)
    pool.evict_blocks(session, [0])
    pool.append(session, 3)
    assert pool.session_blocks(session)[0] is None
    assert pool.filled_tokens(session) == 9


def test_an_evicted_slot_is_not_broken_and_not_shared() -> None:
    pool = make_pool(num_blocks=6, block_size=4)
    session, other = opened(pool, 12), pool.open()
    pool.evict_blocks(session, [1])
    for call in (
        lambda: pool.cow_break(session, 1),
        lambda: pool.splice(session, other, 0, 2),
        lambda: pool.splice(session, other, 0, 3),
        lambda: pool.register_prefix(session, 8),
    ):
        with refused(pool, SessionNotResidentError) as caught:
            call()
        assert caught.value.slot == 1
    pool.splice(session, other, 2, 3)
    pool.register_prefix(session, 4)


def test_an_evicted_session_is_discarded_whole_and_its_handle_with_it() -> None:
    pool = make_pool(num_blocks=4, block_size=4)
    session = opened(pool, 12)
    handle = pool.evict_blocks(session, [1]).handle
    pool.discard(session)
    assert pool.free_blocks == 4
    assert [pool.block_refcount(block) for block in range(4)] == [0] * 4
    with refused(pool, UnknownSessionError):
        pool.restore(session, handle)
    other = pool.open()
    with refused(pool, InvalidRequestError):
        pool.restore(other, handle)
