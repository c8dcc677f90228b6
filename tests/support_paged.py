"""Pools that are poisoned where nothing was written, paged runs, and what they are compared with."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from support_block_pool import freeze
from support_models import feed, new_cache, tiny
from torch import Tensor

from fuel_core import registry
from fuel_core.contracts import DecodeModel, DecodeSession, ModelDims, RaggedBatch
from fuel_core.contracts.errors import FuelError
from fuel_core.contracts.tiers import PagedDecodeModel
from fuel_core.kv import BlockKind, DeviceKvPool, KvGeometry, SessionHandle
from fuel_core.layers import Decoder
from fuel_core.schedule import PagedDecodePlan

FAMILIES = tuple(registry.families())
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK_SIZES = (1, 4, 16, 17)
TOLERANCE = 1e-4

every_family = pytest.mark.parametrize("family", FAMILIES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_block_size = pytest.mark.parametrize("block_size", BLOCK_SIZES)


def ids(count: int, seed: int = 0) -> tuple[int, ...]:
    """Token ids of the tiny models that repeat in no pattern."""
    return tuple(random.Random(seed).choices(range(96), k=count))


model_of = cache(tiny)
"""A tiny model, made once: no call changes one."""


# --- pools


def make_pool(
    num_blocks: int = 8,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    *,
    layers: int = 2,
    heads: int = 2,
    dim: int = 8,
) -> DeviceKvPool:
    """A pool as it comes: zeroed, its blocks in order."""
    return DeviceKvPool(KvGeometry(layers, heads, dim, num_blocks, block_size, dtype.itemsize), dtype)


def pool_for(
    model: DecodeModel, num_blocks: int = 32, block_size: int = 4, *, shuffled: int | None = None
) -> DeviceKvPool:
    """A pool for a model, poisoned; ``shuffled`` is the seed of the order of its blocks."""
    dims = ModelDims.from_model(model)
    pool = make_pool(num_blocks, block_size, layers=dims.n_layers, heads=dims.n_kv_heads, dim=dims.head_dim)
    poison(pool)
    if shuffled is not None:
        shuffle(pool, shuffled)
    return pool


def buffers(pool: DeviceKvPool) -> list[Tensor]:
    """Every K and V buffer: views."""
    return [part(layer) for layer in range(pool.geometry.n_layers) for part in (pool.k_pool, pool.v_pool)]


def poison(pool: DeviceKvPool, blocks: Sequence[int] | None = None) -> None:
    """Make every slot NaN, or those of some blocks: whoever reads one has it in its result."""
    for buffer in buffers(pool):
        buffer[slice(None) if blocks is None else list(blocks)] = torch.nan


def poison_free(pool: DeviceKvPool) -> None:
    """Make every block NaN that nobody holds."""
    free = [b for b in range(pool.geometry.num_blocks) if not pool.core.block_refcount(b)]
    poison(pool, free)


def shuffle(pool: DeviceKvPool, seed: int) -> None:
    """Let the pool hand out its free blocks in another order."""
    holders = [opened(pool, 1) for _ in range(pool.core.free_blocks)]
    random.Random(seed).shuffle(holders)
    for holder in holders:
        pool.core.discard(holder)


def opened(pool: DeviceKvPool, tokens: int) -> SessionHandle:
    """A new session with room for that many tokens."""
    session = pool.core.open()
    pool.core.append(session, tokens)
    return session


def fill(pool: DeviceKvPool, block: int, seed: int) -> None:
    """Random bytes in a block, different in every layer and kind: NaNs, infinities and denormals too."""
    generator = random.Random(seed)
    for layer, kind in places(pool):
        size = len(pool.read_block_bytes(layer, kind, block))
        pool.write_block_bytes(layer, kind, block, generator.randbytes(size))


def scrawled(pool: DeviceKvPool, tokens: int) -> SessionHandle:
    """A session whose every block has bytes of its own."""
    session = opened(pool, tokens)
    for slot, block in enumerate(pool.core.session_block_table(session)):
        fill(pool, block, 100 * session + slot)
    return session


def scribble(pool: DeviceKvPool) -> None:
    """Other bytes in every block that nobody holds."""
    for block in range(pool.geometry.num_blocks):
        if not pool.core.block_refcount(block):
            fill(pool, block, 7000 + block)


def places(pool: DeviceKvPool) -> list[tuple[int, BlockKind]]:
    """Every layer and kind."""
    return [(layer, kind) for layer in range(pool.geometry.n_layers) for kind in BlockKind]


def content(pool: DeviceKvPool, block: int) -> list[bytes]:
    """The bytes of a block, in every layer and kind."""
    return [pool.read_block_bytes(layer, kind, block) for layer, kind in places(pool)]


def contents(pool: DeviceKvPool, session: SessionHandle) -> list[list[bytes]]:
    """The bytes of every block of a session, in order."""
    return [content(pool, block) for block in pool.core.session_block_table(session)]


def state(pool: DeviceKvPool) -> Any:
    """All that a pool is and holds."""
    return freeze(pool.core), [content(pool, block) for block in range(pool.geometry.num_blocks)]


def standing(pool: DeviceKvPool) -> Any:
    """What the sessions of a pool have, whatever order its free blocks are in."""
    core = pool.core
    counts = [core.block_refcount(block) for block in range(pool.geometry.num_blocks)]
    fills = {s: (core.filled_tokens(s), core.session_blocks(s)) for s in core._tables}
    tokens = {s: written(pool, s) for s in core._tables}
    return counts, fills, tokens


def written(pool: DeviceKvPool, session: SessionHandle) -> list[bytes]:
    """The bytes of every token of a session that is resident, and no slot beyond them."""
    size, filled = pool.geometry.block_size, pool.core.filled_tokens(session)
    slots = enumerate(pool.core.session_blocks(session))
    held = [(block, min(size, filled - slot * size)) for slot, block in slots if block is not None]
    return [
        buffer[block, :used].view(torch.uint8).numpy().tobytes()
        for block, used in held
        for buffer in buffers(pool)
    ]


@contextmanager
def untouched(pool: DeviceKvPool, *errors: type[BaseException]) -> Iterator[Any]:
    """The body raises one of exactly these ``errors``, in one line, and the pool is what it was."""
    before = state(pool)
    with pytest.raises(errors) as caught:
        yield caught
    assert type(caught.value) in errors
    assert not isinstance(caught.value, FuelError) or "\n" not in str(caught.value)
    assert state(pool) == before


# --- models


@cache
def lone_rows(model: DecodeModel, tokens: tuple[int, ...]) -> Tensor:
    """Logits ``[n, vocab]`` after each token, fed one by one through a contiguous cache."""
    cache = new_cache(model, len(tokens))
    return torch.stack([feed(model, cache, token) for token in tokens])


def paged_rows(
    model: PagedDecodeModel, pool: DeviceKvPool, session: SessionHandle, tokens: Sequence[int]
) -> Tensor:
    """The same through :meth:`forward_paged_step`."""
    return torch.stack([model.forward_paged_step(token, pool, session) for token in tokens])


def planned_rows(
    model: PagedDecodeModel,
    pool: DeviceKvPool,
    session: SessionHandle,
    tokens: Sequence[int],
    holder: DecodeSession,
    plan: PagedDecodePlan = PagedDecodePlan.PLAN_ONCE,
    width: int = 12,
) -> Tensor:
    """The same with a holder that may keep a plan."""
    step = model.forward_paged_step_persistent
    return torch.stack([step(token, pool, session, width, plan, holder) for token in tokens])


def ragged(model: Decoder, pool: DeviceKvPool, tokens: Mapping[SessionHandle, Sequence[int]]) -> Tensor:
    """One ragged pass: logits ``[n_sessions, vocab]``."""
    new = tuple(tuple(each) for each in tokens.values())
    return model.forward_paged_ragged(RaggedBatch(pool, tuple(tokens), new))


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Bit for bit, and numbers."""
    return bool(torch.isfinite(ours).all()) and torch.equal(ours, theirs)
