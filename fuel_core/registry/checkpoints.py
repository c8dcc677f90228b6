"""Opens a model on disk with the first format that recognizes it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from fuel_core.contracts.checkpoint import Checkpoint
from fuel_core.contracts.errors import CheckpointError
from fuel_core.contracts.records import WeightFormat
from fuel_core.registry.catalogue import Catalogue
from fuel_core.registry.discovery import guarded
from fuel_core.registry.loading import call_plugin
from fuel_core.registry.naming import one_line
from fuel_core.registry.records import Kind

_SHOWN = 5


def open_checkpoint(catalogue: Catalogue, path: Path, formats: Mapping[str, WeightFormat]) -> Checkpoint:
    """See :meth:`fuel_core.registry.Registry.open_checkpoint`."""
    contents = _contents(path)
    for each in formats.values():
        if _matches(catalogue, each, path):
            return _open(catalogue, each, path)
    raise CheckpointError(
        f"no model: {path} holds {contents}",
        needed=f"one of the formats {', '.join(formats)}" if formats else "a plugin that registers a format",
        remedy="give a model file, or the directory that holds config.json and the weights",
        path=path,
        formats=tuple(formats),
    )


def _matches(catalogue: Catalogue, each: WeightFormat, path: Path) -> bool:
    try:
        return bool(guarded(lambda: each.matches(path)))
    except Exception as error:
        # The path was readable, so it is the plugin's fault, and the next format has its turn.
        catalogue.fail(catalogue.owners[Kind.FORMAT, each.name], error)
        return False


def _open(catalogue: Catalogue, each: WeightFormat, path: Path) -> Checkpoint:
    owner = catalogue.owner((Kind.FORMAT, each.name))
    return call_plugin(lambda: each.open(path), f"the reader of {each.name}", owner)


def _contents(path: Path) -> str:
    """What is there, in a few words."""
    try:
        if path.is_dir():
            return _directory(path)
        # A pipe or a device would block when it is read.
        return _file(path) if path.is_file() else _nothing(path)
    except OSError as error:
        raise CheckpointError(
            f"no model: {path} cannot be read ({one_line(error)})",
            needed="a readable model file or directory",
            remedy="check the path and its permissions",
            path=path,
        ) from error


def _directory(path: Path) -> str:
    names = sorted(entry.name for entry in path.iterdir())
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}" if names else "nothing"


def _file(path: Path) -> str:
    with path.open("rb") as file:
        first = file.read(8)
    return f"{path.stat().st_size} bytes that begin with {first!r}"


def _nothing(path: Path) -> NoReturn:
    raise CheckpointError(
        f"no model: {path} is neither a file nor a directory",
        needed="a model file or directory",
        remedy="check the path",
        path=path,
    )
