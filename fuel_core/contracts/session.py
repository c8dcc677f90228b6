"""What a scheduler owns for each session and the model fills."""

from __future__ import annotations

from enum import Enum
from typing import Any

import attrs


class PagedDecodePlan(Enum):
    """How a decode step is prepared: built once and rebound per token, or built every time."""

    PLAN_ONCE = "plan-once"
    REPLAN = "replan"


@attrs.define(eq=False)
class DecodeSession:
    """A holder for one session's decode plan. The caller owns it, the model fills it.

    Attributes:
        plan: whatever the model keeps between steps; None before the first build.
        rebinds: how often the held plan was used again; 0 right after a build.
    """

    plan: Any = None
    rebinds: int = 0
