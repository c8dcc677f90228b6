"""Whatever copy fails, of whatever move: the pool is what it was, and the move can be made again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import pytest
import torch
from support_block_pool import drained
from support_paged import (
    content,
    contents,
    every_dtype,
    fill,
    make_pool,
    scrawled,
    scribble,
    standing,
    untouched,
)
from torch.utils._python_dispatch import TorchDispatchMode

from fuel_core.contracts.errors import CapacityError, InvalidRequestError, OutOfBlocksError
from fuel_core.kv import DeviceEvicted, DeviceKvPool, SessionHandle
from fuel_core.kv.device_pool import SessionImage
from fuel_core.layers import Rope

FREQUENCIES = Rope(torch.tensor([1.0, 0.3, 0.05, 0.001]), 1.0, 256)


class Failing(TorchDispatchMode):
    """Lets so many operations of torch run, and fails at the next."""

    def __init__(self, operations: int, error: BaseException) -> None:
        super().__init__()
        self.left, self.error = operations, error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return func(*args, **(kwargs or {}))


@attrs.frozen
class Move:
    """A pool before a move, the move, and what it is to leave behind."""

    pool: DeviceKvPool
    make: Callable[[], Any]
    check: Callable[[Any], None]


def cow() -> Move:
    """A session's own copy of a block that another session has too."""
    pool = make_pool()
    donor, sharer = scrawled(pool, 6), pool.core.open()
    pool.core.splice(donor, sharer, 0, 2)
    scribble(pool)
    before = contents(pool, donor)

    def check(block: int) -> None:
        assert block == pool.core.resident_block(sharer, 1) != pool.core.resident_block(donor, 1)
        assert contents(pool, sharer) == contents(pool, donor) == before

    return Move(pool, lambda: pool.ensure_writable_block(sharer, 1), check)


def eviction() -> Move:
    pool = make_pool()
    session = scrawled(pool, 10)
    before = contents(pool, session)

    def check(evicted: DeviceEvicted) -> None:
        scribble(pool)
        pool.restore(session, evicted)
        assert contents(pool, session) == before

    return Move(pool, lambda: pool.evict(session), check)


def return_() -> Move:
    """Two of three slots come back; the third was cut off meanwhile."""
    pool = make_pool()
    session = scrawled(pool, 10)
    before = contents(pool, session)
    evicted = pool.evict(session)
    pool.core.truncate(session, 8)
    scribble(pool)

    def check(_: None) -> None:
        assert contents(pool, session) == before[:2]
        with untouched(pool, InvalidRequestError):
            pool.restore(session, evicted)

    return Move(pool, lambda: pool.restore(session, evicted), check)


def way_out() -> Move:
    """A session with a block that another has too."""
    pool = make_pool()
    donor, session = scrawled(pool, 4), pool.core.open()
    pool.core.splice(donor, session, 0, 1)
    pool.core.append(session, 5)
    for slot, block in enumerate(pool.core.session_block_table(session)[1:]):
        fill(pool, block, 60 + slot)
    before, beside = contents(pool, session), contents(pool, donor)

    def check(image: SessionImage) -> None:
        scribble(pool)
        assert pool.core.free_blocks == 7
        assert contents(pool, pool.swap_in(image)) == before
        assert contents(pool, donor) == beside

    return Move(pool, lambda: pool.swap_out(session), check)


def way_in() -> Move:
    pool = make_pool()
    session = scrawled(pool, 9)
    before = contents(pool, session)
    image = pool.swap_out(session)
    scrawled(pool, 7)
    scribble(pool)

    def check(back: SessionHandle) -> None:
        assert contents(pool, back) == before
        assert pool.core.free_blocks == 3

    return Move(pool, lambda: pool.swap_in(image), check)


def shift() -> Move:
    pool = make_pool()
    donor, target = scrawled(pool, 8), scrawled(pool, 4)
    prefix = pool.core.register_prefix(donor, 8)
    sources = [content(pool, block) for block in pool.core.prefix_blocks(prefix)]

    def check(added: int) -> None:
        assert (added, pool.core.filled_tokens(target), pool.core.free_blocks) == (8, 12, 3)
        assert [content(pool, block) for block in pool.core.prefix_blocks(prefix)] == sources
        assert not set(pool.core.session_block_table(target)) & set(pool.core.prefix_blocks(prefix))

    return Move(pool, lambda: pool.splice_prefix_shifted(prefix, target, FREQUENCIES), check)


MOVES: Mapping[str, tuple[Callable[[], Move], int]] = {
    "a copy before a write": (cow, 1),
    "an eviction": (eviction, 3),
    "a return": (return_, 8),
    "a way out": (way_out, 7),
    "a way in": (way_in, 12),
    "a shifted prefix": (shift, 12),
}
"""Each with the fewest operations that it can be made of."""


