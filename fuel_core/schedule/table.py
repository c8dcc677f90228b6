"""What every scheduler does: keep sessions, run passes of them, sample, finish and reap."""

from __future__ import annotations

import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic

import attrs
import torch
from torch import Tensor

from fuel_core.contracts.errors import InvalidRequestError, ModelContractError, UnknownSessionError, counted
from fuel_core.contracts.sampling import FinishReason
from fuel_core.contracts.state import ModelDims
from fuel_core.contracts.tiers import DecodeModel
from fuel_core.kv.geometry import KvBudget, KvGeometry, PoolCapacity
from fuel_core.kv.pool import KvBlockPool
from fuel_core.kv.storage import check_dtype
from fuel_core.kv.tables import check_tokens
from fuel_core.sampling import SamplerState, sample
from fuel_core.schedule.policy import S, StepReport
from fuel_core.schedule.session import Session, SessionId, SessionPhase


class SessionTable(ABC, Generic[S]):
    """The sessions of one scheduler over one model. It decides nothing.

    Attributes:
        lock: to be held by whoever calls anything here, where more than one thread does.
    """

    _unknown = "use an id that add_session returned and that has not been reaped"

    def __init__(self, model: DecodeModel) -> None:
        self.lock = threading.RLock()
        self._model = model
        self._sessions: dict[SessionId, S] = {}
        self._next_id = 0

    @abstractmethod
    def _release(self, session: S) -> None:
        """Free what a finished session holds."""

    def _keep(self, session: S, *more: S) -> SessionId:
        """Take sessions that were built under the next ids, all or none; the id of the first."""
        kept = {each.id: each for each in (session, *more)}
        self._next_id += len(kept)  # before an interrupt can come: no id is given out twice
        self._sessions.update(kept)
        return session.id

    def session(self, id: SessionId) -> S:
        """The state of a session that has not been reaped.

        Raises:
            UnknownSessionError: there is none of this id.
        """
        session = self._known(id)
        if session is None:
            raise UnknownSessionError(id, remedy=self._unknown)
        return session

    def _known(self, id: SessionId) -> S | None:
        try:
            return self._sessions.get(id)
        except TypeError:  # what cannot be hashed is no id
            return None

    def session_new_tokens(self, id: SessionId) -> list[int] | None:
        """What a session has generated so far; None for an unknown id."""
        session = self._known(id)
        return None if session is None else session.new_tokens

    def cancel(self, id: SessionId) -> None:
        """End a session; one that has finished keeps its reason.

        Raises:
            UnknownSessionError: there is none of this id.
        """
        self.session(id).finish(FinishReason.CANCELLED)

    @property
    def is_all_finished(self) -> bool:
        """Whether every session has finished. A suspended one has not, and does not advance either."""
        return not any(session.is_ready for session in self._sessions.values())

    def reap(self, id: SessionId) -> list[int]:
        """Forget a finished session and free what it holds; its prompt and generated ids.

        Raises:
            UnknownSessionError: there is none of this id.
            InvalidRequestError: it has not finished.
        """
        session = self.session(id)
        if session.is_ready:
            raise InvalidRequestError(
                f"session {id}, which has not finished", needed="a finished one", remedy="cancel it first"
            )
        del self._sessions[id]
        self._release(session)
        _forget_locals(session.error)
        return session.tokens

    def reap_finished(self) -> list[tuple[SessionId, list[int]]]:
        """:meth:`reap` every finished session; ``(id, prompt + generated)`` of each."""
        done = [session.id for session in self._sessions.values() if not session.is_ready]
        return [(id, self.reap(id)) for id in done]

    def run_to_completion(self) -> list[tuple[SessionId, list[int]]]:
        """Step until no session can advance; ``(id, prompt + generated)`` of each, none reaped."""
        while any(map(self._can_advance, self._sessions.values())):
            self.step()
        return [(session.id, list(session.tokens)) for session in self._sessions.values()]

    @abstractmethod
    def step(self) -> StepReport:
        """Advance every session that can."""

    def _can_advance(self, session: S) -> bool:
        return session.is_ready

    def _in_phase(self, phase: SessionPhase) -> list[S]:
        return [s for s in self._sessions.values() if s.phase is phase and self._can_advance(s)]

    def _pass(self, sessions: list[S], forward: Callable[[], Tensor], report: StepReport) -> bool:
        """Run ``forward``, one row of logits per session, and sample; whether it ran.

        Whatever it raises is the end of these sessions and not of the scheduler. There is no second try,
        since keys and values may have been written.
        """
        before = [(session, len(session.tokens), self._held(session)) for session in sessions]
        try:
            self._sample(sessions, self._checked(forward(), len(sessions)), report)
        except Exception as error:
            self._fail([s for s, count, _ in before if len(s.tokens) == count and s.is_ready], error, report)
            return False
        except BaseException:
            # An interrupt after the pass: keys and values, and maybe a draw, of what will be computed again.
            for session, count, held in before:
                if len(session.tokens) == count:
                    self._rewind(session, held)
                    replay_sampler(session)
            raise
        return True

    @abstractmethod
    def _held(self, session: S) -> int:
        """How many tokens' keys and values a session holds."""

    @abstractmethod
    def _rewind(self, session: S, held: int) -> None:
        """Let a session hold ``held`` tokens again, or fewer where it has lost some."""

    def _checked(self, logits: Tensor, rows: int) -> Tensor:
        shape = (rows, self._model.vocab_size())
        if tuple(logits.shape) != shape or logits.dtype != torch.float32:
            raise ModelContractError(
                f"{type(self._model).__name__} returned logits {list(logits.shape)} of {logits.dtype}",
                needed=f"float32 {list(shape)}",
                remedy="return one row per session",
            )
        return logits

    def _observe(self, session: S, logits: Tensor) -> None:
        """See the logits ``[vocab]`` that a session's next token is sampled from."""

    def _sample(self, sessions: list[S], logits: Tensor, report: StepReport) -> None:
        for session, row in zip(sessions, logits, strict=True):
            self._observe(session, row)
        outcomes = sample(logits, [session.sampler for session in sessions])
        for session, outcome in zip(sessions, outcomes, strict=True):
            if isinstance(outcome, Exception):
                self._fail([session], outcome, report)
                continue
            session.append(outcome)
            report.advanced.append(session.id)
            if not session.is_ready:
                report.finished.append(session.id)

    def _fail(self, sessions: list[S], error: Exception, report: StepReport) -> None:
        for session in sessions:
            session.finish(FinishReason.ERROR, error)
            report.errored.append((session.id, error))
            report.finished.append(session.id)


