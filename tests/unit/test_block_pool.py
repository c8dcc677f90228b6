"""The pool hands no block out twice, loses none, and is unchanged by what it refuses."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from fuel_core.contracts.errors import (
    CapacityError,
    InvalidRequestError,
    OutOfBlocksError,
    UnknownSessionError,
)
from fuel_core.kv import KvBlockPool, KvGeometry, SessionHandle


def make_pool(num_blocks: int, block_size: int) -> KvBlockPool:
    return KvBlockPool(
        KvGeometry(
            n_layers=2, n_kv_heads=3, head_dim=4, num_blocks=num_blocks, block_size=block_size, elem_size=2
        )
    )


class Snapshot(NamedTuple):
    free: int
    resident: int
    sessions: dict[SessionHandle, tuple[int, tuple[int, ...]]]


def snapshot(pool: KvBlockPool, handles: Any) -> Snapshot:
    held = {handle: (pool.filled_tokens(handle), pool.session_blocks(handle)) for handle in handles}
    return Snapshot(pool.free_blocks, pool.kv_bytes_resident, held)


class PoolMachine(RuleBasedStateMachine):
    """The pool beside a naive model that only counts each session's tokens."""

    handles: Bundle[SessionHandle] = Bundle("handles")

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 5))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.size, self.total = block_size, num_blocks
        self.pool = make_pool(num_blocks, block_size)
        self.tokens: dict[SessionHandle, int] = {}
        self.closed: list[SessionHandle] = []

    def blocks_of(self, tokens: int) -> int:
        """Counted one by one, as no formula would."""
        blocks = 0
        while blocks * self.size < tokens:
            blocks += 1
        return blocks

    def free(self) -> int:
        return self.total - sum(self.blocks_of(tokens) for tokens in self.tokens.values())

    @rule(target=handles)
    def open(self) -> SessionHandle:
        handle = self.pool.open()
        assert handle not in self.tokens
        assert handle not in self.closed
        self.tokens[handle] = 0
        return handle

    @rule(handle=handles, add=st.integers(0, 20))
    def append(self, handle: SessionHandle, add: int) -> None:
        before = snapshot(self.pool, self.tokens)
        need = self.blocks_of(self.tokens[handle] + add) - self.blocks_of(self.tokens[handle])
        assert self.pool.blocks_required(self.tokens[handle], add) == need
        if need > self.free():
            with pytest.raises(OutOfBlocksError) as caught:
                self.pool.append(handle, add)
            assert (caught.value.need, caught.value.have) == (need, self.free())
            assert snapshot(self.pool, self.tokens) == before
            return
        self.pool.append(handle, add)
        self.tokens[handle] += add
        kept = before.sessions[handle][1]
        assert self.pool.session_blocks(handle)[: len(kept)] == kept

    @rule(handle=consumes(handles))
    def discard(self, handle: SessionHandle) -> None:
        self.pool.discard(handle)
        del self.tokens[handle]
        self.closed.append(handle)

    @rule(handle=handles, add=st.integers(-9, -1))
    def append_fewer_than_none(self, handle: SessionHandle, add: int) -> None:
        before = snapshot(self.pool, self.tokens)
        with pytest.raises(InvalidRequestError):
            self.pool.append(handle, add)
        assert snapshot(self.pool, self.tokens) == before

    @rule(data=st.data())
    def use_a_handle_that_is_not_open(self, data: st.DataObject) -> None:
        never = SessionHandle(len(self.tokens) + len(self.closed))
        handle = data.draw(st.sampled_from([*self.closed, never, SessionHandle(-1)]))
        before = snapshot(self.pool, self.tokens)
        for call in (
            self.pool.discard,
            self.pool.filled_tokens,
            self.pool.session_blocks,
            lambda handle: self.pool.append(handle, 0),
            lambda handle: self.pool.append(handle, 10**6),
        ):
            with pytest.raises(UnknownSessionError) as caught:
                call(handle)
            assert caught.value.session == handle  # type: ignore[attr-defined]
        assert snapshot(self.pool, self.tokens) == before

    @invariant()
    def every_block_is_free_or_held_once(self) -> None:
        held = [block for handle in self.tokens for block in self.pool.session_blocks(handle)]
        assert len(set(held)) == len(held)
        assert set(held) <= set(range(self.total))
        assert self.pool.free_blocks + len(held) == self.total

    @invariant()
    def fills_and_counts_are_those_of_the_model(self) -> None:
        assert self.pool.free_blocks == self.free()
        for handle, tokens in self.tokens.items():
            assert self.pool.filled_tokens(handle) == tokens
            assert len(self.pool.session_blocks(handle)) == self.blocks_of(tokens)

    @invariant()
    def capacity_and_bytes_follow(self) -> None:
        capacity = self.pool.capacity()
        assert (capacity.free_blocks, capacity.total_blocks) == (self.free(), self.total)
        # 2 layers, K and V, 3 heads, 4 values of 2 bytes.
        assert self.pool.kv_bytes_resident == (self.total - self.free()) * self.size * 2 * 2 * 3 * 4 * 2

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for handle in list(self.tokens):
                self.pool.discard(handle)
            whole = self.pool.open()
            self.pool.append(whole, self.total * self.size)
            assert sorted(self.pool.session_blocks(whole)) == list(range(self.total))


