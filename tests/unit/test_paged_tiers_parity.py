"""However a session is served, its logits are the same: each condition alone, and in pairs.

Bit for bit where the arithmetic is the same, within 1e-4 where a batch or a chunk reduces in another order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from itertools import combinations, cycle

import pytest
import torch
from support_models import distance
from support_paged import (
    BLOCK_SIZES,
    FAMILIES,
    TOLERANCE,
    every_family,
    ids,
    lone_rows,
    model_of,
    opened,
    paged_rows,
    planned_rows,
    poison_free,
    pool_for,
    ragged,
    same,
)
from torch import Tensor

from fuel_core.contracts import DecodeSession
from fuel_core.kv import DeviceEvicted
from fuel_core.layers import Decoder
from fuel_core.schedule import PagedDecodePlan

ARMS = ("plan-once", "replan", "batched", "ragged mix")
SIZES = {**{f"blocks of {size}": size for size in BLOCK_SIZES}, "blocks beyond any prompt": 64}
CONDITIONS = ("alone", "in company", "chunked", "shared", "forked", "evicted", "permuted", *ARMS, *SIZES)
INEXACT = {"chunked", "batched", "ragged mix"}
TAIL = ids(5, 77)


class Serving:
    """One session of a model, served under some conditions. Every row of logits is kept with its position."""

    def __init__(self, model: Decoder, conditions: Iterable[str], prompt: tuple[int, ...], seed: int) -> None:
        self.model, self.on, self.prompt, self.seed = model, set(conditions), prompt, seed
        self.size = next((SIZES[name] for name in SIZES if name in self.on), 4)
        self.pool = pool_for(model, 256, self.size, shuffled=seed if "permuted" in self.on else None)
        self.session, self.holder = self.pool.core.open(), DecodeSession()
        self.other = self.pool.core.open()
        self.rows: list[tuple[int, Tensor]] = []
        self.happened: set[str] = set()

    def run(self) -> Serving:
        """The prompt, and then tokens that do not depend on the logits."""
        self.begin()
        fed = self.pool.core.filled_tokens(self.session)
        chunk = 1 + self.seed % len(self.prompt) if "chunked" in self.on else 1
        for start in range(fed, len(self.prompt), chunk):
            tokens = self.prompt[start : start + chunk]
            self.call(lambda tokens=tokens: self.feed(tokens), len(tokens))  # type: ignore[misc]
        arms = [arm for arm in ARMS if arm in self.on] or ["step"]
        for turn, token in enumerate(TAIL):
            arm = arms[turn % len(arms)]
            self.call(lambda arm=arm, token=token: self.decode(arm, token), 1)  # type: ignore[misc]
        return self

    def begin(self) -> None:
        """What it has before its own first token: a shared prefix, or what it was forked from."""
        whole = (len(self.prompt) - 1) // self.size * self.size
        if "shared" in self.on and whole:
            donor = self.pool.core.open()
            paged_rows(self.model, self.pool, donor, self.prompt[:whole])
            prefix = self.pool.core.register_prefix(donor, whole)
            self.pool.core.splice_prefix_from(prefix, self.session)
            self.other = donor  # goes on
            self.happened.add("shared")
        elif "forked" in self.on and len(self.prompt) > 1:
            source = self.pool.core.open()
            paged_rows(self.model, self.pool, source, self.prompt[:-1])
            slots = len(self.pool.core.session_blocks(source))
            self.pool.core.splice(source, self.session, 0, slots)
            self.other = source
            self.happened.add("forked")

    def call(self, forward: Callable[[], Tensor], tokens: int) -> None:
        """One call, and what the conditions want around it."""
        if "evicted" in self.on and self.pool.core.filled_tokens(self.session):
            evicted, filler = self.pool.evict(self.session), opened(self.pool, 1)
            poison_free(self.pool)
            self.restore(evicted)
            self.pool.core.discard(filler)
            self.happened |= {"evicted"} if evicted.saved_block_count else set()
        if self.on & {"in company", "shared", "forked"}:
            self.model.forward_paged_step(len(self.rows), self.pool, self.other)
            self.happened.add("in company")
        place = self.pool.core.filled_tokens(self.session) + tokens - 1
        self.rows.append((place, forward()))

    def restore(self, evicted: DeviceEvicted) -> None:
        """Bring the session back."""
        self.pool.restore(self.session, evicted)

    def feed(self, tokens: tuple[int, ...]) -> Tensor:
        """A part of the prompt; logits ``[vocab]``."""
        if len(tokens) == 1 and "ragged mix" not in self.on:
            return self.model.forward_paged_step(tokens[0], self.pool, self.session)
        self.happened |= {"chunked"} if len(tokens) > 1 else set()
        return self.mixed(tokens) if "ragged mix" in self.on else self.ragged(tokens)

    def decode(self, arm: str, token: int) -> Tensor:
        """A token after the prompt; logits ``[vocab]``."""
        self.happened.add(arm)
        if arm == "step":
            return self.model.forward_paged_step(token, self.pool, self.session)
        if arm == "batched":
            return self.batched(token)
        if arm == "ragged mix":
            return self.mixed((token,))
        plan = PagedDecodePlan(arm)
        return planned_rows(self.model, self.pool, self.session, [token], self.holder, plan, width=64)[0]

    def ragged(self, tokens: tuple[int, ...]) -> Tensor:
        return ragged(self.model, self.pool, {self.session: tokens})[0]

    def mixed(self, tokens: tuple[int, ...]) -> Tensor:
        """Between another's prompt and another's single token."""
        before, after = self.pool.core.open(), self.pool.core.open()
        row = ragged(self.model, self.pool, {before: ids(6, 5), self.session: tokens, after: (3,)})[1]
        self.close(before, after)
        return row

    def batched(self, token: int) -> Tensor:
        """Beside two others at the same position."""
        fill = self.pool.core.filled_tokens(self.session)
        beside = [self.pool.core.open() for _ in range(2)]
        ragged(self.model, self.pool, {s: ids(fill, s) for s in beside})
        sessions = [beside[0], self.session, beside[1]]
        row = self.model.forward_paged_step_batched([7, token, 8], self.pool, sessions)[1]
        self.close(*beside)
        return row

    def close(self, *sessions: int) -> None:
        for session in sessions:
            self.pool.core.discard(session)  # type: ignore[arg-type]
        poison_free(self.pool)

    def apart(self) -> float:
        """How far the logits are from those of the tokens alone in a cache; 0 if every bit is the same."""
        places, rows = zip(*self.rows, strict=True)
        ours, theirs = torch.stack(rows), lone_rows(self.model, self.prompt + TAIL)[list(places)]
        return 0.0 if same(ours, theirs) else distance(ours, theirs)

    def check(self) -> None:
        """As near as the conditions allow."""
        assert [place for place, _ in self.rows][-1] == len(self.prompt) + len(TAIL) - 1
        assert self.apart() <= (TOLERANCE if self.on & INEXACT else 0.0)


def lengths(conditions: Iterable[str]) -> tuple[int, ...]:
    """Prompts of one token, about a block, and two blocks; or of no whole block."""
    size = next((SIZES[name] for name in SIZES if name in conditions), 4)
    if size > max(BLOCK_SIZES):
        return 1, 5, 13
    return tuple(sorted({1, max(1, size - 1), size, size + 1, 2 * size}))


@every_family
@pytest.mark.parametrize("condition", CONDITIONS)
def test_each_condition_alone_changes_nothing(condition: str, family: str) -> None:
    happened = set()
    for length in lengths([condition]):
        serving = Serving(model_of(family), [condition], ids(length, length), 6).run()
        serving.check()
        happened |= serving.happened
    assert condition in happened | {"alone", "permuted", *SIZES}


def pairs() -> list[tuple[str, str, str, int]]:
    """Random pairs of conditions, dealt out to the families in turn, with a seed; no pair is drawn twice."""
    chance = random.Random(11)
    every = [
        (one, other)
        for one, other in combinations(CONDITIONS[1:], 2)
        if not {one, other} <= set(SIZES) and {one, other} != {"shared", "forked"}
    ]
    drawn = zip(chance.sample(every, 8 * len(FAMILIES)), cycle(FAMILIES), strict=False)
    return [(*pair, family, chance.randrange(100)) for pair, family in drawn]


@pytest.mark.parametrize(("one", "other", "family", "seed"), pairs())
def test_two_conditions_together_change_nothing(one: str, other: str, family: str, seed: int) -> None:
    for length in lengths([one, other])[-2:]:
        Serving(model_of(family), [one, other], ids(length, length), seed).run().check()


def test_every_condition_and_family_is_in_some_pair() -> None:
    assert {name for one, other, *_ in pairs() for name in (one, other)} == {*CONDITIONS} - {"alone"}
    assert {family for _, _, family, _ in pairs()} == {*FAMILIES}


def test_all_conditions_together_change_nothing() -> None:
    every = {*CONDITIONS} - {*SIZES, "forked"}
    happened = set()
    for length in (1, 3, 4, 5, 8, 13):
        serving = Serving(model_of(), every, ids(length, length), 2).run()
        serving.check()
        happened |= serving.happened
    assert happened == every - {"alone", "permuted"}


# --- the comparison sees what goes wrong


class NeverRestored(Serving):
    """Blocks come back, their bytes do not."""

    def restore(self, evicted: DeviceEvicted) -> None:
        self.pool.core.restore(self.session, evicted.handle)
        for layer in range(2):
            for block in self.pool.core.session_block_table(self.session):
                self.pool.k_pool(layer)[block] = self.pool.v_pool(layer)[block] = 0.1


class NeighboursRow(Serving):
    """In a mix, the row of the session before it."""

    def mixed(self, tokens: tuple[int, ...]) -> Tensor:
        before = self.pool.core.open()
        row = ragged(self.model, self.pool, {before: ids(6, 5), self.session: tokens})[0]
        self.close(before)
        return row


class OtherTokens(Serving):
    """A prefix that is not the prompt's."""

    def begin(self) -> None:
        prompt, self.prompt = self.prompt, ids(len(self.prompt), 99)
        super().begin()
        self.prompt = prompt


