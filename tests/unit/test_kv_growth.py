"""What sessions that grow together are said to need is what they take, block for block."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from support_paged import make_pool, opened, standing

from fuel_core.contracts.errors import InvalidRequestError, SessionNotResidentError, UnknownSessionError
from fuel_core.kv import DeviceKvPool, KvBlockPool, SessionHandle
from fuel_core.kv.growth import JointGrowth

Appends = Sequence[tuple[SessionHandle, int]]


def needed(pool: KvBlockPool, appends: Appends) -> int:
    growth = JointGrowth(pool)
    for session, tokens in appends:
        before, cost = growth.need, growth.cost(session, tokens)
        assert growth.need == before  # to ask changes nothing
        growth.add(session, tokens)
        assert growth.need == before + cost
    return growth.need


def taken(pool: KvBlockPool, appends: Appends) -> int:
    """Append to each, break what it shares, and count."""
    free = pool.free_blocks
    for session, tokens in appends:
        slot, used = divmod(pool.filled_tokens(session), pool.geometry.block_size)
        pool.append(session, tokens)
        if used and tokens:
            pool.cow_break(session, slot)
    return free - pool.free_blocks


def forked(pool: DeviceKvPool, tokens: int, forks: int) -> list[SessionHandle]:
    """A session and its forks, which share all of it."""
    source = opened(pool, tokens)
    copies = [pool.core.open() for _ in range(forks)]
    for copy in copies:
        pool.core.splice(source, copy, 0, len(pool.core.session_blocks(source)))
    return [source, *copies]


@pytest.mark.parametrize("seed", range(40))
def test_the_need_of_any_sessions_is_what_they_take_in_any_order(seed: int) -> None:
    choose = random.Random(seed)
    pool = make_pool(200, choose.choice([1, 3, 4]))
    groups = [forked(pool, choose.randint(0, 9), choose.randint(0, 3)) for _ in range(4)]
    everyone = [session for group in groups for session in group]
    growing = choose.sample(everyone, choose.randint(1, len(everyone)))
    appends = [(session, choose.randint(1, 6)) for session in growing]
    need = needed(pool.core, appends)
    assert need == needed(pool.core, appends[::-1])
    assert need == taken(pool.core, choose.sample(appends, len(appends)))


@pytest.mark.parametrize(("idle", "need"), [(0, 2), (1, 2), (2, 1)])
def test_the_last_of_those_that_all_write_keeps_the_block(idle: int, need: int) -> None:
    pool = make_pool(20, 4)
    group = forked(pool, 6, 2)
    appends = [(session, 1) for session in group[idle:]]
    assert needed(pool.core, appends) == need
    # The control: each alone, and none that is the last.
    assert sum(pool.core.blocks_required_for(session, 1) for session, _ in appends) == 3 - idle


def test_one_that_does_not_grow_writes_nothing_and_keeps_no_block() -> None:
    pool = make_pool(20, 4)
    still, writer = forked(pool, 6, 1)
    assert needed(pool.core, [(still, 0), (writer, 1)]) == 1
    assert needed(pool.core, [(still, 1), (writer, 1)]) == 1
    assert needed(pool.core, [(writer, 1), (still, 0)]) == 1


def test_a_block_that_a_prefix_holds_is_kept_by_no_session() -> None:
    pool = make_pool(20, 4)
    session, sharer = forked(pool, 8, 1)
    pool.core.register_prefix(session, 8)
    for each in (session, sharer):
        pool.core.truncate(each, 6)
    assert needed(pool.core, [(session, 1), (sharer, 1)]) == 2


def test_what_cannot_be_counted_is_not() -> None:
    pool = make_pool(20, 4)
    session, other = opened(pool, 6), opened(pool, 6)
    pool.core.evict_blocks(session, [1])
    growth = JointGrowth(pool.core)
    growth.add(other, 3)
    before = standing(pool)
    for call in (growth.cost, growth.add):
        with pytest.raises(SessionNotResidentError):
            call(session, 1)
        with pytest.raises(InvalidRequestError):
            call(other, -1)
        with pytest.raises(UnknownSessionError):
            call(SessionHandle(99), 1)
    assert growth.need == 1
    assert standing(pool) == before
