"""The contiguous scheduler: K sessions with a cache each, over one model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from fuel_core.contracts.errors import OutOfBlocksError
from fuel_core.contracts.requests import check_request
from fuel_core.contracts.sampling import SamplingParams
from fuel_core.contracts.state import ModelDims
from fuel_core.contracts.tiers import DecodeModel
from fuel_core.kv.geometry import KvBudget, PoolCapacity
from fuel_core.kv.pool import KvBlockPool, SessionHandle
from fuel_core.kv.storage import device_of
from fuel_core.schedule.policy import Batched, RoundRobin, StepReport, batches, check_policy
from fuel_core.schedule.session import SessionId, SessionPhase, SessionState
from fuel_core.schedule.table import SessionTable, blocks_for, check_model, described, geometry_of


class SessionScheduler(SessionTable[SessionState]):
    """Runs sessions side by side on a model's core tier, and on its batched arm where the policy asks for it.

    It says what fits and does what it is told: which session is admitted when is the caller's choice.

    Args:
        model: the shared weights.
        budget: the KV memory that sessions reserve from, whole, when they are added.
        policy: ``RoundRobin()`` or ``Batched(max_batch)``; may be changed at any time.
        device, dtype: of the sessions' caches.

    A finished session keeps its blocks until it is reaped.

    Raises:
        InvalidRequestError: an argument of another type, or no device of this machine.
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
        check_model(model)
        self._dims = ModelDims.from_model(model)
        self._pool = KvBlockPool(geometry_of(self._dims, budget, dtype))
        super().__init__(model)
        self.policy = policy
        self._device, self._dtype = device_of(device), dtype
        self._handles: dict[SessionId, SessionHandle] = {}

    def __repr__(self) -> str:
        running = sum(session.is_ready for session in self._sessions.values())
        finished = len(self._sessions) - running
        return described(self, self.kv_capacity(), running=running, finished=finished)

    @property
    def policy(self) -> RoundRobin | Batched:
        """How decoding sessions advance; it may be set to another at any time.

        Raises:
            InvalidRequestError: set to something else than a policy.
        """
        return self._policy

    @policy.setter
    def policy(self, policy: RoundRobin | Batched) -> None:
        check_policy(policy)
        self._policy = policy

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
        """The blocks that :meth:`add_session` would reserve.

        Raises:
            InvalidRequestError: a negative count.
        """
        return blocks_for(self._pool, prompt_len, max_new_tokens)

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

        Args:
            prompt: its ids.
            sampling: how it samples; stop strings are refused, since a session is of ids.
            eos_ids: ids of which any ends it; none by default, so pass ``loaded.eos_ids`` for a text.
            max_new_tokens: the most that it may generate.

        Raises:
            InvalidRequestError: an empty prompt, no tokens to generate, an id outside the vocabulary, stop
                strings, or more tokens than the model's context.
            OutOfBlocksError: it does not fit beside the sessions that are there.
            CapacityError: it fits the budget, and the machine has no memory for its cache.
        """
        vocab_size = self._model.vocab_size()
        check_request(
            prompt, sampling, max_new_tokens, vocab_size=vocab_size, max_context=self._model.max_context()
        )
        need = self.kv_blocks_required(len(prompt), max_new_tokens)
        if need > self.kv_free_blocks:
            raise OutOfBlocksError(need, self.kv_free_blocks, remedy=self._way_out(need))
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
        self._handles[session.id] = handle
        return self._keep(session)

    def _way_out(self, need: int) -> str:
        if need > self._pool.geometry.num_blocks:
            return "lower max_new_tokens, shorten the prompt, or build the scheduler with more blocks"
        return "step until others finish and reap them: a finished session keeps its blocks until then"

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
            passes = list(batches(ready, lockstep, self.policy.max_batch))
        else:
            passes = [[session] for session in ready]
        for sessions in passes:
            if len(sessions) == 1:
                self._advance(sessions[0], sessions[0].tokens[-1:], report)
            else:
                self._advance_together(sessions, report)
        return report

    def _advance(self, session: SessionState, tokens: Sequence[int], report: StepReport) -> None:
        cache, holder = session.cache, session.decode_session
        forward = self._model.forward_with_kv_context_persistent
        self._pass([session], lambda: forward(tokens, cache, holder)[None], report)

    def _advance_together(self, sessions: list[SessionState], report: StepReport) -> None:
        caches = [session.cache for session in sessions]
        last = [session.tokens[-1] for session in sessions]
        forward = self._model.build_batched_decode_logits
        ran = self._pass(sessions, lambda: forward(caches, last, self._device, self._dtype), report)
        report.used_batched_arm |= ran

    def _held(self, session: SessionState) -> int:
        return session.cache.cached_len

    def _rewind(self, session: SessionState, held: int) -> None:
        session.cache.truncate(min(held, session.cache.cached_len))

    def _release(self, session: SessionState) -> None:
        self._pool.discard(self._handles.pop(session.id))
        session.cache.release()


def lockstep(session: SessionState) -> object:
    """What sessions of one batch have in common."""
    return session.cache.cached_len, session.cache.max_seq_len, session.cache.dtype
