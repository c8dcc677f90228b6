"""Ratios, limits, cases and the plot of ``bench/compare.py``."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import support_bench  # noqa: F401 (makes the next ones importable)
from comparison.cases import Case, cases_of, ragged_contexts
from comparison.plot import check_plotting, draw, panels_of
from comparison.report import Results, rates_table, ratios_table

from fuel_core.contracts.errors import InvalidRequestError

BATCH = Case("batch", (128,) * 4, 24)
PROMPT = Case("prompt", (512,))


def results_of(case: Case, about: dict[str, Any] | None = None, **rates: dict[int, float]) -> Results:
    results = Results(about={"Fuel": about or {}})
    for name, rounds in rates.items():
        results.rates[case][name] = rounds
    return results


def test_a_ratio_is_of_rates_of_one_round() -> None:
    """The median of the quotients, not the quotient of the medians; a round that lacks a side has none."""
    results = results_of(BATCH, Fuel={0: 10.0, 1: 40.0, 2: 30.0, 3: 99.0}, Peer={0: 10.0, 1: 5.0, 2: 10.0})
    ratio = results.ratio(BATCH, "Fuel", "Peer")
    assert ratio is not None
    assert ratio.rounds == (1.0, 8.0, 3.0)
    assert str(ratio) == "3.00 (1.00..8.00)"
    assert results.ratio(BATCH, "Fuel", "Nobody") is None


def test_the_best_is_who_has_the_highest_median() -> None:
    results = results_of(BATCH, Fuel={0: 90.0}, Peer={0: 1.0, 1: 30.0, 2: 2.0}, Other={0: 3.0, 1: 3.0})
    assert results.best(BATCH, ["Peer", "Other", "Nobody"]) == "Other"
    assert results.best(BATCH, ["Nobody"]) is None
    columns, rows = ratios_table(results, "Fuel", ["Peer", "Other"])
    assert columns == ["Fuel /", "best", "Peer", "Other"]
    by_30 = "30.00 (30.00..30.00)"
    assert rows == [[BATCH.name, f"{by_30} Other", "90.00 (90.00..90.00)", by_30]]
    assert rates_table(results, ["Peer", "Nobody"])[1] == [[BATCH.name, "2", "-"]]


KNOWN = {"weight_bytes": 900, "kv_bytes_per_token": 10}
ROUNDS = {
    0: {"bytes_per_s": 1800.0, "operations_per_s": 60.0},
    1: {"bytes_per_s": 3600.0, "operations_per_s": 90.0},
}


@pytest.mark.parametrize(("contexts", "limits"), [((0,), [2, 4]), ((90,), [1, 2]), ((9,) * 10, [10, 20])])
def test_the_read_limit_is_of_weights_once_and_every_sessions_context(
    contexts: tuple[int, ...], limits: list[float]
) -> None:
    case = Case("batch", contexts, 24)
    results = results_of(case, KNOWN, Fuel={0: 0.5 * limits[0], 1: 0.25 * limits[1]})
    results.machine[case] = ROUNDS
    assert list(results.read_limit(case, "Fuel").values()) == limits
    assert results.read_limit(case, "Peer") == {}
    columns, rows = ratios_table(results, "Fuel", [])
    assert (columns[2:], rows[0][2:]) == (["Fuel, of its read limit"], ["0.38 (0.25..0.50)"])


def test_the_product_limit_is_of_operations_and_a_prompt_has_no_other() -> None:
    known = {**KNOWN, "operations_per_token": 3, "operations_per_prompt_token": 2}
    results = results_of(PROMPT, known, Fuel={0: 15.0, 1: 45.0})
    results.rates[BATCH]["Fuel"] = {0: 10.0}
    results.machine |= {PROMPT: ROUNDS, BATCH: ROUNDS}
    assert results.product_limit(PROMPT, "Fuel") == {0: 30.0, 1: 45.0}
    assert results.product_limit(BATCH, "Fuel") == {0: 20.0, 1: 30.0}
    assert results.read_limit(PROMPT, "Fuel") == {}
    columns, rows = ratios_table(results, "Fuel", [])
    assert columns[2:] == ["Fuel, of its read limit", "Fuel, of its product limit"]
    assert rows[0][2:] == ["-", "0.75 (0.50..1.00)"]


def test_quantized_weights_have_no_limit_of_float32_products() -> None:
    results = results_of(BATCH, KNOWN, Fuel={0: 1.0})
    results.machine[BATCH] = ROUNDS
    assert results.product_limit(BATCH, "Fuel") == {}


def test_the_document_can_be_written_and_has_every_round() -> None:
    results = results_of(BATCH, Fuel={0: 1.0, 1: 2.0})
    results.machine[BATCH] = {0: {"bytes_per_s": 5e9}}
    (case,) = json.loads(json.dumps(results.document()))["cases"]
    assert case["tokens_per_s"] == {"Fuel": [1.0, 2.0]}
    assert (case["contexts"], case["machine"]) == ([128] * 4, [{"bytes_per_s": 5e9}])


# -- cases and the plot ----------------------------------------------------------------------------


def test_the_cases_are_batches_contexts_a_prompt_and_ragged_ones() -> None:
    cases = cases_of([1, 8], 128, [512, 2048], [1, 8], prompt=512, steps=24, ragged=32)
    assert [case.name for case in cases] == [
        "B=1, context 128",
        "B=8, context 128",
        "B=1, context 512",
        "B=1, context 2048",
        "B=8, context 512",
        "B=8, context 2048",
        "prompt of 512",
        "B=32, context 16 to 1024",
        "B=32, context 520",
    ]
    assert cases[1].question == {"op": "decode", "contexts": [128] * 8, "steps": 24}
    assert cases[6].question == {"op": "prefill", "length": 512}
    assert [case.ours for case in cases] == [False] * 7 + [True] * 2
    assert cases_of([], 1, [], [], prompt=0, steps=1, ragged=0) == []


def test_ragged_contexts_have_the_mean_of_the_uniform_ones() -> None:
    spread = ragged_contexts(32)
    assert (min(spread), max(spread), len(set(spread))) == (16, 1024, 32)
    assert sum(spread) / 32 == 520
    assert list(spread) != sorted(spread)
    with pytest.raises(InvalidRequestError, match="1 ragged"):
        ragged_contexts(1)


def test_the_panels_are_the_batches_and_each_batchs_contexts() -> None:
    panels = panels_of(cases_of([8, 1], 128, [2048, 512], [1, 4], prompt=512, steps=24, ragged=4))
    shown = {title: [(case.batch, case.context) for case in cases] for title, cases in panels.items()}
    assert shown == {
        "sessions together, context 128": [(1, 128), (8, 128)],
        "context, B=1": [(1, 128), (1, 512), (1, 2048)],
        "context, B=4": [(4, 512), (4, 2048)],
    }


def test_a_missing_matplotlib_is_said_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comparison.plot.find_spec", lambda name: None)
    with pytest.raises(InvalidRequestError, match="pip install matplotlib, or pass --no-plot"):
        check_plotting()


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="it is not installed")
def test_the_plot_is_a_png_file(tmp_path: Path) -> None:
    results = results_of(BATCH, {"weight_bytes": 9, "kv_bytes_per_token": 1}, Fuel={0: 4.0}, Peer={0: 1.0})
    results.machine[BATCH] = {0: {"bytes_per_s": 1000.0}}
    draw(results, "Fuel", ["Fuel", "Peer", "Nobody"], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="it is not installed")
def test_there_is_no_plot_of_prompts_alone(tmp_path: Path) -> None:
    draw(results_of(PROMPT, Fuel={0: 4.0}), "Fuel", ["Fuel"], tmp_path / "plot.png")
    assert not (tmp_path / "plot.png").exists()
