"""Generation on an event loop: the loop goes on, runs share an engine, and a cancelled task ends its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
from support_checkpoints import write_directory

import fuel_core as fuel
from fuel_core.contracts.errors import InvalidRequestError
from fuel_core.engine import Engine, Loaded

PROMPTS = ["one", "another prompt", "x", "the fourth"]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return fuel.load(write_directory(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
def engine(loaded: Loaded) -> Iterator[Engine]:
    engine = fuel.build_engine(loaded, kv_memory="1MiB", block_size=4)
    yield engine
    core = engine.pool.core
    assert core.free_blocks + engine.cached_blocks == core.geometry.num_blocks, "blocks were lost"


def _comes_to_rest(engine: Engine) -> bool:
    """What was left early is ended by its own thread, after the step that was running."""
    for _ in range(1000):
        with engine.lock:
            if engine.is_all_finished:
                return True
        time.sleep(0.01)
    return False


def test_calls_that_share_an_engine_give_what_each_gives_alone(loaded: Loaded, engine: Engine) -> None:
    async def together() -> list[list[fuel.Completion]]:
        calls = (fuel.generate_async(loaded, [prompt], max_new_tokens=9, engine=engine) for prompt in PROMPTS)
        return await asyncio.gather(*calls)

    alone = [fuel.generate(loaded, [prompt], max_new_tokens=9)[0].token_ids for prompt in PROMPTS]
    assert [one[0].token_ids for one in asyncio.run(together())] == alone


def test_the_loop_goes_on_while_a_pass_runs(loaded: Loaded) -> None:
    async def count() -> int:
        turns, done = 0, asyncio.ensure_future(fuel.generate_async(loaded, PROMPTS, max_new_tokens=60))
        while not done.done():
            await asyncio.sleep(0)
            turns += 1
        return turns

    assert asyncio.run(count()) > 60


def test_a_cancelled_task_ends_its_prompts_and_no_others(loaded: Loaded, engine: Engine) -> None:
    async def run() -> list[int]:
        other = asyncio.ensure_future(fuel.generate_async(loaded, ["one"], max_new_tokens=40, engine=engine))
        cancelled = asyncio.ensure_future(
            fuel.generate_async(loaded, PROMPTS, max_new_tokens=100, engine=engine)
        )
        await asyncio.sleep(0.05)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        return (await other)[0].token_ids

    assert asyncio.run(run()) == fuel.generate(loaded, ["one"], max_new_tokens=40)[0].token_ids
    assert _comes_to_rest(engine)


def test_a_stream_that_is_left_early_holds_nothing(loaded: Loaded, engine: Engine) -> None:
    async def first() -> str:
        deltas = fuel.stream_async(loaded, ["one"], max_new_tokens=100, engine=engine)
        delta = await anext(deltas)
        await deltas.aclose()
        return delta.text

    asyncio.run(first())
    assert _comes_to_rest(engine)


def test_a_bad_request_is_refused_when_awaited(loaded: Loaded) -> None:
    with pytest.raises(InvalidRequestError, match="empty prompt"):
        asyncio.run(fuel.generate_async(loaded, [""]))
