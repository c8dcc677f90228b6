"""The four distributions, installed from their wheels, away from the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from support_machine import DISTRIBUTIONS, ROOT, Machine

QUANTIZED = {"llama-gguf", "qwen2-gguf", "qwen3-gguf"}


def test_every_distribution_has_its_licence_and_type_marker_and_no_tests(wheels: Path) -> None:
    built = {path.name.split("-")[0].replace("_", "-"): path for path in wheels.glob("*.whl")}
    assert set(built) == set(DISTRIBUTIONS)
    for path in built.values():
        names = zipfile.ZipFile(path).namelist()
        assert any(name.endswith("/py.typed") for name in names)
        assert any("LICENSE" in name for name in names)
        assert not any("test" in name or name.endswith((".cpp", ".h")) for name in names)


def test_the_core_carries_its_kernels_and_the_plugins_are_pure(wheels: Path) -> None:
    for path in wheels.glob("*.whl"):
        is_core = path.name.startswith("fuel_core-")
        assert any("fuel_core/_native." in name for name in zipfile.ZipFile(path).namelist()) == is_core
        assert path.name.endswith("-py3-none-any.whl") != is_core


def test_without_a_compiler_the_core_is_a_pure_wheel(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run(command, env={**os.environ, "CXX": "/nowhere/c++"}, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "fuel_core/kernels/ops.py" in names
    assert not any(name.endswith(".so") for name in names)


def test_the_core_comes_from_the_wheel_and_not_from_the_checkout(machine: Machine) -> None:
    where = machine.run("python", "-c", "import fuel_core; print(fuel_core.__file__)").stdout
    assert str(machine.prefix) in where
    assert str(ROOT) not in where


def test_the_wheels_generate_real_text(machine: Machine, smollm2_path: Path) -> None:
    command = (
        "fuel",
        "generate",
        str(smollm2_path),
        "The capital of France is",
        "--max-new-tokens",
        "4",
        "--json",
    )
    shown = json.loads(machine.run(*command).stdout)
    assert shown["text"].startswith(" Paris")


def test_a_plugins_families_come_and_go_with_it(machine: Machine, families: Callable[[], set[str]]) -> None:
    assert families() == {"llama", *QUANTIZED}
    machine.install("fuel-plugin-qwen3")
    assert families() == {"llama", *QUANTIZED, "qwen2", "qwen3"}
    assert "fuel-plugin-qwen3" in machine.run("fuel", "plugins").stdout
    machine.run("pip", "uninstall", "--quiet", "--yes", "fuel-plugin-qwen3")
    assert families() == {"llama", *QUANTIZED}
    assert "fuel-plugin-qwen3" not in machine.run("fuel", "plugins").stdout


def test_a_missing_plugin_is_named_with_the_package_to_install(machine: Machine, smollm2_path: Path) -> None:
    for gone in ("fuel-plugin-llama", "fuel-plugin-quantized"):
        machine.run("pip", "uninstall", "--quiet", "--yes", gone)
        ran = machine.run("fuel", "generate", str(smollm2_path), "hello", check=False)
        machine.install(gone)
        assert ran.returncode == 2
        assert len(ran.stderr.splitlines()) == 1
        assert gone in ran.stderr
