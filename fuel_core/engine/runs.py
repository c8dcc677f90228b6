"""Many requests to their end: on the engine, or on the contiguous scheduler."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence

from fuel_core.contracts import FinishReason
from fuel_core.contracts.errors import CapacityError
from fuel_core.engine.loading import Loaded
from fuel_core.engine.output import Output, Request
from fuel_core.engine.results import Delta
from fuel_core.engine.serving import Engine
from fuel_core.kv import KvBudget
from fuel_core.schedule import Batched, SessionId, SessionScheduler
from fuel_core.schedule.session import Session

_BLOCK_SIZE = 16


class Run(ABC):
    """Iterating runs the requests to their end and yields their deltas; closing it ends them all.

    ``clock`` gives seconds; the requests' time begins when the run is made.
    """

    def __init__(
        self, loaded: Loaded, scheduler: Engine | SessionScheduler, clock: Callable[[], float]
    ) -> None:
        self._loaded = loaded
        self._scheduler = scheduler
        self._running: dict[SessionId, Output] = {}
        self._clock, self._start = clock, clock()

    def __iter__(self) -> Generator[Delta, None, None]:
        try:
            while not self._is_done():
                yield from self._advance()
        finally:
            with self._scheduler.lock:
                for id in self._running:
                    self._scheduler.cancel(id)
                    self._scheduler.reap(id)
                self._running.clear()

    def _advance(self) -> list[Delta]:
        """One step; an engine that several runs share moves all of them on with it."""
        with self._scheduler.lock:
            deltas = list(self._admit())
            self._scheduler.step()
            for id in list(self._running):
                deltas += self._collect(self._scheduler.session(id))
            return deltas

    @abstractmethod
    def _is_done(self) -> bool:
        """Whether no request is left."""

    @abstractmethod
    def _admit(self) -> Iterator[Delta]:
        """Start what can start; the deltas of what cannot run at all."""

    def _output(self, request: Request) -> Output:
        return Output(request, self._loaded.tokenizer, self._start, self._clock)

    def _collect(self, session: Session) -> Iterator[Delta]:
        output = self._running[session.id]
        if delta := output.add(session.take_unread()):
            yield delta
        if output.stopped:
            self._scheduler.cancel(session.id)
        if session.finish_reason is not None:
            del self._running[session.id]
            self._scheduler.reap(session.id)
            yield output.finish(session.finish_reason, session.error)


class PagedRun(Run):
    """All requests on an engine, which queues them itself.

    Raises:
        CapacityError: a request needs more blocks than the engine has. None has been queued.
        InvalidRequestError: the engine is over another model.
    """

    def __init__(
        self,
        loaded: Loaded,
        engine: Engine,
        requests: Sequence[Request],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(loaded, engine, clock)
        engine.check_model(loaded.model)
        self._engine, self._waiting = engine, list(requests)
        for request in requests:
            _check(engine, request, len(requests))

    def _is_done(self) -> bool:
        return not self._waiting and not self._running

    def _admit(self) -> Iterator[Delta]:
        for request in self._waiting:
            (id,) = self._engine.submit(
                request.tokens,
                request.params,
                eos_ids=self._loaded.eos_ids,
                max_new_tokens=request.max_new_tokens,
            )
            self._running[id] = self._output(request)
        self._waiting.clear()
        yield from ()


class ContiguousRun(Run):
    """Requests on caches of their own, ``max_batch`` at a time in order."""

    def __init__(
        self,
        loaded: Loaded,
        requests: Sequence[Request],
        max_batch: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._policy = Batched(max_batch)
        self._waiting = deque(requests)
        budget = _room_for_any(requests, max_batch)
        scheduler = SessionScheduler(
            loaded.model, budget, policy=self._policy, device=loaded.device, dtype=loaded.kv_dtype
        )
        super().__init__(loaded, scheduler, clock)
        self._contiguous = scheduler

    def _is_done(self) -> bool:
        return not self._waiting and not self._running

    def _admit(self) -> Iterator[Delta]:
        while self._waiting and len(self._running) < self._policy.max_batch:
            request, output = self._waiting[0], self._output(self._waiting[0])
            try:
                id = self._contiguous.add_session(
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


def _check(engine: Engine, request: Request, count: int) -> None:
    """See that the engine can take a request; the error names the prompt where there are several."""
    try:
        engine.check(request.tokens, request.params, request.max_new_tokens)
    except CapacityError as error:
        if count == 1:
            raise
        raise CapacityError(
            f"prompt {request.index + 1} of {count}: {error.given}",
            needed=error.needed,
            remedy=error.remedy,
            **{**error.figures, "prompt_index": request.index},
        ) from error


def _room_for_any(requests: Sequence[Request], max_batch: int) -> KvBudget:
    """Blocks for any ``max_batch`` of the requests."""
    blocks = sorted((blocks_of(request) for request in requests), reverse=True)
    return KvBudget(_BLOCK_SIZE, max(1, sum(blocks[:max_batch])))


def blocks_of(request: Request, block_size: int = _BLOCK_SIZE) -> int:
    """The blocks that a request may come to hold."""
    return -(-(len(request.tokens) + request.max_new_tokens) // block_size)
