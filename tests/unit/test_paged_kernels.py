"""The kernels over a pool: they write and read the slots they are given, and compute what the others do."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support_kernels import NARROW, WIDE, check, draw, every_dtype
from support_paged import every_block_size, same
from torch import Tensor

from fuel_core.kernels import ops, reference

D = 10


def angles(count: int) -> tuple[Tensor, Tensor]:
    """Cos and sin ``[count, D/2]`` of random angles."""
    turns = draw(count, D // 2, seed=9) * 3
    return turns.cos(), turns.sin()


def scattered(count: int, slots: int, seed: int = 4) -> Tensor:
    """``count`` different slots in no order."""
    return torch.randperm(slots, generator=torch.Generator().manual_seed(seed))[:count]


# --- rotation


@every_dtype
def test_two_rotations_are_the_rotation_by_the_sum(dtype: torch.dtype) -> None:
    x, first, second = draw(7, 3, D, dtype=dtype), draw(7, D // 2, seed=1), draw(7, D // 2, seed=2)

    def turn(x: Tensor, by: Tensor) -> Tensor:
        return reference.rotate(x, by.cos(), by.sin())

    both, once = turn(turn(x, first), second), turn(x, first + second)
    limit = 4 * NARROW.get(dtype, 1e-7) * x.abs().max()
    assert both.dtype == once.dtype == dtype
    assert (both.float() - once.float()).abs().max() <= limit
    assert (turn(turn(x, first), -first).float() - x.float()).abs().max() <= limit
    assert (turn(x, first).float() - once.float()).abs().max() > 0.1


def test_a_rotation_turns_each_pair_and_keeps_its_length() -> None:
    x = torch.zeros(1, 1, D)
    x[..., 1] = 2.0
    turned = reference.rotate(x, torch.full((1, D // 2), 0.6), torch.full((1, D // 2), 0.8))
    expected = torch.zeros(1, 1, D)
    expected[..., 1], expected[..., 1 + D // 2] = 1.2, 1.6
    assert torch.allclose(turned, expected)
    assert torch.equal(reference.rotate(x, torch.ones(1, D // 2), torch.zeros(1, D // 2)), x)


# --- the write


NORM = (1 + draw(D, seed=2), 1 + draw(D, seed=3), 1e-3)


@pytest.mark.parametrize(
    ("dtype", "pool_dtype"),
    [*((dtype, dtype) for dtype in (WIDE, *NARROW)), (WIDE, torch.bfloat16), (torch.bfloat16, WIDE)],
    ids=str,
)
@pytest.mark.parametrize("norm", [None, NORM], ids=["no norm", "norm"])
@pytest.mark.parametrize(("hq", "hkv"), [(1, 1), (3, 1), (6, 2)])
def test_a_write_into_blocks_is_the_write_into_a_cache_at_the_slots_given(
    hq: int, hkv: int, norm: Any, dtype: torch.dtype, pool_dtype: torch.dtype
) -> None:
    count, block_size = 7, 4
    norm = norm and (norm[0].to(dtype), norm[1].to(dtype), norm[2])
    qkv, turns = draw(count, (hq + 2 * hkv) * D, dtype=dtype), angles(count)
    slots = scattered(count, 5 * block_size)
    pools = [torch.full((5, block_size, hkv, D), math.nan, dtype=pool_dtype) for _ in range(2)]
    caches = [torch.empty(hkv, count, D, dtype=pool_dtype) for _ in range(2)]
    q = reference.write_paged_kv(qkv, *turns, *pools, slots, norm)
    assert same(q, reference.write_kv(qkv, *turns, [caches[0]], [caches[1]], norm))
    others = torch.ones(20, dtype=torch.bool)
    others[slots] = False
    for pool, cache in zip(pools, caches, strict=True):
        rows = pool.view(20, hkv, D)
        assert same(rows[slots], cache.transpose(0, 1))
        assert torch.isnan(rows[others]).all()


def test_slots_in_another_order_are_seen() -> None:
    qkv, slots = draw(7, 5 * D), scattered(7, 20)
    right, wrong = (torch.zeros(2, 5, 4, 1, D) for _ in range(2))
    reference.write_paged_kv(qkv, *angles(7), *right, slots)
    reference.write_paged_kv(qkv, *angles(7), *wrong, slots.flip(0))
    assert (right - wrong).abs().max() > 0.1


@pytest.mark.parametrize("strided", [0, 1])
def test_a_pool_that_no_write_would_reach_is_refused(strided: int) -> None:
    """Flattening a strided view copies it: the rows would be written to the copy and lost."""
    both = torch.zeros(5, 2, 4, 1, D)
    pools = [torch.zeros(5, 4, 1, D) for _ in range(2)]
    pools[strided] = both[:, strided]
    with pytest.raises(RuntimeError):
        reference.write_paged_kv(draw(7, 5 * D), *angles(7), *pools, scattered(7, 20))
    assert not both.any()


# --- attention


def counted(*counts: int) -> Tensor:
    """Numbers of rows as the kernels take them."""
    return torch.tensor(counts, dtype=torch.int32)


class Batch:
    """Keys and values of several sessions, scattered over the blocks of a poisoned pool."""

    def __init__(
        self,
        counts: tuple[int, ...],
        lengths: tuple[int, ...],
        *,
        hq: int = 6,
        hkv: int = 2,
        block_size: int = 4,
        dtype: torch.dtype = WIDE,
    ) -> None:
        self.counts, self.lengths, self.block_size = counts, lengths, block_size
        self.q = 2 * draw(sum(counts), hq, D, dtype=dtype)
        needs = [-(-length // block_size) for length in lengths]
        total = sum(needs) + 3
        order = torch.randperm(total, generator=torch.Generator().manual_seed(8)).tolist()
        self.pools = [torch.full((total, block_size, hkv, D), math.nan, dtype=dtype) for _ in range(2)]
        self.keys = [draw(n, hkv, D, seed=10 + i, dtype=dtype) for i, n in enumerate(lengths)]
        self.values = [draw(n, hkv, D, seed=30 + i, dtype=dtype) for i, n in enumerate(lengths)]
        self.table = torch.zeros(len(lengths), max(needs) + 2, dtype=torch.int32)
        self.lens = torch.tensor(lengths, dtype=torch.int32)
        for row, need in enumerate(needs):
            blocks = [order.pop() for _ in range(need)]
            self.table[row, :need] = torch.tensor(blocks, dtype=torch.int32)
            self.table[row, need:] = order[-1]  # a poisoned block
            for place in range(lengths[row]):
                where = blocks[place // block_size], place % block_size
                self.pools[0][where], self.pools[1][where] = self.keys[row][place], self.values[row][place]

    def run(self, scale: float | None = None) -> Tensor:
        """``[T, Hq D]``."""
        return reference.paged_attention(*self.args(), scale)

    def args(self) -> tuple[Tensor, ...]:
        """What the kernel takes."""
        return self.q, *self.pools, self.table, self.lens, counted(*self.counts)

    def rows(self) -> list[Tensor]:
        """The queries of each session."""
        return list(torch.split(self.q, list(self.counts)))


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """``q [n, Hq, D]``, the last of ``k, v [L, Hkv, D]``: every row sees itself and what stands before."""
    n, hq, _ = q.shape
    k, v = (part.repeat_interleave(hq // k.shape[1], dim=1) for part in (k, v))  # [L, Hq, D]
    scores = torch.einsum("nhd,lhd->hnl", q, k) * scale
    ahead = torch.ones(n, k.shape[0]).triu(k.shape[0] - n + 1).bool()
    weights = scores.masked_fill(ahead, -math.inf).softmax(-1)
    return torch.einsum("hnl,lhd->nhd", weights, v).flatten(1)


MIXES = [
    ((1,), (1,)),
    ((1,), (9,)),
    ((5,), (5,)),
    ((3,), (17,)),
    ((1, 1, 1), (1, 4, 33)),
    ((1, 5, 1, 8, 2), (7, 5, 16, 9, 2)),
]


@every_dtype
@every_block_size
@pytest.mark.parametrize(("counts", "lengths"), MIXES)
def test_every_sessions_rows_are_dense_causal_attention_over_its_own_keys(
    counts: tuple[int, ...], lengths: tuple[int, ...], block_size: int, dtype: torch.dtype
) -> None:
    batch = Batch(counts, lengths, block_size=block_size, dtype=dtype)
    out = batch.run()
    assert out.shape == (sum(counts), 60)
    assert out.dtype == dtype
    outs = torch.split(out, list(counts))
    for ours, q, k, v in zip(outs, batch.rows(), batch.keys, batch.values, strict=True):
        check(ours, dense, q, k, v, D**-0.5)


@pytest.mark.parametrize(("hq", "hkv"), [(1, 1), (3, 1), (4, 4)])
def test_query_heads_read_their_key_heads(hq: int, hkv: int) -> None:
    batch = Batch((2, 1), (9, 5), hq=hq, hkv=hkv)
    outs = torch.split(batch.run(), [2, 1])
    for ours, q, k, v in zip(outs, batch.rows(), batch.keys, batch.values, strict=True):
        check(ours, dense, q, k, v, D**-0.5)


@every_block_size
def test_a_sessions_rows_depend_on_nothing_else_in_the_call(block_size: int) -> None:
    counts, lengths = MIXES[-1]
    batch = Batch(counts, lengths, block_size=block_size)
    outs = torch.split(batch.run(), list(counts))
    for row, (ours, q) in enumerate(zip(outs, batch.rows(), strict=True)):
        width = -(-lengths[row] // block_size)
        args = batch.table[row : row + 1, :width], batch.lens[row : row + 1], counted(counts[row])
        assert same(ours, reference.paged_attention(q, *batch.pools, *args))
        gathered = (part[row].transpose(0, 1) for part in (batch.keys, batch.values))
        assert same(ours, reference.attention(q, *gathered))


def test_entries_past_a_sessions_length_are_not_read() -> None:
    batch = Batch((1, 3), (5, 8))
    expected = batch.run()
    assert torch.isfinite(expected).all()
    for filler in (0, -1, 10**9):
        batch.table[:, 2:] = filler
        assert same(batch.run(), expected)
    batch.lens += 1
    batch.table[:, 2:] = 0
    assert torch.isnan(batch.run()).any()


def test_the_scale_is_the_one_given_or_that_of_the_dimension() -> None:
    batch = Batch((2, 1), (9, 5))
    assert same(batch.run(), batch.run(D**-0.5))
    outs = torch.split(batch.run(0.9), [2, 1])
    for ours, q, k, v in zip(outs, batch.rows(), batch.keys, batch.values, strict=True):
        check(ours, dense, q, k, v, 0.9)
    assert (batch.run(0.9) - batch.run()).abs().max() > 0.01


@pytest.mark.parametrize("fault", ["rows of others", "blocks swapped", "sees ahead", "sees less"])
def test_faults_of_paged_attention_are_seen(fault: str) -> None:
    batch = Batch((3, 3), (12, 12))
    right = batch.run()
    if fault == "rows of others":
        batch.table = batch.table.flip(0)
    elif fault == "blocks swapped":
        batch.table[:, :3] = batch.table[:, :3].flip(1)  # of which the last is seen in part
    elif fault == "sees ahead":
        batch.q, batch.counts = batch.q[[1, 4]], (1, 1)
        assert (batch.run() - right[[1, 4]]).abs().max() > 0.01
        return
    else:
        batch.lens -= 1
    assert (batch.run() - right).abs().max() > 0.01


def test_a_narrow_pool_is_attended_in_the_type_of_the_queries() -> None:
    batch = Batch((2, 1), (9, 5))
    batch.pools = [pool.bfloat16() for pool in batch.pools]
    narrow = batch.run()
    batch.pools = [pool.float() for pool in batch.pools]
    assert narrow.dtype == torch.float32
    assert same(narrow, batch.run())


# --- dispatch


def test_the_operations_hand_their_kernels_all_that_they_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, tuple[Any, ...]]] = []

    def kernel(name: str) -> Any:
        return lambda *args: calls.append((name, args)) or name

    names = ("rotate", "write_paged_kv", "paged_attention")
    module = SimpleNamespace(**{name: kernel(name) for name in names})
    monkeypatch.setitem(ops._installed, "cpu", ("probe", module))
    args: list[Any] = [torch.tensor(float(i)) for i in range(7)]
    assert ops.rotate(*args[:3]) == "rotate"  # type: ignore[comparison-overlap]
    ops.write_paged_kv(*args[:6])
    ops.write_paged_kv(*args)
    ops.paged_attention(*args[:6])
    ops.paged_attention(*args)
    assert [name for name, _ in calls] == ["rotate", *["write_paged_kv"] * 2, *["paged_attention"] * 2]
    given = [args[:3], [*args[:6], None], args, [*args[:6], None], args]
    assert all(
        all(one is other for one, other in zip(got, sent, strict=True))
        for (_, got), sent in zip(calls, given, strict=True)
    )


def test_an_operation_that_the_installed_kernels_lack_is_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ops._installed, "cpu", ("probe", SimpleNamespace()))
    batch = Batch((2, 1), (9, 5))
    assert same(ops.paged_attention(*batch.args()), batch.run())
