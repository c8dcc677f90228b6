"""Linear maps of a layer, as loaded."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from fuel_core.contracts.checkpoint import QuantizedTensor
from fuel_core.kernels import ops
from fuel_core.weights.source import Weights, take_plain


@attrs.frozen(eq=False)
class Linear:
    """``x [T, in]`` → ``[T, out]``; ``weight [out, in]`` is plain or quantized."""

    weight: Tensor | QuantizedTensor
    bias: Tensor | None = None

    @classmethod
    def load(cls, weights: Weights, name: str, out: int, inp: int, *, bias: bool = False) -> Linear:
        """Take ``name.weight [out, inp]`` and, where the model has one, ``name.bias [out]``.

        Raises:
            CheckpointError: missing, or of another shape.
        """
        weight = weights.take(f"{name}.weight", (out, inp))
        return cls(weight, take_plain(weights, f"{name}.bias", (out,)) if bias else None)

    def __call__(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)


@attrs.frozen(eq=False)
class FusedLinear:
    """Maps of one input whose outputs stand side by side: ``[T, in]`` → ``[T, sum of outs]``."""

    parts: tuple[Linear, ...]

    @classmethod
    def load(
        cls, weights: Weights, names: Sequence[str], outs: Sequence[int], inp: int, *, bias: bool = False
    ) -> FusedLinear:
        """Load each part; see :meth:`Linear.load`."""
        parts = (
            Linear.load(weights, name, out, inp, bias=bias) for name, out in zip(names, outs, strict=True)
        )
        return cls(tuple(parts))

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)
