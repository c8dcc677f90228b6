"""What the engine keeps of each session, and counts of itself."""

from __future__ import annotations

from typing import Any

import attrs

from fuel_core.contracts import DecodeModel, RaggedDecodeModel
from fuel_core.contracts.errors import InvalidRequestError, UnsupportedTierError
from fuel_core.kv import SessionHandle
from fuel_core.kv.device_pool import SessionImage
from fuel_core.kv.prefix_index import PrefixStats
from fuel_core.schedule.session import Session, SessionPhase
from fuel_core.schedule.table import check_model, replay_sampler


class ServedSession(Session):
    """A session of the engine.

    Attributes:
        max_new_tokens: the most that it may generate.
        owner: whose it is.
        handle: its session in the pool while it runs, else None.
        image: its keys and values while it is preempted, else None.
        held: how many of its first tokens have keys and values that can be relied on, in the pool or in the
            image. The pool may have room for more, which a pass that was cut short has taken.
        chain: the hash chain of its tokens' full blocks, as far as it was asked for.
        indexed: how many of them it has put into the prefix cache, or found there, while it ran.
        forks: sessions that share its prompt and wait for it to be computed.
        parent: the session that it waits for so, else None.
    """

    handle: SessionHandle | None = None
    image: SessionImage | None = None
    parent: ServedSession | None = None
    held: int = 0
    indexed: int = 0

    def __init__(self, *args: Any, max_new_tokens: int, owner: object, **kwargs: Any) -> None:
        super().__init__(*args, max_new_tokens=max_new_tokens, **kwargs)
        self.max_new_tokens, self.owner = max_new_tokens, owner
        self.chain: list[bytes] = []
        self.forks: list[ServedSession] = []

    @property
    def seats(self) -> int:
        """How many sessions it is once its prompt has been computed."""
        return 1 + sum(fork.is_ready for fork in self.forks)

    def settle(self) -> None:
        """Derive all that follows from the tokens again: an interrupt may have come in between."""
        if self.finish_reason is not None:
            self.phase = SessionPhase.FINISHED
        elif self.new_tokens:
            self.remaining = self.max_new_tokens - len(self.new_tokens)
            self.proceed()
        if self.is_ready:
            replay_sampler(self)


@attrs.define
class EngineStats:
    """What the engine has done.

    Attributes:
        passes: model passes.
        tokens: tokens computed in them.
        preemptions: sessions moved to the host because the pool ran dry.
        prefix: of the prefix cache.
    """

    prefix: PrefixStats
    passes: int = 0
    tokens: int = 0
    preemptions: int = 0


def ragged(model: DecodeModel) -> RaggedDecodeModel:
    """The model as the engine uses it.

    Raises:
        InvalidRequestError: something else than a model.
        UnsupportedTierError: it has no ragged tier.
    """
    check_model(model)
    if not isinstance(model, RaggedDecodeModel):
        raise UnsupportedTierError(
            f"{type(model).__name__}, which has no ragged tier",
            needed="a RaggedDecodeModel",
            remedy="serve it with SessionScheduler",
        )
    return model


def check_positive(**limits: object) -> None:
    """Limits that leave room for something.

    Raises:
        InvalidRequestError: names the first that does not.
    """
    for name, value in limits.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidRequestError(
                f"{name} = {value!r}", needed="an integer of at least 1", remedy="change it"
            )


def check_limits(max_batch: int, token_budget: int, watermark: float = 0.0) -> None:
    """The limits of an engine.

    Raises:
        InvalidRequestError: names the first that is none.
    """
    check_positive(max_batch=max_batch, token_budget=token_budget)
    if isinstance(watermark, bool) or not isinstance(watermark, int | float) or not 0 <= watermark < 1:
        raise InvalidRequestError(
            f"watermark = {watermark!r}", needed="a number in [0, 1)", remedy="change it"
        )
