"""What the block pool costs per block, in pools of different sizes: it should be the same in all of them."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Sequence
from time import process_time

import attrs

from fuel_core.kv import Evicted, KvBlockPool, KvGeometry, SessionHandle

BLOCK_SIZE = 16


@attrs.frozen
class Row:
    """Nanoseconds per block in a pool of ``blocks``; ``open_us`` is microseconds for the pool itself."""

    blocks: int
    sessions: int
    open_us: float
    append: float
    append_in_turns: float
    splice: float
    evict: float
    restore: float
    discard: float


def timed(call: Callable[[], object], count: int) -> float:
    """Nanoseconds for each of ``count`` blocks that a call handles."""
    start = process_time()
    call()
    return (process_time() - start) / count * 1e9


def measure(blocks: int, sessions: int) -> Row:
    """Every session takes an equal share of all blocks, and the pool is used up and emptied twice."""
    geometry = KvGeometry(1, 1, 1, num_blocks=blocks, block_size=BLOCK_SIZE, elem_size=2)
    start = process_time()
    pool = KvBlockPool(geometry)
    open_us = (process_time() - start) * 1e6
    each = blocks // sessions
    used = each * sessions
    handles = [pool.open() for _ in range(sessions)]
    sharers = [pool.open() for _ in range(sessions)]
    append = timed(lambda: grow(pool, handles, each * BLOCK_SIZE), used)
    splice = timed(lambda: share(pool, handles, sharers, each), used)
    close(pool, sharers)
    evicted: list[Evicted] = []
    evict = timed(lambda: evicted.extend(pool.evict(handle).handle for handle in handles), used)
    restore = timed(lambda: [pool.restore(handle.session, handle) for handle in evicted], used)
    discard = timed(lambda: close(pool, handles), used)
    handles = [pool.open() for _ in range(sessions)]
    in_turns = timed(lambda: grow(pool, handles * each, BLOCK_SIZE), used)
    return Row(blocks, sessions, open_us, append, in_turns, splice, evict, restore, discard)


def grow(pool: KvBlockPool, handles: Sequence[SessionHandle], tokens: int) -> None:
    for handle in handles:
        pool.append(handle, tokens)


def close(pool: KvBlockPool, handles: Sequence[SessionHandle]) -> None:
    for handle in handles:
        pool.discard(handle)


def share(
    pool: KvBlockPool, donors: Sequence[SessionHandle], sharers: Sequence[SessionHandle], blocks: int
) -> None:
    for donor, sharer in zip(donors, sharers, strict=True):
        pool.splice(donor, sharer, 0, blocks)


def best(blocks: int, sessions: int, repeats: int) -> Row:
    """The least of each figure: what the machine does when nothing else runs."""
    gc.collect()
    gc.disable()  # it would count the objects of all pools against the largest
    rows = [attrs.astuple(measure(blocks, sessions)) for _ in range(repeats)]
    return Row(*map(min, zip(*rows, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1_000, 100_000, 1_000_000])
    parser.add_argument("--sessions", type=int, default=10_000, help="at most; each has 100 blocks or more")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    names = [field.name for field in attrs.fields(Row)]
    print("ns per block; the last line is the largest pool over the smallest\n")
    print(*(f"{name:>15}" for name in names))
    rows = [best(n, max(1, min(args.sessions, n // 100)), args.repeats) for n in args.blocks]
    for row in rows:
        print(*(f"{value:15,.0f}" for value in attrs.astuple(row)))
    ratios = [getattr(rows[-1], name) / getattr(rows[0], name) for name in names]
    print(*(f"{ratio:15.2f}" for ratio in ratios))


if __name__ == "__main__":
    main()
