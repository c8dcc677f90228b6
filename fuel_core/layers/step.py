"""The attention interface of a step: it knows each token's session, position and slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs
import torch
from torch import Tensor

from fuel_core.kernels import ops
from fuel_core.kv.cache import KvCache
from fuel_core.layers.rope import Rope


class Step(Protocol):
    """What a layer function is given to attend with."""

    def attention(
        self, layer: int, qkv: Tensor, qk_norm: tuple[Tensor, Tensor, float] | None = None
    ) -> Tensor:
        """Rotate, write K and V, and attend: ``[T, (Hq + 2 Hkv) D]`` → ``[T, Hq D]``.

        ``qk_norm`` are the per-head gains ``[D]`` of Q and K and their epsilon.
        """
        ...


@attrs.frozen(eq=False)
class _Segment:
    """The rows of one session in a step: positions ``start`` to ``end`` of its cache."""

    cache: KvCache
    start: int
    end: int


class ContiguousStep:
    """A step over contiguous caches, each given its own number of new tokens.

    One cache with n tokens is a prompt or a decode step of a session; K caches with a token each are a batch.
    Rows stand in the order of the caches. Nothing shows in a cache before :meth:`commit`.
    """

    def __init__(
        self, rope: Rope, caches: Sequence[KvCache], counts: Sequence[int], device: torch.device
    ) -> None:
        self._segments = [
            _Segment(cache, cache.cached_len, cache.cached_len + n)
            for cache, n in zip(caches, counts, strict=True)
        ]
        positions = torch.cat([torch.arange(s.start, s.end) for s in self._segments])  # [T]
        self._cos, self._sin = rope.angles(positions.to(device))  # [T, D/2]
        self._counts = list(counts)

    def attention(
        self, layer: int, qkv: Tensor, qk_norm: tuple[Tensor, Tensor, float] | None = None
    ) -> Tensor:
        """See :meth:`Step.attention`."""
        k_slots = [s.cache.k[layer, :, s.start : s.end] for s in self._segments]
        v_slots = [s.cache.v[layer, :, s.start : s.end] for s in self._segments]
        q = ops.write_kv(qkv, self._cos, self._sin, k_slots, v_slots, qk_norm)
        outs = [
            ops.attention(rows, s.cache.k[layer, :, : s.end], s.cache.v[layer, :, : s.end])
            for rows, s in zip(torch.split(q, self._counts), self._segments, strict=True)
        ]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def commit(self) -> None:
        """Let the caches show the tokens that the layers have written."""
        for segment in self._segments:
            segment.cache.cached_len = segment.end
