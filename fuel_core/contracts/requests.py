"""What a request must be, whoever serves it."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

from fuel_core.contracts.errors import InvalidRequestError
from fuel_core.contracts.sampling import SamplingParams


def check_tokens(ids: Sequence[object], vocab_size: int) -> None:
    """At least one id, each in ``[0, vocab_size)``.

    Raises:
        InvalidRequestError: names the first offender and its place.
    """
    if len(ids) == 0:
        raise InvalidRequestError(
            "a prompt of no tokens", needed="at least one token", remedy="give a longer prompt"
        )
    for place, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= int(token) < vocab_size:
            raise InvalidRequestError(
                f"token id {token!r} at position {place}",
                needed=f"an id in [0, {vocab_size})",
                remedy="use the tokenizer that belongs to this model",
                token=token,
                place=place,
            )


def check_context(total: int, max_context: int | None) -> None:
    """A length within the model's context; it is never cut to fit.

    Raises:
        InvalidRequestError: longer.
    """
    if max_context is not None and total > max_context:
        raise InvalidRequestError(
            f"{total} tokens of prompt and output",
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
    check_lengths(sampling, max_new_tokens)
    check_bias(sampling, vocab_size)
    check_context(len(prompt) + max_new_tokens, max_context)
