"""``fuel.generate`` and ``fuel.stream`` on an engine: the text that comes alone, and nothing left behind."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence

import attrs
import pytest
import torch
from support_checkpoints import EOS, VOCAB, write_directory
from support_engine import WatchedEngine, WatchedModel, audit, drain, engine_of
from torch import Tensor

import fuel_core as fuel
from fuel_core import FuelError, SamplingParams
from fuel_core.contracts import RaggedBatch, hookimpl
from fuel_core.contracts.errors import CapacityError, InvalidRequestError
from fuel_core.engine import Completion, Delta, Loaded
from fuel_core.layers import Decoder

PROMPTS = ["one", "another prompt", "x", "the fourth", "and a fifth one", "six", "seventh"]
SEEDED = [SamplingParams(temperature=1.3, seed=seed) for seed in range(len(PROMPTS))]
EMPTY = SamplingParams(ignore_eos=True)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return fuel.load(write_directory(tmp_path_factory.mktemp("models") / "tiny"))


def engine_for(loaded: Loaded, blocks: int = 32, **limits: int) -> WatchedEngine:
    assert isinstance(loaded.model, Decoder)
    return engine_of(loaded.model, blocks, **limits)


def said(completions: Sequence[Completion]) -> list[tuple[list[int], str, str]]:
    return [(each.token_ids, each.text, str(each.finish_reason)) for each in completions]


class Scripted(WatchedModel):
    """Says the tokens of a script after a prompt of two, whatever it is asked; a float is all its logits."""

    script: Sequence[int | float] = ()

    @hookimpl
    def forward_paged_ragged(self, batch: RaggedBatch) -> Tensor:
        rows = super().forward_paged_ragged(batch)  # [B, vocab]
        places = [batch.pool.core.filled_tokens(session) - 2 for session in batch.sessions]
        return torch.stack([self._row(row, place) for row, place in zip(rows, places, strict=True)])

    def _row(self, row: Tensor, place: int) -> Tensor:
        value = self.script[place] if 0 <= place < len(self.script) else EOS
        if isinstance(value, float):
            return torch.full_like(row, value)
        return torch.full_like(row, -10.0).index_fill(0, torch.tensor(value), 10.0)


def scripted(loaded: Loaded, text: str | Sequence[int | float]) -> Loaded:
    assert isinstance(loaded.model, Decoder)
    model = Scripted(loaded.model)
    model.script = loaded.tokenizer.encode(text, add_bos=False) if isinstance(text, str) else text
    return attrs.evolve(loaded, model=model)


# --- the same words


@pytest.mark.parametrize("params", [None, SEEDED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("blocks", [6, 64])
def test_an_engine_says_what_the_contiguous_scheduler_says(
    loaded: Loaded, params: list[SamplingParams] | None, blocks: int
) -> None:
    expected = fuel.generate(loaded, PROMPTS, params, max_new_tokens=9, scheduler="contiguous")
    engine = engine_for(loaded, blocks, max_batch=4, token_budget=16)
    for _ in range(2):  # cold and warm
        given = fuel.generate(loaded, PROMPTS, params, max_new_tokens=9, engine=engine)
        assert said(given) == said(expected)
        audit(engine)
    assert (engine.stats.prefix.hits > 0, engine.stats.preemptions > 0) == (blocks == 64, blocks == 6)
    drain(engine)
    alone = [fuel.generate(loaded, [p], max_new_tokens=9, scheduler="paged")[0] for p in PROMPTS]
    assert params or said(alone) == said(expected)


@pytest.mark.parametrize("stop", ["<END>", "END>", "<"])
def test_no_part_of_a_stop_string_is_emitted_and_its_session_ends(loaded: Loaded, stop: str) -> None:
    ending = scripted(loaded, "abc<END>def")
    engine = engine_for(ending)
    deltas = list(fuel.stream(ending, "x", SamplingParams(stop=stop), max_new_tokens=40, engine=engine))
    [completion] = [delta.completion for delta in deltas if delta.completion]
    cut = "abc<END>def".index(stop)
    assert "".join(delta.text for delta in deltas) == completion.text == "abc<END>def"[:cut]
    assert (completion.finish_reason, len(completion.token_ids)) == ("stop", cut + len(stop))
    drain(engine)


def test_eos_and_the_least_number_of_tokens_mean_what_they_mean_alone(loaded: Loaded) -> None:
    ending = scripted(loaded, [5, EOS, 7, EOS, 9, EOS])
    for params, length in [(None, 2), (SamplingParams(min_new_tokens=3), 4), (EMPTY, 6)]:
        [completion] = fuel.generate(ending, "x", params, max_new_tokens=6, engine=engine_for(ending))
        assert len(completion.token_ids) == length
        assert completion.finish_reason == ("length" if length == 6 else "stop")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_prompt_that_fails_is_its_own_completions_error(loaded: Loaded, value: float) -> None:
    failing = scripted(loaded, [65, 66, value])
    engine = engine_for(failing)
    [completion] = fuel.generate(failing, "x", max_new_tokens=9, engine=engine)
    assert (completion.finish_reason, completion.text) == ("error", loaded.tokenizer.decode([65, 66]))
    assert isinstance(completion.error, FuelError)
    drain(engine)


# --- several calls on one engine


def collect(deltas: Sequence[Delta]) -> list[tuple[list[int], str, str]]:
    return said([delta.completion for delta in sorted(deltas, key=lambda d: d.index) if delta.completion])


def test_streams_that_take_turns_on_one_engine_say_what_each_says_alone(loaded: Loaded) -> None:
    engine = engine_for(loaded, max_batch=4)
    halves = [(PROMPTS[:3], SEEDED[:3]), (PROMPTS[3:], SEEDED[3:])]
    streams = [fuel.stream(loaded, *half, max_new_tokens=9, engine=engine) for half in halves]
    got: list[list[Delta]] = [[], []]
    turns = [0, 0, 1, 0, 1, 1, 1]
    for turn in range(1000):
        which = turns[turn % len(turns)]
        got[which] += [delta] if (delta := next(streams[which], None)) else []
    for half, deltas in zip(halves, got, strict=True):
        assert collect(deltas) == said(fuel.generate(loaded, *half, max_new_tokens=9))
        assert any(len(delta.token_ids) > 1 for delta in got[0]), "the other's turns moved it on"
    drain(engine)


def test_a_call_inside_the_loop_over_a_stream_disturbs_neither(loaded: Loaded) -> None:
    engine, deltas = engine_for(loaded), list[Delta]()
    inner = said(fuel.generate(loaded, PROMPTS[3:], max_new_tokens=5))
    for delta in fuel.stream(loaded, PROMPTS[:3], max_new_tokens=9, engine=engine):
        deltas.append(delta)
        assert said(fuel.generate(loaded, PROMPTS[3:], max_new_tokens=5, engine=engine)) == inner
    assert collect(deltas) == said(fuel.generate(loaded, PROMPTS[:3], max_new_tokens=9))
    drain(engine)


def test_what_befalls_a_prompt_beyond_its_stop_string_is_not_its_error(loaded: Loaded) -> None:
    failing = scripted(loaded, [*loaded.tokenizer.encode("ab.", add_bos=False), 65, math.nan])
    engine = engine_for(failing)
    slow = fuel.stream(failing, "x", SamplingParams(stop="."), max_new_tokens=9, engine=engine)
    deltas = [next(slow)]
    [other] = fuel.generate(failing, "y", max_new_tokens=9, engine=engine)  # moves it on to its end
    assert other.finish_reason == "error"
    completion = [*deltas, *slow][-1].completion
    assert completion is not None
    assert (completion.text, completion.finish_reason, completion.error) == ("ab", "stop", None)
    assert len(completion.token_ids) == 3
    drain(engine)


# --- nothing left behind


@pytest.mark.parametrize("taken", [1, 3, 10])
def test_a_stream_that_is_closed_or_dropped_early_frees_all_of_its_own(loaded: Loaded, taken: int) -> None:
    engine = engine_for(loaded, max_batch=3)
    other = fuel.stream(loaded, PROMPTS[0], max_new_tokens=30, engine=engine)
    beside = [next(other)]
    for drop in (lambda stream: stream.close(), lambda stream: None):
        deltas = fuel.stream(loaded, PROMPTS, EMPTY, max_new_tokens=30, engine=engine)
        for _ in range(taken):
            next(deltas)
        assert len(engine._sessions) > 1
        drop(deltas)
        del deltas
        gc.collect()
        assert len(engine._sessions) == 1
        audit(engine)
    assert collect([*beside, *other]) == said(fuel.generate(loaded, PROMPTS[0], max_new_tokens=30))
    drain(engine)


def test_a_stream_that_nobody_iterates_holds_nothing(loaded: Loaded) -> None:
    engine = engine_for(loaded)
    deltas = fuel.stream(loaded, PROMPTS, max_new_tokens=9, engine=engine)
    assert not engine._sessions
    del deltas
    drain(engine)
    assert engine.stats.passes == 0


@pytest.mark.parametrize("after", [0, 1, 4])
def test_an_interrupt_ends_its_stream_and_leaves_the_engine_to_the_others(loaded: Loaded, after: int) -> None:
    watched = scripted(loaded, "a long answer")
    engine = engine_for(watched)
    assert isinstance(watched.model, Scripted)
    other, broken = (fuel.stream(watched, "x", max_new_tokens=9, engine=engine) for _ in range(2))
    beside = [next(other)]
    for _ in range(after):
        next(broken)
    watched.model.raises = {token: KeyboardInterrupt() for token in range(VOCAB)}
    with pytest.raises(KeyboardInterrupt):
        list(broken)
    watched.model.raises = {}
    assert len(engine._sessions) == 1
    assert collect([*beside, *other])[0][1] == "a long an"
    drain(engine)


def test_a_stream_that_the_collector_closes_in_the_midst_of_anothers_pass_disturbs_it_not(
    loaded: Loaded,
) -> None:
    watched = scripted(loaded, "a long answer")
    assert isinstance(watched.model, Scripted)
    engine = engine_for(watched)
    garbage = fuel.stream(watched, PROMPTS, EMPTY, max_new_tokens=9, engine=engine)
    next(garbage)
    watched.model.during = garbage.close
    [completion] = fuel.generate(watched, "x", max_new_tokens=9, engine=engine)
    assert (completion.text, completion.error) == ("a long an", None)
    assert next(garbage, None) is None
    drain(engine)


# --- what is refused


def test_a_request_that_the_engine_can_never_hold_is_refused_before_any_runs(loaded: Loaded) -> None:
    engine = engine_for(loaded, 4)
    with pytest.raises(CapacityError, match="KV blocks") as caught:
        fuel.stream(loaded, ["ok", "too long a prompt", "ok"], max_new_tokens=9, engine=engine)
    assert caught.value.figures["have"] == 4
    assert not engine._sessions


def test_an_engine_over_another_model_is_refused(loaded: Loaded) -> None:
    other = scripted(loaded, "another")
    with pytest.raises(InvalidRequestError, match="another model"):
        fuel.generate(other, "x", engine=engine_for(loaded))


@pytest.mark.parametrize("scheduler", ["contiguous", "page", ""])
def test_a_scheduler_that_is_none_or_needs_no_engine_is_refused(loaded: Loaded, scheduler: str) -> None:
    with pytest.raises(InvalidRequestError, match="scheduler"):
        fuel.generate(loaded, "x", scheduler=scheduler, engine=engine_for(loaded))
