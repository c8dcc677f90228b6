"""What the commands share: loading with a progress bar, figures, JSON."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from fuel_core.engine import Loaded


def load_model(ref: str, device: str, dtype: str) -> tuple[Loaded, float]:
    """Load with a bar on a terminal, silently in a pipe; the model and the seconds that it took."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    start = time.perf_counter()
    columns = (TextColumn("loading {task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task(ref, total=None)
        # Imports torch, which takes seconds: the bar is there before.
        from fuel_core.engine import load

        loaded = load(
            ref, device, dtype, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
    return loaded, time.perf_counter() - start


def peak_memory_mb() -> float:
    """The most memory that this process has had resident, in MB (10⁶ bytes)."""
    from fuel_core.kv.residency import peak_resident_bytes

    return peak_resident_bytes() / 1e6


def echo_json(value: Any) -> None:
    """Print one JSON document on one line."""
    click.echo(json.dumps(value, ensure_ascii=False))


def echo_table(columns: list[str], rows: list[list[str]]) -> None:
    """Print a table that fits its terminal, or is as wide as it needs in a pipe."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*row)
    console = Console(markup=False, highlight=False)
    Console(markup=False, highlight=False, width=None if console.is_terminal else 200).print(table)
