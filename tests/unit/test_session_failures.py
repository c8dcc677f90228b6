"""A session that fails finishes with its error and touches no other; an interrupt loses nothing."""

from __future__ import annotations

import pytest
import torch
from support_models import Fault, LockstepModel, filled, once, raising, scheduler_of

from fuel_core.contracts import FinishReason
from fuel_core.contracts.errors import ModelContractError, SamplingError
from fuel_core.schedule import Batched, RoundRobin, SessionId

POLICIES = [RoundRobin(), Batched(4)]
BOOM = RuntimeError("boom")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (raising(BOOM), RuntimeError),
        (raising(ModelContractError("a breach", needed="none", remedy="mend it")), ModelContractError),
        (filled(torch.nan), SamplingError),
        (filled(-torch.inf), SamplingError),
        (lambda row: row[:-1], ModelContractError),
        (lambda row: row[None], ModelContractError),
        (lambda row: row.double(), ModelContractError),
        (lambda row: row.to(torch.bfloat16), ModelContractError),
        (lambda row: None, TypeError),
        (lambda row: [0.0] * 16, TypeError),
    ],
)
def test_a_session_that_fails_ends_with_its_error_and_touches_no_other(
    policy: RoundRobin | Batched, after: int, fault: Fault, error: type[Exception]
) -> None:
    scheduler = scheduler_of(LockstepModel(faults={9: once(fault, after)}), policy)
    bad = scheduler.add_session([9], max_new_tokens=5)  # of a length of its own, so never in a batch
    good = [scheduler.add_session([1, 2, i], max_new_tokens=5) for i in range(2)]
    reports = []
    while not scheduler.is_all_finished:
        reports.append(scheduler.step())
    errored = [pair for report in reports for pair in report.errored]
    assert [(id, type(raised)) for id, raised in errored] == [(bad, error)]
    session = scheduler.session(bad)
    assert (session.finish_reason, session.error) == (FinishReason.ERROR, errored[0][1])
    assert session.new_tokens == [1, 2, 3][:after]
    assert [report.finished.count(bad) for report in reports if report.errored] == [1]
    assert sum(report.advanced.count(bad) for report in reports) == after
    for id in good:
        assert scheduler.session_new_tokens(id) == [3, 4, 5, 6, 7]
        assert scheduler.session(id).error is None


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_passes_through_and_the_scheduler_goes_on_from_there(
    after: int, raised: type[BaseException]
) -> None:
    scheduler = scheduler_of(LockstepModel(faults={2: once(raising(raised()), after)}))
    for i in (1, 2, 3):
        scheduler.add_session([i, 0, 0], max_new_tokens=4)
    with pytest.raises(raised):
        scheduler.step()
    assert scheduler.session_new_tokens(SessionId(0)) == [3, 4][: 1 + after]
    assert [tokens for _, tokens in scheduler.run_to_completion()] == [
        [i, 0, 0, 3, 4, 5, 6] for i in (1, 2, 3)
    ]
    assert all(scheduler.session(SessionId(i)).error is None for i in range(3))
    scheduler.reap_finished()
    assert scheduler.kv_free_blocks == 4096
