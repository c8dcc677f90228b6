"""Continuous batching over one block pool: the policy that most users want, on the core's mechanisms."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import attrs
from torch import Tensor

from fuel_core.contracts import DecodeModel, ModelDims, RaggedBatch, SamplingParams
from fuel_core.contracts.errors import CapacityError, InvalidRequestError, counted
from fuel_core.contracts.requests import check_request, eos_set
from fuel_core.engine.admission import Admission, Batch
from fuel_core.engine.served import ServedSession, check_limits, ragged
from fuel_core.kv import DeviceKvPool
from fuel_core.layers.paged import check_pool
from fuel_core.schedule.policy import StepReport
from fuel_core.schedule.session import SessionId, SessionPhase
from fuel_core.schedule.table import replay_sampler


class Engine(Admission):
    """Serves any number of requests from one pool, each step in one pass of the model's ragged tier.

    A step takes a token of every decoding session, then chunks of prompts up to ``token_budget``. Requests
    are admitted in order while their prompts fit. When the pool runs dry, cached blocks are given up, least
    recently used first; then the newest session is moved to the host, to come back before anything new is
    admitted, oldest first. So nothing fails that could have waited, unless the host has no memory for it.

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
        InvalidRequestError: a limit below 1, a watermark outside [0, 1), or an argument of another type.
    """

    _unknown = "use an id that submit returned and that has not been reaped"

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
        self._ragged = ragged(model)
        _check_device_pool(pool)
        check_pool(pool, ModelDims.from_model(model), pool.device)
        super().__init__(model, pool, max_batch, watermark, namespace)
        self._token_budget = token_budget

    def __repr__(self) -> str:
        ready = sum(session.is_ready for session in self._sessions.values())
        running, preempted = len(self._running), len(self._preempted)
        blocks = self.pool.core.capacity()
        return (
            f"<{type(self).__name__} of {type(self._model).__name__}: {running} running, "
            f"{ready - running - preempted} waiting, {preempted} preempted; {blocks.total_blocks} blocks, "
            f"{blocks.free_blocks} free, {self.cached_blocks} cached>"
        )

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
        owner: object = None,
    ) -> list[SessionId]:
        """Queue a request for ``n`` samples of a prompt, which share its blocks.

        Args:
            prompt: its ids.
            sampling: how each samples; where it has a seed, sample i has that seed plus i. Stop strings are
                refused, since a session is of ids: :func:`generate` watches the text for them.
            eos_ids: ids of which any ends a sample; none by default, so pass ``loaded.eos_ids`` for a text.
            max_new_tokens: the most that each may generate.
            n: how many samples.
            owner: whose they are; see :meth:`owned`.

        Raises:
            InvalidRequestError: it could never be served, whatever else runs.
            CapacityError: it needs more blocks than the pool has. In both cases nothing has changed.
        """
        self.check(prompt, sampling, max_new_tokens, n)
        options = {"eos_ids": eos_set(eos_ids), "max_new_tokens": max_new_tokens, "owner": owner}
        samples = [self._sample_of(i, prompt, sampling, **options) for i in range(n)]
        with self._whole():
            self._queue(samples[0], samples[1:])
            self._keep(*samples)
        return [session.id for session in samples]

    def owned(self, owner: object) -> list[SessionId]:
        """The sessions, not reaped yet, that were submitted with this very ``owner``.

        It has each from the moment that the engine has it, so an interrupt of :meth:`submit` hides none.
        """
        return [session.id for session in self._sessions.values() if session.owner is owner]

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
        need = self.pool.core.blocks_required(0, len(prompt) + max_new_tokens - 1)
        have = self.pool.geometry.num_blocks
        if need > have:
            raise CapacityError(
                f"a request that needs {counted(need, 'KV block')}",
                needed=f"at most {have}, which is all there are",
                remedy="lower max_new_tokens, shorten the prompt, or give more KV memory",
                need=need,
                have=have,
            )

    def _sample_of(
        self, i: int, prompt: Sequence[int], params: SamplingParams, **options: Any
    ) -> ServedSession:
        seed = None if params.seed is None else (params.seed + i) % 2**64
        id, vocab_size = SessionId(self._next_id + i), self._model.vocab_size()
        return ServedSession(id, vocab_size, prompt, attrs.evolve(params, seed=seed), **options)

    # -- the step ------------------------------------------------------------------------------

    def step(self) -> StepReport:
        """Restore and admit what fits, then run one pass.

        A session that fails finishes with its error; no other is touched and nothing is raised. An interrupt
        comes out, and the next call repairs what it has cut short: no token and no block is lost.
        """
        self._busy = False  # where an interrupt has left it set
        with self._whole():
            self._advance()
        report, self._report = self._report, StepReport()
        return report

    def _advance(self) -> None:
        self._restore()
        self._admit()
        if batch := self._make_room(self._batch()):
            self._run(batch)

    def _batch(self) -> Batch:
        """Decoding sessions first, then prompts in order up to the budget."""
        pending = [(session, self._pending(session)) for session in self._running]
        batch = [(session, places) for session, places in pending if session.phase is SessionPhase.DECODE]
        room = self._token_budget - len(batch)
        for session, places in pending:
            if session.phase is SessionPhase.PREFILL and room > 0:
                batch.append((session, places[:room]))
                room -= len(places[:room])
        return batch

    def _run(self, batch: Batch) -> None:
        sessions = [session for session, _ in batch]
        tokens = tuple(tuple(session.tokens[places.start : places.stop]) for session, places in batch)
        handles = tuple(session.handle for session in sessions if session.handle is not None)
        before = [len(session.tokens) for session in sessions]
        try:
            logits = self._ragged.forward_paged_ragged(RaggedBatch(self.pool, handles, tokens))
            logits = self._checked(logits, len(sessions))
            for session, places in batch:
                session.held = places.stop
                self._index.keep(session)
            self._sample_complete(sessions, logits)
        except Exception as error:
            same = [count == len(session.tokens) for session, count in zip(sessions, before, strict=True)]
            self._run_apart([one for one, is_same in zip(batch, same, strict=True) if is_same], error)
            return
        self._report.used_batched_arm |= len(sessions) > 1
        self.stats.passes += 1
        self.stats.tokens += sum(map(len, tokens))

    def _run_apart(self, batch: Batch, error: Exception) -> None:
        """Find whose fault it was: each by itself, until one fails alone."""
        batch = [(session, places) for session, places in batch if session.is_ready]
        self._take_back(batch)
        if len(batch) == 1:
            self._end(batch[0][0], error)
            return
        for one in batch:
            self._run([one])

    def _take_back(self, batch: Batch) -> None:
        """Make what a pass has done to sessions undone, but for the tokens that they have taken."""
        for session, places in batch:
            self._rewind(session, places.start)
            replay_sampler(session)
        for session in list(self._running):
            if not session.is_ready:
                self._leave(session)
            elif not self._pending(session):  # a fork, which has not been sampled for
                self._rewind(session, len(session.tokens) - 1)
                replay_sampler(session)

    def _held(self, session: ServedSession) -> int:
        return session.held

    def _rewind(self, session: ServedSession, held: int) -> None:
        session.held = held
        if session.handle is not None and held < self.pool.core.filled_tokens(session.handle):
            # Were it still indexed, its last block would be shared, and a full pool has none to copy it to.
            self._index.release(session, held // self.pool.geometry.block_size)
            self.pool.core.truncate(session.handle, held)

    def _sample_complete(self, sessions: list[ServedSession], logits: Tensor) -> None:
        """Sample for every session that has no tokens pending, and for those that fork from it."""
        rows: list[int] = []
        complete: list[ServedSession] = []
        for row, session in enumerate(sessions):
            if not self._pending(session):
                family = [session, *self._fork(session)]
                complete += family
                rows += [row] * len(family)
        if complete:
            self._sample(complete, logits[rows], self._report)
        for session in complete:
            if not session.is_ready:
                self._leave(session)


def _check_device_pool(pool: object) -> None:
    if not isinstance(pool, DeviceKvPool):
        raise InvalidRequestError(
            f"a pool of type {type(pool).__name__}",
            needed="a DeviceKvPool",
            remedy="make the engine with build_engine(loaded), which makes its pool too",
        )
