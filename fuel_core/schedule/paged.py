"""The paged scheduler: sessions in the blocks of one shared pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from fuel_core.contracts.errors import (
    InvalidRequestError,
    OutOfBlocksError,
    SessionNotResidentError,
    UnknownPrefixError,
    UnsupportedTierError,
)
from fuel_core.contracts.requests import check_request
from fuel_core.contracts.sampling import SamplingParams
from fuel_core.contracts.session import PagedDecodePlan
from fuel_core.contracts.state import ModelDims
from fuel_core.contracts.tiers import PagedDecodeModel
from fuel_core.kv.device_pool import DeviceKvPool
from fuel_core.kv.geometry import KvBudget
from fuel_core.kv.growth import JointGrowth
from fuel_core.kv.pool import PrefixId
from fuel_core.schedule.paged_session import PagedSession, check_begins
from fuel_core.schedule.paged_table import WAY_OUT, PagedTable
from fuel_core.schedule.policy import Batched, StepReport, batches
from fuel_core.schedule.session import SessionId, SessionPhase
from fuel_core.schedule.table import check_model, geometry_of


class PagedSessionScheduler(PagedTable):
    """Runs sessions on a model's paged tier, over one pool.

    Admission is optimistic: nothing is reserved, and only a prompt that the whole pool would not hold is
    refused. A session that the pool cannot grow finishes with OutOfBlocksError, and no other does. Prompts
    are fed token by token. A finished session keeps its blocks until it is reaped: reap between steps.

    Args:
        model: the shared weights.
        budget: the blocks of the pool.
        device, dtype: of the pool.

    Attributes:
        pool: the sessions' keys and values.

    Raises:
        InvalidRequestError: an argument of another type, or no device of this machine.
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
        check_model(model)
        if not isinstance(model, PagedDecodeModel):
            raise UnsupportedTierError(
                f"{type(model).__name__}, which has no paged tier",
                needed="a PagedDecodeModel",
                remedy="serve it with SessionScheduler",
            )
        geometry = geometry_of(ModelDims.from_model(model), budget, dtype)
        super().__init__(model, DeviceKvPool(geometry, dtype, device))
        self._paged = model
        self.plan = PagedDecodePlan.PLAN_ONCE
        self._prefixes: dict[PrefixId, tuple[int, ...]] = {}

    @property
    def plan(self) -> PagedDecodePlan:
        """Whether a session's decode step is built once or every time; it may be set at any time.

        Raises:
            InvalidRequestError: set to something else than a PagedDecodePlan.
        """
        return self._plan

    @plan.setter
    def plan(self, plan: PagedDecodePlan) -> None:
        if not isinstance(plan, PagedDecodePlan):
            raise InvalidRequestError(
                f"plan = {plan!r}",
                needed="PagedDecodePlan.PLAN_ONCE or PagedDecodePlan.REPLAN",
                remedy="set one of them",
            )
        self._plan = plan

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

        Args:
            prompt: its ids.
            sampling: how it samples; stop strings are refused, since a session is of ids.
            eos_ids: ids of which any ends it; none by default, so pass ``loaded.eos_ids`` for a text.
            max_new_tokens: the most that it may generate.

        Raises:
            InvalidRequestError: an empty prompt, no tokens to generate, an id outside the vocabulary, stop
                strings, or more tokens than the model's context.
            CapacityError: the prompt alone needs more blocks than the pool has, free or not: ``need`` of
                ``have``. In every case nothing has changed.
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

        Args: those of :meth:`add_session`, after the ``prefix`` that :meth:`register_prefix` gave.

        Raises:
            InvalidRequestError: as :meth:`add_session`, or a prompt with nothing after the prefix.
            CapacityError: as :meth:`add_session`.
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
        self._check_prompt_fits(len(prompt))
        session = PagedSession(
            SessionId(self._next_id),
            vocab_size,
            prompt,
            sampling,
            eos_ids=eos_ids,
            max_new_tokens=max_new_tokens,
        )
        most = self.kv_blocks_required(len(prompt), max_new_tokens)
        session.max_blocks = min(most, self.pool.geometry.num_blocks)
        return session

    # -- prefixes ------------------------------------------------------------------------------

    def register_prefix(self, donor: SessionId, n: int) -> PrefixId:
        """Keep the blocks of a session's first ``n`` tokens, whatever becomes of the session.

        Raises:
            UnknownSessionError: there is no such session.
            InvalidRequestError: ``n`` is no integer.
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
        self.pool.core.prefix_blocks(prefix)  # refuses what was released through the pool
        if prefix not in self._prefixes:
            raise UnknownPrefixError(prefix)
        return self._prefixes[prefix]

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
            self._pass([session], partial(self._prefill, session), report)
        for sessions in batches(self._in_phase(SessionPhase.DECODE), self._held, max_batch):
            if len(sessions) == 1:
                self._decode(sessions[0], report)
            else:
                self._decode_together(sessions, report)
        return report

    def _prefill(self, session: PagedSession) -> Tensor:
        """Feed the prompt after what the session shares, token by token; ``[1, vocab]`` of the last."""
        for token in session.tokens[self._held(session) :]:
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
        """Those that are in the pool and that its free blocks suffice for, first come.

        The others finish before the pass is run: within it, each would end them all.
        """
        growth = JointGrowth(self.pool.core)
        return [session for session in sessions if self._count_in(session, growth, report)]

    def _count_in(self, session: PagedSession, growth: JointGrowth, report: StepReport) -> bool:
        try:
            self.pool.core.session_block_table(session.handle)  # refuses what was evicted through the pool
            need, have = growth.cost(session.handle, 1), self.kv_free_blocks - growth.need
            if need > have:
                raise OutOfBlocksError(need, have, remedy=WAY_OUT)
        except (SessionNotResidentError, OutOfBlocksError) as error:
            self._fail([session], error, report)
            return False
        growth.add(session.handle, 1)
        return True
