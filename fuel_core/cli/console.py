"""What the commands share: loading with a progress bar, figures, JSON."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fuel_core import registry
from fuel_core.contracts.errors import FuelError
from fuel_core.registry.naming import one_line

if TYPE_CHECKING:
    from fuel_core.engine import Loaded


def load_model(
    ref: str, runtime: dict[str, Any], clock: Callable[[], float] = time.perf_counter
) -> tuple[Loaded, float]:
    """Load with a bar on a terminal, silently in a pipe; the model and the seconds by ``clock`` that it took.

    ``runtime`` are the options of :func:`fuel_core.engine.load`.

    Raises:
        FuelError: as :func:`fuel_core.engine.load`.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    start = clock()
    _warn_of_disabled_names()
    path = _resolved(ref, runtime)
    columns = (TextColumn("loading {task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task(ref, total=None)
        # Imports torch, which takes seconds: the bar is there before.
        from fuel_core.engine import load

        loaded = load(
            path, **runtime, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
    return loaded, clock() - start


def _warn_of_disabled_names() -> None:
    """Say which names in ``FUEL_DISABLE_PLUGINS`` disable nothing."""
    for info in registry.plugins():
        if info.disabled and info.error:
            click.echo(f"fuel: {one_line(info.error)}", err=True)


def _resolved(ref: str, runtime: dict[str, Any]) -> Path:
    """The model's path, fetched if need be, once it is known that there is a device for it."""
    if (device := runtime.get("device", "auto")) != "auto":
        from fuel_core.engine.loading import device_named

        device_named(device)
    return registry.resolve(ref)


def as_typed(error: BaseException, commands: click.Command | None = None) -> str:
    """What an error says, on one line, with options as one types them: ``--top-k 3`` for ``top_k = 3``.

    ``commands`` is the group that has the options; where None, that of the command which is running.
    """
    group = commands or click.get_current_context().find_root().command
    each = group.commands.values() if isinstance(group, click.Group) else (group,)
    options = {param.name: param.opts[0] for one in each for param in one.params if param.name}
    # A name of one word is one of an option only where the error says so: `seed` and `stop` are words too.
    own = error.figures.get("parameter") if isinstance(error, FuelError) else None
    words = (f"{own}(?= = )", f"(?<=change ){own}") if own in options else ()
    names = "|".join((*(name for name in options if "_" in name), *words))
    pattern = rf"""(?<![\w/.'"-])({names})(?![\w/.'"-])(?: = )?"""
    return re.sub(pattern, lambda found: _option(found, options), one_line(error))


def _option(found: re.Match[str], options: dict[str, str]) -> str:
    return options[found[1]] + (" " if found[0].endswith(" ") else "")


def peak_memory_mb() -> float:
    """The most memory that this process has had resident, in MB (10⁶ bytes)."""
    from fuel_core.kv.residency import peak_resident_bytes

    return peak_resident_bytes() / 1e6


def echo_json(value: Any) -> None:
    """Print one JSON document on one line, escaping what the output's encoding may lack."""
    is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    click.echo(json.dumps(value, ensure_ascii=not is_unicode))


def echo_table(columns: list[str], rows: list[list[str]]) -> None:
    """Print a table that fits its terminal, or is as wide as it needs in a pipe."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*row)
    console = Console(markup=False, highlight=False)
    Console(markup=False, highlight=False, width=None if console.is_terminal else 200).print(table)
