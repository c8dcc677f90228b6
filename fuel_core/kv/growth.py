"""What sessions that grow together take from a pool."""

from __future__ import annotations

from collections import Counter

from fuel_core.kv.pool import KvBlockPool, SessionHandle


class JointGrowth:
    """Counts the free blocks that different sessions take which all grow, and then write what they grew by.

    Of those that share a partly filled last block, the last to write keeps it: together they may need fewer
    blocks than the sum of ``blocks_required_for``, where no other session or prefix shares it too.

    Attributes:
        need: free blocks for all that were added.
    """

    def __init__(self, pool: KvBlockPool) -> None:
        self._pool = pool
        self._writers = Counter[int]()  # by the block that they share
        self.need = 0

    def cost(self, session: SessionHandle, tokens: int) -> int:
        """Free blocks that ``tokens`` more of this session take beside those that were added.

        Raises:
            UnknownSessionError, InvalidRequestError, SessionNotResidentError: as ``blocks_required_for``.
        """
        alone = self._pool.blocks_required_for(session, tokens)
        tail = self._shared_tail(session) if tokens else None
        keeps = tail is not None and self._writers[tail] == self._pool.block_refcount(tail) - 1
        return alone - keeps

    def add(self, session: SessionHandle, tokens: int) -> None:
        """Count ``tokens`` more of this session.

        Raises:
            UnknownSessionError, InvalidRequestError, SessionNotResidentError: it is not counted.
        """
        self.need += self.cost(session, tokens)
        if tokens and (tail := self._shared_tail(session)) is not None:
            self._writers[tail] += 1

    def _shared_tail(self, session: SessionHandle) -> int | None:
        """The partly filled last block, where somebody else holds it too."""
        slot, used = divmod(self._pool.filled_tokens(session), self._pool.geometry.block_size)
        tail = self._pool.resident_block(session, slot) if used else None
        return tail if tail is not None and self._pool.block_refcount(tail) > 1 else None
