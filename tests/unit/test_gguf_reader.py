"""What the GGUF reader says of a file is what the ``gguf`` library says of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import support_gguf as raw
import torch
from gguf import GGMLQuantizationType, GGUFValueType

from fuel_core.contracts import BLOCK_TYPES, QuantizedTensor
from fuel_core.contracts.errors import CheckpointError
from fuel_core.weights.gguf import GgufCheckpoint, open_gguf
from fuel_core.weights.gguf_header import read_header

Opened = tuple[GgufCheckpoint, gguf.GGUFReader]

INTEGERS = ("UINT8", "INT8", "UINT16", "INT16", "UINT32", "INT32", "UINT64", "INT64")
SCALARS = {name: 3 if name.startswith("U") else -3 for name in INTEGERS}
VALUES: dict[str, Any] = {**SCALARS, "FLOAT32": 0.1, "FLOAT64": 0.1, "BOOL": True, "STRING": "zwölf ▁"}
PLAIN = {
    "F32": np.float32,
    "F16": np.float16,
    "F64": np.float64,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
}


def write_everything(path: Path, alignment: int | None = None) -> Path:
    """A file with every value type, arrays of each, and every tensor type in one to four dimensions."""
    writer = gguf.GGUFWriter(path, "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    for name, value in VALUES.items():
        kind = GGUFValueType[name]
        writer.add_key_value(f"one.{name}", value, kind)
        writer.add_key_value(f"many.{name}", [value, type(value)(), value], GGUFValueType.ARRAY, kind)
    writer.add_array("nested.numbers", [[1, 2], [3]])
    writer.add_array("nested.strings", [["a"], ["b", "c"]])
    add_tensors(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tensors(writer: gguf.GGUFWriter) -> None:
    noise = np.random.default_rng(0)
    shapes = ((7,), (3, 5), (2, 3, 4), (2, 1, 3, 2))
    for name, dtype in PLAIN.items():
        for shape in shapes:
            writer.add_tensor(f"{name}.{len(shape)}", (noise.normal(size=shape) * 100).astype(dtype))
    for shape in shapes:
        halves = noise.integers(0, 256, (*shape[:-1], 2 * shape[-1]), dtype=np.uint8)
        writer.add_tensor(f"BF16.{len(shape)}", halves, raw_dtype=GGMLQuantizationType.BF16)
    for name, block in BLOCK_TYPES.items():
        for outer in ((), (3,), (2, 3), (2, 1, 3)):
            blocks = noise.integers(0, 256, (*outer, 2 * block.bytes), dtype=np.uint8)
            writer.add_tensor(f"{name}.{len(outer) + 1}", blocks, raw_dtype=GGMLQuantizationType[name])


@pytest.fixture(scope="module")
def real(smollm2_path: Path) -> Opened:
    return open_gguf(smollm2_path), gguf.GGUFReader(smollm2_path)


@pytest.fixture(scope="module", params=[None, 64], ids=["alignment 32", "alignment 64"])
def synthetic(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    path = write_everything(tmp_path_factory.mktemp("gguf") / "all.gguf", request.param)
    return open_gguf(path), gguf.GGUFReader(path)


def flat(value: Any) -> list[Any]:
    """The oracle flattens nested arrays."""
    items = value.tolist() if isinstance(value, np.ndarray) else value
    return [
        leaf for item in items for leaf in (flat(item) if isinstance(item, np.ndarray | list) else [item])
    ]


def assert_same_value(ours: Any, field: gguf.ReaderField) -> None:
    theirs = field.contents()
    if field.types[0] != GGUFValueType.ARRAY:
        assert (type(ours), ours) == (type(theirs), theirs)
        return
    assert flat(ours) == theirs
    if len(field.types) == 2 and field.types[1] != GGUFValueType.STRING:
        assert ours.dtype == gguf.GGUFReader.gguf_scalar_to_np[field.types[1]]


def assert_same_tensor(ours: torch.Tensor | QuantizedTensor, theirs: gguf.ReaderTensor) -> None:
    shape = tuple(int(size) for size in reversed(theirs.shape))
    if isinstance(ours, QuantizedTensor):
        assert ours.block_type.name == theirs.tensor_type.name
        assert ours.shape == (int(np.prod(shape[:-1])), shape[-1])
        assert ours.data.numpy().tobytes() == theirs.data.tobytes()
    else:
        expected = {"BF16": torch.bfloat16} | {
            name: torch.from_numpy(np.empty(0, dtype)).dtype for name, dtype in PLAIN.items()
        }
        assert (ours.dtype, tuple(ours.shape)) == (expected[theirs.tensor_type.name], shape)
        assert ours.contiguous().view(torch.uint8).numpy().tobytes() == theirs.data.tobytes()


def assert_same_file(opened: Opened) -> None:
    checkpoint, reader = opened
    values = {**checkpoint.config, **checkpoint.tokenizer.gguf}
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert sorted(values) == sorted(fields)
    for name, field in fields.items():
        assert_same_value(values[name], field)
    assert list(checkpoint) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        assert_same_tensor(checkpoint.tensor(tensor.name), tensor)


def test_every_key_and_tensor_of_a_real_file_is_what_the_gguf_library_reads(real: Opened) -> None:
    assert_same_file(real)


def test_every_value_and_tensor_type_is_what_the_gguf_library_reads(synthetic: Opened) -> None:
    assert_same_file(synthetic)
    assert len(list(synthetic[0])) == 4 * (len(PLAIN) + 1 + len(BLOCK_TYPES))


def test_version_2_is_read_like_version_3(tmp_path: Path) -> None:
    path = write_everything(tmp_path / "v2.gguf")
    with path.open("r+b") as file:
        file.seek(4)
        file.write(b"\2\0\0\0")
    assert_same_file((open_gguf(path), gguf.GGUFReader(path)))


def test_the_comparison_sees_one_changed_byte(tmp_path: Path) -> None:
    path = write_everything(tmp_path / "whole.gguf")
    theirs = gguf.GGUFReader(path)
    damaged = bytearray(path.read_bytes())
    damaged[theirs.tensors[-1].data_offset] ^= 1
    (tmp_path / "changed.gguf").write_bytes(damaged)
    with pytest.raises(AssertionError):
        assert_same_file((open_gguf(tmp_path / "changed.gguf"), theirs))


def test_the_real_file_splits_into_config_and_tokenizer(real: Opened) -> None:
    checkpoint, _ = real
    assert (checkpoint.format, checkpoint.architecture) == ("gguf", "llama")
    assert checkpoint.config["llama.block_count"] == 30
    assert not any(name.startswith("tokenizer.") for name in checkpoint.config)
    assert all(name.startswith("tokenizer.") for name in checkpoint.tokenizer.gguf)
    assert len(checkpoint.tokenizer.gguf["tokenizer.ggml.tokens"]) == 49152
    assert checkpoint.tokenizer.eos_ids == {2}
    assert checkpoint.tokenizer.chat_template == checkpoint.tokenizer.gguf["tokenizer.chat_template"]


def test_every_kind_of_end_of_text_id_is_an_eos_id(tmp_path: Path) -> None:
    ends = {"eos": 2, "eot": 7, "eom": 9, "bos": 1, "padding": 3}
    keys = (
        raw.key(f"tokenizer.ggml.{name}_token_id", raw.U32, bytes([value, 0, 0, 0]))
        for name, value in ends.items()
    )
    path = tmp_path / "ends.gguf"
    path.write_bytes(raw.gguf_bytes((raw.ARCHITECTURE, *keys)))
    assert open_gguf(path).tokenizer.eos_ids == {2, 7, 9}


def test_token_bytes_that_are_not_utf_8_are_kept(tmp_path: Path) -> None:
    tokens = [b"\xff\xfe", "▁ok".encode(), b"\xe2\x96", b""]
    payload = raw.array(raw.STRING, len(tokens), b"".join(map(raw.text, tokens)))
    path = tmp_path / "tokens.gguf"
    path.write_bytes(raw.gguf_bytes((raw.ARCHITECTURE, raw.key("tokenizer.ggml.tokens", raw.ARRAY, payload))))
    read = open_gguf(path).tokenizer.gguf["tokenizer.ggml.tokens"]
    assert [token.encode("utf-8", "surrogateescape") for token in read] == tokens


def test_empty_arrays_are_read_up_to_the_last_byte(tmp_path: Path) -> None:
    empty = {kind: raw.array(kind, 0, b"") for kind in (raw.F32, raw.STRING)}
    keys = (
        raw.key("numbers", raw.ARRAY, empty[raw.F32]),
        raw.key("strings", raw.ARRAY, empty[raw.STRING]),
        raw.key("nested", raw.ARRAY, raw.array(raw.ARRAY, 2, empty[raw.STRING] * 2)),
    )
    path = tmp_path / "empty.gguf"
    path.write_bytes(raw.gguf_bytes((raw.ARCHITECTURE, *keys), alignment=1))
    config = open_gguf(path).config
    assert (config["numbers"].tolist(), config["strings"], config["nested"]) == ([], [], [[], []])


def test_the_smallest_key_and_the_smallest_tensor_are_read() -> None:
    key = raw.gguf_bytes((raw.key("", raw.U8, b"\7"),), alignment=1)
    assert read_header(memoryview(key), "x").values == {"": 7}
    packed = (raw.key("general.alignment", raw.U32, b"\1\0\0\0"),)
    tensor = raw.gguf_bytes(packed, (raw.entry("", (1,), 24),), b"\7", alignment=1)
    assert read_header(memoryview(tensor), "x").tensors[""].start == len(tensor) - 1


def test_a_file_of_no_tensors_is_a_checkpoint_of_none(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(raw.gguf_bytes())
    assert list(open_gguf(path)) == []


def test_tensors_that_are_not_aligned_to_their_values_are_read(tmp_path: Path) -> None:
    keys = (raw.ARCHITECTURE, raw.key("general.alignment", raw.U32, b"\1\0\0\0"))
    values = torch.arange(6, dtype=torch.float32)
    tensors = (raw.entry("odd", (3,), 24, 0), raw.entry("values", (3, 2), 0, 3))
    head = len(raw.gguf_bytes(keys, tensors, alignment=1))
    tensors = (raw.entry("odd", (3 + head % 2,), 24, 0), raw.entry("values", (3, 2), 0, 3 + head % 2))
    data = bytes(3 + head % 2) + values.numpy().tobytes()
    path = tmp_path / "packed.gguf"
    path.write_bytes(raw.gguf_bytes(keys, tensors, data, alignment=1))
    assert torch.equal(open_gguf(path).tensor("values"), values.view(2, 3))


def test_tensors_are_views_of_one_mapping(real: Opened) -> None:
    checkpoint, _ = real
    plain, blocks = checkpoint.tensor("output_norm.weight"), checkpoint.tensor("blk.0.attn_q.weight")
    assert isinstance(plain, torch.Tensor)
    assert isinstance(blocks, QuantizedTensor)
    assert plain.untyped_storage().data_ptr() == blocks.data.untyped_storage().data_ptr()
    assert plain.clone().untyped_storage().data_ptr() != plain.untyped_storage().data_ptr()


def test_a_tensor_that_is_not_there_is_refused_by_name(real: Opened) -> None:
    assert "absent" not in real[0]
    with pytest.raises(CheckpointError, match="no tensor 'absent'"):
        real[0].tensor("absent")


def test_writing_to_a_tensor_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(raw.small_file())
    tensor = open_gguf(path).tensor("norm")
    assert isinstance(tensor, torch.Tensor)
    tensor.zero_()
    assert path.read_bytes() == raw.small_file()


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's accounts of memory")
def test_opening_reads_no_tensor_and_using_one_does(tmp_path: Path) -> None:
    size = 1 << 28
    path = tmp_path / "large.gguf"
    head = raw.gguf_bytes(tensors=(raw.entry("large", (size // 4,)),))
    path.write_bytes(head)
    os.truncate(path, len(head) + size)
    before = resident_bytes()
    tensor = open_gguf(path).tensor("large")
    assert resident_bytes() - before < size // 8
    assert isinstance(tensor, torch.Tensor)
    assert not tensor.any()
    assert resident_bytes() - before > size // 2


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux's list of descriptors")
def test_open_checkpoints_hold_no_file_descriptors(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(raw.small_file())
    before = len(os.listdir("/proc/self/fd"))
    held = [open_gguf(path) for _ in range(50)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert len({checkpoint.tensor("norm").data_ptr() for checkpoint in held}) == 50
