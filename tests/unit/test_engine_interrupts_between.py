"""Interrupts of what is called between steps, of a repair, and of a step in which sessions end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from support_engine import WatchedModel, audit, drain, run_steps
from support_interrupts import DRAWN, MODEL, Interrupt, crowded, interrupted, said, submit, walked
from support_paged import ids, pool_for

from fuel_core.contracts import FinishReason
from fuel_core.engine import Engine
from fuel_core.kv import SessionHandle
from fuel_core.schedule import SessionId


def cancel(engine: Engine) -> None:
    engine.cancel(SessionId(0))


def reap(engine: Engine) -> None:
    for session in list(engine._sessions.values()):
        if not session.is_ready:
            engine.reap(session.id)


@pytest.mark.parametrize("step", range(4))
@pytest.mark.parametrize("call", [submit, cancel, reap])
def test_an_interrupt_between_steps_leaves_the_call_done_or_undone(
    step: int, call: Callable[[Engine], None]
) -> None:
    _, whole, _ = walked()
    number, is_cut = step, True  # each fourth place, others after each step
    while is_cut:
        engine = crowded()
        run_steps(engine, step)
        is_cut = Interrupt(number).during(partial(call, engine))
        engine.step()
        audit(engine)
        engine.run_to_completion()
        for session in engine._sessions.values():
            if session.id < 4 and session.finish_reason is not FinishReason.CANCELLED:
                assert (session.tokens, session.finish_reason) == whole[session.id]
        assert len([id for id in engine._sessions if id >= 4]) in (0, 2), "all of its samples or none"
        drain(engine)
        number += 4


def test_reaping_alone_frees_what_an_interrupt_in_the_last_step_left() -> None:
    steps, _, _ = walked()
    late = 0
    for number in range(len(steps[-1]) - 120, len(steps[-1]), 3):
        engine = interrupted(len(steps) - 1, number)
        if engine.is_all_finished:
            late += bool(engine._running)
            engine.reap_finished()
            audit(engine)
            drain(engine)
    assert late, "sessions had finished and not left"


@pytest.mark.parametrize("step", range(4))
def test_a_second_interrupt_while_the_first_is_repaired_is_repaired_too(step: int) -> None:
    steps, whole, _ = walked()
    for first in range(0, len(steps[step]), 97):
        engine, again = interrupted(step, first), Interrupt()
        again.during(engine.step)
        for second in range(first % 7, len(again.places), 311):
            engine = interrupted(step, first)
            Interrupt(second).during(engine.step)
            engine.step()
            audit(engine)
            engine.run_to_completion()
            assert said(engine) == whole, (step, first, second)
            drain(engine)


@pytest.mark.parametrize("number", [0, 150, 250])
def test_forks_wait_for_their_parent_again(number: int) -> None:
    engine = Engine(MODEL, pool_for(MODEL, 16, 2), token_budget=4)
    engine.submit(ids(11, 9), DRAWN, max_new_tokens=2, n=3)
    engine.step()
    assert Interrupt(number).during(engine.step)
    submit(engine)  # whatever comes next
    assert [fork.id for fork in engine._running[0].forks] == [1, 2]
    engine.run_to_completion()
    assert engine.stats.prefix.lookups == 2, "each prompt was looked up, and computed, once"
    drain(engine)


def test_forks_whose_parent_has_gone_wait_for_the_first_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted_leave(*args: object) -> None:
        raise KeyboardInterrupt

    engine = Engine(MODEL, pool_for(MODEL, 16, 2), token_budget=4)
    engine.submit(ids(11, 9), DRAWN, max_new_tokens=2, n=4)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_leave", interrupted_leave)
        with pytest.raises(KeyboardInterrupt):
            engine.cancel(SessionId(0))
    submit(engine)
    assert [[fork.id for fork in session.forks] for session in engine._waiting] == [[2, 3], [5]]
    engine.run_to_completion()
    drain(engine)


def test_keys_and_values_that_were_lost_are_computed_again_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = WatchedModel(MODEL)
    engine = Engine(model, pool_for(MODEL, 9, 2), token_budget=4, watermark=0)
    for start in range(2):
        engine.submit(ids(7, start), DRAWN, max_new_tokens=6)
    whole = Engine(MODEL, pool_for(MODEL, 40, 2))
    for start in range(2):
        whole.submit(ids(7, start), DRAWN, max_new_tokens=6)
    whole.run_to_completion()
    swap_out = engine.pool.swap_out

    def interrupted_swap_out(handle: SessionHandle) -> None:
        swap_out(handle)
        engine._index.reclaim(9)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.pool, "swap_out", interrupted_swap_out)
        with pytest.raises(KeyboardInterrupt):
            engine.run_to_completion()
    assert engine._running[-1].new_tokens
    model.passes.clear()
    engine.run_to_completion()
    assert said(engine) == said(whole)
    assert max(sum(map(len, batch)) for batch in model.passes) <= 4, "no pass is larger than any other"
    drain(engine)


def cancelling(interrupt: Interrupt) -> tuple[Engine, list[int]]:
    """An engine in the midst of whose next pass two sessions are cancelled, one before its fork; and when."""
    model, after = WatchedModel(MODEL), list[int]()
    engine = Engine(model, pool_for(MODEL, 12, 2), token_budget=16)
    engine.submit(ids(5, 9), DRAWN, max_new_tokens=3, n=2)
    engine.submit(ids(4, 7), max_new_tokens=3)

    def during() -> None:
        engine.cancel(SessionId(0))
        engine.cancel(SessionId(2))
        after.append(len(interrupt.places))

    model.during = during
    return engine, after


def test_what_is_cancelled_in_a_pass_stays_so_whatever_is_interrupted_after_it() -> None:
    interrupt = Interrupt()
    engine, after = cancelling(interrupt)
    interrupt.during(engine.step)
    engine.run_to_completion()
    whole = said(engine)
    assert [str(reason) for _, reason in whole] == ["cancelled", "length", "cancelled"]
    for number, (file, _, _) in enumerate(interrupt.places):
        if number > after[0] and file in ("admission.py", "session.py"):
            interrupt = Interrupt(number)
            engine, _ = cancelling(interrupt)
            interrupt.during(engine.step)
            engine.step()
            audit(engine)
            engine.run_to_completion()
            assert [reason for _, reason in said(engine)] == [reason for _, reason in whole], number
            assert said(engine)[1] == whole[1]
            drain(engine)


def test_no_token_is_lost_where_what_follows_from_the_tokens_is_cut_short() -> None:
    engine, number, is_cut = crowded(), 0, True
    run_steps(engine, 2)
    [session] = [each for each in engine._sessions.values() if each.is_ready and each.new_tokens][:1]
    whole = list(session.tokens)
    while is_cut:
        is_cut = Interrupt(number).during(session.settle)
        assert session.tokens == whole
        number += 1
    assert number > 4
    assert (session.remaining, session.is_ready) == (session.max_new_tokens - len(session.new_tokens), True)
