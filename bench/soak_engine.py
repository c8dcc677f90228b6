"""Thousands of random requests through an engine whose pool is too small, each compared with its lone run.

python bench/soak_engine.py --requests 5000

Lengths, seeds, stops, samples per prompt, shared prefixes and cancellations are drawn from one seed. After
every step free, cached and held blocks must be all there are; at the end nothing is held, and memory has not
grown.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from resource import getpagesize

import attrs
import torch
from torch import Tensor

from fuel_core import registry
from fuel_core.contracts import DecodeModel, DecodeSession, FinishReason, ModelDims, SamplingParams
from fuel_core.engine import Engine
from fuel_core.engine.served import ServedSession
from fuel_core.kv import DeviceKvPool, KvBudget, KvCache
from fuel_core.sampling import SamplerState, sample
from fuel_core.schedule import SessionId
from fuel_core.schedule.table import geometry_of

TOLERANCE = 1e-4
FLAT_MB = 16


@attrs.frozen
class Wish:
    """A request, and after how many steps each of its samples is cancelled, where it is."""

    prompt: list[int]
    params: SamplingParams
    eos_ids: frozenset[int]
    max_new: int
    patience: list[int | None]

    @property
    def n(self) -> int:
        """How many samples."""
        return len(self.patience)


def wishes(count: int, vocab: int, rng: random.Random, longest: int = 40) -> Iterator[Wish]:
    """Random requests; half of them begin like others."""
    prefixes = [rng.choices(range(vocab), k=longest // 2) for _ in range(4)]
    for _ in range(count):
        prefix = rng.choice(prefixes)[: rng.randint(0, longest // 2)] if rng.random() < 0.5 else []
        prompt = prefix + rng.choices(range(vocab), k=rng.randint(1, longest - len(prefix)))
        seed = rng.choice([None, rng.randrange(2**32)])
        yield Wish(
            prompt,
            SamplingParams() if seed is None else SamplingParams(temperature=1.0, seed=seed),
            frozenset(rng.sample(range(vocab), k=rng.choice([0, 0, 2, 10]))),
            rng.randint(1, 16),
            [rng.choice([None] * 5 + [rng.randint(0, 30)]) for _ in range(rng.choice([1, 1, 1, 2, 4]))],
        )


class RecordingEngine(Engine):
    """Keeps the logits that each session was sampled from."""

    def __init__(self, model: DecodeModel, pool: DeviceKvPool, *, max_batch: int, token_budget: int) -> None:
        super().__init__(model, pool, max_batch=max_batch, token_budget=token_budget)
        self.rows: dict[SessionId, list[Tensor]] = defaultdict(list)

    def _observe(self, session: ServedSession, logits: Tensor) -> None:
        self.rows[session.id].append(logits.clone())


def lone_run(model: DecodeModel, wish: Wish, number: int) -> tuple[list[int], Tensor]:
    """What a sample says with nobody beside it, over a contiguous cache: tokens and logits ``[n, vocab]``."""
    dims = ModelDims.from_model(model)
    cache = KvCache(dims.n_layers, dims.n_kv_heads, dims.head_dim, len(wish.prompt) + wish.max_new)
    seed = wish.params.seed
    params = wish.params if seed is None else attrs.evolve(wish.params, seed=seed + number)
    state = SamplerState(params, wish.prompt, eos_ids=wish.eos_ids, vocab_size=model.vocab_size())
    rows: list[Tensor] = []
    tokens: list[int] = []
    new = wish.prompt
    while not tokens or (tokens[-1] not in wish.eos_ids and len(tokens) < wish.max_new):
        rows.append(model.forward_with_kv_context_persistent(new, cache, DecodeSession()))
        [token] = sample(rows[-1][None], [state])
        if isinstance(token, Exception):
            raise token
        tokens.append(token)
        new = [token]
    return tokens, torch.stack(rows)


def require(condition: bool, what: str) -> None:
    """Stop the soak at its first fault."""
    if not condition:
        raise AssertionError(what)


def resident_mb() -> float:
    """What the process has in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * getpagesize() / 2**20


@attrs.define
class Summary:
    """What a soak has seen; ``resident`` are samples of the memory in MB."""

    ends: Counter[str] = attrs.field(factory=Counter)
    tokens: int = 0
    worst: float = 0.0
    resident: list[float] = attrs.field(factory=list)


