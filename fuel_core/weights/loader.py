"""Taking a checkpoint's tensors one by one, so that none is missing and none is left over."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from fuel_core.contracts.checkpoint import Checkpoint, QuantizedTensor
from fuel_core.contracts.errors import CheckpointError

_NAMED = 5


class WeightLoader:
    """Hands out the tensors of a checkpoint on one device, in one dtype (a matrix: at most that wide).

    ``ignore`` are regular expressions; a tensor whose whole name matches one need not be taken.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        device: str | torch.device,
        dtype: torch.dtype,
        ignore: Sequence[str] = (),
    ) -> None:
        self._checkpoint, self._device, self._dtype = checkpoint, torch.device(device), dtype
        self._ignored = [re.compile(pattern) for pattern in ignore]
        self._taken: set[str] = set()

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor | QuantizedTensor:
        """The tensor of this name; the checkpoint's own where device and dtype are already right.

        Raises:
            CheckpointError: there is none, it has another shape, or it holds integers.
        """
        if name not in self._checkpoint:
            raise self._missing(name)
        tensor = self._checkpoint.tensor(name)
        if tuple(tensor.shape) != tuple(shape):
            raise self._unfit(name, f"the shape {tuple(tensor.shape)}", f"the shape {tuple(shape)}")
        placed = self._place(name, tensor)
        self._taken.add(name)
        return placed

    def finish(self) -> None:
        """See that every tensor was taken or is ignored.

        Raises:
            CheckpointError: some were not; the first few are named.
        """
        left = [name for name in self._checkpoint if name not in self._taken and not self._is_ignored(name)]
        if left:
            more = ", ..." if len(left) > _NAMED else ""
            raise CheckpointError(
                f"{self._checkpoint.source}: {len(left)} tensors left over: {', '.join(left[:_NAMED])}{more}",
                needed="a checkpoint whose every tensor this family uses",
                remedy="load it with the family that it was made for",
                names=tuple(left),
            )

    def _is_ignored(self, name: str) -> bool:
        return any(pattern.fullmatch(name) for pattern in self._ignored)

    def _place(self, name: str, tensor: Tensor | QuantizedTensor) -> Tensor | QuantizedTensor:
        if isinstance(tensor, QuantizedTensor):
            return tensor.to(self._device)
        if not tensor.is_floating_point():
            raise self._unfit(name, f"the type {tensor.dtype}", "floating-point values or quantized blocks")
        # A matrix is never widened, so that a model takes no more memory than its checkpoint.
        stays = tensor.ndim > 1 and tensor.element_size() < self._dtype.itemsize
        return tensor.to(self._device, tensor.dtype if stays else self._dtype)

    def _unfit(self, name: str, given: str, needed: str) -> CheckpointError:
        return CheckpointError(
            f"{self._checkpoint.source}: {name} has {given}",
            needed=needed,
            remedy="check that the config and the weights are of the same model",
            name=name,
        )

    def _missing(self, name: str) -> CheckpointError:
        near = difflib.get_close_matches(name, list(self._checkpoint))
        return CheckpointError(
            f"{self._checkpoint.source}: no tensor {name}",
            needed="every tensor that the config calls for",
            remedy=f"the nearest that it has: {', '.join(near)}" if near else "it has none of a similar name",
            name=name,
        )
