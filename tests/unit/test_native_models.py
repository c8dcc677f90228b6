"""Every family on the native kernels: the reference's logits, and the same bits by whatever way they come."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support_checkpoints import write_directory, write_gguf
from support_engine import Ask, alone, drain, engine_of, submit
from support_models import feed, feed_together, new_cache, tiny
from support_native import ISAS
from support_paged import (
    every_block_size,
    every_family,
    ids,
    lone_rows,
    paged_rows,
    planned_rows,
    pool_for,
    ragged,
    same,
)
from support_parity import load
from support_twins import Twin
from torch import Tensor

import fuel_core as fuel
from fuel_core import _native
from fuel_core.contracts import DecodeSession
from fuel_core.kernels import ops
from fuel_core.kernels.native.tiles import TiledProduct
from fuel_core.layers import Decoder

TOKENS = ids(45)


@cache
def native_model(family: str, **sizes: Any) -> Decoder:
    """A tiny model in tiles; made under the fixture ``native``."""
    assert ops.installed("cpu") == "native"
    model: Any = tiny(family, **sizes)
    assert isinstance(model.layers[0].attention.qkv.product, TiledProduct)
    return model  # type: ignore[no-any-return]


@contextmanager
def on_reference() -> Iterator[None]:
    """The reference kernels in the body."""
    before = dict(ops._installed)
    ops._installed.clear()
    try:
        yield
    finally:
        ops._installed.update(before)


def relative(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, by the largest value; a NaN is infinitely far."""
    return float((ours - theirs).abs().nan_to_num(nan=torch.inf).max() / theirs.abs().max())


@every_family
@pytest.mark.parametrize("isa", ISAS)
def test_logits_are_those_of_the_reference(family: str, isa: str, native: ModuleType) -> None:
    _native.use(isa)
    ours = lone_rows(native_model(family), TOKENS)
    with on_reference():
        expected = lone_rows(tiny(family), TOKENS)
        other = lone_rows(tiny(family, 1), TOKENS)
    limit = 0.03 if family.endswith("gguf") else 1e-4  # inputs of blocks are rounded
    assert relative(ours, expected) <= limit
    assert relative(other, expected) > 0.3


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "F16"])
def test_logits_of_blocks_are_those_of_the_reference_but_for_the_rounding_of_inputs(
    kind: str, tmp_path: Path, native: ModuleType
) -> None:
    file = Twin(tmp_path, kind).file
    ours = lone_rows(load(file), TOKENS)
    with on_reference():
        expected = lone_rows(load(file), TOKENS)
    assert relative(ours, expected) <= (1e-4 if kind == "F16" else 0.05)
    close = torch.nn.functional.cosine_similarity(ours, expected, dim=-1)
    assert close.min() > 0.999


def test_a_model_in_a_narrow_type_or_a_format_without_tiles_is_served(
    tmp_path: Path, native: ModuleType
) -> None:
    file = Twin(tmp_path, "Q2_K").file
    for dtype, limit in ((torch.float32, 1e-4), (torch.bfloat16, 0.05)):
        ours = lone_rows(load(file, dtype), TOKENS)
        with on_reference():
            expected = lone_rows(load(file, dtype), TOKENS)
        assert relative(ours, expected) <= limit


# --- one arithmetic


@every_family
@every_block_size
def test_every_tier_says_the_same_to_the_bit(family: str, block_size: int, native: ModuleType) -> None:
    model = native_model(family)
    expected = lone_rows(model, TOKENS)
    pool = pool_for(model, 160, block_size, shuffled=3)
    assert same(paged_rows(model, pool, pool.core.open(), TOKENS[:20]), expected[:20])
    planned = planned_rows(model, pool, pool.core.open(), TOKENS[:20], DecodeSession(), width=20)
    assert same(planned, expected[:20])
    sessions = [pool.core.open() for _ in range(3)]
    for at, token in enumerate(TOKENS[:6]):
        together = model.forward_paged_step_batched([token] * 3, pool, sessions)
        assert same(together, expected[at].expand(3, -1))
    caches = [new_cache(model, 9) for _ in range(3)]
    for at, token in enumerate(TOKENS[:6]):
        assert same(feed_together(model, caches, [token] * 3), expected[at].expand(3, -1))


