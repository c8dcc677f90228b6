"""A block pool with its bytes: copy-on-write, eviction, whole sessions on the host, and shifted prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs
import torch
from torch import Tensor

from fuel_core.contracts.errors import InvalidRequestError, counted
from fuel_core.kernels import ops
from fuel_core.kv.eviction import Evicted, Fidelity, StateKind
from fuel_core.kv.paging import PagedStorage, PageTable
from fuel_core.kv.pool import PrefixId, SessionHandle
from fuel_core.kv.storage import allocated

__all__ = ["DeviceEvicted", "DeviceKvPool", "HasFrequencies", "PageTable", "SessionImage"]


@attrs.define(eq=False)
class DeviceEvicted:
    """A session's evicted state: which slots, and their bytes on the host.

    Attributes:
        handle: what the block pool needs to restore them; another one after a restore that failed.
        saved: per slot its bytes, ``[n_layers, 2, block_size, n_kv_heads, head_dim]`` on the CPU.
    """

    handle: Evicted
    saved: dict[int, Tensor]

    @property
    def saved_block_count(self) -> int:
        """How many blocks were moved; shared ones stay where they are."""
        return len(self.saved)

    @property
    def covers(self) -> tuple[StateKind, ...]:
        """What kinds of state are in it."""
        return self.handle.covers

    @property
    def fidelity(self) -> Fidelity:
        """How faithfully they come back."""
        return self.handle.fidelity


@attrs.frozen(eq=False)
class SessionImage:
    """All that a session holds, shared blocks too, on the host.

    Attributes:
        tokens: its fill.
        data: ``[n_layers, 2, blocks, block_size, n_kv_heads, head_dim]`` on the CPU.
    """

    tokens: int
    data: Tensor


class HasFrequencies(Protocol):
    """A rotation: float32 ``inv_freq [D/2]``, radians per position."""

    @property
    def inv_freq(self) -> Tensor: ...


class DeviceKvPool(PagedStorage):
    """A :class:`KvBlockPool` with its bytes. ``core`` says which session holds which block.

    What copies bytes is all or nothing: where a copy fails, its error is raised and nothing has changed.
    """

    def __repr__(self) -> str:
        return f"<{type(self).__name__} over {self.core!r} in {self.dtype} on {self.device}>"

    def ensure_writable_block(self, session: SessionHandle, index: int) -> int:
        """The block of a session's slot, private: one that others share is copied first.

        To be called after ``append`` and before a write.

        Raises:
            UnknownSessionError, SessionNotResidentError, BadBlockIndexError: as ``core.resident_block``.
            OutOfBlocksError: no block is free for the copy; nothing has changed.
        """
        block = self.core.resident_block(session, index)
        if self.core.block_refcount(block) > 1:
            [fresh] = self.core.next_blocks(1)
            self.copy_block(block, fresh)
            self.core.cow_break(session, index)
        return self.core.resident_block(session, index)

    # -- eviction ------------------------------------------------------------------------------

    def evict(self, session: SessionHandle) -> DeviceEvicted:
        """Move all that a session holds alone to the host, and free its blocks; see :meth:`evict_blocks`."""
        slots = [slot for slot, block in enumerate(self.core.session_blocks(session)) if block is not None]
        return self.evict_blocks(session, slots)

    def evict_blocks(self, session: SessionHandle, indices: Sequence[int]) -> DeviceEvicted:
        """Move some blocks of a session to the host. Shared ones stay where they are.

        Raises:
            UnknownSessionError, BadBlockIndexError: nothing has changed.
        """
        held = self.core.session_blocks(session)
        alone = {i: held[i] for i in indices if 0 <= i < len(held) and self._is_alone(held[i])}
        saved = {i: self.block_to_host(block) for i, block in alone.items() if block is not None}
        return DeviceEvicted(self.core.evict_blocks(session, indices).handle, saved)

    def _is_alone(self, block: int | None) -> bool:
        return block is not None and self.core.block_refcount(block) == 1

    def restore(self, session: SessionHandle, evicted: DeviceEvicted) -> None:
        """Bring the bytes back, into whatever blocks are free.

        Raises:
            UnknownSessionError, OutOfBlocksError: it stays evicted, and may be restored later.
            InvalidRequestError: it was restored before, or is another session's.
        """
        pairs = self.core.restore(session, evicted.handle)
        try:
            for slot, block in pairs:
                self.block_from_host(block, evicted.saved[slot])
        except BaseException:
            evicted.handle = self.core.evict_blocks(session, [slot for slot, _ in pairs]).handle
            raise

    # -- whole sessions ------------------------------------------------------------------------

    def swap_out(self, session: SessionHandle) -> SessionImage:
        """Copy a session to the host and close it; unlike after :meth:`evict`, it pins no block of others.

        It takes no memory of the device: that is full when sessions have to go.

        Raises:
            UnknownSessionError, SessionNotResidentError: nothing has changed.
            CapacityError: the host has no memory for it; nothing has changed.
        """
        image = self._empty_image(self.core.filled_tokens(session))
        for place, block in enumerate(self.core.session_block_table(session)):
            image.data[:, :, place] = self.block_to_host(block)
        self.core.discard(session)
        return image

    def _empty_image(self, tokens: int) -> SessionImage:
        data = allocated(
            f"the keys and values of {counted(tokens, 'token')} on the host",
            "run fewer sessions at a time, or give the pool more blocks",
            lambda: torch.empty(self._image_shape(tokens), dtype=self.dtype),
        )
        return SessionImage(tokens, data)

    def _image_shape(self, tokens: int) -> tuple[int, ...]:
        return self.geometry.n_layers, 2, self.core.blocks_required(0, tokens), *self.pool_shape[1:]

    def swap_in(self, image: SessionImage) -> SessionHandle:
        """A new session that holds what the image does, byte for byte. The image stays good.

        Raises:
            InvalidRequestError: an image of a pool of another geometry or dtype.
            OutOfBlocksError: it does not fit now. In both cases nothing has changed.
        """
        self._check_image(image)
        session = self.core.open()
        try:
            self.core.append(session, image.tokens)
            for place, block in enumerate(self.core.session_block_table(session)):
                self.block_from_host(block, image.data[:, :, place])
        except BaseException:
            self.core.discard(session)
            raise
        return session

    def _check_image(self, image: SessionImage) -> None:
        needed = self._image_shape(image.tokens)
        if image.data.shape != needed or image.data.dtype != self.dtype:
            raise InvalidRequestError(
                f"an image of shape {list(image.data.shape)} in {image.data.dtype}",
                needed=f"{list(needed)} in {self.dtype}, for {counted(image.tokens, 'token')}",
                remedy="swap it in where it was swapped out, or into a pool of that geometry",
            )

    # -- prefixes ------------------------------------------------------------------------------

    def splice_prefix_shifted(self, prefix: PrefixId, dst: SessionHandle, rope: HasFrequencies) -> int:
        """Give ``dst`` the prefix behind what it holds: fresh blocks, K turned on by as many positions.

        The rotation is pure: an attention factor is in the K already.

        Returns:
            The tokens added.

        Raises:
            UnknownPrefixError, UnknownSessionError, OffsetNotBlockAlignedError, OutOfBlocksError: nothing has
                changed.
        """
        offset, pairs = self.core.alloc_shifted_prefix_slots(prefix, dst)
        try:
            self._turn(pairs, offset * rope.inv_freq.double())
        except BaseException:
            self.core.truncate(dst, offset)
            raise
        return len(pairs) * self.geometry.block_size

    def _turn(self, pairs: Sequence[tuple[int, int]], angles: Tensor) -> None:
        """Copy blocks, ``(source, fresh)`` each, and turn their K by float64 ``angles [D/2]``."""
        rows = self.geometry.block_size
        cos, sin = (f(angles).float().expand(rows, -1).to(self.device) for f in (torch.cos, torch.sin))
        for source, fresh in pairs:
            self.copy_block(source, fresh)
            for layer in range(self.geometry.n_layers):
                k = self.k_pool(layer)[fresh]  # [block_size, Hkv, D]
                k.copy_(ops.rotate(k, cos, sin))
