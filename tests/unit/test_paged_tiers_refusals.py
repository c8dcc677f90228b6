"""All or nothing: what is wrong with a paged call is found before anything of it is in the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support_models import BreakableDecoder, distance, tiny
from support_paged import (
    TOLERANCE,
    ids,
    lone_rows,
    make_pool,
    model_of,
    opened,
    paged_rows,
    planned_rows,
    poison_free,
    pool_for,
    ragged,
    same,
    standing,
    state,
    untouched,
)

from fuel_core.contracts import DecodeSession, RaggedBatch
from fuel_core.contracts.errors import (
    InvalidRequestError,
    ModelContractError,
    OutOfBlocksError,
    SessionNotResidentError,
    UnknownSessionError,
)
from fuel_core.kv import DeviceKvPool, SessionHandle
from fuel_core.layers import Decoder
from fuel_core.schedule import PagedDecodePlan

PROMPT = ids(7)

Call = Callable[[Decoder, DeviceKvPool, Sequence[SessionHandle], Sequence[int]], Any]


def _step(model: Decoder, pool: DeviceKvPool, sessions: Sequence[Any], tokens: Sequence[int]) -> Any:
    """The last session alone."""
    return model.forward_paged_step(tokens[-1], pool, sessions[-1])


def _persistent(model: Decoder, pool: DeviceKvPool, sessions: Sequence[Any], tokens: Sequence[int]) -> Any:
    return planned_rows(model, pool, sessions[-1], tokens[-1:], DecodeSession())


def _replan(model: Decoder, pool: DeviceKvPool, sessions: Sequence[Any], tokens: Sequence[int]) -> Any:
    return planned_rows(model, pool, sessions[-1], tokens[-1:], DecodeSession(), PagedDecodePlan.REPLAN)


def _batched(model: Decoder, pool: DeviceKvPool, sessions: Sequence[Any], tokens: Sequence[int]) -> Any:
    return model.forward_paged_step_batched(tokens, pool, sessions)


def _ragged(model: Decoder, pool: DeviceKvPool, sessions: Sequence[Any], tokens: Sequence[int]) -> Any:
    """The last session's token at the end of a chunk."""
    chunks = [(token,) for token in tokens[:-1]] + [(1, 2, 3, tokens[-1])]
    return model.forward_paged_ragged(RaggedBatch(pool, tuple(sessions), tuple(chunks)))


ALL = [_step, _persistent, _replan, _batched, _ragged]
every_arm = pytest.mark.parametrize("call", ALL)
of_many = pytest.mark.parametrize("call", [_batched, _ragged])


def three(
    model: Decoder, num_blocks: int = 16, block_size: int = 4
) -> tuple[DeviceKvPool, list[SessionHandle]]:
    """A pool with three sessions of seven tokens."""
    pool = pool_for(model, num_blocks, block_size, shuffled=1)
    sessions = [pool.core.open() for _ in range(3)]
    for session in sessions:
        paged_rows(model, pool, session, PROMPT)
    return pool, sessions


def fits(model: Decoder, pool: DeviceKvPool, sessions: list[SessionHandle]) -> None:
    """The sessions go on as if nothing had been."""
    poison_free(pool)
    rows = ragged(model, pool, dict.fromkeys(sessions, (11, 12)))
    assert distance(rows, lone_rows(model, (*PROMPT, 11, 12))[-1].expand_as(rows)) < TOLERANCE


# --- before anything is written


@every_arm
@pytest.mark.parametrize("token", [-1, 96, 10**9, -96, 1.5])
def test_a_token_outside_the_vocabulary(call: Call, token: Any) -> None:
    model = model_of()
    pool, sessions = three(model)
    with untouched(pool, InvalidRequestError):
        call(model, pool, sessions, [1, 2, token])
    fits(model, pool, sessions)


@every_arm
@pytest.mark.parametrize("gone", ["never there", "discarded", "of another pool"])
def test_a_session_that_there_is_not(call: Call, gone: str) -> None:
    model = model_of()
    pool, sessions = three(model)
    bad = SessionHandle(99)
    if gone == "discarded":
        bad = opened(pool, 7)
        pool.core.discard(bad)
    elif gone == "of another pool":
        other = make_pool(64)
        bad = max(opened(other, 7) for _ in range(9))
    with untouched(pool, UnknownSessionError):
        call(model, pool, [*sessions[:2], bad], [1, 2, 3])
    fits(model, pool, sessions)


@every_arm
@pytest.mark.parametrize("slots", [[0], [1], [0, 1]])
def test_a_session_that_is_not_resident(call: Call, slots: list[int]) -> None:
    model = model_of()
    pool, sessions = three(model)
    evicted = pool.evict_blocks(sessions[2], slots)
    with untouched(pool, SessionNotResidentError) as caught:
        call(model, pool, sessions, [1, 2, 3])
    assert caught.value.slot == slots[0]
    pool.restore(sessions[2], evicted)
    fits(model, pool, sessions)


