"""The sessions of one shared pool: what there is of them, what fits, and moving them out and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from fuel_core.contracts.errors import CapacityError, InvalidRequestError, OutOfBlocksError, counted
from fuel_core.contracts.session import DecodeSession
from fuel_core.contracts.tiers import PagedDecodeModel
from fuel_core.kv.device_pool import DeviceKvPool
from fuel_core.schedule.paged_session import PagedSession
from fuel_core.schedule.policy import StepReport
from fuel_core.schedule.session import SessionId
from fuel_core.schedule.table import SessionTable, blocks_for, described

WAY_OUT = (
    "reap finished sessions, which keep their blocks until then, evict others, "
    "or build the scheduler with more blocks"
)


class PagedTable(SessionTable[PagedSession]):
    """The sessions of a paged scheduler. How they advance is the scheduler's.

    Attributes:
        pool: the sessions' keys and values.
    """

    def __init__(self, model: PagedDecodeModel, pool: DeviceKvPool) -> None:
        super().__init__(model)
        self.pool = pool

    def __repr__(self) -> str:
        finished = sum(not session.is_ready for session in self._sessions.values())
        suspended = sum(s.is_ready and s.suspended is not None for s in self._sessions.values())
        running = len(self._sessions) - suspended - finished
        capacity = self.pool.core.capacity()
        return described(self, capacity, running=running, suspended=suspended, finished=finished)

    # -- what fits -----------------------------------------------------------------------------

    @property
    def kv_free_blocks(self) -> int:
        """Blocks that nothing holds."""
        return self.pool.core.free_blocks

    def kv_blocks_required(self, prompt_len: int, max_new_tokens: int) -> int:
        """The most blocks that a session may come to hold, those of a prefix that it shares among them.

        ``ceil((prompt_len + max_new_tokens) / block_size)``; with ``max_new_tokens`` 0, those of the prompt
        alone. Nothing reserves them: a session takes each when its tokens reach it, and fewer in all where it
        stops early.

        Raises:
            InvalidRequestError: a negative count.
        """
        return blocks_for(self.pool.core, prompt_len, max_new_tokens)

    def _check_prompt_fits(self, length: int) -> None:
        """A prompt that the whole pool would hold; how much of it is free now does not matter."""
        need, have = self.kv_blocks_required(length, 0), self.pool.geometry.num_blocks
        if need > have:
            raise CapacityError(
                f"a prompt of {counted(length, 'token')}, which needs {counted(need, 'KV block')}",
                needed=f"at most {counted(have, 'block')}, all that there are",
                remedy="shorten the prompt, or build the scheduler with more blocks",
                need=need,
                have=have,
            )

    # -- what there is -------------------------------------------------------------------------

    @property
    def session_count(self) -> int:
        """Sessions that have not been reaped."""
        return len(self._sessions)

    @property
    def can_advance(self) -> bool:
        """Whether a step has anything to do: a session that has neither finished nor is suspended.

        Where it is False and ``is_all_finished`` is too, every session that is left waits for
        :meth:`restore_session`.
        """
        return any(map(self._can_advance, self._sessions.values()))

    def is_suspended(self, id: SessionId) -> bool:
        """Whether a session's blocks are on the host.

        Raises:
            UnknownSessionError: there is none of this id.
        """
        return self.session(id).suspended is not None

    def session_realize_count(self, id: SessionId) -> int | None:
        """How often a session's held plan was bound again: 0 right after its build, None without one."""
        session = self._known(id)
        held = session is not None and session.decode_session.plan is not None
        return session.decode_session.rebinds if session is not None and held else None

    def capture_logits(self, id: SessionId) -> None:
        """Keep every logits vector that the session samples from, from now on.

        Raises:
            UnknownSessionError: there is none of this id.
        """
        session = self.session(id)
        session.captured = [] if session.captured is None else session.captured

    def take_captured_logits(self, id: SessionId) -> list[Tensor] | None:
        """What was captured, float32 ``[vocab]`` each, and stop; None where nothing is captured."""
        session = self._known(id)
        if session is None:
            return None
        captured, session.captured = session.captured, None
        return captured

    # -- eviction ------------------------------------------------------------------------------

    def evict_session(self, id: SessionId) -> None:
        """Move a session's own blocks to the host; it waits until it is restored. Again: nothing happens.

        Every step passes it over, and ``is_all_finished`` stays False: loop ``while scheduler.can_advance``,
        which ends when nothing but suspended sessions is left.

        Raises:
            UnknownSessionError: there is none of this id.
            InvalidRequestError: it has finished.
        """
        session = self.session(id)
        if not session.is_ready:
            raise InvalidRequestError(
                f"session {id}, which has finished", needed="a live session", remedy="reap it instead"
            )
        if session.suspended is None:
            session.suspended = self.pool.evict(session.handle)
            session.decode_session = DecodeSession()

    def restore_session(self, id: SessionId) -> None:
        """Bring a suspended session back, bit for bit.

        Raises:
            UnknownSessionError: there is none of this id.
            InvalidRequestError: it is not suspended.
            OutOfBlocksError: it does not fit now; it stays suspended.
        """
        session = self.session(id)
        if session.suspended is None:
            raise InvalidRequestError(
                f"session {id}, which is not suspended", needed="a suspended session", remedy="evict it first"
            )
        with _advised():
            self.pool.restore(session.handle, session.suspended)
        session.suspended = None

    # -- what a table asks of its sessions -----------------------------------------------------

    def _release(self, session: PagedSession) -> None:
        self.pool.core.discard(session.handle)

    def _held(self, session: PagedSession) -> int:
        return self.pool.core.filled_tokens(session.handle)

    def _rewind(self, session: PagedSession, held: int) -> None:
        self.pool.core.truncate(session.handle, min(held, self._held(session)))

    def _pass(self, sessions: list[PagedSession], forward: Callable[[], Tensor], report: StepReport) -> bool:
        return super()._pass(sessions, _advised()(forward), report)

    def _can_advance(self, session: PagedSession) -> bool:
        return session.is_ready and session.suspended is None

    def _observe(self, session: PagedSession, logits: Tensor) -> None:
        if session.captured is not None:
            session.captured.append(logits.clone())


@contextmanager
def _advised() -> Iterator[None]:
    """Where the pool has too few blocks for the body, the error says what a scheduler's caller can do."""
    try:
        yield
    except OutOfBlocksError as error:
        raise OutOfBlocksError(error.need, error.have, remedy=WAY_OUT) from error
