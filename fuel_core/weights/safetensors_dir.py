"""Hugging Face model directories as checkpoints: config.json, safetensors and the tokenizer's files.

Source: the safetensors format and the ``model.safetensors.index.json`` of Transformers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fuel_core.contracts.checkpoint import TokenizerData
from fuel_core.contracts.errors import CheckpointError
from fuel_core.weights.hf_files import damaged, read_json, read_tokenizer

_DTYPES = ("F32", "F16", "BF16")
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


@attrs.frozen(eq=False)
class DirectoryCheckpoint:
    """A Hugging Face directory, opened. See :class:`fuel_core.contracts.Checkpoint`."""

    source: str
    architecture: str
    config: Mapping[str, Any] = attrs.field(repr=False)
    tokenizer: TokenizerData = attrs.field(repr=False)
    _shards: Mapping[str, Any] = attrs.field(repr=False)
    format: str = attrs.field(default="safetensors", init=False)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __contains__(self, name: object) -> bool:
        return name in self._shards

    def tensor(self, name: str) -> Tensor:
        """The tensor of this name, float32, float16 or bfloat16 as stored: a view of the mapped file.

        Raises:
            CheckpointError: no such tensor, or one of another type.
        """
        if name not in self._shards:
            raise CheckpointError(
                f"{self.source}: no tensor {name!r}",
                needed=f"one of its {len(self._shards)} tensors",
                remedy="iterate over the checkpoint for their names",
            )
        shard = self._shards[name]
        stored = shard.get_slice(name).get_dtype()
        if stored not in _DTYPES:
            raise CheckpointError(
                f"{self.source}: the tensor {name!r} has the type {stored}",
                needed=f"one of {', '.join(_DTYPES)}",
                remedy="fetch the model in one of these types",
            )
        tensor: Tensor = shard.get_tensor(name)
        return tensor


def open_directory(path: Path) -> DirectoryCheckpoint:
    """Read a directory's JSON files and map its weights, whose headers are checked here.

    Raises:
        CheckpointError: no config.json or none with ``architectures``, no safetensors, a file that is
            damaged or missing, or an index and shards that contradict each other.
    """
    source = str(path)
    if not os.path.isfile(path / _WEIGHTS) and not os.path.isfile(path / _INDEX):
        raise _no_weights(path, source)
    config = read_json(path / "config.json")
    architecture = _architecture(path, config)
    shards = _open_one(path / _WEIGHTS) if os.path.isfile(path / _WEIGHTS) else _open_shards(path / _INDEX)
    return DirectoryCheckpoint(source, architecture, config, read_tokenizer(path, config), shards)


def _no_weights(path: Path, source: str) -> CheckpointError:
    given, remedy = "no safetensors weights", "check the path, or fetch the model again"
    if os.path.isfile(path / "adapter_config.json"):
        given, remedy = "only an adapter", "merge the adapter into its base model and save that"
    elif os.path.isfile(path / "pytorch_model.bin") or os.path.isfile(path / "pytorch_model.bin.index.json"):
        given = "only pytorch_model.bin, which can run code when it is read"
        remedy = "convert it: load it with Transformers and call save_pretrained, which writes safetensors"
    needed = f"a directory with {_WEIGHTS} or {_INDEX}"
    return CheckpointError(f"{source}: {given}", needed=needed, remedy=remedy)


def _architecture(path: Path, config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        given = f"architectures is {'missing' if names is None else repr(names)}"
        raise damaged(path / "config.json", given, "a list with the name of the architecture")
    return names[0]


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise damaged(path, str(error), "a complete safetensors file") from error


def _open_one(path: Path) -> dict[str, Any]:
    handle = _open(path)
    return dict.fromkeys(_names(handle), handle)


def _names(handle: Any) -> list[str]:
    return list(handle.keys())


def _open_shards(index: Path) -> dict[str, Any]:
    """Tensor name → the open shard that holds it, after a check that index and shards agree."""
    places = _read_index(index)
    shards = {shard: _open(index.parent / shard) for shard in sorted(set(places.values()))}
    listed = {(shard, name) for name, shard in places.items()}
    stored = {(shard, name) for shard, handle in shards.items() for name in _names(handle)}
    for shard, name in sorted(listed - stored):
        raise damaged(index.parent / shard, f"no tensor {name!r}", f"what {index.name} says is in it")
    for shard, name in sorted(stored - listed):
        raise damaged(index, f"no entry for the tensor {name!r} of {shard}", "every tensor of every shard")
    return {name: shards[shard] for name, shard in places.items()}


def _read_index(index: Path) -> dict[str, str]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise damaged(index, "no weight_map", "an object that maps tensor names to shards")
    for name, shard in places.items():
        if not isinstance(shard, str) or not _is_plain_name(shard):
            raise damaged(index, f"the tensor {name!r} in {shard!r}", "the name of a file beside the index")
    return places


def _is_plain_name(name: str) -> bool:
    """Whether a name cannot lead out of its directory, on any system."""
    return name.endswith(".safetensors") and not any(mark in name for mark in "/\\:\0")
