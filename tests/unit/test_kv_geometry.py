"""The sizes that admission counts with are the sizes that memory has."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support_models import CoreOnlyModel

from fuel_core.contracts.errors import CapacityError
from fuel_core.kv import KvBlockPool, KvBudget, KvCache, KvGeometry, PoolCapacity
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


@pytest.mark.parametrize("record", [GEOMETRY, KvBudget(4, 4), PoolCapacity(GEOMETRY, 1, 7)])
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
