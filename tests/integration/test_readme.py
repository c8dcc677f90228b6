"""The README's commands and code, as a user runs them, on a machine that has only the wheels."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import attrs
import pytest
from support_machine import ROOT, Machine

import fuel_core as fuel
from fuel_core.contracts import FinishReason

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PYTHON = [block for language, block in BLOCKS if language == "python"]
SHELL = [block for language, block in BLOCKS if language == "sh"]
(INSTALL,) = (block for block in SHELL if "-m venv" in block)
COMMANDS = [
    line.split("  #")[0].strip() for block in SHELL if block != INSTALL for line in block.splitlines() if line
]
TARGETS = re.findall(
    r"^make \w+(?: ARGS=\S+)?", README + (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE
)


@pytest.fixture(scope="module")
def checkout(machine: Machine) -> Iterator[Machine]:
    """The machine, with the plugins' sources where the README has them."""
    shutil.copytree(ROOT / "plugins", machine.home / "plugins", ignore=shutil.ignore_patterns("__pycache__"))
    yield machine
    shutil.rmtree(machine.home / "plugins")
    machine.run("pip", "uninstall", "--quiet", "--yes", "fuel-plugin-qwen3", check=False)


def test_the_first_screen_shows_the_way_in() -> None:
    first = README.split("\n## ")[0]
    order = [
        "make demo",
        "make test",
        "fuel generate",
        "fuel.generate(",
        "pip install --editable ./plugins/qwen3",
        "\nfuel plugins",
    ]
    places = [first.index(what) for what in order]
    assert places == sorted(places)
    assert len(PYTHON[0].strip().splitlines()) <= 6


@pytest.mark.parametrize("target", sorted({target.split()[1] for target in TARGETS}))
def test_a_make_target_that_is_told_of_is_there(target: str) -> None:
    subprocess.run(["make", target, "--dry-run"], cwd=ROOT, check=True, capture_output=True)


def test_the_targets_told_of_are_all_there_are() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert set(phony[1].split()) - {"check", "clean"} == {target.split()[1] for target in TARGETS}


def test_it_installs_without_make_as_the_readme_says(tmp_path: Path) -> None:
    for name in ("fuel_core", "plugins"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FUEL_"))}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    chosen = f"pip install torch=={version('torch').split('+')[0]}"  # what is here; the newest is gigabytes
    script = INSTALL.replace("pip install torch", chosen)
    assert script != INSTALL
    subprocess.run(["bash", "-ec", script], cwd=tmp_path, env=env, check=True, capture_output=True)
    command = [tmp_path / "env/bin/fuel", "doctor"]
    said = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    assert "native with" in said
    assert all(f"fuel-plugin-{name}" in said for name in ("llama", "quantized"))


def test_the_sampling_parameters_are_told_with_their_defaults() -> None:
    table = README.split("| `SamplingParams` |")[1].split("\n\n")[0]
    told: dict[str, object] = {}
    for names, defaults in re.findall(r"^\| (`.*?`) \| (`.*?`) \|", table, re.MULTILINE):
        values = [ast.literal_eval(each) for each in re.findall("`(.*?)`", defaults)]
        told |= dict(zip(re.findall("`(.*?)`", names), values, strict=True))
    plain = fuel.SamplingParams()
    assert told == {f.name: getattr(plain, f.name) for f in attrs.fields(fuel.SamplingParams)}


def test_the_fields_of_what_comes_back_are_told() -> None:
    (paragraph,) = (text for text in README.split("\n\n") if text.startswith("`fuel.generate` gives"))
    told = set(re.findall(r"`(\w+)`", paragraph))
    for kind in (fuel.Completion, fuel.Delta):
        assert {field.name for field in attrs.fields(kind)} <= told
    assert {str(reason) for reason in FinishReason} <= told


def test_every_name_of_fuel_in_the_readme_is_there() -> None:
    names = set(re.findall(r"\bfuel\.(\w+)", README))
    assert {"InvalidRequestError", "generate"} <= names
    assert [name for name in names if not hasattr(fuel, name)] == []


def test_the_length_of_the_example_plugin_is_told_as_it_is() -> None:
    told = re.search(r"`plugins/llama` is the example, in about (\d+) lines", README)
    package = ROOT / "plugins/llama/fuel_plugin_llama"
    lines = sum(len(path.read_text().splitlines()) for path in package.glob("*.py"))
    assert told is not None
    assert int(told[1]) == pytest.approx(lines, rel=0.1)


def test_every_command_of_the_readme_runs(checkout: Machine) -> None:
    ran, before = 0, set(checkout.home.iterdir())
    for command in COMMANDS:
        if command.startswith(("make ", ". .venv")):
            continue  # the targets are tried above; the environment is the machine's own
        said = checkout.run(command, shell=True).stdout
        if "--stop" in command:
            assert json.loads(said)["finish_reason"] == "stop", said
        ran += 1
    assert ran >= 9
    assert set(checkout.home.iterdir()) == before, "a reader's checkout is left as it was"


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_every_python_block_of_the_readme_runs_and_prints(checkout: Machine, code: str) -> None:
    assert checkout.run("python", "-W", "error", "-c", code).stdout.strip()
