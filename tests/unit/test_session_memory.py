"""A session is admitted whole or not at all, and what it held is free when it is reaped."""

from __future__ import annotations

import traceback
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from support_models import BreakableDecoder, CoreOnlyModel, scheduler_of, tiny

from fuel_core import registry
from fuel_core.contracts import FinishReason, SamplingParams
from fuel_core.contracts.errors import (
    CapacityError,
    InvalidRequestError,
    OutOfBlocksError,
    UnknownSessionError,
)
from fuel_core.kv import KvBudget, KvCache
from fuel_core.schedule import Batched, PagedSessionScheduler, RoundRobin, SessionId, SessionScheduler

A = (1, 2, 3)
POLICIES = [RoundRobin(), Batched(4)]


def drain(scheduler: SessionScheduler) -> None:
    while not scheduler.is_all_finished:
        scheduler.step()


def test_admission_ends_where_the_blocks_do_and_reaping_gives_them_back() -> None:
    scheduler = scheduler_of(CoreOnlyModel(), block_size=8, num_blocks=2)
    assert (scheduler.kv_free_blocks, scheduler.kv_bytes_resident) == (2, 0)
    assert scheduler.kv_blocks_required(3, 5) == 1
    first = scheduler.add_session([1, 2, 3], max_new_tokens=5)
    block = scheduler.kv_bytes_resident
    second = scheduler.add_session([1, 2, 3], max_new_tokens=5)
    assert (scheduler.kv_free_blocks, scheduler.kv_bytes_resident) == (0, 2 * block)
    assert block == scheduler.kv_capacity().geometry.block_bytes > 0
    with pytest.raises(OutOfBlocksError) as caught:
        scheduler.add_session([1, 2, 3], max_new_tokens=6)
    assert (caught.value.need, caught.value.have) == (2, 0)
    assert [id for id, _ in scheduler.run_to_completion()] == [first, second]
    assert scheduler.kv_free_blocks == 0
    assert [id for id, _ in scheduler.reap_finished()] == [first, second]
    assert (scheduler.kv_free_blocks, scheduler.kv_bytes_resident) == (2, 0)
    assert scheduler.add_session([1, 2, 3], max_new_tokens=5) == second + 1


@pytest.mark.parametrize(("prompt_len", "max_new", "blocks"), [(5, 6, 3), (1, 3, 1), (4, 4, 2), (4, 1, 2)])
def test_what_is_asked_for_is_what_is_reserved(prompt_len: int, max_new: int, blocks: int) -> None:
    scheduler = scheduler_of(CoreOnlyModel(), block_size=4, num_blocks=16)
    assert scheduler.kv_blocks_required(prompt_len, max_new) == blocks
    scheduler.add_session([1] * prompt_len, max_new_tokens=max_new)
    assert scheduler.kv_free_blocks == 16 - blocks
    drain(scheduler)
    assert scheduler.kv_free_blocks == 16 - blocks


IMPOSSIBLE = 2**56  # tokens: a refusal with another error than CapacityError has built no cache for them


@pytest.mark.parametrize(
    ("prompt", "changes", "error"),
    [
        ([], {}, InvalidRequestError),
        ([1, -1], {}, InvalidRequestError),
        ([-16], {}, InvalidRequestError),
        ([1, 16], {}, InvalidRequestError),
        ([1], {"max_new_tokens": 0}, InvalidRequestError),
        ([1], {"max_new_tokens": -3}, InvalidRequestError),
        ([1], {"sampling": SamplingParams(min_new_tokens=IMPOSSIBLE + 1)}, InvalidRequestError),
        ([1], {"sampling": SamplingParams(logit_bias={16: -1.0})}, InvalidRequestError),
        ([1], {"max_new_tokens": 2 * IMPOSSIBLE}, OutOfBlocksError),
        ([1], {}, CapacityError),
    ],
)
def test_a_refused_session_takes_no_id_and_no_block_and_no_memory(
    prompt: list[int], changes: dict[str, Any], error: type[Exception]
) -> None:
    scheduler = scheduler_of(CoreOnlyModel(), block_size=2 * IMPOSSIBLE, num_blocks=2)
    first = scheduler.add_session([1, 2], max_new_tokens=2)
    before = (scheduler.kv_free_blocks, scheduler.kv_bytes_resident)
    with pytest.raises(error) as caught:
        scheduler.add_session(prompt, **{"max_new_tokens": IMPOSSIBLE, **changes})
    assert type(caught.value) is error
    assert (scheduler.kv_free_blocks, scheduler.kv_bytes_resident) == before == (1, before[1])
    assert scheduler.session_new_tokens(SessionId(first + 1)) is None
    assert scheduler.add_session([1, 2], max_new_tokens=2) == first + 1
    assert [tokens for _, tokens in scheduler.run_to_completion()] == [[1, 2, 2, 3]] * 2


