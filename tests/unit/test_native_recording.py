"""A recorded step is the step, to the bit, whoever comes and goes; nothing is recorded that cannot be."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
from support_models import BreakableDecoder, tiny
from support_native import Side, recordings, unrecorded, wander
from support_paged import (
    every_family,
    ids,
    planned_rows,
    pool_for,
    ragged,
    same,
    standing,
)
from torch import Tensor

from fuel_core import _native
from fuel_core.contracts import DecodeSession
from fuel_core.kernels.native import Arena, recording, tiled_product
from fuel_core.layers import Decoder, Step
from fuel_core.schedule import PagedDecodePlan

pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[recording.Recording]:
    """Every run of a recording, as they come."""
    made: list[recording.Recording] = []
    run = recording.Recording.run

    def counted(self: recording.Recording) -> Tensor:
        made.append(self)
        return run(self)

    monkeypatch.setattr(recording.Recording, "run", counted)
    return made


@every_family
def test_a_recorded_step_has_the_bits_of_one_that_is_not(
    family: str, runs: list[recording.Recording]
) -> None:
    sides = [Side(tiny(family), 1), Side(unrecorded(tiny(family)), 2)]
    for ours, theirs in wander(sides, 80):
        assert same(ours, theirs)
    made = recordings(sides[0].pool, sides[0].model)
    assert {batch for batch, _ in made} == {1, 2, 3, 4, 5}
    assert not recordings(sides[1].pool, sides[1].model)
    assert set(runs) <= set(made.values())
    assert len(runs) == 80 - len(made)


def test_a_recording_that_ran_on_inputs_of_before_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    sides = [Side(model, 1), Side(unrecorded(tiny()), 2)]
    monkeypatch.setattr(recording.Recording, "run", lambda self: self._out)
    assert not all(same(ours, theirs) for ours, theirs in wander(sides, 40))


def test_models_and_pools_side_by_side_keep_to_their_own() -> None:
    models = [tiny(seed=0), tiny(seed=1)]
    pools = [pool_for(models[0], shuffled=seed) for seed in (1, 2)]
    tokens = ids(12)
    expected = []
    for seed in (0, 1):
        other = Side(unrecorded(tiny(seed=seed)), 3)
        session = other.pool.core.open()
        expected.append([other.step([session], [[token]]) for token in tokens])
    assert not torch.equal(expected[0][-1], expected[1][-1])
    sessions = {(m, p): pools[p].core.open() for m in (0, 1) for p in (0, 1)}
    for at, token in enumerate(tokens):
        for (m, p), session in sessions.items():
            assert same(ragged(models[m], pools[p], {session: [token]}), expected[m][at])
    assert all(recordings(pool, model) for pool in pools for model in models)


def test_a_pool_lets_go_of_the_recordings_of_a_model_that_is_gone() -> None:
    kept, gone = tiny(), tiny(seed=1)
    side = Side(kept, 1)
    for model in (kept, gone):
        ragged(model, side.pool, {side.pool.core.open(): [3]})
    assert len(side.pool.plans) == 2
    del gone, model
    assert list(side.pool.plans) == [kept]


# --- what cannot be recorded


class Doing(Decoder):
    """A decoder that does something to the result of each layer."""

    def __init__(self, inner: Decoder, deed: Callable[[Tensor], Tensor]) -> None:
        super().__init__(inner.parts)
        self.inner, self.deed, self.calls = inner, deed, 0

    def layer(self, i: int, x: Tensor, step: Step) -> Tensor:
        self.calls += 1
        return self.deed(self.inner.layer(i, x, step))


DEEDS: dict[str, Callable[[Tensor], Tensor]] = {
    "times one": lambda x: x * 1.0,
    "tanh": torch.tanh,
    "a scalar added": lambda x: x + 0.5,
    "a vector added": lambda x: x + torch.ones(x.shape[-1]),
    "twice added": lambda x: torch.add(x, x, alpha=2),
    "added in place": lambda x: x.add_(x),
    "copied": lambda x: x.clone(),
    "narrowed": lambda x: x.half().float(),
    "turned about": lambda x: x.flip(-1),
    "branched on": lambda x: x + x if bool(x.sum() > 0) else x,
    "made contiguous": lambda x: x.view(-1, 6, 8).mT.contiguous().view(x.shape),
    "reshaped": lambda x: x.view(-1, 6, 8).mT.reshape(x.shape),
    "in parts": lambda x: torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1),
}


@pytest.mark.parametrize("deed", DEEDS)
def test_a_step_that_pytorch_has_a_part_in_is_not_recorded_and_is_right(
    deed: str, runs: list[recording.Recording]
) -> None:
    ours = Doing(tiny(), DEEDS[deed])
    sides = [Side(ours, 1), Side(unrecorded(Doing(tiny(), DEEDS[deed])), 2)]
    for one, other in wander(sides, 12):
        assert same(one, other)
    assert not recordings(sides[0].pool, ours)
    assert not runs
    plain = [Side(tiny(), 1), sides[0]]
    assert deed in ("times one", "copied", "narrowed") or not all(
        same(one, other) for one, other in wander(plain, 3, seed=5)
    )


def test_sums_and_views_of_what_kernels_gave_are_recorded(runs: list[recording.Recording]) -> None:
    sides = [Side(Doing(tiny(), lambda x: x + x.view(-1, 6, 8).reshape(x.shape)), seed) for seed in (1, 2)]
    unrecorded(sides[1].model)
    assert all(same(ours, theirs) for ours, theirs in wander(sides, 12))
    assert runs


def test_another_thread_records_nothing_of_what_it_does_meanwhile() -> None:
    side = Side(tiny(), 1)
    session = side.pool.core.open()
    x = torch.ones(1, 8)
    out = torch.empty(1, 4)

    def elsewhere() -> None:
        _native.silu_mul(x.data_ptr(), 1, 4, out.data_ptr())

    def deed(y: Tensor) -> Tensor:
        other = threading.Thread(target=elsewhere)
        other.start()
        other.join()
        return y

    alone = Side(Doing(tiny(), lambda y: y), 2)
    alone.step([alone.pool.core.open()], [[1]])
    busy = Doing(side.model, deed)
    ragged(busy, side.pool, {session: [1]})
    [ours], [theirs] = recordings(side.pool, busy).values(), recordings(alone.pool, alone.model).values()
    assert len(ours) == len(theirs) > 10


@pytest.mark.parametrize("place", ["before", "inside", "after"])
def test_a_layer_that_raises_leaves_no_recording_behind(place: str, runs: list[recording.Recording]) -> None:
    breakable = BreakableDecoder(tiny())
    side, right = Side(breakable, 1), Side(unrecorded(tiny()), 2)
    session, other = side.pool.core.open(), right.pool.core.open()
    setattr(breakable, place, 1)
    before = standing(side.pool)
    with pytest.raises((RuntimeError, ValueError)):
        side.step([session], [[3]])
    assert standing(side.pool) == before
    assert not recordings(side.pool, breakable)
    assert getattr(recording._here, "arena", None) is None
    calls = recording.empty(4)
    assert all(calls.data_ptr() != buffer.ctypes.data for buffer in breakable._arena._all)
    setattr(breakable, place, None)
    for token in ids(9):
        assert same(side.step([session], [[token]]), right.step([other], [[token]]))
    assert runs
    assert not breakable._arena.lock.locked()


# --- plans and threads


@every_family
def test_a_plan_that_is_kept_runs_its_recording_and_counts_its_rebinds(
    family: str, runs: list[recording.Recording]
) -> None:
    model, tokens = tiny(family), ids(30)
    once, anew = (pool_for(model, 40, shuffled=seed) for seed in (1, 2))
    holder, fresh = DecodeSession(), DecodeSession()
    planned = planned_rows(model, once, once.core.open(), tokens, holder, width=40)
    assert len(set(runs)) == 1
    assert len(runs) == holder.rebinds == 29
    replanned = planned_rows(model, anew, anew.core.open(), tokens, fresh, PagedDecodePlan.REPLAN)
    assert same(planned, replanned)
    assert fresh.rebinds == 0
    right = Side(unrecorded(tiny(family)), 3)
    session = right.pool.core.open()
    assert same(planned, torch.cat([right.step([session], [[token]]) for token in tokens]))


def test_a_result_is_the_callers_to_keep() -> None:
    side = Side(tiny(), 1)
    session = side.pool.core.open()
    rows = [side.step([session], [[token]]) for token in ids(6)]
    before = [row.clone() for row in rows]
    side.step([session], [[5]])
    assert all(map(torch.equal, rows, before))


def test_threads_that_share_a_model_get_what_each_gets_alone() -> None:
    model, expected = tiny(), []
    prompts = [ids(60, seed=seed) for seed in range(3)]
    for prompt in prompts:
        alone = Side(unrecorded(tiny()), 9)
        session = alone.pool.core.open()
        expected.append([alone.step([session], [[token]]) for token in prompt])
    wrong: list[int] = []
    start = threading.Barrier(3)

    def decode(at: int) -> None:
        side = Side(model, at)
        session = side.pool.core.open()
        start.wait()
        for token, right in zip(prompts[at], expected[at], strict=True):
            if not torch.equal(ragged(model, side.pool, {session: [token]}), right):
                wrong.append(at)

    threads = [threading.Thread(target=decode, args=(at,)) for at in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_recording_keeps_the_matrices_that_it_reads() -> None:
    product = tiled_product([torch.eye(16)], [None])
    x = torch.arange(32.0).view(2, 16)
    out, made = Arena().record(partial(product, x))
    assert made is not None
    expected = out.clone()
    del product
    gc.collect()
    others = [tiled_product([torch.full((16, 16), float(i))], [None]) for i in range(50)]  # in its place
    x.mul_(2)
    assert torch.equal(made.run(), 2 * expected)
    assert len(others) == 50


def test_threads_that_the_system_refuses_cost_speed_and_nothing_else() -> None:
    """The control is the last line: there would be more threads if the system gave them."""
    code = """
import resource, torch
from fuel_core import _native
from fuel_core.kernels.native import tiled_product
product, x = tiled_product([torch.eye(512)], [None]), torch.rand(64, 512)
_native.set_threads(200)
size = int(next(line for line in open("/proc/self/status") if line.startswith("VmSize")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (size + (300 << 20), resource.RLIM_INFINITY))
for count in (200, 2, 200):
    _native.set_threads(count)
    assert torch.equal(product(x), x)
    print(_native.threads())
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
_native.set_threads(200)
product(x)
print(_native.threads())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, two, again, free = map(int, done.stdout.split())
    assert first < 200
    assert two == 2
    assert again < 200
    assert free == 200
