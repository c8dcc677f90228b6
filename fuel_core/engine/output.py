"""What one request has said so far: tokens in, text out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from fuel_core.contracts import FinishReason, SamplingParams
from fuel_core.engine.results import Completion, Delta, Timing
from fuel_core.sampling import StopStrings
from fuel_core.text import Tokenizer


@attrs.frozen
class Request:
    """One prompt, checked and tokenized.

    Attributes:
        index: which of the call's.
        tokens: its ids.
        params: how its session samples, without stop strings.
        max_new_tokens: the most that it may generate.
        stop: the strings that end its text, which are watched here.
    """

    index: int
    tokens: list[int]
    params: SamplingParams
    max_new_tokens: int
    stop: tuple[str, ...] = ()


class Output:
    """What one request has said: tokens in, the text that is certain out.

    ``clock`` gives seconds, and ``start`` is when the request was made.
    """

    def __init__(
        self, request: Request, tokenizer: Tokenizer, start: float, clock: Callable[[], float]
    ) -> None:
        self.request = request
        self.stopped = False
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer(continues=True)
        self._stop = StopStrings(request.stop)
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._told = 0  # how many of them a delta has told
        self._clock = clock
        self._start = self._first = start
        self._at_first = 0

    def add(self, tokens: Sequence[int]) -> Delta | None:
        """Take new tokens, up to the one that completes a stop string; None where there are none."""
        before, text = len(self._ids), ""
        if tokens and not before:
            self._first = self._clock()
        for token in tokens:
            if self.stopped:
                break
            self._ids.append(token)
            self._at_first += not before
            text += self._emit(self._text_of(token), len(self._ids))
        return self._delta(text) if len(self._ids) > before else None

    def finish(self, reason: FinishReason, error: Exception | None = None) -> Delta:
        """The last delta: the text that was held back, and the completion."""
        text = ""
        if not self.stopped:
            text = self._emit(self._detokenizer.finish(), len(self._ids))
            text += "" if self.stopped else self._stop.flush()
        if self.stopped:  # whatever befell it beyond the stop string
            reason, error = FinishReason.STOP, None
        return self._last(text, reason, error)

    def fail(self, error: Exception) -> Delta:
        """The last delta where the text itself has failed: what was held back is lost, and no token is."""
        return self._last("", FinishReason.ERROR, error)

    def _last(self, text: str, reason: FinishReason, error: Exception | None) -> Delta:
        delta = self._delta(text)
        completion = Completion(
            "".join(self._texts), self._ids, len(self.request.tokens), reason, error, self._timing()
        )
        return attrs.evolve(delta, completion=completion)

    def _delta(self, text: str) -> Delta:
        self._texts.append(text)
        told, self._told = self._told, len(self._ids)
        return Delta(self.request.index, text, self._ids[told:])

    def _text_of(self, token: int) -> str:
        # Heads are often padded to a round number of rows, which the tokenizer knows nothing of.
        return self._detokenizer.add([token]) if self._tokenizer.has_token(token) else ""

    def _emit(self, text: str, count: int) -> str:
        """What of ``text``, which the ``count``-th token brought, is certain to stay."""
        may_end = count > self.request.params.min_new_tokens
        text, self.stopped = self._stop.feed(text, may_end=may_end)
        return text

    def _timing(self) -> Timing:
        end = self._clock()
        elapsed = end - self._first
        rate = (len(self._ids) - self._at_first) / elapsed if elapsed > 0 else 0.0
        return Timing(self._first - self._start, end - self._start, rate)
