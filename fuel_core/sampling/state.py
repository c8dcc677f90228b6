"""What one session's sampling remembers from token to token."""

from __future__ import annotations

import math
import os
import random
from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from fuel_core.contracts.errors import InvalidRequestError
from fuel_core.contracts.requests import check_bias
from fuel_core.contracts.sampling import SamplingParams

Offsets: TypeAlias = tuple[Tensor, Tensor]


class TokenHistory:
    """The distinct tokens of a session and how often it generated each: what its penalties look at."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._slots = {token: slot for slot, token in enumerate(dict.fromkeys(prompt))}
        self._ids = array("q", self._slots)
        self._counts = array("q", bytes(8 * len(self._ids)))

    def record(self, token: int) -> None:
        slot = self._slots.setdefault(token, len(self._ids))
        if slot == len(self._ids):
            self._ids.append(token)
            self._counts.append(0)
        self._counts[slot] += 1

    def entries(self) -> tuple[Tensor, Tensor]:
        """The ids of prompt and output, and their counts in the output: int64 ``[n]`` each, on the CPU."""
        return torch.from_numpy(np.array(self._ids)), torch.from_numpy(np.array(self._counts))


class SamplerState:
    """One session's sampling: parameters, random stream, and what was generated.

    The stream is a Mersenne Twister of the standard library: all 64 bits of a seed count (torch's CPU
    generator drops the upper 32), and its sequence is the same in every version of Python.

    Args:
        params: how to sample.
        prompt: its ids; only a repetition penalty looks at them.
        eos_ids: masked until ``params.min_new_tokens`` are generated.
        vocab_size: the length of the session's logits.

    Attributes:
        seed: ``params.seed``, or the one drawn from the system where that is None.
        generated: how many tokens were recorded.
        history: for the penalties; None when there are none.

    Raises:
        InvalidRequestError: an id outside the vocabulary in ``logit_bias``, or in a prompt that is looked at.
    """

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], *, eos_ids: frozenset[int], vocab_size: int
    ) -> None:
        self.params, self.vocab_size, self.generated = params, vocab_size, 0
        self.seed = int.from_bytes(os.urandom(8), "little") if params.seed is None else params.seed
        self._random = random.Random(self.seed)
        check_bias(params, vocab_size)
        # An EOS beyond the vocabulary cannot be sampled: there is nothing to mask.
        ban = {eos: -math.inf for eos in eos_ids if 0 <= eos < vocab_size}
        self._offsets = _sparse(params.logit_bias)
        self._offsets_before_minimum = _sparse({**params.logit_bias, **ban})
        self.history = self._new_history(prompt) if _penalises(params) else None

    def _new_history(self, prompt: Sequence[int]) -> TokenHistory:
        prompt = prompt if self.params.repetition_penalty != 1 else ()
        _check_ids("prompt", prompt, self.vocab_size)
        return TokenHistory(prompt)

    @property
    def greedy(self) -> bool:
        """Whether the next token is the largest logit, and costs no random number."""
        return self.params.temperature == 0

    @property
    def offsets(self) -> Offsets | None:
        """What to add to the next logits: ids int64 ``[n]`` and float64 ``[n]`` on the CPU, or None."""
        early = self.generated < self.params.min_new_tokens
        return self._offsets_before_minimum if early else self._offsets

    @property
    def adjusts(self) -> bool:
        """Whether the next logits are changed by a bias, a penalty or a mask."""
        return self.history is not None or self.offsets is not None

    def uniform(self) -> float:
        """The next number of this session's stream: a multiple of 2**-53 in ``[0, 1)``."""
        return self._random.random()

    def record(self, token: int) -> None:
        """Count ``token`` as generated.

        Raises:
            InvalidRequestError: it is outside the vocabulary. Nothing is recorded.
        """
        _check_ids("token", (token,), self.vocab_size)
        self.generated += 1
        if self.history is not None:
            self.history.record(token)


def _penalises(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def _sparse(bias: Mapping[int, float]) -> Offsets | None:
    if not bias:
        return None
    values = torch.tensor([float(value) for value in bias.values()], dtype=torch.float64)
    return torch.tensor(list(bias), dtype=torch.int64), values


def _check_ids(name: str, ids: Collection[int], vocab_size: int) -> None:
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return
    bad = min(ids) if min(ids) < 0 else max(ids)
    raise InvalidRequestError(
        f"{name} holds the token {bad}",
        needed=f"ids in [0, {vocab_size})",
        remedy="encode the text with this model's own tokenizer",
        parameter=name,
        token=bad,
        vocab_size=vocab_size,
    )
