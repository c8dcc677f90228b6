"""Where the time of a decode step goes, and what one more session, layer and token of context cost.

python bench/step_costs.py smollm2
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import linear_regression, median

import attrs

import fuel_core as fuel
from fuel_core.cli.console import echo_table
from fuel_core.contracts import ModelDims
from fuel_core.engine.benchmark import Sessions
from fuel_core.engine.loading import Loaded

SESSIONS = (1, 2, 4, 8, 16, 24, 32)
CONTEXTS = (128, 512, 1024, 1536, 2048)


@attrs.frozen
class Line:
    """Measured times beside the line through them.

    Attributes:
        slope, intercept: of the least squares, in the unit of the times per step of x.
        worst: how far the farthest point lies from the line, as a share of the line there.
    """

    slope: float
    intercept: float
    worst: float

    @classmethod
    def through(cls, xs: Sequence[float], ys: Sequence[float]) -> Line:
        """The line of least squares through two points or more."""
        slope, intercept = linear_regression(xs, ys)
        off = [abs(y / (slope * x + intercept) - 1) for x, y in zip(xs, ys, strict=True)]
        return cls(slope, intercept, max(off))


@attrs.frozen
class Share:
    """What one kernel takes of a step: its calls, and their microseconds together."""

    name: str
    calls: int
    microseconds: float


def step_ms(loaded: Loaded, sessions: int, context: int, *, steps: int, repeats: int) -> float:
    """The median of some measurements of a step, in milliseconds."""
    holding = Sessions(loaded, [context] * sessions, steps)
    return median(holding.decode(steps) / steps * 1e3 for _ in range(repeats))


def shares(loaded: Loaded, sessions: int, context: int, repeats: int) -> list[Share]:
    """The kernels of one recorded step, each run's largest share first, and what is not among them.

    The median of some runs of the recording; "the rest" is the head, the sampling and Python.
    """
    holding = Sessions(loaded, [context] * sessions, repeats)
    whole = median(holding.decode(1) * 1e6 for _ in range(repeats))
    runs = [holding.time_kernels() for _ in range(repeats)]
    names = sorted({name for name, _ in runs[0]})
    found = [
        Share(
            name,
            sum(each == name for each, _ in runs[0]),
            median(sum(ns for each, ns in run if each == name) / 1e3 for run in runs),
        )
        for name in names
    ]
    rest = whole - sum(share.microseconds for share in found)
    return [*sorted(found, key=lambda share: -share.microseconds), Share("the rest", 1, rest)]


def with_layers(loaded: Loaded, count: int) -> Loaded:
    """The model's first layers alone, over the same weights."""
    model = loaded.model
    less = object.__new__(type(model))
    vars(less).update(vars(model))
    dims = attrs.evolve(ModelDims.from_model(model), n_layers=count)
    less.layers, less.parts = model.layers[:count], attrs.evolve(model.parts, dims=dims)  # type: ignore[attr-defined]
    return attrs.evolve(loaded, model=less)


def _costs(loaded: Loaded, measure: Callable[[Loaded, int, int], float]) -> list[list[str]]:
    depth = loaded.model.n_layers()
    layers = [depth * part // 5 for part in range(1, 6)]
    lines = {
        ("session", "at context 128"): (SESSIONS, [measure(loaded, count, 128) for count in SESSIONS]),
        ("layer", "at batch 8, context 128"): (
            layers,
            [measure(with_layers(loaded, count), 8, 128) for count in layers],
        ),
        ("1,000 tokens", "at batch 1"): (
            [context / 1000 for context in CONTEXTS],
            [measure(loaded, 1, context) for context in CONTEXTS],
        ),
        ("1,000 tokens", "at batch 8"): (
            [context / 1000 for context in CONTEXTS],
            [measure(loaded, 8, context) for context in CONTEXTS],
        ),
    }
    rows = []
    for (what, where), (xs, ys) in lines.items():
        line = Line.through(xs, ys)
        rows.append(
            [f"one more {what}, {where}", f"{line.slope:.3f}", f"{line.intercept:.2f}", f"{line.worst:.0%}"]
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    loaded = fuel.load(options.model, kernels="native", threads=options.threads)

    for sessions in (1, 8, 32):
        table = shares(loaded, sessions, 128, 15)
        total = sum(share.microseconds for share in table)
        echo_table(
            [f"a step at batch {sessions}", "calls", "µs", "share"],
            [[s.name, str(s.calls), f"{s.microseconds:.0f}", f"{s.microseconds / total:.0%}"] for s in table],
        )

    def measure(model: Loaded, count: int, context: int) -> float:
        return step_ms(model, count, context, steps=options.steps, repeats=options.repeats)

    start = time.perf_counter()
    echo_table(["cost", "ms", "and fixed ms", "farthest from the line"], _costs(loaded, measure))
    print(f"measured in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
