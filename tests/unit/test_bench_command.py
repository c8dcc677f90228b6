"""``fuel bench``: its keys, its table, its refusals, and the starts that it times."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support_checkpoints import write_directory

from fuel_core.cli import main, starts
from fuel_core.cli.bench import figures_of
from fuel_core.cli.starts import Start
from fuel_core.contracts.errors import InvalidRequestError
from fuel_core.engine import benchmark
from fuel_core.engine.benchmark import Report, Spread

KEYS = {
    "decode_tokens_per_s",
    "prefill_tokens_per_s",
    "load_s",
    "first_token_s",
    "import_torch_s",
    "peak_rss_mb",
    "weight_bytes",
    "read_bandwidth_gb_s",
    "bandwidth_limit_fraction",
}
SMALL = ["--batch", "1,2", "--context", "8", "--steps", "2", "--prompt-len", "9"]
STARTS = [Start(4.0, 1.0), Start(9.0, 2.0), Start(5.0, 7.0)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_directory(tmp_path_factory.mktemp("bench") / "tiny")


DEFAULTS = {"device": "auto", "dtype": "auto", "kv_dtype": "auto", "kernels": None}


@pytest.fixture
def no_starts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """Starts that are not made, each of which takes seconds; what they were asked with."""
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(
        sys.modules["fuel_core.cli.bench"], "time_starts", lambda *args: asked.append(args) or STARTS
    )
    return asked


def run(*args: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(arg) for arg in args])
    return int(caught.value.code or 0)


def test_json_has_the_documented_keys(
    model: Path, no_starts: list[tuple[object, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("bench", model, *SMALL, "--json") == 0
    out, err = capsys.readouterr()
    shown = json.loads(out)
    assert set(shown) == KEYS
    assert set(shown["decode_tokens_per_s"]) == {"1", "2"}
    assert (shown["first_token_s"], shown["import_torch_s"]) == (5.0, 2.0)
    numbers = [*shown.pop("decode_tokens_per_s").values(), *shown.values()]
    assert all(number > 0 for number in numbers)
    assert err == ""
    assert no_starts == [(str(model), {**DEFAULTS, "threads": None})]


def test_the_table_has_every_figure_with_its_spread(
    model: Path, no_starts: list[tuple[object, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("bench", model, *SMALL) == 0
    out, _ = capsys.readouterr()
    for part in ("decode, 1 together", "decode, 2 together", "prompt", "5.00 s", "2.00 s", "MB", "GB/s", "%"):
        assert part in out
    assert out.count(" to ") >= 3
    assert "{" not in out


def test_figures_are_in_the_documented_units() -> None:
    report = Report(
        decode={1: Spread((10.0, 12.0, 11.0)), 8: Spread((50.0,))},
        prefill=Spread((300.0,)),
        weight_bytes=98_000_000,
        bandwidth=14e9,
        peak_bytes=250_000_000,
    )
    shown = figures_of(report, 0.5, STARTS)
    assert set(shown) == KEYS
    assert shown["decode_tokens_per_s"] == {"1": 11.0, "8": 50.0}
    assert (shown["prefill_tokens_per_s"], shown["load_s"], shown["weight_bytes"]) == (300.0, 0.5, 98_000_000)
    assert (shown["peak_rss_mb"], shown["read_bandwidth_gb_s"]) == (250.0, 14.0)
    assert shown["bandwidth_limit_fraction"] == pytest.approx(11 * 98 / 14_000)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--batch", "1,x"], "1,x"),
        (["--batch", ""], "batch ''"),
        (["--batch", "1;2"], "1;2"),
        (["--batch", "0"], "batch 0"),
        (["--batch", "4,4"], "batch 4, 4"),
        (["--context", "0"], "context 0"),
        (["--steps", "-1"], "steps -1"),
        (["--prompt-len", "0"], "prompt-len 0"),
        (["--threads", "0"], "0 threads"),
        (["--threads", "two"], "two"),
    ],
    ids=str,
)
def test_bad_options_are_refused_in_a_line_before_anything_is_loaded(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("bench", "/there/is/no/model", *options) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert said in err


def test_what_the_model_has_no_room_for_is_refused_before_the_starts(
    model: Path, no_starts: list[tuple[object, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("bench", model, "--context", 120, "--steps", 9, "--prompt-len", 8) == 2
    assert "129 tokens" in capsys.readouterr().err
    assert no_starts == []


def test_kernels_that_are_not_there_are_refused(
    model: Path, no_starts: list[tuple[object, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("bench", model, *SMALL, "--kernels", "no-such") == 2
    assert "no-such" in capsys.readouterr().err
    assert no_starts == []


def test_threads_are_those_of_the_run_and_of_the_starts(
    model: Path,
    no_starts: list[tuple[object, ...]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen: list[int] = []
    real = benchmark.measure
    monkeypatch.setattr(
        benchmark, "measure", lambda *args: seen.append(torch.get_num_threads()) or real(*args)
    )
    before = torch.get_num_threads()
    try:
        assert run("bench", model, *SMALL, "--threads", 3) == 0
    finally:
        torch.set_num_threads(before)
    assert seen == [3]
    assert no_starts == [(str(model), {**DEFAULTS, "threads": 3})]
    capsys.readouterr()


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys; from fuel_core.cli import main\n"
        "try: main(['bench', '--help'])\n"
        "except SystemExit as done: assert not done.code\n"
        "print('torch' in sys.modules, file=sys.stderr)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert ran.stderr.strip() == "False"
    assert "--prompt-len" in ran.stdout


# -- starts ----------------------------------------------------------------------------------------


def test_a_start_lasts_until_the_first_output(tmp_path: Path) -> None:
    """Not until the end: the process goes on until the clock has been read."""
    read = tmp_path / "read"
    code = (
        "import os, sys, time; print('x', flush=True)\n"
        "for _ in range(2000):\n"
        f"    if os.path.exists({str(read)!r}): sys.exit(print('y'))\n"
        "    time.sleep(0.01)\n"
        "sys.exit('nobody has read the clock')"
    )
    calls: list[float] = []

    def clock() -> float:
        calls.append(float(len(calls)))
        if len(calls) == 2:
            read.touch()
        return calls[-1]

    assert starts._first_output([sys.executable, "-c", code], clock) == 1.0


def test_a_start_that_fails_says_why() -> None:
    code = "import sys; print('first\\nthe reason', file=sys.stderr); sys.exit(3)"
    with pytest.raises(InvalidRequestError, match="ended with 3: the reason"):
        starts._first_output([sys.executable, "-c", code], lambda: 0.0)


def test_starts_of_both_kinds_take_turns_with_the_options_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def first_output(argv: list[str], clock: object) -> float:
        assert argv[argv.index("generate") :] == [
            *("generate", "--max-new-tokens", "1", "--device=cpu", "--kv-dtype=float32", "--threads=2"),
            *("--", "m", "The capital of France is"),
        ]
        calls.append("token")
        return float(len(calls))

    monkeypatch.setattr(starts, "_first_output", first_output)
    monkeypatch.setattr(starts, "_import_torch", lambda: calls.append("torch") or float(len(calls)))
    runtime = {"device": "cpu", "kv_dtype": "float32", "kernels": None, "threads": 2}
    assert starts.time_starts("m", runtime) == [Start(1, 2), Start(3, 4), Start(5, 6)]
    assert calls == ["token", "torch"] * 3


def test_the_import_is_timed_inside_a_process_of_its_own() -> None:
    assert 0 < starts._import_torch() < 600
