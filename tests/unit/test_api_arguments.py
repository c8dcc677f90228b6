"""Every argument of the public interface, of every wrong type: the answer is an error of ours."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from support_checkpoints import write_directory

import fuel_core as fuel
from fuel_core import engine as engine_package
from fuel_core import schedule
from fuel_core.contracts import ModelDims, SamplingParams
from fuel_core.contracts.errors import (
    CapacityError,
    FuelError,
    InvalidRequestError,
    PrefixNotFullyFilledError,
    UnknownPrefixError,
    UnknownSessionError,
)
from fuel_core.engine import Engine, Loaded, build_engine
from fuel_core.kv import DeviceKvPool, KvBudget, KvCache, KvGeometry
from fuel_core.schedule import (
    Batched,
    PagedDecodePlan,
    PagedSessionScheduler,
    RoundRobin,
    SessionScheduler,
    SessionState,
)

BUDGET = KvBudget(block_size=4, num_blocks=16)
Call = tuple[Callable[..., Any], dict[str, Any]]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return fuel.load(write_directory(tmp_path_factory.mktemp("models") / "tiny"))


def values(loaded: Loaded) -> dict[str, Any]:
    """Something of every kind, by the name under which a parameter says that it takes it."""
    return {
        "none": None,
        "true": True,
        "five": 5,
        "minus one": -1,
        "fraction": 1.5,
        "nan": float("nan"),
        "text": "text",
        "no text": "",
        "bytes": b"text",
        "path": Path("nowhere"),
        "object": object(),
        "class": Batched,
        "empty list": [],
        "list of none": [None],
        "list of texts": ["a"],
        "nested list": [["a"]],
        "messages": [{"role": "user", "content": "hi"}],
        "empty mapping": {},
        "mapping": {"role": "user"},
        "set": {1},
        "keys": {1: 2}.keys(),
        "bytearray": bytearray(b"text"),
        "memoryview": memoryview(b"text"),
        "list of bytearrays": [bytearray(b"text")],
        "list of memoryviews": [memoryview(b"text")],
        "list of sets": [{1}],
        "tensor": torch.tensor(5),
        "geometry": KvGeometry(1, 1, 2, 4, 4, 4),
        "model": loaded.model,
        "loaded": loaded,
    }


# What each parameter takes of these; all else it refuses.
MODEL = {"model"}
COUNT = {"five"}
SESSION = {
    "prompt": set[str](),
    "sampling": set[str](),
    "eos_ids": {"empty list", "set", "keys"},
    "max_new_tokens": COUNT,
}
PLACE = {"device": set[str](), "dtype": set[str]()}
GENERATION = {
    "model": {"loaded"},
    "prompts": {"text", "empty list", "list of texts"},
    "params": {"none"},
    "max_new_tokens": COUNT,
    "max_batch": COUNT,
    "scheduler": set[str](),
    "kv_memory": set[str](),
    "engine": {"none"},
}
LENGTHS = {"prompt_len": COUNT, "max_new_tokens": COUNT}
ID = {"id": set[str]()}
TAKES: dict[str, dict[str, set[str]]] = {
    "load": {
        "ref": set(),
        **PLACE,
        "kv_dtype": set(),
        "kernels": {"none", "no text"},
        "threads": {"none", "five"},
        "progress": {"none", "class"},
    },
    "generate": GENERATION,
    "stream": GENERATION,
    "generate_async": GENERATION,
    "stream_async": GENERATION,
    "build_engine": {
        "loaded": {"loaded"},
        "kv_memory": set(),
        "max_batch": COUNT,
        "token_budget": COUNT,
        "block_size": COUNT,
        "max_blocks": {"none", "five"},
    },
    "Engine": {
        "model": MODEL,
        "pool": set(),
        "max_batch": COUNT,
        "token_budget": COUNT,
        "watermark": set(),
    },
    "Engine.submit": {**SESSION, "n": COUNT},
    "Engine.check": {
        **{name: SESSION[name] for name in ("prompt", "sampling", "max_new_tokens")},
        "n": COUNT,
    },
    "Engine.check_model": {"model": MODEL},
    "SessionScheduler": {"model": MODEL, "budget": set(), "policy": set(), **PLACE},
    "SessionScheduler.policy": {"policy": set()},
    "SessionScheduler.add_session": SESSION,
    "SessionScheduler.kv_blocks_required": LENGTHS,
    "PagedSessionScheduler": {"model": MODEL, "budget": set(), **PLACE},
    "PagedSessionScheduler.plan": {"plan": set()},
    "PagedSessionScheduler.add_session": SESSION,
    "PagedSessionScheduler.add_session_sharing_prefix": {"prefix": set(), **SESSION},
    "PagedSessionScheduler.kv_blocks_required": LENGTHS,
    "PagedSessionScheduler.register_prefix": {"donor": set(), "n": set()},
    "PagedSessionScheduler.release_prefix": {"prefix": set()},
    "PagedSessionScheduler.step_batched": {"max_batch": COUNT},
    "DeviceKvPool": {"geometry": {"geometry"}, **PLACE},
    "KvCache": PLACE,
    "Batched": {"max_batch": COUNT},
    "SamplingParams": {
        **{name: {"true"} for name in ("ignore_eos",)},
        **{name: {"five", "fraction"} for name in ("temperature", "repetition_penalty")},
        **{name: {"five", "fraction", "minus one"} for name in ("presence_penalty", "frequency_penalty")},
        **{name: {"five"} for name in ("top_k", "min_new_tokens")},
        **{name: set[str]() for name in ("top_p", "min_p")},
        "seed": {"none", "five"},
        "logit_bias": {"empty mapping"},
        "stop": {"none", "text", "empty list", "list of texts"},
    },
}
TAKES |= {
    f"{name}.{method}": ID
    for name in ("Engine", "SessionScheduler", "PagedSessionScheduler")
    for method in ("session", "cancel", "reap")
}
TAKES |= {
    f"PagedSessionScheduler.{method}": ID
    for method in ("is_suspended", "capture_logits", "evict_session", "restore_session")
}

# Queries about one session that answer None for an unknown one, by the contract.
ANSWERS = ("session_new_tokens", "session_realize_count", "take_captured_logits")

EXEMPT = {
    # Anything may be one.
    "Engine": {"namespace"},
    "Engine.submit": {"owner"},
    "Engine.owned": ...,
    # Records and enumerations that are made for the caller, and the markers of pluggy.
    **dict.fromkeys(("Completion", "Delta", "Timing", "Loaded", "StepReport", "SessionState"), ...),
    **dict.fromkeys(("hookimpl", "hookspec"), ...),
}


def pool_of(loaded: Loaded) -> DeviceKvPool:
    return PagedSessionScheduler(loaded.model, BUDGET).pool


def setter(thing: object, name: str) -> Callable[..., None]:
    return lambda **value: setattr(thing, name, value[name])


def sound(name: str, loaded: Loaded) -> Call:
    """A public callable, and arguments that it takes."""
    call, kwargs = _of_sessions(name, loaded) if "." in name else _sound(loaded)[name]
    return call, kwargs


def _sound(loaded: Loaded) -> dict[str, Call]:
    generation = {"model": loaded, "prompts": "x", "params": None, "max_new_tokens": 2, "max_batch": 2}
    generation |= {"scheduler": "auto", "kv_memory": "auto", "engine": None}
    limits = {"max_batch": 8, "token_budget": 8}
    return {
        "load": (fuel.load, {"ref": loaded.source}),
        "generate": (fuel.generate, generation),
        "stream": (lambda **kwargs: list(fuel.stream(**kwargs)), generation),
        "generate_async": (lambda **kwargs: asyncio.run(fuel.generate_async(**kwargs)), generation),
        "stream_async": (lambda **kwargs: asyncio.run(_all(**kwargs)), generation),
        "build_engine": (build_engine, {"loaded": loaded, **limits}),
        "Engine": (Engine, {"model": loaded.model, "pool": pool_of(loaded), **limits}),
        "SessionScheduler": (SessionScheduler, {"model": loaded.model, "budget": BUDGET}),
        "PagedSessionScheduler": (PagedSessionScheduler, {"model": loaded.model, "budget": BUDGET}),
        "DeviceKvPool": (DeviceKvPool, {"geometry": KvGeometry(1, 1, 2, 4, 4, 4)}),
        "KvCache": (KvCache, {"n_layers": 1, "n_kv_heads": 1, "head_dim": 2, "max_seq_len": 4}),
        "Batched": (Batched, {"max_batch": 2}),
        "SamplingParams": (SamplingParams, {}),
    }


async def _all(**kwargs: Any) -> list[fuel.Delta]:
    return [delta async for delta in fuel.stream_async(**kwargs)]


def _of_sessions(name: str, loaded: Loaded) -> Call:
    owner, method = name.split(".")
    make, kwargs = _sound(loaded)[owner]
    table = make(**kwargs)
    add = table.submit if owner == "Engine" else table.add_session
    session = {"prompt": [1, 2, 3, 4, 5], "max_new_tokens": 3}
    [id] = made if isinstance(made := add(**session), list) else [made]
    table.step()
    if method in ("policy", "plan"):
        return setter(table, method), {method: RoundRobin() if method == "policy" else PagedDecodePlan.REPLAN}
    prefix = table.register_prefix(id, 4) if owner == "PagedSessionScheduler" else None
    if method in ("reap", "restore_session"):
        {"reap": table.cancel}.get(method, getattr(table, "evict_session", None))(id)
    arguments: dict[str, Any] = {"prefix": prefix, "id": id, "donor": id, "n": 4, "max_batch": 2}
    arguments |= {"model": loaded.model, "prompt_len": 3, **session}
    if method in ("submit", "check"):
        arguments["sampling"] = SamplingParams()
    call = getattr(table, method)
    accepted = inspect.signature(call).parameters
    return call, {key: value for key, value in arguments.items() if key in accepted}


@pytest.mark.parametrize("name", TAKES)
def test_the_arguments_that_the_refusals_start_from_are_taken(loaded: Loaded, name: str) -> None:
    call, kwargs = sound(name, loaded)
    call(**kwargs)


@pytest.mark.parametrize(
    ("name", "parameter"), [(name, parameter) for name, takes in TAKES.items() for parameter in takes]
)
def test_an_argument_of_any_wrong_kind_is_refused_with_an_error_of_ours(
    loaded: Loaded, name: str, parameter: str
) -> None:
    call, kwargs = sound(name, loaded)
    wrong = {kind: v for kind, v in values(loaded).items() if kind not in TAKES[name][parameter]}
    assert dict(_not_refused(call, kwargs, parameter, wrong)) == {}


def _not_refused(
    call: Callable[..., Any], kwargs: dict[str, Any], parameter: str, wrong: dict[str, Any]
) -> Iterator[tuple[str, object]]:
    for kind, value in wrong.items():
        outcome = _outcome(call, {**kwargs, parameter: value})
        if not isinstance(outcome, BLAMED):
            yield kind, outcome


# A caller's mistake is never laid at the door of a plugin, a checkpoint or a model.
BLAMED = (
    InvalidRequestError,
    CapacityError,
    PrefixNotFullyFilledError,
    UnknownPrefixError,
    UnknownSessionError,
)


def _outcome(call: Callable[..., Any], kwargs: dict[str, Any]) -> object:
    try:
        return call(**kwargs)
    except Exception as error:
        return error


def test_an_error_that_is_none_of_ours_and_an_answer_are_seen() -> None:
    def refuse(a: int) -> object:
        raise InvalidRequestError("a", needed="b", remedy="c")

    values = {"five": 5, "text": "text"}
    assert dict(_not_refused(refuse, {}, "a", values)) == {}
    assert set(dict(_not_refused(lambda a: len(a), {}, "a", values))) == {"five", "text"}


@pytest.mark.parametrize("scheduler", [SessionScheduler, PagedSessionScheduler, Engine])
@pytest.mark.parametrize("query", ANSWERS)
def test_a_query_that_knows_no_unknown_session_answers_none_to_anything(
    loaded: Loaded, scheduler: type, query: str
) -> None:
    table = scheduler(loaded.model, pool_of(loaded) if scheduler is Engine else BUDGET)
    if hasattr(table, query):
        assert [getattr(table, query)(value) for value in values(loaded).values()] == [None] * len(
            values(loaded)
        )


def public() -> dict[str, set[str]]:
    """Every parameter of what the three packages export, by the callable's name."""
    found: dict[str, set[str]] = {}
    for package in (fuel, engine_package, schedule):
        for name in package.__all__:
            thing = getattr(package, name)
            is_plain = isinstance(thing, type) and issubclass(thing, FuelError | Enum)
            if is_plain or name == "SessionId":
                continue
            found[name] = set(inspect.signature(thing).parameters)
            if isinstance(thing, type) and EXEMPT.get(name) is not ...:
                methods = inspect.getmembers(thing, inspect.isfunction)
                found |= {
                    f"{name}.{each}": set(inspect.signature(function).parameters) - {"self"}
                    for each, function in methods
                    if not each.startswith("_") and each not in ANSWERS
                }
    return found