class OneLost(Serving):
    """The last token of a chunk is forgotten."""

    def ragged(self, tokens: tuple[int, ...]) -> Tensor:
        row = super().ragged(tokens)
        self.pool.core.truncate(self.session, self.pool.core.filled_tokens(self.session) - 1)
        self.pool.core.append(self.session, 1)
        for layer in range(2):
            block = self.pool.core.session_block_table(self.session)[-1]
            slot = (self.pool.core.filled_tokens(self.session) - 1) % self.size
            self.pool.k_pool(layer)[block, slot] = 0.1
        return row


class Poisoned(Serving):
    """One slot of the session has what every slot has that nobody wrote."""

    def feed(self, tokens: tuple[int, ...]) -> Tensor:
        row = super().feed(tokens)
        self.pool.v_pool(1)[self.pool.core.resident_block(self.session, 0), 0] = torch.nan
        return row


@pytest.mark.parametrize(
    ("fault", "condition"),
    [
        (NeverRestored, "evicted"),
        (NeighboursRow, "ragged mix"),
        (OtherTokens, "shared"),
        (OtherTokens, "forked"),
        (OneLost, "chunked"),
        (Poisoned, "alone"),
    ],
)
def test_the_comparison_sees(fault: type[Serving], condition: str) -> None:
    assert fault(model_of(), [condition], ids(8, 8), 6).run().apart() > 0.01
