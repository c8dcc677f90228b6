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

from fuel_core.contracts.errors import InvalidRequestError, ModelContractError, UnknownSessionError
from fuel_core.contracts.sampling import FinishReason
from fuel_core.contracts.state import ModelDims
from fuel_core.contracts.tiers import DecodeModel
from fuel_core.kv.geometry import KvBudget, KvGeometry
from fuel_core.sampling import SamplerState, sample
from fuel_core.schedule.policy import S, StepReport
from fuel_core.schedule.session import Session, SessionId, SessionPhase


class SessionTable(ABC, Generic[S]):
    """The sessions of one scheduler over one model. It decides nothing.

    Attributes:
        lock: to be held by whoever calls anything here, where more than one thread does.
    """

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


def geometry_of(dims: ModelDims, budget: KvBudget, dtype: torch.dtype) -> KvGeometry:
    """The blocks of a budget, for a model's state in one element type.

    Raises:
        InvalidRequestError: a type that is no floating-point type of torch.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InvalidRequestError(
            f"keys and values in {dtype!r}",
            needed="a floating-point torch.dtype",
            remedy="pass torch.float32",
        )
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
