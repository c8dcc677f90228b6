"""A worker answers a line for a line, and what becomes of it is known by its reason."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import support_bench  # noqa: F401 (makes the next ones importable)
from comparison.roster import Absent
from comparison.workers import Worker
from protocol import answer, prompt, serve
from support_bench import write_worker


class Stub:
    """A peer whose times are known."""

    about: dict[str, Any] = {"version": "7"}  # noqa: RUF012

    def decode(self, contexts: list[int], steps: int) -> float:
        if contexts == [0]:
            raise ValueError("no\nsuch context")
        return 2.0

    def prefill(self, length: int) -> float:
        return 4.0


def said(load: Callable[[], Any], *questions: dict[str, Any]) -> list[dict[str, Any]]:
    out = io.StringIO()
    serve(load, io.StringIO("".join(json.dumps(question) + "\n" for question in questions)), out)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_rates_count_every_session() -> None:
    decoded = answer(Stub(), {"op": "decode", "contexts": [5, 5, 5], "steps": 8})
    assert decoded == {"tokens_per_s": 12.0, "seconds": 2.0, "tokens": 24}
    assert answer(Stub(), {"op": "prefill", "length": 100})["tokens_per_s"] == 25.0


def test_a_worker_answers_on_after_an_error() -> None:
    bad = {"op": "decode", "contexts": [0], "steps": 1}
    ready, *answers = said(Stub, bad, {"op": "no_such"}, {"op": "prefill", "length": 8})
    assert ready["ready"]
    assert ready["about"] == {"version": "7"}
    assert answers[0] == {"error": "ValueError: no such context"}
    assert "no_such" in answers[1]["error"]
    assert answers[2]["tokens_per_s"] == 2.0


def test_a_worker_that_cannot_load_says_so_and_ends() -> None:
    def load() -> Stub:
        raise OSError("no library")

    assert said(load, {"op": "prefill", "length": 8}) == [{"error": "OSError: no library"}]


def test_prompts_are_within_the_vocabulary_and_differ_by_their_salt() -> None:
    assert prompt(1000, 96) == prompt(1000, 96)
    assert set(prompt(1000, 96)) == set(range(96))
    assert len({tuple(prompt(16, 32_000, salt)) for salt in range(2000)}) == 2000


# -- worker processes ------------------------------------------------------------------------------


@pytest.fixture
def worker(tmp_path: Path) -> Any:
    opened: list[Worker] = []

    def make(body: str, patience: float = 120) -> Worker:
        command = write_worker(tmp_path / "worker.py", body)
        opened.append(Worker(command, threads=3, log=tmp_path / "log", patience=patience))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def test_what_a_library_prints_is_no_answer(worker: Callable[..., Worker], tmp_path: Path) -> None:
    """Not even what it writes to the descriptor itself; it goes to the log."""
    one = worker("""
    def prefill(self, length):
        print('chatter')
        os.write(1, b'raw chatter')
        return float(os.environ['OMP_NUM_THREADS'])
    """)
    assert one.about["version"] == "1"
    assert one.ask({"op": "prefill", "length": 6})["tokens_per_s"] == 2.0
    assert "chatter" in (tmp_path / "log").read_text()


def test_a_worker_that_dies_is_named_with_its_last_words(worker: Callable[..., Worker]) -> None:
    one = worker("""
    def prefill(self, length):
        print('first', file=sys.stderr); print('out of luck', file=sys.stderr, flush=True)
        os._exit(9)
    """)
    for _ in range(2):
        with pytest.raises(Absent, match="ended with 9: out of luck"):
            one.ask({"op": "prefill", "length": 6})


def test_a_question_that_a_worker_cannot_answer_is_no_end_of_it(worker: Callable[..., Worker]) -> None:
    one = worker("""
    def prefill(self, length): return 2.0
    def decode(self, contexts, steps): raise ValueError('not that long')
    """)
    with pytest.raises(Absent, match="ValueError: not that long"):
        one.ask({"op": "decode", "contexts": [9], "steps": 1})
    assert one.ask({"op": "prefill", "length": 6})["tokens_per_s"] == 3.0


def test_a_worker_that_takes_too_long_is_given_up(worker: Callable[..., Worker]) -> None:
    one = worker("def prefill(self, length): time.sleep(1000)", patience=30)
    one._patience = 0.2
    with pytest.raises(Absent, match="no answer within 0 s"):
        one.ask({"op": "prefill", "length": 6})
    with pytest.raises(Absent, match="ended with -9"):
        one.ask({"op": "prefill", "length": 6})


def test_a_worker_that_does_not_start_is_absent(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import no_such_module_at_all"]
    with pytest.raises(Absent, match=r"ended with 1: .*no_such_module_at_all"):
        Worker(command, threads=1, log=tmp_path / "log", patience=120)
