"""How a scheduler advances its decode-ready sessions, and what a step reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import attrs

from fuel_core.contracts.errors import InvalidRequestError
from fuel_core.schedule.session import Session, SessionId

S = TypeVar("S", bound=Session)


@attrs.frozen
class RoundRobin:
    """One session after the other: the oracle that the batched arm is compared with."""


@attrs.frozen
class Batched:
    """Sessions of equal length together, up to ``max_batch`` in a pass, the rest one after the other."""

    max_batch: int = attrs.field()

    @max_batch.validator
    def _check(self, _: object, value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidRequestError(
                f"max_batch = {value!r}", needed="an integer of at least 1", remedy="change it"
            )


def check_policy(policy: object) -> None:
    """Refuse what is no policy.

    Raises:
        InvalidRequestError: it is none.
    """
    if not isinstance(policy, RoundRobin | Batched):
        raise InvalidRequestError(
            f"policy = {policy!r}",
            needed="RoundRobin() or Batched(max_batch)",
            remedy="pass one of them, not its name or class",
        )


@attrs.define
class StepReport:
    """What one step did.

    Attributes:
        advanced: the session of each sampled token; a session that ran its prompt and decoded stands twice.
        finished: sessions that ended in this step, for whatever reason.
        errored: those of them that failed, with their errors.
        used_batched_arm: whether any sessions advanced in one pass.
    """

    advanced: list[SessionId] = attrs.field(factory=list)
    finished: list[SessionId] = attrs.field(factory=list)
    errored: list[tuple[SessionId, Exception]] = attrs.field(factory=list)
    used_batched_arm: bool = False


def batches(sessions: Iterable[S], key: Callable[[S], object], max_batch: int) -> Iterator[list[S]]:
    """Cut sessions into passes: those of one key together, ``max_batch`` at most.

    A pass of one is to be run serially.
    """
    groups: dict[object, list[S]] = {}
    for session in sessions:
        groups.setdefault(key(session), []).append(session)
    for group in groups.values():
        for start in range(0, len(group), max_batch):
            yield group[start : start + max_batch]
