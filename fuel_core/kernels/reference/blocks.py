"""GGML block formats expanded to float32, bit for bit as the ``gguf`` library does.

Source of the layouts: ``ggml-common.h`` and ``ggml-quants.c`` of llama.cpp. Every function takes blocks
``[B, bytes]`` uint8 and gives their float32 values, ``[B, length]`` or the same in runs; ``d`` and ``m`` are
half-precision scales and minima, products and sums are rounded one by one, in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fuel_core.contracts.checkpoint import BlockType
from fuel_core.contracts.errors import ModelContractError

# The sixteen levels of IQ4_NL.
_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def dequantize(data: Tensor, block_type: BlockType, columns: int) -> Tensor:
    """Expand ``data`` uint8 ``[rows, row_bytes]`` of any alignment → float32 ``[rows, columns]``.

    Raises:
        ModelContractError: the format is not known, or ``data`` is not uint8 rows of ``columns`` values.
        CheckpointError: ``columns`` is not a whole number of blocks.
    """
    expand = _EXPAND.get(block_type.name)
    row_bytes = block_type.row_bytes(columns)
    if expand is None or data.dtype != torch.uint8 or data.ndim != 2 or data.shape[1] != row_bytes:
        raise ModelContractError(
            f"{block_type.name} blocks {data.dtype} {tuple(data.shape)} for {columns} columns",
            needed=f"uint8 [rows, {row_bytes}] in one of {', '.join(_EXPAND)}",
            remedy="pass data, block_type and columns of one QuantizedTensor",
        )
    blocks = data.reshape(data.shape[0] * (columns // block_type.length), block_type.bytes)
    return expand(blocks).view(data.shape[0], columns)


def _halves(blocks: Tensor, start: int, count: int = 1) -> tuple[Tensor, ...]:
    """``count`` halves from byte ``start`` of each block, as ``[B, 1]`` float32 each."""
    # The copy aligns them: torch makes no view of halves at an odd address.
    raw = blocks[:, start : start + 2 * count].clone(memory_format=torch.contiguous_format)
    return raw.view(torch.float16).float().chunk(count, dim=1)


def _unpack(packed: Tensor, width: int, bits: int) -> Tensor:
    """Fields of ``bits`` bits of ``packed [B, n]`` → ``[B, n * 8 / bits]`` uint8.

    Each group of ``width`` bytes holds ``8 / bits`` runs of ``width`` values, the lowest bits first.
    """
    count, size = packed.shape
    groups = packed.contiguous().view(count, size // width, width)
    runs = [groups >> shift for shift in range(0, 8, bits)]
    return torch.stack(runs, dim=2).bitwise_and_((1 << bits) - 1).view(count, size * 8 // bits)


def _q4_0(blocks: Tensor) -> Tensor:
    (d,) = _halves(blocks, 0)
    return _unpack(blocks[:, 2:], 16, 4).sub_(8).view(torch.int8).float().mul_(d)


def _q4_1(blocks: Tensor) -> Tensor:
    d, m = _halves(blocks, 0, 2)
    return _unpack(blocks[:, 4:], 16, 4).float().mul_(d).add_(m)


def _five_bits(packed: Tensor) -> Tensor:
    """The fifth bits of 32 values, one after another, then their nibbles."""
    high = _unpack(packed[:, :4], 1, 1)
    return _unpack(packed[:, 4:], 16, 4).bitwise_or_(high << 4)


def _q5_0(blocks: Tensor) -> Tensor:
    (d,) = _halves(blocks, 0)
    return _five_bits(blocks[:, 2:]).sub_(16).view(torch.int8).float().mul_(d)


def _q5_1(blocks: Tensor) -> Tensor:
    d, m = _halves(blocks, 0, 2)
    return _five_bits(blocks[:, 4:]).float().mul_(d).add_(m)


def _q8_0(blocks: Tensor) -> Tensor:
    (d,) = _halves(blocks, 0)
    return blocks[:, 2:].view(torch.int8).float().mul_(d)


def _iq4_nl(blocks: Tensor) -> Tensor:
    (d,) = _halves(blocks, 0)
    levels = torch.tensor(_LEVELS, dtype=torch.float32, device=blocks.device)  # [16]
    return levels[_unpack(blocks[:, 2:], 16, 4).int()].mul_(d)


def _scaled(values: Tensor, scale: Tensor) -> Tensor:
    """``values [B, N]`` times ``scale [B, G]``, one for each of G equal runs → float32 ``[B, G, N/G]``."""
    runs = values.view(*scale.shape, values.shape[1] // scale.shape[1])
    return runs.float().mul_(scale.unsqueeze(-1))


def _q2_k(blocks: Tensor) -> Tensor:
    d, m = _halves(blocks, 80, 2)
    packed = blocks[:, :16]  # [B, 16], for each run a scale and, above it, a minimum
    minima = m * (packed >> 4).float()
    return _scaled(_unpack(blocks[:, 16:80], 32, 2), d * (packed & 15).float()).sub_(minima.unsqueeze(-1))


def _q3_k(blocks: Tensor) -> Tensor:
    (d,) = _halves(blocks, 108)
    low, high = _unpack(blocks[:, 96:104], 8, 4), _unpack(blocks[:, 104:108], 4, 2)
    scales = low.bitwise_or_(high << 4).sub_(32).view(torch.int8)  # [B, 16]
    # A set bit of the mask means that 4 is not taken away.
    values = _unpack(blocks[:, 32:96], 32, 2).add_(_unpack(blocks[:, :32], 32, 1) << 2).sub_(4)
    return _scaled(values.view(torch.int8), d * scales.float())


def _six_bit_pairs(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Twelve bytes → eight scales and eight minima of six bits, ``[B, 8]`` float32 each.

    The first four of each are the low six bits of bytes 0 to 3 and 4 to 7; the last four have their low
    nibbles in bytes 8 to 11 and their upper two bits above the first four.
    """
    scales, minima, nibbles = packed.chunk(3, dim=1)
    late_scales = (nibbles & 15) | ((scales >> 2) & 48)
    late_minima = (nibbles >> 4) | ((minima >> 2) & 48)
    first = torch.cat((scales & 63, late_scales), dim=1)
    second = torch.cat((minima & 63, late_minima), dim=1)
    return first.float(), second.float()


def _q45_k(blocks: Tensor, values: Tensor) -> Tensor:
    d, m = _halves(blocks, 0, 2)
    scales, minima = _six_bit_pairs(blocks[:, 4:16])
    return _scaled(values, d * scales).sub_((m * minima).unsqueeze(-1))


def _q4_k(blocks: Tensor) -> Tensor:
    return _q45_k(blocks, _unpack(blocks[:, 16:], 32, 4))


def _q5_k(blocks: Tensor) -> Tensor:
    high = _unpack(blocks[:, 16:48], 32, 1)
    return _q45_k(blocks, _unpack(blocks[:, 48:], 32, 4).bitwise_or_(high << 4))


def _q6_k(blocks: Tensor) -> Tensor:
    (d,) = _halves(blocks, 208)
    high = _unpack(blocks[:, 128:192], 32, 2)
    values = _unpack(blocks[:, :128], 64, 4).bitwise_or_(high << 4).sub_(32).view(torch.int8)
    return _scaled(values, d * blocks[:, 192:208].view(torch.int8).float())


_EXPAND = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
}
