"""A block pool with its bytes: page tables, attention, copy-on-write, eviction and shifted prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs
import torch
from torch import Tensor

from fuel_core.contracts.errors import CapacityError, InvalidRequestError
from fuel_core.kernels import ops
from fuel_core.kv.eviction import Evicted, Fidelity, StateKind
from fuel_core.kv.geometry import KvGeometry
from fuel_core.kv.pool import KvBlockPool, PrefixId, SessionHandle
from fuel_core.kv.storage import BlockStorage, outside


@attrs.frozen(eq=False)
class PageTable:
    """Where a batch of sessions lies in a pool.

    Attributes:
        block_table: int32 ``[B, max_blocks]`` on the CPU, each session's blocks, padded on the right with 0.
        context_lens: int32 ``[B]`` on the CPU, tokens of each session.
        batch: B.
        max_blocks: the width, at least 1.
    """

    block_table: Tensor
    context_lens: Tensor
    batch: int
    max_blocks: int


@attrs.frozen(eq=False)
class DeviceEvicted:
    """A session's evicted state: which slots, and their bytes on the host.

    Attributes:
        handle: what the block pool needs to restore them.
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


class DeviceKvPool(BlockStorage):
    """A :class:`KvBlockPool` with its bytes. ``core`` says which session holds which block."""

    def __init__(
        self, geometry: KvGeometry, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
    ) -> None:
        super().__init__(geometry, dtype, device)
        self.core = KvBlockPool(geometry)

    def ensure_writable_block(self, session: SessionHandle, index: int) -> int:
        """The block of a session's slot, private: one that others share is copied first.

        To be called after ``append`` and before a write.

        Raises:
            UnknownSessionError, SessionNotResidentError, BadBlockIndexError: as ``core.resident_block``.
            OutOfBlocksError: no block is free for the copy; nothing has changed.
        """
        broken = self.core.cow_break(session, index)
        if broken is not None:
            self.copy_block(*broken)
        return self.core.resident_block(session, index)

    # -- page tables ---------------------------------------------------------------------------

    def materialize_block_table(self, sessions: Sequence[SessionHandle]) -> PageTable:
        """The sessions' blocks, as wide as the longest needs.

        Raises:
            UnknownSessionError, SessionNotResidentError: a session that cannot be attended over.
        """
        tables = [self.core.session_block_table(session) for session in sessions]
        return self._page_table(sessions, tables, max([1, *map(len, tables)]))

    def materialize_block_table_padded(self, sessions: Sequence[SessionHandle], cap: int) -> PageTable:
        """The same in a fixed width, so that a plan's buffers fit every step.

        Raises:
            CapacityError: a session has more than ``cap`` blocks; it is never cut.
            UnknownSessionError, SessionNotResidentError: a session that cannot be attended over.
        """
        tables = [self.core.session_block_table(session) for session in sessions]
        longest = max(map(len, tables), default=0)
        if longest > max(cap, 1):
            raise CapacityError(
                f"a session of {longest} blocks",
                needed=f"at most {max(cap, 1)}, the width of the table",
                remedy="ask for a wider table",
                need=longest,
                have=max(cap, 1),
            )
        return self._page_table(sessions, tables, max(cap, 1))

    def _page_table(
        self, sessions: Sequence[SessionHandle], tables: Sequence[Sequence[int]], width: int
    ) -> PageTable:
        block_table = torch.zeros(len(tables), width, dtype=torch.int32)  # [B, width]
        for row, table in zip(block_table, tables, strict=True):
            row[: len(table)] = torch.tensor(table, dtype=torch.int32)
        lens = torch.tensor([self.core.filled_tokens(s) for s in sessions], dtype=torch.int32)  # [B]
        return PageTable(block_table, lens, len(tables), width)

    # -- attention -----------------------------------------------------------------------------

    def decode_attn(
        self,
        layer: int,
        q: Tensor,
        k_new: Tensor,
        v_new: Tensor,
        table: PageTable,
        block: int,
        slot: int,
        scale: float,
    ) -> Tensor:
        """Write one session's new token at ``slot`` of ``block`` and attend over all that it has.

        Args:
            layer: which.
            q: ``[1, Hq, 1, D]``, rotated.
            k_new, v_new: ``[1, Hkv, 1, D]``, K rotated.
            table: of that session, its length counting the new token.
            block, slot: where the new token goes.
            scale: of the scores.

        Returns:
            ``[1, Hq, 1, D]``.

        Raises:
            InvalidRequestError: no such layer, block or slot, or tensors of other shapes. Nothing is written.
        """
        return self.decode_attn_batched(layer, q, k_new, v_new, table, [(block, slot)], scale)

    def decode_attn_batched(
        self,
        layer: int,
        q: Tensor,
        k_new: Tensor,
        v_new: Tensor,
        table: PageTable,
        writes: Sequence[tuple[int, int]],
        scale: float,
    ) -> Tensor:
        """:meth:`decode_attn` of B sessions: tensors ``[B, H, 1, D]``, a (block, slot) for each."""
        for block, slot in writes:
            self.check_block(block)
            if not 0 <= slot < self.geometry.block_size:
                raise outside("slot", slot, self.geometry.block_size)
        rows = [block * self.geometry.block_size + slot for block, slot in writes]
        offsets = torch.tensor(rows, dtype=torch.int64, device=self.device)  # [B]
        return self.decode_attn_off(layer, q, k_new, v_new, table, offsets, scale)

    def decode_attn_off(
        self,
        layer: int,
        q: Tensor,
        k_new: Tensor,
        v_new: Tensor,
        table: PageTable,
        offsets: Tensor,
        scale: float,
    ) -> Tensor:
        """The same with each write's place, ``block * block_size + slot``, read from int64 ``offsets [B]``.

        It is the same call for every step: what changes is in tensors. What stands in ``offsets`` is not
        checked, since that would wait for the device.
        """
        k, v = self.k_pool(layer), self.v_pool(layer)
        self._check_new(q, k_new, v_new, table.batch, offsets)
        k.view(self.pool_shape_flat).index_copy_(0, offsets, k_new.squeeze(2).to(self.dtype))
        v.view(self.pool_shape_flat).index_copy_(0, offsets, v_new.squeeze(2).to(self.dtype))
        tables = table.block_table.to(self.device), table.context_lens.to(self.device)
        out = ops.paged_attention(q.squeeze(2), k, v, *tables, [1] * table.batch, scale)  # [B, Hq D]
        return out.view(q.shape)

    def _check_new(self, q: Tensor, k_new: Tensor, v_new: Tensor, batch: int, offsets: Tensor) -> None:
        _, _, heads, dim = self.pool_shape
        groups = q.shape[1] // heads if q.ndim == 4 else 0
        given = [list(part.shape) for part in (q, k_new, v_new, offsets)]
        kv = [batch, heads, 1, dim]
        needed = [[batch, max(groups, 1) * heads, 1, dim], kv, kv, [batch]]
        if not batch or given != needed:
            raise InvalidRequestError(
                f"Q, K, V and places of shapes {given} for a table of {batch} sessions",
                needed=f"{needed}, and one session or more",
                remedy="pass one row for each session of the table",
            )

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
        # Copied first: where the host has no room for them, nothing has happened.
        saved = {i: self._buffers[:, :, block].to("cpu", copy=True) for i, block in alone.items()}
        return DeviceEvicted(self.core.evict_blocks(session, indices).handle, saved)

    def _is_alone(self, block: int | None) -> bool:
        return block is not None and self.core.block_refcount(block) == 1

    def restore(self, session: SessionHandle, evicted: DeviceEvicted) -> None:
        """Bring the bytes back, into whatever blocks are free.

        Raises:
            UnknownSessionError, OutOfBlocksError: it stays evicted, and may be restored later.
            InvalidRequestError: it was restored before, or is another session's.
        """
        for slot, block in self.core.restore(session, evicted.handle):
            self._buffers[:, :, block].copy_(evicted.saved[slot])

    def swap_out(self, session: SessionHandle) -> SessionImage:
        """Copy a session to the host and close it; unlike after :meth:`evict`, it pins no block of others.

        Raises:
            UnknownSessionError, SessionNotResidentError: nothing has changed.
        """
        blocks = torch.tensor(self.core.session_block_table(session), dtype=torch.int64, device=self.device)
        image = SessionImage(self.core.filled_tokens(session), self._buffers[:, :, blocks].cpu())
        self.core.discard(session)
        return image

    def swap_in(self, image: SessionImage) -> SessionHandle:
        """A new session that holds what the image does, byte for byte. The image stays good.

        Raises:
            OutOfBlocksError: it does not fit now; nothing has changed.
        """
        session = self.core.open()
        try:
            self.core.append(session, image.tokens)
            table = self.core.session_block_table(session)
            blocks = torch.tensor(table, dtype=torch.int64, device=self.device)
            self._buffers[:, :, blocks] = image.data.to(self.device)
        except BaseException:
            self.core.discard(session)
            raise
        return session

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
        angles = offset * rope.inv_freq.double()  # [D/2]
        rows = self.geometry.block_size
        cos, sin = (f(angles).float().expand(rows, -1).to(self.device) for f in (torch.cos, torch.sin))
        for source, fresh in pairs:
            self.copy_block(source, fresh)
            for layer in range(self.geometry.n_layers):
                k = self.k_pool(layer)[fresh]  # [block_size, Hkv, D]
                k.copy_(ops.rotate(k, cos, sin))
        return len(pairs) * rows
