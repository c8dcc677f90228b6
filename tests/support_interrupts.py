"""An interrupt at any place of a step, and an engine in whose steps everything happens.

It is raised where Python could raise one: at each line, call and return of the engine and of what it keeps
books with, the block pool's core among it.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from support_engine import run_steps
from support_paged import ids, model_of, pool_for

import fuel_core
from fuel_core.contracts import FinishReason, SamplingParams
from fuel_core.engine import Engine

HOME = Path(fuel_core.__file__).parent
WATCHED = {
    str(HOME / name)
    for name in (
        "engine/admission.py",
        "engine/repair.py",
        "engine/served.py",
        "engine/serving.py",
        "engine/sharing.py",
        "kv/device_pool.py",
        "kv/growth.py",
        "kv/ledger.py",
        "kv/pool.py",
        "kv/prefix_index.py",
        "kv/tables.py",
        "layers/paged.py",
        "sampling/sampler.py",
        "sampling/state.py",
        "schedule/session.py",
        "schedule/table.py",
    )
}
WATCHED.add(contextlib.__file__)
STREAMS = {str(HOME / name) for name in ("engine/output.py", "engine/runs.py")}
"""What drives an engine, and no step of it passes."""


class Interrupt:
    """Raises KeyboardInterrupt at one of the places that a call passes, or only counts them.

    Attributes:
        places: what was passed: the file, line and event of each.
    """

    def __init__(self, at: int | None = None) -> None:
        self._at = at
        self.places: list[tuple[str, int, str]] = []

    def during(self, call: Callable[[], object]) -> bool:
        """Whether it was raised in the call."""
        sys.settrace(self._enter)
        try:
            call()
        except KeyboardInterrupt as error:
            self.caught(error)
            return True
        finally:
            sys.settrace(None)
        return False

    def caught(self, error: KeyboardInterrupt) -> None:
        """Let go of it, as whoever goes on after an interrupt does."""

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in WATCHED and frame.f_code.co_filename not in STREAMS:
            return None
        return self._within(frame, event, arg)

    def _within(self, frame: FrameType, event: str, arg: Any) -> Any:
        # A generator is entered when it is thrown away too, and returns at each yield: no places for it.
        if event == "line" or (event in ("call", "return") and not _is_generator(frame)):
            self._pass(frame, event)
        return self._within

    def _pass(self, frame: FrameType, event: str) -> None:
        self.places.append((Path(frame.f_code.co_filename).name, frame.f_lineno, event))
        if len(self.places) - 1 == self._at:
            raise KeyboardInterrupt


def _is_generator(frame: FrameType) -> bool:
    return bool(frame.f_code.co_flags & inspect.CO_GENERATOR)


# --- a pool that is too small

MODEL = model_of("llama")
DRAWN = SamplingParams(temperature=1.0, seed=1, repetition_penalty=1.2)


def crowded() -> Engine:
    """Forks, a prompt in chunks, a shared prefix and an EOS, with too few blocks for all of them."""
    engine = Engine(MODEL, pool_for(MODEL, 8, 2), token_budget=6, watermark=0, max_batch=5)
    engine.submit(ids(5, 9), DRAWN, max_new_tokens=3, n=2)
    engine.submit(ids(4, 7), max_new_tokens=3, eos_ids=[84])
    engine.submit((*ids(5, 9)[:4], 5), DRAWN, max_new_tokens=2)
    return engine


def said(engine: Engine) -> list[tuple[list[int], FinishReason | None]]:
    """What each session has said, and why it ended."""
    assert all(session.error is None for session in engine._sessions.values())
    return [(session.tokens, session.finish_reason) for session in engine._sessions.values()]


Place = tuple[str, int, str]


@cache
def walked() -> tuple[list[list[Place]], list[tuple[list[int], FinishReason | None]], Engine]:
    """The places that each step passes where nothing interrupts it, and what is said then."""
    engine, steps = crowded(), []
    while not engine.is_all_finished:
        interrupt = Interrupt()
        interrupt.during(engine.step)
        steps.append(interrupt.places)
    return steps, said(engine), engine


def chosen() -> Iterator[tuple[int, int]]:
    """The step and number of one time that each place is passed: the first of some, the last of others."""
    steps, _, _ = walked()
    passed: dict[Place, list[tuple[int, int]]] = {}
    for step, places in enumerate(steps):
        for number, place in enumerate(places):
            passed.setdefault(place, []).append((step, number))
    for index, times in enumerate(passed.values()):
        yield times[-(index % 2)]


def interrupted(step: int, number: int) -> Engine:
    """An engine that is interrupted there."""
    engine = crowded()
    run_steps(engine, step)
    interrupt = Interrupt(number)
    assert interrupt.during(engine.step), "the step is the same each time"
    return engine


def submit(engine: Engine) -> None:
    engine.submit(ids(3, 4), DRAWN, max_new_tokens=2, n=2)
