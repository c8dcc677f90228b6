"""What the contiguous tiers check of their caches before they write anything."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fuel_core.contracts.errors import CapacityError, ModelContractError
from fuel_core.contracts.requests import check_context
from fuel_core.contracts.state import ModelDims
from fuel_core.kv.cache import KvCache


def check_cache(cache: KvCache, dims: ModelDims, device: torch.device) -> None:
    """A cache of the model's geometry, on its device.

    Raises:
        ModelContractError: names both.
    """
    if cache.dims != dims or cache.device.type != device.type:
        raise ModelContractError(
            f"a cache of {cache.dims} on {cache.device}",
            needed=f"{dims} on {device}",
            remedy="build the cache from ModelDims.from_model(model)",
        )


def check_room(cache: KvCache, add: int, max_context: int | None) -> None:
    """Room in the cache, and in the model's context, for ``add`` tokens.

    Raises:
        InvalidRequestError: beyond the context.
        CapacityError: beyond the cache.
    """
    total = cache.cached_len + add
    check_context(total, max_context)
    if total > cache.max_seq_len:
        raise CapacityError(
            f"{cache.cached_len} cached and {add} new tokens",
            needed=f"at most {cache.max_seq_len}, the size of the cache",
            remedy="build a larger cache",
            need=total,
            have=cache.max_seq_len,
        )


def check_lockstep(
    caches: Sequence[KvCache], last_tokens: Sequence[int], device: torch.device, dtype: torch.dtype
) -> None:
    """As many tokens as caches, and caches that are distinct, equally long and of the requested dtype.

    Raises:
        ModelContractError: says which cache differs, and in what.
    """
    if not caches or len(caches) != len(last_tokens):
        raise ModelContractError(
            f"{len(caches)} caches and {len(last_tokens)} tokens",
            needed="one token for each of one or more caches",
            remedy="pass the last token of every session",
        )
    if len({id(cache) for cache in caches}) != len(caches):
        raise ModelContractError(
            "a cache that stands twice in a batch",
            needed="a cache of its own for every session",
            remedy="pass each once",
        )
    for row, cache in enumerate(caches):
        if cache.dtype != dtype or cache.device.type != device.type:
            raise ModelContractError(
                f"cache {row} holds {cache.dtype} on {cache.device}",
                needed=f"the requested dtype {dtype} on {device}",
                remedy="build every cache with the scheduler's dtype and device",
            )
        if cache.cached_len != caches[0].cached_len:
            raise ModelContractError(
                f"cache {row} holds {cache.cached_len} tokens and cache 0 {caches[0].cached_len}",
                needed="equally long caches",
                remedy="group the sessions by their length",
            )
