"""Storage that sessions share: their page tables, and attention through them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import torch
from torch import Tensor

from fuel_core.contracts.errors import CapacityError, InvalidRequestError
from fuel_core.kernels import ops
from fuel_core.kv.geometry import KvGeometry
from fuel_core.kv.pool import KvBlockPool, SessionHandle
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


class PagedStorage(BlockStorage):
    """The bytes of a :class:`KvBlockPool`, ``core``, which says which session holds which block.

    Attributes:
        core: the bookkeeping.
        plans: what each model has built over these buffers, by the model; it goes with them.
    """

    def __init__(
        self, geometry: KvGeometry, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
    ) -> None:
        super().__init__(geometry, dtype, device)
        self.core = KvBlockPool(geometry)
        self.plans: WeakKeyDictionary[object, dict[Any, Any]] = WeakKeyDictionary()

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
        padded = [[*table, *repeat(0, width - len(table))] for table in tables]
        block_table = torch.tensor(padded, dtype=torch.int32).view(len(tables), width)  # [B, width]
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
            InvalidRequestError: no such layer, block or slot, tensors of other shapes, or a table that points
                elsewhere. Nothing is written.
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
        blocks, lens = self._checked(table)
        k.view(self.pool_shape_flat).index_copy_(0, offsets, k_new.squeeze(2).to(self.dtype))
        v.view(self.pool_shape_flat).index_copy_(0, offsets, v_new.squeeze(2).to(self.dtype))
        tables = blocks.to(self.device), lens.to(self.device)
        counts = torch.ones(table.batch, dtype=torch.int32)  # [B]
        out = ops.paged_attention(q.squeeze(2), k, v, *tables, counts, scale)  # [B, Hq D]
        return out.view(q.shape)

    def _checked(self, table: PageTable) -> tuple[Tensor, Tensor]:
        """The blocks and lengths of a table, int32 without gaps: a kernel reads wherever they point to."""
        blocks = table.block_table.to(torch.int32).contiguous()
        lens = table.context_lens.to(torch.int32).contiguous()
        size, last = self.geometry.block_size, self.geometry.num_blocks - 1
        sound = blocks.ndim == 2 and len(blocks) == table.batch and lens.shape == (table.batch,)
        if sound:
            slots = torch.arange(blocks.shape[1]) * size  # [width], the first position of each block
            used = blocks[slots < lens[:, None]]
            sound = bool(((lens >= 1) & (lens <= blocks.shape[1] * size)).all())
            sound &= bool(((used >= 0) & (used <= last)).all())
        if not sound:
            raise InvalidRequestError(
                f"a table {list(table.block_table.shape)} with lengths {table.context_lens.tolist()}",
                needed=f"[{table.batch}, width], blocks from 0 to {last}, lengths from 1 to width * {size}",
                remedy="use what materialize_block_table returns",
            )
        return blocks, lens

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
