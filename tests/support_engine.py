"""Engines that are watched: what each request samples from, whose every block is, and what it says alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import attrs
import torch
from support_models import distance, feed, new_cache
from support_paged import TOLERANCE, ids, poison_free, pool_for
from torch import Tensor

from fuel_core.contracts import DecodeModel, FinishReason, RaggedBatch, SamplingParams, hookimpl
from fuel_core.engine import Engine
from fuel_core.engine.served import ServedSession
from fuel_core.layers import Decoder, Step
from fuel_core.sampling import SamplerState, sample
from fuel_core.schedule import SessionId, StepReport
from fuel_core.schedule.session import SessionPhase

# --- requests


@attrs.frozen
class Ask:
    """A request: greedy, or sampled where it has a seed."""

    prompt: tuple[int, ...]
    max_new: int = 5
    seed: int | None = None
    eos: frozenset[int] = frozenset()
    n: int = 1

    def sampling(self, sample: int = 0) -> SamplingParams:
        """Of one of its samples, as a request of its own."""
        if self.seed is None:
            return SamplingParams()
        return SamplingParams(temperature=1.0, seed=self.seed + sample)

    def blocks(self, size: int) -> int:
        """What one sample may come to hold."""
        return -(-(len(self.prompt) + self.max_new - 1) // size)


def ask(length: int, max_new: int = 5, *, start: int = 0, **more: Any) -> Ask:
    """A request whose prompt is like no other's."""
    return Ask(ids(length, seed=1000 * start + length), max_new, **more)


@cache
def alone(model: DecodeModel, request: Ask, number: int = 0) -> tuple[list[int], Tensor]:
    """What a sample says by itself over a contiguous cache: new tokens, and logits ``[n, vocab]``."""
    sampling, cache = request.sampling(number), new_cache(model, len(request.prompt) + request.max_new)
    state = SamplerState(sampling, request.prompt, eos_ids=request.eos, vocab_size=model.vocab_size())
    rows, tokens = [feed(model, cache, *request.prompt)], list[int]()
    while True:
        [token] = sample(rows[-1][None], [state])
        assert isinstance(token, int)
        tokens.append(token)
        if token in request.eos or len(tokens) == request.max_new:
            return tokens, torch.stack(rows)
        rows.append(feed(model, cache, token))


# --- models


class WatchedModel(Decoder):
    """A real model that keeps what each ragged pass was given, and fails where it is told to.

    Attributes:
        passes: the tokens of each session of each pass.
        raises: what a pass raises that feeds this token.
        spoils: tokens after which a session's logits are NaN.
        during: called once, in the midst of the next pass.
    """

    def __init__(self, inner: Decoder) -> None:
        super().__init__(inner.parts)
        self.inner = inner
        self.passes: list[tuple[tuple[int, ...], ...]] = []
        self.raises: dict[int, BaseException] = {}
        self.spoils: set[int] = set()
        self.during: Callable[[], None] | None = None

    def layer(self, i: int, x: Tensor, step: Step) -> Tensor:
        """The inner model's; the last one raises, when every byte has been written."""
        x = self.inner.layer(i, x, step)
        during, self.during = self.during, None
        if during is not None:
            during()
        given = {token for tokens in self.passes[-1] for token in tokens}
        if i == self.n_layers() - 1 and (bad := given & self.raises.keys()):
            raise self.raises[bad.pop()]
        return x

    @hookimpl
    def forward_paged_ragged(self, batch: RaggedBatch) -> Tensor:
        """See :meth:`RaggedDecodeModel.forward_paged_ragged`."""
        self.passes.append(batch.tokens)
        rows = super().forward_paged_ragged(batch)
        spoilt = [bool(self.spoils & set(tokens)) for tokens in batch.tokens]
        return rows.masked_fill(torch.tensor(spoilt)[:, None], torch.nan)


# --- engines


class WatchedEngine(Engine):
    """An engine that keeps the logits it samples from, and is audited and poisoned after each step.

    Whoever goes in must be the oldest of those outside, and whoever is moved out the newest of those inside.
    ``swaps`` moves every session to the host and back before each step.
    """

    def __init__(self, *args: Any, swaps: bool = False, **limits: Any) -> None:
        super().__init__(*args, **limits)
        self.rows: dict[SessionId, list[Tensor]] = defaultdict(list)
        self.swaps = swaps

    def _observe(self, session: ServedSession, logits: Tensor) -> None:
        self.rows[session.id].append(logits.clone())

    def _restore(self) -> None:
        before = list(self._preempted)
        super()._restore()
        assert before[len(before) - len(self._preempted) :] == list(self._preempted)

    def _admit(self) -> None:
        before = list(self._waiting)
        super()._admit()
        assert before[len(before) - len(self._waiting) :] == list(self._waiting)
        assert not self._preempted or len(before) == len(self._waiting), "those outside come back first"

    def _preempt(self, session: ServedSession) -> None:
        assert session.id == max(each.id for each in self._running)
        super()._preempt(session)

    def step(self) -> StepReport:
        """See :meth:`Engine.step`."""
        for session in reversed(list(self._running)) if self.swaps else ():
            self._preempt(session)
        report = super().step()
        audit(self)
        poison_free(self.pool)
        return report

    def logits(self, id: SessionId) -> Tensor:
        """What a session was sampled from, ``[n, vocab]``."""
        return torch.stack(self.rows[id])


