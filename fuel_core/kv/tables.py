"""The sessions of a block pool: which slot of a session is which block."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import attrs

from fuel_core.contracts.errors import (
    BadBlockIndexError,
    InvalidRequestError,
    SessionNotResidentError,
    UnknownSessionError,
    counted,
)
from fuel_core.kv.eviction import Evicted, SessionHandle
from fuel_core.kv.geometry import KvGeometry, PoolCapacity, check_geometry
from fuel_core.kv.ledger import BlockLedger

EVICTED = -1  # no block has this number


@attrs.define(eq=False)
class BlockTable:
    """One session: ``blocks`` has an entry for each ``block_size`` tokens begun, a block or ``EVICTED``."""

    blocks: array[int] = attrs.field(factory=lambda: array("q"))
    filled: int = 0
    evicted: dict[int, Evicted] = attrs.field(factory=dict)

    def check_slots(self, slots: Iterable[int]) -> None:
        """Refuse slots that the table does not have."""
        for slot in slots:
            if not 0 <= slot < len(self.blocks):
                raise BadBlockIndexError(
                    f"slot {slot} of a session with {counted(len(self.blocks), 'block')}",
                    needed=f"an index in [0, {len(self.blocks)})",
                    remedy="ask session_blocks()",
                    index=slot,
                )

    def resident(self, start: int, end: int) -> array[int]:
        """The blocks of the slots ``[start, end)``; refused where one was evicted, naming the first."""
        if self.evicted and EVICTED in (blocks := self.blocks[start:end]):
            raise SessionNotResidentError(start + blocks.index(EVICTED))
        return self.blocks[start:end]

    def settle(self, block_size: int) -> None:
        """Make blocks and fill of one length again, the shorter of the two, where a call was cut short."""
        self.cut(-(-self.filled // block_size))
        self.filled = min(self.filled, len(self.blocks) * block_size)

    def cut(self, slots: int) -> list[int]:
        """Drop all slots from ``slots`` on; the blocks that they held."""
        gone = [block for block in self.blocks[slots:] if block != EVICTED]
        for slot in range(slots, len(self.blocks)):
            self.evicted.pop(slot, None)
        del self.blocks[slots:]
        return gone


class SessionTables:
    """Sessions that grow and shrink over the blocks of one pool, and what can be asked about them.

    A call that names a session that is not open raises UnknownSessionError.
    """

    def __init__(self, geometry: KvGeometry) -> None:
        check_geometry(geometry)
        self.geometry = geometry
        self._ledger = BlockLedger(geometry.num_blocks)
        self._tables: dict[SessionHandle, BlockTable] = {}
        self._next_session = 0

    # -- the pool --------------------------------------------------------------------------------

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return self._ledger.free

    @property
    def kv_bytes_resident(self) -> int:
        """Bytes of all blocks that are held; a shared one counts once."""
        return (self.geometry.num_blocks - self.free_blocks) * self.geometry.block_bytes

    def capacity(self) -> PoolCapacity:
        """The pool's size and what of it is free."""
        return PoolCapacity(self.geometry, self.free_blocks, self.geometry.num_blocks)

    def block_refcount(self, block: int) -> int:
        """How many session slots and registered prefixes hold a block; 0 for a free one.

        Raises:
            BadBlockIndexError: the pool has no such block.
        """
        if not 0 <= block < self.geometry.num_blocks:
            raise BadBlockIndexError(
                f"block {block} of a pool of {self.geometry.num_blocks}",
                needed=f"a number in [0, {self.geometry.num_blocks})",
                remedy="ask session_block_table()",
                index=block,
            )
        return self._ledger.count(block)

    # -- what fits -------------------------------------------------------------------------------

    def blocks_required(self, filled: int, add: int) -> int:
        """New blocks that a session of ``filled`` tokens needs for ``add`` more.

        Raises:
            InvalidRequestError: a negative count.
        """
        check_tokens(filled)
        check_tokens(add)
        size = self.geometry.block_size
        return -(-(filled + add) // size) - -(-filled // size)

    def blocks_required_batch(self, pairs: Iterable[tuple[int, int]]) -> int:
        """:meth:`blocks_required` summed over ``(filled, add)`` pairs."""
        return sum(self.blocks_required(filled, add) for filled, add in pairs)

    def blocks_required_for(self, session: SessionHandle, add: int) -> int:
        """Free blocks that ``add`` more tokens of this session take: what :meth:`append` allocates, and the
        copy-on-write break of a last block that is partly filled and shared, which the first write needs.

        Raises:
            InvalidRequestError, SessionNotResidentError: as :meth:`append`.
        """
        table = self._table(session)
        return self._growth(table, add) + (add > 0 and self._tail_is_shared(table))

    def next_blocks(self, count: int) -> tuple[int, ...]:
        """The free blocks that the pool hands out next, in this order. They may be written to before.

        Raises:
            OutOfBlocksError: too few free blocks.
        """
        return tuple(self._ledger.peek(count))

    # -- sessions --------------------------------------------------------------------------------

    def open(self) -> SessionHandle:
        """A new session without blocks. Its handle is never given out again."""
        handle = SessionHandle(self._next_session)
        self._next_session += 1
        self._tables[handle] = BlockTable()
        return handle

    def append(self, session: SessionHandle, tokens: int) -> None:
        """Give the session room for ``tokens`` more. A shared last block stays shared: see ``cow_break``.

        Raises:
            InvalidRequestError: a negative count.
            SessionNotResidentError: the tokens would go into a last block that was evicted.
            OutOfBlocksError: too few free blocks; nothing has changed.
        """
        table = self._table(session)
        table.blocks.extend(self._ledger.take(self._growth(table, tokens)))
        table.filled += tokens

    def truncate(self, session: SessionHandle, tokens: int) -> None:
        """Keep the first ``tokens`` and give back every block past them.

        A block that is shared loses this reference only. An evicted slot past them is forgotten: its handle
        restores the others.

        Raises:
            InvalidRequestError: a negative count, or more tokens than there are.
        """
        table = self._table(session)
        check_tokens(tokens)
        if tokens > table.filled:
            raise InvalidRequestError(
                f"truncate to {counted(tokens, 'token')}",
                needed=f"a length in [0, {table.filled}]",
                remedy="use append",
            )
        self._ledger.drop(table.cut(self.blocks_required(0, tokens)))
        table.filled = tokens

    def discard(self, session: SessionHandle) -> None:
        """Close the session and give back its blocks. Handles of what was evicted from it are void."""
        self._ledger.drop(self._table(session).cut(0))
        del self._tables[session]

    def filled_tokens(self, session: SessionHandle) -> int:
        """Tokens that the session has room for, evicted ones too."""
        return self._table(session).filled

    def session_blocks(self, session: SessionHandle) -> tuple[int | None, ...]:
        """The block of each slot, in order of the tokens; None where it was evicted."""
        return tuple(None if block == EVICTED else block for block in self._table(session).blocks)

    def session_block_table(self, session: SessionHandle) -> tuple[int, ...]:
        """The blocks to read the session through, in order of its tokens.

        Raises:
            SessionNotResidentError: a block was evicted; ``slot`` is the first such.
        """
        table = self._table(session)
        return tuple(table.resident(0, len(table.blocks)))

    def resident_block(self, session: SessionHandle, slot: int) -> int:
        """The block of one slot.

        Raises:
            BadBlockIndexError: the session has no such slot.
            SessionNotResidentError: its block was evicted.
        """
        table = self._table(session)
        table.check_slots([slot])
        return table.resident(slot, slot + 1)[0]

    def _table(self, session: SessionHandle) -> BlockTable:
        try:
            return self._tables[session]
        except (KeyError, TypeError):  # what cannot be hashed is no handle
            raise UnknownSessionError(session) from None

    def _growth(self, table: BlockTable, add: int) -> int:
        need = self.blocks_required(table.filled, add)
        if add and self._has_partial_tail(table):
            table.resident(len(table.blocks) - 1, len(table.blocks))
        return need

    def _has_partial_tail(self, table: BlockTable) -> bool:
        return table.filled % self.geometry.block_size > 0

    def _tail_is_shared(self, table: BlockTable) -> bool:
        return self._has_partial_tail(table) and self._ledger.count(table.blocks[-1]) > 1


def check_tokens(tokens: int) -> None:
    """Refuse what is no count of tokens."""
    check_whole(tokens)
    if tokens < 0:
        raise InvalidRequestError(f"{tokens} tokens", needed="0 or more", remedy="mend the count")


def check_whole(tokens: object) -> None:
    """Refuse what is no integer."""
    if isinstance(tokens, bool) or not isinstance(tokens, int):
        raise InvalidRequestError(f"{tokens!r} tokens", needed="an integer", remedy="mend the count")
