"""Products with plain and quantized matrices."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor
from torch.nn.functional import embedding as gather
from torch.nn.functional import linear as multiply

from fuel_core.contracts.checkpoint import QuantizedTensor
from fuel_core.kernels.protocols import Product
from fuel_core.kernels.reference.blocks import dequantize

# Values expanded at a time: 16 MB of float32, so that a large head never stands in memory whole.
_TILE_VALUES = 1 << 22


def linear(x: Tensor, weight: Tensor | QuantizedTensor, bias: Tensor | None = None) -> Tensor:
    """``x [T, in] @ weight [out, in]ᵀ + bias [out]`` → ``[T, out]``, other types expanded tile by tile."""
    if isinstance(weight, Tensor) and weight.dtype == x.dtype:
        return multiply(x, weight, bias)
    rows, columns = weight.shape
    step = max(1, _TILE_VALUES // columns)
    out = torch.empty(*x.shape[:-1], rows, dtype=x.dtype, device=x.device)
    for start in range(0, rows, step):
        out[..., start : start + step] = multiply(x, _rows(weight, slice(start, start + step), x.dtype))
    return out if bias is None else out.add_(bias)


@attrs.frozen(eq=False)
class PlainProduct:
    """Maps of one input as they were loaded, one after another.

    Attributes:
        weights: ``[out, in]`` each, plain or quantized.
        biases: ``[out]`` each, or None.
    """

    weights: tuple[Tensor | QuantizedTensor, ...]
    biases: tuple[Tensor | None, ...]

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """``x [T, in]`` → ``[T, sum of outs]``, added to ``residual`` where given."""
        outs = [linear(x, weight, bias) for weight, bias in zip(self.weights, self.biases, strict=True)]
        out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)
        return out if residual is None else residual + out


def product(weights: Sequence[Tensor | QuantizedTensor], biases: Sequence[Tensor | None]) -> Product:
    """See :func:`fuel_core.kernels.ops.product`."""
    return PlainProduct(tuple(weights), tuple(biases))


def embedding(ids: Tensor, weight: Tensor | QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Rows ``ids [T]`` of ``weight [vocab, hidden]`` → ``[T, hidden]`` in ``dtype``."""
    return gather(ids, weight).to(dtype) if isinstance(weight, Tensor) else _rows(weight, ids, dtype)


def _rows(weight: Tensor | QuantizedTensor, index: Tensor | slice, dtype: torch.dtype) -> Tensor:
    if isinstance(weight, Tensor):
        return weight[index].to(dtype)
    rows = weight.select_rows(index)
    return dequantize(rows.data, rows.block_type, rows.columns).to(dtype)
