"""Sessions of the paged scheduler, what each does alone, and a model whose every paged call is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from support_models import CoreOnlyModel, Fault, distance
from support_paged import TOLERANCE, lone_rows, poison, same
from torch import Tensor

from fuel_core.contracts import DecodeSession, SamplingParams, hookimpl
from fuel_core.contracts.tiers import PagedDecodeModel
from fuel_core.kv import DeviceKvPool, KvBudget, PrefixId, SessionHandle
from fuel_core.layers import Decoder
from fuel_core.schedule import PagedDecodePlan, PagedSessionScheduler, SessionId


def paged_scheduler(
    model: PagedDecodeModel, *, block_size: int = 4, num_blocks: int = 64
) -> PagedSessionScheduler:
    """A paged scheduler on the CPU in float32, its pool poisoned."""
    scheduler = PagedSessionScheduler(model, KvBudget(block_size, num_blocks))
    poison(scheduler.pool)
    return scheduler


def drawn(seed: int | None) -> SamplingParams:
    """Greedy, or drawn by the logits: a stream that a change of them soon leaves."""
    return SamplingParams() if seed is None else SamplingParams(temperature=1.0, seed=seed)


def watched(
    scheduler: PagedSessionScheduler,
    prompt: Sequence[int],
    max_new: int,
    seed: int | None = None,
    *,
    prefix: PrefixId | None = None,
    eos_ids: Sequence[int] = (),
) -> SessionId:
    """Add a session whose logits are captured."""
    add = scheduler.add_session if prefix is None else partial(scheduler.add_session_sharing_prefix, prefix)
    id = add(prompt, drawn(seed), max_new_tokens=max_new, eos_ids=eos_ids)
    scheduler.capture_logits(id)
    return id


def taken(scheduler: PagedSessionScheduler, id: SessionId) -> Tensor:
    """The captured logits, ``[steps, vocab]``."""
    rows = scheduler.take_captured_logits(id)
    assert rows
    return torch.stack(rows)


@cache
def from_scratch(
    model: Decoder, prompt: tuple[int, ...], max_new: int, seed: int | None = None
) -> tuple[list[int], Tensor]:
    """New tokens and logits ``[max_new, vocab]`` of a session alone, which the contiguous cache confirms."""
    scheduler = paged_scheduler(model)
    id = watched(scheduler, prompt, max_new, seed)
    [(_, tokens)] = scheduler.run_to_completion()
    logits = taken(scheduler, id)
    confirmed = lone_rows(model, tuple(tokens[:-1]))[len(prompt) - 1 :]
    assert distance(logits, confirmed) < TOLERANCE / 10
    return tokens[len(prompt) :], logits


def assert_as_alone(
    scheduler: PagedSessionScheduler,
    id: SessionId,
    model: Decoder,
    prompt: tuple[int, ...],
    max_new: int,
    seed: int | None = None,
    *,
    within: float | None = None,
) -> None:
    """A session did what it does alone: the same tokens from the same logits, bit for bit or ``within``."""
    tokens, logits = from_scratch(model, prompt, max_new, seed)
    ours = taken(scheduler, id)
    assert same(ours, logits) if within is None else distance(ours, logits) < within
    assert scheduler.session_new_tokens(id) == tokens


class WalkingPagedModel(CoreOnlyModel, PagedDecodeModel):
    """A paged tier that keeps no bytes. Its argmax walks with the session's fill: a lost step shows.

    ``faults`` maps a token to what befalls the logits of a session that feeds it, in whatever arm.
    """

    def __init__(
        self, vocab: int = 64, max_context: int | None = None, faults: Mapping[int, Fault] | None = None
    ) -> None:
        super().__init__(vocab, max_context)
        self.faults = dict(faults or {})
        self.passes: list[tuple[str, tuple[int, ...]]] = []
        self.widths: list[int] = []

    def _advance_paged(self, token: int, pool: DeviceKvPool, session: SessionHandle) -> Tensor:
        pool.core.append(session, 1)
        row = torch.zeros(self.vocab)  # [vocab]
        row[pool.core.filled_tokens(session) % self.vocab] = 1.0
        return self.faults.get(token, lambda same: same)(row)

    @hookimpl
    def forward_paged_step(self, token: int, pool: Any, session: Any) -> Tensor:
        self.passes.append(("prefill", (token,)))
        return self._advance_paged(token, pool, session)

    @hookimpl
    def forward_paged_step_batched(self, tokens: Sequence[int], pool: Any, sessions: Sequence[Any]) -> Tensor:
        self.passes.append(("batched", tuple(tokens)))
        rows = [self._advance_paged(t, pool, s) for t, s in zip(tokens, sessions, strict=True)]
        return torch.stack(rows)

    @hookimpl
    def forward_paged_step_persistent(
        self,
        token: int,
        pool: Any,
        session: Any,
        max_blocks_cap: int,
        plan: PagedDecodePlan,
        decode_session: DecodeSession,
    ) -> Tensor:
        self.passes.append(("serial", (token,)))
        self.widths.append(max_blocks_cap)
        return self._advance_paged(token, pool, session)
