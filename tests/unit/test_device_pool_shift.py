"""A prefix at another position: K turned by the model's own frequencies, V as it was."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest
import torch
from support_models import distance, tiny
from support_paged import (
    TOLERANCE,
    content,
    contents,
    every_dtype,
    every_family,
    fill,
    ids,
    make_pool,
    model_of,
    opened,
    paged_rows,
    pool_for,
    ragged,
    same,
    untouched,
)
from torch import Tensor

from fuel_core.contracts.errors import (
    OffsetNotBlockAlignedError,
    OutOfBlocksError,
    UnknownPrefixError,
    UnknownSessionError,
)
from fuel_core.kv import BlockKind, DeviceKvPool, PrefixId, SessionHandle
from fuel_core.layers import Decoder, Rope

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}
SCALED = [name for name in SCALINGS if name != "default"]
FREQUENCIES = Rope(torch.tensor([1.0, 0.3, 0.05, 0.001]), 1.0, 256)


# --- the pool


def turned(k: Tensor, angles: Tensor) -> Tensor:
    """``k [..., D]`` as complex numbers ``k_i + j k_(i + D/2)``, turned by ``angles [D/2]``."""
    low, high = k.double().chunk(2, dim=-1)
    result = torch.complex(low, high) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((result.real, result.imag), dim=-1)


def with_prefix(dtype: torch.dtype = torch.float32, num_blocks: int = 16) -> tuple[DeviceKvPool, PrefixId]:
    """A pool with a prefix of two blocks of random numbers, its donor gone."""
    pool = make_pool(num_blocks, dtype=dtype)
    donor = opened(pool, 9)
    generator = torch.Generator().manual_seed(3)
    for block in pool.core.session_block_table(donor):
        for layer in range(2):
            for kind in BlockKind:
                pool.write_block(layer, kind, block, torch.randn(4, 2, 8, generator=generator).to(dtype))
    prefix = pool.core.register_prefix(donor, 8)
    pool.core.discard(donor)
    return pool, prefix


@every_dtype
@pytest.mark.parametrize("offset", [4, 8, 28])
def test_k_is_turned_by_the_offset_and_v_is_copied(dtype: torch.dtype, offset: int) -> None:
    pool, prefix = with_prefix(dtype)
    target = opened(pool, offset)
    before, source = contents(pool, target), pool.core.prefix_blocks(prefix)
    kept = [content(pool, block) for block in source]
    assert pool.splice_prefix_shifted(prefix, target, FREQUENCIES) == 8
    assert pool.core.filled_tokens(target) == offset + 8
    assert contents(pool, target)[: offset // 4] == before
    assert [content(pool, block) for block in source] == kept
    fresh = pool.core.session_block_table(target)[offset // 4 :]
    roundings = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
    for old, new in zip(source, fresh, strict=True):
        for layer in range(2):
            k = pool.read_block(layer, BlockKind.K, old)
            exact = turned(k, offset * FREQUENCIES.inv_freq.double())
            ours = pool.read_block(layer, BlockKind.K, new)
            assert (ours.double() - exact).abs().max() <= roundings[dtype] * exact.abs().max()
            assert distance(ours.float(), k.float()) > 0.1
            v = pool.read_block_bytes(layer, BlockKind.V, new)
            assert v == pool.read_block_bytes(layer, BlockKind.V, old)


@pytest.mark.parametrize("offset", [30_000, 131_072 - 8])
def test_a_shift_over_a_long_way_is_the_rotation_in_float64(offset: int) -> None:
    pool, frequencies = make_pool(offset // 4 + 4, layers=1), FREQUENCIES.inv_freq.double()
    donor, target = opened(pool, 8), opened(pool, offset)
    raw = torch.randn(8, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    places = torch.arange(8, dtype=torch.float64)[:, None, None]  # [T, 1, 1]
    prefix = pool.core.register_prefix(donor, 8)
    pool.k_pool(0)[list(pool.core.prefix_blocks(prefix))] = (
        turned(raw, places * frequencies).float().view(2, 4, 2, 8)
    )
    pool.splice_prefix_shifted(prefix, target, FREQUENCIES)
    ours = pool.k_pool(0)[list(pool.core.session_block_table(target))[-2:]].flatten(0, 1)
    exact = turned(raw, (places + offset) * frequencies)
    assert distance(ours.double(), exact) < 2.0**-20 * exact.abs().max()
    # In float32 the angle is rounded to whole thousandths and more.
    coarse = turned(raw, places * frequencies + (offset * FREQUENCIES.inv_freq).double())
    assert distance(coarse, exact) > 2.0**-14 * exact.abs().max()


def test_the_copy_is_the_sessions_own() -> None:
    pool, prefix = with_prefix()
    source = [content(pool, block) for block in pool.core.prefix_blocks(prefix)]
    targets = [opened(pool, offset) for offset in (4, 4, 0)]
    for target in targets:
        pool.splice_prefix_shifted(prefix, target, FREQUENCIES)
    fresh = [block for target in targets for block in pool.core.session_block_table(target)[-2:]]
    assert len(set(fresh)) == 6
    assert {pool.core.block_refcount(block) for block in fresh} == {1}
    assert contents(pool, targets[0])[1:] == contents(pool, targets[1])[1:]
    assert contents(pool, targets[2]) == source  # turned by nothing
    for block in fresh:
        fill(pool, block, block)
    assert [content(pool, block) for block in pool.core.prefix_blocks(prefix)] == source


def test_a_shift_that_is_refused_changes_nothing() -> None:
    pool, prefix = with_prefix(num_blocks=6)
    target, askew = opened(pool, 8), opened(pool, 3)
    with untouched(pool, OutOfBlocksError):
        pool.splice_prefix_shifted(prefix, target, FREQUENCIES)
    pool.core.truncate(target, 4)
    with untouched(pool, OffsetNotBlockAlignedError) as caught:
        pool.splice_prefix_shifted(prefix, askew, FREQUENCIES)
    assert caught.value.offset == 3
    with untouched(pool, UnknownPrefixError):
        pool.splice_prefix_shifted(PrefixId(99), target, FREQUENCIES)
    with untouched(pool, UnknownSessionError):
        pool.splice_prefix_shifted(prefix, SessionHandle(99), FREQUENCIES)
    assert pool.splice_prefix_shifted(prefix, target, FREQUENCIES) == 8


# --- the model: in one layer, keys and values depend on a token and its position alone

PREFIX, SUFFIX = ids(12, 1), ids(9, 2)


def scaled(name: str, layers: int = 1, **overrides: Any) -> Decoder:
    """A tiny llama whose long wavelengths are ones that a scaling moves."""
    rope = {"rope_theta": 10000.0, **SCALINGS[name]}
    return tiny(num_hidden_layers=layers, rope_parameters=rope, head_dim=16, **overrides)


def shifted(model: Decoder, offset: int, rope: Rope) -> tuple[DeviceKvPool, SessionHandle]:
    """``offset`` tokens, and then the prefix, which another session computed from position 0."""
    pool = pool_for(model, 64, shuffled=offset)
    donor, target = pool.core.open(), pool.core.open()
    ragged(model, pool, {donor: PREFIX, target: ids(offset, 7)})
    pool.splice_prefix_shifted(pool.core.register_prefix(donor, 12), target, rope)
    return pool, target


def shifted_rows(model: Decoder, offset: int, rope: Rope) -> Tensor:
    """Logits ``[9, vocab]`` of what follows the shifted prefix."""
    pool, target = shifted(model, offset, rope)
    return paged_rows(model, pool, target, SUFFIX)


def computed_rows(model: Decoder, offset: int) -> Tensor:
    """The same where the prefix was computed at its place."""
    pool = pool_for(model, 64)
    session = pool.core.open()
    ragged(model, pool, {session: ids(offset, 7) + PREFIX})
    return paged_rows(model, pool, session, SUFFIX)


@pytest.mark.parametrize("offset", [4, 40, 160])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_shifted_prefix_gives_the_logits_of_the_same_prompt_at_that_offset(
    scaling: str, offset: int
) -> None:
    model = scaled(scaling)
    expected = computed_rows(model, offset)
    assert distance(shifted_rows(model, offset, model.rope), expected) < TOLERANCE


@every_family
def test_it_does_so_with_biases_and_with_norms_of_the_heads(family: str) -> None:
    model = tiny(family, **{"block_count" if "gguf" in family else "num_hidden_layers": 1})
    assert distance(shifted_rows(model, 40, model.rope), computed_rows(model, 40)) < TOLERANCE
    still = attrs.evolve(model.rope, inv_freq=torch.zeros_like(model.rope.inv_freq))
    assert distance(shifted_rows(model, 40, still), computed_rows(model, 40)) > 0.01


@pytest.mark.parametrize("scaling", SCALED)
def test_the_unscaled_rotation_is_not_close(scaling: str) -> None:
    model, plain = scaled(scaling), scaled("default").rope
    assert distance(shifted_rows(model, 40, plain), computed_rows(model, 40)) > 1e-3


def test_a_second_attention_factor_is_not_close() -> None:
    model = scaled("yarn")
    assert model.rope.attention_factor == pytest.approx(1 + math.log(4) / 10)
    pool, target = shifted(model, 40, model.rope)
    for block in pool.core.session_block_table(target)[10:]:
        pool.k_pool(0)[block] *= model.rope.attention_factor
    twice = paged_rows(model, pool, target, SUFFIX)
    assert distance(twice, computed_rows(model, 40)) > 1e-3


@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_first_layers_keys_and_values_are_those_computed_at_the_offset(scaling: str) -> None:
    model = scaled(scaling, layers=2)
    pool, target = shifted(model, 40, model.rope)
    session = pool.core.open()
    ragged(model, pool, {session: ids(40, 7) + PREFIX})
    ours, theirs = (list(pool.core.session_block_table(s))[10:] for s in (target, session))
    assert distance(pool.k_pool(0)[ours], pool.k_pool(0)[theirs]) < TOLERANCE
    assert distance(pool.v_pool(0)[ours], pool.v_pool(0)[theirs]) < 1e-5
    # In deeper layers they saw another context, and could not be the same.
    assert distance(pool.v_pool(1)[ours], pool.v_pool(1)[theirs]) > 0.01


def test_every_layer_is_turned() -> None:
    """Read by a model of the same layers at position 0, where nothing stands before the prefix."""
    model = model_of()
    pool = pool_for(model)
    donor = pool.core.open()
    paged_rows(model, pool, donor, PREFIX)
    prefix = pool.core.register_prefix(donor, 12)
    target = opened(pool, 8)
    pool.splice_prefix_shifted(prefix, target, model.rope)
    back = attrs.evolve(model.rope, inv_freq=-model.rope.inv_freq)
    again = pool.core.register_prefix(target, 20)
    assert pool.core.prefix_blocks(again)[2:] == pool.core.session_block_table(target)[2:]
    for block in pool.core.session_block_table(target)[:2]:
        fill(pool, block, 0)
    returned = opened(pool, 8)
    pool.splice_prefix_shifted(again, returned, back)
    blocks = list(pool.core.session_block_table(returned))[4:]
    for layer in range(2):
        first = pool.k_pool(layer)[list(pool.core.prefix_blocks(prefix))]
        assert distance(pool.k_pool(layer)[blocks], first) < 1e-5
        middle = pool.k_pool(layer)[list(pool.core.session_block_table(target))[2:]]
        assert distance(middle, first) > 0.1
        assert same(pool.v_pool(layer)[blocks], pool.v_pool(layer)[list(pool.core.prefix_blocks(prefix))])
