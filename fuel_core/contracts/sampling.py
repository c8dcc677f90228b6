"""How a session chooses its next token, and when it stops."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from enum import Enum
from typing import Any

import attrs

from fuel_core.contracts.errors import InvalidRequestError


class FinishReason(str, Enum):
    """Why a session stopped: an EOS or stop string, its length, an error, or its caller."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"
    CANCELLED = "cancelled"

    def __str__(self) -> str:
        return self.value


def _within(low: float, high: float, *, open_low: bool = False) -> Any:
    """An attrs validator: a finite number of the interval (``open_low``: without its lower end)."""

    def check(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        # Compared as it is: an integer may be too large for a float, and NaN is inside nothing.
        number = isinstance(value, int | float) and not isinstance(value, bool)
        inside = number and low <= value <= high and (value > low or not open_low)
        if not inside:
            bound = f"a number in {'(' if open_low else '['}{low:g}, {high:g}]"
            raise InvalidRequestError(
                f"{attribute.name} = {value!r}",
                needed=bound,
                remedy=f"change {attribute.name}",
                parameter=attribute.name,
            )

    return check


def _integer(low: int, high: int) -> Any:
    """An attrs validator: an integer in ``[low, high]``."""

    def check(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise InvalidRequestError(
                f"{attribute.name} = {value!r}",
                needed=f"an integer in [{low}, {high}]",
                remedy=f"change {attribute.name}",
                parameter=attribute.name,
            )

    return check


_NO_LISTS = (str, bytes, bytearray, memoryview, Mapping, Set)


def is_ordered(value: object) -> bool:
    """Whether a value is a list of some kind: it has entries, in an order, and is no text."""
    if not isinstance(value, Iterable) or isinstance(value, _NO_LISTS):
        return False
    # An array without a dimension can be iterated by its type alone.
    return bool(getattr(value, "ndim", 1) != 0)


def _stop_tuple(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return tuple(value) if is_ordered(value) or isinstance(value, Set) else (value,)


def _stop_texts(_: object, __: object, value: tuple[Any, ...]) -> None:
    for text in value:
        # A surrogate alone is no character, so no text holds one.
        if not isinstance(text, str) or not text or any("\ud800" <= each <= "\udfff" for each in text):
            raise InvalidRequestError(
                f"stop = {value!r}",
                needed="strings of at least one character, and of whole characters alone",
                remedy="pass one string, or a list of them, none empty and none with a lone surrogate",
                parameter="stop",
            )


def _bias_copy(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _bias(_: object, __: object, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise _bad_bias(repr(value))
    for token, bias in value.items():
        number = isinstance(bias, int | float) and (-1e30 <= bias <= 1e30 or bias == -math.inf)
        if isinstance(token, bool) or not isinstance(token, int) or token < 0 or not number:
            raise _bad_bias(f"entry {token!r}: {bias!r}")


def _bad_bias(given: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"logit_bias {given}",
        needed="a mapping of token ids to numbers of at most 1e30 (-inf bans the token)",
        remedy="change logit_bias",
        parameter="logit_bias",
    )


def _boolean(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidRequestError(
            f"{attribute.name} = {value!r}",
            needed="True or False",
            remedy="change it",
            parameter=attribute.name,
        )


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How a session samples. The default is greedy.

    Attributes:
        temperature: 0 is greedy; logits are divided by it.
        top_k: keep the k largest logits; 0, or more than the vocabulary, keeps all.
        top_p: keep the smallest set of most probable tokens whose mass reaches top_p.
        min_p: drop tokens less probable than min_p times the most probable one.
        repetition_penalty: divides positive and multiplies negative logits of tokens seen in
            prompt or output (CTRL, arXiv:1909.05858).
        presence_penalty: subtracted once from the logit of every token generated so far.
        frequency_penalty: subtracted once per occurrence among the generated tokens.
        logit_bias: token id -> number added to its logit; -inf bans it.
        seed: of the session's own generator; None draws one from the system.
        stop: strings that end the text, for ``fuel.generate`` and its siblings, which emit no part of them. A
            scheduler or an engine knows ids alone, and refuses them.
        min_new_tokens: neither EOS nor a stop string ends the session before this many tokens.
        ignore_eos: generate past EOS.

    Raises:
        InvalidRequestError: a value outside its range, naming the parameter.
    """

    temperature: float = attrs.field(default=0.0, validator=_within(0, 1e6))
    top_k: int = attrs.field(default=0, validator=_integer(0, 2**63 - 1))
    top_p: float = attrs.field(default=1.0, validator=_within(0, 1, open_low=True))
    min_p: float = attrs.field(default=0.0, validator=_within(0, 1))
    repetition_penalty: float = attrs.field(default=1.0, validator=_within(0, 1e6, open_low=True))
    presence_penalty: float = attrs.field(default=0.0, validator=_within(-1e6, 1e6))
    frequency_penalty: float = attrs.field(default=0.0, validator=_within(-1e6, 1e6))
    logit_bias: Mapping[int, float] = attrs.field(factory=dict, converter=_bias_copy, validator=_bias)
    seed: int | None = attrs.field(default=None, validator=attrs.validators.optional(_integer(0, 2**64 - 1)))
    stop: tuple[str, ...] = attrs.field(default=(), converter=_stop_tuple, validator=_stop_texts)
    min_new_tokens: int = attrs.field(default=0, validator=_integer(0, 2**63 - 1))
    ignore_eos: bool = attrs.field(default=False, validator=_boolean)
