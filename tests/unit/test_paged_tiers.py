"""A session in a pool is a session in a cache: one token at a time, together, and in chunks."""

from __future__ import annotations

import pytest
import torch
from support_models import distance, feed, new_cache
from support_paged import (
    TOLERANCE,
    buffers,
    every_block_size,
    every_family,
    ids,
    lone_rows,
    model_of,
    opened,
    paged_rows,
    poison_free,
    pool_for,
    ragged,
    same,
    untouched,
)
from torch import Tensor

from fuel_core.contracts import RaggedBatch
from fuel_core.contracts.errors import ModelContractError
from fuel_core.kv import DeviceKvPool, KvGeometry, SessionHandle
from fuel_core.layers import Decoder


def prompts(block_size: int) -> list[tuple[int, ...]]:
    """Of one token, a block less one, a block, one more, and two blocks."""
    lengths = {1, block_size - 1, block_size, block_size + 1, 2 * block_size} - {0}
    return [ids(length, length) for length in sorted(lengths)]


def prefilled(model: Decoder, pool: DeviceKvPool, *prompts: tuple[int, ...]) -> list[SessionHandle]:
    """Sessions that were given their prompts token by token."""
    sessions = [pool.core.open() for _ in prompts]
    for session, prompt in zip(sessions, prompts, strict=True):
        paged_rows(model, pool, session, prompt)
    return sessions


def kept(pool: DeviceKvPool, session: SessionHandle) -> Tensor:
    """K and V of a session's tokens, ``[2 layers, tokens, Hkv, D]``."""
    blocks = list(pool.core.session_block_table(session))
    filled = pool.core.filled_tokens(session)
    return torch.stack([buffer[blocks].flatten(0, 1)[:filled] for buffer in buffers(pool)])


# --- one token at a time


@every_family
def test_a_paged_step_is_a_contiguous_step(family: str) -> None:
    model, tokens = model_of(family), ids(40)
    pool = pool_for(model)
    rows = paged_rows(model, pool, pool.core.open(), tokens)
    assert rows.dtype == torch.float32
    assert distance(rows, lone_rows(model, tokens)) < 1e-5
    assert distance(rows[1:], rows[:-1]) > 0.1


