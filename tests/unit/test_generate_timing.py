"""What is told of each prompt's time, by a clock that goes on only while a step runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest
from support_checkpoints import write_directory

import fuel_core as fuel
from fuel_core import SamplingParams
from fuel_core.contracts.errors import SamplingError
from fuel_core.engine import Loaded, Timing
from fuel_core.engine.output import Request
from fuel_core.engine.runs import ContiguousRun, PagedRun, Run
from fuel_core.schedule import SessionScheduler, table

START = 100.0


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return fuel.load(write_directory(tmp_path_factory.mktemp("models") / "tiny"))


@attrs.define
class Clock:
    """Stands still between steps; each takes the next of ``steps``, and those after the last take 1 s."""

    steps: Iterator[float]
    now: float = START

    def __call__(self) -> float:
        return self.now

    def step(self) -> None:
        self.now += next(self.steps, 1.0)


def requests(*lengths: int, max_new: int = 3) -> list[Request]:
    params = SamplingParams(ignore_eos=True)
    return [Request(i, [1 + i] * n, params, max_new) for i, n in enumerate(lengths)]


def ticking(scheduler: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    real = scheduler.step

    def step() -> Any:
        clock.step()
        return real()

    monkeypatch.setattr(scheduler, "step", step)


def paged(
    loaded: Loaded, asked: list[Request], clock: Clock, monkeypatch: pytest.MonkeyPatch, **limits: int
) -> Run:
    engine = fuel.build_engine(loaded, kv_memory="1MiB", block_size=4, **limits)  # type: ignore[arg-type]
    ticking(engine, clock, monkeypatch)
    return PagedRun(loaded, engine, asked, clock)


def timings(run: Run) -> list[Timing]:
    ended = {delta.index: delta.completion for delta in run if delta.completion is not None}
    return [ended[index].timing for index in sorted(ended)]


def test_a_prompt_is_timed_from_the_call_to_its_first_token_and_to_its_end(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = paged(loaded, requests(3), Clock(iter([2.0, 1.0, 3.0])), monkeypatch)
    assert timings(run) == [Timing(first_token_s=2.0, total_s=6.0, tokens_per_s=2 / 4)]


def test_the_time_until_it_is_first_asked_for_a_delta_counts(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(iter([2.0, 1.0, 3.0]))
    run = paged(loaded, requests(3), clock, monkeypatch)
    clock.now += 10
    assert timings(run) == [Timing(12.0, 16.0, 2 / 4)]


def test_waiting_for_a_turn_counts_to_the_first_token_and_not_to_the_rate(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(iter([0.5, 0.5, 0.5, 2.0, 4.0, 4.0]))
    run = paged(loaded, requests(3, 3), clock, monkeypatch, max_batch=1)
    assert timings(run) == [Timing(0.5, 1.5, 2 / 1), Timing(3.5, 11.5, 2 / 8)]


def test_every_chunk_of_a_prompt_counts_to_the_first_token(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(iter([2.0, 3.0, 1.0, 1.0]))
    run = paged(loaded, requests(12), clock, monkeypatch, token_budget=8)
    assert timings(run) == [Timing(5.0, 7.0, 2 / 2)]


def test_prompts_side_by_side_have_each_their_own_time(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, long = requests(3, 12)
    clock = Clock(iter([1.0, 2.0, 4.0, 8.0]))
    run = paged(loaded, [short, long], clock, monkeypatch, token_budget=12)
    assert timings(run) == [Timing(1.0, 7.0, 2 / 6), Timing(3.0, 15.0, 2 / 12)]


def test_tokens_that_came_with_the_first_took_no_time_of_their_own(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, real = Clock(iter([2.0, 4.0])), SessionScheduler.step

    def step(self: SessionScheduler) -> Any:
        clock.step()
        return real(self)

    monkeypatch.setattr(SessionScheduler, "step", step)
    run = ContiguousRun(loaded, requests(3), 1, clock)
    # Two tokens in the first step, then one.
    assert timings(run) == [Timing(2.0, 6.0, 1 / 4)]


def test_a_prompt_of_one_token_has_no_rate(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    run = paged(loaded, requests(3, max_new=1), Clock(iter([2.0])), monkeypatch)
    assert timings(run) == [Timing(2.0, 2.0, 0.0)]


def test_a_prompt_that_failed_before_its_first_token_has_a_total_alone(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = SamplingError("nothing left", needed="a choice", remedy="none")
    monkeypatch.setattr(table, "sample", lambda logits, states: [error])
    run = paged(loaded, requests(3), Clock(iter([2.0])), monkeypatch)
    assert timings(run) == [Timing(0.0, 2.0, 0.0)]
