"""Over any sequence of moves, every session reads what it wrote."""

from __future__ import annotations

import random
from contextlib import suppress

import attrs
import pytest
import torch
from support_paged import DTYPES, buffers, make_pool, poison, poison_free, shuffle

from fuel_core.contracts.errors import OutOfBlocksError, SessionNotResidentError
from fuel_core.kv import DeviceEvicted, SessionHandle


@attrs.define(eq=False)
class Known:
    """What a session wrote, a number for each token, and what of it is on the host."""

    tokens: list[int] = attrs.field(factory=list)
    away: list[DeviceEvicted] = attrs.field(factory=list)


class Walk:
    """A random walk over a small pool, beside a model of it that knows nothing of blocks."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.random = random.Random(seed)
        self.pool = make_pool(10, self.random.choice([1, 2, 4]), dtype, heads=1, dim=2)
        poison(self.pool)
        shuffle(self.pool, seed)
        self.known: dict[SessionHandle, Known] = {}
        self.written = self.moved = self.shared = 0

    def write(self, session: SessionHandle, known: Known) -> None:
        """Append up to three tokens, as a model does: room, copy on write, then the bytes."""
        size = self.pool.geometry.block_size
        for _ in range(self.random.randint(1, 3)):
            place = len(known.tokens)
            self.pool.core.append(session, 1)
            try:
                block = self.pool.ensure_writable_block(session, place // size)
            except OutOfBlocksError:
                self.pool.core.truncate(session, place)
                raise
            self.written = self.written % 250 + 1  # a whole number in every dtype
            for buffer in buffers(self.pool):
                buffer[block, place % size] = self.written
            known.tokens.append(self.written)

    def evict(self, session: SessionHandle, known: Known) -> None:
        """Move some of its blocks, whether shared or away already."""
        slots = range(len(self.pool.core.session_blocks(session)))
        chosen = self.random.sample(slots, self.random.randint(0, len(slots)))
        known.away.append(self.pool.evict_blocks(session, chosen))
        self.moved += known.away[-1].saved_block_count

    def restore(self, session: SessionHandle, known: Known) -> None:
        """Bring all of it back, in any order; what does not fit stays away."""
        self.random.shuffle(known.away)
        while known.away:
            self.pool.restore(session, known.away[-1])
            known.away.pop()

    def fork(self, session: SessionHandle, known: Known) -> None:
        """Another session with all that it has, partly filled block and all."""
        if not known.away and len(self.known) < 5:
            other = self.pool.core.open()
            slots = len(self.pool.core.session_blocks(session))
            self.pool.core.splice(session, other, 0, slots)
            self.known[other] = Known(list(known.tokens))
            self.shared += slots

    def cut(self, session: SessionHandle, known: Known) -> None:
        """Forget its last tokens."""
        keep = self.random.randint(0, len(known.tokens))
        self.pool.core.truncate(session, keep)
        del known.tokens[keep:]

    def close(self, session: SessionHandle, known: Known) -> None:
        """End it, wherever its blocks are."""
        self.pool.core.discard(session)
        del self.known[session]

    def step(self) -> None:
        """One move of one session, and garbage in every block that nobody holds."""
        if not self.known or (len(self.known) < 4 and self.random.random() < 0.2):
            self.known[self.pool.core.open()] = Known()
        session, known = self.random.choice(list(self.known.items()))
        moves = [self.write] * 6 + [self.evict, self.restore] * 3
        with suppress(OutOfBlocksError, SessionNotResidentError):
            self.random.choice([*moves, self.fork, self.cut, self.close])(session, known)
        poison_free(self.pool)

    def read(self, session: SessionHandle) -> list[list[float]]:
        """Every resident token of a session, in every buffer."""
        size, filled = self.pool.geometry.block_size, self.pool.core.filled_tokens(session)
        result = []
        for slot, block in enumerate(self.pool.core.session_blocks(session)):
            for place in range(min(size, filled - slot * size)):
                if block is not None:
                    values = {v for b in buffers(self.pool) for v in b[block, place].flatten().tolist()}
                    result.append(sorted(values))
        return result

    def check(self) -> None:
        """Each session reads its own numbers wherever it is resident, and nothing is lost."""
        size = self.pool.geometry.block_size
        for session, known in self.known.items():
            assert self.pool.core.filled_tokens(session) == len(known.tokens)
            held = self.pool.core.session_blocks(session)
            expected = [[t] for i, t in enumerate(known.tokens) if held[i // size] is not None]
            assert self.read(session) == expected
        held_blocks = {b for s in self.known for b in self.pool.core.session_blocks(s) if b is not None}
        assert self.pool.core.free_blocks + len(held_blocks) == 10


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", [0, 4, 6, 9])
def test_every_session_reads_what_it_wrote_whatever_happens_to_the_others(
    seed: int, dtype: torch.dtype
) -> None:
    walk = Walk(seed, dtype)
    for _ in range(250):
        walk.step()
        walk.check()
    assert walk.moved > 20
    assert walk.shared >= 10
    for session, known in list(walk.known.items()):
        walk.close(session, known)
    assert walk.pool.core.free_blocks == 10
