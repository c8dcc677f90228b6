"""``bench/step_costs.py`` counts a step's kernels, fits lines, and cuts models as it says."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import support_bench  # noqa: F401 (makes the next ones importable)
from step_costs import Line, shares, with_layers
from support_checkpoints import write_directory

import fuel_core as fuel
from fuel_core.contracts.errors import InvalidRequestError
from fuel_core.engine.benchmark import Sessions


def test_a_line_is_the_one_of_least_squares_and_knows_its_farthest_point() -> None:
    exact = Line.through([1, 2, 5], [5.0, 7.0, 13.0])
    assert (exact.slope, exact.intercept) == pytest.approx((2, 3))
    assert exact.worst == pytest.approx(0)
    bent = Line.through([0, 1, 2], [1.0, 4.0, 1.0])
    assert (bent.slope, bent.intercept, bent.worst) == pytest.approx((0, 2, 1))


def test_the_calls_of_a_step_are_all_there_and_what_is_left_is_named(
    tmp_path: Path, native: ModuleType
) -> None:
    loaded = fuel.load(write_directory(tmp_path / "tiny"), kernels="native", threads=1)
    found = {share.name: share for share in shares(loaded, 2, 5, 3)}
    depth = loaded.model.n_layers()
    calls = {name: share.calls for name, share in found.items()}
    assert calls == {
        "product": 4 * depth,
        "attention": depth,
        "write_kv": depth,
        "silu_mul": depth,
        "rms_norm": 2 * depth + 1,
        "embedding": 1,
        "the rest": 1,
    }
    assert all(share.microseconds > 0 for name, share in found.items() if name != "the rest")


def test_a_model_of_fewer_layers_is_the_first_of_them(tmp_path: Path, native: ModuleType) -> None:
    loaded = fuel.load(write_directory(tmp_path / "tiny", num_hidden_layers=3), kernels="native", threads=1)
    less = with_layers(loaded, 1)
    assert (less.model.n_layers(), loaded.model.n_layers()) == (1, 3)
    assert {share.name: share.calls for share in shares(less, 1, 4, 1)}["attention"] == 1


def test_kernels_that_record_nothing_are_refused(tmp_path: Path) -> None:
    loaded = fuel.load(write_directory(tmp_path / "tiny"), kernels="reference")
    with pytest.raises(InvalidRequestError, match="record"):
        Sessions(loaded, [4], 2).time_kernels()
