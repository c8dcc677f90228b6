"""What the commands share: loading with a progress bar, figures, JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from fuel_core.contracts.errors import CheckpointError, PluginError

if TYPE_CHECKING:
    from fuel_core.engine import Loaded


def load_model(
    ref: str, runtime: dict[str, Any], clock: Callable[[], float] = time.perf_counter
) -> tuple[Loaded, float]:
    """Load with a bar on a terminal, silently in a pipe; the model and the seconds by ``clock`` that it took.

    ``runtime`` are the options of :func:`fuel_core.engine.load`.

    Raises:
        CheckpointError: also for a model of an architecture that no installed plugin brings.
        FuelError: as :func:`fuel_core.engine.load`.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    start = clock()
    columns = (TextColumn("loading {task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task(ref, total=None)
        # Imports torch, which takes seconds: the bar is there before.
        from fuel_core.engine import load

        try:
            loaded = load(
                ref, **runtime, progress=lambda done, total: bar.update(task, completed=done, total=total)
            )
        except PluginError as error:
            raise _blamed(error) from error
    return loaded, clock() - start


def _blamed(error: PluginError) -> PluginError | CheckpointError:
    """The error itself; where no plugin is broken and none has the architecture, one of the model's."""
    if "known" not in error.figures or error.figures["broken"]:
        return error
    return CheckpointError(error.given, needed=error.needed, remedy=error.remedy, **error.figures)


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