TestPoolAgainstModel = PoolMachine.TestCase
TestPoolAgainstModel.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_a_session_that_fills_the_pool_to_the_last_token_fits_and_one_more_token_does_not() -> None:
    pool = make_pool(num_blocks=3, block_size=4)
    handle = pool.open()
    pool.append(handle, 12)
    assert pool.free_blocks == 0
    with pytest.raises(OutOfBlocksError) as caught:
        pool.append(handle, 1)
    assert (caught.value.need, caught.value.have) == (1, 0)
    assert isinstance(caught.value, CapacityError)
    pool.append(handle, 0)


def test_the_room_left_in_a_last_block_costs_no_other() -> None:
    pool = make_pool(num_blocks=4, block_size=4)
    handle = pool.open()
    pool.append(handle, 5)
    first = pool.session_blocks(handle)
    pool.append(handle, 3)
    assert pool.session_blocks(handle) == first
    pool.append(handle, 1)
    assert pool.session_blocks(handle)[:2] == first
    assert len(pool.session_blocks(handle)) == 3


@pytest.mark.parametrize(
    ("filled", "add", "blocks"),
    [(0, 0, 0), (0, 1, 1), (0, 4, 1), (0, 5, 2), (3, 1, 0), (4, 1, 1), (4, 0, 0), (7, 10, 3)],
)
def test_blocks_required_count_only_what_is_new(filled: int, add: int, blocks: int) -> None:
    assert make_pool(num_blocks=1, block_size=4).blocks_required(filled, add) == blocks


def test_a_discarded_session_s_blocks_serve_the_next_one() -> None:
    pool = make_pool(num_blocks=2, block_size=4)
    first, second = pool.open(), pool.open()
    pool.append(first, 4)
    pool.append(second, 4)
    freed = pool.session_blocks(first)
    pool.discard(first)
    third = pool.open()
    pool.append(third, 4)
    assert pool.session_blocks(third) == freed


def test_the_pool_works_where_torch_is_never_imported() -> None:
    code = """
import sys
from fuel_core.kv import KvBlockPool, KvBudget, KvGeometry, PoolCapacity, SessionHandle
pool = KvBlockPool(KvGeometry(2, 2, 4, 8, 4, 2))
handle = pool.open()
pool.append(handle, 9)
assert (pool.capacity().free_blocks, pool.session_blocks(handle)) == (5, (0, 1, 2))
pool.discard(handle)
assert pool.free_blocks == 8 and pool.kv_bytes_resident == 0
assert "torch" not in sys.modules
from fuel_core.kv import KvCache
assert "torch" in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_of_the_kv_package_is_an_attribute_error() -> None:
    import fuel_core.kv

    with pytest.raises(AttributeError, match="NoSuchCache"):
        fuel_core.kv.NoSuchCache  # noqa: B018
