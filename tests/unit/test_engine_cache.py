"""The automatic prefix cache of an engine: what was computed once is reused, and changes nothing else."""

from __future__ import annotations

import pytest
import torch
from support_engine import Ask, WatchedEngine, alone, ask, drain, engine_of, run_steps, serve, submit
from support_models import distance
from support_paged import TOLERANCE, every_block_size, every_family, ids, model_of, poison

from fuel_core.engine import Engine

MODEL = model_of("llama")


@every_block_size
def test_hits_and_the_tokens_that_they_save_are_counted(block_size: int) -> None:
    engine, length = engine_of(MODEL, 32, block_size), 3 * block_size + 1
    for times in range(3):
        serve(engine, MODEL, ask(length, 1))
        stats = engine.stats.prefix
        assert (stats.lookups, stats.hits) == (times + 1, times)
        assert stats.tokens_reused == times * 3 * block_size
        assert engine.stats.tokens == length + times * (length - 3 * block_size)
    drain(engine)


def test_what_a_session_said_is_cached_as_what_it_was_asked() -> None:
    engine, first = engine_of(MODEL), ask(5, 8)
    serve(engine, MODEL, first)
    # Of 5 and 8 tokens the last was never fed, so three blocks of four are full.
    turn = Ask((*first.prompt, *alone(MODEL, first)[0], 7), 4)
    serve(engine, MODEL, turn)
    assert engine.stats.prefix.tokens_reused == 12
    drain(engine)


@every_family
@pytest.mark.parametrize("seed", [None, 5])
def test_cached_blocks_are_right_long_after_their_makers_are_gone(family: str, seed: int | None) -> None:
    model = model_of(family)
    engine, request = engine_of(model, 24), ask(13, 4, seed=seed, n=2)
    serve(engine, model, request)
    engine.reap_finished()
    for turn in range(3):  # others come and go in the freed blocks
        serve(engine, model, ask(9, 3, start=turn), ask(5, 3, start=turn))
    reused = engine.stats.prefix.tokens_reused
    serve(engine, model, request)
    assert engine.stats.prefix.tokens_reused - reused == 12
    drain(engine)


def test_sessions_that_run_beside_each_other_share_what_the_first_has_computed() -> None:
    engine, first = engine_of(MODEL), ask(12, 9)
    queued = submit(engine, first)
    engine.step()
    before = engine.pool.core.free_blocks
    queued += submit(engine, Ask((*first.prompt[:8], 1, 2), 3), Ask((*first.prompt, 3), 3))
    engine.step()
    used = before - engine.pool.core.free_blocks
    assert used == 3, "a block for each of the three sessions that go on"
    engine.run_to_completion()
    drain(engine)


def test_equal_blocks_behind_other_tokens_are_not_shared() -> None:
    engine, block = engine_of(MODEL), ids(4)
    serve(engine, MODEL, Ask(block * 2, 1))
    serve(engine, MODEL, Ask((*ids(4, 1), *block, 5), 3))
    assert engine.stats.prefix.hits == 0
    serve(engine, MODEL, Ask((*block, *block, *block, 5), 3))
    assert engine.stats.prefix.tokens_reused == 8
    drain(engine)


def test_a_prompt_that_two_compute_at_once_is_kept_once() -> None:
    engine, request = engine_of(MODEL), ask(12, 2)
    serve(engine, MODEL, request, request)
    assert engine.stats.prefix.hits == 0
    engine.reap_finished()
    assert engine.cached_blocks == len(engine._index) == 3
    drain(engine)


def test_what_a_prompt_has_found_is_used_though_it_leaves_before_its_pass() -> None:
    engine, old = engine_of(MODEL, token_budget=8), ask(9, 1)
    serve(engine, MODEL, old)
    serve(engine, MODEL, ask(9, 1, start=1))
    [_, (_, _, found)] = submit(engine, ask(8, 1, start=2), old)  # the first of them is all of the next pass
    engine.step()
    assert engine.session(found).held == 8
    engine.cancel(found)
    assert engine._index.reclaim(2) == 2
    serve(engine, MODEL, old)
    assert engine.stats.prefix.tokens_reused == 16, "the other one's blocks were given up"
    drain(engine)


def test_under_pressure_the_cache_gives_way_before_any_session_does() -> None:
    engine = engine_of(MODEL, 8)
    for start in range(4):
        serve(engine, MODEL, ask(8, 1, start=start))
    assert (engine.cached_blocks, engine.pool.core.free_blocks) == (8, 0)
    serve(engine, MODEL, ask(15, 6, start=9))
    assert (engine.stats.preemptions, engine.stats.prefix.blocks_reclaimed) == (0, 5)
    # The oldest chains went first, and the next from its end.
    found = [len(engine._index._found((*ask(8, start=start).prompt, 1))) for start in range(4)]
    assert found == [0, 0, 1, 2]
    drain(engine)


def test_blocks_that_a_session_has_just_taken_are_not_reclaimed_from_under_it() -> None:
    engine, request = engine_of(MODEL, 5), ask(12, 1)
    serve(engine, MODEL, request)
    longer = Ask((*request.prompt, *ids(5, 8)), 4)
    serve(engine, MODEL, longer)
    assert engine.stats.prefix.tokens_reused == 12
    assert engine.stats.preemptions == 0
    drain(engine)


def test_a_preempted_session_comes_back_the_same_when_its_cached_blocks_are_gone() -> None:
    engine = engine_of(MODEL, 10)
    request = ask(9, 6, seed=4)
    queued = submit(engine, request)
    run_steps(engine, 2)
    engine._preempt(engine._running[-1])
    assert engine._index.reclaim(10) == 2
    poison(engine.pool)
    engine.run_to_completion()
    tokens, rows = alone(MODEL, request)
    assert engine.session_new_tokens(queued[0][2]) == tokens
    assert distance(engine.logits(queued[0][2]), rows) < TOLERANCE
    drain(engine)


# --- negative controls


def test_a_cached_block_with_other_bytes_is_seen() -> None:
    engine, request = engine_of(MODEL), ask(9, 3)
    serve(engine, MODEL, request)
    key, *_ = engine._index._found(request.prompt)
    [block] = engine.pool.core.session_block_table(engine._index._holders[key])
    engine.pool.v_pool(0)[block].mul_(1.01)
    with pytest.raises(AssertionError):
        serve(engine, MODEL, request)


class Unchained(WatchedEngine):
    """A fault that comparisons must see: a block is found wherever its tokens stand."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine._model, engine.pool)
        self._index._extend = self._extend  # type: ignore[method-assign]

    def _extend(self, chain: list[bytes], tokens: list[int]) -> None:
        chain[:] = [repr(tokens[i : i + 4]).encode() for i in range(0, len(tokens) - 3, 4)]


def test_a_cache_that_forgets_what_stands_before_a_block_is_seen() -> None:
    engine, block = Unchained(engine_of(MODEL)), [*ids(4)]
    serve(engine, MODEL, Ask(tuple(ids(4, 1) + ids(4)), 1))
    with pytest.raises(AssertionError):
        serve(engine, MODEL, Ask((*block, 5), 2))
    assert engine.stats.prefix.hits == 1


def test_a_warm_cache_computes_less_and_says_the_same_to_within_rounding() -> None:
    cold, warm, request = engine_of(MODEL), engine_of(MODEL), ask(14, 4)
    serve(warm, MODEL, request)
    [first], [second] = serve(cold, MODEL, request), serve(warm, MODEL, request)
    assert distance(cold.logits(first), warm.logits(second)) < TOLERANCE
    assert not torch.isnan(warm.logits(second)).any()
