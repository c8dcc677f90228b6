"""After an interrupt: where each session of an engine stands, from what it says of itself."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from fuel_core.engine.served import ServedSession
from fuel_core.kv import KvBlockPool, SessionHandle
from fuel_core.schedule.session import SessionPhase


def repair(sessions: Collection[ServedSession], core: KvBlockPool, cached: set[SessionHandle]) -> None:
    """Bring the sessions of an engine, by age, and its pool into a state that a step could have left.

    It may be cut short like any step: done again, it comes to the same. After it a finished session has
    nothing; of the others one with a handle runs, one with an image is preempted, one with a parent is among
    its forks, and the rest wait. No handle is open but theirs and the ``cached`` ones.
    """
    core.recount()
    for session in sessions:
        session.settle()
        session.forks, session.indexed = [], 0
        if not session.is_ready:
            session.handle = session.image = session.parent = None
    open_handles = set(core._tables)
    for session in sessions:
        if session.handle not in open_handles:  # it was on its way to the host
            session.handle = None
        if session.is_ready:
            _take_stock(session, core)
    for stray in set(core._tables) - cached - {session.handle for session in sessions}:
        core.discard(stray)
    _attach_forks(sessions)


def _take_stock(session: ServedSession, core: KvBlockPool) -> None:
    if session.handle is not None:
        session.image = None  # whose bytes are back
        _rehome(session, session.handle, core)
    else:
        session.held = 0 if session.image is None else session.image.tokens
    if len(session.tokens) - session.held > 1:  # what it lost is computed again like a prompt, in chunks
        session.phase = SessionPhase.PREFILL


def _rehome(session: ServedSession, old: SessionHandle, core: KvBlockPool) -> None:
    """Give it a new handle on its full blocks alone.

    The last block may have been on its way to another place. And what was cut short may be kept alive by a
    traceback, and tidy up the old handle when that goes.
    """
    size = core.geometry.block_size
    blocks = min(session.held, core.filled_tokens(old), len(session.tokens) - 1) // size
    new = core.open()
    core.splice(old, new, 0, blocks)
    session.handle, session.held = new, blocks * size


def _attach_forks(sessions: Iterable[ServedSession]) -> None:
    """Let forks wait for their parent again; those whose parent has gone on without them, for the first."""
    heirs: dict[int, ServedSession] = {}
    for session in sessions:
        parent = session.parent
        if parent is None or session.handle is not None or session.image is not None:
            session.parent = None
            continue
        if not parent.is_ready or parent.new_tokens:
            parent = heirs.setdefault(parent.id, session)
        session.parent = None if parent is session else parent
        if session.parent is not None:
            session.parent.forks.append(session)
