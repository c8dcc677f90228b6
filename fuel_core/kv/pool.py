"""The block pool: blocks that move out, come back and are shared. Metadata only, no tensors."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import chain, pairwise
from typing import NewType
from weakref import WeakSet

from fuel_core.contracts.errors import (
    BadBlockIndexError,
    BadSpliceRangeError,
    InvalidRequestError,
    OffsetNotBlockAlignedError,
    PrefixNotFullyFilledError,
    PrefixTargetNotEmptyError,
    UnknownPrefixError,
    counted,
)
from fuel_core.kv.eviction import Evicted, EvictReport, SessionHandle
from fuel_core.kv.geometry import KvGeometry
from fuel_core.kv.tables import EVICTED, BlockTable, SessionTables, check_whole

__all__ = ["KvBlockPool", "PrefixId", "SessionHandle"]

PrefixId = NewType("PrefixId", int)


class KvBlockPool(SessionTables):
    """Hands out blocks of KV memory to sessions. Every refusal leaves it as it was.

    A block is held once by each session slot and each registered prefix that refers to it, and is free when
    nobody does. The pool says what fits and does what it is told: who is evicted or shared is the caller's
    choice. A call that names a session or a prefix that there is not raises UnknownSessionError or
    UnknownPrefixError.

    Args:
        geometry: how many blocks there are, and what one is.

    Raises:
        InvalidRequestError: something else than a KvGeometry.
    """

    def __init__(self, geometry: KvGeometry) -> None:
        super().__init__(geometry)
        # Weak: a handle that its owner has dropped can no longer be restored, and need not be remembered.
        self._unspent: WeakSet[Evicted] = WeakSet()
        self._prefixes: dict[PrefixId, array[int]] = {}
        self._next_prefix = 0

    def __repr__(self) -> str:
        prefixes = counted(len(self._prefixes), "prefix", "prefixes")
        return (
            f"<{type(self).__name__}: {counted(self.geometry.num_blocks, 'block')} of "
            f"{counted(self.geometry.block_size, 'token')}, {self.free_blocks} free; "
            f"{counted(len(self._tables), 'session')}, {prefixes}>"
        )

    def recount(self) -> None:
        """Make fills, counts and free blocks follow from the sessions' blocks and the prefixes again.

        After an interrupt inside another call: what that had taken and given to nobody is free then, and a
        session that it had taken blocks from, or given room without them, has the fewer tokens. It may be
        interrupted too, and done again.
        """
        for table in self._tables.values():
            table.settle(self.geometry.block_size)
        holders = chain((table.blocks for table in self._tables.values()), self._prefixes.values())
        self._ledger.recount(block for blocks in holders for block in blocks if block != EVICTED)

    # -- eviction --------------------------------------------------------------------------------

    def evict(self, session: SessionHandle) -> EvictReport:
        """Detach every resident block that only this session holds; the fill stays as it is."""
        return self._detach(session, range(len(self._table(session).blocks)))

    def evict_blocks(self, session: SessionHandle, slots: Iterable[int]) -> EvictReport:
        """:meth:`evict` of some slots. One that was evicted before is passed over, and counts as neither.

        Raises:
            BadBlockIndexError: the session has no such slot, or one is named twice; nothing has changed.
        """
        named = sorted(slots)
        self._table(session).check_slots(named)
        for slot, following in pairwise(named):
            if slot == following:
                raise BadBlockIndexError(
                    f"slot {slot} twice", needed="each slot once", remedy="drop the second", index=slot
                )
        return self._detach(session, named)

    def evict_range(self, session: SessionHandle, start: int, end: int) -> EvictReport:
        """:meth:`evict` of the slots ``[start, end)``.

        Raises:
            BadBlockIndexError: the session has no such range; nothing has changed.
        """
        slots = len(self._table(session).blocks)
        if not 0 <= start <= end <= slots:
            raise BadBlockIndexError(
                f"slots [{start}, {end}) of a session with {counted(slots, 'block')}",
                needed=f"a range in [0, {slots}]",
                remedy="ask session_blocks()",
                start=start,
                end=end,
            )
        return self._detach(session, range(start, end))

    def restore(self, session: SessionHandle, handle: Evicted) -> list[tuple[int, int]]:
        """Give new blocks to the slots that the handle detached and that are still evicted.

        Nothing else changes: not the fill, which may have grown since, nor a slot that was truncated away.

        Returns:
            ``(slot, new block)`` of each, ascending: where the saved bytes go.

        Raises:
            InvalidRequestError: the handle was restored before, is another session's, or is none: the report
                that it came in, say.
            OutOfBlocksError: too few free blocks; the handle stays good.
        """
        table = self._table(session)
        self._check_handle(session, handle)
        slots = [slot for slot in handle.slots if table.evicted.get(slot) is handle]
        pairs = list(zip(slots, self._ledger.take(len(slots)), strict=True))
        self._unspent.discard(handle)
        for slot, block in pairs:
            table.blocks[slot] = block
            del table.evicted[slot]
        return pairs

    def _detach(self, session: SessionHandle, slots: Iterable[int]) -> EvictReport:
        table = self._table(session)
        resident = [slot for slot in slots if table.blocks[slot] != EVICTED]
        exclusive = [slot for slot in resident if self._ledger.count(table.blocks[slot]) == 1]
        handle = Evicted(session, tuple(exclusive))
        self._unspent.add(handle)
        self._ledger.drop([table.blocks[slot] for slot in exclusive])
        for slot in exclusive:
            table.blocks[slot] = EVICTED
            table.evicted[slot] = handle
        return EvictReport(len(exclusive), len(resident) - len(exclusive), handle)

    def _check_handle(self, session: SessionHandle, handle: Evicted) -> None:
        if not isinstance(handle, Evicted):
            raise InvalidRequestError(
                f"{type(handle).__name__} in place of a handle",
                needed="the Evicted that the report of an eviction carries",
                remedy="pass report.handle",
            )
        if handle not in self._unspent:
            raise InvalidRequestError(
                f"{handle}, restored before or of another pool",
                needed="a handle that evict returned and restore has not taken",
                remedy="evict again to get another",
            )
        if handle.session != session:
            raise InvalidRequestError(
                f"a handle of session {handle.session} for session {session}",
                needed="a handle of the same session",
                remedy=f"restore it into session {handle.session}",
                session=session,
            )

    # -- sharing ---------------------------------------------------------------------------------

    def splice(self, src: SessionHandle, dst: SessionHandle, start: int, end: int) -> None:
        """Append the blocks of the slots ``[start, end)`` of ``src`` to ``dst``, shared.

        The fill of ``dst`` grows by the tokens that they carry: whole blocks, but for the last of ``src``,
        which may be filled in part (a fork). A session may be spliced to itself. Before a write to what is
        shared, :meth:`cow_break` is due.

        Raises:
            BadSpliceRangeError: ``src`` has no such range.
            SessionNotResidentError: a block of the range was evicted.
            OffsetNotBlockAlignedError: the last block of ``dst`` is filled in part.
        """
        source, target = self._table(src), self._table(dst)
        if not 0 <= start <= end <= len(source.blocks):
            raise BadSpliceRangeError(
                f"slots [{start}, {end}) of a session with {counted(len(source.blocks), 'block')}",
                needed=f"a range in [0, {len(source.blocks)}]",
                remedy="ask session_blocks()",
                start=start,
                end=end,
            )
        shared = source.resident(start, end)
        self._check_aligned(target)
        first, last = (min(slot * self.geometry.block_size, source.filled) for slot in (start, end))
        self._attach(target, shared, last - first)

    def cow_break(self, session: SessionHandle, slot: int) -> tuple[int, int] | None:
        """Make a slot's block the session's own; who shared it keeps the old one.

        Returns:
            ``(old block, new block)``, whose bytes are the caller's to copy; None if nobody else held it.

        Raises:
            BadBlockIndexError: the session has no such slot.
            SessionNotResidentError: its block was evicted.
            OutOfBlocksError: no block is free.
        """
        old = self.resident_block(session, slot)
        if self._ledger.count(old) == 1:
            return None
        [new] = self._ledger.take(1)
        self._ledger.drop([old])
        self._table(session).blocks[slot] = new
        return old, new

    def _attach(self, table: BlockTable, blocks: array[int], tokens: int) -> None:
        self._ledger.share(blocks)
        table.blocks.extend(blocks)
        table.filled += tokens

    def _check_aligned(self, table: BlockTable) -> None:
        if self._has_partial_tail(table):
            raise OffsetNotBlockAlignedError(table.filled, self.geometry.block_size)

    # -- prefixes --------------------------------------------------------------------------------

    def register_prefix(self, donor: SessionHandle, tokens: int) -> PrefixId:
        """Keep the blocks of the donor's first ``tokens`` alive, whatever becomes of the donor.

        Raises:
            InvalidRequestError: ``tokens`` is no integer.
            PrefixNotFullyFilledError: not a positive multiple of the block size, or more than the donor has.
            SessionNotResidentError: one of the blocks was evicted.
        """
        table, size = self._table(donor), self.geometry.block_size
        check_whole(tokens)
        if not 0 < tokens <= table.filled or tokens % size:
            raise PrefixNotFullyFilledError(
                f"a prefix of {counted(tokens, 'token')} of a session with {table.filled}",
                needed=f"a positive multiple of {size} that the session has filled",
                remedy="register fewer tokens, or after more are there",
                tokens=tokens,
                filled=table.filled,
            )
        blocks = table.resident(0, tokens // size)
        self._ledger.share(blocks)
        prefix = PrefixId(self._next_prefix)
        self._next_prefix += 1
        self._prefixes[prefix] = blocks
        return prefix

    def release_prefix(self, prefix: PrefixId) -> None:
        """Forget a prefix; sessions that share its blocks keep them."""
        self._ledger.drop(self._prefix(prefix))
        del self._prefixes[prefix]

    def prefix_blocks(self, prefix: PrefixId) -> tuple[int, ...]:
        """The blocks of a prefix, in order of its tokens."""
        return tuple(self._prefix(prefix))

    def splice_prefix_from(self, prefix: PrefixId, dst: SessionHandle) -> int:
        """Share a prefix with a session that has no tokens yet; the number of tokens it has now.

        Raises:
            PrefixTargetNotEmptyError: the session has tokens.
        """
        blocks, table = self._prefix(prefix), self._table(dst)
        if table.filled:
            raise PrefixTargetNotEmptyError(
                f"a prefix for a session with {counted(table.filled, 'token')}",
                needed="a session without any",
                remedy="open another, or use alloc_shifted_prefix_slots",
                filled=table.filled,
            )
        self._attach(table, blocks, len(blocks) * self.geometry.block_size)
        return table.filled

    def alloc_shifted_prefix_slots(
        self, prefix: PrefixId, dst: SessionHandle
    ) -> tuple[int, list[tuple[int, int]]]:
        """Append blocks of its own to ``dst`` for a copy of a prefix at another position, 0 too.

        Returns:
            The position in tokens where the copy begins, and ``(prefix's block, fresh block)`` of each.

        Raises:
            OffsetNotBlockAlignedError: the last block of ``dst`` is filled in part.
            OutOfBlocksError: too few free blocks.
        """
        source, table = self._prefix(prefix), self._table(dst)
        self._check_aligned(table)
        offset, fresh = table.filled, self._ledger.take(len(source))
        table.blocks.extend(fresh)
        table.filled += len(fresh) * self.geometry.block_size
        return offset, list(zip(source, fresh, strict=True))

    def _prefix(self, prefix: PrefixId) -> array[int]:
        try:
            return self._prefixes[prefix]
        except (KeyError, TypeError):  # what cannot be hashed is no id
            raise UnknownPrefixError(prefix) from None
