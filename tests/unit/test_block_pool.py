"""A session takes whole blocks as it grows, gives them back as it shrinks, and reads only what is there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from support_block_pool import drained, freeze, make_pool, opened, refused

from fuel_core.contracts.errors import (
    BadBlockIndexError,
    CapacityError,
    InvalidRequestError,
    OutOfBlocksError,
    SessionNotResidentError,
    UnknownSessionError,
)

# -- growing ---------------------------------------------------------------------------------------


def test_a_session_that_fills_the_pool_to_the_last_token_fits_and_one_more_token_does_not() -> None:
    pool = make_pool(num_blocks=3, block_size=4)
    handle = opened(pool, 12)
    assert pool.free_blocks == 0
    with refused(pool, OutOfBlocksError) as caught:
        pool.append(handle, 1)
    assert (caught.value.need, caught.value.have) == (1, 0)
    assert isinstance(caught.value, CapacityError)
    pool.append(handle, 0)


def test_the_room_left_in_a_last_block_costs_no_other() -> None:
    pool = make_pool(num_blocks=4, block_size=4)
    handle = opened(pool, 5)
    first = pool.session_blocks(handle)
    pool.append(handle, 3)
    assert pool.session_blocks(handle) == first
    pool.append(handle, 1)
    assert pool.session_blocks(handle)[:2] == first
    assert len(pool.session_blocks(handle)) == 3


def test_an_append_that_lacks_one_block_takes_none_of_those_that_are_there() -> None:
    pool = make_pool(num_blocks=3, block_size=4)
    opened(pool, 4)
    handle = opened(pool, 3)
    with refused(pool, OutOfBlocksError) as caught:
        pool.append(handle, 6)
    assert (caught.value.need, caught.value.have) == (2, 1)
    assert pool.filled_tokens(handle) == 3


@pytest.mark.parametrize("tokens", [-1, 1.0, 0.5, None])
def test_what_is_no_count_of_tokens_is_refused_everywhere(tokens: Any) -> None:
    pool = make_pool(num_blocks=3, block_size=4)
    handle = opened(pool, 5)
    for call in (
        lambda: pool.append(handle, tokens),
        lambda: pool.truncate(handle, tokens),
        lambda: pool.blocks_required(0, tokens),
        lambda: pool.blocks_required(tokens, 0),
        lambda: pool.blocks_required_batch([(1, 1), (0, tokens)]),
        lambda: pool.blocks_required_for(handle, tokens),
    ):
        with refused(pool, InvalidRequestError):
            call()


# -- shrinking -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3), (10, 3)]
)
def test_a_truncated_session_keeps_the_blocks_of_what_is_left_and_gives_back_the_rest(
    tokens: int, blocks: int
) -> None:
    pool = make_pool(num_blocks=5, block_size=4)
    handle = opened(pool, 10)
    before = pool.session_blocks(handle)
    pool.truncate(handle, tokens)
    assert pool.session_blocks(handle) == before[:blocks]
    assert (pool.filled_tokens(handle), pool.free_blocks) == (tokens, 5 - blocks)


def test_a_session_is_not_truncated_to_more_than_it_has() -> None:
    pool = make_pool(num_blocks=5, block_size=4)
    handle = opened(pool, 10)
    with refused(pool, InvalidRequestError):
        pool.truncate(handle, 11)


def test_a_truncated_session_grows_again_over_its_own_last_block() -> None:
    pool = make_pool(num_blocks=3, block_size=4)
    handle = opened(pool, 10)
    before = pool.session_blocks(handle)
    pool.truncate(handle, 5)
    pool.append(handle, 5)
    assert pool.session_blocks(handle) == before


def test_a_truncation_takes_only_its_own_reference_to_a_shared_block() -> None:
    pool = make_pool(num_blocks=4, block_size=4)
    donor, sharer = opened(pool, 12), pool.open()
    pool.splice(donor, sharer, 0, 3)
    pool.truncate(donor, 4)
    assert pool.session_block_table(sharer) == (0, 1, 2)
    assert [pool.block_refcount(block) for block in range(4)] == [2, 1, 1, 0]
    assert pool.free_blocks == 1


def test_a_discarded_session_s_blocks_serve_the_next_one_in_their_order() -> None:
    pool = make_pool(num_blocks=5, block_size=4)
    first, second = opened(pool, 12), opened(pool, 4)
    freed = pool.session_block_table(first)
    pool.discard(first)
    assert pool.session_block_table(opened(pool, 8)) == freed[:2]
    assert pool.session_block_table(opened(pool, 8)) == (freed[2], 4)
    assert pool.filled_tokens(second) == 4


def test_a_discarded_session_s_handle_is_never_given_out_again() -> None:
    pool = make_pool(num_blocks=1, block_size=4)
    first = opened(pool, 4)
    pool.discard(first)
    assert pool.open() != first
    with refused(pool, UnknownSessionError):
        pool.discard(first)


# -- reading ---------------------------------------------------------------------------------------


def test_a_table_a_slot_and_an_overview_agree_on_a_resident_session() -> None:
    pool = make_pool(num_blocks=8, block_size=4)
    handle = opened(pool, 10)
    table = pool.session_block_table(handle)
    assert pool.session_blocks(handle) == table == (0, 1, 2)
    assert tuple(pool.resident_block(handle, slot) for slot in range(3)) == table


def test_an_evicted_slot_is_none_in_the_overview_and_an_error_in_every_read() -> None:
    pool = make_pool(num_blocks=8, block_size=4)
    handle = opened(pool, 16)
    pool.evict_blocks(handle, [2, 1])
    assert pool.session_blocks(handle) == (0, None, None, 3)
    for read, slot in (
        (lambda: pool.session_block_table(handle), 1),
        (lambda: pool.resident_block(handle, 1), 1),
        (lambda: pool.resident_block(handle, 2), 2),
    ):
        with refused(pool, SessionNotResidentError) as caught:
            read()
        assert caught.value.slot == slot
    assert pool.resident_block(handle, 3) == 3
    assert pool.filled_tokens(handle) == 16


@pytest.mark.parametrize("slot", [-1, 3, 10**6])
def test_a_slot_that_the_session_does_not_have_is_refused_by_its_index(slot: int) -> None:
    pool = make_pool(num_blocks=8, block_size=4)
    handle = opened(pool, 10)
    for call in (
        lambda: pool.resident_block(handle, slot),
        lambda: pool.cow_break(handle, slot),
        lambda: pool.evict_blocks(handle, [0, slot]),
    ):
        with refused(pool, BadBlockIndexError) as caught:
            call()
        assert caught.value.index == slot


@pytest.mark.parametrize("block", [-1, 8])
def test_a_block_that_the_pool_does_not_have_has_no_count(block: int) -> None:
    pool = make_pool(num_blocks=8, block_size=4)
    opened(pool, 32)
    with refused(pool, BadBlockIndexError) as caught:
        pool.block_refcount(block)
    assert caught.value.index == block


def test_a_count_is_one_per_slot_and_one_per_prefix() -> None:
    pool = make_pool(num_blocks=8, block_size=4)
    assert pool.block_refcount(0) == 0
    donor, sharer = opened(pool, 4), pool.open()
    counts = [pool.block_refcount(0)]
    pool.splice(donor, sharer, 0, 1)
    counts.append(pool.block_refcount(0))
    prefixes = [pool.register_prefix(donor, 4) for _ in range(2)]
    counts.append(pool.block_refcount(0))
    pool.discard(donor)
    counts.append(pool.block_refcount(0))
    pool.discard(sharer)
    pool.release_prefix(prefixes[0])
    counts.append(pool.block_refcount(0))
    pool.release_prefix(prefixes[1])
    counts.append(pool.block_refcount(0))
    assert counts == [1, 2, 4, 3, 1, 0]


# -- the tools of these tests, and the package -------------------------------------------------------


def test_the_proof_that_a_refusal_is_harmless_sees_every_change() -> None:
    pool = make_pool(num_blocks=8, block_size=4)
    session = opened(pool, 8)
    changes: list[Callable[[], object]] = [
        pool.open,
        lambda: pool.append(session, 1),
        lambda: pool.register_prefix(session, 8),
        lambda: pool.splice(session, pool.open(), 0, 1),
        lambda: pool.evict(session),
        lambda: pool.discard(session),
    ]
    for change in changes:
        before = freeze(pool)
        assert freeze(pool) == before
        change()
        assert freeze(pool) != before


def test_the_free_blocks_are_listed_without_taking_them() -> None:
    pool = make_pool(num_blocks=4, block_size=4)
    opened(pool, 4)
    before = freeze(pool)
    assert drained(pool) == (1, 2, 3)
    assert freeze(pool) == before


def test_the_pool_works_where_torch_is_never_imported() -> None:
    code = """
import sys
from fuel_core.kv import KvBlockPool, KvBudget, KvGeometry, PoolCapacity, SessionHandle
pool = KvBlockPool(KvGeometry(2, 2, 4, 8, 4, 2))
handle = pool.open()
pool.append(handle, 9)
assert (pool.capacity().free_blocks, pool.session_blocks(handle)) == (5, (0, 1, 2))
pool.restore(handle, pool.evict(handle).handle)
pool.release_prefix(pool.register_prefix(handle, 8))
pool.discard(handle)
assert pool.free_blocks == 8 and pool.kv_bytes_resident == 0
assert "torch" not in sys.modules
from fuel_core.kv import KvCache
assert "torch" in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_of_the_kv_package_is_an_attribute_error() -> None:
    import fuel_core.kv

    with pytest.raises(AttributeError, match="NoSuchCache"):
        fuel_core.kv.NoSuchCache  # noqa: B018