@every_arm
def test_more_tokens_than_the_context(call: Call) -> None:
    model = tiny(max_position_embeddings=8)
    pool, sessions = three(model)
    for session in sessions[2:]:
        paged_rows(model, pool, session, [5])
    if call is _batched:
        paged_rows(model, pool, sessions[0], [5])
        paged_rows(model, pool, sessions[1], [5])
    with untouched(pool, InvalidRequestError) as caught:
        call(model, pool, sessions, [1, 2, 3])
    assert caught.value.max_context == 8


@every_arm
def test_more_blocks_than_are_free(call: Call) -> None:
    model = model_of()
    pool, sessions = three(model, num_blocks=8)
    for session in sessions:
        paged_rows(model, pool, session, [5])  # every block is full now
    opened(pool, 4 if call in (_batched, _ragged) else 8)
    with untouched(pool, OutOfBlocksError) as caught:
        call(model, pool, sessions, [1, 2, 3])
    assert caught.value.need > caught.value.have == pool.core.free_blocks
    short = 3 - pool.core.free_blocks if call in (_batched, _ragged) else 1
    for _ in range(short):
        pool.core.discard(sessions.pop(0))
    if call in (_step, _persistent, _replan):
        call(model, pool, sessions, [3])
        assert pool.core.filled_tokens(sessions[-1]) == 9


@of_many
def test_a_session_twice(call: Call) -> None:
    model = model_of()
    pool, sessions = three(model)
    for double in ([sessions[0], sessions[0]], [sessions[0], sessions[1], sessions[0]]):
        with untouched(pool, ModelContractError):
            call(model, pool, double, [1, 2, 3][: len(double)])
    fits(model, pool, sessions)


@of_many
@pytest.mark.parametrize(("count", "tokens"), [(2, [1, 2, 3]), (3, [1, 2]), (3, [1])])
def test_other_numbers_of_sessions_and_tokens(call: Call, count: int, tokens: list[int]) -> None:
    model = model_of()
    pool, sessions = three(model)
    with untouched(pool, ModelContractError):
        call(model, pool, sessions[:count], tokens)
    fits(model, pool, sessions)


def test_no_sessions_and_sessions_without_tokens() -> None:
    model = model_of()
    pool, sessions = three(model)
    with untouched(pool, ModelContractError):
        model.forward_paged_step_batched([], pool, [])
    with untouched(pool, ModelContractError):
        model.forward_paged_ragged(RaggedBatch(pool, (), ()))
    for chunks in (((1,), (), (3,)), ((), (), ())):
        with untouched(pool, InvalidRequestError):
            model.forward_paged_ragged(RaggedBatch(pool, tuple(sessions), chunks))
    fits(model, pool, sessions)


@every_arm
@pytest.mark.parametrize("shape", [{"layers": 3}, {"heads": 1}, {"dim": 16}], ids=str)
def test_a_pool_of_another_geometry(call: Call, shape: dict[str, int]) -> None:
    pool = make_pool(**shape)
    sessions = [opened(pool, 4) for _ in range(3)]
    with untouched(pool, ModelContractError) as caught:
        call(model_of(), pool, sessions, [1, 2, 3])
    assert "ModelDims(n_layers=2, n_kv_heads=2, head_dim=8)" in str(caught.value)


# --- an error within


def _interrupt(*_: Any) -> Any:
    raise KeyboardInterrupt


@every_arm
@pytest.mark.parametrize("place", ["before", "inside", "after", "interrupted"])
@pytest.mark.parametrize("prompt", [7, 8])  # with room in the last block, and without
def test_an_error_within_a_layer_takes_the_tokens_back(call: Call, place: str, prompt: int) -> None:
    model = BreakableDecoder(tiny())
    pool, sessions = three(model)
    more = PROMPT[: prompt - 7]
    for session in sessions:
        for token in more:
            model.forward_paged_step(token, pool, session)
    before = standing(pool)
    if place == "interrupted":
        model.layer = _interrupt  # type: ignore[method-assign]
    else:
        setattr(model, place, 1)
    with pytest.raises((RuntimeError, KeyboardInterrupt)):
        call(model, pool, sessions, [1, 2, 3])
    assert standing(pool) == before
    if place == "interrupted":
        del model.layer  # type: ignore[method-assign]
    else:
        setattr(model, place, None)
    poison_free(pool)
    rows = call(model, pool, sessions, [1, 2, 3])
    chunk = (1, 2, 3, 3) if call is _ragged else (3,)
    expected = lone_rows(model_of(), (*PROMPT, *more, *chunk))[-1]
    assert distance(rows.reshape(-1, 96)[-1], expected) < TOLERANCE


def test_a_call_that_is_refused_leaves_the_very_same_pool() -> None:
    """The negative control of all of the above: a call that is taken does change the pool."""
    model = model_of()
    pool, sessions = three(model)
    before, stood = state(pool), standing(pool)
    model.forward_paged_step(1, pool, sessions[0])
    assert state(pool) != before
    assert standing(pool) != stood
    pool.core.truncate(sessions[0], 7)
    assert standing(pool) == stood
    assert torch.isfinite(model.forward_paged_step(2, pool, sessions[0])).all()
    pool.core.truncate(sessions[0], 7)
    row = model.forward_paged_step(9, pool, sessions[0])
    assert same(row, lone_rows(model, (*PROMPT, 9))[-1])