@every_family
def test_chunks_of_any_size_in_any_company_say_the_same_to_the_bit(family: str, native: ModuleType) -> None:
    model = native_model(family)
    expected = lone_rows(model, TOKENS)
    assert same(feed(model, new_cache(model, 45), *TOKENS), expected[-1])
    for chunk in (2, 3, 7, 16, 45):
        pool, cache = pool_for(model, 64, shuffled=chunk), new_cache(model, 45)
        session, other = pool.core.open(), pool.core.open()
        for start in range(0, 45, chunk):
            new = TOKENS[start : start + chunk]
            row = ragged(model, pool, {other: ids(1, start), session: new})[1]
            assert same(row, expected[min(start + chunk, 45) - 1])
            assert same(feed(model, cache, *new), row)


CONDITIONS: Mapping[str, Mapping[str, Any]] = {
    "in company": {},
    "in chunks": {"token_budget": 3},
    "swapped at every step": {"swaps": True},
    "in permuted blocks": {"shuffled": 5},
    "few at a time": {"max_batch": 3},
    "in a full pool": {"num_blocks": 6},
}


@every_family
@pytest.mark.parametrize("condition", CONDITIONS)
def test_the_engine_says_of_each_request_what_it_says_alone_to_the_bit(
    family: str, condition: str, native: ModuleType
) -> None:
    model = native_model(family)
    prefix = ids(8)
    asks = [Ask(ids(length, seed=length), seed=length if length % 2 else None) for length in (1, 3, 4, 5, 8)]
    asks += [Ask(prefix + ids(3, seed=at), n=2) for at in (1, 2)]
    engine = engine_of(model, **CONDITIONS[condition])
    queued = submit(engine, *asks)
    engine.run_to_completion()
    for request, number, id in queued:
        tokens, rows = alone(model, request, number)
        assert engine.session_new_tokens(id) == tokens
        assert same(engine.logits(id), rows)
    drain(engine)


# --- the process


def test_a_loaded_model_says_the_same_on_both_kernels(tmp_path: Path, native: ModuleType) -> None:
    path = write_directory(tmp_path / "tiny")
    said = {}
    for kernels in ("native", "reference"):
        loaded = fuel.load(path, kernels=kernels, threads=2)
        assert is_tiled(loaded) == (kernels == "native")
        said[kernels] = [each.token_ids for each in fuel.generate(loaded, ["one", "two"], max_new_tokens=12)]
    assert said["native"] == said["reference"]


def test_blocks_of_a_file_are_loaded_in_tiles(tmp_path: Path, native: ModuleType) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    assert is_tiled(fuel.load(path, kernels="native"))
    assert not is_tiled(fuel.load(path, kernels="reference"))


def is_tiled(loaded: Any) -> bool:
    return isinstance(loaded.model.layers[0].mlp.down.product, TiledProduct)


def test_a_model_keeps_its_kernels_products_when_others_are_installed(native: ModuleType) -> None:
    model = tiny()
    pool = pool_for(model)
    session, before = pool.core.open(), pool_for(model)
    expected = paged_rows(model, before, before.core.open(), TOKENS[:9])
    assert relative(paged_rows(model, pool, session, TOKENS[:4]), expected[:4]) == 0
    with on_reference():
        changed = pool_for(model)
        ours = paged_rows(model, changed, changed.core.open(), TOKENS[:9])
    assert relative(ours, expected) <= 1e-4
    assert not torch.equal(ours, expected)
    assert not any(step.recording for step in changed.plans[model].values())


FORKED = """
    import os
    import signal

    import torch
    from fuel_core import _native, registry
    from fuel_core.contracts import DecodeSession, KernelBackend, ModelDims
    from fuel_core.kernels import native, ops
    from fuel_core.kv import KvCache

    ops.install(KernelBackend(name="native", devices=("cpu",), load=lambda: native), "cpu")
    torch.set_num_threads(1)
    _native.set_threads(3)
    model = registry.family("llama").tiny(0, hidden_size=256, intermediate_size=512)
    dims = ModelDims.from_model(model)

    def logits():
        cache = KvCache(dims.n_layers, dims.n_kv_heads, dims.head_dim, 64)
        return model.forward_with_kv_context_persistent(list(range(60)), cache, DecodeSession())

    expected = logits()
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends a child that waits for threads that only its parent has
        right = _native.threads() == 3
        for threads in (3, 2, 4):
            _native.set_threads(threads)
            right &= all(torch.equal(logits(), expected) for _ in range(5))
        os._exit(0 if right else 1)
    assert torch.equal(logits(), expected)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(logits(), expected)
    print("both")
"""


def test_a_process_that_was_forked_after_use_computes_as_its_parent_does() -> None:
    code = [sys.executable, "-c", textwrap.dedent(FORKED)]
    ran = subprocess.run(code, capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stdout) == (0, "both\n"), ran.stderr
