"""Fixtures of wheels and of a machine that has nothing else."""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from support_machine import DISTRIBUTIONS, Machine


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The four distributions, built as a user's pip builds them."""
    folder = tmp_path_factory.mktemp("wheels")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder)]
    subprocess.run([*build, *map(str, DISTRIBUTIONS.values())], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def machine(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """PyTorch, the core, and the two plugins that a GGUF Llama needs."""
    home = tmp_path_factory.mktemp("away")
    created = Machine(tmp_path_factory.mktemp("venv") / "env", home, wheels)
    venv.create(created.prefix, with_pip=True)
    created.run("pip", "install", "--quiet", f"torch=={version('torch').split('+')[0]}")
    created.install("fuel-core", "fuel-plugin-llama", "fuel-plugin-quantized")
    return created


@pytest.fixture
def families(machine: Machine) -> Callable[[], set[str]]:
    """The names of the families that the machine has."""
    code = "from fuel_core import registry; print(*registry.families())"
    return lambda: set(machine.run("python", "-c", code).stdout.split())
