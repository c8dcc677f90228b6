"""A shared block lives as long as anyone refers to it, and nobody writes to it but through a copy."""

from __future__ import annotations

import pytest
from support_block_pool import make_pool, opened, refused

from fuel_core.contracts.errors import (
    BadSpliceRangeError,
    OffsetNotBlockAlignedError,
    OutOfBlocksError,
    PrefixMismatchError,
    PrefixNotFullyFilledError,
    PrefixTargetNotEmptyError,
    SessionNotResidentError,
    UnknownPrefixError,
    UnknownSessionError,
)
from fuel_core.kv import KvBlockPool, PrefixId, SessionHandle

# -- splicing --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "end", "tokens"),
    [(0, 1, 4), (0, 2, 8), (0, 3, 10), (2, 3, 2), (1, 3, 6), (1, 1, 0), (3, 3, 0), (0, 0, 0)],
)
def test_a_splice_brings_the_blocks_and_the_tokens_that_they_carry(start: int, end: int, tokens: int) -> None:
    pool = make_pool(num_blocks=6, block_size=4)
    src, dst = opened(pool, 10), opened(pool, 4)
    own, free = pool.session_block_table(dst), pool.free_blocks
    pool.splice(src, dst, start, end)
    assert pool.session_block_table(dst) == own + pool.session_block_table(src)[start:end]
    assert pool.filled_tokens(dst) == 4 + tokens
    assert (pool.filled_tokens(src), pool.free_blocks) == (10, free)


@pytest.mark.parametrize(("start", "end"), [(-1, 1), (0, 4), (2, 1), (4, 4), (-3, -1), (0, 10**9)])
def test_a_range_that_the_source_does_not_have_is_not_spliced(start: int, end: int) -> None:
    pool = make_pool(num_blocks=6, block_size=4)
    src, dst = opened(pool, 10), pool.open()
    with refused(pool, BadSpliceRangeError) as caught:
        pool.splice(src, dst, start, end)
    assert (caught.value.start, caught.value.end) == (start, end)


def test_nothing_is_spliced_behind_a_block_that_is_filled_in_part() -> None:
    pool = make_pool(num_blocks=6, block_size=4)
    src, dst = opened(pool, 8), opened(pool, 5)
    with refused(pool, OffsetNotBlockAlignedError) as caught:
        pool.splice(src, dst, 0, 1)
    assert (caught.value.offset, caught.value.block_size) == (5, 4)
    pool.append(dst, 3)
    pool.splice(src, dst, 0, 1)


def test_a_fork_takes_the_partly_filled_last_block_and_can_be_spliced_to_no_more() -> None:
    pool = make_pool(num_blocks=6, block_size=4)
    src, fork = opened(pool, 6), pool.open()
    pool.splice(src, fork, 0, 2)
    assert pool.filled_tokens(fork) == 6
    with refused(pool, OffsetNotBlockAlignedError):
        pool.splice(src, fork, 0, 1)


def test_a_session_is_spliced_to_itself_as_it_was_before() -> None:
    pool = make_pool(num_blocks=6, block_size=4)
    session = opened(pool, 8)
    pool.splice(session, session, 0, 2)
    assert pool.session_block_table(session) == (0, 1, 0, 1)
    assert (pool.filled_tokens(session), pool.block_refcount(0), pool.free_blocks) == (16, 2, 4)
    pool.discard(session)
    assert pool.free_blocks == 6


def test_a_target_whose_full_last_block_is_away_is_spliced_to() -> None:
    pool = make_pool(num_blocks=6, block_size=4)
    src, dst = opened(pool, 4), opened(pool, 4)
    handle = pool.evict(dst).handle
    pool.splice(src, dst, 0, 1)
    assert pool.session_blocks(dst) == (None, 0)
    pool.restore(dst, handle)
    assert pool.session_block_table(dst)[1] == 0


def test_spliced_blocks_outlive_their_donor_and_are_freed_with_their_last_sharer() -> None:
    pool = make_pool(num_blocks=3, block_size=4)
    donor, a, b = opened(pool, 12), pool.open(), pool.open()
    pool.splice(donor, a, 0, 3)
    pool.splice(a, b, 1, 3)
    pool.discard(donor)
    assert pool.free_blocks == 0
    pool.discard(a)
    assert pool.free_blocks == 1
    assert pool.session_block_table(b) == (1, 2)
    pool.discard(b)
    assert pool.free_blocks == 3


def test_a_splice_names_the_session_that_is_unknown() -> None:
    pool = make_pool(num_blocks=3, block_size=4)
    known, unknown = opened(pool, 4), SessionHandle(9)
    for src, dst in ((known, unknown), (unknown, known)):
        with refused(pool, UnknownSessionError) as caught:
            pool.splice(src, dst, 0, 1)
        assert caught.value.session == unknown


# -- copy on write ---------------------------------------------------------------------------------


