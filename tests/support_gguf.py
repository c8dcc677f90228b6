"""GGUF files for tests: raw ones of which every byte can be wrong, and random quantized blocks."""

from __future__ import annotations

import struct

import torch

from fuel_core.contracts import BlockType

# Where in a block of each format a half-precision scale or minimum begins.
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
}

U8, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 6, 7, 8, 9, 10


def random_blocks(block: BlockType, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """``[rows, row_bytes]`` uint8: any packed bytes, and any finite halves, subnormal ones included."""
    generator = torch.Generator().manual_seed(seed)
    count = rows * (columns // block.length)
    blocks = torch.randint(0, 256, (count, block.bytes), generator=generator, dtype=torch.uint8)
    for start in HALVES[block.name]:
        # Clearing one bit of the exponent keeps out infinities and NaN, and nothing else in its stead.
        blocks[:, start + 1] = torch.where(
            (blocks[:, start + 1] & 0x7C) == 0x7C, blocks[:, start + 1] & 0x83, blocks[:, start + 1]
        )
    blocks[0, list(HALVES[block.name])] = 0
    blocks[0, [start + 1 for start in HALVES[block.name]]] = 0x80  # minus zero
    return blocks.view(rows, -1)


def text(value: str | bytes) -> bytes:
    """A string as GGUF stores it."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, kind: int, payload: bytes) -> bytes:
    """A key with a value of type ``kind``."""
    return text(name) + struct.pack("<I", kind) + payload


def array(kind: int, count: int, payload: bytes) -> bytes:
    """The payload of an array that says it has ``count`` elements."""
    return struct.pack("<IQ", kind, count) + payload


def entry(name: str | bytes, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    """What the header says of a tensor, dimensions in GGUF's order."""
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


ARCHITECTURE = key("general.architecture", STRING, text("llama"))


def gguf_bytes(
    keys: tuple[bytes, ...] = (ARCHITECTURE,),
    tensors: tuple[bytes, ...] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    key_count: int | None = None,
    tensor_count: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A whole file. The counts are right unless others are given."""
    counts = (
        len(tensors) if tensor_count is None else tensor_count,
        len(keys) if key_count is None else key_count,
    )
    header = magic + struct.pack("<IQQ", version, *counts) + b"".join((*keys, *tensors))
    return header + bytes(-len(header) % alignment) + data


def small_file() -> bytes:
    """A file with a value of every kind and three tensors, without a byte to spare at its end."""
    keys = (
        ARCHITECTURE,
        key("tokenizer.ggml.tokens", ARRAY, array(STRING, 3, text("a") + text("") + text("\u0120b"))),
        key("tokenizer.ggml.scores", ARRAY, array(F32, 3, struct.pack("<3f", 0, -1, -2))),
        key("tokenizer.ggml.eos_token_id", U32, struct.pack("<I", 2)),
        key("tokenizer.ggml.add_bos_token", BOOL, b"\1"),
        key("llama.rope.freq_base", F32, struct.pack("<f", 1e4)),
        key("nested", ARRAY, array(ARRAY, 2, array(U8, 2, b"\1\2") + array(STRING, 1, text("x")))),
    )
    tensors = (
        entry("norm", (8,), 0, 0),
        entry("quantized", (64, 2), 8, 32),
        entry("half", (3, 5), 1, 192),
    )
    data = struct.pack("<8f", *range(8)) + bytes(range(136)) + bytes(24) + bytes(range(30))
    return gguf_bytes(keys, tensors, data)
