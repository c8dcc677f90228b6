"""A session on the host is all of its bytes and no block; it comes back whole or not at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support_paged import content, contents, every_dtype, fill, make_pool, opened, poison_free, untouched

from fuel_core.contracts.errors import OutOfBlocksError, SessionNotResidentError, UnknownSessionError
from fuel_core.kv import DeviceKvPool, SessionHandle


def written(pool: DeviceKvPool, tokens: int, seed: int = 0) -> SessionHandle:
    """A session whose blocks hold random bytes."""
    session = opened(pool, tokens)
    for slot, block in enumerate(pool.core.session_block_table(session)):
        fill(pool, block, 100 * seed + slot)
    return session


@every_dtype
@pytest.mark.parametrize("tokens", [1, 4, 5, 12])
def test_every_byte_comes_back_into_whatever_blocks_are_free(dtype: torch.dtype, tokens: int) -> None:
    pool = make_pool(8, dtype=dtype)
    session = written(pool, tokens)
    before, table = contents(pool, session), pool.core.session_block_table(session)
    image = pool.swap_out(session)
    assert (pool.core.free_blocks, pool.core._tables) == (8, {})
    assert image.data.shape[2] == len(table)
    in_the_way = written(pool, 7, seed=1)
    poison_free(pool)
    back = pool.swap_in(image)
    assert contents(pool, back) == before
    assert pool.core.filled_tokens(back) == tokens
    assert pool.core.session_block_table(back) != table
    assert pool.core.filled_tokens(in_the_way) == 7


def test_a_session_without_a_token_goes_and_comes() -> None:
    pool = make_pool(1)
    image = pool.swap_out(pool.core.open())
    back = pool.swap_in(image)
    assert (pool.core.filled_tokens(back), pool.core.free_blocks) == (0, 1)


def test_shared_blocks_go_too_and_stay_as_they_are_for_the_others() -> None:
    pool = make_pool(8)
    donor, sharer = written(pool, 8), pool.core.open()
    pool.core.splice(donor, sharer, 0, 2)
    before = contents(pool, donor)
    image = pool.swap_out(sharer)
    assert pool.core.free_blocks == 6
    assert {pool.core.block_refcount(block) for block in pool.core.session_block_table(donor)} == {1}
    assert contents(pool, donor) == before
    back = pool.swap_in(image)
    assert contents(pool, back) == before
    assert not set(pool.core.session_block_table(back)) & set(pool.core.session_block_table(donor))


def test_an_image_stays_good_and_shares_no_memory_with_the_pool() -> None:
    pool = make_pool(8)
    image = pool.swap_out(written(pool, 6))
    first = pool.swap_in(image)
    before = contents(pool, first)
    for block in pool.core.session_block_table(first):
        fill(pool, block, 50 + block)
    second = pool.swap_in(image)
    assert contents(pool, second) == before != contents(pool, first)


def test_what_does_not_fit_stays_on_the_host_and_the_pool_as_it_was() -> None:
    pool = make_pool(4)
    image = pool.swap_out(written(pool, 12))
    holder = written(pool, 8, seed=1)
    before = [content(pool, block) for block in range(4)]
    with pytest.raises(OutOfBlocksError) as caught:
        pool.swap_in(image)
    assert (caught.value.need, caught.value.have) == (3, 2)
    assert (pool.core.free_blocks, list(pool.core._tables)) == (2, [holder])
    assert [content(pool, block) for block in range(4)] == before
    pool.core.discard(holder)
    assert pool.core.filled_tokens(pool.swap_in(image)) == 12


def evicted(pool: DeviceKvPool) -> SessionHandle:
    session = written(pool, 9)
    pool.evict_blocks(session, [1])
    return session


def gone(pool: DeviceKvPool) -> SessionHandle:
    session = opened(pool, 3)
    pool.core.discard(session)
    return session


@pytest.mark.parametrize(("make", "error"), [(evicted, SessionNotResidentError), (gone, UnknownSessionError)])
def test_what_is_not_all_there_is_refused_and_untouched(
    make: Callable[[DeviceKvPool], SessionHandle], error: type[Exception]
) -> None:
    pool = make_pool(8)
    session = make(pool)
    with untouched(pool, error):
        pool.swap_out(session)
