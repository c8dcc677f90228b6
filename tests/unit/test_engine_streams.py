"""Streams on one engine: whatever cuts one short or ends one of its prompts leaves all others alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Sequence
from functools import partial

import attrs
import pytest
from support_checkpoints import write_directory
from support_engine import audit, drain
from support_interrupts import Interrupt, Place

import fuel_core as fuel
from fuel_core import SamplingParams
from fuel_core.contracts import FinishReason
from fuel_core.engine import Completion, Delta, Engine, Loaded, build_engine
from fuel_core.engine.output import Output
from fuel_core.schedule import SessionId

Stream = Generator[Delta, None, None]
PROMPTS = ["one", "another prompt", "x"]
SAMPLED = SamplingParams(temperature=1.3, seed=5, ignore_eos=True)
SCHEDULERS = ["paged", "contiguous"]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return fuel.load(write_directory(tmp_path_factory.mktemp("models") / "tiny"))


def engine_for(loaded: Loaded) -> Engine:
    return build_engine(loaded, kv_memory="512KiB")


def stream(
    loaded: Loaded, engine: Engine | None, prompts: Sequence[str] = PROMPTS, tokens: int = 6
) -> Stream:
    return fuel.stream(loaded, prompts, SAMPLED, max_new_tokens=tokens, engine=engine)


def completions(deltas: Sequence[Delta]) -> list[Completion]:
    last = {delta.index: delta.completion for delta in deltas if delta.completion}
    return [last[index] for index in sorted(last)]


def said(deltas: Sequence[Delta]) -> list[tuple[list[int], str, FinishReason]]:
    return [(each.token_ids, each.text, each.finish_reason) for each in completions(deltas)]


@pytest.fixture(scope="module")
def alone(loaded: Loaded) -> list[tuple[list[int], str, FinishReason]]:
    """What the stream that runs beside the others says by itself."""
    return said(list(stream(loaded, None, ["the fourth"])))


class Beside:
    """A stream in the midst of its answer on an engine."""

    def __init__(self, loaded: Loaded, engine: Engine) -> None:
        self._engine = engine
        self._stream = stream(loaded, engine, ["the fourth"])
        self._deltas = [next(self._stream)]
        self._own = set(engine._sessions)

    def is_as(self, alone: object) -> None:
        """See that nobody else is left, and that it goes on to say what it says alone."""
        assert set(self._engine._sessions) == self._own
        assert said([*self._deltas, *self._stream]) == alone
        audit(self._engine)
        capacity = self._engine.pool.core.capacity()
        assert capacity.free_blocks + self._engine.cached_blocks == capacity.total_blocks
        drain(self._engine)


# --- an interrupt


def _before_the_step(places: Sequence[Place]) -> Sequence[Place]:
    first = inspect.getsourcelines(Engine.step)[1]
    return places[: places.index(("serving.py", first, "call"))]


def _chosen(places: Sequence[Place]) -> list[int]:
    """Each place of the run itself, and each fifth one of what it calls."""
    own = [number for number, (file, _, _) in enumerate(places) if file == "runs.py"]
    assert len(own) > 10
    return sorted({*own, *range(0, len(places), 5)})


def test_an_interrupt_anywhere_while_prompts_go_in_ends_those_of_its_own_stream_alone(
    loaded: Loaded, alone: object
) -> None:
    whole = Interrupt()
    whole.during(partial(next, stream(loaded, engine_for(loaded))))
    for number in _chosen(_before_the_step(whole.places)):
        engine = engine_for(loaded)
        beside, broken = Beside(loaded, engine), stream(loaded, engine)
        assert Interrupt(number).during(partial(next, broken))
        beside.is_as(alone)


def test_an_interrupt_anywhere_while_a_stream_is_closed_leaves_none_of_its_prompts(
    loaded: Loaded, alone: object
) -> None:
    whole, closed = Interrupt(), stream(loaded, engine_for(loaded))
    next(closed)
    whole.during(closed.close)
    for number in _chosen(whole.places):
        engine = engine_for(loaded)
        beside, broken = Beside(loaded, engine), stream(loaded, engine)
        next(broken)
        assert Interrupt(number).during(broken.close)
        beside.is_as(alone)


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("place", [(Engine, "submit"), (Output, "__init__")])
def test_no_memory_while_prompts_go_in_ends_the_stream_and_all_that_it_has_submitted(
    loaded: Loaded, alone: object, monkeypatch: pytest.MonkeyPatch, place: tuple[type, str], failing: int
) -> None:
    engine = engine_for(loaded)
    beside = Beside(loaded, engine)
    real, calls = getattr(*place), list[None]()

    def fails_once(*args: object, **kwargs: object) -> object:
        calls.append(None)
        if len(calls) == failing + 1:
            raise MemoryError
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(*place, fails_once)
        with pytest.raises(MemoryError):
            list(stream(loaded, engine))
    beside.is_as(alone)


def test_sessions_are_those_of_the_very_owner_that_submitted_them(loaded: Loaded) -> None:
    engine, one, other = engine_for(loaded), list[int](), list[int]()
    mine = engine.submit([1, 2], max_new_tokens=2, n=2, owner=one)
    theirs = engine.submit([1, 2], max_new_tokens=2, owner=other)
    nobodys = engine.submit([1, 2], max_new_tokens=2)
    assert [engine.owned(each) for each in (one, other, None, [])] == [mine, theirs, nobodys, []]
    engine.cancel(mine[0])
    engine.reap(mine[0])
    assert engine.owned(one) == mine[1:]


# --- one of its prompts is ended by somebody else


def _cancel_and_reap(engine: Engine, id: SessionId) -> None:
    engine.cancel(id)
    engine.reap(id)


def _cancel_and_reap_all_finished(engine: Engine, id: SessionId) -> None:
    engine.cancel(id)
    engine.reap_finished()


@pytest.mark.parametrize("end", [_cancel_and_reap, _cancel_and_reap_all_finished, Engine.cancel])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_prompt_that_is_ended_elsewhere_is_cancelled_and_its_stream_goes_on(
    loaded: Loaded, victim: int, end: Callable[[Engine, SessionId], object]
) -> None:
    expected = said(list(stream(loaded, None)))
    engine = engine_for(loaded)
    deltas = stream(loaded, engine)
    got = [next(deltas)]
    end(engine, SessionId(victim))
    got += list(deltas)
    for index, (given, whole) in enumerate(zip(said(got), expected, strict=True)):
        if index == victim:
            assert given[0] == whole[0][:1], "what it had said"
            assert given[2] is FinishReason.CANCELLED
        else:
            assert given == whole
    drain(engine)


def test_prompts_whose_sessions_are_reaped_when_they_finish_have_all_that_they_said(loaded: Loaded) -> None:
    expected = said(list(stream(loaded, None)))
    engine = engine_for(loaded)
    deltas = stream(loaded, engine)
    got = [next(deltas)]
    assert [id for id, _ in engine.run_to_completion()] == [0, 1, 2]
    engine.reap_finished()
    assert said([*got, *deltas]) == expected
    drain(engine)


def test_a_stop_string_ends_a_text_whose_session_has_been_reaped(loaded: Loaded) -> None:
    [(_, text, _)] = said(list(stream(loaded, None, ["one"])))
    engine, params = engine_for(loaded), attrs.evolve(SAMPLED, stop=text[2:4])
    deltas = fuel.stream(loaded, "one", params, max_new_tokens=6, engine=engine)
    got = [next(deltas)]
    engine.run_to_completion()
    engine.reap_finished()
    [completion] = completions([*got, *deltas])
    assert (completion.text, completion.finish_reason) == (text[: text.index(text[2:4])], FinishReason.STOP)
    drain(engine)


def test_a_stream_that_is_closed_after_one_of_its_prompts_has_gone_ends_the_others(
    loaded: Loaded, alone: object
) -> None:
    for victim in range(1, 4):
        engine = engine_for(loaded)
        beside, broken = Beside(loaded, engine), stream(loaded, engine)
        next(broken)
        _cancel_and_reap(engine, SessionId(victim))
        broken.close()
        beside.is_as(alone)


# --- one of its texts fails


class _FailsAt:
    """A method that raises for one prompt: the ``at``-th time that its output is asked."""

    def __init__(self, name: str, prompt: int, at: int, error: BaseException) -> None:
        self._real, self._prompt, self._at, self._error = getattr(Output, name), prompt, at, error

    def __call__(self, output: Output, *args: object) -> object:
        self._at -= output.request.index == self._prompt
        if output.request.index == self._prompt and self._at < 0:
            raise self._error
        return self._real(output, *args)

    def __get__(self, output: Output, kind: type) -> Callable[..., object]:
        return partial(self, output)


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize(("name", "at", "tokens"), [("_text_of", 0, 1), ("_text_of", 3, 4), ("finish", 0, 6)])
@pytest.mark.parametrize("error", [RuntimeError("a tokenizer"), MemoryError()], ids=repr)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_text_that_fails_is_its_own_completions_error_and_leaves_the_others_alone(
    loaded: Loaded,
    monkeypatch: pytest.MonkeyPatch,
    victim: int,
    name: str,
    at: int,
    tokens: int,
    error: Exception,
    scheduler: str,
) -> None:
    run = partial(fuel.stream, loaded, PROMPTS, SAMPLED, max_new_tokens=6)
    expected = said(list(run(scheduler=scheduler)))
    engine = engine_for(loaded) if scheduler == "paged" else None
    monkeypatch.setattr(Output, name, _FailsAt(name, victim, at, error))
    deltas = list(run(scheduler=scheduler, engine=engine))
    failed = completions(deltas)[victim]
    assert (failed.finish_reason, failed.error) == (FinishReason.ERROR, error)
    assert failed.token_ids == expected[victim][0][:tokens], "no token is lost, and none comes after it"
    told = [delta for delta in deltas if delta.index == victim]
    assert [id for delta in told for id in delta.token_ids] == failed.token_ids
    assert "".join(delta.text for delta in told) == failed.text
    assert [each for i, each in enumerate(said(deltas)) if i != victim] == [
        each for i, each in enumerate(expected) if i != victim
    ]
    if engine is not None:
        drain(engine)


def test_an_interrupt_in_a_text_ends_the_whole_stream(
    loaded: Loaded, alone: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_for(loaded)
    beside = Beside(loaded, engine)
    with monkeypatch.context() as patch:
        patch.setattr(Output, "add", _FailsAt("add", 1, 1, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            list(stream(loaded, engine))
    beside.is_as(alone)


def test_the_error_of_a_session_stands_though_its_text_fails_after_it(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, engine = RuntimeError("a pass"), engine_for(loaded)
    monkeypatch.setattr(Output, "finish", _FailsAt("finish", 0, 0, RuntimeError("a tokenizer")))
    deltas = stream(loaded, engine, ["one"])
    got = [next(deltas)]
    engine.session(SessionId(0)).finish(FinishReason.ERROR, first)
    [completion] = completions([*got, *deltas])
    assert completion.error is first


# --- caches of their own


def test_a_long_prompt_between_short_ones_has_a_cache_that_holds_it(loaded: Loaded) -> None:
    prompts = [[1], [2] * 60, [3]]
    given = fuel.generate(loaded, prompts, max_new_tokens=2, max_batch=1, scheduler="contiguous")
    assert [(each.finish_reason, each.error) for each in given] == [(FinishReason.LENGTH, None)] * 3
