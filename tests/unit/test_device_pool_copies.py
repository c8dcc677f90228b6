"""Blocks that are copied: before a write to a shared one, and whole sessions to the host."""

from __future__ import annotations

import pytest
import torch
from support_paged import contents, every_dtype, fill, make_pool, scrawled, scribble, state, untouched

from fuel_core.contracts.errors import (
    BadBlockIndexError,
    OutOfBlocksError,
    SessionNotResidentError,
    UnknownSessionError,
)
from fuel_core.kv import SessionHandle

# --- before a write


@every_dtype
@pytest.mark.parametrize("writer", ["donor", "sharer"])
def test_a_shared_block_is_copied_before_a_write_and_the_other_keeps_its_bytes(
    dtype: torch.dtype, writer: str
) -> None:
    pool = make_pool(dtype=dtype)
    donor = scrawled(pool, 6)
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
    session = scrawled(pool, 6)
    before = state(pool)
    assert pool.ensure_writable_block(session, 1) == pool.core.resident_block(session, 1)
    assert state(pool) == before


def test_of_many_sharers_each_gets_a_copy_and_the_last_keeps_the_original() -> None:
    pool = make_pool()
    sessions = [scrawled(pool, 3)]
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
    donor = scrawled(pool, 6)
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


# --- whole sessions


@every_dtype
@pytest.mark.parametrize("tokens", [0, 1, 8, 9])
def test_a_session_swapped_out_comes_back_byte_for_byte_and_pins_nothing(
    dtype: torch.dtype, tokens: int
) -> None:
    pool = make_pool(num_blocks=8, dtype=dtype)
    donor = scrawled(pool, 9)
    session = pool.core.open()
    pool.core.splice(donor, session, 0, tokens // 4)  # whole blocks of another
    pool.core.append(session, tokens % 4)
    for slot, block in enumerate(pool.core.session_block_table(session)[tokens // 4 :]):
        fill(pool, block, 60 + slot)
    before, beside = contents(pool, session), contents(pool, donor)
    image = pool.swap_out(session)
    assert image.tokens == tokens
    with pytest.raises(UnknownSessionError):
        pool.core.filled_tokens(session)
    assert contents(pool, donor) == beside
    assert pool.core.free_blocks == 5
    pool.core.discard(donor)
    assert pool.core.free_blocks == 8
    for _ in range(2):  # the image stays good
        scribble(pool)
        again = pool.swap_in(image)
        assert pool.core.filled_tokens(again) == tokens
        assert contents(pool, again) == before


def test_an_image_that_does_not_fit_stays_good() -> None:
    pool = make_pool(num_blocks=4)
    session = scrawled(pool, 12)
    before = contents(pool, session)
    image = pool.swap_out(session)
    intruder = scrawled(pool, 8)
    sessions = set(pool.core._tables)
    with pytest.raises(OutOfBlocksError) as caught:
        pool.swap_in(image)
    assert (caught.value.need, caught.value.have) == (3, 2)
    assert set(pool.core._tables) == sessions
    assert pool.core.free_blocks == 2
    pool.core.discard(intruder)
    scribble(pool)
    assert contents(pool, pool.swap_in(image)) == before


def test_a_session_that_is_not_whole_is_not_swapped_out() -> None:
    pool = make_pool()
    session = scrawled(pool, 8)
    evicted = pool.evict_blocks(session, [1])
    with untouched(pool, SessionNotResidentError):
        pool.swap_out(session)
    with untouched(pool, UnknownSessionError):
        pool.swap_out(SessionHandle(99))
    pool.restore(session, evicted)
    assert pool.swap_out(session).tokens == 8
