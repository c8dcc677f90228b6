"""Who waits, runs, or has been moved to the host: the queues of an engine and the moves between them."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, MutableSequence
from contextlib import contextmanager

from fuel_core.contracts import DecodeModel, FinishReason
from fuel_core.engine.repair import repair
from fuel_core.engine.served import EngineStats, ServedSession
from fuel_core.engine.sharing import SessionIndex
from fuel_core.kv import DeviceKvPool, SessionHandle
from fuel_core.layers.paged import blocks_needed
from fuel_core.schedule.policy import StepReport
from fuel_core.schedule.session import SessionId
from fuel_core.schedule.table import SessionTable

Batch = list[tuple[ServedSession, range]]
"""Sessions of a pass, each with the places of those of its tokens that are computed in it."""


class Admission(SessionTable[ServedSession]):
    """Sessions in queues over one pool. It computes nothing.

    A session that has not finished stands in one place: it waits without a block, runs with a handle, is
    preempted with an image on the host, or is one of the forks of another that does not run yet or whose
    prompt is not computed. A finished one stands nowhere and holds nothing. Each queue is in order of age.

    A move changes the session before the queue, and what the queues are follows from the sessions. So what
    an interrupt leaves of a move is put right before the next, in :meth:`_whole`.

    A session whose move fails, since the host or the device has no memory for it, ends with that error.

    Attributes:
        pool: the keys and values of all sessions.
        stats: what has been done.
    """

    def __init__(
        self, model: DecodeModel, pool: DeviceKvPool, max_batch: int, watermark: float, namespace: Hashable
    ) -> None:
        super().__init__(model)
        self.pool = pool
        self._max_batch = max_batch
        self._spare = max(1, int(watermark * pool.geometry.num_blocks))
        self._index = SessionIndex(pool.core, namespace)
        self.stats = EngineStats(self._index.stats)
        self._waiting: deque[ServedSession] = deque()
        self._running: list[ServedSession] = []
        self._preempted: deque[ServedSession] = deque()
        self._busy = self._torn = False
        # A stream that is garbage cancels its sessions wherever the collector runs: in a step too.
        self._cancelled: list[ServedSession] = []
        self._report = StepReport()

    @property
    def cached_blocks(self) -> int:
        """Blocks that only the prefix cache holds."""
        return self._index.reclaimable()

    # -- whole or torn -------------------------------------------------------------------------

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """The queues are whole when the body begins; if it is cut short, the next one repairs them first.

        Inside another such body, it leaves both to that one.
        """
        if self._busy:
            yield
            return
        self._busy = True
        try:
            if self._torn:
                self._repair()
            self._torn = True
            yield
            self._leave_cancelled()
            self._torn = self._busy = False
        finally:
            self._busy = False

    def _repair(self) -> None:
        # A stream that is collected meanwhile cancels some, and reaps them.
        sessions = sorted({*self._sessions.values(), *self._cancelled}, key=_age)
        repair(sessions, self.pool.core, self._index.holders)
        ready = [session for session in sessions if session.is_ready]
        self._running = [session for session in ready if session.handle is not None]
        self._preempted = deque(session for session in ready if session.image is not None)
        outside = [session for session in ready if session.handle is None and session.image is None]
        self._waiting = deque(session for session in outside if session.parent is None)

    # -- in and out ----------------------------------------------------------------------------

    def _queue(self, first: ServedSession, forks: list[ServedSession]) -> None:
        first.parent, first.forks = None, forks
        for fork in forks:
            fork.parent = first
        insort(self._waiting, first, key=_age)

    def cancel(self, id: SessionId) -> None:
        """End a session and free all that it holds; one that has finished keeps its reason.

        Raises:
            UnknownSessionError: there is none of this id.
        """
        session = self.session(id)
        with self._whole():
            self._cancelled.append(session)
            super().cancel(id)

    def _leave_cancelled(self) -> None:
        while self._cancelled:
            session = self._cancelled.pop()
            session.finish(FinishReason.CANCELLED)  # the step may have given it a token since
            self._leave(session)

    def _end(self, session: ServedSession, error: Exception) -> None:
        self._fail([session], error, self._report)
        self._leave(session)

    def _leave(self, session: ServedSession) -> None:
        """Take a finished session out of its queue, and its blocks out of the pool."""
        queue = self._queue_of(session)
        if session in queue:
            queue.remove(session)
        if session.handle is not None:
            self.pool.core.discard(session.handle)
        session.handle = session.image = session.parent = None
        waiting = [fork for fork in session.forks if fork.is_ready]
        session.forks = []
        if waiting:  # the prompt is still to be computed, by the first of those that wait for it
            self._queue(waiting[0], waiting[1:])

    def _queue_of(self, session: ServedSession) -> MutableSequence[ServedSession]:
        if session.handle is not None:
            return self._running
        return self._waiting if session.image is None else self._preempted

    def _release(self, session: ServedSession) -> None:
        with self._whole():
            pass  # nothing is left: it went when the session finished

    # -- what fits -----------------------------------------------------------------------------

    def _has_seats(self, session: ServedSession) -> bool:
        """Whether it and those that will fork from it may run beside the others; alone they always may."""
        taken = sum(each.seats for each in self._running)
        return not taken or taken + session.seats <= self._max_batch

    def _has_blocks(self, need: int) -> bool:
        """Whether blocks can be had beside those that the others are about to take, and some to grow into."""
        if not self._running:
            return True
        need += self._spare + self._need((each, self._pending(each)) for each in self._running)
        short = need - self.pool.core.free_blocks
        return short <= 0 or self._index.reclaimable(short) == short

    def _prompt_blocks(self, session: ServedSession) -> int:
        """The blocks that its tokens take, but for those that others hold and it can share."""
        return self._all_blocks(session) - self._index.costs_nothing(session)

    def _all_blocks(self, session: ServedSession) -> int:
        return self.pool.core.blocks_required(0, len(session.tokens))

    def _need(self, batch: Iterable[tuple[ServedSession, range]]) -> int:
        pairs = [(each.handle, len(places)) for each, places in batch if each.handle is not None]
        return blocks_needed(self.pool, [handle for handle, _ in pairs], [count for _, count in pairs])

    def _free(self, need: int) -> bool:
        short = need - self.pool.core.free_blocks
        return short <= 0 or self._index.reclaim(short) == short

    def _pending(self, session: ServedSession) -> range:
        """The places of the tokens that are not in the pool yet: of a prompt, or the one sampled last."""
        return range(session.held, len(session.tokens))

    # -- the moves -----------------------------------------------------------------------------

    def _restore(self) -> None:
        """Bring back those on the host that there is room for, oldest first."""
        while self._preempted:
            session = self._preempted[0]
            if not self._has_seats(session) or not self._has_blocks(self._all_blocks(session)):
                return
            assert session.image is not None
            self._free(self.pool.core.blocks_required(0, session.image.tokens))
            try:
                session.handle = self.pool.swap_in(session.image)
            except Exception as error:
                self._end(session, error)
                continue
            session.image = None
            self._share(session, session.handle)
            self._enter(self._preempted.popleft())

    def _share(self, session: ServedSession, whole: SessionHandle) -> None:
        """Let go of the blocks that came back and that the prefix cache has too."""
        core, handle = self.pool.core, self.pool.core.open()
        shared, slots = self._index.share(session, handle), len(core.session_blocks(whole))
        core.splice(whole, handle, min(shared, slots), slots)
        session.handle, session.held = handle, core.filled_tokens(handle)
        core.discard(whole)

    def _admit(self) -> None:
        """Take in those that there is room for, in order, once nobody is on the host."""
        while self._waiting and not self._preempted:
            session = self._waiting[0]
            if not self._has_seats(session) or not self._has_blocks(self._prompt_blocks(session)):
                return
            session.handle = self.pool.core.open()
            session.held = self._index.admit(session, session.handle)
            self._enter(self._waiting.popleft())

    def _enter(self, session: ServedSession) -> None:
        insort(self._running, session, key=_age)

    def _make_room(self, batch: Batch) -> Batch:
        """See that the pool can take the batch: give up cached blocks, then move the newest sessions out."""
        while batch and not self._free(self._need(batch)):
            newest = self._running[-1]
            if len(self._running) == 1:  # it fits alone, or it would not have been taken
                break
            self._preempt(newest)
            batch = [(session, places) for session, places in batch if session is not newest]
        return batch

    def _preempt(self, session: ServedSession) -> None:
        assert session.handle is not None
        try:
            session.image = self.pool.swap_out(session.handle)
        except Exception as error:
            self._end(session, error)
            return
        session.handle = None
        self._running.remove(session)
        self._preempted.appendleft(session)  # the newest goes first, so the oldest stands first
        self.stats.preemptions += 1

    def _fork(self, parent: ServedSession) -> list[ServedSession]:
        """Let those that waited for a prompt share its blocks."""
        forks = [fork for fork in parent.forks if fork.is_ready]
        for fork in forks:
            assert parent.handle is not None
            handle = self.pool.core.open()
            self.pool.core.splice(parent.handle, handle, 0, len(self.pool.core.session_blocks(parent.handle)))
            fork.handle, fork.held, fork.parent = handle, parent.held, None
            fork.chain, fork.indexed = list(parent.chain), parent.indexed
            self._enter(fork)
        parent.forks = []
        return forks


def _age(session: ServedSession) -> int:
    return session.id
