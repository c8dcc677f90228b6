"""How large an engine's pool is: what is asked for, else what the memory holds and the requests can use."""

from __future__ import annotations

import os
import re
from pathlib import Path

import attrs
import torch

from fuel_core.contracts import ModelDims
from fuel_core.contracts.errors import InvalidRequestError
from fuel_core.engine.loading import Loaded
from fuel_core.engine.served import check_limits, ragged
from fuel_core.engine.serving import Engine
from fuel_core.kv import DeviceKvPool, KvBudget, KvGeometry, KvMemoryBudget
from fuel_core.kv.residency import fit_geometry_from_residency, measure_residency, peak_resident_bytes
from fuel_core.schedule.table import geometry_of

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_NUMBER = r"([0-9]{1,15}(?:\.[0-9]{1,15})?)"
_PROBE_TOKENS = 64


def build_engine(
    loaded: Loaded,
    *,
    kv_memory: str = "auto",
    max_batch: int = 32,
    token_budget: int = 512,
    block_size: int = 16,
    max_blocks: int | None = None,
) -> Engine:
    """An engine over a pool of its own.

    Args:
        loaded: the model.
        kv_memory: ``2GiB``, ``500MB``, ``40%``: what is left of this share of the memory beside the model and
            its steps, or ``auto``: nearly all of it. The last is no more than ``max_batch`` sessions of the
            whole context can use.
        max_batch, token_budget: see :class:`Engine`.
        block_size: tokens per block.
        max_blocks: the most blocks that are of use, where that is known.

    Raises:
        InvalidRequestError: a ``kv_memory`` that is none of these, or a limit below 1.
        UnsupportedTierError: the model has no ragged tier.
        CapacityError: not one block fits.
    """
    check_limits(max_batch, token_budget)
    dims = ModelDims.from_model(ragged(loaded.model))
    one = geometry_of(dims, KvBudget(block_size, 1), loaded.dtype)
    useful = _blocks_of_whole_contexts(loaded, max_batch, block_size) if max_blocks is None else max_blocks
    template = one if useful is None else attrs.evolve(one, num_blocks=useful)
    geometry = _geometry(loaded, template, kv_memory, bounded=useful is not None)
    pool = DeviceKvPool(geometry, loaded.dtype, loaded.device)
    return Engine(loaded.model, pool, max_batch=max_batch, token_budget=token_budget)


def _geometry(loaded: Loaded, useful: KvGeometry, kv_memory: str, *, bounded: bool) -> KvGeometry:
    """As many blocks as ``kv_memory`` says, and no more than are ``useful`` where that is ``bounded``."""
    text = str(kv_memory).strip().upper()
    if match := re.fullmatch(rf"{_NUMBER} ?(B|[KMG]I?B)", text):
        fits = _fixed(useful, int(float(match[1]) * _UNITS[match[2]]), kv_memory)
    elif match := re.fullmatch(rf"{_NUMBER} ?%", text):
        fits = _fit(loaded, useful, float(match[1]) / 100, kv_memory)
    elif text != "AUTO":
        raise _bad(kv_memory)
    elif bounded and useful.num_blocks * useful.block_bytes < _device_bytes(loaded.device) // 4:
        return useful  # it is clear without a measurement
    else:
        fits = _fit(loaded, useful, 0.9, kv_memory)
    return attrs.evolve(fits, num_blocks=min(fits.num_blocks, useful.num_blocks)) if bounded else fits


def _fixed(template: KvGeometry, size: int, kv_memory: str) -> KvGeometry:
    if not size:
        raise _bad(kv_memory)
    return template.fit_to_budget(KvMemoryBudget(size, 1.0, 0))


def _fit(loaded: Loaded, template: KvGeometry, utilization: float, kv_memory: str) -> KvGeometry:
    if not 0 < utilization <= 1:
        raise _bad(kv_memory)
    tokens = min(_PROBE_TOKENS, loaded.max_context or _PROBE_TOKENS)
    probe = attrs.evolve(template, num_blocks=-(-tokens // template.block_size))
    report = measure_residency(
        ragged(loaded.model),
        DeviceKvPool(probe, loaded.dtype, loaded.device),
        tokens,
    )
    return fit_geometry_from_residency(template, report, probe, _device_bytes(loaded.device), utilization)


def _bad(kv_memory: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"KV memory {kv_memory!r}",
        needed="a size such as 2GiB or 500MB, a share such as 40%, or auto",
        remedy="write one of these",
    )


def _device_bytes(device: torch.device) -> int:
    """The memory that this process has or could have."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    return _available_bytes() + peak_resident_bytes()


def _available_bytes() -> int:
    """What could be allocated without swapping; Linux counts its page cache in."""
    meminfo = Path("/proc/meminfo")
    match = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text()) if meminfo.exists() else None
    return int(match[1]) * 1024 if match else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _blocks_of_whole_contexts(loaded: Loaded, max_batch: int, block_size: int) -> int | None:
    return None if loaded.max_context is None else max_batch * -(-loaded.max_context // block_size)
