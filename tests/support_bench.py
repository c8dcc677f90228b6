"""The scripts in ``bench/``, importable, and workers that answer without a model."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import dedent

BENCH = Path(__file__).parents[1] / "bench"
for folder in (BENCH / "peers", BENCH):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def write_worker(path: Path, body: str) -> list[str]:
    """A worker whose peer has this class body; the command that starts it."""
    lines = "\n".join("    " + line for line in dedent(body).strip().splitlines())
    path.write_text(
        f"import os, sys, time\nsys.path.insert(0, {str(BENCH / 'peers')!r})\nimport protocol\n\n"
        f"class Peer:\n    about = {{'version': '1'}}\n{lines}\n\n"
        "protocol.main(lambda model, threads: Peer())\n"
    )
    return [sys.executable, str(path), "--model", "none", "--threads", "2"]
