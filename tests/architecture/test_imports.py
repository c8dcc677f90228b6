"""Who may know whom: the arrows between the packages of the core, and what plugins may use."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "fuel_core"

MAY_KNOW = {
    "contracts": set(),
    "hookspecs": {"contracts"},
    "registry": {"contracts", "hookspecs"},
    "kernels": {"contracts"},
    "weights": {"contracts"},
    "sampling": {"contracts", "kernels"},
    "kv": {"contracts", "kernels"},
    "text": {"contracts", "weights"},
    "schedule": {"contracts", "kv", "sampling"},
    "layers": {"contracts", "kernels", "kv", "weights"},
    "builtin": {"contracts", "registry", "weights", "kernels"},
    "engine": {"contracts", "registry", "kernels", "weights", "sampling", "kv", "text", "schedule", "layers"},
    "cli": {"*"},
    "__main__": {"cli"},
    "": {"contracts", "engine"},  # fuel_core/__init__.py
}
PLUGINS_MAY_KNOW = {"", "contracts", "layers", "kernels.ops", "kernels", "weights", "registry"}


def imports(source: str, package: str) -> Iterator[str]:
    """Every module that a file imports, at any depth, but for what only a type checker sees."""
    tree = ast.parse(source)
    hidden = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test).endswith("TYPE_CHECKING")
        for statement in branch.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            assert node.level == 0, f"relative import in {package}: {base}"
            yield base
            # `from fuel_core import registry` imports a subpackage.
            yield from (f"{base}.{alias.name}" for alias in node.names if base == "fuel_core")
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant))


def part(module: str) -> str | None:
    """The package of the core that a module belongs to; "" is its top, None is not the core."""
    if module == "fuel_core":
        return ""
    if not module.startswith("fuel_core."):
        return None
    name = module.split(".")[1]
    return name if (CORE / name).is_dir() or (CORE / f"{name}.py").is_file() else ""


def wrong_arrows(source: str, own: str) -> list[str]:
    allowed = MAY_KNOW[own] | {own}
    known = {part(module): module for module in imports(source, own)}
    known.pop(None, None)
    if own != "cli":
        return sorted(
            module for name, module in known.items() if name not in allowed | {""} and "*" not in allowed
        )
    return []


CORE_FILES = sorted(CORE.rglob("*.py"))
PLUGIN_FILES = sorted(ROOT.glob("plugins/*/fuel_plugin_*/**/*.py"))


@pytest.mark.parametrize("path", CORE_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_core_module_imports_only_what_stands_right_of_it(path: Path) -> None:
    relative = path.relative_to(CORE).with_suffix("")
    own = "" if relative.parts == ("__init__",) else relative.parts[0]
    assert wrong_arrows(path.read_text(), own) == []


@pytest.mark.parametrize("path", PLUGIN_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_plugin_imports_only_the_public_parts_of_the_core_and_itself(path: Path) -> None:
    own = path.relative_to(ROOT / "plugins").parts[1]
    for module in imports(path.read_text(), own):
        if module.startswith("fuel_plugin_"):
            assert module.split(".")[0] == own, f"another plugin's module: {module}"
        elif (name := part(module)) is not None:
            assert name in PLUGINS_MAY_KNOW, module
            assert name != "kernels" or module in ("fuel_core.kernels", "fuel_core.kernels.ops"), module


def test_the_core_never_imports_a_plugin() -> None:
    for path in CORE_FILES:
        assert not [m for m in imports(path.read_text(), "") if m.startswith("fuel_plugin")], path


@pytest.mark.parametrize(
    ("own", "line"),
    [
        ("contracts", "import fuel_core.kv"),
        ("kv", "from fuel_core import schedule"),
        ("sampling", "def f():\n    from fuel_core.layers import Decoder"),
        ("layers", "import importlib\nimportlib.import_module('fuel_core.engine')"),
        ("schedule", "from fuel_core.text.chat import render"),
    ],
)
def test_a_wrong_arrow_is_seen(own: str, line: str) -> None:
    assert wrong_arrows(line, own) != []


def test_an_import_that_only_the_type_checker_sees_is_exempt() -> None:
    hidden = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import fuel_core.engine\n"
    assert wrong_arrows(hidden, "contracts") == []
    assert wrong_arrows(hidden + "else:\n    import fuel_core.cli\n", "contracts") == ["fuel_core.cli"]
