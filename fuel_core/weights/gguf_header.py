"""The header of a GGUF file: its keys, and what each tensor is and where it lies.

Source: the GGUF specification, ``docs/gguf.md`` of ggml; type ids: ``ggml.h`` of llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs

from fuel_core.contracts.checkpoint import BLOCK_TYPES, BlockType
from fuel_core.contracts.errors import CheckpointError
from fuel_core.weights.gguf_cursor import Cursor

MAGIC = b"GGUF"
MIN_BYTES = 24

# A plain value is a block of one.
_PLAIN = (
    BlockType("F32", 0, 1, 4),
    BlockType("F16", 1, 1, 2),
    BlockType("I8", 24, 1, 1),
    BlockType("I16", 25, 1, 2),
    BlockType("I32", 26, 1, 4),
    BlockType("I64", 27, 1, 8),
    BlockType("F64", 28, 1, 8),
    BlockType("BF16", 30, 1, 2),
)
_TYPES = {kind.ggml_id: kind for kind in (*_PLAIN, *BLOCK_TYPES.values())}
_REFUSED = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    29: "IQ1_M",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    34: "TQ1_0",
    35: "TQ2_0",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}

# Name length, type and one byte of value; name length, dimension count, one dimension, type and offset.
_MIN_KEY_BYTES, _MIN_TENSOR_BYTES = 13, 32
_MAX_DIMS = 4


@attrs.frozen
class TensorInfo:
    """What a tensor is and where it lies.

    Attributes:
        type: its block format; a plain type is a block of one value.
        shape: in torch's order, the row length last.
        start: its first byte, counted from the beginning of the file.
    """

    type: BlockType
    shape: tuple[int, ...]
    start: int

    @property
    def rows(self) -> int:
        """The product of all dimensions but the last."""
        return math.prod(self.shape[:-1])

    @property
    def bytes(self) -> int:
        """How many bytes it takes."""
        return self.rows * self.type.row_bytes(self.shape[-1])


@attrs.frozen
class Header:
    """All keys of a file and all its tensors, in its order."""

    values: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


def read_header(view: memoryview, source: str) -> Header:
    """Read the header of a mapped file; ``source`` names the file in errors.

    Numeric arrays are read-only numpy views of the mapping, perhaps unaligned.

    Raises:
        CheckpointError: not a GGUF file of version 2 or 3, damaged, cut short, one part of several, or
            with a tensor of a type that is not supported.
    """
    cursor = Cursor(view, source)
    _read_version(cursor)
    tensor_count, key_count = cursor.u64("the tensor count"), cursor.u64("the key count")
    values = _read_values(cursor, key_count)
    _refuse_split(values, source)
    infos = _read_tensors(cursor, tensor_count)
    return Header(values, _place(infos, cursor, _alignment(values, source)))


def _read_version(cursor: Cursor) -> None:
    magic = bytes(cursor.view[:4])
    if magic != MAGIC:
        raise cursor.damaged(f"the magic {magic!r}", f"{MAGIC!r}, with which every GGUF file begins")
    cursor.skip(4, "the magic")
    version = cursor.u32("the version")
    if version and version & 0xFFFF == 0:
        raise CheckpointError(
            f"{cursor.source}: a big-endian GGUF file",
            needed="a little-endian one",
            remedy="fetch the little-endian file of this model",
        )
    if version not in (2, 3):
        raise CheckpointError(
            f"{cursor.source}: GGUF version {version}",
            needed="version 2 or 3",
            remedy="convert the model again with a current converter",
        )


def _read_values(cursor: Cursor, count: int) -> dict[str, Any]:
    cursor.require(count, _MIN_KEY_BYTES, "keys")
    values: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.name("the key", values)
        values[key] = cursor.value(f"the value of {key[:80]!r}")
    return values


def _refuse_split(values: Mapping[str, Any], source: str) -> None:
    parts = values.get("split.count", 1)
    if not isinstance(parts, int) or parts > 1:
        raise CheckpointError(
            f"{source}: one part of a model split into {parts}",
            needed="the whole model in one file",
            remedy="merge the parts with llama.cpp's llama-gguf-split --merge",
        )


def _alignment(values: Mapping[str, Any], source: str) -> int:
    value = values.get("general.alignment", 32)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or value & (value - 1):
        raise CheckpointError(
            f"{source}: general.alignment is {value!r}",
            needed="a power of two",
            remedy="the file is damaged: fetch it again",
        )
    return value


def _read_tensors(cursor: Cursor, count: int) -> dict[str, TensorInfo]:
    """The entries as they stand: ``start`` is still counted from the first tensor's bytes."""
    cursor.require(count, _MIN_TENSOR_BYTES, "tensors")
    infos: dict[str, TensorInfo] = {}
    for _ in range(count):
        name = cursor.name("the tensor name", infos)
        what = f"the tensor {name[:80]!r}"
        shape = _read_shape(cursor, what)
        kind = _read_type(cursor, what)
        if shape[-1] % kind.length:
            raise cursor.damaged(
                f"{what}: rows of {shape[-1]} in {kind.name}", f"a multiple of {kind.length}"
            )
        infos[name] = TensorInfo(kind, shape, cursor.u64(what))
    return infos


def _read_shape(cursor: Cursor, what: str) -> tuple[int, ...]:
    """GGUF stores the row length first."""
    dims = cursor.u32(what)
    if not 1 <= dims <= _MAX_DIMS:
        raise cursor.damaged(f"{what} with {dims} dimensions", f"1 to {_MAX_DIMS}", cursor.position - 4)
    shape = tuple(cursor.u64(what) for _ in range(dims))[::-1]
    if 0 in shape:
        raise cursor.damaged(f"{what} of the shape {shape}", "no dimension of 0", cursor.position - 8 * dims)
    return shape


def _read_type(cursor: Cursor, what: str) -> BlockType:
    number = cursor.u32(what)
    kind = _TYPES.get(number)
    if kind is None:
        raise CheckpointError(
            f"{cursor.source}: {what} has the type {_REFUSED.get(number, number)}",
            needed=f"one of {', '.join(known.name for known in _TYPES.values())}",
            remedy="fetch the model in one of these types",
        )
    return kind


def _place(infos: Mapping[str, TensorInfo], cursor: Cursor, alignment: int) -> dict[str, TensorInfo]:
    """Count every start from the beginning of the file, and see that all bytes are in it."""
    base = -(-cursor.position // alignment) * alignment
    placed = {name: attrs.evolve(info, start=base + info.start) for name, info in infos.items()}
    for name, info in placed.items():
        what = f"the tensor {name[:80]!r} of {info.bytes} bytes"
        if info.start % alignment:
            raise cursor.damaged(what, f"an offset that {alignment} divides", info.start)
        if info.start + info.bytes > len(cursor.view):
            raise cursor.damaged(what, f"an end by byte {len(cursor.view)}", info.start)
    return placed
