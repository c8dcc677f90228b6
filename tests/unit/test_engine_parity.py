"""Every request says on the engine what it says alone, whatever befalls it and whatever runs beside it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from itertools import combinations, cycle
from typing import Any

import pytest
import torch
from support_engine import (
    Ask,
    WatchedEngine,
    alone,
    ask,
    assert_as_alone,
    drain,
    engine_of,
    run_steps,
    serve,
    submit,
)
from support_models import distance
from support_paged import (
    BLOCK_SIZES,
    FAMILIES,
    TOLERANCE,
    every_block_size,
    every_family,
    ids,
    model_of,
    pool_for,
)

from fuel_core.engine import Engine
from fuel_core.kv import DeviceKvPool, SessionHandle
from fuel_core.kv.device_pool import SessionImage
from fuel_core.schedule import SessionId

CONDITIONS: Mapping[str, Mapping[str, Any]] = {
    "alone": {},
    "in company": {"company": True},
    "in chunks": {"token_budget": 3},
    "sharing a prefix": {"shared": True},
    "on a warm cache": {"warm": True},
    "forked": {"n": 3},
    "swapped at every step": {"swaps": True},
    "in a full pool": {"company": True, "full": True},
    "in permuted blocks": {"shuffled": 5},
    "sampled": {"seed": 11},
    "stopping": {"eos": frozenset(range(0, 96, 4))},
    "few at a time": {"company": True, "max_batch": 3},
    **{f"in blocks of {size}": {"block_size": size} for size in BLOCK_SIZES},
}
SHOWN: Mapping[str, Callable[[WatchedEngine], bool]] = {
    "in company": lambda engine: engine.stats.passes == 5,
    "in chunks": lambda engine: engine.stats.passes > 5 * 5,
    "sharing a prefix": lambda engine: engine.stats.prefix.hits == 4,
    "on a warm cache": lambda engine: engine.stats.prefix.hits == 2,
    "forked": lambda engine: engine.stats.tokens == sum((1, 3, 4, 5, 8)) + 5 * 3 * 4,
    "swapped at every step": lambda engine: engine.stats.preemptions == 5 * 4,
    "in a full pool": lambda engine: engine.stats.preemptions > 0,
    "stopping": lambda engine: engine.stats.passes < 5 * 5,
}
"""What proves that a condition was met, with blocks of 4 and nothing else."""


def play(
    family: str,
    *,
    block_size: int = 4,
    company: bool = False,
    shared: bool = False,
    warm: bool = False,
    full: bool = False,
    n: int = 1,
    seed: int | None = None,
    eos: frozenset[int] = frozenset(),
    **options: Any,
) -> WatchedEngine:
    """Requests of every length that matters, under some conditions; all must say what they say alone."""
    model = model_of(family)
    lengths = sorted({1, block_size - 1, block_size, block_size + 1, 2 * block_size} - {0})
    prefix = ids(2 * block_size) if shared else ()
    asks = [Ask(prefix + ids(length, seed=length), seed=seed, eos=eos, n=n) for length in lengths]
    blocks = max(each.blocks(block_size) for each in asks) if full else 64
    engine = engine_of(model, blocks, block_size, **options)
    if warm:
        serve(engine, model, *(Ask(each.prompt, 1) for each in asks))
    for group in [asks] if company else [[each] for each in asks]:
        serve(engine, model, *group)
    drain(engine)
    return engine


@every_family
@pytest.mark.parametrize("condition", CONDITIONS)
def test_under_one_condition_every_request_says_what_it_says_alone(family: str, condition: str) -> None:
    engine = play(family, **CONDITIONS[condition])
    assert SHOWN.get(condition, bool)(engine), "the condition was met"


def pairs() -> list[tuple[str, str, str]]:
    """Random pairs of conditions that do not contradict each other, dealt out to the families in turn."""
    every = [
        (one, other)
        for one, other in combinations(CONDITIONS, 2)
        if one != "alone" and not {"block_size"} <= CONDITIONS[one].keys() & CONDITIONS[other].keys()
    ]
    drawn = random.Random(1).sample(every, 6 * len(FAMILIES))
    return [(*pair, family) for pair, family in zip(drawn, cycle(FAMILIES), strict=False)]


@pytest.mark.parametrize(("one", "other", "family"), pairs())
def test_under_any_two_conditions_every_request_says_what_it_says_alone(
    one: str, other: str, family: str
) -> None:
    play(family, **{**CONDITIONS[one], **CONDITIONS[other]})


def test_every_condition_and_family_is_in_some_pair() -> None:
    assert {name for *pair, _ in pairs() for name in pair} == {*CONDITIONS} - {"alone"}
    assert {family for *_, family in pairs()} == {*FAMILIES}


@every_family
def test_a_prompt_in_chunks_of_any_size_says_what_it_says_whole(family: str) -> None:
    model = model_of(family)
    for budget in range(1, 9):
        drain_after(engine_of(model, token_budget=budget), model, ask(8, 2), ask(7, 2))


@every_block_size
def test_chunks_of_any_size_fit_blocks_of_any_size(block_size: int) -> None:
    model = model_of("llama")
    for budget in range(1, 2 * block_size + 1):
        drain_after(engine_of(model, 16, block_size, token_budget=budget), model, ask(2 * block_size, 2))


def drain_after(engine: WatchedEngine, model: Any, *asks: Ask) -> None:
    serve(engine, model, *asks)
    drain(engine)


@every_family
@every_block_size
def test_a_prompt_of_two_whole_blocks_that_is_cached_says_the_same(family: str, block_size: int) -> None:
    model, request = model_of(family), ask(2 * block_size)
    engine = engine_of(model, 16, block_size)
    serve(engine, model, request)
    computed = engine.stats.tokens
    serve(engine, model, request)
    # The last block is computed again, whatever is cached: its last token's logits come next.
    assert engine.stats.prefix.tokens_reused == block_size
    assert engine.stats.tokens - computed == block_size + request.max_new - 1
    drain(engine)


@pytest.mark.parametrize("seed", [None, 3])
def test_a_session_preempted_at_any_step_goes_on_as_if_nothing_had_been(seed: int | None) -> None:
    model = model_of("llama")
    asks = [ask(7, seed=seed, start=1), ask(9, seed=seed, n=2, start=2)]
    at_rest = engine_of(model, token_budget=4)
    serve(at_rest, model, *asks)
    for step in range(at_rest.stats.passes):
        engine = engine_of(model, token_budget=4)
        queued = submit(engine, *asks)
        run_steps(engine, step)
        if engine._running:
            engine._preempt(engine._running[-1])
        engine.run_to_completion()
        assert_as_alone(engine, model, queued)
        drain(engine)


@pytest.mark.parametrize("condition", ["swapped at every step", "in permuted blocks"])
def test_where_the_passes_are_the_same_so_is_every_bit(condition: str) -> None:
    model, asks = model_of("qwen3"), [ask(1), ask(5), ask(8)]
    plain, changed = engine_of(model), engine_of(model, **CONDITIONS[condition])
    ours = [serve(engine, model, *asks) for engine in (plain, changed)]
    for one, other in zip(*ours, strict=True):
        assert torch.equal(plain.logits(one), changed.logits(other))


def test_what_stands_in_unused_slots_changes_no_bit() -> None:
    model, asks = model_of("llama"), [ask(1), ask(5, n=2), ask(8)]
    poisoned = engine_of(model, token_budget=5)
    clean = WatchedEngine(model, pool_for(model), token_budget=5)
    for layer in range(2):
        clean.pool.k_pool(layer).zero_()
        clean.pool.v_pool(layer).zero_()
    ours, theirs = serve(poisoned, model, *asks), serve(clean, model, *asks)
    assert all(torch.equal(poisoned.logits(a), clean.logits(b)) for a, b in zip(ours, theirs, strict=True))


# --- two of a kind


MIXED = [ask(9, 6, n=3, seed=1), ask(7, 6), ask(6, 6, seed=2)]


def test_two_engines_on_one_model_know_nothing_of_each_other() -> None:
    engines = [
        engine_of(model_of("llama"), 7, token_budget=5),
        engine_of(model_of("llama"), 9, 3, shuffled=1),
    ]
    queued = [submit(engine, *MIXED) for engine in engines]
    while not all(engine.is_all_finished for engine in engines):
        run_steps(engines[0], 1)
        run_steps(engines[1], 1)
    for engine, each in zip(engines, queued, strict=True):
        assert_as_alone(engine, model_of("llama"), each)
        drain(engine)


def test_two_models_in_one_process_know_nothing_of_each_other() -> None:
    models = [model_of("llama"), model_of("qwen3"), model_of("llama", seed=1)]
    engines = [engine_of(model, 9) for model in models]
    queued = [submit(engine, *MIXED) for engine in engines]
    while not all(engine.is_all_finished for engine in engines):
        for engine in engines:
            engine.step()
    for model, engine, each in zip(models, engines, queued, strict=True):
        assert_as_alone(engine, model, each)
        drain(engine)
    assert not torch.equal(*(engines[i].logits(SessionId(0)) for i in (0, 2))), "the models differ"


# --- negative controls


class ForgetfulPool(DeviceKvPool):
    """A fault that comparisons must see: of what comes back from the host, a block is empty."""

    def swap_in(self, image: SessionImage) -> SessionHandle:
        return super().swap_in(SessionImage(image.tokens, image.data.index_fill(2, torch.tensor(0), 0.0)))


def test_a_session_that_comes_back_without_a_block_is_seen() -> None:
    model = model_of("llama")
    pool = pool_for(model)
    engine = WatchedEngine(model, ForgetfulPool(pool.geometry), swaps=True)
    queued = submit(engine, ask(3, 2))  # no full block, which the prefix cache would have
    engine.run_to_completion()
    _, rows = alone(model, queued[0][0])
    assert distance(engine.logits(queued[0][2]), rows) > 100 * TOLERANCE
    with pytest.raises(AssertionError):
        assert_as_alone(engine, model, queued)


def test_a_slot_that_was_poisoned_and_read_is_seen() -> None:
    model = model_of("llama")
    engine = engine_of(model)
    queued = submit(engine, ask(8))
    engine.step()
    engine.pool.v_pool(1)[engine.pool.core.session_block_table(_handle(engine))[0], 0] = torch.nan
    engine.run_to_completion()
    with pytest.raises(AssertionError):
        assert_as_alone(engine, model, queued)


def _handle(engine: Engine) -> SessionHandle:
    [session] = engine._running
    assert session.handle is not None
    return session.handle


@pytest.mark.parametrize("seed", [None, 4])
def test_logits_tell_prompts_apart_that_differ_in_their_first_token(seed: int | None) -> None:
    model = model_of("llama")
    request = ask(8, seed=seed)
    other = Ask(((request.prompt[0] + 1) % 96, *request.prompt[1:]), seed=seed)
    assert distance(alone(model, request)[1][:1], alone(model, other)[1][:1]) > 100 * TOLERANCE
