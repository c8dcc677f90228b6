"""The prefix cache finds a full block by its tokens and all before them, and gives up what is oldest."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence

import pytest
from support_block_pool import make_pool

from fuel_core.contracts.errors import OutOfBlocksError
from fuel_core.kv import KvBlockPool, SessionHandle
from fuel_core.kv.prefix_index import PrefixIndex, PrefixStats

SIZE = 4


class Cached:
    """A pool with an index, and what one does with them."""

    def __init__(self, blocks: int = 16, namespace: Hashable = ()) -> None:
        self.pool: KvBlockPool = make_pool(blocks, SIZE)
        self.index = PrefixIndex(self.pool, namespace)

    def computed(self, tokens: Sequence[int]) -> SessionHandle:
        """A session that holds ``tokens``, all of its own making and indexed."""
        session = self.pool.open()
        self.pool.append(session, len(tokens))
        self.index.add(tokens, session, [])
        return session

    def left(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """The same, whose session is gone; the blocks that it had."""
        session = self.computed(tokens)
        blocks = self.pool.session_block_table(session)
        self.pool.discard(session)
        return blocks

    def taken(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """The blocks that a new session is given for a prompt."""
        session = self.pool.open()
        reused = self.index.take(tokens, session)
        assert reused == self.pool.filled_tokens(session) == SIZE * len(self.pool.session_blocks(session))
        return self.pool.session_block_table(session)


def count(first: int, length: int) -> list[int]:
    return list(range(first, first + length))


def test_blocks_are_found_by_their_tokens_when_those_that_made_them_are_gone() -> None:
    cached = Cached()
    blocks = cached.left(count(0, 9))
    assert cached.pool.free_blocks == 14, "the two full ones are kept"
    assert cached.taken(count(0, 20)) == blocks[:2]
    assert cached.index.stats == PrefixStats(lookups=1, hits=1, tokens_reused=8)


@pytest.mark.parametrize(("length", "blocks"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3)])
def test_the_last_token_and_its_block_are_never_taken(length: int, blocks: int) -> None:
    cached = Cached()
    cached.left(count(0, 12))
    assert len(cached.taken(count(0, length))) == blocks


@pytest.mark.parametrize("length", [1, 3, 5, 7, 11])
def test_a_block_that_is_not_full_is_never_indexed(length: int) -> None:
    cached = Cached()
    cached.left(count(0, length))
    assert len(cached.index) == length // SIZE
    assert cached.pool.free_blocks == 16 - length // SIZE
    # What it would have been completed by is not there.
    assert len(cached.taken(count(0, 16))) == length // SIZE


def test_a_block_is_that_of_all_tokens_before_it_too() -> None:
    cached = Cached()
    a, b, c = count(0, 4), count(10, 4), count(20, 4)
    cached.left(a + b)
    assert len(cached.taken(a + b + c)) == 2
    assert cached.taken(b + c) == (), "at another position"
    assert cached.taken(c + b + a) == (), "behind another block"
    assert len(cached.taken(a + c + b)) == 1
    assert len(cached.taken([*a, *b[:-1], 99, 1])) == 1, "a token of it differs"


def test_blocks_are_told_apart_by_every_bit_of_every_token_and_by_their_order() -> None:
    cached = Cached(64)
    cached.left([1, 2, 3, 4])
    for other in ([2, 1, 3, 4], [1, 2, 3, 4 + 2**8], [1, 2, 3, 4 + 2**32], [1, 2, 34, 0], [12, 3, 4, 5]):
        assert cached.taken([*other, 9]) == ()
    assert len(cached.taken([1, 2, 3, 4, 9])) == 1


@pytest.mark.parametrize("other", [("adapter", 1), ("adapter", "0"), "adapter", (), 0])
def test_what_changes_keys_and_values_beside_the_tokens_is_in_the_key(other: Hashable) -> None:
    keys = {}
    for namespace in (("adapter", 0), other):
        cached = Cached(namespace=namespace)
        cached.left(count(0, 8))
        keys[namespace] = set(cached.index._holders)
    assert not set.intersection(*keys.values())


def test_what_is_added_twice_is_kept_once_and_the_first_stands() -> None:
    cached = Cached()
    first = cached.left(count(0, 8))
    cached.left(count(0, 8))
    assert len(cached.index) == 2
    assert cached.pool.free_blocks == 14
    assert cached.taken(count(0, 9)) == first


def test_a_chain_that_grows_hashes_each_block_once_and_gives_the_same_keys() -> None:
    grown, whole = Cached(), Cached()
    session, chain = grown.pool.open(), list[bytes]()
    for length in range(1, 14):
        grown.pool.append(session, 1)
        grown.index.add(count(0, length), session, chain)
        assert len(chain) == len(grown.index) == length // SIZE
    whole.computed(count(0, 13))
    assert list(grown.index._holders) == list(whole.index._holders)


def test_a_block_in_use_costs_nothing_to_share_and_cannot_be_reclaimed() -> None:
    cached = Cached()
    session = cached.computed(count(0, 12))
    cached.left(count(50, 8))
    assert (cached.index.in_use(count(0, 13)), cached.index.in_use(count(50, 9))) == (3, 0)
    assert cached.index.in_use(count(0, 12)) == 2, "as many as take would share"
    assert cached.index.reclaimable() == 2
    assert [cached.index.reclaimable(most) for most in (0, 1, 2, 3)] == [0, 1, 2, 2]
    assert cached.index.reclaim(9) == 2
    cached.pool.discard(session)
    assert cached.index.reclaimable() == 3


def test_what_was_used_least_recently_goes_first_and_a_chain_from_its_end() -> None:
    cached = Cached()
    for first in (0, 100, 200):
        cached.left(count(first, 8))
    cached.pool.discard(_last(cached, count(0, 9)))  # used again
    order = []
    while cached.index.reclaim(1):
        order.append([len(_peek(cached, count(first, 9))) for first in (0, 100, 200)])
    assert order == [[2, 1, 2], [2, 0, 2], [2, 0, 1], [2, 0, 0], [1, 0, 0], [0, 0, 0]]
    assert cached.index.stats.blocks_reclaimed == 6
    assert cached.pool.free_blocks == 16


def _last(cached: Cached, tokens: Sequence[int]) -> SessionHandle:
    session = cached.pool.open()
    cached.index.take(tokens, session)
    return session


def _peek(cached: Cached, tokens: Sequence[int]) -> list[bytes]:
    return cached.index._found(tokens)


def test_what_a_session_goes_on_to_fill_is_as_fresh_as_what_it_began_with() -> None:
    cached = Cached()
    session, chain = cached.pool.open(), list[bytes]()
    cached.pool.append(session, 4)
    cached.index.add(count(0, 4), session, chain)
    cached.left(count(100, 8))
    cached.pool.append(session, 4)
    cached.index.add(count(0, 8), session, chain)
    cached.pool.discard(session)
    cached.index.reclaim(2)
    assert [len(_peek(cached, count(first, 9))) for first in (0, 100)] == [2, 0]


def test_a_chain_whose_beginning_was_given_up_is_found_again_once_that_is_back() -> None:
    cached = Cached()
    session, chain = cached.pool.open(), list[bytes]()
    cached.pool.append(session, 8)
    cached.index.add(count(0, 8), session, chain)
    cached.pool.discard(cached.index._holders.pop(chain[0]))
    assert cached.taken(count(0, 9)) == ()
    cached.pool.append(session, 4)
    cached.index.add(count(0, 12), session, chain)
    assert cached.taken(count(0, 13)) == cached.pool.session_block_table(session)


@pytest.mark.parametrize("seed", range(8))
def test_no_sequence_of_calls_loses_a_block_or_shares_a_wrong_one(seed: int) -> None:
    chance, cached = random.Random(seed), Cached(12)
    written: dict[int, list[int]] = {}
    live: list[SessionHandle] = []
    for _ in range(200):
        if live and chance.random() < 0.4:
            cached.pool.discard(live.pop(chance.randrange(len(live))))
        tokens = [chance.randrange(2) for _ in range(chance.randrange(1, 20))]
        session = cached.pool.open()
        reused = cached.index.take(tokens, session)
        for slot, block in enumerate(cached.pool.session_block_table(session)):
            assert written[block] == tokens[: (slot + 1) * SIZE], "the block holds what it is taken for"
        need = cached.pool.blocks_required(reused, len(tokens) - reused)
        cached.index.reclaim(max(0, need - cached.pool.free_blocks))
        try:
            cached.pool.append(session, len(tokens) - reused)
        except OutOfBlocksError:
            cached.pool.discard(session)
            continue
        for slot, block in enumerate(cached.pool.session_block_table(session)):
            written[block] = tokens[: (slot + 1) * SIZE]
        cached.index.add(tokens, session, [])
        live.append(session)
    for session in live:
        cached.pool.discard(session)
    assert cached.pool.free_blocks + cached.index.reclaimable() == 12
    cached.index.reclaim(12)
    assert cached.pool.free_blocks == 12
    assert cached.index.stats.hits > 20