class Soak:
    """Feeds an engine and looks at all that it does. ``engine.rows`` holds the logits of every session."""

    def __init__(self, model: DecodeModel, engine: RecordingEngine, rng: random.Random) -> None:
        self.model, self.engine, self.rng = model, engine, rng
        self.summary = Summary()
        self._live: dict[SessionId, tuple[Wish, int]] = {}
        self._cancel: dict[int, list[SessionId]] = defaultdict(list)
        self._step = 0

    def run(self, requests: Iterable[Wish], *, in_flight: int = 24, every: int = 250) -> Summary:
        """Serve all requests, no more than about ``in_flight`` sessions at a time."""
        for served, wish in enumerate(requests):
            while len(self._live) >= in_flight or self.rng.random() < 0.3:
                self._advance()
            self._submit(wish)
            if served % every == 0:
                self.summary.resident.append(resident_mb())
        while self._live:
            self._advance()
        self.summary.resident.append(resident_mb())
        require(self._unheld() == self.engine.pool.geometry.num_blocks, "blocks are held by nobody")
        return self.summary

    def _unheld(self) -> int:
        return self.engine.pool.core.free_blocks + self.engine.cached_blocks

    def _submit(self, wish: Wish) -> None:
        ids = self.engine.submit(
            wish.prompt, wish.params, eos_ids=wish.eos_ids, max_new_tokens=wish.max_new, n=wish.n
        )
        for number, (id, patience) in enumerate(zip(ids, wish.patience, strict=True)):
            self._live[id] = wish, number
            if patience is not None:
                self._cancel[self._step + patience].append(id)

    def _advance(self) -> None:
        for id in self._cancel.pop(self._step, []):
            if id in self._live:
                self.engine.cancel(id)
        report = self.engine.step()
        require(not report.errored, f"errors: {report.errored}")
        self._step += 1
        self._look()

    def _look(self) -> None:
        sessions = {id: self.engine.session(id) for id in self._live}
        for id, session in sessions.items():
            if not session.is_ready:
                self._compare(session, *self._live.pop(id))
                self.engine.reap(id)
        core = self.engine.pool.core
        handles = [session.handle for session in sessions.values() if session.handle is not None]
        held = {block for handle in handles for block in core.session_block_table(handle)}
        total = self.engine.pool.geometry.num_blocks
        require(self._unheld() + len(held) == total, f"{total - self._unheld() - len(held)} blocks lost")

    def _compare(self, session: ServedSession, wish: Wish, number: int) -> None:
        tokens, rows = lone_run(self.model, wish, number)
        said, ours = session.new_tokens, self.engine.rows.pop(session.id, [])
        cancelled = session.finish_reason is FinishReason.CANCELLED
        require(len(ours) == len(said), "a row for each token")
        if ours:
            apart = (torch.stack(ours) - rows[: len(ours)]).abs().nan_to_num(nan=torch.inf).max().item()
            self.summary.worst = max(self.summary.worst, apart)
        require(self.summary.worst < TOLERANCE, f"logits of {wish} are {self.summary.worst} apart")
        require(said == (tokens[: len(said)] if cancelled else tokens), f"{wish} said {said}, alone {tokens}")
        self.summary.ends[str(session.finish_reason)] += 1
        self.summary.tokens += len(said)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", default="llama")
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--block-size", type=int, default=4)
    parser.add_argument("--max-batch", type=int, default=8)
    parser.add_argument("--token-budget", type=int, default=32)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, rng = registry.family(args.family).tiny(), random.Random(args.seed)
    budget = KvBudget(args.block_size, args.blocks)
    pool = DeviceKvPool(geometry_of(ModelDims.from_model(model), budget, torch.float32))
    engine = RecordingEngine(model, pool, max_batch=args.max_batch, token_budget=args.token_budget)
    start = time.perf_counter()
    soak = Soak(model, engine, rng)
    summary = soak.run(wishes(args.requests, model.vocab_size(), rng), every=max(1, args.requests // 20))
    settled = summary.resident[len(summary.resident) // 4 :]
    print(f"{args.requests} requests in {time.perf_counter() - start:.0f} s: {dict(summary.ends)}")
    print(f"{summary.tokens} tokens, all as in their lone runs; logits at most {summary.worst:.1e} apart")
    print(f"{engine.stats}")
    print("resident MB:", *(f"{mb:.0f}" for mb in summary.resident))
    require(max(settled) - settled[0] < FLAT_MB, "memory grows")


if __name__ == "__main__":
    main()
