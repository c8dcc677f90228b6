"""What a Hugging Face directory says, and what is refused in one that contradicts itself."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fuel_core.contracts.errors import CheckpointError
from fuel_core.weights.safetensors_dir import open_directory

CONFIG: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "eos_token_id": 2}
TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b": torch.arange(5, dtype=torch.bfloat16),
    "c": torch.arange(6, dtype=torch.float16).view(1, 2, 3),
    "d": torch.tensor(3.0),
}
INDEX = "model.safetensors.index.json"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """One file of weights, and a config."""
    put(tmp_path / "config.json", CONFIG)
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Two shards and their index."""
    put(tmp_path / "config.json", CONFIG)
    save_file({name: TENSORS[name] for name in "ab"}, tmp_path / ONE)
    save_file({name: TENSORS[name] for name in "cd"}, tmp_path / TWO)
    put_index(tmp_path, {"a": ONE, "b": ONE, "c": TWO, "d": TWO})
    return tmp_path


def put(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def put_index(path: Path, weight_map: object) -> None:
    put(path / INDEX, {"metadata": {"total_size": 1}, "weight_map": weight_map})


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_directory(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["directory", "sharded"])
def test_every_tensor_comes_as_it_was_saved(kind: str, request: pytest.FixtureRequest) -> None:
    checkpoint = open_directory(request.getfixturevalue(kind))
    assert (checkpoint.format, checkpoint.architecture) == ("safetensors", "LlamaForCausalLM")
    assert checkpoint.config == CONFIG
    assert set(checkpoint) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert name in checkpoint
        read = checkpoint.tensor(name)
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read, tensor)


def test_a_tensor_is_a_view_of_the_file(directory: Path) -> None:
    checkpoint = open_directory(directory)
    assert checkpoint.tensor("a").data_ptr() == checkpoint.tensor("a").data_ptr()


def test_a_tensor_that_is_not_there_is_refused_by_name(directory: Path) -> None:
    with pytest.raises(CheckpointError, match="no tensor 'absent'"):
        open_directory(directory).tensor("absent")


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.int64, "I64"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.float64, "F64")]
)
def test_other_types_are_refused_by_name_when_asked_for(
    directory: Path, dtype: torch.dtype, name: str
) -> None:
    save_file({"x": torch.zeros(4).to(dtype), "y": torch.ones(2)}, directory / "model.safetensors")
    checkpoint = open_directory(directory)
    assert torch.equal(checkpoint.tensor("y"), torch.ones(2))
    with pytest.raises(CheckpointError, match=f"'x' has the type {name};"):
        checkpoint.tensor("x")


def test_one_file_is_preferred_to_an_index_beside_it(directory: Path) -> None:
    put_index(directory, {"z": "absent.safetensors"})
    assert set(open_directory(directory)) == set(TENSORS)


BAD_INDEXES = {
    "a missing shard": ({"a": ONE, "b": ONE, "c": "gone.safetensors", "d": TWO}, "gone.safetensors"),
    "the wrong shard": ({"a": TWO, "b": ONE, "c": TWO, "d": TWO}, f"{TWO}: no tensor 'a'"),
    "an entry too few": ({"a": ONE, "b": ONE, "c": TWO}, f"no entry for the tensor 'd' of {TWO}"),
    "no entries": ({}, "no weight_map"),
    "a list": ([], "no weight_map"),
    "a number": ({"a": 1}, "the tensor 'a' in 1"),
    "a parent": ({"a": f"../{ONE}"}, "the name of a file beside the index"),
    "an absolute path": ({"a": f"/{ONE}"}, "the name of a file beside the index"),
    "a path of Windows": ({"a": f"..\\{ONE}"}, "the name of a file beside the index"),
    "a null byte": ({"a": f"\0{ONE}"}, "the name of a file beside the index"),
    "another kind of file": ({"a": "config.json"}, "the name of a file beside the index"),
    "no name": ({"a": ""}, "the name of a file beside the index"),
}


@pytest.mark.parametrize("fault", BAD_INDEXES)
def test_an_index_that_the_shards_contradict_is_refused(fault: str, sharded: Path) -> None:
    weight_map, said = BAD_INDEXES[fault]
    put_index(sharded, weight_map)
    assert said in refusal(sharded)


def test_a_shard_outside_the_directory_is_refused_even_where_it_exists(sharded: Path) -> None:
    inner = sharded / "inner"
    inner.mkdir()
    put(inner / "config.json", CONFIG)
    put_index(inner, dict.fromkeys("ab", f"../{ONE}"))
    assert "beside the index" in refusal(inner)


