"""The checkpoint formats of the core, as plugins register theirs. Imports neither torch nor numpy."""

from __future__ import annotations

import os
from pathlib import Path

from fuel_core.contracts.checkpoint import Checkpoint
from fuel_core.contracts.records import WeightFormat


def matches_gguf(path: Path) -> bool:
    """Whether ``path`` is a file that begins with GGUF's magic, or is named ``.gguf``."""
    if not os.path.isfile(path):
        return False
    if path.suffix.lower() == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def matches_directory(path: Path) -> bool:
    """Whether ``path`` is a directory with a ``config.json``."""
    return os.path.isfile(path / "config.json")


def _open_gguf(path: Path) -> Checkpoint:
    from fuel_core.weights.gguf import open_gguf

    return open_gguf(path)


def _open_directory(path: Path) -> Checkpoint:
    from fuel_core.weights.safetensors_dir import open_directory

    return open_directory(path)


GGUF = WeightFormat(name="gguf", matches=matches_gguf, open=_open_gguf)
SAFETENSORS = WeightFormat(name="safetensors", matches=matches_directory, open=_open_directory)
