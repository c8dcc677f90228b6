"""``bench/compare.py`` asks everyone by turns, and hides nobody who is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import support_bench  # noqa: F401 (makes the next ones importable)
from compare import chosen, measure, start, turns, weights_of
from comparison.cases import Case
from comparison.report import Results, rates_table, ratios_table, remarks
from comparison.roster import FUEL, FUEL_FLOAT, ROSTER, Absent, Participant
from support_bench import BENCH, write_worker
from support_checkpoints import write_directory

from fuel_core.contracts.errors import InvalidRequestError

PEER = Participant("Peer", "peer.py", "peer", "gguf")
OTHER = Participant("Other", "other.py", "other", "float32")
BATCH = Case("batch", (128,) * 4, 24)
PROMPT = Case("prompt", (512,))
RAGGED = Case("ragged", (16, 32), 24, ours=True)
STEADY = """
def decode(self, contexts, steps): return 2.0
def prefill(self, length): return 4.0
"""
FUELISH = STEADY + "def machine(self): return {'bytes_per_s': 1000.0, 'operations_per_s': 10.0}\n"


@attrs.define(eq=False)
class Told:
    """A worker that is not a process: rates by question and call, and everyone's calls in one list."""

    name: str
    calls: list[str]
    rate: Callable[[int], float] = float
    fails: int | None = None
    asked: int = 0

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        if question["op"] == "machine":
            return {"bytes_per_s": 1000.0 + self.asked}
        self.calls.append(self.name)
        self.asked += 1
        if self.asked == self.fails:
            raise Absent("broken")
        return {"tokens_per_s": self.rate(self.asked)}


def told(*names: str, **options: Any) -> tuple[dict[Participant, Any], list[str]]:
    calls: list[str] = []
    known = {each.name: each for each in (FUEL, FUEL_FLOAT, PEER, OTHER)}
    return {known[name]: Told(name, calls, **options) for name in names}, calls


def test_everyone_is_asked_by_turns_and_the_first_answer_is_not_kept() -> None:
    workers, calls = told("Fuel", "Peer", "Other")
    results, pauses = Results(), list[int]()
    measure(workers, [BATCH], 3, results, lambda: pauses.append(len(calls)))
    rounds = [calls[i : i + 3] for i in range(0, 12, 3)]
    assert all(sorted(each) == ["Fuel", "Other", "Peer"] for each in rounds)
    assert len({each[0] for each in rounds[1:]}) == 3, "each round another begins"
    assert results.rates[BATCH]["Peer"] == {0: 2.0, 1: 3.0, 2: 4.0}
    assert [each["bytes_per_s"] for each in results.machine[BATCH].values()] == [1002.0, 1003.0, 1004.0]
    assert pauses == list(range(12))


def test_a_question_for_fuel_alone_is_put_to_no_peer() -> None:
    workers, calls = told("Fuel", "Fuel float32", "Peer")
    measure(workers, [RAGGED], 2, Results(), lambda: None)
    assert set(calls) == {"Fuel", "Fuel float32"}


def test_one_who_fails_is_reported_and_asked_the_next_case() -> None:
    calls: list[str] = []
    workers: dict[Participant, Any] = {FUEL: Told("Fuel", calls), PEER: Told("Peer", calls, fails=2)}
    results = Results()
    measure(workers, [BATCH, PROMPT], 3, results, lambda: None)
    assert results.errors[BATCH] == {"Peer": "broken"}
    assert "Peer" not in results.rates[BATCH]
    assert len(results.rates[BATCH]["Fuel"]) == len(results.rates[PROMPT]["Peer"]) == 3
    assert any("Peer failed at B=4, context 128: broken" in line for line in remarks(results))
    assert [row[1:] for row in rates_table(results, ["Fuel", "Peer"])[1]] == [["3", "failed"], ["7", "5"]]
    assert ratios_table(results, "Fuel", ["Peer"])[1][0] == ["B=4, context 128", "-", "-"]


