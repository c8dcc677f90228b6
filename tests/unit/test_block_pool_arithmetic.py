"""What a pool says will fit is what fits, and no call costs more in a large pool than in a small one."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from support_block_pool import make_pool, opened

from fuel_core.kv import KvBlockPool, SessionHandle

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
