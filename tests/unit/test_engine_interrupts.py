"""An interrupt anywhere in a step: the engine goes on, every request says the same, and no block is lost."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from support_engine import audit, drain, run_steps
from support_interrupts import WATCHED, chosen, interrupted, said, walked

from fuel_core.contracts import FinishReason
from fuel_core.engine import Engine

SHARDS = 8


@pytest.mark.parametrize("shard", range(SHARDS))
def test_an_interrupt_anywhere_in_a_step_changes_no_token_and_loses_no_block(shard: int) -> None:
    _, whole, _ = walked()
    for step, number in sorted(chosen())[shard::SHARDS]:
        engine = interrupted(step, number)
        engine.step()
        audit(engine)
        engine.run_to_completion()
        assert said(engine) == whole, (step, number)
        drain(engine)


def test_the_steps_are_those_in_which_everything_happens() -> None:
    steps, whole, engine = walked()
    assert engine.stats.preemptions > 0
    assert engine.stats.prefix.hits > 0
    assert {reason for _, reason in whole} == {FinishReason.STOP, FinishReason.LENGTH}
    files = Counter(file for places in steps for file, _, _ in places)
    assert set(files) >= {Path(name).name for name in WATCHED} - {"repair.py"}
    assert set(files) >= {"ledger.py", "pool.py", "tables.py"}


# --- negative controls


def test_without_the_repair_an_interrupt_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "_repair", lambda self: None)
    _, whole, _ = walked()
    seen = 0
    for step, number in sorted(chosen())[::40]:
        engine = interrupted(step, number)
        try:
            run_steps(engine, 20)
            assert said(engine) == whole
            drain(engine)
        except Exception:
            seen += 1
    assert seen > 3
