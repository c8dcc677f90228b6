"""A plan is built once and bound again for every token: the same bits, and only for what it was built for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support_models import BreakableDecoder, distance, tiny
from support_paged import (
    every_block_size,
    every_family,
    ids,
    lone_rows,
    model_of,
    opened,
    paged_rows,
    planned_rows,
    poison_free,
    pool_for,
    same,
    standing,
    untouched,
)

from fuel_core.contracts import DecodeSession
from fuel_core.contracts.errors import CapacityError, InvalidRequestError
from fuel_core.kv import DeviceKvPool, SessionHandle
from fuel_core.schedule import PagedDecodePlan

REPLAN = PagedDecodePlan.REPLAN
TOKENS = ids(30)


def started(
    model: Any, tokens: int = 5, shuffled: int | None = 1
) -> tuple[DeviceKvPool, SessionHandle, DecodeSession]:
    """A session with its prompt, and a holder whose plan was built for the next token."""
    pool = pool_for(model, shuffled=shuffled)
    session, holder = pool.core.open(), DecodeSession()
    paged_rows(model, pool, session, TOKENS[: tokens - 1])
    planned_rows(model, pool, session, TOKENS[tokens - 1 : tokens], holder)
    return pool, session, holder


@every_family
@every_block_size
def test_planned_once_and_planned_anew_are_the_same_bits(family: str, block_size: int) -> None:
    model = model_of(family)
    once, anew = (pool_for(model, 40, block_size, shuffled=seed) for seed in (1, 2))
    kept, fresh = DecodeSession(), DecodeSession()
    planned = planned_rows(model, once, once.core.open(), TOKENS, kept, width=40)
    replanned = planned_rows(model, anew, anew.core.open(), TOKENS, fresh, REPLAN, width=40)
    assert same(planned, replanned)
    assert same(planned, lone_rows(model, TOKENS))
    assert (kept.rebinds, fresh.rebinds) == (29, 0)
    assert kept.plan is not None
    assert fresh.plan is None


def test_rebinds_are_counted_from_the_build_and_the_plan_stays() -> None:
    model = model_of()
    pool, session, holder = started(model)
    plan = holder.plan
    assert holder.rebinds == 0
    for count, token in enumerate(TOKENS[5:25], start=1):
        planned_rows(model, pool, session, [token], holder)
        assert holder.rebinds == count
        assert holder.plan is plan


def test_the_inputs_of_a_plan_stay_where_they_are() -> None:
    model = model_of()
    pool, session, holder = started(model)

    def addresses() -> list[int]:
        tensors = [part for part in vars(holder.plan.step).values() if isinstance(part, torch.Tensor)]
        return [part.data_ptr() for part in tensors if not part.is_floating_point()]

    before = addresses()
    assert len(before) == 7  # ids, positions and slots, and all three; block table, lengths, counts
    planned_rows(model, pool, session, TOKENS[5:20], holder)
    assert addresses() == before


def test_planning_anew_drops_the_plan_and_planning_once_builds_another() -> None:
    model = model_of()
    pool, session, holder = started(model)
    planned_rows(model, pool, session, TOKENS[5:8], holder)
    old = holder.plan
    rows = [planned_rows(model, pool, session, TOKENS[8:9], holder, REPLAN)]
    assert (holder.plan, holder.rebinds) == (None, 0)
    rows.append(planned_rows(model, pool, session, TOKENS[9:10], holder))
    assert holder.plan not in (None, old)
    assert holder.rebinds == 0
    assert same(torch.cat(rows), lone_rows(model, TOKENS[:10])[8:])


# --- what a plan was built for


def _pool(model: Any, pool: DeviceKvPool, session: SessionHandle) -> tuple[Any, DeviceKvPool, SessionHandle]:
    """Another pool of the same geometry, where the same session stands elsewhere."""
    other = pool_for(model, shuffled=9)
    same_handle = other.core.open()
    paged_rows(model, other, same_handle, TOKENS[:5])
    assert same_handle == session
    return model, other, same_handle


def _model(model: Any, pool: DeviceKvPool, session: SessionHandle) -> tuple[Any, DeviceKvPool, SessionHandle]:
    """Another model of the same weights."""
    return tiny(), pool, session


def _session(
    model: Any, pool: DeviceKvPool, session: SessionHandle
) -> tuple[Any, DeviceKvPool, SessionHandle]:
    """Another session with the same tokens."""
    other = pool.core.open()
    paged_rows(model, pool, other, TOKENS[:5])
    return model, pool, other


def _width(model: Any, pool: DeviceKvPool, session: SessionHandle) -> tuple[Any, DeviceKvPool, SessionHandle]:
    return model, pool, session


@pytest.mark.parametrize("change", [_pool, _model, _session, _width])
def test_a_plan_is_built_anew_for_another(change: Any) -> None:
    model = model_of()
    pool, session, holder = started(model)
    old = holder.plan
    used = change(model, pool, session)
    width = 13 if change is _width else 12
    poison_free(used[1])
    row = planned_rows(*used, TOKENS[5:6], holder, width=width)
    assert holder.plan is not old
    assert holder.rebinds == 0
    new = holder.plan
    again = planned_rows(*used, TOKENS[6:7], holder, width=width)
    assert holder.plan is new
    assert holder.rebinds == 1
    assert same(torch.cat([row, again]), lone_rows(model, TOKENS[:7])[5:])


def test_a_plan_that_is_used_for_another_pool_is_seen() -> None:
    """Two pools that pass for one: the plan goes on writing to the first, where nobody appends."""
    model = model_of()
    pool, _, holder = started(model, 6)
    other = pool_for(model, shuffled=9)
    twin = other.core.open()
    paged_rows(model, other, twin, ids(6, 50))
    other.alloc_id = pool.alloc_id
    row = planned_rows(model, other, twin, [7], holder)
    assert holder.rebinds == 1
    assert distance(row, lone_rows(model, (*ids(6, 50), 7))[6:]) > 0.01


# --- what changes under a plan that stays


def test_blocks_that_moved_are_found_by_the_next_token() -> None:
    model = model_of()
    pool, session, holder = started(model, 9)
    rows = []
    for token in TOKENS[9:15]:
        evicted = pool.evict(session)
        opened(pool, 1)
        poison_free(pool)
        pool.restore(session, evicted)
        rows.append(planned_rows(model, pool, session, [token], holder))
    assert holder.rebinds == 6
    assert same(torch.cat(rows), lone_rows(model, TOKENS[:15])[9:])


def test_tokens_that_were_forgotten_or_fed_elsewhere_are_known_to_the_next() -> None:
    model = model_of()
    pool, session, holder = started(model, 9)
    pool.core.truncate(session, 3)
    paged_rows(model, pool, session, TOKENS[3:5])
    rows = planned_rows(model, pool, session, TOKENS[5:12], holder)
    assert holder.rebinds == 7
    assert same(rows, lone_rows(model, TOKENS[:12])[5:])


def test_a_shared_block_is_copied_under_a_plan() -> None:
    model = model_of()
    pool, session, holder = started(model, 6)
    fork = pool.core.open()
    pool.core.splice(session, fork, 0, 2)
    rows = planned_rows(model, pool, session, TOKENS[6:12], holder)
    other = ids(6, 60)
    assert same(rows, lone_rows(model, TOKENS[:12])[6:])
    assert same(paged_rows(model, pool, fork, other), lone_rows(model, TOKENS[:6] + other)[6:])


# --- what a plan refuses


def test_a_session_wider_than_its_plan_is_refused_and_goes_on_in_a_wider_one() -> None:
    model = model_of()
    pool = pool_for(model)
    session, holder = pool.core.open(), DecodeSession()
    planned_rows(model, pool, session, TOKENS[:8], holder, width=2)
    before = standing(pool)
    with pytest.raises(CapacityError, match="width of the table"):
        planned_rows(model, pool, session, TOKENS[8:9], holder, width=2)
    assert standing(pool) == before
    row = planned_rows(model, pool, session, TOKENS[8:9], holder, width=3)
    assert same(row, lone_rows(model, TOKENS[:9])[8:])


def test_a_token_that_is_refused_leaves_the_plan_good() -> None:
    model = model_of()
    pool, session, holder = started(model)
    plan = holder.plan
    with untouched(pool, InvalidRequestError):
        planned_rows(model, pool, session, [96], holder)
    assert holder.plan is plan
    assert holder.rebinds == 0
    assert same(planned_rows(model, pool, session, TOKENS[5:6], holder), lone_rows(model, TOKENS[:6])[5:])


@pytest.mark.parametrize("place", ["before", "inside", "after"])
@pytest.mark.parametrize("first", [True, False])
def test_a_layer_that_raises_leaves_the_holder_good(place: str, first: bool) -> None:
    model = BreakableDecoder(tiny())
    pool, session, holder = started(model, 8)
    holder = DecodeSession() if first else holder
    before = standing(pool)
    setattr(model, place, 1)
    with pytest.raises(RuntimeError):
        planned_rows(model, pool, session, TOKENS[8:9], holder)
    assert standing(pool) == before
    setattr(model, place, None)
    poison_free(pool)
    rows = planned_rows(model, pool, session, TOKENS[8:12], holder)
    assert same(rows, lone_rows(model_of(), TOKENS[:12])[8:])
