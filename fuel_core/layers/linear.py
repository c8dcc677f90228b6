"""Linear maps of a layer, as loaded."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from torch import Tensor

from fuel_core.kernels import ops
from fuel_core.kernels.protocols import Product
from fuel_core.weights.source import Weights, take_plain


@attrs.frozen(eq=False)
class Linear:
    """``x [T, in]`` → ``[T, out]``, of one map, or of several whose outputs stand side by side."""

    product: Product

    @classmethod
    def load(cls, weights: Weights, name: str, out: int, inp: int, *, bias: bool = False) -> Linear:
        """Take ``name.weight [out, inp]`` and, where the model has one, ``name.bias [out]``.

        Raises:
            CheckpointError: missing, or of another shape.
        """
        return cls.load_fused(weights, (name,), (out,), inp, bias=bias)

    @classmethod
    def load_fused(
        cls, weights: Weights, names: Sequence[str], outs: Sequence[int], inp: int, *, bias: bool = False
    ) -> Linear:
        """Take several maps of one input; see :meth:`load`."""
        matrices, biases = [], []
        for name, out in zip(names, outs, strict=True):
            matrices.append(weights.take(f"{name}.weight", (out, inp)))
            biases.append(take_plain(weights, f"{name}.bias", (out,)) if bias else None)
        return cls(ops.product(matrices, biases))

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """``x [T, in]`` → ``[T, out]``, added to ``residual [T, out]`` where given."""
        return self.product(x, residual)
