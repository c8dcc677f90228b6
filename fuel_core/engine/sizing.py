"""How large an engine's pool is: what is asked for, else what the memory holds and the requests can use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import attrs

from fuel_core.contracts import ModelDims, RaggedDecodeModel
from fuel_core.contracts.errors import CapacityError, counted
from fuel_core.contracts.memory import parse_kv_memory
from fuel_core.engine.loading import Loaded, check_loaded
from fuel_core.engine.machine import Memory, device_memory
from fuel_core.engine.served import check_positive, ragged
from fuel_core.engine.serving import Engine
from fuel_core.kv import DeviceKvPool, KvBudget, KvGeometry, KvMemoryBudget
from fuel_core.kv.residency import (
    ResidencyReport,
    fit_geometry_from_residency,
    measure_residency,
)
from fuel_core.schedule.table import geometry_of

Measure: TypeAlias = Callable[[RaggedDecodeModel, DeviceKvPool, int], ResidencyReport]

_AUTO_SHARE = 0.9
_SMALLER_PASS = "lower token_budget, or max_batch where that is larger"


def build_engine(
    loaded: Loaded,
    *,
    kv_memory: str | int = "auto",
    max_batch: int = 32,
    token_budget: int = 512,
    block_size: int = 16,
    max_blocks: int | None = None,
) -> Engine:
    """An engine over a pool of its own.

    Args:
        loaded: the model, as :func:`load` returned it.
        kv_memory: a number of bytes, ``2GiB``, ``500M``, ``40%``: what is left of this share of the memory
            beside the model and its largest pass, or ``auto``: nearly all of it. The last is no more than
            ``max_batch`` sessions of the whole context can use.
        max_batch, token_budget: see :class:`Engine`.
        block_size: tokens per block.
        max_blocks: the most blocks that are of use, where that is known.

    Raises:
        InvalidRequestError: no loaded model, another ``kv_memory``, or a limit or size below 1.
        UnsupportedTierError: the model has no ragged tier.
        CapacityError: not one block fits, or a pass of ``token_budget`` tokens does not.
    """
    check_loaded(loaded)
    asked = parse_kv_memory(kv_memory)
    check_positive(max_batch=max_batch, token_budget=token_budget, block_size=block_size)
    if max_blocks is not None:
        check_positive(max_blocks=max_blocks)
    dims = ModelDims.from_model(ragged(loaded.model))
    one = geometry_of(dims, KvBudget(block_size, 1), loaded.kv_dtype)
    useful = _blocks_of_whole_contexts(loaded, max_batch, block_size) if max_blocks is None else max_blocks
    template = one if useful is None else attrs.evolve(one, num_blocks=useful)
    geometry = fit_pool(
        loaded,
        template,
        asked,
        pass_tokens=max(max_batch, token_budget),
        bounded=useful is not None,
        read=partial(device_memory, loaded.device),
    )
    pool = DeviceKvPool(geometry, loaded.kv_dtype, loaded.device)
    return Engine(loaded.model, pool, max_batch=max_batch, token_budget=token_budget)


def _blocks_of_whole_contexts(loaded: Loaded, max_batch: int, block_size: int) -> int | None:
    return None if loaded.max_context is None else max_batch * -(-loaded.max_context // block_size)


# -- what fits -------------------------------------------------------------------------------------


def fit_pool(
    loaded: Loaded,
    template: KvGeometry,
    asked: int | float | None,
    *,
    pass_tokens: int,
    bounded: bool,
    read: Callable[[], Memory],
    measure: Measure = measure_residency,
) -> KvGeometry:
    """``template`` with as many blocks as are asked for, and no more than its own where that is ``bounded``.

    Args:
        loaded: the model.
        template: the blocks' shape, and their useful number.
        asked: see :func:`parse_kv_memory`. A share is taken after what the model and its largest pass need.
        pass_tokens: the most tokens of a pass.
        bounded: whether more blocks than the template's are of no use.
        read: gives the device's memory as it is now.
        measure: runs a pass of so many tokens on a probe pool; see :func:`measure_residency`.

    Raises:
        CapacityError: not one block fits, or the probe pool does not.
    """
    if bounded:  # each token of a pass has a slot of its own
        pass_tokens = min(pass_tokens, template.num_blocks * template.block_size)
    if isinstance(asked, int):
        fits = template.fit_to_budget(KvMemoryBudget(asked, 1.0, 0))
    elif asked is None and bounded and _bytes_of(template) < read().free // 4:
        return template  # it is clear without a measurement
    else:
        fits = _fit_share(loaded, template, asked or _AUTO_SHARE, pass_tokens, read(), measure)
    return attrs.evolve(fits, num_blocks=min(fits.num_blocks, template.num_blocks)) if bounded else fits


def _fit_share(
    loaded: Loaded, template: KvGeometry, share: float, pass_tokens: int, memory: Memory, measure: Measure
) -> KvGeometry:
    tokens = min(pass_tokens, loaded.max_context or pass_tokens)
    probe = attrs.evolve(template, num_blocks=-(-tokens // template.block_size))
    _check_probe(probe, tokens, memory)
    report = measure(ragged(loaded.model), DeviceKvPool(probe, loaded.kv_dtype, loaded.device), tokens)
    # A session of the whole context may be less than a pass holds: what is missing takes its part again.
    taken = max(0, report.peak_bytes - memory.resident - _bytes_of(probe))
    missing = -(-taken * (pass_tokens - tokens) // tokens)
    report = attrs.evolve(report, peak_bytes=report.peak_bytes + missing)
    try:
        return fit_geometry_from_residency(template, report, probe, memory.free + memory.owned, share)
    except CapacityError as error:
        raise CapacityError(
            f"{error.given} beside the model and a pass of {counted(pass_tokens, 'token')}",
            needed=error.needed,
            remedy=f"give more KV memory, free some on the device, or {_SMALLER_PASS}",
            **error.figures,
        ) from error


def _check_probe(probe: KvGeometry, tokens: int, memory: Memory) -> None:
    if _bytes_of(probe) > memory.free:
        is_block = probe.block_size > tokens
        what = f"a {'block' if is_block else 'pass'} of {counted(max(tokens, probe.block_size), 'token')}"
        raise CapacityError(
            f"{what}, whose keys and values take {_bytes_of(probe)} bytes",
            needed=f"at most {memory.free} bytes, which are free",
            remedy=f"free memory on the device, or {'lower block_size' if is_block else _SMALLER_PASS}",
            need=_bytes_of(probe),
            have=memory.free,
        )


def _bytes_of(geometry: KvGeometry) -> int:
    return geometry.num_blocks * geometry.block_bytes
