"""A pool gets the memory that a step leaves: no block too many, and none too few."""

from __future__ import annotations

import attrs
import pytest
from support_paged import make_pool, model_of, opened, pool_for, standing

from fuel_core.contracts.errors import CapacityError, InvalidRequestError
from fuel_core.kv import KvGeometry, KvMemoryBudget
from fuel_core.kv.residency import ResidencyReport, fit_geometry_from_residency, measure_residency

TEMPLATE = KvGeometry(2, 2, 8, 1, 4, 4)
PROBE = attrs.evolve(TEMPLATE, num_blocks=2)
BESIDE = 16384  # bytes of weights and activations
REPORT = ResidencyReport(BESIDE + 2 * PROBE.block_bytes)


@pytest.mark.parametrize("utilization", [1.0, 0.5])
@pytest.mark.parametrize("slack", [0, 123, TEMPLATE.block_bytes - 1])
def test_the_blocks_are_what_fits_beside_the_step_without_its_probe(slack: int, utilization: float) -> None:
    usable = BESIDE + 10 * TEMPLATE.block_bytes + slack
    fitted = fit_geometry_from_residency(TEMPLATE, REPORT, PROBE, int(usable / utilization), utilization)
    assert fitted == attrs.evolve(TEMPLATE, num_blocks=10)
    assert make_pool(fitted.num_blocks).core.free_blocks == 10


def test_a_probe_that_was_counted_would_cost_its_blocks() -> None:
    usable = BESIDE + 10 * TEMPLATE.block_bytes
    counted = TEMPLATE.fit_to_budget(KvMemoryBudget(usable, 1.0, REPORT.peak_bytes))
    assert counted.num_blocks == 8
    larger = attrs.evolve(PROBE, num_blocks=5)
    report = ResidencyReport(BESIDE + 5 * PROBE.block_bytes)
    assert fit_geometry_from_residency(TEMPLATE, report, larger, usable, 1.0).num_blocks == 10


@pytest.mark.parametrize("usable", [1, BESIDE, BESIDE + TEMPLATE.block_bytes - 1])
def test_a_device_that_holds_no_block_beside_the_step_is_refused(usable: int) -> None:
    with pytest.raises(CapacityError) as caught:
        fit_geometry_from_residency(TEMPLATE, REPORT, PROBE, usable, 1.0)
    assert caught.value.need == TEMPLATE.block_bytes  # type: ignore[attr-defined]
    fitted = fit_geometry_from_residency(TEMPLATE, REPORT, PROBE, BESIDE + TEMPLATE.block_bytes, 1.0)
    assert fitted.num_blocks == 1


def test_a_step_is_measured_and_its_blocks_come_back() -> None:
    model = model_of()
    probe = pool_for(model, 4)
    kept = opened(probe, 1)
    before = standing(probe)
    report = measure_residency(model, probe, 12)
    assert report.peak_bytes > probe.geometry.num_blocks * probe.geometry.block_bytes
    assert standing(probe) == before
    with pytest.raises(CapacityError):
        measure_residency(model, probe, 13)
    with pytest.raises(InvalidRequestError):
        measure_residency(model, probe, 0)
    assert standing(probe) == before
    assert probe.core.filled_tokens(kept) == 1
