"""Nothing is reserved, and yet it can be said what a session needs: what never fits is refused at once."""

from __future__ import annotations

import pytest
from support_models import CoreOnlyModel, scheduler_of
from support_paged import ids, model_of, untouched
from support_paged_sessions import WalkingPagedModel, assert_as_alone, paged_scheduler, watched

from fuel_core.contracts.errors import CapacityError, InvalidRequestError, OutOfBlocksError
from fuel_core.schedule import PagedSessionScheduler, SessionId


def most_held(scheduler: PagedSessionScheduler, id: SessionId) -> int:
    """Run everything; the most blocks that a session holds on the way."""
    handle, core, most = scheduler.session(id).handle, scheduler.pool.core, 0
    while not scheduler.is_all_finished:
        scheduler.step()
        most = max(most, len(core.session_blocks(handle)))
    return most


# --- what a session needs


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize(("prompt_len", "max_new"), [(1, 1), (5, 6), (4, 1), (4, 4), (3, 2), (9, 9)])
def test_a_session_never_holds_more_than_is_said_and_the_last_token_alone_may_be_too_many(
    prompt_len: int, max_new: int, block_size: int
) -> None:
    scheduler = paged_scheduler(WalkingPagedModel(), block_size=block_size)
    said = scheduler.kv_blocks_required(prompt_len, max_new)
    held = most_held(scheduler, scheduler.add_session([1] * prompt_len, max_new_tokens=max_new))
    assert held == said - ((prompt_len + max_new - 1) % block_size == 0)  # it is sampled and never fed


@pytest.mark.parametrize("prompt_len", [1, 3, 4, 5, 8, 9])
def test_without_new_tokens_it_is_what_the_prompt_alone_takes(prompt_len: int) -> None:
    scheduler = paged_scheduler(WalkingPagedModel())
    held = most_held(scheduler, scheduler.add_session([1] * prompt_len, max_new_tokens=1))
    assert held == scheduler.kv_blocks_required(prompt_len, 0)


def test_both_schedulers_say_the_same() -> None:
    paged = paged_scheduler(WalkingPagedModel(), block_size=4)
    contiguous = scheduler_of(CoreOnlyModel(), block_size=4, num_blocks=64)
    for sizes in ((0, 0), (1, 3), (5, 6), (4, 4), (400, 1)):
        assert paged.kv_blocks_required(*sizes) == contiguous.kv_blocks_required(*sizes)


def test_the_blocks_of_a_shared_prefix_count() -> None:
    scheduler = paged_scheduler(WalkingPagedModel())
    donor = scheduler.add_session([1] * 8, max_new_tokens=1)
    scheduler.step()
    prefix = scheduler.register_prefix(donor, 8)
    sharer = scheduler.add_session_sharing_prefix(prefix, [1] * 9, max_new_tokens=4)
    assert most_held(scheduler, sharer) == 3
    assert scheduler.kv_blocks_required(9, 3) == 3


def test_a_length_that_is_none_is_refused() -> None:
    scheduler = paged_scheduler(WalkingPagedModel())
    with untouched(scheduler.pool, InvalidRequestError):
        scheduler.kv_blocks_required(-1, 0)


# --- what never fits


@pytest.mark.parametrize(("length", "need"), [(13, 4), (16, 4), (17, 5), (4001, 1001)])
def test_a_prompt_that_the_whole_pool_would_not_hold_is_refused_before_anything_runs(
    length: int, need: int
) -> None:
    model = WalkingPagedModel()
    scheduler = paged_scheduler(model, num_blocks=3)
    first = scheduler.add_session([1], max_new_tokens=1)
    with untouched(scheduler.pool, CapacityError) as caught:
        scheduler.add_session([1] * length, max_new_tokens=1)
    assert caught.value.figures == {"need": need, "have": 3}
    assert need == scheduler.kv_blocks_required(length, 0)
    for text in (f"{length} tokens", f"{need} KV blocks", "at most 3", "shorten the prompt", "more blocks"):
        assert text in str(caught.value)
    assert (model.passes, scheduler.session_count) == ([], 1)
    assert scheduler.add_session([1], max_new_tokens=1) == first + 1


def test_a_prompt_that_fills_the_pool_runs() -> None:
    model = model_of()
    scheduler = paged_scheduler(model, num_blocks=3)
    id = watched(scheduler, ids(12), 1)
    scheduler.run_to_completion()
    assert_as_alone(scheduler, id, model, ids(12), 1)


def test_one_that_fits_is_taken_however_little_is_free_and_whatever_it_may_generate() -> None:
    model = model_of()
    scheduler = paged_scheduler(model, num_blocks=3)
    holder = scheduler.add_session(ids(9), max_new_tokens=2)
    scheduler.step()
    assert scheduler.kv_free_blocks == 0
    now = scheduler.add_session(ids(12), max_new_tokens=200)
    assert isinstance(dict(scheduler.step().errored)[now], OutOfBlocksError)
    scheduler.reap_finished()
    later = watched(scheduler, ids(12), 1)
    scheduler.run_to_completion()
    assert_as_alone(scheduler, later, model, ids(12), 1)
    assert (holder, now, later) == (0, 1, 2)


def test_a_sharers_whole_prompt_counts_and_a_refused_one_shares_nothing() -> None:
    model = WalkingPagedModel()
    scheduler = paged_scheduler(model, num_blocks=3)
    donor = scheduler.add_session([1] * 8, max_new_tokens=1)
    scheduler.step()
    prefix = scheduler.register_prefix(donor, 8)
    scheduler.reap_finished()
    with untouched(scheduler.pool, CapacityError) as caught:
        scheduler.add_session_sharing_prefix(prefix, [1] * 13, max_new_tokens=1)
    assert caught.value.figures == {"need": 4, "have": 3}
    assert scheduler.session_count == 0
    id = scheduler.add_session_sharing_prefix(prefix, [1] * 12, max_new_tokens=1)
    assert scheduler.step().finished == [id]
    assert scheduler.session(id).error is None
