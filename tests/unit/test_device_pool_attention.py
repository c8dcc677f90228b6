"""Attention through the pool: the three forms are one, equal to dense float64, and read nothing else."""

from __future__ import annotations

from types import ModuleType

import attrs
import pytest
import torch
from support_kernels import check
from support_paged import (
    buffers,
    every_block_size,
    every_dtype,
    make_pool,
    opened,
    poison,
    same,
    shuffle,
    state,
    untouched,
)
from torch import Tensor

from fuel_core.contracts.errors import InvalidRequestError
from fuel_core.kv import BlockKind, DeviceKvPool, PageTable, SessionHandle

HQ, HKV, D, SCALE = 4, 2, 8, 8**-0.5


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``q [Hq, D]`` over ``k, v [L, Hkv, D]``: ``[1, Hq, 1, D]``, the softmax written out."""
    k, v = (part.repeat_interleave(HQ // HKV, dim=1) for part in (k, v))  # [L, Hq, D]
    weights = (torch.einsum("hd,lhd->hl", q, k) * SCALE).exp()
    weights = weights / weights.sum(-1, keepdim=True)
    return torch.einsum("hl,lhd->hd", weights, v)[None, :, None]


@attrs.define(eq=False)
class Stream:
    """A session that is decoded token by token, and all keys and values that it was given."""

    pool: DeviceKvPool
    session: SessionHandle
    seed: int
    k: list[Tensor] = attrs.field(factory=list)
    v: list[Tensor] = attrs.field(factory=list)
    q: Tensor = attrs.field(factory=lambda: torch.empty(0))

    def draw(self) -> tuple[int, int]:
        """Make room for a token and draw it; the block and slot where it belongs."""
        generator = torch.Generator().manual_seed(1000 * self.seed + len(self.k))
        q, k, v = (torch.randn(heads, D, generator=generator).to(self.pool.dtype) for heads in (HQ, HKV, HKV))
        position, size = len(self.k), self.pool.geometry.block_size
        self.pool.core.append(self.session, 1)
        self.q = q
        self.k.append(k)
        self.v.append(v)
        return self.pool.core.resident_block(self.session, position // size), position % size

    @property
    def new(self) -> tuple[Tensor, Tensor, Tensor]:
        """``q [1, Hq, 1, D]``, ``k_new`` and ``v_new [1, Hkv, 1, D]`` of the last token."""
        return self.q[None, :, None], self.k[-1][None, :, None], self.v[-1][None, :, None]

    def expect(self, out: Tensor) -> None:
        """``out`` is dense attention over all that the stream has."""
        assert out.shape == (1, HQ, 1, D)
        assert out.dtype == self.pool.dtype
        check(out, dense, self.q, torch.stack(self.k), torch.stack(self.v))


def new_pool(dtype: torch.dtype = torch.float32, block_size: int = 4, num_blocks: int = 40) -> DeviceKvPool:
    pool = make_pool(num_blocks, block_size, dtype, heads=HKV, dim=D)
    poison(pool)
    shuffle(pool, 5)
    return pool


def stream(pool: DeviceKvPool, seed: int = 1) -> Stream:
    return Stream(pool, pool.core.open(), seed)


def decoded(pool: DeviceKvPool, tokens: int, seed: int = 1) -> Stream:
    """A stream of some tokens, written and attended one by one in layer 1."""
    result = stream(pool, seed)
    for _ in range(tokens):
        place = result.draw()
        pool.decode_attn(1, *result.new, pool.materialize_block_table([result.session]), *place, SCALE)
    return result


@every_dtype
@every_block_size
def test_every_step_of_a_growing_session_is_dense_attention_in_all_three_forms(
    dtype: torch.dtype, block_size: int
) -> None:
    pools = [new_pool(dtype, block_size) for _ in range(3)]
    streams = [stream(pool) for pool in pools]
    for _ in range(2 * block_size + 2 if block_size > 1 else 6):
        (block, slot), *_ = [each.draw() for each in streams]
        tables = [p.materialize_block_table([s.session]) for p, s in zip(pools, streams, strict=True)]
        new = streams[0].new
        one = pools[0].decode_attn(1, *new, tables[0], block, slot, SCALE)
        batched = pools[1].decode_attn_batched(1, *new, tables[1], [(block, slot)], SCALE)
        offset = torch.tensor([block * block_size + slot])
        off = pools[2].decode_attn_off(1, *new, tables[2], offset, SCALE)
        streams[0].expect(one)
        assert same(one, batched)
        assert same(one, off)
    assert list(pools[0].core.session_block_table(streams[0].session)) != list(range(3))
    assert state(pools[0]) == state(pools[1]) == state(pools[2])
    assert torch.isnan(pools[0].k_pool(0)).all()


@every_dtype
def test_a_row_of_a_batch_is_what_the_session_has_alone(dtype: torch.dtype) -> None:
    lengths = (0, 3, 4, 11)
    pool, twin = new_pool(dtype), new_pool(dtype)
    together = [decoded(pool, n, seed) for seed, n in enumerate(lengths)]
    alone = [decoded(twin, n, seed) for seed, n in enumerate(lengths)]
    writes = [each.draw() for each in together]
    new = [torch.cat(parts) for parts in zip(*(each.new for each in together), strict=True)]
    table = pool.materialize_block_table([each.session for each in together])
    out = pool.decode_attn_batched(1, *new, table, writes, SCALE)
    assert out.shape == (4, HQ, 1, D)
    for row, each, lone in zip(out, together, alone, strict=True):
        place = lone.draw()
        single = twin.materialize_block_table([lone.session])
        each.expect(row[None])
        assert same(row[None], twin.decode_attn(1, *lone.new, single, *place, SCALE))


@every_block_size
@pytest.mark.parametrize("length", [1, 3, 4, 5, 16, 17, 33])
def test_neither_padding_nor_what_it_points_at_changes_a_bit(length: int, block_size: int) -> None:
    pool = new_pool(block_size=block_size)
    it = decoded(pool, length - 1)
    place = it.draw()
    fitted = pool.materialize_block_table([it.session])
    expected = pool.decode_attn(1, *it.new, fitted, *place, SCALE)
    it.expect(expected)
    own = set(pool.core.session_block_table(it.session))
    other = next(block for block in range(40) if block not in own)  # poisoned, as all that nobody wrote
    for filler in (0, other, 10**6, -1):
        padded = pool.materialize_block_table_padded([it.session], len(own) + 7)
        padded.block_table[:, len(own) :] = filler
        assert same(pool.decode_attn(1, *it.new, padded, *place, SCALE), expected)


def test_what_lies_in_unused_slots_and_blocks_changes_nothing() -> None:
    results = []
    for value in (0.0, torch.nan, torch.inf, 1e30):
        pool = new_pool()
        for buffer in buffers(pool):
            buffer.fill_(value)
        it = decoded(pool, 6)
        place = it.draw()
        table = pool.materialize_block_table([it.session])
        results.append(pool.decode_attn(1, *it.new, table, *place, SCALE))
    assert all(same(result, results[0]) for result in results)


@pytest.mark.parametrize("fault", ["a key too many", "blocks in order", "blocks swapped", "other layer"])
def test_a_table_or_layer_that_is_wrong_shows(fault: str) -> None:
    pool = new_pool()
    it = decoded(pool, 9)
    place = it.draw()
    right = pool.materialize_block_table([it.session])
    expected = pool.decode_attn(1, *it.new, right, *place, SCALE)
    blocks, lens = right.block_table.clone(), right.context_lens.clone()
    if fault == "a key too many":
        lens += 1
    elif fault == "blocks in order":
        blocks = torch.arange(3, dtype=torch.int32)[None]
    elif fault == "blocks swapped":
        blocks = blocks.flip(1)
    wrong = pool.decode_attn(
        0 if fault == "other layer" else 1, *it.new, PageTable(blocks, lens, 1, 3), *place, SCALE
    )
    # Within the last, partly filled block a reader in the wrong order meets poison.
    assert not same(wrong, expected)
    assert torch.isnan(wrong).any()


def test_the_new_token_is_written_where_it_was_told_and_nowhere_else() -> None:
    pool = new_pool()
    it = decoded(pool, 5)
    block, slot = it.draw()
    before = [buffer.clone() for buffer in buffers(pool)]
    table = pool.materialize_block_table([it.session])
    pool.decode_attn(1, *it.new, table, block, slot, SCALE)
    before[2][block, slot], before[3][block, slot] = it.k[-1], it.v[-1]
    for buffer, expected in zip(buffers(pool), before, strict=True):
        assert torch.equal(buffer.view(torch.int32), expected.view(torch.int32))


def test_scores_are_scaled_by_what_was_given() -> None:
    pool = new_pool()
    it = decoded(pool, 5)
    place = it.draw()
    table = pool.materialize_block_table([it.session])
    flat = pool.decode_attn(1, *it.new, table, *place, 0.0)
    mean = torch.stack(it.v).mean(0).repeat_interleave(HQ // HKV, dim=0)
    assert torch.allclose(flat[0, :, 0], mean, atol=1e-6)
    assert (pool.decode_attn(1, *it.new, table, *place, SCALE) - flat).abs().max() > 0.01


def test_blocks_that_another_session_wrote_are_read_where_they_are_shared() -> None:
    pool = new_pool()
    donor = decoded(pool, 8)
    sharer = stream(pool, 2)
    pool.core.splice(donor.session, sharer.session, 0, 2)
    assert pool.core.session_block_table(sharer.session) == pool.core.session_block_table(donor.session)
    assert [pool.core.block_refcount(b) for b in pool.core.session_block_table(donor.session)] == [2, 2]
    sharer.k, sharer.v = list(donor.k), list(donor.v)
    kept = [
        pool.read_block_bytes(1, kind, b)
        for kind in BlockKind
        for b in pool.core.session_block_table(donor.session)
    ]
    place = sharer.draw()
    table = pool.materialize_block_table([sharer.session])
    assert table.context_lens.tolist() == [9]
    sharer.expect(pool.decode_attn(1, *sharer.new, table, *place, SCALE))
    place = donor.draw()
    donor.expect(
        pool.decode_attn(1, *donor.new, pool.materialize_block_table([donor.session]), *place, SCALE)
    )
    blocks = pool.core.session_block_table(donor.session)[:2]
    assert [pool.read_block_bytes(1, kind, b) for kind in BlockKind for b in blocks] == kept


BAD = [(2, 0, 0), (-1, 0, 0), (1, 40, 0), (1, -1, 0), (1, 0, 4), (1, 0, -1)]


@pytest.mark.parametrize(("layer", "block", "slot"), BAD)
def test_a_layer_or_place_that_there_is_not_is_refused_and_nothing_written(
    layer: int, block: int, slot: int
) -> None:
    pool = new_pool()
    it = decoded(pool, 5)
    good = it.draw()
    table = pool.materialize_block_table([it.session])
    with untouched(pool, InvalidRequestError):
        pool.decode_attn(layer, *it.new, table, block, slot, SCALE)
    twice = [torch.cat([part, part]) for part in it.new]
    with untouched(pool, InvalidRequestError):
        both = pool.materialize_block_table([it.session] * 2)
        pool.decode_attn_batched(layer, *twice, both, [good, (block, slot)], SCALE)
    it.expect(pool.decode_attn(1, *it.new, table, *good, SCALE))


@pytest.mark.parametrize("part", range(5), ids=["q", "k", "v", "writes", "no writes"])
def test_as_many_tokens_as_the_table_has_sessions_or_nothing_is_written(part: int) -> None:
    pool = new_pool()
    streams = [decoded(pool, 3, seed) for seed in (1, 2)]
    writes = [each.draw() for each in streams]
    table = pool.materialize_block_table([each.session for each in streams])
    new = [torch.cat(parts) for parts in zip(*(each.new for each in streams), strict=True)]
    if part < 3:
        new[part] = new[part][:1]
    given = {3: writes[:1], 4: []}.get(part, writes)
    with untouched(pool, InvalidRequestError):
        pool.decode_attn_batched(1, *new, table, given, SCALE)


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_table": torch.tensor([[10**8, 1]])},
        {"block_table": torch.tensor([[-1, 1]])},
        {"block_table": torch.tensor([3, 4])},
        {"context_lens": torch.tensor([9])},
        {"context_lens": torch.tensor([0])},
        {"context_lens": torch.tensor([5, 5])},
    ],
    ids=str,
)
def test_a_table_that_points_elsewhere_is_refused_and_nothing_written(
    wrong: dict[str, Tensor], native: ModuleType
) -> None:
    pool = new_pool()
    it = decoded(pool, 5)
    place = it.draw()
    table = pool.materialize_block_table([it.session])
    with untouched(pool, InvalidRequestError):
        pool.decode_attn(1, *it.new, attrs.evolve(table, **wrong), *place, SCALE)
    it.expect(pool.decode_attn(1, *it.new, table, *place, SCALE))


def test_a_table_of_another_type_or_with_gaps_is_read_as_it_is_meant(native: ModuleType) -> None:
    pool = new_pool()
    it = decoded(pool, 5)
    place = it.draw()
    table = pool.materialize_block_table([it.session])
    gaps = torch.stack([table.block_table, torch.full_like(table.block_table, 10**6)], -1)[..., 0]
    for blocks, lens in ((table.block_table.long(), table.context_lens.long()), (gaps, table.context_lens)):
        given = attrs.evolve(table, block_table=blocks, context_lens=lens)
        it.expect(pool.decode_attn(1, *it.new, given, *place, SCALE))


def test_keys_of_another_shape_are_refused_and_nothing_written() -> None:
    pool = new_pool()
    it = decoded(pool, 3)
    place = it.draw()
    table = pool.materialize_block_table([it.session])
    q, k, v = it.new
    for changed in ((q, k, v[..., :4]), (q, k[:, :1], v), (q, k, v[:, :1]), (q[..., :4], k, v)):
        with untouched(pool, InvalidRequestError):
            pool.decode_attn(1, *changed, table, *place, SCALE)
    it.expect(pool.decode_attn(1, q, k, v, table, *place, SCALE))


def test_a_session_opened_beside_changes_nothing() -> None:
    pool = new_pool()
    it = decoded(pool, 5)
    opened(pool, 30)
    place = it.draw()
    it.expect(pool.decode_attn(1, *it.new, pool.materialize_block_table([it.session]), *place, SCALE))
