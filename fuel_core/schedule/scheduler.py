"""The contiguous scheduler: K sessions with a cache each, over one model."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fuel_core.contracts.errors import ModelContractError, OutOfBlocksError, UnknownSessionError
from fuel_core.contracts.requests import check_request
from fuel_core.contracts.sampling import FinishReason, SamplingParams
from fuel_core.contracts.state import ModelDims
from fuel_core.contracts.tiers import DecodeModel
from fuel_core.kv.geometry import KvBudget, KvGeometry, PoolCapacity
from fuel_core.kv.pool import KvBlockPool, SessionHandle
from fuel_core.sampling import sample
from fuel_core.schedule.policy import Batched, RoundRobin, StepReport, batches
from fuel_core.schedule.session import SessionId, SessionPhase, SessionState


class SessionScheduler:
    """Runs sessions side by side on a model's core tier, and on its batched arm where the policy asks for it.

    It says what fits and does what it is told: which session is admitted when is the caller's choice.

    Args:
        model: the shared weights.
        budget: the KV memory that sessions reserve from, whole, when they are added.
        policy: ``RoundRobin()`` or ``Batched(max_batch)``; may be changed at any time.
        device, dtype: of the sessions' caches.

    Raises:
        NonUniformStateError: the model's state is not uniform per-head KV.
    """

    def __init__(
        self,
        model: DecodeModel,
        budget: KvBudget,
        *,
        policy: RoundRobin | Batched = RoundRobin(),  # noqa: B008 (frozen)
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._dims = ModelDims.from_model(model)
        self._pool = KvBlockPool(
            KvGeometry(
                n_layers=self._dims.n_layers,
                n_kv_heads=self._dims.n_kv_heads,
                head_dim=self._dims.head_dim,
                num_blocks=budget.num_blocks,
                block_size=budget.block_size,
                elem_size=dtype.itemsize,
            )
        )
        self._model = model
        self.policy = policy
        self._device, self._dtype = torch.device(device), dtype
        self._sessions: dict[SessionId, SessionState] = {}
        self._handles: dict[SessionId, SessionHandle] = {}
        self._next_id = 0

    # -- capacity and cost ---------------------------------------------------------------------

    @property
    def kv_free_blocks(self) -> int:
        """Blocks that no session has reserved."""
        return self._pool.free_blocks

    @property
    def kv_bytes_resident(self) -> int:
        """Bytes that the live sessions have reserved."""
        return self._pool.kv_bytes_resident

    def kv_capacity(self) -> PoolCapacity:
        """The budget's geometry, and what of it is free."""
        return self._pool.capacity()

    def kv_blocks_required(self, prompt_len: int, max_new_tokens: int) -> int:
        """The blocks that :meth:`add_session` would reserve."""
        return self._pool.blocks_required(0, prompt_len + max_new_tokens)

    # -- sessions ------------------------------------------------------------------------------

    def add_session(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
        *,
        eos_ids: Iterable[int] = (),
        max_new_tokens: int,
    ) -> SessionId:
        """Admit a session. A refusal takes no id and no block, and no cache is built for it.

        Raises:
            InvalidRequestError: an empty prompt, no tokens to generate, an id outside the vocabulary, or more
                tokens than the model's context.
            OutOfBlocksError: it does not fit beside the sessions that are there.
            CapacityError: it fits the budget, and the machine has no memory for its cache.
        """
        vocab_size = self._model.vocab_size()
        check_request(
            prompt, sampling, max_new_tokens, vocab_size=vocab_size, max_context=self._model.max_context()
        )
        need = self.kv_blocks_required(len(prompt), max_new_tokens)
        if need > self.kv_free_blocks:
            raise OutOfBlocksError(need, self.kv_free_blocks)
        session = SessionState(
            SessionId(self._next_id),
            self._dims,
            vocab_size,
            prompt,
            sampling,
            eos_ids=eos_ids,
            max_new_tokens=max_new_tokens,
            device=self._device,
            dtype=self._dtype,
        )
        handle = self._pool.open()
        self._pool.append(handle, len(prompt) + max_new_tokens)
        self._sessions[session.id], self._handles[session.id] = session, handle
        self._next_id += 1
        return session.id

    def session(self, id: SessionId) -> SessionState:
        """The state of a session that has not been reaped.

        Raises:
            UnknownSessionError: there is none of this id.
        """
        if id not in self._sessions:
            raise UnknownSessionError(id)
        return self._sessions[id]

    def session_new_tokens(self, id: SessionId) -> list[int] | None:
        """What a session has generated so far; None for an unknown id."""
        session = self._sessions.get(id)
        return None if session is None else session.new_tokens

    def cancel(self, id: SessionId) -> None:
        """End a session; one that has finished keeps its reason.

        Raises:
            UnknownSessionError: there is none of this id.
        """
        self.session(id).finish(FinishReason.CANCELLED)

    @property
    def is_all_finished(self) -> bool:
        """Whether no session can advance."""
        return not any(session.is_ready for session in self._sessions.values())

    def reap_finished(self) -> list[tuple[SessionId, list[int]]]:
        """Forget the finished sessions and free what they hold; ``(id, prompt + generated)`` of each."""
        done = [session for session in self._sessions.values() if not session.is_ready]
        for session in done:
            del self._sessions[session.id]
            self._pool.discard(self._handles.pop(session.id))
            session.cache.release()
            _forget_locals(session.error)
        return [(session.id, session.tokens) for session in done]

    def run_to_completion(self) -> list[tuple[SessionId, list[int]]]:
        """Step until every session has finished; ``(id, prompt + generated)`` of each, none reaped."""
        while not self.is_all_finished:
            self.step()
        return [(session.id, list(session.tokens)) for session in self._sessions.values()]

    # -- the step ------------------------------------------------------------------------------

    def step(self) -> StepReport:
        """Run every waiting prompt and sample its first token, then advance every decoding session by one.

        A session that fails finishes with its error; no other is touched and nothing is raised.
        """
        report = StepReport()
        for session in self._in_phase(SessionPhase.PREFILL):
            self._advance(session, session.tokens, report)
        ready = self._in_phase(SessionPhase.DECODE)
        if isinstance(self.policy, Batched) and self._model.supports_batched_decode():
            passes = list(batches(ready, self.policy.max_batch))
        else:
            passes = [[session] for session in ready]
        for sessions in passes:
            if len(sessions) == 1:
                self._advance(sessions[0], sessions[0].tokens[-1:], report)
            else:
                self._advance_together(sessions, report)
        return report

    def _in_phase(self, phase: SessionPhase) -> list[SessionState]:
        return [session for session in self._sessions.values() if session.phase is phase]

    def _advance(self, session: SessionState, tokens: Sequence[int], report: StepReport) -> None:
        try:
            logits = self._model.forward_with_kv_context_persistent(
                tokens, session.cache, session.decode_session
            )
            rows = self._checked(logits[None], 1)
        except Exception as error:  # whatever a model raises is its session's end, not the scheduler's
            self._fail([session], error, report)
        else:
            self._sample([session], rows, report)

    def _advance_together(self, sessions: list[SessionState], report: StepReport) -> None:
        caches = [session.cache for session in sessions]
        last = [session.tokens[-1] for session in sessions]
        try:
            logits = self._model.build_batched_decode_logits(caches, last, self._device, self._dtype)
            rows = self._checked(logits, len(sessions))
        except Exception as error:  # as above; no serial retry, since a cache may have been written
            self._fail(sessions, error, report)
        else:
            report.used_batched_arm = True
            self._sample(sessions, rows, report)

    def _checked(self, logits: Tensor, rows: int) -> Tensor:
        shape = (rows, self._model.vocab_size())
        if tuple(logits.shape) != shape or logits.dtype != torch.float32:
            raise ModelContractError(
                f"{type(self._model).__name__} returned logits {list(logits.shape)} of {logits.dtype}",
                needed=f"float32 {list(shape)}",
                remedy="return one row per session",
            )
        return logits

    def _sample(self, sessions: list[SessionState], logits: Tensor, report: StepReport) -> None:
        outcomes = sample(logits, [session.sampler for session in sessions])
        for session, outcome in zip(sessions, outcomes, strict=True):
            if isinstance(outcome, Exception):
                self._fail([session], outcome, report)
                continue
            session.append(outcome)
            report.advanced.append(session.id)
            if not session.is_ready:
                report.finished.append(session.id)

    def _fail(self, sessions: list[SessionState], error: Exception, report: StepReport) -> None:
        for session in sessions:
            session.finish(FinishReason.ERROR, error)
            report.errored.append((session.id, error))
            report.finished.append(session.id)


def _forget_locals(error: BaseException | None) -> None:
    """Clear the variables of a traceback: they would hold views of the cache as long as the error lives."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
