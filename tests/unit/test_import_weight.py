"""Listing plugins costs no import of torch, however many there are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support_plugins import entry, family, info_of, plugin, registry

ROOT = Path(__file__).parents[2]

LISTING = """
from support_plugins import entry, family, plugin, registry

made = registry(*(entry(plugin(family(f"toy{i}")), f"toy{i}") for i in range(50)))
assert len(made.families()) == len(made.plugins()) == 50
assert not any(info.error or info.warnings for info in made.plugins())
assert made.weight_formats() == made.kernel_backends() == {}
"""


def torch_after(code: str) -> bool:
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print('torch' in sys.modules)"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip() == "True"


@pytest.mark.parametrize(
    "module",
    [
        "fuel_core",
        "fuel_core.contracts",
        "fuel_core.hookspecs",
        "fuel_core.registry",
        "fuel_core.registry.references",
        "fuel_core.registry.vetting",
    ],
)
def test_importing_what_lists_plugins_imports_no_torch(module):
    assert not torch_after(f"import {module}")


def test_listing_plugins_imports_no_torch():
    assert not torch_after(LISTING)


def test_the_installed_plugins_are_listed_without_torch():
    assert not torch_after("from fuel_core import registry; registry.plugins(); registry.families()")


def test_a_heavy_entry_module_is_warned_of_and_works(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)

    def heavy():
        monkeypatch.setitem(sys.modules, "torch", object())
        return plugin(family("heavy"))

    made = registry(entry(heavy, "heavy"), entry(plugin(family("light")), "light"))
    assert sorted(made.families()) == ["heavy", "light"]
    assert "imports torch" in info_of(made, "heavy").warnings[0]
    assert info_of(made, "light").warnings == ()


def test_the_heavy_part_of_a_plugin_is_imported_when_its_model_is_asked_for():
    code = """
import sys
from support_plugins import CoreModel, FakeCheckpoint, entry, family, plugin, registry

def load(checkpoint, *, device, dtype):
    import torch
    return CoreModel()

made = registry(entry(plugin(family("toy", load=load))))
toy = made.family("toy")
assert "torch" not in sys.modules
made.load_model(toy, FakeCheckpoint(), device="cpu", dtype="torch.float32")
"""
    assert torch_after(code)


def test_a_plain_prompt_needs_no_templates():
    code = "import sys, fuel_core as fuel; fuel.load, fuel.generate; assert 'jinja2' not in sys.modules"
    torch_after(code)
