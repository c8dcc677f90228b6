"""The paged scheduler: sessions in the blocks of one shared pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fuel_core.contracts.errors import (
    InvalidRequestError,
    OutOfBlocksError,
    UnknownPrefixError,
    UnsupportedTierError,
)
from fuel_core.contracts.requests import check_request
from fuel_core.contracts.sampling import SamplingParams
from fuel_core.contracts.session import DecodeSession, PagedDecodePlan
from fuel_core.contracts.state import ModelDims
from fuel_core.contracts.tiers import PagedDecodeModel
from fuel_core.kv.device_pool import DeviceKvPool
from fuel_core.kv.geometry import KvBudget
from fuel_core.kv.pool import PrefixId
from fuel_core.schedule.paged_session import PagedSession, check_begins
from fuel_core.schedule.policy import Batched, StepReport, batches
from fuel_core.schedule.session import SessionId, SessionPhase
from fuel_core.schedule.table import SessionTable, geometry_of


class PagedSessionScheduler(SessionTable[PagedSession]):
    """Runs sessions on a model's paged tier, over one pool.

    Admission is optimistic: nothing is reserved. A session that the pool cannot grow finishes with
    OutOfBlocksError, and no other does. Prompts are fed token by token.

    Args:
        model: the shared weights.
        budget: the blocks of the pool.
        device, dtype: of the pool.

    Attributes:
        plan: whether a session's decode step is built once or every time; may be changed at any time.
        pool: the sessions' keys and values.

    Raises:
        UnsupportedTierError: the model has no paged tier.
        NonUniformStateError: the model's state is not uniform per-head KV.
        CapacityError: no memory for the pool.
    """

    def __init__(
        self,
        model: PagedDecodeModel,
        budget: KvBudget,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if not isinstance(model, PagedDecodeModel):
            raise UnsupportedTierError(
                f"{type(model).__name__}, which has no paged tier",
                needed="a PagedDecodeModel",
                remedy="serve it with SessionScheduler",
            )
        super().__init__(model)
        self._paged = model
        self.pool = DeviceKvPool(geometry_of(ModelDims.from_model(model), budget, dtype), dtype, device)
        self.plan = PagedDecodePlan.PLAN_ONCE
        self._prefixes: dict[PrefixId, tuple[int, ...]] = {}

    # -- what there is -------------------------------------------------------------------------

    @property
    def kv_free_blocks(self) -> int:
        """Blocks that nothing holds."""
        return self.pool.core.free_blocks

    @property
    def session_count(self) -> int:
        """Sessions that have not been reaped."""
        return len(self._sessions)

    def is_suspended(self, id: SessionId) -> bool:
        """Whether a session's blocks are on the host.

        Raises:
            UnknownSessionError: there is none of this id.
        """
        return self.session(id).suspended is not None

    def session_realize_count(self, id: SessionId) -> int | None:
        """How often a session's held plan was bound again: 0 right after its build, None without one."""
        session = self._sessions.get(id)
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
        session = self._sessions.get(id)
        if session is None:
            return None
        captured, session.captured = session.captured, None
        return captured

    # -- sessions ------------------------------------------------------------------------------

    def add_session(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
        *,
        eos_ids: Iterable[int] = (),
        max_new_tokens: int,
    ) -> SessionId:
        """Take a session, without reserving anything for it.

        Raises:
            InvalidRequestError: an empty prompt, no tokens to generate, an id outside the vocabulary, or more
                tokens than the model's context. Nothing has changed.
        """
        session = self._new_session(prompt, sampling, eos_ids, max_new_tokens)
        session.handle = self.pool.core.open()
        return self._keep(session)

    def add_session_sharing_prefix(
        self,
        prefix: PrefixId,
        prompt: Sequence[int],
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
        *,
        eos_ids: Iterable[int] = (),
        max_new_tokens: int,
    ) -> SessionId:
        """Take a session whose prompt begins with a registered prefix, of which only the rest is fed.

        Raises:
            InvalidRequestError: as :meth:`add_session`, or a prompt with nothing after the prefix.
            UnknownPrefixError: no such prefix.
            PrefixMismatchError: the prompt does not begin with the prefix's tokens. In every case nothing has
                changed.
        """
        session = self._new_session(prompt, sampling, eos_ids, max_new_tokens)
        check_begins(prompt, self._prefix_tokens(prefix))
        session.handle = self.pool.core.open()
        self.pool.core.splice_prefix_from(prefix, session.handle)
        return self._keep(session)

    def _new_session(
        self, prompt: Sequence[int], sampling: SamplingParams, eos_ids: Iterable[int], max_new_tokens: int
    ) -> PagedSession:
        vocab_size, max_context = self._model.vocab_size(), self._model.max_context()
        check_request(prompt, sampling, max_new_tokens, vocab_size=vocab_size, max_context=max_context)
        session = PagedSession(
            SessionId(self._next_id),
            vocab_size,
            prompt,
            sampling,
            eos_ids=eos_ids,
            max_new_tokens=max_new_tokens,
        )
        blocks = self.pool.core.blocks_required(0, len(prompt) + max_new_tokens)
        session.max_blocks = min(blocks, self.pool.geometry.num_blocks)
        return session

    def _release(self, session: PagedSession) -> None:
        self.pool.core.discard(session.handle)

    # -- prefixes ------------------------------------------------------------------------------

    def register_prefix(self, donor: SessionId, n: int) -> PrefixId:
        """Keep the blocks of a session's first ``n`` tokens, whatever becomes of the session.

        Raises:
            UnknownSessionError: there is no such session.
            PrefixNotFullyFilledError: not whole blocks, or not all of them filled.
            SessionNotResidentError: one of the prefix's blocks is evicted.
        """
        session = self.session(donor)
        prefix = self.pool.core.register_prefix(session.handle, n)
        self._prefixes[prefix] = tuple(session.tokens[:n])
        return prefix

    def release_prefix(self, prefix: PrefixId) -> None:
        """Let go of a prefix; sessions that share it keep their blocks.

        Raises:
            UnknownPrefixError: no such prefix.
        """
        self._prefix_tokens(prefix)
        self.pool.core.release_prefix(prefix)
        del self._prefixes[prefix]

    def _prefix_tokens(self, prefix: PrefixId) -> tuple[int, ...]:
        if prefix not in self._prefixes:
            raise UnknownPrefixError(prefix)
        self.pool.core.prefix_blocks(prefix)
        return self._prefixes[prefix]

    # -- eviction ------------------------------------------------------------------------------

    def evict_session(self, id: SessionId) -> None:
        """Move a session's own blocks to the host; it waits until it is restored. Again: nothing happens.

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
        self.pool.restore(session.handle, session.suspended)
        session.suspended = None

    # -- the step ------------------------------------------------------------------------------

    def step(self) -> StepReport:
        """Run every waiting prompt and sample its first token, then advance every decoding session by one.

        A session that fails finishes with its error; no other is touched and nothing is raised.
        """
        return self._step(1)

    def step_batched(self, max_batch: int) -> StepReport:
        """:meth:`step`, with decoding sessions at one position together, up to ``max_batch`` in a pass.

        Raises:
            InvalidRequestError: ``max_batch`` is not a positive integer.
        """
        return self._step(Batched(max_batch).max_batch)

    def _step(self, max_batch: int) -> StepReport:
        report = StepReport()
        for session in self._in_phase(SessionPhase.PREFILL):
            self._pass([session], lambda session=session: self._prefill(session), report)  # type: ignore[misc]
        for sessions in batches(self._in_phase(SessionPhase.DECODE), self._held, max_batch):
            if len(sessions) == 1:
                self._decode(sessions[0], report)
            else:
                self._decode_together(sessions, report)
        return report

    def _held(self, session: PagedSession) -> int:
        return self.pool.core.filled_tokens(session.handle)

    def _rewind(self, session: PagedSession, held: int) -> None:
        self.pool.core.truncate(session.handle, min(held, self._held(session)))

    def _can_advance(self, session: PagedSession) -> bool:
        return session.is_ready and session.suspended is None

    def _observe(self, session: PagedSession, logits: Tensor) -> None:
        if session.captured is not None:
            session.captured.append(logits.clone())

    def _prefill(self, session: PagedSession) -> Tensor:
        """Feed the prompt after what the session shares, token by token; ``[1, vocab]`` of the last."""
        start = self.pool.core.filled_tokens(session.handle)
        for token in session.tokens[start:]:
            logits = self._paged.forward_paged_step(token, self.pool, session.handle)
        return logits[None]

    def _decode(self, session: PagedSession, report: StepReport) -> None:
        forward = self._paged.forward_paged_step_persistent
        args = session.tokens[-1], self.pool, session.handle, session.max_blocks
        self._pass([session], lambda: forward(*args, self.plan, session.decode_session)[None], report)

    def _decode_together(self, sessions: list[PagedSession], report: StepReport) -> None:
        sessions = self._that_can_grow(sessions, report)
        if len(sessions) == 1:
            self._decode(sessions[0], report)
        elif sessions:
            tokens, handles = [s.tokens[-1] for s in sessions], [s.handle for s in sessions]
            forward = self._paged.forward_paged_step_batched
            report.used_batched_arm |= self._pass(
                sessions, lambda: forward(tokens, self.pool, handles), report
            )

    def _that_can_grow(self, sessions: list[PagedSession], report: StepReport) -> list[PagedSession]:
        """Those that the free blocks suffice for, first come; the others finish before the pass is run."""
        free, growing = self.kv_free_blocks, []
        for session in sessions:
            need = self.pool.core.blocks_required_for(session.handle, 1)
            if need > free:
                self._fail([session], OutOfBlocksError(need, free), report)
            else:
                free -= need
                growing.append(session)
        return growing