def test_nobody_who_is_missing_is_passed_over_in_silence(tmp_path: Path) -> None:
    """No environment, or a worker that dies: each stands in the table and under it, with its reason."""
    commands = {
        FUEL: write_worker(tmp_path / "fuel.py", FUELISH),
        PEER: [sys.executable, "-c", "raise SystemExit('no wheel')"],
    }

    def command(who: Participant) -> list[str]:
        return commands[who] if who in commands else who.command(tmp_path, {}, 2)

    results = Results()
    workers = start([FUEL, PEER, OTHER], command, results, threads=2, logs=tmp_path, patience=120)
    try:
        assert list(workers) == [FUEL]
        measure(workers, [BATCH], 2, results, lambda: None)
    finally:
        for each in workers.values():
            each.close()
    assert "no wheel" in results.absent["Peer"]
    assert "bench/peers.sh" in results.absent["Other"]
    _, rows = rates_table(results, ["Fuel", "Peer", "Other"])
    assert rows == [["B=4, context 128", "48", "absent", "absent"]]
    text = "\n".join(remarks(results))
    assert "Peer is absent" in text
    assert "Other is absent" in text
    assert set(results.document()["absent"]) == {"Peer", "Other"}


def test_turns_of_nobody_are_none() -> None:
    assert turns([], 3) == []


def test_a_roster_can_be_chosen_from() -> None:
    assert chosen(None) == list(ROSTER)
    assert [each.name for each in chosen("Fuel, llama.cpp")] == ["Fuel", "llama.cpp"]
    with pytest.raises(InvalidRequestError, match=r"nobody is called 'llama'.*llama\.cpp"):
        chosen("llama")


def test_every_worker_is_a_script_and_every_environment_is_made(tmp_path: Path) -> None:
    script = (BENCH / "peers.sh").read_text()
    for who in ROSTER:
        assert (BENCH / "peers" / who.worker).is_file()
        assert who.environment is None or f"{who.environment})" in script
    assert {who.name for who in ROSTER if not who.rival} == {"Fuel", "Fuel float32"}
    assert FUEL.command(tmp_path, {"gguf": Path("m.gguf")}, 2)[2:] == ["--model", "m.gguf", "--threads", "2"]


def test_who_reads_gguf_files_cannot_take_part_on_a_directory(tmp_path: Path) -> None:
    weights = weights_of(str(write_directory(tmp_path / "m")))
    assert weights["float32"] == tmp_path / "m"
    with pytest.raises(Absent, match="reads GGUF files"):
        FUEL.command(tmp_path, weights, 1)
    assert str(tmp_path / "m") in FUEL_FLOAT.command(tmp_path, weights, 1)


def test_weights_that_cannot_be_dequantized_leave_the_others_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUEL_CACHE", str(tmp_path))
    broken = tmp_path / "m.gguf"
    broken.write_bytes(b"no model")
    weights = weights_of(str(broken), python=write_failing(tmp_path))
    assert weights["gguf"] == broken
    with pytest.raises(Absent, match="no dequantized weights: no gguf library"):
        FUEL_FLOAT.command(tmp_path, weights, 1)


def write_failing(folder: Path) -> str:
    """A Python that only fails."""
    path = folder / "python"
    path.write_text("#!/bin/sh\necho no gguf library >&2\nexit 1\n")
    path.chmod(0o755)
    return str(path)


def test_a_run_without_anybody_says_why_and_fails(tmp_path: Path) -> None:
    """What there is to say is written all the same."""
    folder = write_directory(tmp_path / "m")
    options = ["--only", "llama.cpp,vLLM", "--model", folder, "--peers", tmp_path, "--out", tmp_path / "out"]
    command = [sys.executable, BENCH / "compare.py", *options, "--no-plot"]
    ran = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1] == "compare: nobody could take part"
    written = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert set(written["absent"]) == {"llama.cpp", "vLLM"}
    for reason in written["absent"].values():
        assert reason in ran.stdout
