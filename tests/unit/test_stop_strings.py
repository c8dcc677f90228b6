"""Stop strings are found across any pieces, and no part of one is emitted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fuel_core.contracts.errors import InvalidRequestError
from fuel_core.sampling import StopStrings

texts = st.text("abc", max_size=30)
stops = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)
cuts = st.lists(st.integers(0, 30), max_size=8)


def pieces(text: str, cuts: Sequence[int]) -> list[str]:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(bounds)]


def naive_cut(text: str, stop: Sequence[str], least: int = 0) -> tuple[str, bool]:
    """The definition, character by character: the first end, beyond ``least``, of a whole stop string."""
    for end in range(least + 1, len(text) + 1):
        whole = [one for one in stop if text[:end].endswith(one)]
        if whole:
            return text[: end - max(map(len, whole))], True
    return text, False


def naive_held(text: str, stop: Sequence[str]) -> int:
    """The length of the longest end of ``text`` that some stop string begins with."""
    return max(n for n in range(len(text) + 1) if n == 0 or any(s.startswith(text[-n:]) for s in stop))


def scan(scanner: StopStrings, chunks: Sequence[str]) -> tuple[str, bool]:
    emitted = "".join(scanner.feed(chunk)[0] for chunk in chunks)
    return emitted + scanner.flush(), scanner.stopped


@given(texts, stops, cuts)
@example("abab" + "abac", ["ababac"], [4])
@example("aabaabaac", ["aabaac"], [1, 2, 3])
def test_any_pieces_give_what_the_definition_gives(text: str, stop: list[str], cuts: list[int]) -> None:
    assert scan(StopStrings(stop), pieces(text, cuts)) == naive_cut(text, stop)


@given(texts, st.text("abc", min_size=1, max_size=5), cuts)
def test_one_stop_string_cuts_at_its_earliest_match(text: str, stop: str, cuts: list[int]) -> None:
    expected = text.partition(stop)[0]
    assert scan(StopStrings([stop]), pieces(text, cuts)) == (expected, stop in text)


@given(texts, stops, cuts)
def test_after_each_piece_all_is_out_but_what_a_stop_string_begins_with(
    text: str, stop: list[str], cuts: list[int]
) -> None:
    scanner, fed, emitted = StopStrings(stop), "", ""
    for piece in pieces(text, cuts):
        fed += piece
        out, stopped = scanner.feed(piece)
        emitted += out
        cut, expected = naive_cut(fed, stop)
        assert stopped == expected, "known as soon as the match is whole"
        assert emitted == (cut if stopped else fed[: len(fed) - naive_held(fed, stop)])


@given(texts, stops, cuts)
def test_what_was_emitted_holds_no_stop_string(text: str, stop: list[str], cuts: list[int]) -> None:
    emitted, _ = scan(StopStrings(stop), pieces(text, cuts))
    assert not any(one in emitted for one in stop)


@given(texts, stops, cuts, st.integers(0, 30))
@example("xababab", ["abab"], [5], 5)
@example("xababab", ["abab", "bab"], [5], 5)
@example("xEND", ["END"], [2], 2)
@example("aaaa", ["aa"], [1, 2, 3], 3)
def test_before_the_text_may_end_a_whole_match_is_text_and_one_that_began_there_counts(
    text: str, stop: list[str], cuts: list[int], least: int
) -> None:
    scanner, emitted = StopStrings(stop), ""
    for piece in pieces(text[:least], cuts):
        out, stopped = scanner.feed(piece, may_end=False)
        assert not stopped
        emitted += out
    for piece in pieces(text[least:], [max(0, cut - least) for cut in cuts]):
        emitted += scanner.feed(piece)[0]
    assert (emitted + scanner.flush(), scanner.stopped) == naive_cut(text, stop, min(least, len(text)))


def test_where_the_text_may_not_end_no_more_is_held_back_than_a_later_match_may_need() -> None:
    scanner = StopStrings(["abab", "xyz"])
    assert scanner.feed("abab", may_end=False) == ("ab", False)
    assert scanner.feed("xyz", may_end=False) == ("abxyz", False)
    assert scanner.feed("xy", may_end=False) == ("", False)
    assert scanner.feed("z") == ("", True)


def test_looking_into_each_piece_alone_would_emit_a_stop_string() -> None:
    chunks = ["see E", "ND of it"]
    assert "".join(scan(StopStrings(["END"]), [chunk])[0] for chunk in chunks) == "see END of it"
    assert scan(StopStrings(["END"]), chunks) == ("see ", True)


def test_the_match_that_is_whole_first_wins_though_a_longer_one_began_before_it() -> None:
    assert scan(StopStrings(["abcde", "c"]), ["xabcdey"]) == ("xab", True)
    assert scan(StopStrings(["abcde"]), ["xabcdey"]) == ("x", True)


def test_of_two_that_are_whole_at_once_the_longer_is_cut() -> None:
    assert scan(StopStrings(["c", "abc"]), ["xa", "bc"]) == ("x", True)


def test_a_false_start_is_emitted_as_soon_as_it_is_one() -> None:
    scanner = StopStrings(["<|end|>"])
    assert scanner.feed("a <|e") == ("a ", False)
    assert scanner.feed("x") == ("<|ex", False)
    assert scanner.flush() == ""


def test_a_false_start_may_hide_a_second_start() -> None:
    scanner = StopStrings(["aab"])
    assert scanner.feed("aa") == ("", False)
    assert scanner.feed("a") == ("a", False)
    assert scanner.feed("b!") == ("", True)


def test_what_is_held_comes_out_when_the_text_ends() -> None:
    scanner = StopStrings(["END"])
    assert scanner.feed("the EN") == ("the ", False)
    assert scanner.flush() == "EN"
    assert scanner.flush() == ""


def test_nothing_comes_out_after_a_stop() -> None:
    scanner = StopStrings(["END"])
    assert scanner.feed("a END b E") == ("a ", True)
    assert scanner.feed("more") == ("", True)
    assert scanner.flush() == ""


def test_without_stop_strings_everything_passes_at_once() -> None:
    assert scan(StopStrings([]), ["a", "", "b"]) == ("ab", False)


def test_stop_strings_are_characters_not_bytes() -> None:
    assert scan(StopStrings(["é🙂"]), ["né", "🙂!"]) == ("n", True)
    assert scan(StopStrings(["é🙂"]), ["né", "🙁!"]) == ("né🙁!", False)


def test_a_long_stop_string_that_keeps_failing_late_stays_linear() -> None:
    stop = "a" * 20_000 + "b"
    assert scan(StopStrings([stop]), ["a" * 10_000] * 10) == ("a" * 100_000, False)


def test_an_empty_stop_string_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError, match="stop = ") as refused:
        StopStrings(["a", ""])
    assert refused.value.parameter == "stop"
