"""One generation stream: its tokens, cache, sampler and phase. It shares nothing with any other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NewType

import torch
from torch import Tensor

from fuel_core.contracts.requests import check_lengths, check_sampling, check_tokens, eos_set
from fuel_core.contracts.sampling import FinishReason, SamplingParams
from fuel_core.contracts.session import DecodeSession
from fuel_core.contracts.state import ModelDims
from fuel_core.kv.cache import KvCache
from fuel_core.sampling import SamplerState, sample

SessionId = NewType("SessionId", int)


class SessionPhase(Enum):
    """Where a session is: its prompt has not run, it decodes, or it is done."""

    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


class Session:
    """What every session is, wherever its keys and values are.

    Attributes:
        id: its identity within a scheduler.
        tokens: prompt and generated ids, an EOS included.
        prompt_len: how many of them are the prompt.
        phase: what happens to it next.
        finish_reason, error: set when it finishes; ``error`` only for ``FinishReason.ERROR``.
        eos_ids: ids that end it; empty means none.
        remaining: tokens that it may still generate.
        decode_session: the model's own holder.
        last_logits: float32 ``[vocab]`` waiting to be sampled, or None.

    Raises:
        InvalidRequestError: an empty prompt, an id outside the vocabulary, stop strings, or
            ``max_new_tokens`` below 1 or below ``min_new_tokens``.
    """

    def __init__(
        self,
        id: SessionId,
        vocab_size: int,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        eos_ids: Iterable[int] = (),
        max_new_tokens: int,
    ) -> None:
        check_tokens(prompt, vocab_size)
        check_sampling(sampling)
        check_lengths(sampling, max_new_tokens)
        self.id = id
        self.tokens = list(prompt)
        self.prompt_len = self._read = len(prompt)
        self.phase = SessionPhase.PREFILL
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None
        self.eos_ids = eos_set(eos_ids)
        self.remaining = max_new_tokens
        self.sampler = SamplerState(sampling, prompt, eos_ids=self.eos_ids, vocab_size=vocab_size)
        self.decode_session = DecodeSession()
        self.last_logits: Tensor | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it can still advance."""
        return self.phase is not SessionPhase.FINISHED

    @property
    def new_tokens(self) -> list[int]:
        """The generated tail."""
        return self.tokens[self.prompt_len :]

    def take_unread(self) -> list[int]:
        """The tokens generated since this was last asked: what a stream has not shown yet."""
        unread, self._read = self.tokens[self._read :], len(self.tokens)
        return unread

    def sample_and_append(self) -> int | None:
        """Sample ``last_logits`` and take the token; None where there is nothing to sample.

        Raises:
            SamplingError: the logits hold NaN or nothing finite. They stay, and no token is taken.
        """
        if self.last_logits is None or not self.is_ready:
            return None
        token = sample(self.last_logits[None], [self.sampler])[0]
        if isinstance(token, Exception):
            raise token
        self.last_logits = None
        self.append(token)
        return token

    def append(self, token: int) -> None:
        """Take a sampled token, and finish at an EOS or when the budget is spent."""
        self.tokens.append(token)
        self.remaining -= 1
        self.proceed()

    def proceed(self) -> None:
        """Be in the phase that follows from the last token, which was sampled, and from what remains."""
        if self.tokens[-1] in self.eos_ids and not self.sampler.params.ignore_eos:
            self.finish(FinishReason.STOP)
        elif self.remaining == 0:
            self.finish(FinishReason.LENGTH)
        else:
            self.phase = SessionPhase.DECODE

    def finish(self, reason: FinishReason, error: Exception | None = None) -> None:
        """End the session; the first reason stands."""
        if self.is_ready:
            self.phase, self.finish_reason, self.error = SessionPhase.FINISHED, reason, error
            self.last_logits = None


class SessionState(Session):
    """A session with a contiguous cache of its own, with room for prompt and output.

    Raises:
        InvalidRequestError: as :class:`Session`.
        CapacityError: no memory for the cache.
    """

    def __init__(
        self,
        id: SessionId,
        dims: ModelDims,
        vocab_size: int,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        eos_ids: Iterable[int] = (),
        max_new_tokens: int,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(id, vocab_size, prompt, sampling, eos_ids=eos_ids, max_new_tokens=max_new_tokens)
        self.cache = KvCache(
            dims.n_layers,
            dims.n_kv_heads,
            dims.head_dim,
            len(prompt) + max_new_tokens,
            dtype=dtype,
            device=device,
        )
