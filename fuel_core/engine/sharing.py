"""The prefix cache as the engine asks it: by session, each block of whose tokens is hashed once."""

from __future__ import annotations

from itertools import takewhile

from fuel_core.engine.served import ServedSession
from fuel_core.kv import SessionHandle
from fuel_core.kv.prefix_index import PrefixIndex


class SessionIndex(PrefixIndex):
    """A prefix index that keeps a session's hash chain with the session."""

    @property
    def holders(self) -> set[SessionHandle]:
        """The index's own sessions in the pool."""
        return set(self._holders.values())

    def costs_nothing(self, session: ServedSession) -> int:
        """How many blocks it can share that are held by sessions, and so take none of those that are free."""
        return sum(not self._is_alone(self._holders[key]) for key in self._matching(session))

    def share(self, session: ServedSession, handle: SessionHandle) -> int:
        """Share what matches its tokens with an empty session of the pool; the number of blocks."""
        found = self._matching(session)
        for key in found:
            self._pool.splice(self._holders[key], handle, 0, 1)
        self._touch(found)
        return len(found)

    def admit(self, session: ServedSession, handle: SessionHandle) -> int:
        """:meth:`share` with a prompt that is looked up for the first time; the tokens that it then holds."""
        blocks = self.share(session, handle)
        reused = blocks * self._pool.geometry.block_size
        self.stats.lookups += 1
        self.stats.hits += blocks > 0
        self.stats.tokens_reused += reused
        return reused

    def keep(self, session: ServedSession) -> None:
        """Index the full blocks that it holds, where there are more than before."""
        full = session.held // self._pool.geometry.block_size
        if full > session.indexed and session.handle is not None:
            self._extend(session.chain, session.tokens)
            self.add(session.tokens[: session.held], session.handle, session.chain[:full])
            session.indexed = full

    def release(self, session: ServedSession, first: int) -> None:
        """Let go of its blocks from ``first`` on, which it is about to write again."""
        self.forget(session.chain[: session.indexed], first)
        session.indexed = min(session.indexed, first)

    def _matching(self, session: ServedSession) -> list[bytes]:
        """The keys of the blocks that are there, but for that of the last token, which must be computed."""
        self._extend(session.chain, session.tokens)
        most = (len(session.tokens) - 1) // self._pool.geometry.block_size
        return list(takewhile(self._holders.__contains__, session.chain[:most]))
