"""Generation on an event loop: the loop goes on, runs share an engine, and a cancelled task ends its own."""

from __future__ import annotations

import asyncio
import inspect
import re
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from typing import Any

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


PAIRS = [(fuel.generate, fuel.generate_async), (fuel.stream, fuel.stream_async)]


@pytest.mark.parametrize(("plain", "on_a_loop"), PAIRS)
def test_it_takes_what_its_plain_sibling_takes(
    plain: Callable[..., Any], on_a_loop: Callable[..., Any]
) -> None:
    assert inspect.signature(on_a_loop).parameters == inspect.signature(plain).parameters
    kinds = {each.kind for each in inspect.signature(on_a_loop).parameters.values()}
    assert not kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


def test_its_documentation_says_the_same_of_each_argument() -> None:
    plain, on_a_loop = (
        re.search(r"Args:\n.*?\n\n", inspect.getdoc(function) or "", re.DOTALL) for function in PAIRS[0]
    )
    assert plain is not None
    assert on_a_loop is not None
    assert plain[0] == on_a_loop[0]
    named = re.findall(r"^    (\w+):", plain[0], re.MULTILINE)
    assert named == list(inspect.signature(fuel.generate).parameters)


@pytest.mark.parametrize("function", [fuel.generate_async, fuel.stream_async])
def test_an_argument_that_it_has_not_is_named_when_it_is_called(
    loaded: Loaded, function: Callable[..., Any]
) -> None:
    with pytest.raises(TypeError, match="max_tokens"):
        function(loaded, "x", max_tokens=3)


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "params": ({"params": fuel.SamplingParams(min_new_tokens=65)}, "min_new_tokens = 65"),
    "max_new_tokens": ({"max_new_tokens": 0}, "max_new_tokens = 0"),
    "max_batch": ({"max_batch": 0}, "max_batch"),
    "scheduler": ({"scheduler": "psychic"}, "scheduler 'psychic'"),
    "kv_memory": ({"kv_memory": "much"}, "KV memory 'much'"),
    "engine": ({"scheduler": "contiguous", "engine": ...}, "an engine for the contiguous scheduler"),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_reaches_the_run(loaded: Loaded, engine: Engine, option: str) -> None:
    options, said = OPTIONS[option]
    given = {name: engine if value is ... else value for name, value in options.items()}
    with pytest.raises(InvalidRequestError, match=said):
        asyncio.run(fuel.generate_async(loaded, "x", **given))


def test_closing_a_stream_that_was_broken_off_ends_its_prompts_and_no_others(
    loaded: Loaded, engine: Engine
) -> None:
    async def run() -> list[int]:
        other = asyncio.ensure_future(fuel.generate_async(loaded, ["one"], max_new_tokens=40, engine=engine))
        async with aclosing(fuel.stream_async(loaded, "x", max_new_tokens=100, engine=engine)) as deltas:
            async for _ in deltas:
                break
        return (await other)[0].token_ids

    assert asyncio.run(run()) == fuel.generate(loaded, ["one"], max_new_tokens=40)[0].token_ids
    assert _comes_to_rest(engine)
