"""What a step costs does not depend on how many wait: counted in lines, comparisons and hashes."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from support_engine import Ask, ask, drain, engine_of, run_steps, submit
from support_paged import ids, model_of

import fuel_core
from fuel_core.engine import Engine
from fuel_core.engine.served import ServedSession
from fuel_core.kv import prefix_index

MODEL = model_of("llama")
HOME = str(Path(fuel_core.__file__).parent)


def work_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The lines of our code that a step runs, and how often it compares sessions with each other."""
    count: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(HOME):
            return None
        count[event] += 1
        return trace

    def equal(self: ServedSession, other: object) -> bool:
        count["compared"] += 1
        return self is other

    with monkeypatch.context() as patch:
        patch.setattr(ServedSession, "__eq__", equal)
        patch.setattr(ServedSession, "__hash__", object.__hash__)
        sys.settrace(trace)
        try:
            Engine.step(engine)
        finally:
            sys.settrace(None)
    return count


@pytest.mark.parametrize("step", [0, 1, 3, 4, 6])
def test_a_step_does_the_same_whoever_waits(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    work = []
    for waiting in (2, 300):
        engine = engine_of(MODEL, 8, token_budget=8, max_batch=2)
        submit(engine, ask(6, 4), ask(7, 7, start=1), *(Ask(ids(8, 9), 2) for _ in range(waiting)))
        run_steps(engine, step)
        work.append(work_of(engine, monkeypatch))
        assert len(engine._waiting) > waiting - 2
    assert work[0] == work[1]


def test_one_that_looked_at_all_who_wait_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Looking(Engine):
        def _admit(self) -> None:
            assert all(session.is_ready for session in self._waiting)
            super()._admit()

    work = []
    for waiting in (2, 300):
        engine = Looking(MODEL, engine_of(MODEL, 8).pool, max_batch=2)
        submit(engine, *(ask(6, 4) for _ in range(waiting)))
        work.append(work_of(engine, monkeypatch))
    assert work[1]["line"] - work[0]["line"] >= 298


@pytest.fixture
def hashes(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What is hashed."""
    real, seen = prefix_index.blake2b, list[bytes]()

    def blake2b(data: bytes, **options: Any) -> Any:
        seen.append(data)
        return real(data, **options)

    monkeypatch.setattr(prefix_index, "blake2b", blake2b)
    return seen


def test_each_block_of_a_prompt_is_hashed_once_however_long_it_waits(hashes: list[bytes]) -> None:
    engine = engine_of(MODEL, 8, watermark=0)
    submit(engine, ask(9, 20), ask(24, 3, start=1))
    hashes.clear()
    for step in range(12):
        engine.step()
        assert [session.id for session in engine._waiting] == [1], "it waits for blocks"
        # Two blocks of the first prompt and one for each four tokens after it, and six of the one that waits.
        assert len(hashes) == (9 + step) // 4 + 6
    engine.run_to_completion()
    assert len(hashes) == 28 // 4 + 26 // 4
    drain(engine)


def test_forks_do_not_hash_their_parents_prompt_again(hashes: list[bytes]) -> None:
    engine = engine_of(MODEL)
    submit(engine, ask(12, 2, n=4, seed=1))
    hashes.clear()
    engine.run_to_completion()
    assert len(hashes) == 3
    drain(engine)


def test_an_engine_says_what_it_is_and_does() -> None:
    engine = engine_of(MODEL, 12, max_batch=2, token_budget=4)
    submit(engine, ask(9, 4), ask(5, 4), ask(6, 4, n=2))
    said = (
        "<WatchedEngine of LlamaDecoder: {} running, {} waiting, {} preempted; 12 blocks, {} free, {} cached>"
    )
    assert repr(engine) == said.format(0, 4, 0, 12, 0)
    run_steps(engine, 3)
    assert repr(engine) == said.format(2, 2, 0, 8, 0)
    engine._preempt(engine._running[-1])
    assert repr(engine) == said.format(1, 2, 1, 9, 0)
    engine.run_to_completion()
    cached = engine.cached_blocks
    assert repr(engine) == said.format(0, 0, 0, 12 - cached, cached)
