"""Blocks that are copied on write, moved to the host and brought back: no byte is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support_paged import (
    content,
    contents,
    every_dtype,
    fill,
    make_pool,
    opened,
    poison_free,
    state,
    untouched,
)

from fuel_core.contracts.errors import (
    BadBlockIndexError,
    InvalidRequestError,
    OutOfBlocksError,
    SessionNotResidentError,
    UnknownSessionError,
)
from fuel_core.kv import DeviceEvicted, DeviceKvPool, Fidelity, SessionHandle, StateKind


def written(pool: DeviceKvPool, tokens: int) -> SessionHandle:
    """A session whose every block has bytes of its own."""
    session = opened(pool, tokens)
    for slot, block in enumerate(pool.core.session_block_table(session)):
        fill(pool, block, 100 * session + slot)
    return session


def scribble(pool: DeviceKvPool) -> None:
    """Other bytes in every block that nobody holds."""
    for block in range(pool.geometry.num_blocks):
        if not pool.core.block_refcount(block):
            fill(pool, block, 7000 + block)


# --- copy on write


@every_dtype
@pytest.mark.parametrize("writer", ["donor", "sharer"])
def test_a_shared_block_is_copied_before_a_write_and_the_other_keeps_its_bytes(
    dtype: torch.dtype, writer: str
) -> None:
    pool = make_pool(dtype=dtype)
    donor = written(pool, 6)
    sharer = pool.core.open()
    pool.core.splice(donor, sharer, 0, 2)
    scribble(pool)
    mine, other = (donor, sharer) if writer == "donor" else (sharer, donor)
    before, shared = contents(pool, other), pool.core.resident_block(other, 1)
    assert pool.core.resident_block(mine, 1) == shared
    private = pool.ensure_writable_block(mine, 1)
    assert private == pool.core.resident_block(mine, 1) != shared
    assert [pool.core.block_refcount(block) for block in (private, shared)] == [1, 1]
    assert contents(pool, mine) == contents(pool, other) == before
    fill(pool, private, 9)
    assert contents(pool, other) == before
    assert contents(pool, mine)[1] != before[1]
    assert pool.core.resident_block(mine, 0) == pool.core.resident_block(other, 0)


def test_a_block_of_ones_own_is_written_where_it_is() -> None:
    pool = make_pool()
    session = written(pool, 6)
    before = state(pool)
    assert pool.ensure_writable_block(session, 1) == pool.core.resident_block(session, 1)
    assert state(pool) == before


def test_of_many_sharers_each_gets_a_copy_and_the_last_keeps_the_original() -> None:
    pool = make_pool()
    sessions = [written(pool, 3)]
    original, before = pool.core.resident_block(sessions[0], 0), contents(pool, sessions[0])
    for _ in range(3):
        sessions.append(pool.core.open())
        pool.core.splice(sessions[0], sessions[-1], 0, 1)
    blocks = [pool.ensure_writable_block(session, 0) for session in sessions]
    assert blocks[-1] == original
    assert len(set(blocks)) == 4
    assert pool.core.free_blocks == 4
    assert all(contents(pool, session) == before for session in sessions)


def test_a_copy_that_cannot_be_made_changes_nothing() -> None:
    pool = make_pool(num_blocks=2)
    donor = written(pool, 6)
    sharer = pool.core.open()
    pool.core.splice(donor, sharer, 0, 2)
    with untouched(pool, OutOfBlocksError):
        pool.ensure_writable_block(sharer, 1)
    with untouched(pool, BadBlockIndexError):
        pool.ensure_writable_block(sharer, 2)
    with untouched(pool, UnknownSessionError):
        pool.ensure_writable_block(SessionHandle(99), 0)
    pool.core.discard(sharer)
    pool.evict_blocks(donor, [1])
    with untouched(pool, SessionNotResidentError):
        pool.ensure_writable_block(donor, 1)


# --- out and back


@every_dtype
@pytest.mark.parametrize("tokens", [1, 4, 9])
def test_a_session_comes_back_byte_for_byte_in_whatever_blocks_are_free(
    dtype: torch.dtype, tokens: int
) -> None:
    pool = make_pool(num_blocks=16, dtype=dtype)
    neighbour, session = written(pool, 7), written(pool, tokens)
    before, beside = contents(pool, session), contents(pool, neighbour)
    old, free = pool.core.session_block_table(session), pool.core.free_blocks
    evicted = pool.evict(session)
    assert evicted.saved_block_count == len(old)
    assert (evicted.covers, evicted.fidelity) == ((StateKind.KV_BLOCKS,), Fidelity.LOSSY)
    assert pool.core.free_blocks == free + len(old)
    assert pool.core.filled_tokens(session) == tokens
    intruder = written(pool, tokens)  # takes the blocks that came free
    assert set(pool.core.session_block_table(intruder)) == set(old)
    scribble(pool)
    pool.restore(session, evicted)
    assert not set(pool.core.session_block_table(session)) & set(old)
    assert contents(pool, session) == before
    assert contents(pool, neighbour) == beside
    assert contents(pool, intruder) != before


def test_a_session_that_is_not_brought_back_has_other_bytes() -> None:
    pool = make_pool()
    session = written(pool, 8)
    before = contents(pool, session)
    evicted = pool.evict(session)
    scribble(pool)
    pool.core.restore(session, evicted.handle)
    assert all(now != then for now, then in zip(contents(pool, session), before, strict=True))


@every_dtype
@pytest.mark.parametrize("slots", [[], [0], [3], [2, 0], [3, 1, 2], [0, 1, 2, 3]])
def test_only_the_blocks_that_were_named_move(dtype: torch.dtype, slots: list[int]) -> None:
    pool = make_pool(dtype=dtype)
    session = written(pool, 14)
    before, table = contents(pool, session), pool.core.session_block_table(session)
    evicted = pool.evict_blocks(session, slots)
    assert evicted.saved_block_count == len(slots)
    scribble(pool)
    held = pool.core.session_blocks(session)
    assert held == tuple(None if slot in slots else block for slot, block in enumerate(table))
    assert all(content(pool, block) == before[slot] for slot, block in enumerate(held) if block is not None)
    pool.restore(session, evicted)
    assert contents(pool, session) == before


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_evictions_of_a_session_come_back_in_any_order(order: tuple[int, int]) -> None:
    pool = make_pool()
    session = written(pool, 14)
    before = contents(pool, session)
    evicted = [pool.evict_blocks(session, slots) for slots in ([3, 0], [1, 0])]
    assert [each.saved_block_count for each in evicted] == [2, 1]
    for turn in order:
        scribble(pool)
        pool.restore(session, evicted[turn])
    assert contents(pool, session) == before


def test_what_grew_or_was_cut_meanwhile_stays_so() -> None:
    pool = make_pool()
    session = written(pool, 8)
    before = contents(pool, session)
    evicted = pool.evict(session)
    pool.core.append(session, 3)
    fill(pool, pool.core.resident_block(session, 2), 5)
    grown = content(pool, pool.core.resident_block(session, 2))
    scribble(pool)
    pool.restore(session, evicted)
    assert pool.core.filled_tokens(session) == 11
    assert contents(pool, session) == [*before, grown]
    evicted = pool.evict(session)
    pool.core.truncate(session, 4)
    scribble(pool)
    pool.restore(session, evicted)
    assert contents(pool, session) == before[:1]
    assert pool.core.free_blocks == 7


@pytest.mark.parametrize("holder", ["another session", "a prefix"])
def test_shared_blocks_stay_and_move_no_bytes(holder: str) -> None:
    pool = make_pool(num_blocks=12)
    session = written(pool, 9)
    sharer = pool.core.open()
    if holder == "a prefix":
        pool.core.register_prefix(session, 8)
    else:
        pool.core.splice(session, sharer, 0, 2)
    before, table = contents(pool, session), pool.core.session_block_table(session)
    for evict in (pool.evict, lambda each: pool.evict_blocks(each, [2, 0, 1])):
        evicted = evict(session)
        assert evicted.saved_block_count == 1
        assert pool.core.session_blocks(session) == (*table[:2], None)
        scribble(pool)
        assert [content(pool, block) for block in table[:2]] == before[:2]
        pool.restore(session, evicted)
        assert contents(pool, session) == before


def test_what_the_host_has_is_a_copy() -> None:
    pool = make_pool()
    session = written(pool, 8)
    before = contents(pool, session)
    evicted = pool.evict(session)
    for block in range(8):
        fill(pool, block, 50 + block)
    poison_free(pool)
    pool.restore(session, evicted)
    assert contents(pool, session) == before


@pytest.mark.parametrize("slots", [[-1], [3], [0, 3], [0, -3], [1, 1], [0, 2**40]])
def test_an_eviction_of_slots_that_there_are_not_changes_nothing(slots: list[int]) -> None:
    pool = make_pool()
    session = written(pool, 9)
    with untouched(pool, BadBlockIndexError):
        pool.evict_blocks(session, slots)
    with untouched(pool, UnknownSessionError):
        pool.evict_blocks(SessionHandle(99), [0])
    with untouched(pool, UnknownSessionError):
        pool.evict(SessionHandle(99))


@pytest.mark.parametrize("error", [MemoryError("no host memory"), RuntimeError("copy failed")])
@pytest.mark.parametrize("after", [0, 2])
def test_a_copy_to_the_host_that_fails_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, error: Exception, after: int
) -> None:
    pool = make_pool()
    session = written(pool, 12)
    before, copies = contents(pool, session), iter(range(after))
    real: Callable[..., torch.Tensor] = torch.Tensor.to

    def failing(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if next(copies, None) is None:
            raise error
        return real(tensor, *args, **kwargs)

    for evict in (lambda: pool.evict(session), lambda: pool.evict_blocks(session, [2, 0, 1])):
        with untouched(pool, type(error)), monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "to", failing)
            evict()
    evicted = pool.evict(session)
    scribble(pool)
    pool.restore(session, evicted)
    assert contents(pool, session) == before


def test_a_session_that_does_not_fit_stays_restorable() -> None:
    pool = make_pool(num_blocks=4)
    session = written(pool, 12)
    before = contents(pool, session)
    evicted = pool.evict(session)
    intruder = written(pool, 8)
    with untouched(pool, OutOfBlocksError) as caught:
        pool.restore(session, evicted)
    assert (caught.value.need, caught.value.have) == (3, 2)
    pool.core.truncate(intruder, 4)
    scribble(pool)
    pool.restore(session, evicted)
    assert contents(pool, session) == before


def test_a_handle_is_good_once_and_for_its_own_session() -> None:
    pool = make_pool()
    session, other = written(pool, 8), written(pool, 8)
    evicted = pool.evict(session)
    pool.evict(other)
    with untouched(pool, InvalidRequestError):
        pool.restore(other, evicted)
    with untouched(make_pool(), InvalidRequestError, UnknownSessionError) as _:
        stranger = make_pool()
        stranger.restore(opened(stranger, 8), evicted)
    pool.restore(session, evicted)
    with untouched(pool, InvalidRequestError):
        pool.restore(session, evicted)
    evicted = pool.evict(session)
    pool.core.discard(session)
    with untouched(pool, UnknownSessionError):
        pool.restore(session, evicted)


def test_an_eviction_of_nothing_is_restored_by_nothing() -> None:
    pool = make_pool()
    session = pool.core.open()
    evicted = pool.evict(session)
    assert evicted.saved_block_count == 0
    before = state(pool)[1]
    pool.restore(session, evicted)
    assert state(pool)[1] == before
    twice = written(pool, 8)
    first, second = pool.evict(twice), pool.evict(twice)
    assert isinstance(second, DeviceEvicted)
    assert (first.saved_block_count, second.saved_block_count) == (2, 0)