@every_family
def test_neither_the_size_nor_the_order_of_the_blocks_changes_a_bit(family: str) -> None:
    model, tokens = model_of(family), ids(40)
    plain = pool_for(model)
    expected = paged_rows(model, plain, plain.core.open(), tokens)
    for block_size in (1, 4, 16, 17):
        for seed in (1, 2):
            pool = pool_for(model, 64, block_size, shuffled=seed)
            session = pool.core.open()
            assert same(paged_rows(model, pool, session, tokens), expected)
            assert pool.core.session_block_table(session) != tuple(range(-(-40 // block_size)))


def test_a_session_that_lost_a_token_is_seen() -> None:
    model, tokens = model_of(), ids(12)
    pool = pool_for(model)
    [session] = prefilled(model, pool, tokens[:6])
    pool.core.truncate(session, 5)
    rows = paged_rows(model, pool, session, tokens[6:])
    assert distance(rows, lone_rows(model, tokens)[6:]) > 0.01


@every_block_size
def test_a_session_goes_on_as_if_alone_whatever_the_others_do(block_size: int) -> None:
    model, tokens = model_of(), ids(20)
    pool = pool_for(model, 128, block_size)
    session, rows = pool.core.open(), []
    for turn, token in enumerate(tokens):
        rows.append(model.forward_paged_step(token, pool, session))
        [other] = prefilled(model, pool, ids(5, turn))
        if turn % 2:
            pool.core.discard(other)
        poison_free(pool)
    assert same(torch.stack(rows), lone_rows(model, tokens))


def test_what_was_forgotten_is_written_anew() -> None:
    model, tokens = model_of(), ids(12)
    pool = pool_for(model)
    [session] = prefilled(model, pool, tokens[:6] + ids(5, 9))
    for keep in (6, 4, 0):
        pool.core.truncate(session, keep)
        assert same(paged_rows(model, pool, session, tokens[keep:]), lone_rows(model, tokens)[keep:])


# --- together


@every_family
@every_block_size
def test_a_batched_step_is_one_lone_step_for_each_session(family: str, block_size: int) -> None:
    model, prompts = model_of(family), [ids(7, seed) for seed in range(3)]
    pool = pool_for(model, 64, block_size, shuffled=1)
    sessions = prefilled(model, pool, *prompts)
    for step in range(3):
        tokens = [11 + step, 20 + step, 30 + step]
        prompts = [(*prompt, token) for prompt, token in zip(prompts, tokens, strict=True)]
        rows = model.forward_paged_step_batched(tokens, pool, sessions)
        expected = torch.stack([lone_rows(model, prompt)[-1] for prompt in prompts])
        assert rows.shape == (3, 96)
        assert distance(rows, expected) < TOLERANCE
        assert distance(rows, expected[[1, 2, 0]]) > 0.1
    for session, prompt in zip(sessions, prompts, strict=True):
        lone = pool_for(model)
        assert distance(kept(pool, session), kept(lone, prefilled(model, lone, prompt)[0])) < TOLERANCE


@pytest.mark.parametrize("order", [(2, 0, 1), (1, 0), (1,)])
def test_rows_stand_in_the_order_of_the_sessions(order: tuple[int, ...]) -> None:
    model, prompts = model_of(), [ids(5, seed) for seed in range(3)]
    pool = pool_for(model)
    sessions = prefilled(model, pool, *prompts)
    rows = model.forward_paged_step_batched([11 + i for i in order], pool, [sessions[i] for i in order])
    expected = torch.stack([lone_rows(model, prompts[i] + (11 + i,))[-1] for i in order])
    assert distance(rows, expected) < TOLERANCE


def test_a_batch_is_of_one_position_and_the_first_that_differs_is_named() -> None:
    model = model_of()
    pool = pool_for(model)
    sessions = prefilled(model, pool, ids(3), ids(3, 1), ids(4, 2), ids(2, 3))
    with untouched(pool, ModelContractError) as caught:
        model.forward_paged_step_batched([1, 2, 3, 4], pool, sessions)
    assert f"session {sessions[2]} is at position 4" in str(caught.value)
    assert "forward_paged_ragged" in str(caught.value)
    assert model.forward_paged_step_batched([1, 2], pool, sessions[:2]).shape == (2, 96)


# --- in chunks


@every_family
def test_a_prompt_in_chunks_of_any_size_gives_the_logits_of_its_tokens_one_by_one(family: str) -> None:
    model = model_of(family)
    for prompt in (*prompts(4), ids(13)):
        expected = lone_rows(model, (*prompt, 5, 6))
        for chunk in range(1, len(prompt) + 1):
            pool = pool_for(model, shuffled=chunk)
            session = pool.core.open()
            ends = [*range(chunk, len(prompt), chunk), len(prompt)]
            rows = [
                ragged(model, pool, {session: prompt[start:end]})
                for start, end in zip([0, *ends[:-1]], ends, strict=True)
            ]
            rows += [ragged(model, pool, {session: (token,)}) for token in (5, 6)]
            places = [end - 1 for end in ends] + [len(prompt), len(prompt) + 1]
            assert distance(torch.cat(rows), expected[places]) < TOLERANCE
            assert pool.core.filled_tokens(session) == len(prompt) + 2


@every_family
@every_block_size
def test_a_prompt_in_chunks_of_every_size_at_once_in_blocks_of_any_size(family: str, block_size: int) -> None:
    """A session for each size of chunks, all of them in every pass until they are through."""
    model = model_of(family)
    for prompt in prompts(block_size):
        pool = pool_for(model, 3 * len(prompt), block_size, shuffled=len(prompt))
        fed, expected = pool.core.filled_tokens, lone_rows(model, prompt)
        sizes = {pool.core.open(): size for size in range(1, len(prompt) + 1)}
        while sizes:
            new = {each: prompt[fed(each) : fed(each) + size] for each, size in sizes.items()}
            rows = ragged(model, pool, new)
            assert distance(rows, expected[[fed(each) - 1 for each in new]]) < TOLERANCE
            sizes = {each: size for each, size in sizes.items() if fed(each) < len(prompt)}


@every_family
@every_block_size
def test_chunks_and_single_tokens_of_many_sessions_run_in_one_pass(family: str, block_size: int) -> None:
    model, chunks = model_of(family), (1, 3, 2, 9, 4)
    streams = [ids(40, seed) for seed in range(5)]
    pool = pool_for(model, 256, block_size, shuffled=4)
    sessions = [pool.core.open() for _ in chunks]
    ends = [0] * 5
    for turn in range(4):
        counts = [chunks[(i + turn) % 5] for i in range(5)]
        new = {s: stream[e : e + n] for s, stream, e, n in zip(sessions, streams, ends, counts, strict=True)}
        rows = ragged(model, pool, new)
        ends = [end + n for end, n in zip(ends, counts, strict=True)]
        expected = torch.stack([lone_rows(model, s)[e - 1] for s, e in zip(streams, ends, strict=True)])
        assert rows.shape == (5, 96)
        assert distance(rows, expected) < TOLERANCE
        assert distance(rows.roll(1, 0), expected) > 0.1


def test_a_whole_prompt_is_the_same_prompt_in_a_cache() -> None:
    model, prompt = model_of(), ids(21)
    pool = pool_for(model)
    row = ragged(model, pool, {pool.core.open(): prompt})[0]
    assert distance(row, feed(model, new_cache(model, 21), *prompt)) < 1e-5


def test_one_token_of_each_of_a_ragged_batch_is_the_batched_step() -> None:
    model, prompts = model_of(), [ids(6, seed) for seed in range(3)]
    pools = [pool_for(model, shuffled=seed) for seed in (1, 2)]
    first, second = (prefilled(model, pool, *prompts) for pool in pools)
    rows = model.forward_paged_step_batched([1, 2, 3], pools[0], first)
    assert same(rows, ragged(model, pools[1], dict(zip(second, [(1,), (2,), (3,)], strict=True))))


def test_chunks_in_the_wrong_order_are_seen() -> None:
    model, prompt = model_of(), ids(12)
    pool = pool_for(model)
    session = pool.core.open()
    for chunk in (prompt[4:8], prompt[:4], prompt[8:]):
        row = ragged(model, pool, {session: chunk})[0]
    assert distance(row, lone_rows(model, prompt)[-1]) > 0.01


# --- the pool's own type


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_pool_of_narrow_numbers_is_as_close_as_they_are(dtype: torch.dtype) -> None:
    model, tokens = model_of(), ids(12)
    pool = DeviceKvPool(KvGeometry(2, 2, 8, 8, 4, 2), dtype)
    rows = paged_rows(model, pool, pool.core.open(), tokens)
    assert 1e-5 < distance(rows, lone_rows(model, tokens)) < 0.1
    twin = DeviceKvPool(KvGeometry(2, 2, 8, 8, 4, 2), dtype)
    chunk = model.forward_paged_ragged(RaggedBatch(twin, (opened(twin, 0),), (tokens,)))
    assert distance(chunk[0], rows[-1]) < 0.1