def replay_sampler(session: Session) -> None:
    """Give a session a sampler as its tokens leave it: one that was cut short may have drawn for another."""
    old = session.sampler
    sampler = SamplerState(
        attrs.evolve(old.params, seed=old.seed),
        session.tokens[: session.prompt_len],
        eos_ids=session.eos_ids,
        vocab_size=old.vocab_size,
    )
    for token in session.new_tokens:
        if not sampler.greedy:
            sampler.uniform()
        sampler.record(token)
    session.sampler = sampler


def blocks_for(pool: KvBlockPool, prompt_len: int, max_new_tokens: int) -> int:
    """The blocks of prompt and output together.

    Raises:
        InvalidRequestError: a negative count.
    """
    for count in (prompt_len, max_new_tokens):
        check_tokens(count)
    return pool.blocks_required(0, prompt_len + max_new_tokens)


def described(table: SessionTable[S], capacity: PoolCapacity, **sessions: int) -> str:
    """What a scheduler is, how many sessions of each kind it has, and how many blocks."""
    standing = ", ".join(f"{count} {kind}" for kind, count in sessions.items())
    return (
        f"<{type(table).__name__} of {type(table._model).__name__}: {standing}; "
        f"{counted(capacity.total_blocks, 'block')}, {capacity.free_blocks} free>"
    )


def check_model(model: object) -> None:
    """Refuse what is no model.

    Raises:
        InvalidRequestError: it is none; where it carries one, the remedy says so.
    """
    if not isinstance(model, DecodeModel):
        carries = isinstance(getattr(model, "model", None), DecodeModel)
        raise InvalidRequestError(
            f"{type(model).__name__} in place of a model",
            needed="a DecodeModel",
            remedy="pass loaded.model" if carries else "load one with fuel.load, and pass its .model",
        )


def geometry_of(dims: ModelDims, budget: KvBudget, dtype: torch.dtype) -> KvGeometry:
    """The blocks of a budget, for a model's state in one element type.

    Raises:
        InvalidRequestError: no budget, or a type that is no floating-point type of torch.
    """
    if not isinstance(budget, KvBudget):
        raise InvalidRequestError(
            f"a budget of type {type(budget).__name__}",
            needed="a KvBudget",
            remedy="pass KvBudget(block_size=16, num_blocks=...); the scheduler makes its own pool of it",
        )
    check_dtype(dtype)
    return KvGeometry(
        n_layers=dims.n_layers,
        n_kv_heads=dims.n_kv_heads,
        head_dim=dims.head_dim,
        num_blocks=budget.num_blocks,
        block_size=budget.block_size,
        elem_size=dtype.itemsize,
    )


def _forget_locals(error: BaseException | None) -> None:
    """Clear the variables of a traceback: they would hold views of the cache as long as the error lives."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
