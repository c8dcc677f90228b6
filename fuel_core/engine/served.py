"""What the engine keeps of each session, and counts of itself."""

from __future__ import annotations

import attrs

from fuel_core.contracts import DecodeModel, RaggedDecodeModel
from fuel_core.contracts.errors import InvalidRequestError, UnsupportedTierError
from fuel_core.kv import SessionHandle
from fuel_core.kv.device_pool import SessionImage
from fuel_core.kv.prefix_index import PrefixStats
from fuel_core.schedule.session import Session


class ServedSession(Session):
    """A session of the engine.

    Attributes:
        handle: its session in the pool while it runs, else None.
        image: its keys and values while it is preempted, else None.
        chain: the hash chain of its full blocks.
        forks: sessions that share its prompt and wait for it to be computed.
        waits_for_parent: whether it is one of them.
    """

    handle: SessionHandle | None = None
    image: SessionImage | None = None
    waits_for_parent: bool = False

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.chain: list[bytes] = []
        self.forks: list[ServedSession] = []

    @property
    def seats(self) -> int:
        """How many sessions it is once its prompt has been computed."""
        return 1 + sum(fork.is_ready for fork in self.forks)


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
        UnsupportedTierError: it has no ragged tier.
    """
    if not isinstance(model, RaggedDecodeModel):
        raise UnsupportedTierError(
            f"{type(model).__name__}, which has no ragged tier",
            needed="a RaggedDecodeModel",
            remedy="serve it with SessionScheduler",
        )
    return model


def check_limits(max_batch: int, token_budget: int, watermark: float = 0.0) -> None:
    """The limits of an engine.

    Raises:
        InvalidRequestError: names the first that is none.
    """
    for name, value in (("max_batch", max_batch), ("token_budget", token_budget)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidRequestError(
                f"{name} = {value!r}", needed="an integer of at least 1", remedy="raise it"
            )
    if isinstance(watermark, bool) or not isinstance(watermark, int | float) or not 0 <= watermark < 1:
        raise InvalidRequestError(
            f"watermark = {watermark!r}", needed="a number in [0, 1)", remedy="change it"
        )
