"""The sizes that admission counts with are the sizes that memory has."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support_models import CoreOnlyModel

from fuel_core.contracts.errors import CapacityError, InvalidRequestError
from fuel_core.kv import KvBlockPool, KvBudget, KvCache, KvGeometry, KvMemoryBudget, PoolCapacity
from fuel_core.schedule import SessionScheduler

FIELDS = ("n_layers", "n_kv_heads", "head_dim", "num_blocks", "block_size", "elem_size")
GEOMETRY = KvGeometry(n_layers=3, n_kv_heads=2, head_dim=5, num_blocks=7, block_size=4, elem_size=2)
NOT_SIZES = [0, -1, 1.0, 2.5, True, "4", None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_block_bytes_are_the_bytes_of_that_many_cached_tokens(dtype: torch.dtype) -> None:
    geometry = attrs.evolve(GEOMETRY, elem_size=dtype.itemsize)
    cache = KvCache(3, 2, 5, geometry.block_size, dtype=dtype)
    assert geometry.block_bytes == cache.k.nbytes + cache.v.nbytes


@given(st.tuples(*[st.integers(1, 9)] * 6), st.sampled_from(FIELDS))
def test_block_bytes_grow_with_every_size_but_the_number_of_blocks(
    sizes: tuple[int, ...], field: str
) -> None:
    geometry = KvGeometry(*sizes)
    doubled = attrs.evolve(geometry, **{field: 2 * getattr(geometry, field)})
    assert doubled.block_bytes == geometry.block_bytes * (1 if field == "num_blocks" else 2)


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", NOT_SIZES)
def test_a_geometry_field_that_is_no_positive_integer_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(CapacityError, match=f"{field} = ") as caught:
        attrs.evolve(GEOMETRY, **{field: value})
    assert caught.value.parameter == field  # type: ignore[attr-defined]


@pytest.mark.parametrize("field", ["block_size", "num_blocks"])
@pytest.mark.parametrize("value", NOT_SIZES)
def test_a_budget_field_that_is_no_positive_integer_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(CapacityError, match=f"{field} = "):
        KvBudget(**{"block_size": 4, "num_blocks": 4, field: value})


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("device_bytes", NOT_SIZES),
        ("non_kv_resident_bytes", [value for value in NOT_SIZES if value != 0 or value is False]),
        ("utilization", [0, 0.0, -0.5, 1.0000001, 2, float("nan"), float("inf"), True, "0.9", None]),
    ],
)
def test_a_memory_budget_s_field_outside_its_range_is_refused_by_name(field: str, values: list[Any]) -> None:
    fields = {"device_bytes": 100, "utilization": 0.5, "non_kv_resident_bytes": 0}
    for value in values:
        with pytest.raises(CapacityError, match=f"{field} = ") as caught:
            KvMemoryBudget(**{**fields, field: value})
        assert caught.value.parameter == field  # type: ignore[attr-defined]


@given(
    geometry=st.builds(KvGeometry, *[st.integers(1, 9)] * 6),
    device=st.integers(1, 10**12),
    percent=st.integers(1, 100),
    other=st.integers(0, 10**6),
)
def test_a_fitted_geometry_fits_and_one_block_more_would_not(
    geometry: KvGeometry, device: int, percent: int, other: int
) -> None:
    budget = KvMemoryBudget(device, percent / 100, other)
    room = Fraction(percent, 100) * device - other
    if room < geometry.block_bytes:
        with pytest.raises(CapacityError) as caught:
            geometry.fit_to_budget(budget)
        assert caught.value.need == geometry.block_bytes  # type: ignore[attr-defined]
        assert caught.value.have == budget.kv_bytes == max(0, room // 1)  # type: ignore[attr-defined]
        return
    fitted = geometry.fit_to_budget(budget)
    assert fitted.num_blocks * fitted.block_bytes <= room < (fitted.num_blocks + 1) * fitted.block_bytes
    assert attrs.evolve(fitted, num_blocks=geometry.num_blocks) == geometry


@pytest.mark.parametrize(
    ("spare", "blocks"), [(-1, 2), (0, 3), (1, 3), (GEOMETRY.block_bytes - 1, 3), (GEOMETRY.block_bytes, 4)]
)
def test_a_budget_of_exactly_three_blocks_holds_three_and_a_byte_less_holds_two(
    spare: int, blocks: int
) -> None:
    device = 1000 + 3 * GEOMETRY.block_bytes + spare
    assert GEOMETRY.fit_to_budget(KvMemoryBudget(device, 1.0, 1000)).num_blocks == blocks


@pytest.mark.parametrize("utilization", [0.1, 0.3, 0.7, 0.9, 1])
def test_a_utilization_is_the_decimal_that_was_written(utilization: float) -> None:
    # 0.7 is a little less than 7/10 in binary, and would lose the last block of 10**15.
    byte = KvGeometry(n_layers=1, n_kv_heads=1, head_dim=1, num_blocks=1, block_size=1, elem_size=1)
    budget = KvMemoryBudget(10**15, utilization, 0)
    assert byte.fit_to_budget(budget).num_blocks * byte.block_bytes == round(utilization * 10) * 10**14


@pytest.mark.parametrize("other", [GEOMETRY.block_bytes, GEOMETRY.block_bytes * 9])
def test_a_budget_without_room_for_one_block_says_what_it_needs_and_has(other: int) -> None:
    device = 2 * GEOMETRY.block_bytes - 1
    with pytest.raises(CapacityError, match=f"{GEOMETRY.block_bytes} bytes") as caught:
        GEOMETRY.fit_to_budget(KvMemoryBudget(device, 1.0, other))
    have = max(0, device - other)
    assert (caught.value.need, caught.value.have) == (GEOMETRY.block_bytes, have)  # type: ignore[attr-defined]
    assert GEOMETRY.fit_to_budget(KvMemoryBudget(other + GEOMETRY.block_bytes, 1, other)).num_blocks == 1


@pytest.mark.parametrize(
    "record", [GEOMETRY, KvBudget(4, 4), KvMemoryBudget(4, 1.0, 0), PoolCapacity(GEOMETRY, 1, 7)]
)
def test_sizes_do_not_change(record: Any) -> None:
    field = attrs.fields(type(record))[0].name
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        setattr(record, field, 99)


def test_a_pool_reports_its_geometry_whole() -> None:
    pool = KvBlockPool(GEOMETRY)
    assert pool.capacity() == PoolCapacity(geometry=GEOMETRY, free_blocks=7, total_blocks=7)
    assert pool.kv_bytes_resident == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scheduler_counts_in_the_model_s_dimensions_and_its_own_dtype(dtype: torch.dtype) -> None:
    scheduler = SessionScheduler(CoreOnlyModel(), KvBudget(block_size=4, num_blocks=9), dtype=dtype)
    expected = KvGeometry(
        n_layers=2, n_kv_heads=2, head_dim=4, num_blocks=9, block_size=4, elem_size=dtype.itemsize
    )
    assert scheduler.kv_capacity() == PoolCapacity(geometry=expected, free_blocks=9, total_blocks=9)
    session = scheduler.session(scheduler.add_session([1] * 5, max_new_tokens=7))
    assert scheduler.kv_bytes_resident == session.cache.k.nbytes + session.cache.v.nbytes


def test_a_pool_of_something_else_than_a_geometry_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="a pool of KvBudget"):
        KvBlockPool(KvBudget(16, 8))  # type: ignore[arg-type]
