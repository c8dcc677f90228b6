"""Sessions side by side on one model."""

from fuel_core.schedule.policy import Batched, RoundRobin, StepReport
from fuel_core.schedule.scheduler import SessionScheduler
from fuel_core.schedule.session import SessionId, SessionPhase, SessionState

__all__ = [
    "Batched",
    "RoundRobin",
    "SessionId",
    "SessionPhase",
    "SessionScheduler",
    "SessionState",
    "StepReport",
]
