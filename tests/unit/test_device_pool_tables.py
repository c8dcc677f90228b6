"""Page tables say where sessions lie, in whatever blocks, and cut nothing off."""

from __future__ import annotations

import pytest
import torch
from support_paged import make_pool, opened, shuffle, untouched

from fuel_core.contracts.errors import CapacityError, SessionNotResidentError, UnknownSessionError
from fuel_core.kv import DeviceKvPool, PageTable, SessionHandle


def rows(table: PageTable) -> list[list[int]]:
    assert table.block_table.dtype == table.context_lens.dtype == torch.int32
    assert table.block_table.device.type == table.context_lens.device.type == "cpu"
    assert tuple(table.block_table.shape) == (table.batch, table.max_blocks)
    assert tuple(table.context_lens.shape) == (table.batch,)
    result: list[list[int]] = table.block_table.tolist()
    return result


def scattered() -> tuple[DeviceKvPool, SessionHandle, SessionHandle]:
    """Sessions of 12 and 6 tokens that lie in blocks out of order."""
    pool = make_pool(16)
    filler = opened(pool, 8)
    long = opened(pool, 12)
    pool.core.discard(filler)
    short = opened(pool, 6)
    assert pool.core.session_block_table(long) == (2, 3, 4)
    return pool, long, short


def test_a_row_is_the_blocks_that_a_session_has_padded_with_zero() -> None:
    pool, long, short = scattered()
    own = list(pool.core.session_block_table(short))
    assert sorted(own) == [0, 1]
    table = pool.materialize_block_table([long, short])
    assert rows(table) == [[2, 3, 4], [*own, 0]]
    assert table.context_lens.tolist() == [12, 6]
    assert (table.batch, table.max_blocks) == (2, 3)


def test_rows_stand_in_the_order_asked_for() -> None:
    pool = make_pool(32, 4)
    shuffle(pool, 3)
    sessions = [opened(pool, tokens) for tokens in (1, 4, 5, 17)]
    for order in ((3, 0, 2, 1), (2,), (1, 1)):
        table = pool.materialize_block_table([sessions[i] for i in order])
        expected = [list(pool.core.session_block_table(sessions[i])) for i in order]
        width = max(map(len, expected))
        assert rows(table) == [row + [0] * (width - len(row)) for row in expected]
        assert table.context_lens.tolist() == [(1, 4, 5, 17)[i] for i in order]


def test_a_table_is_at_least_one_block_wide() -> None:
    pool = make_pool()
    empty = pool.core.open()
    for table in (pool.materialize_block_table([empty]), pool.materialize_block_table_padded([empty], 0)):
        assert rows(table) == [[0]]
        assert table.context_lens.tolist() == [0]
    for table in (pool.materialize_block_table([]), pool.materialize_block_table_padded([], 3)):
        assert rows(table) == []
        assert table.max_blocks == (1 if table.block_table.shape[1] == 1 else 3)


@pytest.mark.parametrize("cap", [3, 4, 16])
def test_a_padded_table_is_as_wide_as_it_was_asked_to_be(cap: int) -> None:
    pool, long, short = scattered()
    fitted, padded = (
        pool.materialize_block_table([long, short]),
        pool.materialize_block_table_padded([long, short], cap),
    )
    assert padded.max_blocks == cap
    assert rows(padded) == [row + [0] * (cap - 3) for row in rows(fitted)]
    assert torch.equal(padded.context_lens, fitted.context_lens)


@pytest.mark.parametrize("cap", [-1, 0, 1, 2])
def test_a_session_wider_than_the_table_is_refused_and_never_cut(cap: int) -> None:
    pool, long, short = scattered()
    with untouched(pool, CapacityError) as caught:
        pool.materialize_block_table_padded([short, long], cap)
    assert (caught.value.need, caught.value.have) == (3, max(cap, 1))
    assert rows(pool.materialize_block_table_padded([short], 2)) == rows(
        pool.materialize_block_table([short])
    )


@pytest.mark.parametrize("slot", [0, 2])
def test_a_session_with_an_evicted_block_has_no_table(slot: int) -> None:
    pool, long, short = scattered()
    evicted = pool.evict_blocks(long, [slot])
    calls = (
        lambda: pool.materialize_block_table([short, long]),
        lambda: pool.materialize_block_table_padded([short, long], 8),
    )
    for call in calls:
        with untouched(pool, SessionNotResidentError) as caught:
            call()
        assert caught.value.slot == slot
    assert pool.materialize_block_table([short]).batch == 1
    pool.restore(long, evicted)
    assert pool.materialize_block_table([short, long]).context_lens.tolist() == [6, 12]


def test_a_session_that_there_is_not_has_no_table() -> None:
    pool, long, short = scattered()
    pool.core.discard(short)
    for gone in (short, SessionHandle(99)):
        with untouched(pool, UnknownSessionError):
            pool.materialize_block_table([long, gone])
        with untouched(pool, UnknownSessionError):
            pool.materialize_block_table_padded([long, gone], 8)


def test_a_table_is_a_picture_that_later_changes_leave_alone() -> None:
    pool, long, _ = scattered()
    table = pool.materialize_block_table([long])
    pool.core.append(long, 4)
    assert rows(table) == [[2, 3, 4]]
    assert table.context_lens.tolist() == [12]
    assert pool.materialize_block_table([long]).max_blocks == 4