def engine_of(
    model: Decoder,
    num_blocks: int = 64,
    block_size: int = 4,
    *,
    shuffled: int | None = None,
    swaps: bool = False,
    **limits: Any,
) -> WatchedEngine:
    """A watched engine over a poisoned pool."""
    pool = pool_for(model, num_blocks, block_size, shuffled=shuffled)
    return WatchedEngine(model, pool, swaps=swaps, **limits)


def submit(engine: Engine, *requests: Ask) -> list[tuple[Ask, int, SessionId]]:
    """Queue requests: each sample with its number and id."""
    queued = []
    for request in requests:
        queued += [(request, number, id) for number, id in enumerate(_submit(engine, request))]
    return queued


def _submit(engine: Engine, request: Ask) -> list[SessionId]:
    return engine.submit(
        request.prompt,
        request.sampling(),
        eos_ids=request.eos,
        max_new_tokens=request.max_new,
        n=request.n,
    )


def serve(engine: WatchedEngine, model: DecodeModel, *requests: Ask) -> list[SessionId]:
    """Run requests side by side to their end, and see that each says what it says alone."""
    queued = submit(engine, *requests)
    engine.run_to_completion()
    assert_as_alone(engine, model, queued)
    return [id for _, _, id in queued]


def assert_as_alone(
    engine: WatchedEngine, model: DecodeModel, queued: Iterable[tuple[Ask, int, SessionId]]
) -> None:
    """Each finished session took the tokens that it takes alone, from the same logits."""
    for request, number, id in queued:
        tokens, rows = alone(model, request, number)
        assert engine.session(id).error is None
        assert distance(engine.logits(id), rows) < TOLERANCE
        assert engine.session_new_tokens(id) == tokens
        ended = FinishReason.STOP if tokens[-1] in request.eos else FinishReason.LENGTH
        assert engine.session(id).finish_reason is ended


def run_steps(engine: Engine, count: int) -> None:
    """That many steps, whether they do anything or not."""
    for _ in range(count):
        engine.step()


# --- whose every block is


def audit(engine: Engine) -> None:
    """Free blocks, those that only the cache holds and those that sessions hold are all there are."""
    core, total = engine.pool.core, engine.pool.geometry.num_blocks
    running = [session.handle for session in engine._running]
    cached = list(engine._index._holders.values())
    assert sorted(core._tables) == sorted([*running, *cached])  # type: ignore[type-var]
    tables = {handle: core.session_block_table(handle) for handle in core._tables}
    held = {block for handle in running for block in tables[handle]}  # type: ignore[index]
    only_cached = {block for holder in cached for block in tables[holder]} - held
    assert core.free_blocks + len(only_cached) + len(held) == total
    assert engine.cached_blocks == len(only_cached)
    counts = Counter(block for table in tables.values() for block in table)
    assert [core.block_refcount(block) for block in range(total)] == [counts[b] for b in range(total)]
    assert {core.filled_tokens(holder) for holder in cached} <= {core.geometry.block_size}
    _audit_sessions(engine)


def _audit_sessions(engine: Engine) -> None:
    queues: Mapping[str, Sequence[ServedSession]] = {
        "waiting": engine._waiting,
        "running": engine._running,
        "preempted": engine._preempted,
    }
    places = Counter(session.id for queue in queues.values() for session in queue)
    parents = [session for queue in queues.values() for session in queue]
    places.update(fork.id for parent in parents for fork in parent.forks if fork.is_ready)
    for session in engine._sessions.values():
        assert places[session.id] == session.is_ready, "each live session stands in one place"
        if not session.is_ready:
            assert (session.handle, session.image, session.forks) == (None, None, [])
    for name, queue in queues.items():
        ages = [session.id for session in queue]
        assert ages == sorted(ages), f"{name} by age"
        for session in queue:
            has = (session.handle is not None, session.image is not None)
            assert has == (name == "running", name == "preempted")
    waiting_forks = [fork for session in engine._running for fork in session.forks if fork.is_ready]
    assert len(engine._running) + len(waiting_forks) <= engine._max_batch
    for session in engine._running:
        assert engine._pending(session), "what is complete has been sampled"
        assert session.phase is not SessionPhase.DECODE or len(engine._pending(session)) == 1


def drain(engine: Engine) -> None:
    """Reap what has finished and give up the cache: nothing is left."""
    audit(engine)
    engine.reap_finished()
    engine._index.reclaim(engine.pool.geometry.num_blocks)
    assert not engine._sessions
    assert not engine.pool.core._tables
    assert engine.pool.core.free_blocks == engine.pool.geometry.num_blocks
