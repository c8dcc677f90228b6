"""Where the host or the device has no memory for a session that moves, it fails, and no other does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support_engine import Ask, WatchedEngine, alone, ask, assert_as_alone, audit, drain, engine_of, submit
from support_paged import ids, model_of

from fuel_core.contracts import FinishReason
from fuel_core.contracts.errors import CapacityError
from fuel_core.engine import Engine
from fuel_core.schedule import SessionId

MODEL = model_of("llama")
ASKS = [ask(5, 8), ask(6, 8, seed=2, start=1), ask(7, 8, n=2, seed=3, start=2)]
ERRORS = [RuntimeError("out of memory"), MemoryError(), CapacityError("a", needed="b", remedy="c")]


def crowded() -> tuple[WatchedEngine, list[tuple[Ask, int, SessionId]]]:
    """An engine that must move sessions out and back."""
    engine = engine_of(MODEL, 8, watermark=0)
    return engine, submit(engine, *ASKS)


def failing(engine: Engine, name: str, error: Exception, times: int) -> list[object]:
    """Let the first calls of a move of the pool fail; what they were given."""
    real, given = getattr(engine.pool, name), list[object]()

    def move(what: object) -> object:
        given.append(what)
        if len(given) <= times:
            raise error
        return real(what)

    setattr(engine.pool, name, move)
    return given


def run(engine: Engine) -> list[tuple[SessionId, Exception]]:
    """Step to the end, with each step audited; the errors that were reported."""
    errored = []
    while not engine.is_all_finished:
        report = engine.step()
        errored += report.errored
        assert {id for id, _ in report.errored} <= set(report.finished)
    return errored


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("move", ["swap_out", "swap_in"])
def test_a_session_that_cannot_be_moved_fails_alone_and_keeps_what_it_said(
    move: str, times: int, error: Exception
) -> None:
    engine, queued = crowded()
    given = failing(engine, move, error, times)
    errored = run(engine)
    assert len(given) >= times
    assert [each for _, each in errored] == [error] * times
    bad = {id for id, _ in errored}
    for request, number, id in queued:
        if id in bad:
            session, whole = engine.session(id), alone(MODEL, request, number)[0]
            assert (session.finish_reason, session.error) == (FinishReason.ERROR, error)
            assert 0 < len(session.new_tokens) < len(whole)
            assert session.new_tokens == whole[: len(session.new_tokens)]
    assert_as_alone(engine, MODEL, [each for each in queued if each[2] not in bad])
    drain(engine)


def test_with_memory_for_all_of_them_none_fails() -> None:
    engine, queued = crowded()
    moved = [failing(engine, name, RuntimeError(), 0) for name in ("swap_out", "swap_in")]
    assert run(engine) == []
    assert all(moved)
    assert_as_alone(engine, MODEL, queued)
    drain(engine)


@pytest.mark.parametrize("move", ["swap_out", "swap_in"])
def test_where_none_can_ever_be_moved_the_oldest_is_served_and_the_engine_comes_to_rest(move: str) -> None:
    engine, queued = crowded()
    failing(engine, move, MemoryError(), 10**9)
    bad = {id for id, _ in run(engine)}
    assert 0 not in bad
    assert_as_alone(engine, MODEL, [each for each in queued if each[2] not in bad])
    drain(engine)


def preempted(engine: WatchedEngine) -> None:
    for session in reversed(list(engine._running)):
        engine._preempt(session)


def stays(engine: WatchedEngine) -> None:
    pass


@pytest.mark.parametrize(("move", "before"), [("swap_out", stays), ("swap_in", preempted)])
def test_a_parent_that_fails_in_a_move_hands_its_prompt_on(
    move: str, before: Callable[[WatchedEngine], None]
) -> None:
    engine = engine_of(MODEL, token_budget=4)
    queued = submit(engine, ask(9, 4, n=3, seed=5))
    engine.step()
    before(engine)
    failing(engine, move, MemoryError(), 1)
    if move == "swap_out":
        engine._preempt(engine._running[0])
        audit(engine)
    assert [id for id, _ in run(engine)] == [0], "one that failed between steps is in the next report"
    assert_as_alone(engine, MODEL, queued[1:])
    drain(engine)


# --- what comes back shares what is there


def used(engine: Engine) -> int:
    return engine.pool.geometry.num_blocks - engine.pool.core.free_blocks


def test_a_session_that_comes_back_shares_what_it_shared_before() -> None:
    engine, first = engine_of(MODEL), ask(12, 9)
    queued = submit(engine, first)
    engine.step()
    queued += submit(engine, Ask((*first.prompt[:8], 1, 2), 6), Ask((*first.prompt, 3), 6))
    engine.step()
    before, hits = used(engine), engine.stats.prefix.hits
    preempted(engine)
    assert used(engine) == engine.cached_blocks == 3
    engine._restore()
    assert used(engine) == before, "not a block more than before"
    assert engine.stats.prefix.hits == hits, "nothing was computed less for it"
    engine.run_to_completion()
    assert_as_alone(engine, MODEL, queued)
    drain(engine)


def test_a_prompt_that_comes_back_takes_what_others_have_computed_meanwhile() -> None:
    engine, prompt = engine_of(MODEL, token_budget=5), ids(17, 3)
    queued = submit(engine, Ask(prompt, 3))
    engine.step()
    preempted(engine)
    restore, engine._restore = engine._restore, lambda: None  # type: ignore[method-assign]
    image, engine._preempted = engine._preempted, type(engine._preempted)()
    queued += submit(engine, Ask(prompt, 3, seed=1))
    while not engine.session(SessionId(1)).new_tokens:
        Engine.step(engine)
    engine._restore, engine._preempted = restore, image  # type: ignore[method-assign]
    computed = engine.stats.tokens
    engine.run_to_completion()
    assert engine.stats.tokens - computed == 1 + 2 + 2, "the last token of the prompt, and two of each"
    assert_as_alone(engine, MODEL, queued)
    drain(engine)
