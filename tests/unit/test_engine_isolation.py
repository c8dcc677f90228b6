"""Whatever ends a session, it frees all that it held and touches no other."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from support_engine import (
    Ask,
    WatchedEngine,
    WatchedModel,
    alone,
    ask,
    assert_as_alone,
    audit,
    drain,
    engine_of,
    run_steps,
    serve,
    submit,
)
from support_paged import model_of
from torch import Tensor

from fuel_core.contracts import FinishReason, RaggedBatch, hookimpl
from fuel_core.contracts.errors import (
    ModelContractError,
    SamplingError,
    UnknownSessionError,
)
from fuel_core.sampling import Outcome, SamplerState, sample
from fuel_core.schedule import SessionId

MODEL = model_of("llama")
CROWD = [ask(9, 6, n=3, seed=1), ask(7, 6), ask(6, 6, seed=2)]
"""A prompt in chunks with two forks that wait for it, then two that find the pool too small."""


def crowded(model: WatchedModel | None = None) -> tuple[WatchedEngine, list[tuple[Ask, int, SessionId]]]:
    """An engine with more to do than fits."""
    engine = engine_of(model or MODEL, 7, token_budget=5, watermark=0)
    return engine, submit(engine, *CROWD)


def steps_of_the_crowd() -> int:
    engine, _ = crowded()
    count = 0
    while not engine.is_all_finished:
        engine.step()
        count += 1
    return count


def test_the_crowd_is_one_in_which_everything_happens() -> None:
    engine, queued = crowded()
    seen: set[str] = set()
    while not engine.is_all_finished:
        engine.step()
        for name in ("waiting", "running", "preempted"):
            for session in getattr(engine, f"_{name}"):
                seen |= {f"{name} {session.phase.value}"} | ({f"{name} parent"} if session.forks else set())
    assert seen >= {"waiting prefill", "running prefill", "running decode", "running parent"}
    assert seen >= {"preempted decode"}
    assert_as_alone(engine, MODEL, queued)


@pytest.mark.parametrize("victim", range(5))
def test_one_that_is_cancelled_at_any_step_frees_all_and_changes_no_other(victim: int) -> None:
    for step in range(steps_of_the_crowd()):
        engine, queued = crowded()
        run_steps(engine, step)
        was = engine.session(SessionId(victim)).finish_reason
        engine.cancel(SessionId(victim))
        audit(engine)
        engine.run_to_completion()
        assert engine.session(SessionId(victim)).finish_reason is (was or FinishReason.CANCELLED)
        assert_as_alone(engine, MODEL, [each for each in queued if each[2] != victim])
        drain(engine)


@pytest.mark.parametrize("step", [0, 1, 2, 3, 6, 9])
def test_all_that_are_cancelled_at_once_leave_nothing_and_the_engine_goes_on(step: int) -> None:
    engine, queued = crowded()
    run_steps(engine, step)
    for _, _, id in queued:
        engine.cancel(id)
        audit(engine)
    drain(engine)
    assert engine.step().advanced == []
    serve(engine, MODEL, *CROWD)


def test_a_parent_that_is_preempted_with_waiting_forks_hands_its_prompt_on() -> None:
    engine, queued = crowded()
    engine.step()
    for session in reversed(list(engine._running)):
        engine._preempt(session)
    assert len(engine._preempted[0].forks) == 2
    engine.cancel(SessionId(0))
    engine.run_to_completion()
    assert_as_alone(engine, MODEL, queued[1:])
    drain(engine)


def test_forks_whose_parent_is_cancelled_keep_its_place_in_the_queue() -> None:
    engine = engine_of(MODEL, max_batch=2)
    submit(engine, ask(5, 3), ask(6, 3, n=2), ask(7, 3))
    engine.step()
    engine.cancel(SessionId(1))
    assert [session.id for session in engine._waiting] == [2, 3]


def test_the_first_reason_stands_and_an_unknown_session_is_refused() -> None:
    engine = engine_of(MODEL)
    [first, second] = serve(engine, MODEL, ask(3), ask(4))
    engine.cancel(first)
    assert engine.session(first).finish_reason is FinishReason.LENGTH
    engine.reap(first)
    for call in (engine.cancel, engine.reap, engine.session):
        with pytest.raises(UnknownSessionError):
            call(first)
    assert engine.session(second).finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("victims", [[0], [1], [3], [0, 1, 2, 3, 4]], ids=str)
def test_one_that_is_cancelled_in_the_midst_of_any_pass_leaves_at_its_end(victims: list[int]) -> None:
    for step in range(steps_of_the_crowd()):
        model = WatchedModel(MODEL)
        engine, queued = crowded(model)
        run_steps(engine, step)
        model.during = lambda engine=engine: [engine.cancel(SessionId(id)) for id in victims]  # type: ignore[misc]
        engine.step()
        assert not any(engine.session(SessionId(id)).is_ready for id in victims)
        engine.run_to_completion()
        assert_as_alone(engine, MODEL, [each for each in queued if each[2] not in victims])
        drain(engine)


# --- models that fail


def said_by(request: Ask, number: int = 0) -> list[int]:
    return alone(MODEL, request, number)[0]


def only(token: int, victim: Ask, others: Iterable[Ask]) -> bool:
    """Whether nobody but the victim ever feeds a token."""
    fed = {each for other in others for i in range(other.n) for each in (*other.prompt, *said_by(other, i))}
    return token not in fed and token not in victim.prompt


COMPANY = [ask(6, 6), ask(9, 6, n=2, seed=3)]
VICTIM = next(
    request
    for request in (ask(5, 8, start=start) for start in range(2, 60))
    if only(said_by(request)[3], request, COMPANY) and said_by(request)[3] not in said_by(request)[:3]
)
FATAL = said_by(VICTIM)[3]


@pytest.mark.parametrize("budget", [4, 64])
@pytest.mark.parametrize(
    "error", [RuntimeError("a kernel"), MemoryError(), ModelContractError("a", needed="b", remedy="c")]
)
def test_a_pass_that_fails_for_one_sessions_token_ends_that_session_alone(
    error: Exception, budget: int
) -> None:
    model = WatchedModel(MODEL)
    model.raises[FATAL] = error
    engine = engine_of(model, token_budget=budget)
    queued = submit(engine, COMPANY[0], VICTIM, COMPANY[1])
    reports = []
    while not engine.is_all_finished:
        reports.append(engine.step())
    bad = engine.session(SessionId(1))
    assert (bad.finish_reason, bad.error) == (FinishReason.ERROR, error)
    assert bad.new_tokens == said_by(VICTIM)[:4]
    assert [each for report in reports for each in report.errored] == [(1, error)]
    assert_as_alone(engine, MODEL, [each for each in queued if each[2] != 1])
    drain(engine)


@pytest.mark.parametrize("n", [1, 3])
def test_a_prompt_that_no_pass_survives_fails_for_each_of_its_samples(n: int) -> None:
    model = WatchedModel(MODEL)
    model.raises[VICTIM.prompt[2]] = RuntimeError("a prompt")
    healthy = [each for each in CROWD if VICTIM.prompt[2] not in each.prompt][-1:]
    engine = engine_of(model)
    bad = submit(engine, Ask(VICTIM.prompt, 1, n=n))
    engine.run_to_completion()
    assert {engine.session(id).finish_reason for _, _, id in bad} == {FinishReason.ERROR}
    drain(engine)
    model.raises.clear()
    serve(engine, MODEL, *healthy, VICTIM)
    drain(engine)


def test_forks_that_could_not_be_sampled_beside_their_parent_are_sampled_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, failures = engine_of(MODEL), [MemoryError()]
    queued = submit(engine, ask(5, 3, n=3, seed=1))

    def no_memory_at_first(logits: Tensor, states: list[SamplerState]) -> list[Outcome]:
        if failures:
            raise failures.pop()
        return sample(logits, states)

    monkeypatch.setattr("fuel_core.schedule.table.sample", no_memory_at_first)
    engine.run_to_completion()
    assert isinstance(engine.session(SessionId(0)).error, MemoryError)
    for request, number, id in queued[1:]:
        assert engine.session(id).finish_reason is FinishReason.LENGTH
        assert engine.session_new_tokens(id) == alone(MODEL, request, number)[0]
    drain(engine)


def test_logits_of_nan_end_their_session_alone() -> None:
    model = WatchedModel(MODEL)
    model.spoils.add(FATAL)
    engine = engine_of(model)
    queued = submit(engine, COMPANY[0], VICTIM, COMPANY[1])
    engine.run_to_completion()
    bad = engine.session(SessionId(1))
    assert bad.finish_reason is FinishReason.ERROR
    assert isinstance(bad.error, SamplingError)
    assert bad.new_tokens == said_by(VICTIM)[:4]
    assert_as_alone(engine, MODEL, [each for each in queued if each[2] != 1])
    drain(engine)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("step", [0, 1, 2, 3, 5, 7])
def test_an_interrupt_inside_a_pass_comes_out_and_the_engine_goes_on(
    step: int, stop: type[BaseException]
) -> None:
    model = WatchedModel(MODEL)
    engine, queued = crowded(model)
    run_steps(engine, step)
    model.raises = {token: stop() for token in range(96)}
    with pytest.raises(stop):
        engine.step()
    audit(engine)
    model.raises = {}
    engine.run_to_completion()
    assert_as_alone(engine, MODEL, queued)
    drain(engine)


class Miscounting(WatchedModel):
    """Returns a row too few, after it has written everything: of every pass, or where there are several."""

    always = False

    @hookimpl
    def forward_paged_ragged(self, batch: RaggedBatch) -> Tensor:
        rows = super().forward_paged_ragged(batch)
        return rows[:-1] if self.always or len(rows) > 1 else rows


def test_logits_that_do_not_fit_the_pass_leave_nothing_of_it_behind() -> None:
    model = Miscounting(MODEL)
    engine = engine_of(model, token_budget=6)
    serve(engine, MODEL, *COMPANY)
    assert any(len(batch) > 1 for batch in model.passes), "the fault was met"
    drain(engine)
    model.always = True
    bad = submit(engine, *COMPANY)
    engine.run_to_completion()
    assert {type(engine.session(id).error) for _, _, id in bad} == {ModelContractError}
    drain(engine)


# --- negative controls of the audit


def test_an_audit_sees_a_block_that_is_lost_and_one_that_is_held_twice() -> None:
    engine, _ = crowded()
    run_steps(engine, 2)
    lost = engine.pool.core.open()
    with pytest.raises(AssertionError):
        audit(engine)
    engine.pool.core.discard(lost)
    audit(engine)
    handle = engine._running[0].handle
    assert handle is not None
    engine.pool.core._ledger.drop([engine.pool.core.session_block_table(handle)[0]])
    with pytest.raises(AssertionError):
        audit(engine)


def test_an_audit_sees_a_session_that_stands_nowhere() -> None:
    engine, _ = crowded()
    engine._waiting.pop()
    with pytest.raises(AssertionError, match="one place"):
        audit(engine)
