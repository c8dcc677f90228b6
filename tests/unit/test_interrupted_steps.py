"""A sampler that fails, or an interrupt after a pass, leaves no session with a token that is fed twice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fuel_core import registry
from fuel_core.contracts import DecodeModel, ModelDims, SamplingParams
from fuel_core.engine import Engine
from fuel_core.kv import DeviceKvPool, KvBudget
from fuel_core.schedule import Batched, PagedSessionScheduler, RoundRobin, SessionScheduler, table
from fuel_core.schedule.table import SessionTable, geometry_of

PROMPTS = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
BUDGET = KvBudget(block_size=4, num_blocks=64)


def contiguous(model: DecodeModel) -> SessionTable[Any]:
    return SessionScheduler(model, BUDGET, policy=RoundRobin())


def batched(model: DecodeModel) -> SessionTable[Any]:
    return SessionScheduler(model, BUDGET, policy=Batched(4))


def paged(model: DecodeModel) -> SessionTable[Any]:
    return PagedSessionScheduler(model, BUDGET)  # type: ignore[arg-type]


def engine(model: DecodeModel) -> SessionTable[Any]:
    pool = DeviceKvPool(geometry_of(ModelDims.from_model(model), BUDGET, torch.float32))
    return Engine(model, pool)  # type: ignore[arg-type]


every_scheduler = pytest.mark.parametrize("make", [contiguous, batched, paged, engine])


@pytest.fixture(scope="module")
def model() -> DecodeModel:
    return registry.family("llama").tiny(3)


def add(scheduler: SessionTable[Any], prompt: list[int]) -> Any:
    params = SamplingParams(temperature=1.5, seed=sum(prompt), frequency_penalty=0.5, min_new_tokens=2)
    if isinstance(scheduler, Engine):
        return scheduler.submit(prompt, params, max_new_tokens=8)[0]
    return scheduler.add_session(prompt, params, max_new_tokens=8)  # type: ignore[attr-defined]


def outputs(scheduler: SessionTable[Any]) -> list[list[int]]:
    ids = [add(scheduler, prompt) for prompt in PROMPTS]
    scheduler.run_to_completion()
    return [scheduler.session(id).tokens for id in ids]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make the n-th call of the sampler raise, before it draws anything or after all."""

    def arm(call: int, error: BaseException, *, after: bool = False) -> None:
        real, calls = table.sample, []

        def sample(*args: Any) -> Any:
            calls.append(1)
            outcomes = real(*args) if after or len(calls) != call else []
            if len(calls) == call:
                raise error
            return outcomes

        monkeypatch.setattr(table, "sample", sample)

    return arm


@every_scheduler
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("call", [1, 2, 4, 6])
def test_an_interrupt_after_a_pass_changes_no_token(
    make: Callable[[DecodeModel], SessionTable[Any]],
    model: DecodeModel,
    call: int,
    after: bool,
    failing: Callable[..., None],
) -> None:
    whole = outputs(make(model))
    failing(call, KeyboardInterrupt(), after=after)
    scheduler = make(model)
    ids = [add(scheduler, prompt) for prompt in PROMPTS]
    with pytest.raises(KeyboardInterrupt):
        scheduler.run_to_completion()
    scheduler.run_to_completion()
    assert [scheduler.session(id).tokens for id in ids] == whole


@every_scheduler
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("call", [1, 2, 4])
def test_a_sampler_that_fails_ends_its_sessions_and_never_the_step(
    make: Callable[[DecodeModel], SessionTable[Any]],
    model: DecodeModel,
    call: int,
    after: bool,
    failing: Callable[..., None],
) -> None:
    whole = outputs(make(model))
    failing(call, RuntimeError("no luck"), after=after)
    scheduler = make(model)
    ids = [add(scheduler, prompt) for prompt in PROMPTS]
    scheduler.run_to_completion()
    sessions = [scheduler.session(id) for id in ids]
    for session, tokens in zip(sessions, whole, strict=True):
        if session.error is None:
            assert session.tokens == tokens, "those that did not fail are as they were"
        else:
            assert str(session.error) == "no luck"
            assert session.tokens == tokens[: len(session.tokens)]
    # The engine tries each by itself, and finds that none fails again.
    assert any(session.error for session in sessions) != isinstance(scheduler, Engine)


def test_no_id_is_given_out_twice_whatever_is_interrupted(model: DecodeModel) -> None:
    class Refusing(dict[Any, Any]):
        def update(self, *args: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    scheduler = contiguous(model)
    scheduler._sessions = Refusing(scheduler._sessions)
    with pytest.raises(KeyboardInterrupt):
        add(scheduler, PROMPTS[0])
    scheduler._sessions = {}
    assert add(scheduler, PROMPTS[0]) == 1


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("error", [RuntimeError("no luck"), KeyboardInterrupt()], ids=repr)
def test_forks_that_a_sampler_fails_for_are_sampled_again(
    model: DecodeModel, after: bool, error: BaseException, failing: Callable[..., None]
) -> None:
    def served() -> Engine:
        made = engine(model)
        assert isinstance(made, Engine)
        made.submit(PROMPTS[0], SamplingParams(temperature=1.5, seed=4), max_new_tokens=5, n=3)
        made.submit(PROMPTS[1], max_new_tokens=5)
        return made

    whole = [output for _, output in served().run_to_completion()]
    failing(1, error, after=after)
    scheduler = served()
    with contextlib.suppress(KeyboardInterrupt):
        scheduler.step()
    assert [output for _, output in scheduler.run_to_completion()] == whole
    assert all(session.error is None for session in scheduler._sessions.values())
    assert scheduler.pool.core.free_blocks + scheduler.cached_blocks == BUDGET.num_blocks


ONE = (1, [[1, 2, 3, 4]], 1)
TWO = (4, [[1, 2, 3], [4, 5, 6]], 6)


# One that is alone in its pass and fails is not tried again.
@pytest.mark.parametrize(
    ("case", "error"),
    [(ONE, KeyboardInterrupt()), (TWO, KeyboardInterrupt()), (TWO, RuntimeError("no luck"))],
)
@pytest.mark.parametrize("call", [1, 2, 3, 6])
def test_a_full_pool_has_room_for_what_is_computed_again(
    model: DecodeModel,
    case: tuple[int, list[list[int]], int],
    call: int,
    error: BaseException,
    failing: Callable[..., None],
) -> None:
    blocks, prompts, tokens = case

    def served() -> Engine:
        geometry = geometry_of(ModelDims.from_model(model), KvBudget(4, blocks), torch.float32)
        made = Engine(model, DeviceKvPool(geometry))  # type: ignore[arg-type]
        for prompt in prompts:
            made.submit(prompt, max_new_tokens=tokens)
        return made

    whole = [output for _, output in served().run_to_completion()]
    failing(call, error)
    scheduler = served()
    with contextlib.suppress(KeyboardInterrupt):
        scheduler.run_to_completion()
    assert [output for _, output in scheduler.run_to_completion()] == whole
    core = scheduler.pool.core
    assert core.free_blocks + scheduler.cached_blocks == blocks
