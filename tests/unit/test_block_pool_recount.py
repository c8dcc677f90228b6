"""After an interrupt inside a call of the block pool, a recount makes it whole again."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from fuel_core.kv import KvBlockPool, KvGeometry, SessionHandle, ledger, pool, tables
from fuel_core.kv.tables import EVICTED

SIZE, BLOCKS = 4, 24
FILES = {module.__file__ for module in (ledger, pool, tables)}


def busy() -> tuple[KvBlockPool, list[SessionHandle]]:
    """A pool with freed, shared, unused and evicted blocks, and a prefix."""
    made = KvBlockPool(KvGeometry(1, 1, 2, BLOCKS, SIZE, 4))
    sessions = [made.open() for _ in range(4)]
    for session, tokens in zip(sessions, (9, 12, 6, 14), strict=True):
        made.append(session, tokens)
    made.register_prefix(sessions[1], 8)
    made.splice(sessions[0], fork := made.open(), 0, 3)
    made.evict_range(sessions[3], 1, 2)
    made.discard(sessions[2])
    return made, [sessions[0], sessions[1], fork, sessions[3]]


def check(made: KvBlockPool) -> None:
    """Counts, fills and free blocks are those of the tables and the prefixes, and the rest can be had."""
    held = Counter(b for table in made._tables.values() for b in table.blocks if b != EVICTED)
    held.update(b for blocks in made._prefixes.values() for b in blocks)
    assert [made.block_refcount(block) for block in range(BLOCKS)] == [held[b] for b in range(BLOCKS)]
    assert made.free_blocks == BLOCKS - len(held)
    for table in made._tables.values():
        assert len(table.blocks) == -(-table.filled // SIZE)
    rest = made.open()
    made.append(rest, made.free_blocks * SIZE)
    assert not set(made.session_block_table(rest)) & set(held)
    made.discard(rest)


def is_whole(made: KvBlockPool) -> bool:
    """Whether :func:`check` finds nothing."""
    try:
        check(made)
    except AssertionError:
        return False
    return True


CALLS: dict[str, Callable[[KvBlockPool, list[SessionHandle]], object]] = {
    "append": lambda made, sessions: made.append(sessions[0], 40),
    "append to a partial block": lambda made, sessions: made.append(sessions[0], 2),
    "truncate": lambda made, sessions: made.truncate(sessions[1], 1),
    "discard": lambda made, sessions: made.discard(sessions[1]),
    "discard what is shared": lambda made, sessions: made.discard(sessions[2]),
    "splice": lambda made, sessions: made.splice(sessions[0], made.open(), 0, 2),
    "cow_break": lambda made, sessions: made.cow_break(sessions[2], 2),
    "register_prefix": lambda made, sessions: made.register_prefix(sessions[0], 8),
    "release_prefix": lambda made, sessions: made.release_prefix(*made._prefixes),
    "splice_prefix_from": lambda made, sessions: made.splice_prefix_from(*made._prefixes, made.open()),
    "alloc_shifted_prefix_slots": lambda made, sessions: made.alloc_shifted_prefix_slots(
        *made._prefixes, sessions[1]
    ),
    "recount": lambda made, sessions: made.recount(),
}


class Cut:
    """Raises KeyboardInterrupt at one line of the pool's files, the ``at``-th that a call passes."""

    def __init__(self, at: int) -> None:
        self._left = at
        self.is_cut = False

    def during(self, call: Callable[[], object]) -> None:
        sys.settrace(self._trace)
        try:
            call()
        except KeyboardInterrupt:
            self.is_cut = True
        finally:
            sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            self._left -= 1
            if self._left < 0:
                raise KeyboardInterrupt
        return self._trace


def cut_everywhere(call: Callable[[KvBlockPool, list[SessionHandle]], object]) -> list[KvBlockPool]:
    """The pools that a call leaves which is cut short at each of its lines."""
    left = []
    while True:
        made, sessions = busy()
        cut = Cut(len(left))
        cut.during(lambda made=made, sessions=sessions: call(made, sessions))  # type: ignore[misc]
        if not cut.is_cut:
            return left
        left.append(made)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_cut_short_at_any_line_costs_no_block(name: str) -> None:
    left = cut_everywhere(CALLS[name])
    assert len(left) > 3
    for made in left:
        made.recount()
        check(made)


def test_a_recount_that_is_cut_short_can_be_done_again() -> None:
    for torn in cut_everywhere(CALLS["truncate"]):
        for at in range(40):
            Cut(at).during(torn.recount)
            torn.recount()
            check(torn)


@pytest.mark.parametrize("name", ["append", "truncate", "discard", "cow_break", "register_prefix"])
def test_without_a_recount_a_block_would_be_lost(name: str) -> None:
    assert not all(map(is_whole, cut_everywhere(CALLS[name])))


def test_a_pool_that_is_whole_is_the_same_after_a_recount() -> None:
    made, sessions = busy()
    before = [(made.session_blocks(session), made.filled_tokens(session)) for session in sessions]
    counts = [made.block_refcount(block) for block in range(BLOCKS)]
    made.recount()
    assert [(made.session_blocks(session), made.filled_tokens(session)) for session in sessions] == before
    assert [made.block_refcount(block) for block in range(BLOCKS)] == counts
    check(made)


def test_an_empty_pool_can_be_recounted() -> None:
    made = KvBlockPool(KvGeometry(1, 1, 2, BLOCKS, SIZE, 4))
    made.recount()
    check(made)
