"""A GGUF file that is damaged, lies or is not supported is refused with a typed error, and cheaply."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import struct
import tracemalloc
from pathlib import Path

import pytest
import support_gguf as raw
import torch
from gguf import GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st

from fuel_core.contracts import BLOCK_TYPES, QuantizedTensor
from fuel_core.contracts.errors import CheckpointError
from fuel_core.weights.gguf import open_gguf
from fuel_core.weights.gguf_header import read_header

ARCH = raw.ARCHITECTURE
HUGE = (1 << 64) - 1


def read_bytes(content: bytes) -> None:
    """Read a header as :func:`open_gguf` does, without a file."""
    read_header(memoryview(content), "x.gguf")


def refusal(path: Path, content: bytes) -> CheckpointError:
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        open_gguf(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


def numbers(kind: int, count: int, payload: bytes = b"") -> tuple[bytes, ...]:
    return (ARCH, raw.key("numbers", raw.ARRAY, raw.array(kind, count, payload)))


LIES = {
    "key count": (raw.gguf_bytes(key_count=HUGE), "keys: 18446744073709551615"),
    "key count, one too many": (raw.gguf_bytes(key_count=2, alignment=1), "bytes of the length of the key"),
    "key count, more than fit": (raw.gguf_bytes(key_count=5, alignment=1), "keys: 5"),
    "tensor count": (raw.gguf_bytes(tensor_count=HUGE), "tensors: 18446744073709551615"),
    "key length": (raw.gguf_bytes((struct.pack("<Q", HUGE) + bytes(64),)), "the key of 18446744073709551615"),
    "string length": (
        raw.gguf_bytes((ARCH, raw.key("text", raw.STRING, struct.pack("<Q", HUGE)))),
        "'text' of 18446744073709551615",
    ),
    "string length, one too many": (
        raw.gguf_bytes((raw.key("text", raw.STRING, struct.pack("<Q", 4) + b"abc"),), alignment=1),
        "bytes of the value of 'text': 4",
    ),
    "string array length": (raw.gguf_bytes(numbers(raw.STRING, HUGE)), "elements of the value of 'numbers'"),
    "string in an array": (
        raw.gguf_bytes(numbers(raw.STRING, 2, raw.text("a") + struct.pack("<Q", HUGE) + bytes(32))),
        "string 1 of the value of 'numbers'",
    ),
    "string in an array, one byte too long": (
        raw.gguf_bytes(numbers(raw.STRING, 1, struct.pack("<Q", 4) + b"abc"), alignment=1),
        "string 0 of the value of 'numbers'",
    ),
    "numeric array length": (raw.gguf_bytes(numbers(raw.F32, HUGE)), "elements of the value of 'numbers'"),
    "numeric array length, half of it": (raw.gguf_bytes(numbers(raw.U64, 1 << 63)), "9223372036854775808"),
    "nested array length": (raw.gguf_bytes(numbers(raw.ARRAY, 1 << 60)), "elements of the value"),
    "dimensions whose product overflows": (
        raw.gguf_bytes(tensors=(raw.entry("w", (1 << 33, 1 << 33, 1 << 33)),), data=bytes(64)),
        "'w' of 2535301200456458802993406410752 bytes",
    ),
    "a dimension beyond the file": (
        raw.gguf_bytes(tensors=(raw.entry("w", (9,)),), data=bytes(32)),
        "36 bytes",
    ),
    "an offset beyond the file": (
        raw.gguf_bytes(tensors=(raw.entry("w", (8,), 0, 1 << 40),), data=bytes(32)),
        "an end by byte",
    ),
    "an offset that overflows": (
        raw.gguf_bytes(tensors=(raw.entry("w", (8,), 0, HUGE - 31),), data=bytes(32)),
        "an end by byte",
    ),
    "an offset that is not aligned": (
        raw.gguf_bytes(tensors=(raw.entry("w", (8,), 0, 16),), data=bytes(64)),
        "an offset that 32 divides",
    ),
    "a dimension of zero": (raw.gguf_bytes(tensors=(raw.entry("w", (0, 8)),)), "no dimension of 0"),
    "no dimensions": (raw.gguf_bytes(tensors=(raw.entry("w", ()),), data=bytes(64)), "with 0 dimensions"),
    "five dimensions": (raw.gguf_bytes(tensors=(raw.entry("w", (1,) * 5),), data=bytes(64)), "with 5 dim"),
    "four billion dimensions": (
        raw.gguf_bytes(tensors=(raw.text("w") + b"\xff" * 4 + bytes(64),)),
        "with 4294967295 dimensions",
    ),
    "part of a block": (
        raw.gguf_bytes(tensors=(raw.entry("w", (33,), 8),), data=bytes(128)),
        "'w': rows of 33 in Q8_0",
    ),
    "a key twice": (raw.gguf_bytes((ARCH, ARCH)), "'general.architecture' for the second time"),
    "a tensor twice": (
        raw.gguf_bytes(tensors=(raw.entry("w", (8,)),) * 2, data=bytes(32)),
        "'w' for the second time",
    ),
    "a value type": (raw.gguf_bytes((ARCH, raw.key("k", 13, bytes(8)))), "'k' of value type 13"),
    "an element type": (raw.gguf_bytes(numbers(77, 1, bytes(8))), "'numbers' of value type 77"),
    "arrays five deep": (
        raw.gguf_bytes(numbers(raw.ARRAY, 1, raw.array(9, 1, raw.array(9, 1, raw.array(9, 1, bytes(64)))))),
        "at most 4 levels",
    ),
    "a key that is not UTF-8": (raw.gguf_bytes((raw.key(b"k\xff", 0, b"\1"),)), "the key at byte 33"),
    "a tensor name that is not UTF-8": (raw.gguf_bytes(tensors=(raw.entry(b"\xff", (8,)),)), "valid UTF-8"),
    "a value that is not UTF-8": (raw.gguf_bytes((raw.key("k", 8, raw.text(b"\xff")),)), "'k' at byte"),
    "an alignment of zero": (
        raw.gguf_bytes((ARCH, raw.key("general.alignment", 4, bytes(4)))),
        "power of two",
    ),
    "an alignment of 48": (raw.gguf_bytes((ARCH, raw.key("general.alignment", 4, b"0\0\0\0"))), "is 48"),
    "an alignment of text": (raw.gguf_bytes((ARCH, raw.key("general.alignment", 8, raw.text("32")))), "'32'"),
    "an alignment of true": (raw.gguf_bytes((ARCH, raw.key("general.alignment", 7, b"\1"))), "is True"),
    "an end id of text": (
        raw.gguf_bytes((ARCH, raw.key("tokenizer.ggml.eos_token_id", 8, raw.text("2")))),
        "a token id",
    ),
    "a template of numbers": (
        raw.gguf_bytes((ARCH, raw.key("tokenizer.chat_template", 4, bytes(4)))),
        "tokenizer.chat_template is 0",
    ),
    "no architecture": (raw.gguf_bytes(()), "general.architecture is missing"),
    "an architecture of nothing": (raw.gguf_bytes((raw.key("general.architecture", 8, raw.text("")),)), "''"),
    "one part of two": (raw.gguf_bytes((ARCH, raw.key("split.count", 2, b"\2\0"))), "split into 2"),
    "another magic": (raw.gguf_bytes(magic=b"GGML"), "b'GGML'"),
    "version 1": (raw.gguf_bytes(version=1), "GGUF version 1"),
    "version 4": (raw.gguf_bytes(version=4), "GGUF version 4"),
    "version 0": (raw.gguf_bytes(version=0), "GGUF version 0"),
    "big endian": (raw.gguf_bytes(version=3 << 24), "big-endian"),
    "37 bytes": (bytes(37), "the magic"),
    "no bytes": (b"", "only 0 bytes"),
    "23 bytes": (raw.gguf_bytes()[:23], "only 23 bytes"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_file_that_lies_is_refused_for_what_it_lies_about(lie: str, tmp_path: Path) -> None:
    content, said = LIES[lie]
    assert said in str(refusal(tmp_path / "lying.gguf", content))


def test_the_file_that_the_lies_are_made_from_is_read(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(raw.small_file())
    assert list(open_gguf(path)) == ["norm", "quantized", "half"]
    path.write_bytes(raw.gguf_bytes((ARCH, raw.key("split.count", 2, b"\1\0"))))
    assert open_gguf(path).architecture == "llama"
    path.write_bytes(raw.gguf_bytes(tensors=(raw.entry("w", (8,)),), data=bytes(32)))
    assert list(open_gguf(path)) == ["w"]


def test_no_lie_makes_the_reader_reserve_memory() -> None:
    tracemalloc.start()
    try:
        for content, _ in LIES.values():
            with pytest.raises(CheckpointError):
                read_then_architecture(content)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def read_then_architecture(content: bytes) -> None:
    """Some lies are about what the header says, not about its form: those end here."""
    read_bytes(content)
    raise CheckpointError("read", needed="nothing", remedy="none")


DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}


def of_type(kind: int) -> bytes:
    return raw.gguf_bytes(tensors=(raw.entry("w", (256,), kind),), data=bytes(4096))


@pytest.mark.parametrize("kind", [kind for kind in GGMLQuantizationType if kind.name in DTYPES])
def test_a_plain_type_is_read_as_its_dtype(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    path = tmp_path / "plain.gguf"
    path.write_bytes(of_type(kind))
    tensor = open_gguf(path).tensor("w")
    assert isinstance(tensor, torch.Tensor)
    assert tensor.dtype == DTYPES[kind.name]


@pytest.mark.parametrize("kind", [kind for kind in GGMLQuantizationType if kind.name in BLOCK_TYPES])
def test_a_block_type_is_read_as_its_blocks(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    path = tmp_path / "blocks.gguf"
    path.write_bytes(of_type(kind))
    tensor = open_gguf(path).tensor("w")
    assert isinstance(tensor, QuantizedTensor)
    assert tensor.block_type == BLOCK_TYPES[kind.name]


@pytest.mark.parametrize(
    "kind", [kind for kind in GGMLQuantizationType if kind.name not in {*DTYPES, *BLOCK_TYPES}]
)
def test_any_other_type_is_refused_at_open_by_its_name(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    error = refusal(tmp_path / "other.gguf", of_type(kind))
    assert f"'w' has the type {kind.name};" in str(error)
    assert {*DTYPES, *BLOCK_TYPES} <= set(error.needed.removeprefix("one of ").split(", "))


def test_a_tensor_type_that_nobody_knows_is_refused_by_its_number(tmp_path: Path) -> None:
    assert "'w' has the type 999;" in str(refusal(tmp_path / "new.gguf", of_type(999)))


def test_a_file_cut_at_any_length_is_refused(tmp_path: Path) -> None:
    whole = raw.small_file()
    for length in range(len(whole)):
        refusal(tmp_path / "cut.gguf", whole[:length])


def test_a_real_file_cut_anywhere_is_refused(smollm2_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    shutil.copyfile(smollm2_path, path)
    size, chance = path.stat().st_size, random.Random(0)
    # Most cuts fall into the header, whose end is at about two of the hundred megabytes.
    lengths = {int(size ** chance.uniform(0, 0.8)) for _ in range(450)}
    lengths |= {chance.randrange(size) for _ in range(50)}
    for length in sorted(lengths, reverse=True):
        os.truncate(path, length)
        with pytest.raises(CheckpointError):
            open_gguf(path)


def touch(path: Path) -> bool:
    """Open a file and every tensor in it. Whether it could be opened; anything untyped goes up."""
    try:
        checkpoint = open_gguf(path)
    except CheckpointError:
        return False
    for name in checkpoint:
        tensor = checkpoint.tensor(name)
        (tensor.data if isinstance(tensor, QuantizedTensor) else tensor).clone()
    return True


def test_flipped_header_bytes_give_a_checkpoint_or_a_typed_error(tmp_path: Path) -> None:
    whole, path, chance = raw.small_file(), tmp_path / "flipped.gguf", random.Random(0)
    header = len(whole) - 222
    opened = 0
    for _ in range(1000):
        content = bytearray(whole)
        for _ in range(chance.choice((1, 1, 1, 2, 5))):
            content[chance.randrange(header)] = chance.choice((0, 1, 127, 128, 255, chance.randrange(256)))
        path.write_bytes(content)
        opened += touch(path)
    assert 0 < opened < 1000


@given(st.binary(max_size=200), st.integers(0, 500))
def test_any_bytes_after_a_good_beginning_end_in_a_typed_error_or_a_header(tail: bytes, keep: int) -> None:
    with contextlib.suppress(CheckpointError):
        read_bytes(raw.small_file()[:keep] + tail)


def test_what_is_not_a_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    for path in (tmp_path, tmp_path / "missing.gguf", tmp_path / "pipe.gguf", Path("null\0byte.gguf")):
        with pytest.raises(CheckpointError, match="not a file"):
            open_gguf(path)


def test_a_file_that_cannot_be_mapped_is_refused(tmp_path: Path) -> None:
    # PyTorch takes only names in UTF-8; a file without permissions would be readable to root.
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.gguf"))
    path.write_bytes(raw.small_file())
    with pytest.raises(CheckpointError, match="cannot be mapped"):
        open_gguf(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permissions_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "closed.gguf"
    path.write_bytes(raw.small_file())
    path.chmod(0)
    with pytest.raises(CheckpointError, match="cannot be mapped"):
        open_gguf(path)