def test_a_session_may_fill_the_context_and_not_exceed_it() -> None:
    scheduler = scheduler_of(CoreOnlyModel(max_context=10))
    for max_new in (6, 7):
        scheduler.add_session([1, 2, 3], max_new_tokens=max_new)
    with pytest.raises(InvalidRequestError, match="11 tokens") as caught:
        scheduler.add_session([1, 2, 3], max_new_tokens=8)
    assert caught.value.max_context == 10  # type: ignore[attr-defined]
    assert [len(tokens) for _, tokens in scheduler.run_to_completion()] == [9, 10]


def test_a_real_model_runs_to_the_last_token_of_its_context() -> None:
    scheduler = scheduler_of(tiny(max_position_embeddings=12))
    id = scheduler.add_session(A, max_new_tokens=9)
    drain(scheduler)
    assert scheduler.session(id).finish_reason is FinishReason.LENGTH
    with pytest.raises(InvalidRequestError, match="context"):
        scheduler.add_session(A, max_new_tokens=10)


def watch(cache: KvCache) -> list[weakref.ref[Any]]:
    """Move a cache to memory of which it can be told when the last view is gone."""
    held = [np.zeros(tuple(part.shape), np.float32) for part in (cache.k, cache.v)]
    cache.k, cache.v = (torch.from_numpy(array) for array in held)
    return [weakref.ref(array) for array in held]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("place", [None, "before", "inside", "after"])
def test_reaping_frees_cache_and_reservation_together(
    policy: RoundRobin | Batched, place: str | None
) -> None:
    model = BreakableDecoder(tiny())
    scheduler = scheduler_of(model, policy)
    sessions = [scheduler.session(scheduler.add_session(A, max_new_tokens=3)) for _ in range(2)]
    memory = [part for session in sessions for part in watch(session.cache)]
    held = [scheduler.step()]  # as a caller that shows errors holds them, and the sessions
    if place:
        setattr(model, place, 1)
    held.append(scheduler.step())
    assert [session.finish_reason is FinishReason.ERROR for session in sessions] == [place is not None] * 2
    assert scheduler.is_all_finished
    assert scheduler.kv_free_blocks == 4096 - 2
    assert all(part() is not None for part in memory)
    assert [id for id, _ in scheduler.reap_finished()] == [0, 1]
    assert scheduler.kv_free_blocks == 4096
    assert [part() for part in memory] == [None] * 4
    assert all(traceback.format_exception(error) for report in held for _, error in report.errored)


def test_reaping_takes_only_what_has_finished() -> None:
    scheduler = scheduler_of(CoreOnlyModel())
    long = scheduler.add_session([1], max_new_tokens=5)
    short = scheduler.add_session([1, 2], max_new_tokens=2)
    assert scheduler.reap_finished() == []
    scheduler.step()
    assert scheduler.reap_finished() == [(short, [1, 2, 2, 3])]
    assert scheduler.session_new_tokens(short) is None
    assert scheduler.run_to_completion() == [(long, [1, 1, 2, 3, 4, 5])]
    assert scheduler.run_to_completion() == [(long, [1, 1, 2, 3, 4, 5])]
    assert scheduler.session_new_tokens(long) == [1, 2, 3, 4, 5]


def test_a_session_that_was_never_there_or_is_gone_is_unknown() -> None:
    scheduler = scheduler_of(CoreOnlyModel())
    gone = scheduler.add_session([1], max_new_tokens=1)
    drain(scheduler)
    scheduler.reap_finished()
    for id in (gone, SessionId(gone + 1000), SessionId(-1)):
        assert scheduler.session_new_tokens(id) is None
        for call in (scheduler.session, scheduler.cancel):
            with pytest.raises(UnknownSessionError) as caught:
                call(id)
            assert caught.value.session == id  # type: ignore[attr-defined]


@pytest.mark.parametrize("steps", [0, 1])
def test_a_cancelled_session_keeps_its_tokens_and_runs_no_more(steps: int) -> None:
    core = CoreOnlyModel()
    scheduler = scheduler_of(core)
    id = scheduler.add_session([1], max_new_tokens=9)
    other = scheduler.add_session([1, 2], max_new_tokens=3)
    for _ in range(steps):
        scheduler.step()
    tail = scheduler.session_new_tokens(id)
    scheduler.cancel(id)
    scheduler.cancel(id)
    assert scheduler.session(id).finish_reason is FinishReason.CANCELLED
    assert id not in scheduler.step().advanced
    drain(scheduler)
    scheduler.cancel(other)
    assert scheduler.session(other).finish_reason is FinishReason.LENGTH
    assert scheduler.reap_finished() == [(id, [1, *(tail or [])]), (other, [1, 2, 2, 3, 4])]
    assert scheduler.kv_free_blocks == 4096


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, "float32", None])
@pytest.mark.parametrize("make", [SessionScheduler, PagedSessionScheduler])
def test_keys_and_values_in_a_type_of_no_fractions_are_refused(make: Any, dtype: Any) -> None:
    with pytest.raises(InvalidRequestError, match="floating-point"):
        make(registry.family("llama").tiny(0), KvBudget(16, 4), dtype=dtype)
