"""Who holds which block: reference counts and the free list."""

from __future__ import annotations

from array import array
from collections import Counter
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

    def peek(self, count: int) -> array[int]:
        """The next ``count`` to be taken, in order: those freed last, then the lowest unused.

        Raises:
            OutOfBlocksError: fewer are free.
        """
        if count > self.free:
            raise OutOfBlocksError(count, self.free)
        blocks = self._freed[max(0, len(self._freed) - count) :]
        blocks.reverse()
        used = len(self._references)
        blocks.extend(range(used, used + count - len(blocks)))
        return blocks

    def take(self, count: int) -> array[int]:
        """The blocks that :meth:`peek` gives, each with one reference now.

        Raises:
            OutOfBlocksError: fewer are free; nothing has changed.
        """
        blocks = self.peek(count)
        again = min(count, len(self._freed))
        del self._freed[len(self._freed) - again :]
        for block in blocks[:again]:
            self._references[block] = 1
        self._references.extend(repeat(1, count - again))
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

    def recount(self, held: Iterable[int]) -> None:
        """Count anew: ``held`` names a block once for each reference. Any other is free."""
        counts = Counter(held)
        used = range(max(counts, default=-1) + 1)
        self._references = array("q", [counts[block] for block in used])
        self._freed = array("q", [block for block in reversed(used) if not counts[block]])
