"""What a request must be, whoever serves it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence, Set
from numbers import Integral
from typing import Any

from fuel_core.contracts.errors import InvalidRequestError, counted
from fuel_core.contracts.sampling import SamplingParams, is_ordered


def check_tokens(ids: Sequence[object], vocab_size: int) -> None:
    """At least one id, each in ``[0, vocab_size)``.

    Raises:
        InvalidRequestError: no list of ids; of a list it names the first offender and its place.
    """
    if not isinstance(ids, list | tuple):
        ids = _listed(ids)
    if len(ids) == 0:
        raise InvalidRequestError(
            "a prompt of no tokens", needed="at least one token", remedy="give a longer prompt"
        )
    for place, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= int(token) < vocab_size:
            is_id = isinstance(token, Integral)
            raise InvalidRequestError(
                f"token id {token!r} at position {place}",
                needed=f"an id in [0, {vocab_size})",
                remedy="use the tokenizer that belongs to this model" if is_id else _ENCODE,
                token=token,
                place=place,
            )


_ENCODE = "encode text with the model's tokenizer, and chat messages with its encode_chat(messages)"


def _listed(ids: object) -> list[object]:
    if not is_ordered(ids) or not isinstance(ids, Collection):
        raise InvalidRequestError(
            f"a prompt of type {type(ids).__name__}", needed="a list of token ids", remedy=_ENCODE
        )
    return list(ids)


def eos_set(eos_ids: Iterable[object]) -> frozenset[int]:
    """The ids that end a session.

    Raises:
        InvalidRequestError: something else than token ids.
    """
    is_list = is_ordered(eos_ids) or isinstance(eos_ids, Set)
    ids: list[Any] | None = list(eos_ids) if is_list else None
    if ids is None or any(isinstance(token, bool) or not isinstance(token, Integral) for token in ids):
        raise InvalidRequestError(
            f"eos_ids = {eos_ids!r}",
            needed="a collection of token ids, empty for none",
            remedy="pass loaded.eos_ids, or a list of ids",
        )
    return frozenset(map(int, ids))


def check_context(total: int, max_context: int | None) -> None:
    """A length within the model's context; it is never cut to fit.

    Raises:
        InvalidRequestError: longer.
    """
    if max_context is not None and total > max_context:
        raise InvalidRequestError(
            f"{counted(total, 'token')} of prompt and output",
            needed=f"at most {max_context}, the model's context length",
            remedy="shorten the prompt or lower max_new_tokens",
            total=total,
            max_context=max_context,
        )


def check_lengths(sampling: SamplingParams, max_new_tokens: int) -> None:
    """A number of new tokens that can be generated.

    Raises:
        InvalidRequestError: says which length is wrong.
    """
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise InvalidRequestError(
            f"max_new_tokens = {max_new_tokens!r}",
            needed="an integer of at least 1",
            remedy="ask for one token or more",
        )
    if sampling.min_new_tokens > max_new_tokens:
        raise InvalidRequestError(
            f"min_new_tokens = {sampling.min_new_tokens}",
            needed=f"at most max_new_tokens = {max_new_tokens}",
            remedy="lower the one or raise the other",
        )


def check_sampling(sampling: object) -> None:
    """Parameters that whoever takes ids and gives ids can follow.

    Raises:
        InvalidRequestError: no SamplingParams, or some with stop strings, which only a text can hold.
    """
    if not isinstance(sampling, SamplingParams):
        raise InvalidRequestError(
            f"sampling of type {type(sampling).__name__}",
            needed="SamplingParams",
            remedy="pass SamplingParams(...)",
        )
    if sampling.stop:
        raise InvalidRequestError(
            f"stop = {sampling.stop!r}",
            needed="no stop strings where sessions are of token ids",
            remedy="pass them to fuel.generate or fuel.stream, or watch the text yourself and cancel",
            parameter="stop",
        )


def check_bias(sampling: SamplingParams, vocab_size: int) -> None:
    """A logit bias for tokens that exist.

    Raises:
        InvalidRequestError: names the first that does not.
    """
    for token in sampling.logit_bias:
        if token >= vocab_size:
            raise InvalidRequestError(
                f"logit_bias for token {token}",
                needed=f"ids in [0, {vocab_size})",
                remedy="use the tokenizer that belongs to this model",
                token=token,
            )


def check_request(
    prompt: Sequence[object],
    sampling: SamplingParams,
    max_new_tokens: int,
    *,
    vocab_size: int,
    max_context: int | None,
) -> None:
    """All of the above: what every scheduler asks of a request before it takes it.

    Raises:
        InvalidRequestError: says what is wrong.
    """
    check_tokens(prompt, vocab_size)
    check_sampling(sampling)
    check_lengths(sampling, max_new_tokens)
    check_bias(sampling, vocab_size)
    check_context(len(prompt) + max_new_tokens, max_context)
