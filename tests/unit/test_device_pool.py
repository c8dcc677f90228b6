"""The bytes of a device pool: where a block lies, and that it comes back as it went in."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from support_paged import buffers, content, every_dtype, fill, make_pool, opened, places, state, untouched

from fuel_core.contracts.errors import CapacityError, InvalidRequestError
from fuel_core.kv import BlockKind, DeviceKvPool, KvGeometry

SHAPE = (8, 4, 2, 8)  # blocks, slots, KV heads, head dimension
IMPOSSIBLE = 2**50  # blocks: nobody has the memory


# --- the buffers


@every_dtype
def test_every_layer_has_two_zeroed_buffers_of_its_own(dtype: torch.dtype) -> None:
    pool = make_pool(dtype=dtype, layers=3)
    assert pool.pool_shape == SHAPE
    assert pool.pool_shape_flat == (32, 2, 8)
    assert (pool.dtype, pool.device.type) == (dtype, "cpu")
    assert pool.core.geometry == pool.geometry
    assert len(buffers(pool)) == 6
    for number, buffer in enumerate(buffers(pool)):
        assert (tuple(buffer.shape), buffer.dtype) == (SHAPE, dtype)
        assert not buffer.view(torch.uint8).any()
        buffer.fill_(number + 1)
    assert [set(buffer.unique().tolist()) for buffer in buffers(pool)] == [{n + 1} for n in range(6)]
    assert sum(buffer.nbytes for buffer in buffers(pool)) == 8 * pool.geometry.block_bytes


def test_a_row_of_the_flat_view_is_one_slot_of_one_block() -> None:
    pool = make_pool()
    pool.k_pool(1).view(pool.pool_shape_flat)[5 * 4 + 2] = 7.0
    assert pool.k_pool(1)[5, 2].eq(7).all()
    assert pool.k_pool(1).eq(7).sum() == 2 * 8
    assert pool.read_block(1, BlockKind.K, 5)[2].eq(7).all()


def test_the_ranges_of_a_block_select_that_block() -> None:
    pool = make_pool()
    for block in range(8):
        fill(pool, block, block)
    for block in (0, 3, 7):
        ranges = pool.block_write_ranges(block)
        assert ranges == ((block, block + 1), (0, 4), (0, 2), (0, 8))
        selected = pool.v_pool(1)[tuple(slice(*part) for part in ranges)]
        assert selected.numpy().tobytes() == pool.read_block_bytes(1, BlockKind.V, block)


@pytest.mark.parametrize("block", [-1, 8, 2**40])
def test_there_are_no_ranges_of_a_block_that_there_is_not(block: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"block {block}"):
        make_pool().block_write_ranges(block)


def test_the_identity_of_the_buffers_is_theirs_alone_and_stays() -> None:
    one, other = make_pool(), make_pool()
    before = one.alloc_id
    assert before != other.alloc_id
    session = opened(one, 9)
    handle = one.evict(session)
    one.restore(session, handle)
    fill(one, 0, 1)
    assert one.alloc_id == before


@pytest.mark.parametrize(
    ("elem_size", "dtype"),
    [(2, torch.float32), (8, torch.float32), (4, torch.bfloat16), (4, torch.float16), (1, torch.float16)],
    ids=str,
)
def test_elements_of_another_size_are_refused_before_anything_is_allocated(
    elem_size: int, dtype: torch.dtype
) -> None:
    geometry = KvGeometry(2, 2, 8, IMPOSSIBLE, 4, elem_size)
    with pytest.raises(CapacityError, match=f"elem_size = {dtype.itemsize}"):
        DeviceKvPool(geometry, dtype)


@every_dtype
@pytest.mark.parametrize("num_blocks", [IMPOSSIBLE, 2**62])
def test_a_pool_larger_than_the_memory_is_refused_with_its_size(dtype: torch.dtype, num_blocks: int) -> None:
    geometry = KvGeometry(2, 2, 8, num_blocks, 4, dtype.itemsize)
    with pytest.raises(CapacityError, match=str(num_blocks * geometry.block_bytes)):
        DeviceKvPool(geometry, dtype)


# --- blocks in and out


@every_dtype
@pytest.mark.parametrize(("layer", "kind", "block"), [(0, BlockKind.K, 3), (1, BlockKind.V, 7)])
def test_a_block_comes_back_as_it_was_written_and_no_other_changes(
    dtype: torch.dtype, layer: int, kind: BlockKind, block: int
) -> None:
    pool = make_pool(dtype=dtype)
    for each in range(8):
        fill(pool, each, each)
    before = [content(pool, each) for each in range(8)]
    values = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    pool.write_block(layer, kind, block, values)
    assert torch.equal(pool.read_block(layer, kind, block), values)
    written = pool.read_block_bytes(layer, kind, block)
    assert written == values.view(torch.uint8).numpy().tobytes()
    before[block][places(pool).index((layer, kind))] = written
    assert [content(pool, each) for each in range(8)] == before


@every_dtype
def test_any_bytes_come_back_exactly(dtype: torch.dtype) -> None:
    pool = make_pool(dtype=dtype)
    random_bytes = random.Random(3).randbytes(64 * dtype.itemsize)
    for data in (random_bytes, b"\xff" * 64 * dtype.itemsize, bytes(64 * dtype.itemsize)):
        pool.write_block_bytes(1, BlockKind.K, 5, data)
        assert pool.read_block_bytes(1, BlockKind.K, 5) == data
        assert pool.k_pool(1)[5].view(torch.uint8).numpy().tobytes() == data


def test_the_bytes_are_those_of_the_numbers() -> None:
    numbers = np.arange(64, dtype="<f4").reshape(4, 2, 8) - 31.5
    wide, half, brain = (make_pool(dtype=dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16))
    for pool in (wide, half, brain):
        pool.write_block(0, BlockKind.K, 0, torch.from_numpy(numbers).to(pool.dtype))
    assert wide.read_block_bytes(0, BlockKind.K, 0) == numbers.tobytes()
    assert half.read_block_bytes(0, BlockKind.K, 0) == numbers.astype("<f2").tobytes()
    upper = numbers.view("<u2").reshape(-1, 2)[:, 1]  # these numbers need no rounding
    assert brain.read_block_bytes(0, BlockKind.K, 0) == upper.tobytes()


def test_what_was_read_is_a_copy() -> None:
    pool = make_pool()
    fill(pool, 2, 2)
    before = state(pool)
    pool.read_block(0, BlockKind.K, 2).fill_(9)
    assert state(pool) == before
    values = torch.ones(4, 2, 8)
    pool.write_block(0, BlockKind.K, 2, values)
    values.fill_(5)
    assert pool.read_block(0, BlockKind.K, 2).eq(1).all()


def test_values_in_any_memory_layout_are_written_in_order() -> None:
    pool = make_pool()
    values = torch.randn(8, 2, 4).transpose(0, 2)  # [4, 2, 8], strided
    pool.write_block(0, BlockKind.V, 1, values)
    assert torch.equal(pool.read_block(0, BlockKind.V, 1), values)


def test_a_copied_block_is_copied_in_every_layer_and_kind() -> None:
    pool = make_pool(layers=3)
    for block in range(8):
        fill(pool, block, block)
    before = [content(pool, block) for block in range(8)]
    pool.copy_block(6, 1)
    before[1] = before[6]
    assert [content(pool, block) for block in range(8)] == before


BAD_PLACES = [(-1, 0), (2, 0), (0, -1), (0, 8), (2, 8), (0, 2**40)]


@every_dtype
@pytest.mark.parametrize(("layer", "block"), BAD_PLACES)
def test_a_layer_or_block_that_there_is_not_is_refused_and_nothing_written(
    dtype: torch.dtype, layer: int, block: int
) -> None:
    pool = make_pool(dtype=dtype)
    data = b"\x11" * 64 * dtype.itemsize
    calls = (
        lambda: pool.write_block(layer, BlockKind.K, block, torch.ones(4, 2, 8, dtype=dtype)),
        lambda: pool.write_block_bytes(layer, BlockKind.V, block, data),
        lambda: pool.read_block(layer, BlockKind.K, block),
        lambda: pool.read_block_bytes(layer, BlockKind.V, block),
    )
    for call in calls:
        with untouched(pool, InvalidRequestError):
            call()


@pytest.mark.parametrize("layer", [-1, 2])
def test_there_is_no_buffer_of_a_layer_that_there_is_not(layer: int) -> None:
    for part in (make_pool().k_pool, make_pool().v_pool):
        with pytest.raises(InvalidRequestError, match=f"layer {layer}"):
            part(layer)


@pytest.mark.parametrize(("source", "target"), [(-1, 0), (8, 0), (0, -1), (0, 8)])
def test_a_copy_from_or_to_no_block_is_refused_and_nothing_written(source: int, target: int) -> None:
    pool = make_pool()
    with untouched(pool, InvalidRequestError):
        pool.copy_block(source, target)


@every_dtype
def test_bytes_of_another_length_than_a_block_are_refused(dtype: torch.dtype) -> None:
    pool, whole = make_pool(dtype=dtype), 64 * dtype.itemsize
    for length in (0, 1, whole - dtype.itemsize, whole - 1, whole + 1, 2 * whole):
        with untouched(pool, InvalidRequestError) as caught:
            pool.write_block_bytes(0, BlockKind.K, 0, b"\x11" * length)
        assert f"{whole} bytes" in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        torch.ones(2, 4, 8),
        torch.ones(64),
        torch.ones(1, 4, 2, 8),
        torch.ones(1, 2, 8),
        torch.ones(()),
        torch.ones(4, 2, 8, dtype=torch.float64),
        torch.ones(4, 2, 8, dtype=torch.bfloat16),
        torch.ones(4, 2, 8, dtype=torch.int32),
    ],
    ids=lambda values: f"{list(values.shape)} {values.dtype}",
)
def test_values_of_another_shape_or_type_are_refused_and_nothing_written(values: Any) -> None:
    pool = make_pool()
    with untouched(pool, InvalidRequestError) as caught:
        pool.write_block(0, BlockKind.K, 0, values)
    assert "[4, 2, 8] in torch.float32" in str(caught.value)
