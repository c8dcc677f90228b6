"""A session takes whole blocks as it grows, gives them back as it shrinks, and every size is exact."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
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
from fuel_core.kv import KvBlockPool, SessionHandle

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


# -- arithmetic ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("filled", "add", "blocks"),
    [(0, 0, 0), (0, 1, 1), (0, 4, 1), (0, 5, 2), (3, 1, 0), (4, 1, 1), (4, 0, 0), (7, 10, 3)],
)
def test_blocks_required_count_only_what_is_new(filled: int, add: int, blocks: int) -> None:
    assert make_pool(num_blocks=1, block_size=4).blocks_required(filled, add) == blocks


def test_a_batch_requires_what_its_sessions_require_one_by_one() -> None:
    pool = make_pool(num_blocks=1, block_size=4)
    # Rounded each on its own: 3 + 3 tokens together would fit in 2 blocks of 4, and 1 + 1 in one.
    assert pool.blocks_required_batch([(0, 3), (0, 3), (3, 1), (4, 1), (7, 10)]) == 1 + 1 + 0 + 1 + 3
    assert pool.blocks_required_batch([(0, 1), (0, 1)]) == 2
    assert pool.blocks_required_batch([]) == 0


@pytest.mark.parametrize("add", [1, 2, 3, 6])
def test_what_a_fork_requires_is_what_its_growth_and_its_break_take(add: int) -> None:
    pool = make_pool(num_blocks=8, block_size=4)
    donor, fork = opened(pool, 6), pool.open()
    pool.splice(donor, fork, 0, 2)
    required, before = pool.blocks_required_for(fork, add), pool.free_blocks
    assert required == pool.blocks_required(6, add) + 1
    pool.append(fork, add)
    pool.cow_break(fork, 1)
    assert before - pool.free_blocks == required
    assert pool.blocks_required_for(fork, 0) == 0
    assert pool.blocks_required_for(donor, 1) == 0, "the donor's last block is its own again"


def test_a_break_is_not_counted_where_nothing_will_be_written_to_the_shared_block() -> None:
    pool = make_pool(num_blocks=8, block_size=4)
    donor, fork, aligned = opened(pool, 6), pool.open(), pool.open()
    pool.splice(donor, fork, 0, 2)
    pool.splice(donor, aligned, 0, 1)
    assert pool.blocks_required_for(fork, 0) == 0
    assert pool.blocks_required_for(aligned, 1) == 1, "a new block, and the shared one is full"


def test_a_break_is_counted_for_a_session_truncated_into_a_prefix() -> None:
    pool = make_pool(num_blocks=8, block_size=4)
    session = opened(pool, 8)
    pool.register_prefix(session, 8)
    pool.truncate(session, 7)
    assert pool.blocks_required_for(session, 1) == 1
    pool.append(session, 1)
    assert pool.cow_break(session, 1) is not None


def test_appending_does_not_break_a_share() -> None:
    pool = make_pool(num_blocks=8, block_size=4)
    donor, fork = opened(pool, 6), pool.open()
    pool.splice(donor, fork, 0, 2)
    pool.append(fork, 1)
    assert pool.session_block_table(fork) == pool.session_block_table(donor)
    assert pool.block_refcount(1) == 2


def test_bytes_count_a_shared_block_once() -> None:
    pool = make_pool(num_blocks=8, block_size=4)
    donor, sharer = opened(pool, 8), pool.open()
    before = pool.kv_bytes_resident
    assert before == 2 * pool.geometry.block_bytes
    pool.splice(donor, sharer, 0, 2)
    pool.register_prefix(donor, 8)
    assert pool.kv_bytes_resident == before
    pool.append(sharer, 1)
    assert pool.kv_bytes_resident == before + pool.geometry.block_bytes


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


# -- size ------------------------------------------------------------------------------------------


def test_a_pool_of_any_size_opens_without_memory_for_each_block() -> None:
    tracemalloc.start()
    pool = make_pool(num_blocks=10**9, block_size=4)
    handle = opened(pool, 40)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000
    assert pool.free_blocks == 10**9 - 10
    assert pool.session_block_table(handle) == tuple(range(10))


def lines_run(call: Callable[[], object]) -> int:
    """Lines of Python that a call takes: a clock that runs the same everywhere."""
    count = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def crowded(sessions: int) -> tuple[KvBlockPool, SessionHandle, SessionHandle]:
    """A pool in which that many sessions hold a block each, and as many blocks were freed again."""
    pool = make_pool(num_blocks=10**6, block_size=4)
    held, gone = ([opened(pool, 4) for _ in range(sessions)] for _ in range(2))
    for handle in gone:
        pool.discard(handle)
    return pool, held[0], held[-1]


def costs(sessions: int) -> list[int]:
    pool, one, other = crowded(sessions)
    own = opened(pool, 8)
    prefix = pool.register_prefix(own, 8)
    return [
        lines_run(lambda: pool.append(one, 4)),
        lines_run(lambda: pool.splice(one, other, 0, 2)),
        lines_run(lambda: pool.cow_break(other, 1)),
        lines_run(lambda: pool.truncate(one, 4)),
        lines_run(lambda: pool.blocks_required_for(one, 5)),
        lines_run(lambda: pool.evict_blocks(other, [2])),
        lines_run(lambda: pool.discard(other)),
        lines_run(lambda: pool.splice_prefix_from(prefix, pool.open())),
        lines_run(lambda: pool.release_prefix(prefix)),
    ]


def test_a_call_costs_as_much_beside_five_thousand_sessions_as_beside_five() -> None:
    assert costs(5) == costs(5_000)
    # The clock does run: twice the blocks are more lines.
    pool = make_pool(num_blocks=99, block_size=4)
    assert lines_run(lambda: pool.discard(opened(pool, 40))) < lines_run(
        lambda: pool.discard(opened(pool, 80))
    )


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
