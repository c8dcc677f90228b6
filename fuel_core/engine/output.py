"""Many requests on one scheduler: who runs, and what each has said so far."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence

import attrs

from fuel_core.contracts import FinishReason, SamplingParams
from fuel_core.contracts.errors import CapacityError
from fuel_core.engine.loading import Loaded
from fuel_core.engine.results import Completion, Delta, Timing
from fuel_core.kv import KvBudget
from fuel_core.sampling import StopStrings
from fuel_core.schedule import Batched, SessionId, SessionScheduler, SessionState
from fuel_core.text import Tokenizer

_BLOCK_SIZE = 16


@attrs.frozen
class Request:
    """One prompt, checked and tokenized."""

    index: int
    tokens: list[int]
    params: SamplingParams
    max_new_tokens: int


class Output:
    """What one request has said: tokens in, the text that is certain out."""

    def __init__(self, request: Request, tokenizer: Tokenizer, start: float) -> None:
        self.request = request
        self.stopped = False
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer(continues=True)
        self._stop = StopStrings(request.params.stop)
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._start = self._first = self._last = start

    def add(self, tokens: Sequence[int]) -> Delta | None:
        """Take new tokens, up to the one that completes a stop string; None where there are none."""
        taken: list[int] = []
        text = ""
        for token in tokens:
            if self.stopped:
                break
            taken.append(token)
            text += self._emit(self._text_of(token), len(self._ids) + len(taken))
        self._last = time.perf_counter()
        if taken and not self._ids:
            self._first = self._last
        return self._delta(text, taken) if taken else None

    def finish(self, reason: FinishReason, error: Exception | None = None) -> Delta:
        """The last delta: the text that was held back, and the completion."""
        text = ""
        if not self.stopped:
            text = self._emit(self._detokenizer.finish(), len(self._ids))
            text += "" if self.stopped else self._stop.flush()
        delta = self._delta(text, [])
        if self.stopped:
            reason = FinishReason.STOP
        completion = Completion(
            "".join(self._texts), self._ids, len(self.request.tokens), reason, error, self._timing()
        )
        return attrs.evolve(delta, completion=completion)

    def _delta(self, text: str, tokens: list[int]) -> Delta:
        self._texts.append(text)
        self._ids += tokens
        return Delta(self.request.index, text, tokens)

    def _text_of(self, token: int) -> str:
        # Heads are often padded to a round number of rows, which the tokenizer knows nothing of.
        return self._detokenizer.add([token]) if self._tokenizer.has_token(token) else ""

    def _emit(self, text: str, count: int) -> str:
        """What of ``text``, which the ``count``-th token brought, is certain to stay."""
        if count <= self.request.params.min_new_tokens:
            return text
        text, self.stopped = self._stop.feed(text)
        return text

    def _timing(self) -> Timing:
        elapsed = self._last - self._first
        rate = (len(self._ids) - 1) / elapsed if elapsed > 0 else 0.0
        return Timing(self._first - self._start, self._last - self._start, rate)


class Run:
    """Iterating runs the requests to their end, ``max_batch`` at a time in order, and yields their deltas."""

    def __init__(self, loaded: Loaded, requests: Sequence[Request], max_batch: int) -> None:
        self._loaded = loaded
        self._policy = Batched(max_batch)
        self._waiting = deque(requests)
        self._running: dict[SessionId, Output] = {}
        self._start = time.perf_counter()

    def __iter__(self) -> Iterator[Delta]:
        if not self._waiting:
            return
        scheduler = SessionScheduler(
            self._loaded.model,
            self._budget(),
            policy=self._policy,
            device=self._loaded.device,
            dtype=self._loaded.dtype,
        )
        while self._waiting or self._running:
            yield from self._admit(scheduler)
            scheduler.step()
            for id in list(self._running):
                yield from self._collect(scheduler, scheduler.session(id))
            scheduler.reap_finished()

    def _budget(self) -> KvBudget:
        """Room for any ``max_batch`` of the requests."""
        sizes = sorted((len(r.tokens) + r.max_new_tokens for r in self._waiting), reverse=True)
        blocks = sum(-(-size // _BLOCK_SIZE) for size in sizes[: self._policy.max_batch])
        return KvBudget(_BLOCK_SIZE, blocks)

    def _admit(self, scheduler: SessionScheduler) -> Iterator[Delta]:
        while self._waiting and len(self._running) < self._policy.max_batch:
            request = self._waiting[0]
            output = Output(request, self._loaded.tokenizer, self._start)
            try:
                id = scheduler.add_session(
                    request.tokens,
                    request.params,
                    eos_ids=self._loaded.eos_ids,
                    max_new_tokens=request.max_new_tokens,
                )
            except CapacityError as error:
                if self._running:
                    return  # it fits once another has finished
                yield output.finish(FinishReason.ERROR, error)
            else:
                self._running[id] = output
            self._waiting.popleft()

    def _collect(self, scheduler: SessionScheduler, session: SessionState) -> Iterator[Delta]:
        output = self._running[session.id]
        if delta := output.add(session.take_unread()):
            yield delta
        if output.stopped:
            scheduler.cancel(session.id)
        if session.finish_reason is not None:
            del self._running[session.id]
            yield output.finish(session.finish_reason, session.error)
