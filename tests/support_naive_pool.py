"""A block pool as a dict of lists, and a machine that watches a real one beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import ClassVar, Literal, TypeAlias

import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant
from support_block_pool import drained, make_pool, opened, refused

from fuel_core.contracts.errors import (
    FuelError,
    OutOfBlocksError,
    SessionNotResidentError,
    UnknownPrefixError,
    UnknownSessionError,
)
from fuel_core.kv import Evicted, PrefixId, SessionHandle

Slot: TypeAlias = "int | Evicted"
"""A block, or the handle that took it away."""
Wrong: TypeAlias = "type[FuelError] | Literal[False]"
"""An error that is due, or False."""


def inside(place: int, size: int) -> int:
    """Mostly a number in ``[0, size)``, else the nearest one on either side."""
    return place % size if size > 0 and place < 90 else (-1 if place % 2 else size)


class NaivePool:
    """Lists of blocks; every question is answered by counting anew."""

    def __init__(self, total: int, size: int) -> None:
        self.total, self.size = total, size
        self.slots: dict[SessionHandle, list[Slot]] = {}
        self.filled: dict[SessionHandle, int] = {}
        self.prefixes: dict[PrefixId, list[int]] = {}
        self.handles: list[Evicted] = []
        self.spent: list[Evicted] = []

    def blocks_of(self, tokens: int) -> int:
        """Counted one by one, as no formula would."""
        blocks = 0
        while blocks * self.size < tokens:
            blocks += 1
        return blocks

    def references(self) -> Counter[int]:
        held: Counter[int] = Counter()
        for slots in self.slots.values():
            held.update(slot for slot in slots if isinstance(slot, int))
        for blocks in self.prefixes.values():
            held.update(blocks)
        return held

    def free(self) -> int:
        return self.total - len(self.references())

    def is_partial(self, session: SessionHandle) -> bool:
        return self.blocks_of(self.filled[session]) * self.size != self.filled[session]

    def lacks(self, slots: list[Slot]) -> bool:
        return any(isinstance(slot, Evicted) for slot in slots)


class WatchedPool(RuleBasedStateMachine):
    """The pool and the model, how a call is judged, and what holds after each; a subclass has the calls."""

    seen: ClassVar[Counter[str]] = Counter()

    def begin(self, num_blocks: int, block_size: int) -> None:
        self.pool, self.model = make_pool(num_blocks, block_size), NaivePool(num_blocks, block_size)
        self.closed: list[SessionHandle] = []
        self.released: list[PrefixId] = []
        elsewhere = make_pool(4, 1)
        self.foreign = elsewhere.evict(opened(elsewhere, 2)).handle

    # -- choosing, and what is due -------------------------------------------------------------

    def session(self, who: int) -> SessionHandle:
        """Mostly one that is open."""
        live = list(self.model.slots)
        if live and who < 90:
            return live[who % len(live)]
        return self.closed[-1] if self.closed else SessionHandle(-1 if who % 2 else 10**6)

    def prefix(self, who: int) -> PrefixId:
        live = list(self.model.prefixes)
        if live and who < 90:
            return live[who % len(live)]
        return self.released[-1] if self.released else PrefixId(-1 if who % 2 else 10**6)

    def is_refused(self, name: str, call: Callable[[], object], *wrong: Wrong) -> bool:
        """Whether anything is wrong with a call; if so it was made, refused as it should be, and harmless."""
        due = [error for error in wrong if error]
        self.seen[f"{name}: {'refused' if due else 'served'}"] += 1
        if not due:
            return False
        with refused(self.pool, *due):
            call()
        return True

    def is_short(self, name: str, call: Callable[[], object], need: int) -> bool:
        """Whether the pool has too few blocks; if so the call was made, and its error has the figures."""
        if need <= self.model.free():
            return False
        self.seen[f"{name}: out of blocks"] += 1
        with refused(self.pool, OutOfBlocksError) as caught:
            call()
        assert (caught.value.need, caught.value.have) == (need, self.model.free())
        return True

    def unknown(self, *sessions: SessionHandle) -> Wrong:
        return not all(session in self.model.slots for session in sessions) and UnknownSessionError

    def unknown_prefix(self, prefix: PrefixId) -> Wrong:
        return prefix not in self.model.prefixes and UnknownPrefixError

    def adopt(self, session: SessionHandle, count: int) -> None:
        """The model takes over the blocks that the pool chose, after seeing that they were free."""
        blocks = self.pool.session_blocks(session)
        new = [block for block in blocks[len(blocks) - count :] if block is not None]
        assert len(set(new)) == len(new) == count
        assert not set(new) & set(self.model.references())
        self.model.slots[session] += new

    def length(self, session: SessionHandle) -> int:
        return len(self.model.slots.get(session, []))

    def range_of(self, session: SessionHandle, a: int, b: int) -> tuple[int, int]:
        """Mostly a range of the session's slots."""
        start = inside(a, self.length(session) + 1)
        return start, start + inside(b, self.length(session) + 1 - start)

    @invariant()
    def every_session_and_prefix_is_the_model_s(self) -> None:
        for session, slots in self.model.slots.items():
            assert self.pool.filled_tokens(session) == self.model.filled[session]
            seen = [None if isinstance(slot, Evicted) else slot for slot in slots]
            assert list(self.pool.session_blocks(session)) == seen
        for prefix, blocks in self.model.prefixes.items():
            assert list(self.pool.prefix_blocks(prefix)) == blocks

    @invariant()
    def a_table_is_never_read_through_an_evicted_slot(self) -> None:
        for session, slots in self.model.slots.items():
            gone = [i for i, slot in enumerate(slots) if isinstance(slot, Evicted)]
            if gone:
                with pytest.raises(SessionNotResidentError) as caught:
                    self.pool.session_block_table(session)
                assert caught.value.slot == gone[0]
            else:
                assert list(self.pool.session_block_table(session)) == slots
            for i, slot in enumerate(slots):
                if i in gone:
                    with pytest.raises(SessionNotResidentError) as caught:
                        self.pool.resident_block(session, i)
                    assert caught.value.slot == i
                else:
                    assert self.pool.resident_block(session, i) == slot

    @invariant()
    def reference_counts_are_the_references(self) -> None:
        references = self.model.references()
        for block in range(self.model.total):
            assert self.pool.block_refcount(block) == references[block]

    @invariant()
    def free_and_held_blocks_are_all_blocks_each_once(self) -> None:
        free, held = drained(self.pool), set(self.model.references())
        assert len(set(free)) == len(free) == self.pool.free_blocks
        assert sorted([*free, *held]) == list(range(self.model.total))

    @invariant()
    def capacity_and_bytes_follow(self) -> None:
        capacity, free = self.pool.capacity(), self.model.free()
        assert (capacity.free_blocks, capacity.total_blocks) == (free, self.model.total)
        # 2 layers, K and V, 3 heads, 4 values of 2 bytes.
        assert self.pool.kv_bytes_resident == (self.model.total - free) * self.model.size * 2 * 2 * 3 * 4 * 2

    @invariant()
    def fills_end_in_the_last_block(self) -> None:
        for session, blocks in ((s, self.pool.session_blocks(s)) for s in self.model.slots):
            assert len(blocks) == self.model.blocks_of(self.pool.filled_tokens(session))

    def teardown(self) -> None:
        if hasattr(self, "model"):
            for session in self.model.slots:
                self.pool.discard(session)
            for prefix in self.model.prefixes:
                self.pool.release_prefix(prefix)
            assert self.pool.kv_bytes_resident == 0
            assert sorted(drained(self.pool)) == list(range(self.model.total))
