"""Where the matrix of parity ends: pools of one block, and many models, pools and engines in one process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from support_engine import WatchedEngine, ask, assert_as_alone, drain, engine_of, serve, submit
from support_models import distance
from support_paged import (
    FAMILIES,
    TOLERANCE,
    every_family,
    ids,
    lone_rows,
    model_of,
    opened,
    paged_rows,
    planned_rows,
    pool_for,
    ragged,
    same,
    untouched,
)
from torch import Tensor

from fuel_core.contracts import DecodeSession
from fuel_core.contracts.errors import CapacityError, OutOfBlocksError
from fuel_core.kv import DeviceKvPool, SessionHandle
from fuel_core.layers import Decoder
from fuel_core.schedule import PagedDecodePlan

# --- a pool of one block


def by_ragged(
    model: Decoder, pool: DeviceKvPool, session: SessionHandle, tokens: tuple[int, ...], _: DecodeSession
) -> Tensor:
    return torch.cat([ragged(model, pool, {session: (token,)}) for token in tokens])


def by_batch(
    model: Decoder, pool: DeviceKvPool, session: SessionHandle, tokens: tuple[int, ...], _: DecodeSession
) -> Tensor:
    return torch.cat([model.forward_paged_step_batched([token], pool, [session]) for token in tokens])


def by_step(
    model: Decoder, pool: DeviceKvPool, session: SessionHandle, tokens: tuple[int, ...], _: DecodeSession
) -> Tensor:
    return paged_rows(model, pool, session, tokens)


ARMS = {
    "step": by_step,
    "batched": by_batch,
    "ragged": by_ragged,
    "plan-once": partial(planned_rows, plan=PagedDecodePlan.PLAN_ONCE),
    "replan": partial(planned_rows, plan=PagedDecodePlan.REPLAN),
}


@every_family
@pytest.mark.parametrize("arm", ARMS)
def test_a_pool_of_one_block_holds_a_session_to_its_last_slot_and_then_the_next(
    family: str, arm: str
) -> None:
    model, size = model_of(family), 5
    pool, forward = pool_for(model, 1, size), ARMS[arm]
    for seed in range(2):
        tokens, session, holder = ids(size, seed), pool.core.open(), DecodeSession()
        assert same(forward(model, pool, session, tokens, holder), lone_rows(model, tokens))
        with untouched(pool, OutOfBlocksError) as caught:
            forward(model, pool, session, (1,), holder)
        assert (caught.value.need, caught.value.have) == (1, 0)
        evicted = pool.evict(session)
        pool.core.discard(opened(pool, size))
        pool.restore(session, evicted)
        pool.core.truncate(session, size - 1)
        assert same(forward(model, pool, session, tokens[-1:], holder), lone_rows(model, tokens)[-1:])
        pool.core.discard(session)


def test_a_fork_in_a_pool_of_one_block_finds_no_room_for_its_copy_and_its_source_is_whole() -> None:
    model, tokens = model_of(), ids(5)
    pool = pool_for(model, 1, 5)
    source, fork = pool.core.open(), pool.core.open()
    paged_rows(model, pool, source, tokens[:3])
    pool.core.splice(source, fork, 0, 1)
    for session in (source, fork):
        with untouched(pool, OutOfBlocksError):
            model.forward_paged_step(9, pool, session)
    pool.core.discard(fork)
    assert same(paged_rows(model, pool, source, tokens[3:]), lone_rows(model, tokens)[3:])


@every_family
def test_an_engine_of_one_block_serves_one_request_after_the_other(family: str) -> None:
    model = model_of(family)
    engine = engine_of(model, 1, 16, token_budget=5)
    serve(engine, model, ask(12, 5), ask(1, 5, seed=3), ask(9, 4, n=3, seed=5), ask(15, 2))
    assert engine.stats.passes >= 12
    with pytest.raises(CapacityError):
        submit(engine, ask(12, 6))
    drain(engine)


@every_family
def test_an_engine_whose_blocks_are_larger_than_any_request_shares_none_and_says_the_same(
    family: str,
) -> None:
    model = model_of(family)
    engine = engine_of(model, 4, 64, shuffled=1, token_budget=4)
    for _ in range(2):
        serve(engine, model, *(ask(length, 4, n=2) for length in (1, 3, 5, 13)))
    assert (engine.stats.prefix.hits, engine.stats.prefix.lookups) == (0, 8)
    drain(engine)


# --- many in one process


MIXED = [ask(9, 6, n=3, seed=1), ask(7, 6), ask(6, 6, seed=2)]


def engines() -> Iterator[tuple[Decoder, WatchedEngine]]:
    """Two of every family, with pools of their own, and another model of the first."""
    for family in FAMILIES:
        model = model_of(family)
        yield model, engine_of(model, 7, token_budget=5)
        yield model, engine_of(model, 9, 3, shuffled=1)
    other = model_of(FAMILIES[0], seed=1)
    yield other, engine_of(other, 9)


def test_models_of_every_family_and_two_engines_on_each_know_nothing_of_each_other() -> None:
    running = [(model, engine, submit(engine, *MIXED)) for model, engine in engines()]
    while not all(engine.is_all_finished for _, engine, _ in running):
        for _, engine, _ in running:
            engine.step()
    for model, engine, queued in running:
        assert_as_alone(engine, model, queued)
        drain(engine)
    said = [engine.logits(queued[0][2])[0] for _, engine, queued in running]
    assert all(distance(said[i], said[i + 2]) > 0.1 for i in range(0, len(said) - 2, 2)), "the models differ"


@pytest.mark.parametrize("arm", ARMS)
def test_sessions_of_many_models_and_pools_take_turns(arm: str) -> None:
    """Each pool gives its sessions the same handles: a plan that took one for another would show."""
    models = [model_of(family) for family in FAMILIES] + [model_of(FAMILIES[0], seed=1)]
    turns = [
        (model, pool, pool.core.open(), DecodeSession(), ids(9, seed))
        for seed, model in enumerate(models)
        for pool in (pool_for(model, shuffled=seed), pool_for(model, 3, 4))
    ]
    rows: list[list[Tensor]] = [[] for _ in turns]
    for turn in range(9):
        for kept, (model, pool, session, holder, tokens) in zip(rows, turns, strict=True):
            kept.append(ARMS[arm](model, pool, session, tokens[turn : turn + 1], holder))
    for kept, (model, _, _, _, tokens) in zip(rows, turns, strict=True):
        assert same(torch.cat(kept), lone_rows(model, tokens))


def test_two_models_of_one_family_are_told_apart() -> None:
    one, other = model_of(), model_of(seed=1)
    assert distance(lone_rows(one, ids(9)), lone_rows(other, ids(9))) > 1000 * TOLERANCE
