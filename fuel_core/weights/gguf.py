"""GGUF files as checkpoints: the file is mapped, and a tensor's bytes are read when it is used.

Source: the GGUF specification, ``docs/gguf.md`` of ggml (versions 2 and 3, little endian).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from fuel_core.contracts.checkpoint import BLOCK_TYPES, QuantizedTensor, TokenizerData
from fuel_core.contracts.errors import CheckpointError
from fuel_core.weights.gguf_header import MIN_BYTES, TensorInfo, read_header

_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
_END_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))


@attrs.frozen(eq=False)
class GgufCheckpoint:
    """A GGUF file, opened. See :class:`fuel_core.contracts.Checkpoint`."""

    source: str
    architecture: str
    config: Mapping[str, Any] = attrs.field(repr=False)
    tokenizer: TokenizerData = attrs.field(repr=False)
    _tensors: Mapping[str, TensorInfo] = attrs.field(repr=False)
    _bytes: Tensor = attrs.field(repr=False)
    format: str = attrs.field(default="gguf", init=False)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> Tensor | QuantizedTensor:
        """The tensor of this name as a view of the file; writing to it changes only this process.

        Plain types come in their shape. Blocks come as ``[rows, columns]``: a vector is one row, and
        of a shape of more than two dimensions all but the last are counted as rows.

        Raises:
            CheckpointError: no such tensor.
        """
        if name not in self._tensors:
            raise CheckpointError(
                f"{self.source}: no tensor {name!r}",
                needed=f"one of its {len(self._tensors)} tensors",
                remedy="iterate over the checkpoint for their names",
            )
        info = self._tensors[name]
        data = self._bytes[info.start : info.start + info.bytes]  # [bytes]
        if info.type.name in BLOCK_TYPES:
            return QuantizedTensor(data.view(info.rows, -1), info.type, info.shape[-1])
        return _plain(data, _DTYPES[info.type.name]).view(info.shape)


def open_gguf(path: Path) -> GgufCheckpoint:
    """Map a GGUF file and read its header; no file stays open.

    Raises:
        CheckpointError: not a file, not readable, not GGUF, damaged, cut short, one part of several, of
            a tensor type that is not supported, or without ``general.architecture``.
    """
    source = str(path)
    data = _map(path, source)  # [bytes] uint8
    header = read_header(data.numpy().data.toreadonly(), source)
    config = {key: value for key, value in header.values.items() if not key.startswith("tokenizer.")}
    return GgufCheckpoint(
        source, _architecture(config, source), config, _tokenizer(header.values, source), header.tensors, data
    )


def _map(path: Path, source: str) -> Tensor:
    """The whole file as bytes. PyTorch's own mapping keeps no file descriptor, Python's would."""
    if not os.path.isfile(path):
        raise CheckpointError(f"{source}: not a file", needed="a GGUF file", remedy="check the path")
    try:
        size = path.stat().st_size
        if size >= MIN_BYTES:
            return torch.from_file(os.fspath(path), False, size, dtype=torch.uint8, device="cpu")
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        remedy = "check the file's name, its permissions and the free memory"
        raise CheckpointError(
            f"{source}: cannot be mapped ({reason})", needed="a file to map", remedy=remedy
        ) from error
    needed = f"a GGUF file, which has at least {MIN_BYTES}"
    raise CheckpointError(f"{source}: only {size} bytes", needed=needed, remedy="fetch the file again")


def _plain(data: Tensor, dtype: torch.dtype) -> Tensor:
    # A file may declare an alignment smaller than its values, of which torch makes no view.
    aligned = data if data.storage_offset() % dtype.itemsize == 0 else data.clone()
    return aligned.view(dtype)


def _wrong(source: str, key: str, value: object, needed: str) -> CheckpointError:
    given = f"{source}: {key} is {'missing' if value is None else repr(value)}"
    return CheckpointError(given, needed=needed, remedy="the file is damaged: fetch it again", key=key)


def _architecture(config: Mapping[str, Any], source: str) -> str:
    value = config.get("general.architecture")
    if not isinstance(value, str) or not value:
        raise _wrong(source, "general.architecture", value, "the name of an architecture")
    return value


def _tokenizer(values: Mapping[str, Any], source: str) -> TokenizerData:
    keys = {key: value for key, value in values.items() if key.startswith("tokenizer.")}
    template = keys.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise _wrong(source, "tokenizer.chat_template", template, "a template")
    return TokenizerData(chat_template=template, gguf=keys, eos_ids=_end_ids(keys, source))


def _end_ids(keys: Mapping[str, Any], source: str) -> frozenset[int]:
    ids = {key: keys[key] for key in _END_KEYS if key in keys}
    for key, value in ids.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise _wrong(source, key, value, "a token id")
    return frozenset(ids.values())