def test_no_public_parameter_is_left_out_of_these_tests() -> None:
    parameters = public()
    assert len(parameters) > len(TAKES)
    for name, exempt in EXEMPT.items():
        parameters[name] = set() if exempt is ... else parameters[name] - set(exempt)
    listed = {name: set(takes) for name, takes in TAKES.items() if name in parameters}
    assert {name: names for name, names in parameters.items() if names} == listed


# -- what the messages say


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda loaded: fuel.load(loaded), "a model reference of type Loaded"),
        (lambda loaded: fuel.load(None), "a model reference of type NoneType"),
        (
            lambda loaded: fuel.generate(loaded, "x", max_batch=0, engine=build_engine(loaded)),
            "max_batch = 0",
        ),
        (lambda loaded: fuel.generate(loaded, [], max_batch=0), "max_batch = 0"),
        (lambda loaded: fuel.generate(loaded, [], scheduler="page"), "scheduler 'page'"),
        (lambda loaded: build_engine("smollm2"), "fuel.load('smollm2')"),
        (lambda loaded: fuel.generate(loaded, "x", engine=loaded), "build_engine(loaded)"),
        (lambda loaded: PagedSessionScheduler(loaded, BUDGET), "pass loaded.model"),
        (lambda loaded: SessionScheduler(loaded, BUDGET), "pass loaded.model"),
        (lambda loaded: Engine(loaded, pool_of(loaded)), "pass loaded.model"),
        (lambda loaded: PagedSessionScheduler(loaded.model, 64), "KvBudget(block_size=16, num_blocks=...)"),
        (lambda loaded: PagedSessionScheduler(loaded.model, pool_of(loaded)), "KvBudget(block_size=16"),
        (lambda loaded: Engine(loaded.model, BUDGET), "build_engine(loaded)"),
        (lambda loaded: fuel.generate(loaded, [{"role": "user", "content": "hi"}]), "encode_chat(messages)"),
        (lambda loaded: fuel.generate(loaded, {"role": "user", "content": "hi"}), "encode_chat(messages)"),
        (
            lambda loaded: fuel.generate(loaded, [[{"role": "user", "content": "hi"}]]),
            "encode_chat(messages)",
        ),
        (
            lambda loaded: PagedSessionScheduler(loaded.model, BUDGET).add_session("hi", max_new_tokens=1),
            "encode text with the model's tokenizer",
        ),
        (
            lambda loaded: build_engine(loaded).submit("hi", max_new_tokens=1),
            "encode text with the model's tokenizer",
        ),
        (
            lambda loaded: build_engine(loaded).submit([10**6], max_new_tokens=1),
            "the tokenizer that belongs to this model",
        ),
        (lambda loaded: SessionScheduler(loaded.model, BUDGET, policy="batched"), "RoundRobin() or Batched"),
        (lambda loaded: build_engine(loaded, block_size=0), "block_size = 0"),
    ],
)
def test_a_refusal_says_what_to_do_instead(
    loaded: Loaded, call: Callable[[Loaded], object], said: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        call(loaded)
    assert said in str(caught.value)


# -- stop strings


def makers(loaded: Loaded) -> dict[str, Callable[[SamplingParams], object]]:
    paged = PagedSessionScheduler(loaded.model, BUDGET)
    prefix = paged.register_prefix(_run(paged), 4)
    contiguous, engine = SessionScheduler(loaded.model, BUDGET), build_engine(loaded)
    return {
        "paged": lambda params: paged.add_session([1], params, max_new_tokens=2),
        "prefix": lambda params: paged.add_session_sharing_prefix(
            prefix, [1, 2, 3, 4, 5], params, max_new_tokens=2
        ),
        "contiguous": lambda params: contiguous.add_session([1], params, max_new_tokens=2),
        "submit": lambda params: engine.submit([1], params, max_new_tokens=2),
        "check": lambda params: engine.check([1], params, 2),
        "state": lambda params: SessionState(
            schedule.SessionId(0), ModelDims(1, 1, 2), 8, [1], params, max_new_tokens=2
        ),
    }


def _run(scheduler: PagedSessionScheduler) -> schedule.SessionId:
    id = scheduler.add_session([1, 2, 3, 4, 5], max_new_tokens=1)
    scheduler.run_to_completion()
    return id


@pytest.mark.parametrize("place", ["paged", "prefix", "contiguous", "submit", "check", "state"])
def test_stop_strings_are_refused_where_sessions_are_of_ids(loaded: Loaded, place: str) -> None:
    add = makers(loaded)[place]
    with pytest.raises(InvalidRequestError, match=r"fuel\.generate") as caught:
        add(SamplingParams(stop=["a", "b"]))
    assert caught.value.parameter == "stop"
    assert "('a', 'b')" in caught.value.given
    add(SamplingParams())


@pytest.mark.parametrize("scheduler", ["paged", "contiguous"])
def test_generation_ends_at_stop_strings_on_either_scheduler(loaded: Loaded, scheduler: str) -> None:
    sampling = SamplingParams(temperature=1.5, seed=3)
    [whole] = fuel.generate(loaded, "one", sampling, max_new_tokens=12, scheduler=scheduler)
    stop = whole.text[2:4]
    assert len(whole.text) > 4
    params = attrs.evolve(sampling, stop=stop)
    [cut] = fuel.generate(loaded, "one", params, max_new_tokens=12, scheduler=scheduler)
    assert (cut.text, cut.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")