def stopped(move: Move, operations: int, error: BaseException) -> bool:
    """Whether the move was stopped by an ``error`` after so many operations; else it is made and checked."""
    try:
        with Failing(operations, error):
            result = move.make()
    except (type(error), CapacityError) as raised:
        if error not in (raised, raised.__cause__):
            raise
        return True
    move.check(result)
    return False


@pytest.mark.parametrize("error", [RuntimeError("no copy"), MemoryError("no memory"), KeyboardInterrupt()])
@pytest.mark.parametrize("name", MOVES)
def test_a_move_that_fails_anywhere_changes_nothing_and_can_be_made_again(
    name: str, error: BaseException
) -> None:
    start, fewest = MOVES[name]
    move, operations = start(), 0
    before = standing(move.pool), drained(move.pool.core)
    while stopped(move, operations, error):
        assert (standing(move.pool), drained(move.pool.core)) == before
        scribble(move.pool)
        operations += 1
    assert operations >= fewest


def test_a_move_that_does_not_fail_does_change_the_pool() -> None:
    """The negative control: what is compared above is changed by every move."""
    for start, _ in MOVES.values():
        move = start()
        before = standing(move.pool), drained(move.pool.core)
        move.make()
        assert (standing(move.pool), drained(move.pool.core)) != before


def test_a_way_out_that_the_host_has_no_memory_for_is_told_in_our_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise RuntimeError("not enough memory")

    pool = make_pool()
    session = scrawled(pool, 9)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", no_memory)
        with untouched(pool, CapacityError) as caught:
            pool.swap_out(session)
    assert "9 tokens on the host" in str(caught.value)


# --- what a device needs for it


class Copies(TorchDispatchMode):
    """Collects each operation on a pool's bytes that is no view of them, with the tensors it is given."""

    def __init__(self, pool: DeviceKvPool) -> None:
        super().__init__()
        self.storage = pool.k_pool(0).untyped_storage().data_ptr()
        self.seen: list[tuple[str, list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        flat = [each for arg in args for each in (arg if isinstance(arg, list) else [arg])]
        given = [each for each in flat if isinstance(each, torch.Tensor)]
        if any(self.is_the_pools(each) for each in given) and not func.is_view:
            self.seen.append((func.__name__.split(".")[0], given))
        return result

    def is_the_pools(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() == self.storage


def gathered(pool: DeviceKvPool, session: SessionHandle) -> torch.Tensor:
    """What :meth:`swap_out` must not do: the blocks next to each other in new memory of the device."""
    return pool._buffers[:, :, list(pool.core.session_block_table(session))]


@pytest.mark.parametrize("move", ["swap", "evict"])
def test_what_goes_to_the_host_and_back_goes_in_pieces_that_need_no_memory_of_the_device(move: str) -> None:
    """What is contiguous on both sides is copied as it lies; anything else is laid out anew first."""
    pool = make_pool()
    session = scrawled(pool, 10)
    with Copies(pool) as copies:
        if move == "swap":
            pool.swap_in(pool.swap_out(session))
        else:
            pool.restore(session, pool.evict(session))
    assert {name for name, _ in copies.seen} == {"stack", "copy_"}
    assert all(tensor.is_contiguous() for _, given in copies.seen for tensor in given)
    assert sum(len(given) for name, given in copies.seen if name == "stack") == 3 * 4
    assert sum(name == "copy_" for name, _ in copies.seen) == 3 * 4


def test_a_gather_on_the_device_is_seen() -> None:
    pool = make_pool()
    with Copies(pool) as copies:
        gathered(pool, scrawled(pool, 10))
        pool.copy_block(0, 1)
    assert "index" in {name for name, _ in copies.seen}
    assert not all(tensor.is_contiguous() for _, given in copies.seen for tensor in given)


# --- images


@every_dtype
def test_an_image_of_another_pool_is_taken_where_the_pool_is_alike_and_else_refused(
    dtype: torch.dtype,
) -> None:
    source = make_pool(dtype=dtype)
    session = scrawled(source, 9)
    before = contents(source, session)
    image = source.swap_out(session)
    twin = make_pool(5, dtype=dtype)
    assert contents(twin, twin.swap_in(image)) == before
    other = torch.float16 if dtype is torch.bfloat16 else torch.bfloat16
    for pool in (make_pool(dtype=other), make_pool(block_size=2, dtype=dtype), make_pool(dim=4, dtype=dtype)):
        with untouched(pool, InvalidRequestError) as caught:
            pool.swap_in(image)
        assert "[2, 2, 3, 4, 2, 8]" in str(caught.value)


# --- blocks that are written to before they are taken


def test_the_next_blocks_are_those_that_are_handed_out_next() -> None:
    pool = make_pool()
    scrawled(pool, 4)
    gone = scrawled(pool, 8)
    pool.core.discard(gone)
    before = drained(pool.core)
    for count in (0, 1, 5, 7):
        assert pool.core.next_blocks(count) == before[:count]
        assert pool.core.free_blocks == 7
        assert drained(pool.core) == before
    with untouched(pool, OutOfBlocksError):
        pool.core.next_blocks(8)
