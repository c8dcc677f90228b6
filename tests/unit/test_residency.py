"""A pool takes what a step of the model leaves of the memory, whose probe is not counted against it."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from support_models import distance
from support_paged import model_of, opened, pool_for, standing

from fuel_core.contracts import RaggedBatch
from fuel_core.contracts.errors import CapacityError, FuelError
from fuel_core.kv import KvGeometry
from fuel_core.kv.residency import (
    ResidencyReport,
    fit_geometry_from_residency,
    measure_residency,
    peak_resident_bytes,
)

TEMPLATE = KvGeometry(n_layers=2, n_kv_heads=2, head_dim=8, num_blocks=1, block_size=4, elem_size=4)
STATM = Path("/proc/self/statm")
BLOCK = 2 * 2 * 2 * 8 * 4 * 4
PROBE = KvGeometry(n_layers=2, n_kv_heads=2, head_dim=8, num_blocks=10, block_size=4, elem_size=4)


def fit(peak: int, device: int, utilization: float = 1.0, probe: KvGeometry = PROBE) -> int:
    """How many blocks fit."""
    fitted = fit_geometry_from_residency(TEMPLATE, ResidencyReport(peak), probe, device, utilization)
    assert (fitted.block_size, fitted.block_bytes) == (TEMPLATE.block_size, BLOCK)
    return fitted.num_blocks


@pytest.mark.parametrize(
    ("peak", "device", "utilization", "blocks"),
    [
        # Beside the probe's ten blocks a step took 90, so of 200 blocks of memory 110 are left.
        (100 * BLOCK, 200 * BLOCK, 1.0, 110),
        (100 * BLOCK, 200 * BLOCK, 0.5, 10),
        (100 * BLOCK, 200 * BLOCK + BLOCK - 1, 1.0, 110),
        (100 * BLOCK + 1, 200 * BLOCK, 1.0, 109),
        (100 * BLOCK, 91 * BLOCK, 1.0, 1),
        (10 * BLOCK, 7 * BLOCK, 1.0, 7),
        # A peak that was reached before there was a probe says nothing of it.
        (3 * BLOCK, 7 * BLOCK, 1.0, 7),
        (10 * BLOCK, 10 * BLOCK, 0.7, 7),
    ],
)
def test_the_blocks_that_fit_are_those_that_a_step_leaves(
    peak: int, device: int, utilization: float, blocks: int
) -> None:
    assert fit(peak, device, utilization) == blocks


def test_not_taking_the_probe_out_would_undersize_the_pool_by_it() -> None:
    peak, device = 100 * BLOCK, 200 * BLOCK
    # The negative control: the same report, as if there had been no probe to take out.
    forgotten = (device - peak) // BLOCK
    assert fit(peak, device) == forgotten + PROBE.num_blocks
    larger = KvGeometry(2, 2, 8, num_blocks=40, block_size=4, elem_size=4)
    assert fit(peak + 30 * BLOCK, device, probe=larger) == fit(peak, device), "whatever the probe's size"


@pytest.mark.parametrize(
    ("peak", "device", "have"),
    [(100 * BLOCK, 91 * BLOCK - 1, BLOCK - 1), (100 * BLOCK, BLOCK, 0), (10 * BLOCK, 1, 1)],
)
def test_a_device_without_room_for_one_block_is_refused_with_its_figures(
    peak: int, device: int, have: int
) -> None:
    with pytest.raises(CapacityError) as caught:
        fit(peak, device)
    assert caught.value.figures == {"need": BLOCK, "have": have}


def test_where_no_block_fits_the_remedy_is_one_that_a_user_has() -> None:
    with pytest.raises(CapacityError) as caught:
        fit(100 * BLOCK, BLOCK)
    for what in ("more KV memory", "shorter context", "fewer sessions"):
        assert what in caught.value.remedy
    assert "utilization" not in str(caught.value)  # a name that none of them has met


@pytest.mark.parametrize("utilization", [0.0, -0.1, 1.01, float("nan"), True])
def test_a_share_of_the_memory_that_is_none_is_refused(utilization: float) -> None:
    with pytest.raises(CapacityError, match="utilization"):
        fit(BLOCK, 9 * BLOCK, utilization)


@pytest.mark.parametrize("tokens", [1, 7, 32])
def test_a_measurement_leaves_the_probe_as_it_was(tokens: int) -> None:
    model = model_of("llama")
    pool = pool_for(model, 12)
    session = opened(pool, 0)
    row = model.forward_paged_ragged(RaggedBatch(pool, (session,), ((1, 2, 3, 4, 5),)))
    before = standing(pool)
    report = measure_residency(model, pool, tokens)
    assert standing(pool) == before
    assert 0 < report.peak_bytes <= peak_resident_bytes()
    again = opened(pool, 0)
    assert distance(model.forward_paged_ragged(RaggedBatch(pool, (again,), ((1, 2, 3, 4, 5),))), row) == 0


def test_a_probe_that_is_too_small_is_refused_and_left_empty() -> None:
    pool = pool_for(model_of("llama"), 2)
    with pytest.raises(FuelError):
        measure_residency(model_of("llama"), pool, 9)
    assert (pool.core.free_blocks, pool.core._tables) == (2, {})


@pytest.mark.skipif(not STATM.exists(), reason="a file of Linux")
def test_the_peak_is_in_bytes_and_no_less_than_what_is_resident_now() -> None:
    pages = int(STATM.read_text().split()[1])
    resident = pages * resource.getpagesize()
    assert resident / 2 < peak_resident_bytes() < 100 * resident
