"""Sessions side by side are what each would be alone; what is refused or fails touches no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support_models import (
    CoreOnlyModel,
    LockstepModel,
    MlaShapedModel,
    RecordingModel,
    StuckCache,
    distance,
    lone_run,
    scheduler_of,
    tiny,
)
from support_paged import FAMILIES

from fuel_core.contracts import DecodeModel, FinishReason, SamplingParams
from fuel_core.contracts.errors import (
    NonUniformStateError,
)
from fuel_core.schedule import Batched, RoundRobin, SessionId, SessionPhase, SessionScheduler

A, B, C = (1, 2, 3), (7, 4, 9, 2), (5, 6)
POLICIES = [RoundRobin(), Batched(4)]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def drain(scheduler: SessionScheduler) -> None:
    while not scheduler.is_all_finished:
        scheduler.step()


@pytest.fixture(scope="module")
def model() -> DecodeModel:
    return tiny(seed=17)


# --- the serial arm is a lone run, bit for bit


@pytest.mark.parametrize(
    ("family", "overrides"), [("llama", {"rope_scaling": LLAMA3}), *((family, {}) for family in FAMILIES)]
)
def test_a_session_of_any_family_is_a_hand_written_loop(family: str, overrides: dict[str, Any]) -> None:
    model = tiny(family, 3, **overrides)
    expected = lone_run(model, A, 6)
    recording = RecordingModel(model)
    scheduler = scheduler_of(recording)
    id = scheduler.add_session(A, max_new_tokens=6)
    assert scheduler.run_to_completion() == [(id, [*A, *expected[0]])]
    assert torch.equal(recording.served(scheduler, id)[1], expected[1])
    # Each token is fed once: the prompt whole, and then one by one what was sampled, but for the last.
    assert [call.tokens for call in recording.calls] == [A, *((token,) for token in expected[0][:-1])]
    assert [call.lengths for call in recording.calls] == [(0,), (3,), (4,), (5,), (6,), (7,)]


def test_the_llama_3_scaling_is_served_and_shows_in_the_logits() -> None:
    prompt = [1 + i % 90 for i in range(40)]
    _, scaled = lone_run(tiny(seed=3, rope_scaling=LLAMA3), prompt, 4)
    _, unscaled = lone_run(tiny(seed=3), prompt, 4)
    assert distance(scaled, unscaled) > 1e-2


@pytest.mark.parametrize("order", [(A, B, C), (C, B, A), (B, A), (A,), (A, A)])
def test_sessions_together_are_what_each_is_alone_in_any_order(
    model: DecodeModel, order: tuple[tuple[int, ...], ...]
) -> None:
    recording = RecordingModel(model)
    scheduler = scheduler_of(recording)
    ids = [scheduler.add_session(prompt, max_new_tokens=6) for prompt in order]
    drain(scheduler)
    for id, prompt in zip(ids, order, strict=True):
        tokens, logits = recording.served(scheduler, id)
        expected = lone_run(model, prompt, 6)
        assert tokens == expected[0]
        assert torch.equal(logits, expected[1])


def test_the_runs_compared_here_are_not_fixed_points(model: DecodeModel) -> None:
    runs = [lone_run(model, prompt, 6) for prompt in (A, B, C)]
    assert all(len(set(tokens)) > 2 for tokens, _ in runs)
    assert min(distance(runs[i][1], runs[j][1]) for i, j in ((0, 1), (0, 2), (1, 2))) > 0.1


def test_a_cache_that_does_not_advance_would_be_seen(model: DecodeModel) -> None:
    recording = StuckCache(model)
    scheduler = scheduler_of(recording)
    id = scheduler.add_session(A, max_new_tokens=6)
    drain(scheduler)
    assert distance(recording.served(scheduler, id)[1], lone_run(model, A, 6)[1]) > 0.01


def test_a_session_added_on_the_way_joins_and_disturbs_none(model: DecodeModel) -> None:
    recording = RecordingModel(model)
    scheduler = scheduler_of(recording)
    first = scheduler.add_session(A, max_new_tokens=6)
    scheduler.step()
    scheduler.step()
    assert scheduler.session(first).phase is SessionPhase.DECODE
    second = scheduler.add_session(C, max_new_tokens=6)
    assert scheduler.step().advanced == [second, first, second]
    drain(scheduler)
    for id, prompt in ((first, A), (second, C)):
        tokens, logits = recording.served(scheduler, id)
        expected = lone_run(model, prompt, 6)
        assert tokens == expected[0]
        assert torch.equal(logits, expected[1])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_core_only_model_is_served_one_session_after_the_other(policy: RoundRobin | Batched) -> None:
    core = CoreOnlyModel()
    scheduler = scheduler_of(core, policy)
    first = scheduler.add_session([1, 2, 3], max_new_tokens=4)
    second = scheduler.add_session([4, 5, 6], max_new_tokens=4)
    reports = [scheduler.step() for _ in range(3)]
    assert not any(report.used_batched_arm or report.errored for report in reports)
    assert [report.finished for report in reports] == [[], [], [first, second]]
    assert scheduler.reap_finished() == [(first, [1, 2, 3, 3, 4, 5, 6]), (second, [4, 5, 6, 3, 4, 5, 6])]
    assert core.calls == [(1, 2, 3), (4, 5, 6), (3,), (3,), (4,), (4,), (5,), (5,)]


def test_a_model_of_another_state_is_declined_when_the_scheduler_is_built() -> None:
    model = MlaShapedModel()
    with pytest.raises(NonUniformStateError, match="not per-head KV"):
        scheduler_of(model)
    assert model.calls == []


# --- what a step does and reports


@pytest.mark.parametrize("policy", POLICIES)
def test_a_first_step_samples_after_the_prompt_and_decodes_once(policy: RoundRobin | Batched) -> None:
    scheduler = scheduler_of(LockstepModel(), policy)
    first = scheduler.add_session([1], max_new_tokens=3)
    short = scheduler.add_session([1, 2, 3], max_new_tokens=1)
    report = scheduler.step()
    assert report.advanced == [first, short, first]
    assert report.finished == [short]
    assert scheduler.session_new_tokens(first) == [1, 2]
    report = scheduler.step()
    assert (report.advanced, report.finished, report.errored) == ([first], [first], [])
    report = scheduler.step()
    assert (report.advanced, report.finished, report.errored) == ([], [], [])


def test_the_tail_grows_by_what_each_step_reports(model: DecodeModel) -> None:
    scheduler = scheduler_of(model)
    id = scheduler.add_session(A, max_new_tokens=5)
    assert scheduler.session_new_tokens(id) == []
    tails: list[list[int]] = [[]]
    while not scheduler.is_all_finished:
        report = scheduler.step()
        tail = scheduler.session_new_tokens(id)
        assert tail is not None
        assert tail[: len(tails[-1])] == tails[-1]
        assert len(tail) - len(tails[-1]) == report.advanced.count(id) > 0
        tails.append(tail)
    assert [len(tail) for tail in tails] == [0, 2, 3, 4, 5]
    assert scheduler.reap_finished() == [(id, [*A, *tails[-1]])]


@pytest.mark.parametrize("index", [0, 1, 4])
def test_an_eos_ends_a_session_at_that_token_and_stands_in_its_output(model: DecodeModel, index: int) -> None:
    tokens, _ = lone_run(model, A, 6)
    assert tokens[index] not in tokens[:index]
    scheduler = scheduler_of(model)
    id = scheduler.add_session(A, eos_ids=(95, tokens[index]), max_new_tokens=6)
    other = scheduler.add_session(A, max_new_tokens=6)
    assert scheduler.run_to_completion() == [(id, [*A, *tokens[: index + 1]]), (other, [*A, *tokens])]
    assert scheduler.session(id).finish_reason is FinishReason.STOP
    assert scheduler.session(other).finish_reason is FinishReason.LENGTH


# --- random streams


def drawn(scheduler: SessionScheduler, seed: int) -> SessionId:
    return scheduler.add_session(A, SamplingParams(temperature=1.0, seed=seed), max_new_tokens=12)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_seed_gives_its_stream_alone_in_company_and_in_a_batch(
    model: DecodeModel, policy: RoundRobin | Batched
) -> None:
    alone = scheduler_of(model)
    id = drawn(alone, 1)
    drain(alone)
    expected = alone.session_new_tokens(id)
    company = scheduler_of(model, policy)
    before = drawn(company, 2)
    same, again = drawn(company, 1), drawn(company, 1)
    company.add_session(A, max_new_tokens=3)
    used = company.step().used_batched_arm
    drawn(company, 3)
    drain(company)
    assert used == isinstance(policy, Batched)
    assert company.session_new_tokens(same) == company.session_new_tokens(again) == expected
    assert company.session_new_tokens(before) != expected
