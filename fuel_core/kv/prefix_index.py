"""The automatic prefix cache: full blocks, found again by the tokens that they and those before them hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from hashlib import blake2b
from itertools import islice, takewhile

import attrs

from fuel_core.kv.pool import KvBlockPool, SessionHandle


@attrs.define
class PrefixStats:
    """What the cache has done.

    Attributes:
        lookups: prompts looked up.
        hits: those of them that found at least one block.
        tokens_reused: tokens that need not be computed again.
        blocks_reclaimed: blocks given up for others.
    """

    lookups: int = 0
    hits: int = 0
    tokens_reused: int = 0
    blocks_reclaimed: int = 0


class PrefixIndex:
    """Full blocks of a pool under the hash chain of their tokens.

    Each is held by a session of its own in the pool, so it stays when those that filled it are gone; one that
    nobody else holds can be reclaimed, least recently used first and the end of a chain before its beginning.

    Args:
        pool: where the blocks are.
        namespace: all that changes keys and values beside the tokens: the model, its adapter.
    """

    def __init__(self, pool: KvBlockPool, namespace: Hashable) -> None:
        self._pool = pool
        self._root = blake2b(repr(namespace).encode(), digest_size=16).digest()
        # Key -> the session that holds its block; least recently used first.
        self._holders: OrderedDict[bytes, SessionHandle] = OrderedDict()
        self.stats = PrefixStats()

    def __len__(self) -> int:
        """Blocks in the index."""
        return len(self._holders)

    def reclaimable(self, most: int | None = None) -> int:
        """Blocks that only the index holds; counted up to ``most``, they are found at once."""
        return sum(1 for _ in islice(self._alone(), most))

    def in_use(self, tokens: Sequence[int]) -> int:
        """How many of the blocks that :meth:`take` would share are held by sessions, and so cost nothing."""
        return sum(not self._is_alone(self._holders[key]) for key in self._found(tokens))

    def take(self, tokens: Sequence[int], session: SessionHandle) -> int:
        """Share what matches with an empty session; the tokens that it then holds.

        The last token is left out, and the block that it fills: it must be computed whatever is cached, since
        its logits are what comes next.
        """
        found = self._found(tokens)
        for key in found:
            self._pool.splice(self._holders[key], session, 0, 1)
        self._touch(found)
        reused = len(found) * self._pool.geometry.block_size
        self.stats.lookups += 1
        self.stats.hits += bool(found)
        self.stats.tokens_reused += reused
        return reused

    def add(self, tokens: Sequence[int], session: SessionHandle, chain: list[bytes]) -> None:
        """Index the full blocks of a session that holds the keys and values of ``tokens``.

        ``chain`` is the session's own, empty at first: what was hashed before is not hashed again.
        """
        self._extend(chain, tokens)
        for slot, key in enumerate(chain):
            if key not in self._holders:
                holder = self._pool.open()
                self._pool.splice(session, holder, slot, slot + 1)
                self._holders[key] = holder
        self._touch(chain)

    def forget(self, chain: list[bytes], first: int) -> None:
        """Let go of the blocks of a chain from ``first`` on, which its session is about to write again."""
        for key in chain[first:]:
            if key in self._holders:
                self._pool.discard(self._holders.pop(key))
        del chain[first:]

    def reclaim(self, blocks: int) -> int:
        """Free up to ``blocks`` that only the index holds; how many it was."""
        chosen = list(islice(self._alone(), blocks))
        for key in chosen:
            self._pool.discard(self._holders.pop(key))
        self.stats.blocks_reclaimed += len(chosen)
        return len(chosen)

    def _alone(self) -> Iterator[bytes]:
        return (key for key, holder in self._holders.items() if self._is_alone(holder))

    def _is_alone(self, holder: SessionHandle) -> bool:
        return self._pool.block_refcount(self._pool.resident_block(holder, 0)) == 1

    def _touch(self, keys: Sequence[bytes]) -> None:
        # From the end, so that a chain is given up from its end.
        for key in reversed(keys):
            self._holders.move_to_end(key)

    def _found(self, tokens: Sequence[int]) -> list[bytes]:
        chain: list[bytes] = []
        self._extend(chain, tokens[:-1])
        return list(takewhile(self._holders.__contains__, chain))

    def _extend(self, chain: list[bytes], tokens: Sequence[int]) -> None:
        """Bring a chain up to the full blocks of ``tokens``: each key is of its tokens and the key before."""
        size = self._pool.geometry.block_size
        for start in range(len(chain) * size, len(tokens) - size + 1, size):
            block = b"".join(int(token).to_bytes(8, "little") for token in tokens[start : start + size])
            chain.append(blake2b((chain[-1] if chain else self._root) + block, digest_size=16).digest())
