"""What ``--stats`` and ``--json`` make of the figures of a run."""

from __future__ import annotations

import pytest

from fuel_core.cli.generate import figures, rounded
from fuel_core.contracts import FinishReason
from fuel_core.engine import Completion, Timing


def ended(first: float, total: float, rate: float, *, tokens: int, prompt: int = 3) -> Completion:
    timing = Timing(first, total, rate)
    return Completion("", [7] * tokens, prompt, FinishReason.LENGTH, None, timing)


def test_of_one_prompt_they_are_its_own() -> None:
    one = ended(0.0524, 4.0, 12.345, tokens=48)
    assert figures([one], 2.718, 512.6) == (
        "load 2.72 s · first token 0.052 s · 12.3 tokens/s · 48 tokens · peak memory 513 MB"
    )


def test_of_many_prompts_they_are_of_all_from_start_to_end() -> None:
    many = [
        ended(0.5, 4.0, 99.0, tokens=10, prompt=3),
        ended(3.25, 8.0, 99.0, tokens=30, prompt=5),
        ended(0.0126, 2.0, 99.0, tokens=20, prompt=100),
    ]
    assert figures(many, 0.25, 1000.4) == (
        "load 0.250 s · first token min 0.013 s, median 0.500 s, max 3.25 s · 7.5 tokens/s · "
        "60 tokens from 108 prompt tokens · peak memory 1000 MB"
    )


def test_the_median_of_an_even_number_lies_between_the_two_in_the_middle() -> None:
    line = figures([ended(t, 20.0, 1.0, tokens=1) for t in (9.0, 2.0, 1.0, 4.0)], 1.0, 1.0)
    assert "first token min 1.00 s, median 3.00 s, max 9.00 s" in line


def test_a_prompt_that_never_got_a_token_has_no_time_of_one() -> None:
    line = figures([ended(0.0, 5.0, 0.0, tokens=0), ended(2.0, 4.0, 1.0, tokens=10)], 1.0, 1.0)
    assert "first token 2.00 s · 2.0 tokens/s · 10 tokens from 6 prompt tokens" in line


def test_prompts_that_all_failed_at_once_have_no_figures_and_no_fault() -> None:
    line = figures([ended(0.0, 0.0, 0.0, tokens=0)] * 2, 1.0, 1.0)
    assert "first token none · 0.0 tokens/s · 0 tokens from 6 prompt tokens" in line
    assert "first token none · 0.0 tokens/s · 0 tokens ·" in figures(
        [ended(0.0, 0.0, 0.0, tokens=0)], 1.0, 1.0
    )


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.0004, "0.000 s"), (0.9994, "0.999 s"), (1.0, "1.00 s"), (75.128, "75.13 s")]
)
def test_seconds_are_shown_to_a_thousandth_and_from_one_on_to_a_hundredth(seconds: float, shown: str) -> None:
    assert figures([ended(2.0, 3.0, 1.0, tokens=2)], seconds, 1.0).startswith(f"load {shown} · ")


def test_json_has_what_a_clock_can_tell_and_no_more_digits() -> None:
    assert rounded(Timing(0.123456789, 1.98765432, 45.678901), 2.71828182, 321.98765) == {
        "first_token_s": 0.1235,
        "total_s": 1.9877,
        "tokens_per_s": 45.7,
        "load_s": 2.7183,
        "peak_rss_mb": 322.0,
    }
