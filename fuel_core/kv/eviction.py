"""What an eviction leaves behind."""

from __future__ import annotations

from enum import Enum
from typing import NewType

import attrs

SessionHandle = NewType("SessionHandle", int)


class StateKind(Enum):
    """A category of session state that an eviction may cover."""

    KV_BLOCKS = "kv_blocks"


class Fidelity(Enum):
    """How much of a session a handle brings back.

    ``LOSSY`` is about what is left out, not about precision. What the handle ``covers`` comes back exactly:
    each slot that was detached and is still evicted has a block of its own again, likely another one, and its
    bytes where the eviction saved them (``DeviceKvPool`` does; ``KvBlockPool`` keeps no bytes). All else that
    makes up a session is its owner's to keep: tokens, the sampler and its random state, held plans. Nor does
    a restore take back a fill that has grown, or bring back slots that were truncated away.

    ``EXACT``, which would promise all of a session's state, is reserved: nothing returns it yet.
    """

    LOSSY = "lossy"
    EXACT = "exact"


@attrs.frozen(eq=False)
class Evicted:
    """State taken out of a pool, to be put back by ``restore``: once, and into its own session.

    Two handles are never equal: each is one eviction.

    Attributes:
        session: whose state it is.
        slots: the indices in the session's table that were detached, ascending.
        covers: what of the session's state it stands for.
        fidelity: what restoring it promises.
    """

    session: SessionHandle
    slots: tuple[int, ...]
    covers: tuple[StateKind, ...] = (StateKind.KV_BLOCKS,)
    fidelity: Fidelity = Fidelity.LOSSY


@attrs.frozen
class EvictReport:
    """What an eviction did.

    Attributes:
        freed: blocks that went back to the pool.
        still_shared: blocks that were asked for and stay, since another session or a prefix holds them too.
        handle: what ``restore`` takes.
    """

    freed: int
    still_shared: int
    handle: Evicted
