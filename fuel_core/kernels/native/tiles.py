"""Matrices in the tiles that the products stream."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from fuel_core import _native
from fuel_core.contracts.checkpoint import QuantizedTensor
from fuel_core.contracts.errors import ModelContractError
from fuel_core.kernels.native.recording import empty
from fuel_core.kernels.protocols import Product
from fuel_core.kernels.reference import product as plain_product

_KINDS = {
    torch.float32: _native.Kind.F32,
    torch.bfloat16: _native.Kind.BF16,
    torch.float16: _native.Kind.F16,
    "Q4_0": _native.Kind.Q4_0,
    "Q4_1": _native.Kind.Q4_1,
    "Q5_0": _native.Kind.Q5_0,
    "Q5_1": _native.Kind.Q5_1,
    "Q8_0": _native.Kind.Q8_0,
    "Q4_K": _native.Kind.Q4_K,
    "Q5_K": _native.Kind.Q5_K,
    "Q6_K": _native.Kind.Q6_K,
}


def kind_of(weight: Tensor | QuantizedTensor) -> _native.Kind | None:
    """What the kernels call a matrix of this type, or None where they have none for it."""
    return _KINDS.get(weight.block_type.name if isinstance(weight, QuantizedTensor) else weight.dtype)


@attrs.frozen(eq=False)
class TiledProduct:
    """Maps of one input in tiles of their own; the tensors that they were made of are not needed any more."""

    matrix: _native.Matrix

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """``x [T, in]`` → ``[T, out]`` in the dtype of ``x``, computed in float32, residual included.

        Raises:
            ModelContractError: ``x`` or ``residual`` has another shape; a kernel would read beyond it.
        """
        self._check("an input", x, len(x), self.matrix.columns)
        wide, added = _plain(x), 0
        out = empty(x.shape[0], self.matrix.rows)
        if residual is not None:
            self._check("a residual", residual, *out.shape)
            residual = _plain(residual)
            added = residual.data_ptr()
        _native.linear(self.matrix, wide.data_ptr(), x.shape[0], added, out.data_ptr())
        return out if x.dtype is torch.float32 else out.to(x.dtype)

    def _check(self, what: str, x: Tensor, rows: int, columns: int) -> None:
        if x.shape != (rows, columns):
            raise ModelContractError(
                f"{what} {list(x.shape)} of a product",
                needed=f"[{rows}, {columns}]",
                remedy="give it the width that its weights were loaded with",
            )


def _plain(x: Tensor) -> Tensor:
    """The same in float32, without gaps."""
    return x if x.dtype is torch.float32 and x.is_contiguous() else x.float().contiguous()


def tiled_product(weights: Sequence[Tensor | QuantizedTensor], biases: Sequence[Tensor | None]) -> Product:
    """See :func:`fuel_core.kernels.ops.product`."""
    kinds = [kind for weight in weights if (kind := kind_of(weight)) is not None]
    if len(kinds) < len(weights):
        return plain_product(weights, biases)
    matrix = _native.Matrix(weights[0].shape[1])
    for kind, weight in zip(kinds, weights, strict=True):
        data = (weight.data if isinstance(weight, QuantizedTensor) else weight).contiguous()
        matrix.add(kind, data.data_ptr(), weight.shape[0])
        if data.untyped_storage().filename:  # its pages are the file's, and are read again where needed
            _native.release(data.data_ptr(), data.nbytes)
    if any(bias is not None for bias in biases):
        parts = [
            torch.zeros(weight.shape[0]) if bias is None else bias.float()
            for weight, bias in zip(weights, biases, strict=True)
        ]
        whole = torch.cat(parts)  # [rows]
        matrix.set_bias(whole.data_ptr())
    return TiledProduct(matrix)
