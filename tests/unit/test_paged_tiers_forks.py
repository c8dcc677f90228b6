"""Sessions that share a partly filled block write to copies of it, and only as many as it takes."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from support_models import BreakableDecoder, distance, tiny
from support_paged import (
    TOLERANCE,
    contents,
    every_block_size,
    every_family,
    ids,
    lone_rows,
    model_of,
    opened,
    paged_rows,
    pool_for,
    ragged,
    same,
    standing,
    untouched,
)

from fuel_core.contracts.errors import OutOfBlocksError
from fuel_core.kv import DeviceKvPool, SessionHandle
from fuel_core.kv.prefix_index import PrefixIndex
from fuel_core.layers import Decoder
from fuel_core.layers.paged import blocks_needed

PROMPT = ids(6)  # a block and a half, of four slots
ENDS = [ids(7, seed) for seed in (1, 2, 3)]


def forked(
    model: Decoder, forks: int, num_blocks: int = 64, block_size: int = 4
) -> tuple[DeviceKvPool, list[SessionHandle]]:
    """A session and its forks, which share all that it has, its partly filled last block too."""
    pool = pool_for(model, num_blocks, block_size, shuffled=3)
    sessions = [pool.core.open()]
    paged_rows(model, pool, sessions[0], PROMPT)
    for _ in range(forks):
        sessions.append(pool.core.open())
        pool.core.splice(sessions[0], sessions[-1], 0, len(pool.core.session_blocks(sessions[0])))
    return pool, sessions


def leave(pool: DeviceKvPool, free: int) -> SessionHandle:
    """Take all blocks but ``free``."""
    return opened(pool, (pool.core.free_blocks - free) * pool.geometry.block_size)


@every_family
@every_block_size
def test_a_fork_and_its_source_go_on_turn_by_turn_as_if_alone(family: str, block_size: int) -> None:
    model = model_of(family)
    pool, sessions = forked(model, 2, block_size=block_size)
    turns = [
        [model.forward_paged_step(end[i], pool, s) for s, end in zip(sessions, ENDS, strict=True)]
        for i in range(7)
    ]
    for session, rows, end in zip(sessions, zip(*turns, strict=True), ENDS, strict=True):
        assert same(torch.stack(rows), lone_rows(model, PROMPT + end)[6:])
        shared = pool.core.session_blocks(session)[: 6 // block_size]
        assert shared == pool.core.session_blocks(sessions[0])[: 6 // block_size]


@pytest.mark.parametrize("order", [*permutations(range(3))])
def test_one_after_the_other_they_do_so_in_any_order(order: tuple[int, ...]) -> None:
    model = model_of()
    pool, sessions = forked(model, 2)
    for i in order:
        assert same(paged_rows(model, pool, sessions[i], ENDS[i]), lone_rows(model, PROMPT + ENDS[i])[6:])


def test_a_fork_that_writes_to_the_shared_block_is_seen() -> None:
    """Without the copy, each writes its own seventh token over that of the other."""
    model = model_of()
    pool, sessions = forked(model, 1)
    block = pool.core.resident_block(sessions[0], 1)
    model.forward_paged_step(ENDS[0][0], pool, sessions[0])
    private = pool.core.resident_block(sessions[0], 1)
    assert private != block
    pool.copy_block(private, block)
    pool.core.append(sessions[1], 1)  # as if it had fed the same token
    row = model.forward_paged_step(ENDS[1][1], pool, sessions[1])
    expected = lone_rows(model, PROMPT + ENDS[1][:2])[-1]
    assert distance(row, expected) > 0.01


def test_in_one_pass_they_are_what_they_are_alone() -> None:
    model = model_of()
    for order in permutations(range(3)):
        pool, sessions = forked(model, 2)
        turned = [sessions[i] for i in order]
        for turn in range(7):
            rows = model.forward_paged_step_batched([ENDS[i][turn] for i in order], pool, turned)
            expected = torch.stack([lone_rows(model, PROMPT + ENDS[i][: turn + 1])[-1] for i in order])
            assert distance(rows, expected) < TOLERANCE
    pool, sessions = forked(model, 2)
    rows = ragged(model, pool, dict(zip(sessions, (end[: i + 2] for i, end in enumerate(ENDS)), strict=True)))
    expected = torch.stack([lone_rows(model, PROMPT + end[: i + 2])[-1] for i, end in enumerate(ENDS)])
    assert distance(rows, expected) < TOLERANCE


# --- as many blocks as it takes


@pytest.mark.parametrize(("forks", "idle"), [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (4, 0), (4, 2)])
@pytest.mark.parametrize("tokens", [1, 2, 3, 7])
def test_what_is_needed_is_what_is_taken_and_one_less_is_refused(forks: int, idle: int, tokens: int) -> None:
    """Sharers that do not write keep the block, and then all that write need a copy."""
    model = model_of()
    pool, sessions = forked(model, forks)
    writers = sessions[idle:]
    copies = len(writers) - (idle == 0)
    need = copies + len(writers) * (-(-(6 + tokens) // 4) - 2)
    assert blocks_needed(pool, writers, [tokens] * len(writers)) == need
    new = {session: ids(tokens, session) for session in writers}
    if need:
        filler = leave(pool, need - 1)
        with untouched(pool, OutOfBlocksError) as caught:
            ragged(model, pool, new)
        assert (caught.value.need, caught.value.have) == (need, need - 1)
        pool.core.discard(filler)
    leave(pool, need)
    rows = ragged(model, pool, new)
    assert pool.core.free_blocks == 0
    expected = torch.stack([lone_rows(model, PROMPT + end)[-1] for end in new.values()])
    assert distance(rows, expected) < TOLERANCE
    for session in sessions[:idle]:
        assert contents(pool, session) == contents(pool, sessions[0])


def test_groups_of_sharers_are_counted_apart() -> None:
    model = model_of()
    pool, first = forked(model, 2)
    lone = pool.core.open()
    paged_rows(model, pool, lone, PROMPT)
    second = [lone, pool.core.open()]
    pool.core.splice(lone, second[1], 0, 2)
    aligned = opened(pool, 0)
    paged_rows(model, pool, aligned, ids(8, 4))
    twin = pool.core.open()
    pool.core.splice(aligned, twin, 0, 2)  # whole blocks: nothing to copy
    batch = [*first, *second, aligned, twin]
    assert blocks_needed(pool, batch, [1] * 7) == 2 + 1 + 2
    leave(pool, 5)
    rows = ragged(model, pool, dict.fromkeys(batch, (9,)))
    assert pool.core.free_blocks == 0
    assert distance(rows[:5], lone_rows(model, (*PROMPT, 9))[-1].expand(5, 96)) < TOLERANCE
    assert distance(rows[5:], lone_rows(model, (*ids(8, 4), 9))[-1].expand(2, 96)) < TOLERANCE


def test_one_writer_beside_a_sharer_needs_a_copy_and_the_last_writer_none() -> None:
    model = model_of()
    pool, sessions = forked(model, 1)
    leave(pool, 1)
    assert same(paged_rows(model, pool, sessions[1], ENDS[1][:2]), lone_rows(model, PROMPT + ENDS[1])[6:8])
    assert pool.core.free_blocks == 0
    assert same(paged_rows(model, pool, sessions[0], ENDS[0][:2]), lone_rows(model, PROMPT + ENDS[0])[6:8])
    with untouched(pool, OutOfBlocksError):
        model.forward_paged_step(ENDS[0][2], pool, sessions[0])


def test_an_error_after_the_copies_harms_no_sharer() -> None:
    model = BreakableDecoder(tiny())
    pool, sessions = forked(model, 2)
    before = [contents(pool, session) for session in sessions]
    model.after = 0
    with pytest.raises(RuntimeError):
        ragged(model, pool, {sessions[0]: (1, 2, 3), sessions[2]: (4,)})
    assert [pool.core.filled_tokens(session) for session in sessions] == [6, 6, 6]
    assert contents(pool, sessions[1]) == before[1]
    model.after = None
    for session, end in zip(sessions, ENDS, strict=True):
        assert same(paged_rows(model, pool, session, end), lone_rows(model_of(), PROMPT + end)[6:])


def test_a_pass_that_fails_after_its_copies_costs_a_block_for_each_and_loses_none() -> None:
    model = BreakableDecoder(tiny())
    pool, sessions = forked(model, 2, 16)
    index = PrefixIndex(pool.core, "model")
    index.add(PROMPT, sessions[0], [])
    free, new = pool.core.free_blocks, {sessions[0]: (1, 2, 3), sessions[2]: (4,)}
    assert blocks_needed(pool, list(new), [3, 1]) == 3
    model.after = 1
    with pytest.raises(RuntimeError):
        ragged(model, pool, new)
    assert pool.core.free_blocks == free - 2  # sessions[1] keeps the original
    held = {block for session in sessions for block in pool.core.session_block_table(session)}
    assert pool.core.free_blocks + index.reclaimable() + len(held) == 16
    assert blocks_needed(pool, list(new), [3, 1]) == 1
    model.after = None
    for session, end in zip(sessions, ENDS, strict=True):
        assert same(paged_rows(model, pool, session, end), lone_rows(model_of(), PROMPT + end)[6:])
        pool.core.discard(session)
    assert (index.reclaim(16), pool.core.free_blocks) == (1, 16)


def test_the_original_cannot_be_given_back_since_the_last_sharer_wrote_to_it() -> None:
    """The reason why the copies stay: one that was cut back writes over what the others still have."""
    model = BreakableDecoder(tiny())
    pool, sessions = forked(model, 1)
    pool.core.truncate(sessions[1], 5)
    original, before = pool.core.resident_block(sessions[1], 1), standing(pool)[2]
    model.after = 1
    with pytest.raises(RuntimeError):
        ragged(model, pool, {sessions[0]: (1,), sessions[1]: (2,)})
    assert standing(pool)[2] == before  # every token of both
    assert pool.core.resident_block(sessions[0], 1) != original == pool.core.resident_block(sessions[1], 1)
    ours = pool.k_pool(0)[pool.core.resident_block(sessions[0], 1), 1]
    assert distance(pool.k_pool(0)[original, 1], ours) > 0.01


def test_a_session_cut_back_into_a_shared_block_copies_it_too() -> None:
    model = model_of()
    pool = pool_for(model)
    donor, sharer = pool.core.open(), pool.core.open()
    paged_rows(model, pool, donor, PROMPT + ENDS[0][:2])
    prefix = pool.core.register_prefix(donor, 8)
    pool.core.splice_prefix_from(prefix, sharer)
    pool.core.truncate(sharer, 5)
    kept = contents(pool, donor)
    rows = paged_rows(model, pool, sharer, ENDS[1])
    assert same(rows, lone_rows(model, PROMPT[:5] + ENDS[1])[5:])
    assert contents(pool, donor) == kept
    assert pool.core.prefix_blocks(prefix) == pool.core.session_block_table(donor)
