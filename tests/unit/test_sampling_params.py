"""Sampling parameters accept their whole range, refuse what is outside it, and name the one at fault."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest

from fuel_core.contracts import FuelError, SamplingParams
from fuel_core.contracts.errors import InvalidRequestError

ACCEPTED = {
    "temperature": [0, 0.0, 1e-4, 0.7, 1e6],
    "top_k": [0, 1, 2**63 - 1],
    "top_p": [1e-300, 0.5, 1, 1.0],
    "min_p": [0, 0.0, 0.05, 1.0],
    "repetition_penalty": [1e-6, 0.5, 1, 1e6],
    "presence_penalty": [-1e6, -2, 0, 1e6],
    "frequency_penalty": [-1e6, -2, 0, 1e6],
    "logit_bias": [{}, {0: 1, 5: -0.5}, {3: -math.inf}],
    "seed": [None, 0, 2**64 - 1],
    "stop": [(), ("a",), ("a", "bc"), ("\ud7ff\ue000", "\U0001f642")],
    "min_new_tokens": [0, 1, 2**63 - 1],
    "ignore_eos": [False, True],
}

NOT_NUMBERS = [math.nan, math.inf, -math.inf, "1", None, True]
REFUSED = {
    "temperature": [-1e-9, 1e6 + 1, 10**400, *NOT_NUMBERS],
    "top_k": [-1, 2**63, 1.0, *NOT_NUMBERS],
    "top_p": [0, 0.0, -0.1, 1.0001, *NOT_NUMBERS],
    "min_p": [-1e-9, 1.0001, *NOT_NUMBERS],
    "repetition_penalty": [0, -1.0, 1e6 + 1, *NOT_NUMBERS],
    "presence_penalty": [-1e6 - 1, 1e6 + 1, *NOT_NUMBERS],
    "frequency_penalty": [-1e6 - 1, 1e6 + 1, *NOT_NUMBERS],
    "logit_bias": [
        {-1: 1.0},
        {"a": 1.0},
        {1.0: 1.0},
        {True: 1.0},
        {1: math.nan},
        {1: math.inf},
        {1: "x"},
        {1: 10**400},
        [(1, 2.0)],
        None,
    ],
    "seed": [-1, 2**64, 1.0, "1", True],
    "stop": [
        *("", [""], ["a", ""], 5, [1], [None], [["a"]], b"x", bytearray(b"x"), memoryview(b"x"), {"a": 1}),
        *("\ud800", ["a", "b\udfff"], "\udc00\ud800"),
    ],
    "min_new_tokens": [-1, 2**63, 1.0, *NOT_NUMBERS],
    "ignore_eos": [0, 1, "x", None],
}


def cases(table: dict[str, list[Any]]) -> list[Any]:
    return [pytest.param(name, value, id=f"{name}={value!r}") for name in table for value in table[name]]


@pytest.mark.parametrize(("name", "value"), cases(ACCEPTED))
def test_the_whole_range_is_accepted(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "value"), cases(REFUSED))
def test_a_value_outside_its_range_is_refused_by_the_name_of_its_parameter(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        SamplingParams(**{name: value})
    error = refused.value
    assert error.parameter == name
    assert name in error.given
    assert error.needed
    assert error.remedy
    assert "\n" not in str(error)
    assert isinstance(error, FuelError)


def test_every_parameter_is_in_these_tables() -> None:
    names = {field.name for field in attrs.fields(SamplingParams)}
    assert names == ACCEPTED.keys()
    assert names == REFUSED.keys()


def test_the_default_is_greedy_and_changes_no_logit() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0, 0, 1, 0)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1, 0, 0)
    assert (params.logit_bias, params.stop, params.min_new_tokens, params.ignore_eos) == ({}, (), 0, False)
    assert params.seed is None


def test_one_stop_string_is_not_taken_apart() -> None:
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_parameters_are_named_and_do_not_change() -> None:
    with pytest.raises(TypeError):
        SamplingParams(0.5)
    with pytest.raises(TypeError, match="tempratur"):
        SamplingParams(tempratur=0.5)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        SamplingParams().temperature = 1.0


def test_a_bias_that_its_caller_changes_later_stays_as_it_was_given() -> None:
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[-5] = math.nan
    assert params.logit_bias == {1: 2.0}


def test_no_stop_strings_may_be_given_as_none() -> None:
    assert SamplingParams(stop=None).stop == ()
