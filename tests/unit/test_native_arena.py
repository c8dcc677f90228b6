"""Recordings share their memory: it is taken once, and lent to one at a time."""

from __future__ import annotations

import pytest
from support_models import tiny
from support_native import Side, recordings, wander

from fuel_core.kernels.native.recording import Arena

pytestmark = pytest.mark.usefixtures("native")


def held(arena: Arena) -> int:
    """Values that an arena has memory for."""
    return sum(buffer.size for buffer in arena._all)


def test_memory_is_taken_once_and_again_by_every_layer_and_every_recording() -> None:
    sizes = []
    for layers in (2, 9):
        side = Side(tiny(num_hidden_layers=layers), 1)
        wander([side], 60)
        sizes.append(held(side.model._arena))
        made = len(recordings(side.pool, side.model))
        wander([side], 60, seed=1)
        more = len(recordings(side.pool, side.model)) - made
        # A result of a recording stays where it is; of five rows of 48 values it has 256.
        assert held(side.model._arena) - sizes[-1] <= 256 * more
    assert sizes[0] == sizes[1]
    assert sizes[0] < 20_000


def test_buffers_in_use_are_lent_to_no_one_else() -> None:
    arena = Arena()
    first, second = arena.empty((3, 5)), arena.empty((15,))
    first.fill_(1.0)
    second.fill_(2.0)
    view = first[1:]
    address = first.data_ptr()
    del first
    assert arena.empty((15,)).data_ptr() not in (address, second.data_ptr())
    assert (view == 1).all()
    del view
    assert arena.empty((2, 8)).data_ptr() == address
