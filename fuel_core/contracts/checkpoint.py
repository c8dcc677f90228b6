"""What a checkpoint on disk hands to a model family: config, weights, tokenizer data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from fuel_core.contracts.errors import CheckpointError

if TYPE_CHECKING:
    import torch


@attrs.frozen
class BlockType:
    """One GGML block format: ``length`` consecutive values of a row in ``bytes`` bytes.

    Source of ids and sizes: ``ggml.h`` and ``ggml-common.h`` of llama.cpp.
    """

    name: str
    ggml_id: int
    length: int
    bytes: int

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of ``columns`` values.

        Raises:
            CheckpointError: the row is not a whole number of blocks.
        """
        if columns % self.length:
            raise CheckpointError(
                f"a row of {columns} values in {self.name}",
                needed=f"a multiple of {self.length}",
                remedy="the file is damaged or was written by a faulty converter: fetch it again",
            )
        return columns // self.length * self.bytes


_BLOCK_TYPES = (
    BlockType("Q4_0", 2, 32, 18),
    BlockType("Q4_1", 3, 32, 20),
    BlockType("Q5_0", 6, 32, 22),
    BlockType("Q5_1", 7, 32, 24),
    BlockType("Q8_0", 8, 32, 34),
    BlockType("Q2_K", 10, 256, 84),
    BlockType("Q3_K", 11, 256, 110),
    BlockType("Q4_K", 12, 256, 144),
    BlockType("Q5_K", 13, 256, 176),
    BlockType("Q6_K", 14, 256, 210),
    BlockType("IQ4_NL", 20, 32, 18),
)
BLOCK_TYPES: Mapping[str, BlockType] = {block.name: block for block in _BLOCK_TYPES}


@attrs.frozen(eq=False)
class QuantizedTensor:
    """A matrix ``[rows, columns]`` kept as GGML blocks along its rows.

    Attributes:
        data: uint8 ``[rows, block_type.row_bytes(columns)]``, usually a view of the mapped file.
        block_type: the format of every block.
        columns: values in a row.
    """

    data: torch.Tensor
    block_type: BlockType
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        """``(rows, columns)`` of the matrix that the blocks stand for."""
        return self.data.shape[0], self.columns

    @property
    def device(self) -> torch.device:
        """Where the blocks are."""
        return self.data.device

    def select_rows(self, index: torch.Tensor | slice) -> QuantizedTensor:
        """The same blocks for some of the rows: a view for a slice, a copy for an index tensor."""
        return attrs.evolve(self, data=self.data[index])

    def to(self, device: str | torch.device) -> QuantizedTensor:
        """The same blocks on another device."""
        return attrs.evolve(self, data=self.data.to(device))


@attrs.frozen
class TokenizerData:
    """Everything a checkpoint says about its text.

    Attributes:
        tokenizer_json: a ``tokenizer.json`` for the ``tokenizers`` library, or None.
        config: ``tokenizer_config.json``, or empty.
        chat_template: a Jinja template, or None.
        gguf: the ``tokenizer.*`` keys of a GGUF file, or empty. Numeric arrays are numpy arrays,
            string arrays are lists of str.
        eos_ids: every end-of-text id that config.json, generation_config.json or GGUF metadata
            declares (the tokenizer's own ``eos_token`` is added when the tokenizer is built).
    """

    tokenizer_json: Path | None = None
    config: Mapping[str, Any] = attrs.field(factory=dict)
    chat_template: str | None = None
    gguf: Mapping[str, Any] = attrs.field(factory=dict)
    eos_ids: frozenset[int] = frozenset()


class Checkpoint(Protocol):
    """A model on disk, opened: names and shapes are known, tensors are read when asked for."""

    @property
    def source(self) -> str:
        """Where it came from, for messages."""
        ...

    @property
    def format(self) -> str:
        """``safetensors``, ``gguf``, or a format that a plugin registers."""
        ...

    @property
    def architecture(self) -> str:
        """``architectures[0]`` of config.json, or GGUF's ``general.architecture``."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """config.json, or every key of the GGUF header that is not the tokenizer's."""
        ...

    @property
    def tokenizer(self) -> TokenizerData:
        """What is needed to build the tokenizer."""
        ...

    def __iter__(self) -> Iterator[str]:
        """The names of all tensors."""
        ...

    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor of this name."""
        ...

    def tensor(self, name: str) -> torch.Tensor | QuantizedTensor:
        """The tensor of this name in the element type that is stored, or its blocks where it is quantized.

        Raises:
            CheckpointError: no such tensor, or its bytes cannot be read.
        """
        ...
