"""The formats' records are light, tell their files apart, and open them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import support_gguf as raw
import torch
from safetensors.torch import save_file

from fuel_core import weights
from fuel_core.weights.formats import GGUF, SAFETENSORS


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Some"]}), encoding="utf-8")
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    return tmp_path


def test_a_gguf_file_is_known_by_its_magic_or_its_name(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(raw.small_file())
    (tmp_path / "empty.GGUF").touch()
    (tmp_path / "other").write_bytes(b"GGML")
    (tmp_path / "short").write_bytes(b"GG")
    (tmp_path / "folder.gguf").mkdir()
    os.mkfifo(tmp_path / "pipe")
    known = {path.name for path in tmp_path.iterdir() if GGUF.matches(path)}
    assert known == {"blob", "empty.GGUF"}


def test_a_directory_is_known_by_its_config(directory: Path) -> None:
    assert SAFETENSORS.matches(directory)
    (directory / "config.json").unlink()
    assert not SAFETENSORS.matches(directory)


@pytest.mark.parametrize("path", ["missing", "null\0byte", "x" * 5000, "config.json/inside"])
def test_a_path_to_nothing_is_of_no_format(path: str, directory: Path) -> None:
    assert not GGUF.matches(directory / path)
    assert not SAFETENSORS.matches(directory / path)


def test_each_format_opens_what_it_matches(directory: Path) -> None:
    (directory / "blob").write_bytes(raw.small_file())
    assert GGUF.open(directory / "blob").format == GGUF.name
    assert SAFETENSORS.open(directory).format == SAFETENSORS.name


IMPORTS = """
import sys
from pathlib import Path
import fuel_core.weights
from fuel_core.weights.formats import GGUF, SAFETENSORS
path = Path(sys.argv[1])
assert GGUF.matches(path / "blob") and SAFETENSORS.matches(path)
print(sorted({"torch", "numpy", "safetensors"} & set(sys.modules)))
GGUF.open(path / "blob")
print("torch" in sys.modules)
"""


def test_matching_imports_no_torch_and_opening_does(directory: Path) -> None:
    (directory / "blob").write_bytes(raw.small_file())
    command = [sys.executable, "-c", IMPORTS, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "True"]


def test_every_name_of_the_package_is_there() -> None:
    assert all(getattr(weights, name) is not None for name in weights.__all__)
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        weights.absent  # noqa: B018
