"""A prefix is computed once: who shares it decodes as if it had computed it, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support_models import distance, tiny
from support_paged import content, every_block_size, every_family, ids, model_of, poison_free, untouched
from support_paged_sessions import (
    WalkingPagedModel,
    assert_as_alone,
    from_scratch,
    paged_scheduler,
    taken,
    watched,
)

from fuel_core.contracts import SamplingParams
from fuel_core.contracts.errors import (
    InvalidRequestError,
    PrefixMismatchError,
    PrefixNotFullyFilledError,
    SessionNotResidentError,
    UnknownPrefixError,
    UnknownSessionError,
)
from fuel_core.kv import PrefixId
from fuel_core.layers import Decoder
from fuel_core.schedule import PagedSessionScheduler, SessionId

PREFIX = ids(8)
A, B = PREFIX + ids(3, 1), PREFIX + ids(4, 2)


def shared(
    model: Decoder, tokens: tuple[int, ...] = PREFIX, block_size: int = 4, num_blocks: int = 64
) -> tuple[PagedSessionScheduler, PrefixId]:
    """A scheduler with a prefix whose donor is gone."""
    scheduler = paged_scheduler(model, block_size=block_size, num_blocks=num_blocks)
    donor = scheduler.add_session(tokens, max_new_tokens=1)
    scheduler.step()
    prefix = scheduler.register_prefix(donor, len(tokens))
    assert [id for id, _ in scheduler.reap_finished()] == [donor]
    poison_free(scheduler.pool)
    return scheduler, prefix


# --- the same as from scratch


@every_family
@every_block_size
def test_a_sharer_decodes_as_if_it_had_computed_the_prefix(family: str, block_size: int) -> None:
    model, tokens = model_of(family), ids(2 * block_size)
    scheduler, prefix = shared(model, tokens, block_size)
    core, prompt = scheduler.pool.core, tokens + ids(5, 5)
    id = watched(scheduler, prompt, 6, 3, prefix=prefix)
    assert core.filled_tokens(scheduler.session(id).handle) == 2 * block_size
    assert scheduler.kv_free_blocks == 62
    assert [core.block_refcount(block) for block in core.prefix_blocks(prefix)] == [2, 2]
    scheduler.run_to_completion()
    assert_as_alone(scheduler, id, model, prompt, 6, 3)


@pytest.mark.parametrize("suffix", [1, 3, 4, 5, 8])
def test_what_follows_a_prefix_may_be_of_any_length(suffix: int) -> None:
    model, prompt = model_of(), PREFIX + ids(suffix, 5)
    scheduler, prefix = shared(model)
    id = watched(scheduler, prompt, 6, 3, prefix=prefix)
    scheduler.run_to_completion()
    assert_as_alone(scheduler, id, model, prompt, 6, 3)


def test_only_what_follows_the_prefix_is_fed() -> None:
    model = WalkingPagedModel(vocab=96)
    scheduler, prefix = shared(model)  # type: ignore[arg-type]
    model.passes.clear()
    id = scheduler.add_session_sharing_prefix(prefix, [*PREFIX, 41, 42], max_new_tokens=2)
    assert scheduler.run_to_completion() == [(id, [*PREFIX, 41, 42, 10, 11])]
    assert model.passes == [("prefill", (41,)), ("prefill", (42,)), ("serial", (10,))]


@pytest.mark.parametrize("fault", ["another prefix", "fed twice", "blocks swapped"])
def test_a_prefix_that_is_not_the_prompts_or_not_at_its_place_is_seen(fault: str) -> None:
    model = model_of()
    scheduler, prefix = shared(model, ids(8, 50) if fault == "another prefix" else PREFIX)
    scheduler._prefixes[prefix] = PREFIX
    id = watched(scheduler, PREFIX + A if fault == "fed twice" else A, 5, prefix=prefix)
    if fault == "blocks swapped":
        first, second = scheduler.pool.core.prefix_blocks(prefix)
        for layer in range(2):
            k = scheduler.pool.k_pool(layer)
            k[[first, second]] = k[[second, first]]
    scheduler.run_to_completion()
    assert distance(taken(scheduler, id), from_scratch(model, A, 5)[1]) > 1e-3


@every_family
def test_two_sharers_of_one_prefix_decode_beside_each_other(family: str) -> None:
    model = model_of(family)
    scheduler, prefix = shared(model)
    cases = [(A, 5, 1), (B, 6, 2), (A, 4, 3)]
    watch = [(watched(scheduler, *case, prefix=prefix), case) for case in cases]
    kept = [content(scheduler.pool, block) for block in scheduler.pool.core.prefix_blocks(prefix)]
    scheduler.run_to_completion()
    for id, case in watch:
        assert_as_alone(scheduler, id, model, *case)
    assert [content(scheduler.pool, block) for block in scheduler.pool.core.prefix_blocks(prefix)] == kept


@every_family
@pytest.mark.parametrize("after", [1, 2])
def test_a_donor_that_goes_on_and_its_sharer_do_not_meet(family: str, after: int) -> None:
    model = model_of(family)
    scheduler = paged_scheduler(model)
    donor = watched(scheduler, PREFIX, 8, 4)
    for _ in range(after):
        scheduler.step()
    sharers = [
        watched(scheduler, prompt, 7, 5, prefix=scheduler.register_prefix(donor, n))
        for prompt, n in ((B, 8), (PREFIX[:4] + ids(5, 7), 4))
    ]
    scheduler.run_to_completion()
    assert_as_alone(scheduler, donor, model, PREFIX, 8, 4)
    assert_as_alone(scheduler, sharers[0], model, B, 7, 5)
    assert_as_alone(scheduler, sharers[1], model, PREFIX[:4] + ids(5, 7), 7, 5)


def test_a_prefix_may_hold_what_the_donor_generated() -> None:
    model = model_of()
    scheduler = paged_scheduler(model)
    donor = watched(scheduler, PREFIX[:6], 4, 4)
    scheduler.run_to_completion()
    generated = tuple(scheduler.session(donor).tokens)
    prefix = scheduler.register_prefix(donor, 8)
    prompt = generated[:8] + ids(3, 9)
    id = watched(scheduler, prompt, 4, prefix=prefix)
    with untouched(scheduler.pool, PrefixMismatchError):
        scheduler.add_session_sharing_prefix(prefix, A, max_new_tokens=4)
    scheduler.run_to_completion()
    assert_as_alone(scheduler, id, model, prompt, 4)


def test_a_prefix_that_is_released_lives_as_long_as_its_sharers() -> None:
    model = model_of()
    scheduler, prefix = shared(model)
    id = watched(scheduler, A, 5, prefix=prefix)
    scheduler.release_prefix(prefix)
    greedy = [scheduler.add_session(ids(9, seed), max_new_tokens=30) for seed in range(3)]
    scheduler.run_to_completion()  # others would have taken the blocks
    assert greedy
    assert_as_alone(scheduler, id, model, A, 5)
    scheduler.reap_finished()
    assert scheduler.kv_free_blocks == 64


def test_blocks_that_were_let_go_too_soon_are_seen() -> None:
    model = model_of()
    scheduler, prefix = shared(model)
    id = watched(scheduler, A, 5, prefix=prefix)
    scheduler.pool.core._ledger.drop(scheduler.pool.core.prefix_blocks(prefix))
    scheduler.release_prefix(prefix)
    scheduler.add_session(ids(30, 8), max_new_tokens=1)
    poison_free(scheduler.pool)
    scheduler.run_to_completion()
    rows = scheduler.take_captured_logits(id) or [torch.tensor(torch.nan)]
    assert not all(torch.isfinite(row).all() for row in rows)


def test_sharers_at_one_position_advance_in_one_pass() -> None:
    model = model_of()
    scheduler, prefix = shared(model)
    watch = [(watched(scheduler, A, 6, seed, prefix=prefix), seed) for seed in range(3)]
    while not scheduler.is_all_finished:
        assert scheduler.step_batched(4).used_batched_arm
    for id, seed in watch:
        assert_as_alone(scheduler, id, model, A, 6, seed, within=1e-4)


# --- what is refused


@pytest.mark.parametrize(
    ("prompt", "changes", "error"),
    [
        (PREFIX, {}, InvalidRequestError),  # nothing follows
        (PREFIX[:5], {}, InvalidRequestError),
        ((), {}, InvalidRequestError),
        ((*A, 96), {}, InvalidRequestError),
        (A, {"max_new_tokens": 0}, InvalidRequestError),
        (A, {"max_new_tokens": 10}, InvalidRequestError),  # beyond the context
        (A, {"sampling": SamplingParams(min_new_tokens=9)}, InvalidRequestError),
        (ids(11, 5), {}, PrefixMismatchError),
        ((*PREFIX[:7], PREFIX[7] ^ 1, 3), {}, PrefixMismatchError),
        ((PREFIX[0] ^ 1,), {}, PrefixMismatchError),
        (A, {"prefix": PrefixId(99)}, UnknownPrefixError),
    ],
)
def test_a_sharer_that_is_refused_leaves_nothing(
    prompt: tuple[int, ...], changes: dict[str, Any], error: type[Exception]
) -> None:
    scheduler, prefix = shared(tiny(max_position_embeddings=20))
    count = scheduler.session_count
    with untouched(scheduler.pool, error):
        scheduler.add_session_sharing_prefix(
            **{"prefix": prefix, "prompt": prompt, "max_new_tokens": 3, **changes}
        )
    assert scheduler.session_count == count
    id = scheduler.add_session_sharing_prefix(prefix, A, max_new_tokens=3)
    assert id == SessionId(1)
    scheduler.run_to_completion()
    assert [each for each, _ in scheduler.reap_finished()] == [id]
    scheduler.release_prefix(prefix)
    assert scheduler.kv_free_blocks == 64


def test_a_mismatch_names_the_first_token_that_differs() -> None:
    scheduler, prefix = shared(model_of())
    with pytest.raises(PrefixMismatchError, match="position 5") as caught:
        scheduler.add_session_sharing_prefix(
            prefix, [*PREFIX[:5], PREFIX[5] ^ 1, PREFIX[6] ^ 1, 0, 0], max_new_tokens=3
        )
    assert caught.value.place == 5


@pytest.mark.parametrize("n", [0, -4, 3, 6, 12, 400])
def test_a_prefix_is_of_whole_blocks_that_the_donor_has_filled(n: int) -> None:
    scheduler = paged_scheduler(model_of())
    donor = scheduler.add_session(A, max_new_tokens=1)
    with untouched(scheduler.pool, PrefixNotFullyFilledError):
        scheduler.register_prefix(donor, 4)  # its prompt has not run
    scheduler.step()
    with untouched(scheduler.pool, PrefixNotFullyFilledError):
        scheduler.register_prefix(donor, n)
    assert scheduler.register_prefix(donor, 8) == 0
    with untouched(scheduler.pool, UnknownSessionError):
        scheduler.register_prefix(SessionId(7), 8)


def test_a_suspended_donor_gives_no_prefix_and_a_restored_one_does() -> None:
    model = model_of()
    scheduler = paged_scheduler(model)
    donor = scheduler.add_session(PREFIX, max_new_tokens=9)
    scheduler.step()
    scheduler.evict_session(donor)
    with untouched(scheduler.pool, SessionNotResidentError):
        scheduler.register_prefix(donor, 8)
    scheduler.restore_session(donor)
    id = watched(scheduler, A, 3, prefix=scheduler.register_prefix(donor, 8))
    scheduler.run_to_completion()
    assert_as_alone(scheduler, id, model, A, 3)


def test_a_prefix_is_released_once() -> None:
    scheduler, prefix = shared(model_of())
    scheduler.release_prefix(prefix)
    assert scheduler.kv_free_blocks == 64
    for gone in (prefix, PrefixId(99)):
        with untouched(scheduler.pool, UnknownPrefixError):
            scheduler.release_prefix(gone)
        with untouched(scheduler.pool, UnknownPrefixError):
            scheduler.add_session_sharing_prefix(gone, A, max_new_tokens=3)


def test_a_prefix_of_the_pool_that_the_scheduler_does_not_know_is_refused() -> None:
    scheduler = paged_scheduler(model_of())
    donor = scheduler.add_session(PREFIX, max_new_tokens=9)
    scheduler.step()
    prefix = scheduler.pool.core.register_prefix(scheduler.session(donor).handle, 8)
    with untouched(scheduler.pool, UnknownPrefixError):
        scheduler.add_session_sharing_prefix(prefix, A, max_new_tokens=3)
    with untouched(scheduler.pool, UnknownPrefixError):
        scheduler.release_prefix(prefix)
    known = scheduler.register_prefix(donor, 8)
    scheduler.pool.core.release_prefix(known)
    with untouched(scheduler.pool, UnknownPrefixError):
        scheduler.add_session_sharing_prefix(known, A, max_new_tokens=3)
