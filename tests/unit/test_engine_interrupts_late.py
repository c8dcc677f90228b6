"""What comes late after an interrupt, or in its midst: kept tracebacks, and streams that are garbage."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType

import pytest
from support_engine import audit, drain, run_steps
from support_interrupts import Interrupt, crowded, interrupted, said, submit, walked

from fuel_core.engine import Engine
from fuel_core.schedule import SessionId


class Kept(Interrupt):
    """Keeps the error, whose traceback keeps alive what was cut short, as an interactive session does."""

    error: KeyboardInterrupt | None = None

    def caught(self, error: KeyboardInterrupt) -> None:
        self.error = error


# What goes late finds that its session has gone, and says so.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("steps_before_it_goes", [1, 2])
def test_what_a_traceback_keeps_alive_does_no_harm_when_it_goes(steps_before_it_goes: int) -> None:
    steps, whole, _ = walked()
    ways = [
        (step, number)
        for step, places in enumerate(steps)
        for number, (file, _, _) in enumerate(places)
        if file == "contextlib.py"
    ]
    for step, number in ways[steps_before_it_goes::6]:
        engine, kept = crowded(), Kept(number)
        run_steps(engine, step)
        assert kept.during(engine.step)
        run_steps(engine, steps_before_it_goes)
        kept.error = None
        engine.step()
        audit(engine)
        engine.run_to_completion()
        assert said(engine) == whole, (step, number)
        drain(engine)


def test_a_cancelled_session_leaves_with_the_next_step_though_a_traceback_is_kept() -> None:
    steps, _, _ = walked()
    calls = [i for i, (file, _, event) in enumerate(steps[1]) if (file, event) == ("contextlib.py", "call")]
    engine, kept = crowded(), Kept(calls[-1])  # on the way out
    engine.step()
    assert kept.during(engine.step)
    engine.cancel(SessionId(3))
    engine.step()
    audit(engine)
    assert kept.error is not None
    engine.run_to_completion()
    drain(engine)


class Collected:
    """Garbage that ends sessions of an engine, as a dropped stream does."""

    def __init__(self, engine: Engine, *sessions: int) -> None:
        self._engine, self._sessions = engine, [SessionId(id) for id in sessions]

    def __del__(self) -> None:
        for id in self._sessions:
            self._engine.cancel(id)
            self._engine.reap(id)


class Dropping(Interrupt):
    """Lets garbage be collected at one of the places, and interrupts nothing."""

    def __init__(self, at: int, garbage: list[Collected]) -> None:
        super().__init__()
        self._drop_at, self._garbage = at, garbage

    def _pass(self, frame: FrameType, event: str) -> None:
        super()._pass(frame, event)
        if len(self.places) - 1 == self._drop_at:
            sys.settrace(None)
            self._garbage.clear()


@pytest.mark.parametrize("victims", [(0,), (2, 3), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("call", [submit, Engine.step, "repair"])
def test_a_stream_that_is_collected_anywhere_ends_its_own_sessions_alone(
    call: Callable[[Engine], None] | str, victims: tuple[int, ...]
) -> None:
    steps, whole, _ = walked()
    for at in range(0, 300, 4) if call == "repair" else range(0, 900, 37):
        engine = interrupted(1, 7 * at % len(steps[1])) if call == "repair" else crowded()
        act = call if callable(call) else Engine.step
        dropping = Dropping(at, [Collected(engine, *victims)])
        dropping.during(partial(act, engine))
        dropping._garbage.clear()
        engine.run_to_completion()
        audit(engine)
        assert not set(victims) & set(engine._sessions)
        for session in engine._sessions.values():
            if session.id < 4:
                assert (session.tokens, session.finish_reason) == whole[session.id]
        drain(engine)
