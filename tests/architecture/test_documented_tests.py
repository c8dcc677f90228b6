"""``tests/README.md`` names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.findall(r"`(test_\w+)::(test_\w+)`", (ROOT / "tests/README.md").read_text())
FILES = {path.stem: path for folder in ("tests", "plugins") for path in (ROOT / folder).rglob("test_*.py")}


def test_every_test_that_is_documented_exists() -> None:
    missing = [
        f"{file}::{name}"
        for file, name in NAMED
        if file not in FILES or f"def {name}(" not in FILES[file].read_text()
    ]
    assert missing == []


def test_many_are_documented_each_with_a_control() -> None:
    lines = [line for line in (ROOT / "tests/README.md").read_text().splitlines() if "::" in line]
    assert len(lines) > 50
    assert all(line.count("::") == 2 for line in lines)
