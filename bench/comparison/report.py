"""From rates to ratios."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

import attrs

from comparison.cases import Case


@attrs.frozen
class Ratio:
    """A quotient, taken in every round that has both of its sides."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle round's."""
        return median(self.rounds)

    def __str__(self) -> str:
        return f"{self.median:.2f} ({min(self.rounds):.2f}..{max(self.rounds):.2f})"


@attrs.define
class Results:
    """What was answered.

    Attributes:
        about: what each participant says of itself.
        absent: who does not take part, and why.
        rates: tokens per second, by case, participant and round.
        errors: why a participant has no rate for a case.
        machine: ``bytes_per_s`` and ``operations_per_s`` of the machine, by case and round.
    """

    about: dict[str, dict[str, Any]] = attrs.field(factory=dict)
    absent: dict[str, str] = attrs.field(factory=dict)
    rates: dict[Case, dict[str, dict[int, float]]] = attrs.field(
        factory=lambda: defaultdict(lambda: defaultdict(dict))
    )
    errors: dict[Case, dict[str, str]] = attrs.field(factory=lambda: defaultdict(dict))
    machine: dict[Case, dict[int, dict[str, float]]] = attrs.field(factory=lambda: defaultdict(dict))

    def rate(self, case: Case, name: str) -> float | None:
        """Its median, or None."""
        rounds = self.rates[case].get(name)
        return median(rounds.values()) if rounds else None

    def ratio(self, case: Case, over: str, under: str) -> Ratio | None:
        """How much faster one is than another on a case; None where they share no round."""
        return _ratio(self.rates[case].get(over, {}), self.rates[case].get(under, {}))

    def best(self, case: Case, rivals: list[str]) -> str | None:
        """The rival with the highest median."""
        found = {name: rate for name in rivals if (rate := self.rate(case, name)) is not None}
        return max(found, key=found.__getitem__) if found else None

    def read_limit(self, case: Case, name: str) -> dict[int, float]:
        """Tokens per second, by round, that reading weights, keys and values alone would allow a participant.

        A prompt has none: its products are the limit.
        """
        about = self.about.get(name, {})
        if case.kind == "prompt" or "weight_bytes" not in about:
            return {}
        step = about["weight_bytes"] + case.batch * case.context * about["kv_bytes_per_token"]
        return {i: case.batch * each["bytes_per_s"] / step for i, each in self.machine[case].items()}

    def product_limit(self, case: Case, name: str) -> dict[int, float]:
        """Tokens per second, by round, that float32 matrix products alone would allow; none if quantized."""
        key = "operations_per_prompt_token" if case.kind == "prompt" else "operations_per_token"
        about = self.about.get(name, {})
        if key not in about:
            return {}
        return {i: each["operations_per_s"] / about[key] for i, each in self.machine[case].items()}

    def share(self, case: Case, name: str, limit: Mapping[int, float]) -> Ratio | None:
        """Its rates as shares of a limit, round by round."""
        return _ratio(self.rates[case].get(name, {}), limit)

    def document(self) -> dict[str, Any]:
        """All of it, for JSON."""
        cases = [
            {
                **attrs.asdict(case),
                "name": case.name,
                "tokens_per_s": {name: list(rounds.values()) for name, rounds in self.rates[case].items()},
                "machine": list(self.machine[case].values()),
                "errors": self.errors[case],
            }
            for case in self.rates
        ]
        return {"about": self.about, "absent": self.absent, "cases": cases}


def _ratio(over: Mapping[int, float], under: Mapping[int, float]) -> Ratio | None:
    shared = sorted(over.keys() & under.keys())
    return Ratio(tuple(over[i] / under[i] for i in shared)) if shared else None


Table = tuple[list[str], list[list[str]]]
"""Columns and rows."""
Share = Callable[[Case], "Ratio | None"]
"""A participant's share of a limit, by case."""


def rates_table(results: Results, names: list[str]) -> Table:
    """Everyone's median tokens per second, a row per case."""
    rows = [[case.name, *(_rate(results, case, name) for name in names)] for case in results.rates]
    return ["tokens/s", *names], rows


def _rate(results: Results, case: Case, name: str) -> str:
    if (rate := results.rate(case, name)) is not None:
        return f"{rate:.4g}"
    return "absent" if name in results.absent else "failed" if name in results.errors[case] else "-"


def ratios_table(results: Results, ours: str, rivals: list[str]) -> Table:
    """How often as fast ours is as the best rival and as each; then everyone's shares of their read limit.

    Each is the median over rounds, with the least and the most.
    """
    limits = _limits(results)
    columns = [f"{ours} /", "best", *rivals, *limits]
    return columns, [_ratios(results, case, ours, rivals, list(limits.values())) for case in results.rates]


def _limits(results: Results) -> dict[str, Share]:
    """A column for each limit that is known of a participant."""
    columns: dict[str, Share] = {}
    for name, about in results.about.items():
        if "weight_bytes" in about:
            columns[f"{name}, of its read limit"] = partial(_share, results, name, results.read_limit)
        if "operations_per_token" in about:
            columns[f"{name}, of its product limit"] = partial(_share, results, name, results.product_limit)
    return columns


def _share(
    results: Results, name: str, limit: Callable[[Case, str], dict[int, float]], case: Case
) -> Ratio | None:
    return results.share(case, name, limit(case, name))


def _ratios(results: Results, case: Case, ours: str, rivals: list[str], limits: list[Share]) -> list[str]:
    best = results.best(case, rivals)
    ahead = results.ratio(case, ours, best) if best else None
    return [
        case.name,
        f"{ahead} {best}" if ahead else "-",
        *(str(results.ratio(case, ours, name) or "-") for name in rivals),
        *(str(share(case) or "-") for share in limits),
    ]


def remarks(results: Results) -> list[str]:
    """Who is what, who is missing, and why; a line each."""
    said = [
        f"{name}: {', '.join(f'{k} {v}' for k, v in about.items())}" for name, about in results.about.items()
    ]
    said += [f"{name} is absent: {reason}" for name, reason in results.absent.items()]
    for case, errors in results.errors.items():
        said += [f"{name} failed at {case.name}: {reason}" for name, reason in errors.items()]
    return said
