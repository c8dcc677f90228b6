"""Continuous batching over one block pool: the policy that most users want, on the core's mechanisms."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Hashable, Iterable, Sequence

import attrs
from torch import Tensor

from fuel_core.contracts import DecodeModel, FinishReason, ModelDims, RaggedBatch, SamplingParams
from fuel_core.contracts.errors import CapacityError, InvalidRequestError
from fuel_core.contracts.requests import check_request
from fuel_core.engine.served import EngineStats, ServedSession, check_limits, ragged
from fuel_core.kv import DeviceKvPool
from fuel_core.kv.prefix_index import PrefixIndex
from fuel_core.layers.paged import blocks_needed, check_pool
from fuel_core.schedule.policy import StepReport
from fuel_core.schedule.session import SessionId, SessionPhase
from fuel_core.schedule.table import SessionTable


class Engine(SessionTable[ServedSession]):
    """Serves any number of requests from one pool, each step in one pass of the model's ragged tier.

    A step takes a token of every decoding session, then chunks of prompts up to ``token_budget``. Requests
    are admitted in order while their prompts fit. When the pool runs dry, cached blocks are given up, least
    recently used first; then the newest session is moved to the host, to come back before anything new is
    admitted, oldest first. So nothing fails that could have waited.

    Args:
        model: the weights.
        pool: the keys and values of all sessions; the engine's own.
        max_batch: the most sessions that run at a time.
        token_budget: the most prompt and output tokens of a pass, as long as decoding sessions leave room.
        watermark: the part of the pool that admission leaves free for the sessions to grow into.
        namespace: what changes keys and values beside the tokens, such as an adapter.

    Attributes:
        stats: what it has done.

    Raises:
        UnsupportedTierError: the model has no ragged tier.
        NonUniformStateError, ModelContractError: its state is of another kind or shape than the pool's.
        InvalidRequestError: a limit below 1, or a watermark outside [0, 1).
    """

    def __init__(
        self,
        model: DecodeModel,
        pool: DeviceKvPool,
        *,
        max_batch: int = 64,
        token_budget: int = 512,
        watermark: float = 0.01,
        namespace: Hashable = (),
    ) -> None:
        check_limits(max_batch, token_budget, watermark)
        super().__init__(model)
        self._ragged = ragged(model)
        check_pool(pool, ModelDims.from_model(model), pool.device)
        self.pool = pool
        self._max_batch, self._token_budget = max_batch, token_budget
        self._spare = max(1, int(watermark * pool.geometry.num_blocks))
        self._index = PrefixIndex(pool.core, namespace)
        self.stats = EngineStats(self._index.stats)
        # By age, each of them.
        self._waiting: deque[ServedSession] = deque()
        self._running: list[ServedSession] = []
        self._preempted: deque[ServedSession] = deque()
        # A stream that is garbage cancels its sessions wherever the collector runs: in a step too.
        self._in_step = False
        self._cancelled: list[ServedSession] = []

    @property
    def cached_blocks(self) -> int:
        """Blocks that only the prefix cache holds."""
        return self._index.reclaimable()

    # -- requests ------------------------------------------------------------------------------

    def check_model(self, model: DecodeModel) -> None:
        """Refuse another model than the engine's own.

        Raises:
            InvalidRequestError: it is another.
        """
        if model is not self._model:
            raise InvalidRequestError(
                "an engine over another model",
                needed="one over the model that is asked",
                remedy="make it with build_engine(loaded)",
            )

    def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
        *,
        eos_ids: Iterable[int] = (),
        max_new_tokens: int,
        n: int = 1,
    ) -> list[SessionId]:
        """Queue a request for ``n`` samples of a prompt, which share its blocks.

        Where ``sampling`` has a seed, sample i has that seed plus i.

        Raises:
            InvalidRequestError: it could never be served, whatever else runs.
            CapacityError: it needs more blocks than the pool has. In both cases nothing has changed.
        """
        self.check(prompt, sampling, max_new_tokens, n)
        eos = frozenset(eos_ids)
        samples = []
        for i in range(n):
            seed = None if sampling.seed is None else (sampling.seed + i) % 2**64
            params = attrs.evolve(sampling, seed=seed)
            samples.append(self._new(prompt, params, eos, max_new_tokens))
        first, *rest = samples
        self._queue(first, rest)
        return [session.id for session in samples]

    def check(self, prompt: Sequence[int], sampling: SamplingParams, max_new_tokens: int, n: int = 1) -> None:
        """Refuse what :meth:`submit` would refuse.

        Raises:
            InvalidRequestError: it could never be served, whatever else runs.
            CapacityError: it needs more blocks than the pool has.
        """
        vocab_size, max_context = self._model.vocab_size(), self._model.max_context()
        check_request(prompt, sampling, max_new_tokens, vocab_size=vocab_size, max_context=max_context)
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= self._max_batch:
            raise InvalidRequestError(
                f"n = {n!r} samples",
                needed=f"an integer in [1, {self._max_batch}]",
                remedy="raise max_batch or ask twice",
            )
        # The last token is never fed, so it needs no room.
        need, have = (
            self.pool.core.blocks_required(0, len(prompt) + max_new_tokens - 1),
            self.pool.geometry.num_blocks,
        )
        if need > have:
            raise CapacityError(
                f"a request that needs {need} KV blocks",
                needed=f"at most {have}, which is all there are",
                remedy="lower max_new_tokens, shorten the prompt, or give more KV memory",
                need=need,
                have=have,
            )

    def _new(
        self, prompt: Sequence[int], params: SamplingParams, eos_ids: frozenset[int], max_new_tokens: int
    ) -> ServedSession:
        session = ServedSession(
            SessionId(self._next_id),
            self._model.vocab_size(),
            prompt,
            params,
            eos_ids=eos_ids,
            max_new_tokens=max_new_tokens,
        )
        self._keep(session)
        return session

    def _queue(self, first: ServedSession, forks: list[ServedSession]) -> None:
        first.forks, first.waits_for_parent = forks, False
        for fork in forks:
            fork.waits_for_parent = True
        insort(self._waiting, first, key=_age)

    def cancel(self, id: SessionId) -> None:
        """End a session and free all that it holds; one that has finished keeps its reason.

        Raises:
            UnknownSessionError: there is none of this id.
        """
        super().cancel(id)
        self._cancelled.append(self.session(id))
        if not self._in_step:
            self._leave_cancelled()

    def _leave_cancelled(self) -> None:
        while self._cancelled:
            session = self._cancelled.pop()
            session.finish(FinishReason.CANCELLED)  # the step may have given it a token since
            self._leave(session)

    def _leave(self, session: ServedSession) -> None:
        """Take a finished session out of every queue, and its blocks out of the pool."""
        for queue in (self._waiting, self._running, self._preempted):
            if session in queue:
                queue.remove(session)
        if session.handle is not None:
            self.pool.core.discard(session.handle)
        session.handle = session.image = None
        waiting = [fork for fork in session.forks if fork.is_ready]
        session.forks = []
        if waiting:  # the prompt is still to be computed, by the first of those that wait for it
            self._queue(waiting[0], waiting[1:])

    def _release(self, session: ServedSession) -> None:
        """Nothing is left: it went when the session finished."""

    # -- the step ------------------------------------------------------------------------------

    def step(self) -> StepReport:
        """Restore and admit what fits, then run one pass.

        A session that fails finishes with its error; no other is touched and nothing is raised.
        """
        report = StepReport()
        self._in_step = True
        try:
            self._restore()
            self._admit()
            if batch := self._make_room(self._batch()):
                self._run(batch, report)
        finally:
            self._in_step = False
            self._leave_cancelled()
        return report

    def _has_seats(self, session: ServedSession) -> bool:
        """Whether it and those that will fork from it may run beside the others; alone they always may."""
        taken = sum(each.seats for each in self._running)
        return not taken or taken + session.seats <= self._max_batch

    def _has_blocks(self, need: int) -> bool:
        """Whether blocks can be had beside those that the others are about to take, and some to grow into."""
        if not self._running:
            return True
        need += self._spare + self._need([(each, self._pending(each)) for each in self._running])
        short = need - self.pool.core.free_blocks
        return short <= 0 or self._index.reclaimable(short) == short

    def _restore(self) -> None:
        while self._preempted:
            session = self._preempted[0]
            need = self.pool.core.blocks_required(0, len(session.tokens))
            if not self._has_seats(session) or not self._has_blocks(need):
                return
            assert session.image is not None
            self._free(self.pool.core.blocks_required(0, session.image.tokens))
            session.handle = self.pool.swap_in(session.image)
            session.image = None
            self._enter(self._preempted.popleft())

    def _admit(self) -> None:
        while self._waiting and not self._preempted:
            session = self._waiting[0]
            if not self._has_seats(session) or not self._has_blocks(self._prompt_blocks(session)):
                return
            session.handle = self.pool.core.open()
            self._index.take(session.tokens, session.handle)
            self._enter(self._waiting.popleft())

    def _prompt_blocks(self, session: ServedSession) -> int:
        """The blocks that its prompt takes, but for those that others hold and it can share."""
        return self.pool.core.blocks_required(0, len(session.tokens)) - self._index.in_use(session.tokens)

    def _enter(self, session: ServedSession) -> None:
        insort(self._running, session, key=_age)

    def _pending(self, session: ServedSession) -> list[int]:
        """The tokens that are not in the pool yet: of a prompt, or the one that was sampled last."""
        return session.tokens[self._held(session) :]

    def _held(self, session: ServedSession) -> int:
        return 0 if session.handle is None else self.pool.core.filled_tokens(session.handle)

    def _rewind(self, session: ServedSession, held: int) -> None:
        if session.handle is not None and held < self._held(session):
            # Were it still indexed, its last block would be shared, and a full pool has none to copy it to.
            self._index.forget(session.chain, held // self.pool.geometry.block_size)
            self.pool.core.truncate(session.handle, held)

    def _batch(self) -> list[tuple[ServedSession, list[int]]]:
        """Decoding sessions first, then prompts in order up to the budget."""
        for session in self._running:  # one whose step was interrupted computes its last token again
            self._rewind(session, len(session.tokens) - 1)
        pending = [(session, self._pending(session)) for session in self._running]
        batch = [(session, tokens) for session, tokens in pending if session.phase is SessionPhase.DECODE]
        room = self._token_budget - len(batch)
        for session, tokens in pending:
            if session.phase is SessionPhase.PREFILL and room > 0:
                batch.append((session, tokens[:room]))
                room -= len(tokens[:room])
        return batch

    def _make_room(
        self, batch: list[tuple[ServedSession, list[int]]]
    ) -> list[tuple[ServedSession, list[int]]]:
        """See that the pool can take the batch: give up cached blocks, then move the newest sessions out."""
        while batch and not self._free(self._need(batch)):
            newest = self._running[-1]
            if len(self._running) == 1:  # it fits alone, or it would not have been taken
                break
            self._preempt(newest)
            batch = [(session, tokens) for session, tokens in batch if session is not newest]
        return batch

    def _need(self, batch: list[tuple[ServedSession, list[int]]]) -> int:
        handles = [session.handle for session, _ in batch if session.handle is not None]
        return blocks_needed(self.pool, handles, [len(tokens) for _, tokens in batch])

    def _free(self, need: int) -> bool:
        short = need - self.pool.core.free_blocks
        return short <= 0 or self._index.reclaim(short) == short

    def _preempt(self, session: ServedSession) -> None:
        assert session.handle is not None
        session.image = self.pool.swap_out(session.handle)
        session.handle = None
        self._running.remove(session)
        self._preempted.appendleft(session)  # the newest goes first, so the oldest stands first
        self.stats.preemptions += 1

    def _run(self, batch: list[tuple[ServedSession, list[int]]], report: StepReport) -> None:
        sessions = [session for session, _ in batch]
        tokens = tuple(tuple(new) for _, new in batch)
        handles = tuple(session.handle for session in sessions if session.handle is not None)
        before = [(len(session.tokens), self._held(session)) for session in sessions]
        try:
            logits = self._ragged.forward_paged_ragged(RaggedBatch(self.pool, handles, tokens))
            logits = self._checked(logits, len(sessions))
            self._index_blocks(sessions)
            self._sample_complete(sessions, logits, report)
        except Exception as error:
            # A model that raises leaves the pool as it was; one that returns too little does not.
            left = []
            for one, (count, held) in zip(batch, before, strict=True):
                if len(one[0].tokens) == count and one[0].is_ready:
                    self._rewind(one[0], held)
                    left.append(one)
            self._run_apart(left, error, report)
            return
        report.used_batched_arm |= len(sessions) > 1
        self.stats.passes += 1
        self.stats.tokens += sum(map(len, tokens))

    def _run_apart(
        self, batch: list[tuple[ServedSession, list[int]]], error: Exception, report: StepReport
    ) -> None:
        """Find whose fault it was: each by itself, until one fails alone."""
        if len(batch) > 1:
            for one in batch:
                self._run([one], report)
            return
        for session, _ in batch:
            self._fail([session], error, report)
            self._leave(session)

    def _index_blocks(self, sessions: list[ServedSession]) -> None:
        size = self.pool.geometry.block_size
        for session in sessions:
            assert session.handle is not None
            filled = self.pool.core.filled_tokens(session.handle)
            if filled // size > len(session.chain):
                self._index.add(session.tokens[:filled], session.handle, session.chain)

    def _sample_complete(self, sessions: list[ServedSession], logits: Tensor, report: StepReport) -> None:
        """Sample for every session that has no tokens pending, and for those that fork from it."""
        rows: list[int] = []
        complete: list[ServedSession] = []
        for row, session in enumerate(sessions):
            if not self._pending(session):
                family = [session, *self._fork(session)]
                complete += family
                rows += [row] * len(family)
        if complete:
            self._sample(complete, logits[rows], report)
        for session in complete:
            if not session.is_ready:
                self._leave(session)

    def _fork(self, parent: ServedSession) -> list[ServedSession]:
        """Let those that waited for a prompt share its blocks."""
        forks, parent.forks = [fork for fork in parent.forks if fork.is_ready], []
        for fork in forks:
            assert parent.handle is not None
            fork.handle = self.pool.core.open()
            self.pool.core.splice(
                parent.handle, fork.handle, 0, len(self.pool.core.session_blocks(parent.handle))
            )
            fork.waits_for_parent = False
            self._enter(fork)
        return forks


def _age(session: ServedSession) -> int:
    return session.id
