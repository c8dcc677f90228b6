"""Matrices, inputs and forms of run for the tests of the native kernels."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support_gguf import HALVES, random_blocks
from support_kernels import draw
from support_paged import poison_free, pool_for, ragged
from torch import Tensor

from fuel_core import _native
from fuel_core.contracts import BLOCK_TYPES, QuantizedTensor
from fuel_core.kernels.native.recording import Recording
from fuel_core.kernels.native.tiles import TiledProduct, tiled_product
from fuel_core.kernels.reference.blocks import dequantize
from fuel_core.kv import DeviceKvPool, SessionHandle
from fuel_core.layers import Decoder

ISAS = tuple(_native.available())
"""The instruction sets that this processor runs, the best first."""

QUANTIZED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
PLAIN = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
FORMATS = (*PLAIN, *QUANTIZED)

ROUNDING = 5e-6
"""What sums in float32 may lose, relative to their typical size."""

every_isa = pytest.mark.parametrize("isa", ISAS)
every_format = pytest.mark.parametrize("name", FORMATS)
every_quantized = pytest.mark.parametrize("name", QUANTIZED)

Weight = Tensor | QuantizedTensor
Norm = tuple[Tensor, Tensor, float] | None


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """So many threads of the native kernels in the body."""
    before = _native.threads()
    _native.set_threads(count)
    try:
        yield
    finally:
        _native.set_threads(before)


def unit(name: str) -> int:
    """Of how many columns a row of this format must be a multiple."""
    return 1 if name in PLAIN else BLOCK_TYPES[name].length


def matrix(name: str, rows: int, columns: int, seed: int = 0) -> Weight:
    """A matrix whose values are about as large as a model's; blocks have any packed bytes."""
    if name in PLAIN:
        return (draw(rows, columns, seed=seed) / 8).to(PLAIN[name])
    blocks = random_blocks(BLOCK_TYPES[name], rows, columns, seed).view(-1, BLOCK_TYPES[name].bytes)
    generator = torch.Generator().manual_seed(seed + 1)
    for start in HALVES[name]:
        sizes = 0.005 + 0.015 * torch.rand(len(blocks), 1, generator=generator)
        signs = 1 - 2 * torch.randint(0, 2, sizes.shape, generator=generator)
        blocks[:, start : start + 2] = (sizes * signs).half().view(torch.uint8)
    return QuantizedTensor(blocks.view(rows, -1), BLOCK_TYPES[name], columns)


def wide(weight: Weight) -> Tensor:
    """Its values in float64, as the reference expands them."""
    if isinstance(weight, Tensor):
        return weight.double()
    return dequantize(weight.data, weight.block_type, weight.columns).double()


def inputs(rows: int, columns: int) -> Tensor:
    """Inputs that have nothing to do with the matrices."""
    return draw(rows, columns, seed=77)