def test_a_break_gives_a_fresh_block_and_the_sharer_keeps_the_old_one() -> None:
    pool = make_pool(num_blocks=4, block_size=4)
    donor, sharer = opened(pool, 8), pool.open()
    pool.splice(donor, sharer, 0, 2)
    assert pool.cow_break(sharer, 1) == (1, 2)
    assert pool.session_block_table(sharer) == (0, 2)
    assert pool.session_block_table(donor) == (0, 1)
    assert [pool.block_refcount(block) for block in range(3)] == [2, 1, 1]
    assert (pool.filled_tokens(sharer), pool.filled_tokens(donor)) == (8, 8)


def test_a_block_of_one_s_own_is_not_broken() -> None:
    pool = make_pool(num_blocks=4, block_size=4)
    donor, sharer = opened(pool, 8), pool.open()
    pool.splice(donor, sharer, 0, 1)
    assert pool.cow_break(donor, 1) is None
    assert pool.cow_break(sharer, 0) is not None
    assert pool.cow_break(sharer, 0) is None
    assert pool.cow_break(donor, 0) is None
    assert pool.free_blocks == 1


def test_a_block_that_a_prefix_owns_is_broken_though_no_session_shares_it() -> None:
    pool = make_pool(num_blocks=4, block_size=4)
    session = opened(pool, 4)
    prefix = pool.register_prefix(session, 4)
    assert pool.cow_break(session, 0) == (0, 1)
    assert pool.prefix_blocks(prefix) == (0,)


def test_a_break_without_a_free_block_leaves_the_share() -> None:
    pool = make_pool(num_blocks=2, block_size=4)
    donor, sharer = opened(pool, 8), pool.open()
    pool.splice(donor, sharer, 0, 1)
    with refused(pool, OutOfBlocksError) as caught:
        pool.cow_break(sharer, 0)
    assert (caught.value.need, caught.value.have) == (1, 0)
    pool.truncate(donor, 4)
    assert pool.cow_break(sharer, 0) == (0, 1)


# -- prefixes --------------------------------------------------------------------------------------


def with_prefix(pool: KvBlockPool, tokens: int) -> PrefixId:
    """A prefix whose donor is gone."""
    donor = opened(pool, tokens)
    prefix = pool.register_prefix(donor, tokens)
    pool.discard(donor)
    return prefix


def test_a_prefix_keeps_its_blocks_after_the_donor_is_gone() -> None:
    pool = make_pool(num_blocks=4, block_size=4)
    donor = opened(pool, 11)
    prefix = pool.register_prefix(donor, 8)
    pool.discard(donor)
    assert pool.prefix_blocks(prefix) == (0, 1)
    assert pool.free_blocks == 2
    pool.release_prefix(prefix)
    assert pool.free_blocks == 4


@pytest.mark.parametrize("tokens", [-4, 0, 1, 3, 5, 7, 10, 12, 16])
def test_only_whole_filled_blocks_are_a_prefix(tokens: int) -> None:
    pool = make_pool(num_blocks=6, block_size=4)
    donor = opened(pool, 11)
    with refused(pool, PrefixNotFullyFilledError) as caught:
        pool.register_prefix(donor, tokens)
    assert (caught.value.tokens, caught.value.filled) == (tokens, 11)
    assert [pool.prefix_blocks(pool.register_prefix(donor, n)) for n in (4, 8)] == [(0,), (0, 1)]


def test_a_prefix_of_an_evicted_donor_is_refused_by_the_slot() -> None:
    pool = make_pool(num_blocks=6, block_size=4)
    donor = opened(pool, 12)
    pool.evict_blocks(donor, [1])
    with refused(pool, SessionNotResidentError) as caught:
        pool.register_prefix(donor, 8)
    assert caught.value.slot == 1


def test_a_prefix_that_was_registered_twice_is_released_twice() -> None:
    pool = make_pool(num_blocks=4, block_size=4)
    donor = opened(pool, 4)
    first, second = pool.register_prefix(donor, 4), pool.register_prefix(donor, 4)
    assert first != second
    pool.discard(donor)
    pool.release_prefix(first)
    assert pool.prefix_blocks(second) == (0,)
    pool.release_prefix(second)
    assert pool.free_blocks == 4
    assert pool.register_prefix(opened(pool, 4), 4) not in (first, second)


def test_a_prefix_is_shared_with_an_empty_session_from_its_first_token() -> None:
    pool = make_pool(num_blocks=4, block_size=4)
    prefix = with_prefix(pool, 8)
    dst, free = pool.open(), pool.free_blocks
    assert pool.splice_prefix_from(prefix, dst) == 8
    assert (pool.filled_tokens(dst), pool.session_block_table(dst)) == (8, pool.prefix_blocks(prefix))
    assert pool.free_blocks == free
    pool.append(dst, 1)
    assert pool.session_block_table(dst)[:2] == pool.prefix_blocks(prefix)


