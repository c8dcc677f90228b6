"""The block pool: which session holds which blocks. Metadata only, no tensors."""

from __future__ import annotations

from typing import NewType

from fuel_core.contracts.errors import InvalidRequestError, OutOfBlocksError, UnknownSessionError
from fuel_core.kv.geometry import KvGeometry, PoolCapacity

SessionHandle = NewType("SessionHandle", int)


class KvBlockPool:
    """Hands out blocks of KV memory to sessions. Every refusal leaves it as it was."""

    def __init__(self, geometry: KvGeometry) -> None:
        self.geometry = geometry
        # Popped from the end, so that low block numbers go out first.
        self._free = list(range(geometry.num_blocks - 1, -1, -1))
        self._blocks: dict[SessionHandle, list[int]] = {}
        self._filled: dict[SessionHandle, int] = {}
        self._next = 0

    @property
    def free_blocks(self) -> int:
        """Blocks that no session holds."""
        return len(self._free)

    @property
    def kv_bytes_resident(self) -> int:
        """Bytes of all blocks that are held."""
        return (self.geometry.num_blocks - self.free_blocks) * self.geometry.block_bytes

    def capacity(self) -> PoolCapacity:
        """The pool's size and what of it is free."""
        return PoolCapacity(self.geometry, self.free_blocks, self.geometry.num_blocks)

    def blocks_required(self, filled: int, add: int) -> int:
        """New blocks that a session of ``filled`` tokens needs for ``add`` more."""
        size = self.geometry.block_size
        return -(-(filled + add) // size) - -(-filled // size)

    def open(self) -> SessionHandle:
        """A new session without blocks."""
        handle = SessionHandle(self._next)
        self._next += 1
        self._blocks[handle], self._filled[handle] = [], 0
        return handle

    def append(self, session: SessionHandle, tokens: int) -> None:
        """Give the session room for ``tokens`` more.

        Raises:
            UnknownSessionError: not an open session.
            InvalidRequestError: a negative count.
            OutOfBlocksError: too few free blocks; nothing has changed.
        """
        filled = self.filled_tokens(session)
        if tokens < 0:
            raise InvalidRequestError(f"{tokens} tokens to append", needed="0 or more", remedy="use truncate")
        need = self.blocks_required(filled, tokens)
        if need > self.free_blocks:
            raise OutOfBlocksError(need, self.free_blocks)
        self._blocks[session] += [self._free.pop() for _ in range(need)]
        self._filled[session] = filled + tokens

    def discard(self, session: SessionHandle) -> None:
        """Close the session and free its blocks.

        Raises:
            UnknownSessionError: not an open session.
        """
        self.filled_tokens(session)
        self._free += reversed(self._blocks.pop(session))
        del self._filled[session]

    def filled_tokens(self, session: SessionHandle) -> int:
        """Tokens that the session has room for.

        Raises:
            UnknownSessionError: not an open session.
        """
        if session not in self._filled:
            raise UnknownSessionError(session)
        return self._filled[session]

    def session_blocks(self, session: SessionHandle) -> tuple[int, ...]:
        """The session's blocks, in order of its tokens.

        Raises:
            UnknownSessionError: not an open session.
        """
        self.filled_tokens(session)
        return tuple(self._blocks[session])
