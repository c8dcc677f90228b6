"""Tokens per second by batch and by context, with the limit of the memory drawn in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from comparison.cases import Case
from comparison.report import Results
from fuel_core.contracts.errors import InvalidRequestError


def check_plotting() -> None:
    """Refuse before anything is measured.

    Raises:
        InvalidRequestError: no matplotlib.
    """
    if find_spec("matplotlib") is None:
        raise InvalidRequestError(
            "matplotlib is not installed",
            needed="it, to draw the plot",
            remedy="pip install matplotlib, or pass --no-plot",
        )


def draw(results: Results, ours: str, names: Sequence[str], path: Path) -> None:
    """A panel for the batches, and one for the contexts of each batch, as a PNG file; none without either."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = panels_of(list(results.rates))
    if not panels:
        return
    figure, axes = pyplot.subplots(1, len(panels), figsize=(5 * len(panels), 4.5), squeeze=False)
    for axis, (title, cases) in zip(axes[0], panels.items(), strict=True):
        _panel(axis, title, cases, results, ours, names)
    axes[0][0].set_ylabel("tokens/s")
    axes[0][0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def panels_of(cases: Sequence[Case]) -> dict[str, list[Case]]:
    """The cases of each panel, in the order of its axis: titles are what stays, and what runs along it."""
    panels: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        if case.kind == "batch":
            panels[f"sessions together, context {case.context:g}"].append(case)
    first = {case.batch: case for case in cases if case.kind == "batch"}
    for case in cases:
        if case.kind == "context":
            panel = panels[f"context, B={case.batch}"]
            # The batch's own context is a point of this curve too.
            panel += [first[case.batch]] if not panel and case.batch in first else []
            panel.append(case)
    return {
        title: sorted(found, key=lambda case: (case.batch, case.context)) for title, found in panels.items()
    }


def _panel(
    axis: Any, title: str, cases: Sequence[Case], results: Results, ours: str, names: Sequence[str]
) -> None:
    from matplotlib.ticker import LogLocator

    by_batch = title.startswith("sessions")
    places = {case: case.batch if by_batch else case.context for case in cases}
    for name in names:
        rates = {places[case]: rate for case in cases if (rate := results.rate(case, name)) is not None}
        if rates:
            axis.plot(list(rates), list(rates.values()), marker="o", label=name)
    limits = {
        places[case]: median(found) for case in cases if (found := results.read_limit(case, ours).values())
    }
    if limits:
        axis.plot(
            list(limits), list(limits.values()), "k--", label=f"limit: {ours} reading weights, keys, values"
        )
    axis.set(title=title, xscale="log", yscale="log", xticks=list(places.values()))
    axis.set_xticklabels([f"{place:g}" for place in places.values()])
    axis.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("")
    axis.grid(visible=True, alpha=0.3)
