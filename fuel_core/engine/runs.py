"""Many requests to their end: on the engine, or on the contiguous scheduler."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress

from fuel_core.contracts import FinishReason
from fuel_core.contracts.errors import CapacityError, UnknownSessionError
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
        self._running: dict[SessionId, tuple[Session, Output]] = {}
        self._clock, self._start = clock, clock()

    def __iter__(self) -> Generator[Delta, None, None]:
        try:
            try:
                while not self._is_done():
                    yield from self._advance()
            finally:
                self._end()
        finally:
            self._end()  # what is left, where an interrupt has cut the first short

    def _end(self) -> None:
        with self._scheduler.lock:
            for id in self._own():
                self._scheduler.cancel(id)
                self._scheduler.reap(id)
            self._running.clear()

    def _advance(self) -> list[Delta]:
        """One step; an engine that several runs share moves all of them on with it."""
        with self._scheduler.lock:
            deltas = list(self._admit())
            self._scheduler.step()
            for id in list(self._running):
                deltas += self._collect(id)
            return deltas

    @abstractmethod
    def _is_done(self) -> bool:
        """Whether no request is left."""

    @abstractmethod
    def _admit(self) -> Iterator[Delta]:
        """Start what can start; the deltas of what cannot run at all."""

    @abstractmethod
    def _own(self) -> Iterable[SessionId]:
        """The sessions of this run that the scheduler still has."""

    def _output(self, request: Request) -> Output:
        return Output(request, self._loaded.tokenizer, self._start, self._clock)

    def _collect(self, id: SessionId) -> Iterator[Delta]:
        """What a session has said since; whatever its text raises ends it and no other."""
        session, output = self._running[id]
        last: Delta | None = None
        try:
            if delta := output.add(session.take_unread()):
                yield delta
            if output.stopped:
                self._cancel(session)
            if session.finish_reason is not None:
                last = output.finish(session.finish_reason, session.error)
        except Exception as error:
            self._cancel(session)
            last = output.fail(session.error or error)
        if last is not None:
            self._forget(session)
            yield last

    def _cancel(self, session: Session) -> None:
        if session.is_ready:
            self._scheduler.cancel(session.id)

    def _forget(self, session: Session) -> None:
        del self._running[session.id]
        with suppress(UnknownSessionError):  # whoever shares the engine may have reaped it
            self._scheduler.reap(session.id)


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
        self._engine, self._waiting = engine, deque(requests)
        for request in requests:
            _check(engine, request, len(requests))

    def _is_done(self) -> bool:
        return not self._waiting and not self._running

    def _admit(self) -> Iterator[Delta]:
        while self._waiting:
            request = self._waiting.popleft()
            output = self._output(request)
            (id,) = self._engine.submit(
                request.tokens,
                request.params,
                eos_ids=self._loaded.eos_ids,
                max_new_tokens=request.max_new_tokens,
                owner=self,
            )
            self._running[id] = self._engine.session(id), output
        yield from ()

    def _own(self) -> Iterable[SessionId]:
        return self._engine.owned(self)


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
                self._running[id] = self._contiguous.session(id), output
            self._waiting.popleft()

    def _own(self) -> Iterable[SessionId]:
        return list(self._running)


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
