"""What the engine keeps of each session, and counts of itself."""

from __future__ import annotations

import attrs

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
