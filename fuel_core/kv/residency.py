"""Sizing a pool by what a step of the model takes beside it."""

from __future__ import annotations

import resource
import sys

import attrs
import torch

from fuel_core.contracts.tiers import RaggedBatch, RaggedDecodeModel
from fuel_core.kv.device_pool import DeviceKvPool
from fuel_core.kv.geometry import KvGeometry, KvMemoryBudget


@attrs.frozen
class ResidencyReport:
    """The most bytes that were resident while a step ran, the probe pool's among them."""

    peak_bytes: int


def measure_residency(model: RaggedDecodeModel, probe: DeviceKvPool, tokens: int) -> ResidencyReport:
    """Run a step of ``tokens`` tokens on a probe pool, which is left as it was.

    On a GPU the peak is that of the step; on a CPU it is that of the process so far.

    Raises:
        CapacityError: the probe is too small for the step.
    """
    on_gpu = probe.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(probe.device)
    session = probe.core.open()
    try:
        model.forward_paged_ragged(RaggedBatch(probe, (session,), ((0,) * tokens,)))
    finally:
        probe.core.discard(session)
    peak = torch.cuda.max_memory_allocated(probe.device) if on_gpu else peak_resident_bytes()
    return ResidencyReport(peak)


def peak_resident_bytes() -> int:
    """The most bytes that this process has had resident."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def fit_geometry_from_residency(
    template: KvGeometry,
    report: ResidencyReport,
    probe: KvGeometry,
    device_bytes: int,
    utilization: float,
) -> KvGeometry:
    """``template`` with as many blocks as fit beside what a step takes without its probe pool.

    Args:
        template: the shape; its number of blocks is ignored.
        report: of a step on a pool of geometry ``probe``.
        probe: the probe pool's geometry.
        device_bytes: the device's memory.
        utilization: the part of it that may be used, in (0, 1].

    Raises:
        CapacityError: not one block fits.
    """
    beside = max(0, report.peak_bytes - probe.num_blocks * probe.block_bytes)
    return template.fit_to_budget(KvMemoryBudget(device_bytes, utilization, beside))
