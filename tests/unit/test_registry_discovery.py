"""What is found of the distributions that are installed."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from support_plugins import entry, family, info_of, plugin, registry, weight_format, write_distribution

from fuel_core.registry.discovery import installed

ROOT = Path(__file__).parents[2]

GOOD = """
from fuel_core.contracts import API_VERSION, Capabilities, ModelFamily, hookimpl

def never(*args, **kwargs):
    raise AssertionError

@hookimpl
def fuel_register_models():
    capabilities = Capabilities(tiers=("decode",))
    return [ModelFamily(name="good", architectures=("GoodForCausalLM",), capabilities=capabilities,
                        api_version=API_VERSION, load=never, tiny=never)]
"""

REPORT = """
import json, sys
from fuel_core import registry
from fuel_core.contracts.errors import PluginError
said = {"families": list(registry.families()), "plugins": [
    [p.name, p.distribution, p.version, p.value, list(p.families), p.disabled, p.error and str(p.error)]
    for p in registry.plugins()]}
try:
    registry.family("bad")
except PluginError as error:
    said["asked"] = [str(error), type(error.__cause__).__name__]
said["torch"] = "torch" in sys.modules
print(json.dumps(said))
"""


def report(site: Path, **environ: str) -> dict:
    paths = os.pathsep.join((str(ROOT), str(site)))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", REPORT],
        env={**os.environ, "PYTHONPATH": paths, **environ},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def of(said: dict, name: str) -> list:
    (found,) = (row for row in said["plugins"] if row[0] == name)
    return found


def test_installed_plugins_are_found_and_a_broken_one_beside_them_is_only_reported(tmp_path):
    write_distribution(tmp_path, "fuel-plugin-good", GOOD, version="1.2")
    write_distribution(tmp_path, "fuel-plugin-bad", "import a_module_that_is_not_there", version="0.3")
    write_distribution(tmp_path, "fuel-plugin-exit", "import sys; sys.exit(4)")
    said = report(tmp_path)
    assert "good" in said["families"]
    assert of(said, "good") == [
        "good",
        "fuel-plugin-good",
        "1.2",
        "fuel_plugin_good",
        ["good"],
        False,
        None,
    ]
    assert of(said, "bad")[1:3] == ["fuel-plugin-bad", "0.3"]
    assert "a_module_that_is_not_there" in of(said, "bad")[6]
    assert "SystemExit: 4" in of(said, "exit")[6]
    text, cause = said["asked"]
    assert "fuel-plugin-bad 0.3: ModuleNotFoundError" in text
    assert cause in ("ModuleNotFoundError", "PluginError")
    assert not said["torch"]


def test_the_environment_disables_an_installed_plugin(tmp_path):
    write_distribution(tmp_path, "fuel-plugin-good", GOOD)
    said = report(tmp_path, FUEL_DISABLE_PLUGINS="Fuel_Plugin_Good")
    assert "good" not in said["families"]
    assert of(said, "good")[5:] == [True, None]


def found_in(site: Path, monkeypatch) -> list:
    real = metadata.distributions
    monkeypatch.setattr(metadata, "distributions", lambda: real(path=[str(site)]))
    return list(installed())


def test_a_damaged_list_of_entry_points_hides_no_other_plugin(tmp_path, monkeypatch):
    write_distribution(tmp_path, "fuel-plugin-bad", "", points="[fuel]\nno equals sign\n")
    write_distribution(tmp_path, "fuel-plugin-good", GOOD)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [str(tmp_path)])
        with pytest.raises(TypeError, match="argument"):
            metadata.entry_points(group="fuel")
    monkeypatch.syspath_prepend(tmp_path)
    made = registry(*found_in(tmp_path, monkeypatch))
    assert list(made.families()) == ["good"]
    info = info_of(made, "fuel-plugin-bad")
    assert "entry_points.txt cannot be read" in str(info.error)
    assert info.distribution == "fuel-plugin-bad"


def test_a_list_of_entry_points_that_is_no_text_is_reported(tmp_path, monkeypatch):
    write_distribution(tmp_path, "fuel-plugin-bad", "")
    (tmp_path / "fuel_plugin_bad-1.0.dist-info" / "entry_points.txt").write_bytes(b"[fuel]\nx = \xff\xfe")
    made = registry(*found_in(tmp_path, monkeypatch))
    assert "cannot be read" in str(info_of(made, "fuel-plugin-bad").error)


def test_entry_points_of_other_groups_are_left_alone(tmp_path, monkeypatch):
    write_distribution(tmp_path, "other", "", points="[console_scripts]\nx = other:main\n")
    both = "[console_scripts]\nx = both:main\n\n[fuel]\ny = both\n\n[fuel.more]\nz = both\n"
    write_distribution(tmp_path, "both", "", points=both)
    assert [each.name for each in found_in(tmp_path, monkeypatch)] == ["y"]


def test_a_distribution_without_metadata_is_still_found(tmp_path, monkeypatch):
    imported = write_distribution(tmp_path, "fuel-plugin-bare", GOOD)
    (tmp_path / f"{imported}-1.0.dist-info" / "METADATA").unlink()
    monkeypatch.syspath_prepend(tmp_path)
    made = registry(*found_in(tmp_path, monkeypatch))
    assert list(made.families()) == ["good"]
    assert info_of(made, "bare").distribution == ""


def test_a_distribution_later_on_the_path_is_hidden_by_its_namesake(tmp_path, monkeypatch):
    for place, version, value in (("first", "2.0", "new"), ("second", "1.0", "old")):
        points = f"[fuel]\ntoy = {value}\n"
        write_distribution(tmp_path / place, "fuel-plugin-toy", "", version=version, points=points)
    real = metadata.distributions
    places = [str(tmp_path / place) for place in ("first", "second")]
    monkeypatch.setattr(metadata, "distributions", lambda: real(path=places))
    assert [(each.value, each.dist.version) for each in installed()] == [("new", "2.0")]


def test_an_entry_point_that_is_found_twice_is_one_plugin_the_first_found():
    twice = [entry(plugin(family("toy")), value="toy", version=version) for version in ("2.0", "1.0")]
    made = registry(*twice)
    assert [(info.version, info.error) for info in made.plugins()] == [("2.0", None)]


def test_plugins_are_met_in_the_order_of_their_distributions_whatever_the_order_on_disk():
    entries = [entry(plugin(family(name)), name) for name in ("b", "c", "a")]
    for order in (entries, entries[::-1]):
        assert [info.name for info in registry(*order).plugins()] == ["a", "b", "c"]


def test_the_cores_own_plugin_comes_first_so_that_no_stranger_displaces_it():
    ours = entry(plugin(formats=[weight_format("safetensors")]), "core", distribution="Fuel_Core")
    theirs = entry(plugin(formats=[weight_format("safetensors")]), "aaa", distribution="aaa")
    made = registry(theirs, ours)
    assert [info.name for info in made.plugins()] == ["core", "aaa"]
    assert info_of(made, "core").error is None
    assert "safetensors" in str(info_of(made, "aaa").error)


def test_an_object_that_is_listed_under_two_names_is_registered_once():
    same = plugin(fuel_resolve_model=lambda ref: None)
    made = registry(entry(same, "one", value="x:a"), entry(same, "two", value="x:b"))
    assert info_of(made, "one").error is None
    assert "same module or object" in str(info_of(made, "two").error)