BAD_JSON = {
    "not JSON": b"{",
    "not an object": b"[]",
    "not UTF-8": b'{"a": "\xff"}',
    "nested too deeply": b"[" * 200_000,
    "nothing": b"",
    "a number too long": b"9" * 5000,
}


@pytest.mark.parametrize(
    "file", ["config.json", "generation_config.json", "tokenizer_config.json", "chat_template.json", INDEX]
)
@pytest.mark.parametrize("fault", BAD_JSON)
def test_a_json_file_that_is_no_object_is_refused_by_name(fault: str, file: str, sharded: Path) -> None:
    (sharded / file).write_bytes(BAD_JSON[fault])
    assert str(sharded / file) in refusal(sharded)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_a_directory_in_place_of_a_json_file_is_refused(file: str, directory: Path) -> None:
    (directory / file).unlink(missing_ok=True)
    (directory / file).mkdir()
    assert str(directory / file) in refusal(directory)


def test_a_directory_without_config_is_refused(directory: Path) -> None:
    (directory / "config.json").unlink()
    assert "config.json" in refusal(directory)


@pytest.mark.parametrize("names", [None, [], "LlamaForCausalLM", [7], {}])
def test_a_config_without_architectures_is_refused(names: object, directory: Path) -> None:
    put(directory / "config.json", {"architectures": names} if names is not None else {})
    assert "architectures is" in refusal(directory)


def test_a_directory_without_safetensors_says_what_it_has_instead(tmp_path: Path) -> None:
    put(tmp_path / "config.json", CONFIG)
    assert "no safetensors weights" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    assert "convert it" in refusal(tmp_path)
    (tmp_path / "adapter_config.json").touch()
    assert "only an adapter" in refusal(tmp_path)
    assert "no safetensors weights" in refusal(tmp_path / "missing")


def test_weights_cut_at_any_length_are_refused_at_open(directory: Path) -> None:
    path = directory / "model.safetensors"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert str(path) in refusal(directory)


def header(entries: dict[str, object]) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


def one(offsets: tuple[int, int], shape: tuple[int, ...] = (4,)) -> dict[str, object]:
    return {"dtype": "F32", "shape": shape, "data_offsets": offsets}


BAD_HEADERS = {
    "eight bytes": struct.pack("<Q", 0),
    "a length beyond the file": struct.pack("<Q", 1 << 62) + bytes(64),
    "a length just beyond the file": struct.pack("<Q", 65) + bytes(64),
    "no JSON": struct.pack("<Q", 16) + bytes(64),
    "a negative offset": header({"a": one((-16, 0))}) + bytes(16),
    "an offset beyond the file": header({"a": one((0, 1 << 40))}) + bytes(16),
    "offsets that overlap": header({"a": one((0, 16)), "b": one((8, 24))}) + bytes(24),
    "the same offsets twice": header({"a": one((0, 16)), "b": one((0, 16))}) + bytes(16),
    "a shape that does not fit": header({"a": one((0, 12))}) + bytes(12),
    "a shape that overflows": header({"a": one((0, 16), (1 << 40, 1 << 40))}) + bytes(16),
}


@pytest.mark.parametrize("fault", BAD_HEADERS)
def test_a_header_that_lies_is_refused_at_open(fault: str, directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(BAD_HEADERS[fault])
    assert "model.safetensors" in refusal(directory)


def test_a_header_that_does_not_lie_is_read(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(header({"a": one((0, 16))}) + bytes(16))
    assert torch.equal(open_directory(directory).tensor("a"), torch.zeros(4))


def test_a_header_that_leaves_the_values_unaligned_is_read_or_refused_at_open(directory: Path) -> None:
    for spaces in range(8):
        text = json.dumps({"a": one((0, 16))}).encode() + b" " * spaces
        content = struct.pack("<Q", len(text)) + text + struct.pack("<4f", 1, 2, 3, 4)
        (directory / "model.safetensors").write_bytes(content)
        assert open_directory(directory).tensor("a").tolist() == [1, 2, 3, 4]


def test_flipped_header_bytes_give_a_checkpoint_or_a_typed_error(directory: Path) -> None:
    path, chance, opened = directory / "model.safetensors", random.Random(0), 0
    whole = path.read_bytes()
    size = 8 + struct.unpack("<Q", whole[:8])[0]
    for _ in range(400):
        content = bytearray(whole)
        content[chance.randrange(size)] = chance.choice((b"0", b"9", b'"', b",", b"a"))[0]
        path.write_bytes(content)
        opened += touch(directory)
    assert 0 < opened < 400


def touch(directory: Path) -> bool:
    """Open a directory and every tensor in it. Whether that worked; anything untyped goes up."""
    try:
        checkpoint = open_directory(directory)
        for name in checkpoint:
            checkpoint.tensor(name).clone()
    except CheckpointError:
        return False
    return True
