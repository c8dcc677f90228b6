"""Steps over the blocks of a pool: any number of sessions, any number of new tokens of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import attrs
import torch
from torch import Tensor

from fuel_core.contracts.errors import ModelContractError, OutOfBlocksError
from fuel_core.contracts.requests import check_context, check_tokens
from fuel_core.contracts.session import DecodeSession
from fuel_core.contracts.state import ModelDims
from fuel_core.kernels import ops
from fuel_core.kernels.protocols import Recording
from fuel_core.kv.device_pool import DeviceKvPool
from fuel_core.kv.growth import JointGrowth
from fuel_core.kv.pool import SessionHandle
from fuel_core.layers.rope import Rope

QkNorm = tuple[Tensor, Tensor, float]


class HasRope(Protocol):
    """A model with a rotation."""

    @property
    def rope(self) -> Rope: ...


class PagedStep:
    """A step whose tokens lie in a pool. Its inputs are buffers that can be bound to other tokens.

    Args:
        rope, pool: the model's rotation, and where the tokens lie.
        counts: how many new tokens each session has.
        width: of the block table.

    Attributes:
        token_ids: int64 ``[T]``; rows of one session stand together.
        recording: the kernel calls of an earlier run over these buffers, or None.
        is_kept: whether it is bound again, so that a recording is worth making.
    """

    recording: Recording | None = None

    def __init__(
        self, rope: Rope, pool: DeviceKvPool, counts: Sequence[int], width: int, *, is_kept: bool = False
    ) -> None:
        device = pool.device
        self._rope, self._pool, self._width, self.is_kept = rope, pool, width, is_kept
        self._counts = torch.tensor(counts, dtype=torch.int32)  # [B]
        self._tokens = torch.zeros(3, sum(counts), dtype=torch.int64, device=device)
        self.token_ids, self._positions, self._slots = self._tokens  # [T] each
        self._block_table = torch.zeros(len(counts), width, dtype=torch.int32, device=device)
        self._context_lens = torch.zeros(len(counts), dtype=torch.int32, device=device)
        self._cos, self._sin = rope.angles(self._positions)  # [T, D/2]

    def bind(self, tokens: Sequence[int], sessions: Sequence[SessionHandle]) -> None:
        """Take the tokens, which the sessions' fill counts already, and where they lie."""
        table = self._pool.materialize_block_table_padded(sessions, self._width)
        core, size = self._pool.core, self._pool.geometry.block_size
        positions: list[int] = []
        slots: list[int] = []
        for session, count in zip(sessions, self._counts.tolist(), strict=True):
            blocks, end = core.session_block_table(session), core.filled_tokens(session)
            positions += range(end - count, end)
            slots += [blocks[p // size] * size + p % size for p in range(end - count, end)]
        self._tokens.copy_(torch.tensor([list(tokens), positions, slots], dtype=torch.int64))
        self._block_table.copy_(table.block_table)
        self._context_lens.copy_(table.context_lens)
        cos, sin = self._rope.angles(self._positions)
        self._cos.copy_(cos)
        self._sin.copy_(sin)

    def attention(self, layer: int, qkv: Tensor, qk_norm: QkNorm | None = None) -> Tensor:
        """See :meth:`Step.attention`."""
        k, v = self._pool.k_pool(layer), self._pool.v_pool(layer)
        q = ops.write_paged_kv(qkv, self._cos, self._sin, k, v, self._slots, qk_norm)
        return ops.paged_attention(q, k, v, self._block_table, self._context_lens, self._counts)


@attrs.frozen(eq=False)
class _Plan:
    """A step that is kept, and what it was built for."""

    model: object
    alloc_id: int
    session: SessionHandle
    width: int
    step: PagedStep

    def serves(self, model: object, pool: DeviceKvPool, session: SessionHandle, width: int) -> bool:
        built_for = (self.alloc_id, self.session, self.width)
        return self.model is model and built_for == (pool.alloc_id, session, width)


@attrs.frozen(eq=False)
class HeldStep:
    """The step of one session's single tokens, built once and kept in the session's holder.

    One that was built for another model, pool, session or width is replaced.
    """

    model: HasRope
    holder: DecodeSession
    width: int

    def of(self, pool: DeviceKvPool, session: SessionHandle) -> PagedStep:
        """The held step, counted as rebound, or a new one."""
        plan = self.holder.plan
        if isinstance(plan, _Plan) and plan.serves(self.model, pool, session, self.width):
            self.holder.rebinds += 1
            return plan.step
        step = PagedStep(self.model.rope, pool, [1], self.width, is_kept=True)
        self.holder.plan = _Plan(self.model, pool.alloc_id, session, self.width, step)
        self.holder.rebinds = 0
        return step


def step_for(
    model: HasRope, pool: DeviceKvPool, sessions: Sequence[SessionHandle], counts: Sequence[int]
) -> PagedStep:
    """A step for these numbers of new tokens: of single tokens one that the pool keeps, else a new one."""
    width = max(len(pool.core.session_blocks(session)) for session in sessions)
    if any(count != 1 for count in counts):
        return PagedStep(model.rope, pool, counts, width)
    steps = pool.plans.setdefault(model, {})
    key = len(counts), 1 << (width - 1).bit_length()  # few widths, so that few steps are kept
    if key not in steps:
        steps[key] = PagedStep(model.rope, pool, counts, key[1], is_kept=True)
    step: PagedStep = steps[key]
    return step


def check_one_position(pool: DeviceKvPool, sessions: Sequence[SessionHandle]) -> None:
    """Sessions of one length.

    Raises:
        ModelContractError: names the first that differs.
        UnknownSessionError: not a session of the pool.
    """
    lengths = [pool.core.filled_tokens(session) for session in sessions]
    for session, length in zip(sessions, lengths, strict=True):
        if length != lengths[0]:
            raise ModelContractError(
                f"session {session} is at position {length} and session {sessions[0]} at {lengths[0]}",
                needed="sessions at one position",
                remedy="group them by their length, or use forward_paged_ragged",
            )


def check_pool(pool: DeviceKvPool, dims: ModelDims, device: torch.device) -> None:
    """A pool of the model's geometry, on its device.

    Raises:
        ModelContractError: names both.
    """
    g = pool.geometry
    if ModelDims(g.n_layers, g.n_kv_heads, g.head_dim) != dims or pool.device.type != device.type:
        raise ModelContractError(
            f"a pool of {g} on {pool.device}",
            needed=f"{dims} on {device}",
            remedy="build the pool from ModelDims.from_model(model)",
        )


def check_batch(
    pool: DeviceKvPool,
    sessions: Sequence[SessionHandle],
    tokens: Sequence[Sequence[int]],
    *,
    vocab_size: int,
    max_context: int | None,
) -> None:
    """Everything that can be wrong with a batch, before any of it is in the pool.

    Raises:
        ModelContractError: no sessions, other numbers of sessions and tokens, or a session twice.
        InvalidRequestError: a session without tokens, an id outside the vocabulary, or beyond the context.
        UnknownSessionError, SessionNotResidentError: a session that cannot be attended over.
        OutOfBlocksError: the pool has too few free blocks for all of them.
    """
    if not sessions or len(sessions) != len(tokens) or len(set(sessions)) != len(sessions):
        raise ModelContractError(
            f"tokens for {len(tokens)} of the sessions {list(sessions)}",
            needed="tokens for each of one or more different sessions",
            remedy="pass each session once, with its new tokens",
        )
    for session, new in zip(sessions, tokens, strict=True):
        check_tokens(new, vocab_size)
        pool.core.session_block_table(session)
        check_context(pool.core.filled_tokens(session) + len(new), max_context)
    need = blocks_needed(pool, sessions, [len(new) for new in tokens])
    if need > pool.core.free_blocks:
        raise OutOfBlocksError(need, pool.core.free_blocks)


def blocks_needed(pool: DeviceKvPool, sessions: Sequence[SessionHandle], counts: Sequence[int]) -> int:
    """The blocks that appending to all sessions takes, copies of shared last blocks among them."""
    growth = JointGrowth(pool.core)
    for session, count in zip(sessions, counts, strict=True):
        growth.add(session, count)
    return growth.need


@contextmanager
def appended(pool: DeviceKvPool, sessions: Sequence[SessionHandle], counts: Sequence[int]) -> Iterator[None]:
    """Room for the new tokens in blocks that are the sessions' own; taken back if the body fails.

    A block that was copied for a session stays its own then: the last sharer writes to the original, behind
    its own fill and maybe over tokens of the session that left it.
    """
    before = [pool.core.filled_tokens(session) for session in sessions]
    try:
        for session, filled, count in zip(sessions, before, counts, strict=True):
            pool.core.append(session, count)
            if filled % pool.geometry.block_size:
                pool.ensure_writable_block(session, filled // pool.geometry.block_size)
        yield
    except BaseException:
        for session, filled in zip(sessions, before, strict=True):
            pool.core.truncate(session, filled)
        raise
