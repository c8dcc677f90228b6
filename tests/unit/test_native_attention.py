"""Native writes and attention are those of float64 over any blocks, and a row is its own session's affair."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType

import pytest
import torch
from support_kernels import NARROW, WIDE, draw, error, every_dtype
from support_native import Norm, dense, every_isa, gains, on_threads, turned
from support_paged import BLOCK_SIZES
from torch import Tensor

from fuel_core import _native
from fuel_core.kernels import ops, reference

pytestmark = pytest.mark.usefixtures("native")

HEADS = [(1, 1), (3, 1), (9, 3), (8, 1), (4, 4)]
DIMS = (8, 20, 64, 80, 128)
AROUND = (31, 32, 33, 511, 512, 513, 1100)


class Case:
    """Sessions whose keys and values native writes put into the permuted blocks of a poisoned pool.

    ``q`` and ``heads`` have the rows of every position; :meth:`run` attends with the last of each session.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        heads: tuple[int, int] = (9, 3),
        dim: int = 64,
        size: int = 16,
        dtype: torch.dtype = WIDE,
        norm: Norm = None,
        filler: int = -1,
    ) -> None:
        self.lengths, self.size, self.norm = lengths, size, norm
        hq, self.hkv = heads
        total, needs = sum(lengths), [-(-length // size) for length in lengths]
        self.qkv, turns = draw(total, (hq + 2 * self.hkv) * dim), 3 * draw(total, dim // 2, seed=1)
        self.angles = turns.cos(), turns.sin()
        order = torch.randperm(sum(needs) + 2, generator=torch.Generator().manual_seed(5)).int()
        self.table = torch.full((len(lengths), max(needs) + 2), filler, dtype=torch.int32)
        for row, blocks in enumerate(torch.split(order[: sum(needs)], needs)):
            self.table[row, : needs[row]] = blocks
        shape = len(order), size, self.hkv, dim
        self.pools = [torch.full(shape, math.nan, dtype=dtype) for _ in range(2)]
        places = [torch.arange(length) for length in lengths]
        self.slots = torch.cat(
            [self.table[row, at // size].long() * size + at % size for row, at in enumerate(places)]
        )
        q = ops.write_paged_kv(self.qkv, *self.angles, *self.pools, self.slots, norm)
        self.q = list(torch.split(q, list(lengths)))

    def kept(self, session: int) -> list[Tensor]:
        """Its keys and values as they lie in the pool, ``[L, Hkv, D]``."""
        slots = torch.split(self.slots, list(self.lengths))[session]
        return [pool.flatten(0, 1)[slots] for pool in self.pools]

    def run(self, spans: Sequence[tuple[int, int, int]], scale: float | None = None) -> list[Tensor]:
        """Rows ``start`` to ``end`` of each (session, start, end), in one call."""
        q = torch.cat([self.q[s][start:end] for s, start, end in spans])
        table = self.table[[s for s, _, _ in spans]]
        lens = torch.tensor([end for _, _, end in spans], dtype=torch.int32)
        counts = torch.tensor([end - start for _, start, end in spans], dtype=torch.int32)
        out = ops.paged_attention(q, *self.pools, table, lens, counts, scale)
        return list(torch.split(out, counts.tolist()))

    def truth(self, session: int, start: int, end: int, scale: float | None = None) -> Tensor:
        """The same rows in float64, of what lies in the pool."""
        k, v = (part[:end].double() for part in self.kept(session))
        return dense(self.q[session][start:end].double(), k, v, scale or k.shape[-1] ** -0.5)

    def off(self, spans: Sequence[tuple[int, int, int]], scale: float | None = None) -> float:
        outs = self.run(spans, scale)
        return max(error(o, self.truth(*span, scale)) for o, span in zip(outs, spans, strict=True))


# --- the write


@every_isa
@every_dtype
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("normed", [False, True])
def test_what_is_written_is_normed_and_turned_as_in_float64(
    normed: bool, dim: int, dtype: torch.dtype, isa: str
) -> None:
    _native.use(isa)
    case = Case((7, 1, 20), dim=dim, dtype=dtype, norm=gains(dim) if normed else None, size=4)
    q, k, v = turned(case.qkv.double(), *case.angles, case.hkv, dim, case.norm)
    assert error(torch.cat(case.q), q) <= 1e-6
    keys = case.pools[0].flatten(0, 1)[case.slots]
    assert error(keys, k) <= NARROW.get(dtype, 1e-6)
    values = case.pools[1].flatten(0, 1)[case.slots]
    assert torch.equal(values, v.to(WIDE).to(dtype))
    others = torch.ones(case.pools[0].shape[0] * 4, dtype=torch.bool)
    others[case.slots] = False
    assert all(torch.isnan(pool.flatten(0, 1)[others]).all() for pool in case.pools)


@every_isa
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrow_types_are_rounded_as_pytorch_rounds_them(dtype: torch.dtype, isa: str) -> None:
    _native.use(isa)
    odd = [0.0, -0.0, math.inf, -math.inf, 65504.0, 65519.9, 65520.0, 7e4, -7e4, 3.3895e38, 1e-8, 6e-8, 1e-40]
    halfway = [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 2.0**-25, 3 * 2.0**-25]
    values = torch.cat((torch.tensor(odd + halfway), draw(53), 1e-7 * draw(56)))  # [128]
    qkv = torch.cat((draw(256), values))[None]
    pools = [torch.zeros(1, 1, 1, 128, dtype=dtype) for _ in range(2)]
    ops.write_paged_kv(qkv, torch.ones(1, 64), torch.zeros(1, 64), *pools, torch.zeros(1, dtype=torch.int64))
    assert torch.equal(pools[1].flatten().view(torch.int16), values.to(dtype).view(torch.int16))


@every_isa
@every_dtype
@pytest.mark.parametrize("normed", [False, True])
def test_caches_are_written_and_attended_to_the_same_bits_as_blocks(
    normed: bool, dtype: torch.dtype, isa: str
) -> None:
    _native.use(isa)
    lengths, dim = (5, 33, 600), 20
    case = Case(lengths, dim=dim, dtype=dtype, norm=gains(dim) if normed else None)
    whole = torch.full((2, 3, sum(lengths) + 9, dim), math.nan, dtype=dtype)
    caches = torch.split(whole[:, :, 4:-5], lengths, dim=2)  # each with its heads far apart
    q = ops.write_kv(case.qkv, *case.angles, [c[0] for c in caches], [c[1] for c in caches], case.norm)
    assert torch.equal(q, torch.cat(case.q))
    assert torch.isnan(whole[:, :, [0, 1, 2, 3, -5, -4, -3, -2, -1]]).all()
    for session, (cache, length) in enumerate(zip(caches, lengths, strict=True)):
        for ours, theirs in zip(cache, case.kept(session), strict=True):
            assert torch.equal(ours, theirs.transpose(0, 1))
        for new in {1, min(9, length), length}:
            [expected] = case.run([(session, length - new, length)])
            assert torch.equal(ops.attention(case.q[session][-new:], *cache), expected)


# --- attention


@every_isa
@every_dtype
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dim", DIMS)
def test_attention_is_that_of_float64(dim: int, heads: tuple[int, int], dtype: torch.dtype, isa: str) -> None:
    _native.use(isa)
    size = BLOCK_SIZES[(dim + heads[0]) % len(BLOCK_SIZES)]
    case = Case((1, 9, 70, 40), heads=heads, dim=dim, size=size, dtype=dtype, filler=10**9)
    assert case.off([(0, 0, 1), (1, 0, 9), (2, 69, 70), (3, 29, 40)]) <= 3e-6
    assert case.off([(2, 0, 70)], 0.7) <= 1e-5  # scores of tens, whose roundings are as many times larger


@every_isa
@pytest.mark.parametrize("dtype", [WIDE, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", BLOCK_SIZES)
def test_long_contexts_are_attended_whole(size: int, dtype: torch.dtype, isa: str) -> None:
    _native.use(isa)
    case = Case((1100,), heads=(3, 1), dim=20, size=size, dtype=dtype)
    for end in AROUND:
        for new in (1, 9):
            assert case.off([(0, end - new, end)]) <= 3e-6, (end, new)
    assert case.off([(0, 0, 600)]) <= 3e-6


@every_isa
@every_dtype
def test_a_sessions_rows_are_the_same_bits_in_any_company_and_in_chunks_of_any_size(
    dtype: torch.dtype, isa: str
) -> None:
    _native.use(isa)
    lengths = (70, 1, 33, 1030)
    case = Case(lengths, heads=(6, 2), dim=20, dtype=dtype)
    whole = [(session, 0, length) for session, length in enumerate(lengths)]
    expected = [case.run([span])[0] for span in whole]
    for spans in (whole, whole[::-1], [(0, 30, 50), (2, 32, 33), (3, 1000, 1030), (1, 0, 1)]):
        for out, (session, start, end) in zip(case.run(spans), spans, strict=True):
            assert torch.equal(out, expected[session][start:end])
    for chunk in (*range(1, 20), 31, 32, 33):
        steps = [(0, start, min(70, start + chunk)) for start in range(0, 70, chunk)]
        assert torch.equal(torch.cat([case.run([step])[0] for step in steps]), expected[0])
    for end in AROUND[:-1]:
        assert torch.equal(case.run([(3, end - 1, end)])[0], expected[3][end - 1 : end])


def test_the_number_of_threads_changes_no_bit() -> None:
    case = Case((1100, 5, 40), heads=(6, 2), dim=32, norm=gains(32))
    for spans in ([(0, 1099, 1100)], [(0, 0, 1100)], [(0, 1090, 1100), (1, 0, 5), (2, 39, 40)]):
        with on_threads(1):
            expected = case.run(spans)
        for threads in (2, 3, 4):
            with on_threads(threads):
                for _ in range(3):
                    assert all(map(torch.equal, case.run(spans), expected))


@pytest.mark.parametrize("fault", ["rows of others", "blocks swapped", "sees less", "written unturned"])
def test_faults_are_seen(fault: str) -> None:
    case = Case((40, 40), dim=20, size=4)
    expected = [case.truth(session, 37, 40) for session in (0, 1)]
    if fault == "rows of others":
        case.table = case.table.flip(0)
    elif fault == "blocks swapped":
        case.table[:, [8, 9]] = case.table[:, [9, 8]]
    elif fault == "written unturned":
        still = torch.ones(80, 10), torch.zeros(80, 10)
        ops.write_paged_kv(case.qkv, *still, *case.pools, case.slots)
    less = fault == "sees less"
    q, case.q = case.q, [rows.roll(-less, 0) for rows in case.q]
    outs = case.run([(0, 37 - less, 40 - less), (1, 37 - less, 40 - less)])
    case.q = q
    assert all(error(o, e) > 0.01 for o, e in zip(outs, expected, strict=True))


@every_isa
@every_dtype
@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("place", [0, 35, 600])
def test_a_nan_stays_visible_to_those_who_see_it_and_to_no_others(
    place: int, part: int, dtype: torch.dtype, isa: str
) -> None:
    _native.use(isa)
    case = Case((620, 40), heads=(6, 2), dim=20, dtype=dtype)
    spans = [(0, 0, 620), (1, 0, 40)]
    sound = case.run(spans)
    slot = int(case.slots[place])
    case.pools[part][slot // 16, slot % 16, 1, 3] = math.nan
    for count in (1, 9, 620):  # shared out by splits and by tokens
        [out] = case.run([(0, 620 - count, 620)])
        rows = out.view(count, 6, 20)
        seen = torch.arange(620 - count, 620) >= place
        fault = rows[seen][:, 3:] if part == 0 else rows[seen][:, 3:, 3]
        assert torch.isnan(fault).all()
        assert torch.equal(rows[:, :3], sound[0].view(620, 6, 20)[-count:, :3])
        assert torch.equal(rows[~seen], sound[0].view(620, 6, 20)[-count:][~seen])
    assert torch.equal(case.run(spans)[1], sound[1])


@every_isa
def test_scores_far_apart_or_all_alike_are_weighed_as_in_float64(isa: str) -> None:
    _native.use(isa)
    case = Case((600,), heads=(3, 1), dim=32)
    assert case.off([(0, 590, 600)], 40.0) <= 3e-5
    assert case.off([(0, 590, 600)], 1e-30) <= 3e-6
    case.pools[0].zero_()
    assert case.off([(0, 590, 600)]) <= 3e-6


# --- what is taken


def test_what_they_do_not_take_goes_to_the_reference(native: ModuleType) -> None:
    q, pools = draw(3, 6, 600), [draw(4, 4, 2, 600, seed=at) for at in (1, 2)]
    turns = draw(3, 300, seed=3)
    angles, slots = (turns.cos(), turns.sin()), torch.tensor([5, 6, 7])
    qkv = draw(3, 10 * 600)
    ours, theirs = ([pool.clone() for pool in pools] for _ in range(2))
    wide = native.write_paged_kv(qkv, *angles, *ours, slots)  # heads wider than a buffer of theirs
    assert torch.equal(wide, reference.write_paged_kv(qkv, *angles, *theirs, slots))
    assert all(map(torch.equal, ours, theirs))
    lens, counts = torch.tensor([8], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    table = torch.tensor([[0, 1]], dtype=torch.int32)
    for each in (q.bfloat16(), q.half(), q.double()):
        args = each, *pools, table, lens, counts
        assert torch.equal(native.paged_attention(*args), reference.paged_attention(*args))
    args = q, *(pool.double() for pool in pools), table, lens, counts
    assert torch.equal(native.paged_attention(*args), reference.paged_attention(*args))


def test_queries_with_gaps_and_caches_of_another_order_are_read_where_they_lie(native: ModuleType) -> None:
    q, k, v = draw(3, 6, 40), draw(2, 9, 20, seed=1), draw(2, 9, 20, seed=2)
    expected = native.attention(q[..., ::2].contiguous(), k, v)
    assert error(native.attention(q[..., ::2], k, v), expected.double()) <= 3e-6
    other = v.transpose(0, 1).contiguous().transpose(0, 1)
    assert error(native.attention(q[..., ::2].contiguous(), k, other), expected.double()) <= 3e-6
