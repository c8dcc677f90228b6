"""What generation gives back."""

from __future__ import annotations

import attrs

from fuel_core.contracts import FinishReason


@attrs.frozen
class Timing:
    """How long one prompt took among those it ran with, waiting for its turn included.

    Attributes:
        first_token_s: seconds from the call, its prompts being accepted, to the first token; 0 without one.
        total_s: seconds from then until it finished.
        tokens_per_s: tokens after those of its first step, over the time that they took; 0 where there are
            none.
    """

    first_token_s: float
    total_s: float
    tokens_per_s: float


@attrs.frozen
class Completion:
    """The output for one prompt.

    Attributes:
        text: without special tokens, and without the stop string that ended it.
        token_ids: every generated id, an EOS included.
        prompt_tokens: how many ids the prompt had.
        finish_reason: ``stop``, ``length``, ``error`` or ``cancelled``.
        error: why it failed, else None.
        timing: how long it took.
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    finish_reason: FinishReason
    error: Exception | None
    timing: Timing


@attrs.frozen
class Delta:
    """What one step added to one prompt's output.

    Attributes:
        index: which prompt.
        text: new text; it never ends in half a character and is never taken back.
        token_ids: new tokens. Their text may come with a later delta.
        completion: all of it, in the prompt's last delta, else None.
    """

    index: int
    text: str
    token_ids: list[int]
    completion: Completion | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the prompt finished, in its last delta, else None."""
        return None if self.completion is None else self.completion.finish_reason
