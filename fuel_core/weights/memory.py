"""A checkpoint that never was on disk: what one format is mapped to, or made up for a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
from torch import Tensor

from fuel_core.contracts.checkpoint import QuantizedTensor, TokenizerData
from fuel_core.contracts.errors import CheckpointError


@attrs.frozen(eq=False, kw_only=True)
class MemoryCheckpoint:
    """A checkpoint of named functions, each called when its tensor is asked for; see ``Checkpoint``."""

    source: str
    format: str
    architecture: str
    config: Mapping[str, Any]
    tensors: Mapping[str, Callable[[], Tensor | QuantizedTensor]]
    tokenizer: TokenizerData = attrs.field(factory=TokenizerData)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def tensor(self, name: str) -> Tensor | QuantizedTensor:
        """Make the tensor.

        Raises:
            CheckpointError: no tensor of this name.
        """
        if name not in self.tensors:
            raise CheckpointError(
                f"{self.source}: no tensor {name!r}",
                needed="a name that it has",
                remedy="iterate over it for them",
            )
        return self.tensors[name]()