def test_a_prefix_and_its_sharers_do_not_free_each_other_s_blocks() -> None:
    pool = make_pool(num_blocks=4, block_size=4)
    prefix = with_prefix(pool, 8)
    a, b = pool.open(), pool.open()
    pool.splice_prefix_from(prefix, a)
    pool.discard(a)
    assert pool.prefix_blocks(prefix) == (0, 1)
    pool.splice_prefix_from(prefix, b)
    pool.release_prefix(prefix)
    assert pool.session_block_table(b) == (0, 1)
    assert pool.free_blocks == 2


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_prefix_is_not_shared_with_a_session_that_has_tokens(tokens: int) -> None:
    pool = make_pool(num_blocks=4, block_size=4)
    prefix = with_prefix(pool, 8)
    dst = opened(pool, tokens)
    with refused(pool, PrefixTargetNotEmptyError) as caught:
        pool.splice_prefix_from(prefix, dst)
    assert caught.value.filled == tokens
    pool.truncate(dst, 0)
    assert pool.splice_prefix_from(prefix, dst) == 8


def test_a_changed_table_of_the_donor_does_not_change_the_prefix() -> None:
    pool = make_pool(num_blocks=4, block_size=4)
    donor = opened(pool, 4)
    prefix = pool.register_prefix(donor, 4)
    pool.cow_break(donor, 0)
    pool.append(donor, 4)
    assert pool.prefix_blocks(prefix) == (0,)


@pytest.mark.parametrize("is_released", [True, False])
def test_a_prefix_that_is_not_registered_is_refused_everywhere(is_released: bool) -> None:
    pool = make_pool(num_blocks=4, block_size=4)
    prefix = with_prefix(pool, 8)
    if is_released:
        pool.release_prefix(prefix)
    else:
        prefix = PrefixId(prefix + 1)
    dst = pool.open()
    for call in (
        lambda: pool.release_prefix(prefix),
        lambda: pool.prefix_blocks(prefix),
        lambda: pool.splice_prefix_from(prefix, dst),
        lambda: pool.alloc_shifted_prefix_slots(prefix, dst),
    ):
        with refused(pool, UnknownPrefixError) as caught:
            call()
        assert caught.value.prefix == prefix


def test_a_prefix_has_no_place_in_a_session_that_is_not_open() -> None:
    pool = make_pool(num_blocks=4, block_size=4)
    prefix = with_prefix(pool, 4)
    for call in (
        lambda: pool.register_prefix(SessionHandle(9), 4),
        lambda: pool.splice_prefix_from(prefix, SessionHandle(9)),
        lambda: pool.alloc_shifted_prefix_slots(prefix, SessionHandle(9)),
    ):
        with refused(pool, UnknownSessionError) as caught:
            call()
        assert caught.value.session == 9


# -- a prefix at another position ------------------------------------------------------------------


@pytest.mark.parametrize("filled", [0, 4, 8])
def test_a_shifted_prefix_gets_blocks_of_its_own_behind_what_is_there(filled: int) -> None:
    pool = make_pool(num_blocks=8, block_size=4)
    prefix = with_prefix(pool, 8)
    dst = opened(pool, filled)
    before, free = pool.session_block_table(dst), pool.free_blocks
    offset, pairs = pool.alloc_shifted_prefix_slots(prefix, dst)
    assert offset == filled
    assert tuple(source for source, _ in pairs) == pool.prefix_blocks(prefix)
    assert pool.session_block_table(dst) == before + tuple(fresh for _, fresh in pairs)
    assert (pool.filled_tokens(dst), pool.free_blocks) == (filled + 8, free - 2)
    assert all(pool.block_refcount(fresh) == 1 for _, fresh in pairs)
    assert all(pool.block_refcount(source) == 1 for source, _ in pairs)


@pytest.mark.parametrize("filled", [1, 7])
def test_a_shifted_prefix_begins_at_a_block(filled: int) -> None:
    pool = make_pool(num_blocks=8, block_size=4)
    prefix, dst = with_prefix(pool, 8), opened(pool, filled)
    with refused(pool, OffsetNotBlockAlignedError) as caught:
        pool.alloc_shifted_prefix_slots(prefix, dst)
    assert (caught.value.offset, caught.value.block_size) == (filled, 4)


def test_a_shifted_prefix_that_lacks_one_block_takes_none() -> None:
    pool = make_pool(num_blocks=4, block_size=4)
    prefix, dst = with_prefix(pool, 8), opened(pool, 4)
    with refused(pool, OutOfBlocksError) as caught:
        pool.alloc_shifted_prefix_slots(prefix, dst)
    assert (caught.value.need, caught.value.have) == (2, 1)


# -- errors ----------------------------------------------------------------------------------------


def test_a_prompt_that_is_not_the_prefix_s_is_told_what_was_needed() -> None:
    error = PrefixMismatchError(
        "token 7 at position 3", needed="token 5", remedy="drop the prefix", position=3
    )
    assert str(error) == "token 7 at position 3; needed: token 5; drop the prefix"
    assert error.position == 3  # type: ignore[attr-defined]
