"""Sessions side by side on one model."""

from fuel_core.contracts.session import PagedDecodePlan
from fuel_core.schedule.paged import PagedSessionScheduler
from fuel_core.schedule.policy import Batched, RoundRobin, StepReport
from fuel_core.schedule.scheduler import SessionScheduler
from fuel_core.schedule.session import SessionId, SessionPhase, SessionState

__all__ = [
    "Batched",
    "PagedDecodePlan",
    "PagedSessionScheduler",
    "RoundRobin",
    "SessionId",
    "SessionPhase",
    "SessionScheduler",
    "SessionState",
    "StepReport",
]
