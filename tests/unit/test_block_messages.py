"""An error about blocks or sessions names the calls of whoever raised it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support_models import CoreOnlyModel
from support_paged import model_of, pool_for

from fuel_core.contracts.errors import CapacityError, FuelError, OutOfBlocksError, UnknownSessionError
from fuel_core.engine import Engine
from fuel_core.kv import KvBlockPool, KvBudget, KvGeometry
from fuel_core.schedule import PagedSessionScheduler, SessionScheduler

MODEL = model_of("llama")


def pool(blocks: int = 4) -> KvBlockPool:
    return KvBlockPool(KvGeometry(1, 1, 2, blocks, 4, 4))


def paged(blocks: int = 2) -> PagedSessionScheduler:
    return PagedSessionScheduler(MODEL, KvBudget(4, blocks))


def contiguous(blocks: int = 4) -> SessionScheduler:
    return SessionScheduler(CoreOnlyModel(), KvBudget(4, blocks))


def refusal(call: Callable[[], object]) -> FuelError:
    with pytest.raises(FuelError) as caught:
        call()
    return caught.value


# What a remedy may name, by who raises it: nobody is sent to a call that it has not.
CALLS = {
    "pool": (KvBlockPool, ("open()", "discard()")),
    "scheduler": (PagedSessionScheduler, ("add_session",)),
    "engine": (Engine, ("submit",)),
}


@pytest.mark.parametrize(
    ("owner", "call"),
    [
        ("pool", lambda: pool().append(77, 1)),
        ("pool", lambda: pool().filled_tokens(77)),
        ("pool", lambda: pool().discard([])),
        ("scheduler", lambda: paged().cancel(77)),
        ("scheduler", lambda: paged().evict_session(77)),
        ("scheduler", lambda: paged().register_prefix(77, 4)),
        ("scheduler", lambda: contiguous().reap(77)),
        ("engine", lambda: Engine(MODEL, pool_for(MODEL)).cancel(77)),
    ],
)
def test_an_unknown_session_is_sent_to_whoever_gives_sessions_out(
    owner: str, call: Callable[[], object]
) -> None:
    error = refusal(call)
    assert isinstance(error, UnknownSessionError)
    for each, (kind, names) in CALLS.items():
        assert all((name in error.remedy) == (each == owner) for name in names)
        assert all(hasattr(kind, name.removesuffix("()")) for name in names)


@pytest.mark.parametrize(
    ("tokens", "given", "needed"),
    [
        (100, "25 KV blocks asked for, 3 free", "25 free blocks"),
        (16, "4 KV blocks asked for, 3 free", "4 free blocks"),
    ],
)
def test_a_pool_that_is_too_small_tells_what_was_asked_and_what_a_pool_can_do(
    tokens: int, given: str, needed: str
) -> None:
    small = pool()
    small.append(small.open(), 1)
    error = refusal(lambda: small.append(small.open(), tokens))
    assert (error.given, error.needed) == (given, needed)
    assert "discard" in error.remedy
    assert "reap" not in str(error)


def test_one_block_is_told_in_the_singular_and_none_by_its_name() -> None:
    error = OutOfBlocksError(1, 0)
    assert str(error).startswith("1 KV block asked for, none free; needed: 1 free block; ")
    assert (error.need, error.have) == (1, 0)


def test_a_session_that_cannot_grow_is_told_what_its_scheduler_can_do() -> None:
    scheduler = paged(2)
    first = scheduler.add_session([1, 2, 3, 4], max_new_tokens=6)
    second = scheduler.add_session([1, 2, 3, 4], max_new_tokens=6)
    scheduler.step()
    error = _ended_by(scheduler, first)
    assert isinstance(error, OutOfBlocksError)
    assert error.needed == "1 free block"
    assert error.remedy.startswith("reap finished sessions, which keep their blocks until then")
    assert isinstance(scheduler.session(second).error, OutOfBlocksError)


def _ended_by(scheduler: Any, id: int) -> Exception | None:
    error: Exception | None = scheduler.session(id).error
    return error


def test_a_finished_session_keeps_its_blocks_until_it_is_reaped_and_the_error_says_so() -> None:
    scheduler = paged(2)
    done = scheduler.add_session([1, 2, 3], max_new_tokens=2)
    scheduler.run_to_completion()
    assert scheduler.kv_free_blocks == 1
    late = scheduler.add_session([1, 2, 3, 4, 5], max_new_tokens=2)
    scheduler.step()
    error = _ended_by(scheduler, late)
    assert isinstance(error, OutOfBlocksError)
    assert "reap" in error.remedy
    scheduler.reap(late)
    scheduler.reap(done)
    assert scheduler.kv_free_blocks == 2


def test_sessions_that_cannot_grow_together_are_told_the_same() -> None:
    scheduler = paged(3)
    ids = [scheduler.add_session([1, 2, 3], max_new_tokens=6) for _ in range(3)]
    while not scheduler.is_all_finished:
        scheduler.step_batched(8)
    errors = [error for id in ids if (error := _ended_by(scheduler, id)) is not None]
    assert len(errors) >= 2
    assert all("reap" in str(error) for error in errors)


def test_a_suspended_session_that_does_not_fit_is_told_what_its_scheduler_can_do() -> None:
    scheduler = paged(2)
    first = scheduler.add_session([1, 2, 3, 4, 5], max_new_tokens=3)
    scheduler.step()
    scheduler.evict_session(first)
    scheduler.add_session([1, 2, 3, 4], max_new_tokens=2)
    scheduler.step()
    error = refusal(lambda: scheduler.restore_session(first))
    assert isinstance(error, OutOfBlocksError)
    assert error.remedy.startswith("reap finished sessions")
    assert scheduler.is_suspended(first)


@pytest.mark.parametrize(("max_new", "said"), [(15, "reap"), (200, "lower max_new_tokens")])
def test_a_contiguous_scheduler_says_to_reap_only_where_that_would_help(max_new: int, said: str) -> None:
    scheduler = contiguous(4)
    scheduler.add_session([1], max_new_tokens=3)
    error = refusal(lambda: scheduler.add_session([1], max_new_tokens=max_new))
    assert isinstance(error, OutOfBlocksError)
    assert said in error.remedy


def test_what_the_whole_pool_would_not_hold_is_told_in_the_right_number() -> None:
    error = refusal(lambda: paged(1).add_session([1, 2, 3, 4, 5], max_new_tokens=1))
    assert isinstance(error, CapacityError)
    assert error.given == "a prompt of 5 tokens, which needs 2 KV blocks"
    assert error.needed.startswith("at most 1 block,")
