"""What the engine takes into a pass, whom it admits, and whom it moves out: in order, and nobody for ever."""

from __future__ import annotations

import pytest
from support_engine import Ask, WatchedEngine, WatchedModel, ask, drain, engine_of, run_steps, serve, submit
from support_paged import every_block_size, model_of, opened, pool_for

from fuel_core.contracts import SamplingParams
from fuel_core.contracts.errors import OutOfBlocksError
from fuel_core.engine import Engine
from fuel_core.schedule import SessionId

MODEL = model_of("llama")


def ids_of(engine: WatchedEngine, queue: str) -> list[int]:
    """Who stands in a queue."""
    return [session.id for session in getattr(engine, f"_{queue}")]


# --- what is in a pass


@pytest.mark.parametrize(("length", "chunk"), [(1, 1), (7, 3), (8, 4), (9, 4), (5, 64), (12, 1)])
def test_a_prompt_takes_as_many_passes_as_it_has_chunks(length: int, chunk: int) -> None:
    model = WatchedModel(MODEL)
    engine, request = engine_of(model, token_budget=chunk), ask(length, 1)
    serve(engine, MODEL, request)
    assert len(model.passes) == engine.stats.passes == -(-length // chunk)
    assert [token for (new,) in model.passes for token in new] == list(request.prompt)
    assert all(len(new) == chunk for (new,) in model.passes[:-1])
    assert engine.stats.tokens == length


def test_decoding_sessions_come_first_in_every_pass_and_prompts_fill_it_up_in_order() -> None:
    model = WatchedModel(MODEL)
    engine = engine_of(model, token_budget=6)
    old, first, second = ask(3, 9), ask(11, 2), ask(9, 2)
    queued = submit(engine, old)
    engine.step()
    queued += submit(engine, first, second)
    model.passes.clear()
    run_steps(engine, 4)
    chunks = [[len(new) for new in batch] for batch in model.passes]
    assert chunks == [[1, 5], [1, 5], [1, 1, 4], [1, 1, 4]]
    assert [batch[1] for batch in model.passes[:2]] == [first.prompt[:5], first.prompt[5:10]]
    assert model.passes[2][1:] == (first.prompt[10:], second.prompt[:4])
    engine.run_to_completion()
    drain(engine)


def test_a_decoding_session_gets_a_token_in_every_step_whatever_prompts_wait() -> None:
    engine = engine_of(MODEL, token_budget=2)
    (_, _, id), *_ = submit(engine, ask(1, 12))
    engine.step()
    submit(engine, *(ask(20, 1, start=i) for i in range(3)))
    for step in range(1, 12):
        assert len(engine.session_new_tokens(id) or []) == step
        engine.step()


def test_prompts_wait_where_decoding_leaves_no_room_and_go_on_when_it_does() -> None:
    engine = engine_of(MODEL, token_budget=1)
    [(_, _, old)] = submit(engine, ask(1, 6))
    engine.step()
    [(_, _, young)] = submit(engine, ask(3, 2))
    run_steps(engine, 5)
    assert engine.session_new_tokens(young) == []
    assert not engine.session(old).is_ready
    run_steps(engine, 3)
    assert len(engine.session_new_tokens(young) or []) == 1


def test_a_step_reports_who_advanced_and_finished_and_whether_together() -> None:
    engine = engine_of(MODEL)
    first, second = (id for _, _, id in submit(engine, ask(3, 2), ask(4, 1)))
    report = engine.step()
    assert (report.advanced, report.finished, report.errored) == ([first, second], [second], [])
    assert report.used_batched_arm
    report = engine.step()
    assert (report.advanced, report.finished) == ([first], [first])
    assert not report.used_batched_arm
    assert engine.step().advanced == []


# --- who is admitted


def test_admission_is_in_order_even_where_a_smaller_request_would_fit() -> None:
    engine = engine_of(MODEL, 8, watermark=0)
    submit(engine, ask(16, 4), ask(20, 1, start=1), ask(1, 1, start=2))
    run_steps(engine, 2)
    assert (ids_of(engine, "running"), ids_of(engine, "waiting")) == ([0], [1, 2])
    run_steps(engine, 3)
    assert not engine._sessions[SessionId(1)].is_ready
    engine.run_to_completion()
    drain(engine)


@pytest.mark.parametrize(("watermark", "admitted"), [(0.0, [0, 1]), (0.5, [0, 1]), (0.63, [0])])
def test_admission_leaves_the_watermark_free(watermark: float, admitted: list[int]) -> None:
    engine = engine_of(MODEL, 8, watermark=watermark)
    submit(engine, ask(7, 3), ask(8, 3))  # two blocks each, of eight
    engine.step()
    assert ids_of(engine, "running") == admitted


def test_a_request_alone_may_fill_the_pool_whatever_the_watermark() -> None:
    engine = engine_of(MODEL, 4, watermark=0.9)
    serve(engine, MODEL, ask(11, 6))
    drain(engine)


def test_blocks_that_admitted_prompts_are_about_to_take_count_as_taken() -> None:
    engine = engine_of(MODEL, 12, token_budget=4)
    submit(engine, ask(20, 2), ask(20, 2, start=1), ask(20, 2, start=2))  # five blocks each, of twelve
    engine.step()
    assert ids_of(engine, "running") == [0, 1]
    engine.run_to_completion()
    assert engine.stats.preemptions == 0
    drain(engine)


def test_blocks_that_others_hold_cost_a_prompt_nothing() -> None:
    engine = engine_of(MODEL, 8, watermark=0)
    first = ask(20, 3)
    submit(engine, first)
    engine.step()
    submit(engine, Ask((*first.prompt[:16], 1), 1))  # four blocks shared, one of its own
    engine.step()
    assert engine.stats.prefix.tokens_reused == 16
    assert not engine._sessions[SessionId(1)].is_ready


def test_no_more_sessions_run_than_max_batch_and_forks_have_seats_before_they_run() -> None:
    engine = engine_of(MODEL, max_batch=4)
    submit(engine, ask(9, 4, n=3), ask(5, 3), ask(6, 3, n=2), ask(7, 3))
    engine.step()
    assert ids_of(engine, "running") == [0, 1, 2, 3]
    assert ids_of(engine, "waiting") == [4, 6]
    engine.run_to_completion()
    drain(engine)


# --- who is moved out, and comes back


def test_the_newest_is_moved_out_and_the_oldest_comes_back_first() -> None:
    engine = engine_of(MODEL, 6, 1, watermark=0)
    requests = [ask(1, 5), ask(1, 4, start=1), ask(1, 3, start=2)]
    queued = submit(engine, *requests)
    seen: list[tuple[list[int], list[int]]] = []
    while not engine.is_all_finished:
        engine.step()
        seen.append((ids_of(engine, "running"), ids_of(engine, "preempted")))
    assert seen[1:3] == [([0, 1, 2], []), ([0, 1], [2])]
    assert ([0], [1, 2]) in seen, "the next to go is the next newest"
    assert [id for _, _, id in queued] == [0, 1, 2]
    assert engine.stats.preemptions == 2
    drain(engine)


def test_what_was_moved_out_comes_back_before_anything_new_is_admitted() -> None:
    engine = engine_of(MODEL, 6, 1, watermark=0)
    submit(engine, ask(1, 5), ask(1, 5, start=1))
    while not engine._preempted:
        engine.step()
    submit(engine, ask(1, 1, start=2))
    while engine._preempted:
        assert (ids_of(engine, "preempted"), ids_of(engine, "waiting")) == ([1], [2])
        engine.step()
    engine.run_to_completion()
    drain(engine)


@pytest.mark.parametrize("budget", [1, 3, 64])
@pytest.mark.parametrize("block_size", [1, 3])
def test_nothing_starves_in_a_pool_that_holds_one_request_at_a_time(block_size: int, budget: int) -> None:
    requests = [ask(length, 7, seed=length, start=budget) for length in (1, 6, 2, 9, 4, 9, 3, 9, 5)]
    blocks = max(request.blocks(block_size) for request in requests)
    engine = engine_of(MODEL, blocks, block_size, token_budget=budget, watermark=0)
    serve(engine, MODEL, *requests)
    drain(engine)


@pytest.mark.parametrize("seed", [None, 5])
def test_a_pool_of_one_block_serves_any_number_one_after_the_other(seed: int | None) -> None:
    engine = engine_of(MODEL, 1, 8)
    serve(engine, MODEL, *(ask(length, 3, seed=seed, n=2) for length in (1, 3, 6)))
    drain(engine)


@pytest.mark.parametrize("blocks", [1, 2, 9])
def test_a_block_may_be_larger_than_any_session(blocks: int) -> None:
    engine = engine_of(MODEL, blocks, 64)
    serve(engine, MODEL, *(ask(length, 4, n=2) for length in (1, 7, 20)))
    assert len(engine._index) == 0, "no block was ever full"
    drain(engine)


def test_one_that_cannot_grow_even_alone_fails_with_what_it_lacks() -> None:
    engine = Engine(MODEL, pool_for(MODEL, 4))
    outsider = opened(engine.pool, 8)  # whoever takes blocks of an engine's pool breaks its reckoning
    [(_, _, id)] = submit(engine, ask(5, 8))
    run_steps(engine, 20)
    error = engine.session(id).error
    assert isinstance(error, OutOfBlocksError)
    assert (error.need, error.have, len(engine.session(id).new_tokens)) == (1, 0, 4)
    engine.pool.core.discard(outsider)
    drain(engine)


# --- forks


@every_block_size
def test_samples_of_one_prompt_share_its_blocks_until_they_write(block_size: int) -> None:
    length, n = 2 * block_size, 4
    engine = engine_of(MODEL, 64, block_size)
    serve(engine, MODEL, ask(length, 3, seed=2, n=n))
    assert engine.stats.tokens == length + n * 2, "the prompt was computed once"
    submit(engine, ask(length + 1, 3, seed=2, n=n, start=1))
    engine.step()
    used = engine.pool.geometry.num_blocks - engine.pool.core.free_blocks - engine.cached_blocks
    assert used == -(-(length + 1) // block_size)
    engine.run_to_completion()
    drain(engine)


def test_seeded_samples_differ_and_each_is_that_of_its_own_seed() -> None:
    engine = engine_of(MODEL)
    told = [engine.session_new_tokens(id) for id in serve(engine, MODEL, ask(6, 8, seed=3, n=4))]
    assert len({tuple(tokens or ()) for tokens in told}) == 4


def test_the_seed_after_the_last_is_the_first() -> None:
    engine = engine_of(MODEL)
    prompt, last = ask(5).prompt, SamplingParams(temperature=1.0, seed=2**64 - 1)
    ids = engine.submit(prompt, last, max_new_tokens=6, n=2)
    ids += engine.submit(prompt, SamplingParams(temperature=1.0, seed=0), max_new_tokens=6)
    engine.run_to_completion()
    assert engine.session_new_tokens(ids[1]) == engine.session_new_tokens(ids[2])