def exact_inputs(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Inputs that a byte per value holds exactly, so that only the kernel's own rounding is left."""
    generator = torch.Generator().manual_seed(seed)
    whole = -(-columns // 32) * 32
    x = torch.randint(-127, 128, (rows, whole // 32, 32), generator=generator).float()
    at = torch.randint(0, 32, (rows, whole // 32, 1), generator=generator)
    x.scatter_(2, at, 127.0)  # the largest, by which the block is scaled
    powers = torch.randint(-9, -4, (rows, whole // 32, 1), generator=generator)
    return (x * 2.0**powers).view(rows, whole)[:, :columns].contiguous()


def tiles(*weights: Weight, biases: Sequence[Tensor | None] | None = None) -> TiledProduct:
    """The product as the native kernels make it."""
    made = tiled_product(weights, biases or [None] * len(weights))
    assert isinstance(made, TiledProduct)
    return made


def truth(x: Tensor, *weights: Weight) -> Tensor:
    """The product in float64."""
    return x.double() @ torch.cat([wide(weight) for weight in weights]).T


def loss(ours: Tensor, exact: Tensor, x: Tensor, *weights: Weight) -> float:
    """How far off a product is, relative to its size were the signs of its terms drawn."""
    assert ours.shape == exact.shape
    squares = torch.cat([wide(weight) for weight in weights]).square()
    size = (x.double().square() @ squares.T).sqrt().max()
    return float((ours.double() - exact).abs().nan_to_num(nan=torch.inf).max() / size)


def alone(product: TiledProduct, x: Tensor) -> Tensor:
    """Each row by itself."""
    return torch.cat([product(x[row : row + 1]) for row in range(len(x))])


def as_bytes(x: Tensor) -> Tensor:
    """Inputs ``[T, K]`` rounded as the products round them: to a byte each, scaled by the largest of 32."""
    blocks = x.view(len(x), -1, 32)
    largest = blocks.abs().amax(-1, keepdim=True)
    whole = (blocks * (127 / largest)).round()
    return (whole.double() * (largest / 127).double()).view(x.shape)


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """``q [n, Hq, D]``, the last of ``k, v [L, Hkv, D]``: every row sees itself and what stands before."""
    n, hq, _ = q.shape
    k, v = (part.repeat_interleave(hq // k.shape[1], dim=1) for part in (k, v))  # [L, Hq, D]
    scores = torch.einsum("nhd,lhd->hnl", q, k) * scale
    ahead = torch.ones(n, k.shape[0]).triu(k.shape[0] - n + 1).bool()
    return torch.einsum("hnl,lhd->nhd", scores.masked_fill(ahead, -torch.inf).softmax(-1), v).flatten(1)


def gains(dim: int) -> tuple[Tensor, Tensor, float]:
    """A QK norm whose every part is felt."""
    return 1 + 0.3 * draw(dim, seed=2), 1 + 0.3 * draw(dim, seed=3), 1e-3


def turned(
    qkv: Tensor, cos: Tensor, sin: Tensor, kv_heads: int, dim: int, norm: Norm
) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and V of float64 ``[T, (Hq + 2 Hkv) D]``, ``[T, heads, D]`` each, by the formulas."""
    rows = qkv.view(len(qkv), -1, dim)
    q, k, v = rows.split([rows.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    if norm is not None:
        q, k = (
            x / (x.square().mean(-1, keepdim=True) + norm[2]).sqrt() * gain.double()
            for x, gain in zip((q, k), norm[:2], strict=True)
        )
    turn = torch.complex(cos.double(), sin.double())[:, None]  # [T, 1, D/2]
    q, k = (torch.complex(*x.chunk(2, -1)) * turn for x in (q, k))
    return torch.cat((q.real, q.imag), -1), torch.cat((k.real, k.imag), -1), v


# --- recorded steps


def unrecorded(model: Decoder) -> Decoder:
    """The model without a memory for recordings."""
    model._arena = None
    return model


def recordings(pool: DeviceKvPool, model: Decoder) -> dict[Any, Recording]:
    """Those that a pool holds for a model, by the sessions and the width that they are for."""
    return {key: step.recording for key, step in pool.plans.get(model, {}).items() if step.recording}


class Side:
    """A model and a pool in permuted blocks."""

    def __init__(self, model: Decoder, seed: int, block_size: int = 4) -> None:
        self.model = model
        self.pool = pool_for(model, 96, block_size, shuffled=seed)

    def step(self, sessions: Sequence[SessionHandle], tokens: Sequence[Sequence[int]]) -> Tensor:
        poison_free(self.pool)
        return ragged(self.model, self.pool, dict(zip(sessions, tokens, strict=True)))


def wander(sides: Sequence[Side], steps: int, seed: int = 0) -> list[list[Tensor]]:
    """Sessions that start, decode in groups of 1 to 5 and end, alike on every side: what each side said."""
    rng, live, said = random.Random(seed), [], []
    for _ in range(steps):
        while len(live) < 5 or (len(live) < 7 and rng.random() < 0.3):
            live.append([side.pool.core.open() for side in sides])
            prompt = [rng.choices(range(96), k=rng.randint(2, 9))]
            said.append([side.step([live[-1][at]], prompt) for at, side in enumerate(sides)])
        group = rng.sample(live, rng.randint(1, 5))
        tokens = [[rng.randrange(96)] for _ in group]
        said.append([side.step([each[at] for each in group], tokens) for at, side in enumerate(sides)])
        if rng.random() < 0.2:
            for side, session in zip(sides, live.pop(rng.randrange(len(live))), strict=True):
                side.pool.core.discard(session)
    return said
