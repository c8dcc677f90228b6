"""Who holds which block: reference counts and the free list."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import repeat

from fuel_core.contracts.errors import OutOfBlocksError


class BlockLedger:
    """Counts the references to each of ``total`` blocks. A block without one is free.

    Every operation costs O(1) per block that it names, and memory follows the blocks ever used, so that a
    pool of any size opens at once.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        # Blocks from len(self._references) on were never used.
        self._references = array("q")
        self._freed = array("q")

    @property
    def free(self) -> int:
        """Blocks without a reference."""
        return self.total - len(self._references) + len(self._freed)

    def count(self, block: int) -> int:
        """References to a block in ``[0, total)``."""
        return self._references[block] if block < len(self._references) else 0

    def take(self, count: int) -> array[int]:
        """``count`` free blocks, each with one reference now: those freed last, then the lowest unused.

        Raises:
            OutOfBlocksError: fewer are free; nothing has changed.
        """
        if count > self.free:
            raise OutOfBlocksError(count, self.free)
        kept = max(0, len(self._freed) - count)
        blocks = self._freed[kept:]
        blocks.reverse()
        del self._freed[kept:]
        for block in blocks:
            self._references[block] = 1
        used, unused = len(self._references), count - len(blocks)
        self._references.extend(repeat(1, unused))
        blocks.extend(range(used, used + unused))
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each of ``blocks``."""
        for block in blocks:
            self._references[block] += 1

    def drop(self, blocks: Sequence[int]) -> None:
        """One reference less to each of ``blocks``; taken again, they come out in this order."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if not self._references[block]:
                self._freed.append(block)
