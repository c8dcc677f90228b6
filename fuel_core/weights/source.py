"""Where a family takes its weights from: a checkpoint, or a random generator for tests."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from fuel_core.contracts.checkpoint import QuantizedTensor
from fuel_core.contracts.errors import CheckpointError


class Weights(Protocol):
    """Named tensors, taken one by one."""

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor | QuantizedTensor:
        """The tensor of this name and shape, on the model's device.

        It is in the model's dtype, or, for a matrix, in the narrower one or the blocks that are stored.

        Raises:
            CheckpointError: there is none, or it has another shape.
        """
        ...


def take_plain(weights: Weights, name: str, shape: tuple[int, ...]) -> Tensor:
    """Take a tensor that may not be quantized: a gain or a bias.

    Raises:
        CheckpointError: missing, of another shape, or quantized.
    """
    tensor = weights.take(name, shape)
    if isinstance(tensor, QuantizedTensor):
        raise CheckpointError(
            f"{name} in {tensor.block_type.name}",
            needed="float32, float16 or bfloat16",
            remedy="convert the checkpoint with a quantizer that leaves gains and biases alone",
        )
    return tensor


class RandomWeights:
    """Random float32 weights of any name: matrices of deviation ``1/sqrt(columns)``, gains near one.

    The same seed and order of calls give the same weights.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """See :meth:`Weights.take`."""
        noise = torch.randn(shape, generator=self._generator)
        if len(shape) > 1:
            return noise / math.sqrt(shape[-1])
        return 0.1 * noise if name.endswith(".bias") else 1 + 0.1 * noise
