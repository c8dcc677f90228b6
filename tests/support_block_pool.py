"""Block pools for tests: small ones, what they are inside, and the proof that a refusal changed nothing."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import attrs
import pytest

from fuel_core.contracts.errors import FuelError
from fuel_core.kv import Evicted, KvBlockPool, KvGeometry, SessionHandle


def make_pool(num_blocks: int, block_size: int) -> KvBlockPool:
    """2 layers, 3 KV heads of 4 values of 2 bytes."""
    return KvBlockPool(
        KvGeometry(
            n_layers=2, n_kv_heads=3, head_dim=4, num_blocks=num_blocks, block_size=block_size, elem_size=2
        )
    )


def opened(pool: KvBlockPool, tokens: int) -> SessionHandle:
    """A new session with that many tokens."""
    session = pool.open()
    pool.append(session, tokens)
    return session


def freeze(part: Any) -> Any:
    """All that an object is made of, to compare with itself later."""
    if isinstance(part, Evicted):
        return "handle", id(part)
    if isinstance(part, WeakSet):
        return {id(member) for member in part}
    if isinstance(part, dict):
        return {key: freeze(value) for key, value in part.items()}
    if isinstance(part, list | tuple | array):
        return [freeze(member) for member in part]
    if attrs.has(type(part)):
        return {field.name: freeze(getattr(part, field.name)) for field in attrs.fields(type(part))}
    return freeze(vars(part)) if hasattr(part, "__dict__") else part


def drained(pool: KvBlockPool) -> tuple[int, ...]:
    """The pool's free blocks, in the order in which it would hand them out."""
    twin = copy.deepcopy(pool)
    session = twin.open()
    twin.append(session, twin.free_blocks * twin.geometry.block_size)
    return twin.session_block_table(session)


@contextmanager
def refused(pool: KvBlockPool, *errors: type[FuelError]) -> Iterator[Any]:
    """The body raises one of exactly these ``errors``, in one line, and the pool is what it was."""
    before = freeze(pool)
    with pytest.raises(errors) as caught:
        yield caught
    assert type(caught.value) in errors
    assert "\n" not in str(caught.value)
    assert freeze(pool) == before
