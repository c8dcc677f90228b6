"""The README's commands and code, as a user runs them, on a machine that has only the wheels."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from support_machine import ROOT, Machine

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PYTHON = [block for language, block in BLOCKS if language == "python"]
COMMANDS = [
    line.split("  #")[0].strip()
    for language, block in BLOCKS
    if language == "sh"
    for line in block.splitlines()
    if line
]


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


@pytest.mark.parametrize("target", [command for command in COMMANDS if command.startswith("make ")])
def test_a_make_target_of_the_readme_is_there(target: str) -> None:
    subprocess.run([*target.split(), "--dry-run"], cwd=ROOT, check=True, capture_output=True)


def test_every_command_of_the_readme_runs(checkout: Machine) -> None:
    ran = 0
    for command in COMMANDS:
        if command.startswith(("make ", ". .venv")):
            continue  # the targets are tried above; the environment is the machine's own
        checkout.run(command, shell=True)
        ran += 1
    assert ran >= 9


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_every_python_block_of_the_readme_runs_and_prints(checkout: Machine, code: str) -> None:
    assert checkout.run("python", "-W", "error", "-c", code).stdout.strip()
