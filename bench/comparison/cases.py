"""What everyone is asked."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

import attrs

from fuel_core.contracts.errors import InvalidRequestError


@attrs.frozen
class Case:
    """One question.

    Attributes:
        kind: ``batch``, ``context``, ``prompt`` or ``ragged``: which row of the plot it is in.
        contexts: of each session; of a prompt, its length.
        steps: tokens that each session decodes; 0 for a prompt.
        ours: whether it is asked of Fuel alone.
    """

    kind: str
    contexts: tuple[int, ...]
    steps: int = 0
    ours: bool = False

    @property
    def batch(self) -> int:
        """How many sessions."""
        return len(self.contexts)

    @property
    def context(self) -> float:
        """Their mean context."""
        return mean(self.contexts)

    @property
    def name(self) -> str:
        """For the table."""
        if self.kind == "prompt":
            return f"prompt of {self.contexts[0]}"
        least, most = min(self.contexts), max(self.contexts)
        span = f"{least}" if least == most else f"{least} to {most}"
        return f"B={self.batch}, context {span}"

    @property
    def question(self) -> dict[str, Any]:
        """See ``bench/peers/protocol.py``."""
        if self.kind == "prompt":
            return {"op": "prefill", "length": self.contexts[0]}
        return {"op": "decode", "contexts": list(self.contexts), "steps": self.steps}


def cases_of(
    batches: Sequence[int],
    context: int,
    contexts: Sequence[int],
    context_batches: Sequence[int],
    prompt: int,
    steps: int,
    ragged: int,
) -> list[Case]:
    """Batches at one context, contexts at some batches, a prompt, ragged sessions against uniform ones."""
    found = [Case("batch", (context,) * batch, steps) for batch in batches]
    found += [Case("context", (length,) * batch, steps) for batch in context_batches for length in contexts]
    if prompt:
        found.append(Case("prompt", (prompt,)))
    if ragged:
        spread = ragged_contexts(ragged)
        found += [
            Case("ragged", spread, steps, ours=True),
            Case("ragged", (round(mean(spread)),) * ragged, steps, ours=True),
        ]
    return found


def ragged_contexts(count: int, least: int = 16, most: int = 1024) -> tuple[int, ...]:
    """Contexts that are spread evenly, in no order.

    Raises:
        InvalidRequestError: fewer than two sessions.
    """
    if count < 2:
        raise InvalidRequestError(
            f"{count} ragged sessions", needed="at least 2, or 0 for none", remedy="add"
        )
    even = [round(least + (most - least) * i / (count - 1)) for i in range(count)]
    return tuple(even[::2] + even[1::2][::-1])
