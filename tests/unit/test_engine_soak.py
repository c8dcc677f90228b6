"""The soak of ``bench/soak_engine.py`` with a few hundred requests, every step audited and poisoned."""

from __future__ import annotations

import random
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from support_engine import WatchedEngine, WatchedModel, drain, engine_of
from support_paged import model_of


def load_bench() -> Any:
    spec = spec_from_file_location("soak_engine", Path(__file__).parents[2] / "bench/soak_engine.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bench = load_bench()


def soak(engine: WatchedEngine, count: int, seed: int, longest: int) -> Any:
    rng = random.Random(seed)
    wishes = bench.wishes(count, 96, rng, longest)
    return bench.Soak(model_of("llama"), engine, rng).run(wishes, in_flight=16)


@pytest.mark.parametrize(
    ("seed", "blocks", "block_size", "limits"),
    [
        (0, 14, 4, {"max_batch": 6, "token_budget": 16}),
        (1, 40, 1, {"max_batch": 8, "token_budget": 7}),
        (2, 3, 17, {"max_batch": 4, "token_budget": 64}),
        (3, 9, 5, {"max_batch": 4, "token_budget": 1, "watermark": 0.3}),
    ],
)
def test_random_requests_say_what_they_say_alone_and_no_block_is_lost(
    seed: int, blocks: int, block_size: int, limits: dict[str, Any]
) -> None:
    engine = engine_of(model_of("llama"), blocks, block_size, shuffled=seed, **limits)
    summary = soak(engine, 60, seed, longest=24)
    assert summary.ends.keys() == {"stop", "length", "cancelled"}
    assert engine.stats.preemptions > 0
    drain(engine)


# --- negative controls: what the soak must see


def lose_a_block(engine: WatchedEngine) -> None:
    core = engine.pool.core
    handle = engine._running[0].handle
    assert handle is not None
    core.splice(handle, core.open(), 0, 1)


def mistake_a_token(engine: WatchedEngine) -> None:
    tokens = engine._running[0].tokens
    tokens[-1] = (tokens[-1] + 1) % 96


def spoil_the_pool(engine: WatchedEngine) -> None:
    engine.pool.k_pool(0).mul_(1.02)


@pytest.mark.parametrize("fault", [lose_a_block, mistake_a_token, spoil_the_pool])
def test_a_fault_in_one_step_of_many_is_seen(fault: Any) -> None:
    class Faulty(bench.RecordingEngine):  # type: ignore[misc]
        steps = 0

        def step(self) -> Any:
            self.steps += 1
            if self.steps == 40:
                fault(self)
            return super().step()

    engine = engine_of(model_of("llama"), 14)
    faulty = Faulty(engine._model, engine.pool, max_batch=6, token_budget=16)
    with pytest.raises(AssertionError, match=r"lost|apart|alone"):
        soak(faulty, 60, 0, longest=24)


def test_a_model_that_fails_is_seen() -> None:
    model = WatchedModel(model_of("llama"))
    model.spoils.add(7)
    with pytest.raises(AssertionError, match="errors"):
        soak(engine_of(model, 14), 60, 0, longest=24)
