"""Blocks that are moved to the host and brought back: no byte is lost, whatever ran meanwhile."""

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
    scrawled,
    scribble,
    state,
    untouched,
)

from fuel_core.contracts.errors import (
    BadBlockIndexError,
    InvalidRequestError,
    OutOfBlocksError,
    UnknownSessionError,
)
from fuel_core.kv import DeviceEvicted, Fidelity, SessionHandle, StateKind


@every_dtype
@pytest.mark.parametrize("tokens", [1, 4, 9])
def test_a_session_comes_back_byte_for_byte_in_whatever_blocks_are_free(
    dtype: torch.dtype, tokens: int
) -> None:
    pool = make_pool(num_blocks=16, dtype=dtype)
    neighbour, session = scrawled(pool, 7), scrawled(pool, tokens)
    before, beside = contents(pool, session), contents(pool, neighbour)
    old, free = pool.core.session_block_table(session), pool.core.free_blocks
    evicted = pool.evict(session)
    assert evicted.saved_block_count == len(old)
    assert (evicted.covers, evicted.fidelity) == ((StateKind.KV_BLOCKS,), Fidelity.LOSSY)
    assert pool.core.free_blocks == free + len(old)
    assert pool.core.filled_tokens(session) == tokens
    intruder = scrawled(pool, tokens)  # takes the blocks that came free
    assert set(pool.core.session_block_table(intruder)) == set(old)
    scribble(pool)
    pool.restore(session, evicted)
    assert not set(pool.core.session_block_table(session)) & set(old)
    assert contents(pool, session) == before
    assert contents(pool, neighbour) == beside
    assert contents(pool, intruder) != before


def test_a_session_that_is_not_brought_back_has_other_bytes() -> None:
    pool = make_pool()
    session = scrawled(pool, 8)
    before = contents(pool, session)
    evicted = pool.evict(session)
    scribble(pool)
    pool.core.restore(session, evicted.handle)
    assert all(now != then for now, then in zip(contents(pool, session), before, strict=True))


@every_dtype
@pytest.mark.parametrize("slots", [[], [0], [3], [2, 0], [3, 1, 2], [0, 1, 2, 3]])
def test_only_the_blocks_that_were_named_move(dtype: torch.dtype, slots: list[int]) -> None:
    pool = make_pool(dtype=dtype)
    session = scrawled(pool, 14)
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
    session = scrawled(pool, 14)
    before = contents(pool, session)
    evicted = [pool.evict_blocks(session, slots) for slots in ([3, 0], [1, 0])]
    assert [each.saved_block_count for each in evicted] == [2, 1]
    for turn in order:
        scribble(pool)
        pool.restore(session, evicted[turn])
    assert contents(pool, session) == before


def test_what_grew_or_was_cut_meanwhile_stays_so() -> None:
    pool = make_pool()
    session = scrawled(pool, 8)
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
    session = scrawled(pool, 9)
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
    session = scrawled(pool, 8)
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
    session = scrawled(pool, 9)
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
    session = scrawled(pool, 12)
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
    session = scrawled(pool, 12)
    before = contents(pool, session)
    evicted = pool.evict(session)
    intruder = scrawled(pool, 8)
    with untouched(pool, OutOfBlocksError) as caught:
        pool.restore(session, evicted)
    assert (caught.value.need, caught.value.have) == (3, 2)
    pool.core.truncate(intruder, 4)
    scribble(pool)
    pool.restore(session, evicted)
    assert contents(pool, session) == before


def test_a_handle_is_good_once_and_for_its_own_session() -> None:
    pool = make_pool()
    session, other = scrawled(pool, 8), scrawled(pool, 8)
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
    twice = scrawled(pool, 8)
    first, second = pool.evict(twice), pool.evict(twice)
    assert isinstance(second, DeviceEvicted)
    assert (first.saved_block_count, second.saved_block_count) == (2, 0)
