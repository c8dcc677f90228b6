"""A pass of K sessions is K lone steps: the same logits, all of them or none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support_models import (
    BreakableDecoder,
    content,
    distance,
    feed,
    feed_together,
    new_cache,
    tiny,
)

from fuel_core.contracts import DecodeModel, ModelDims
from fuel_core.contracts.errors import (
    CapacityError,
    FuelError,
    InvalidRequestError,
    ModelContractError,
)
from fuel_core.kv import KvCache

PROMPTS = ((1, 2, 3), (4, 5, 6), (7, 8, 9))
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model() -> DecodeModel:
    return tiny(seed=12)


def filled_caches(model: DecodeModel, size: int = 10) -> list[KvCache]:
    caches = [new_cache(model, size) for _ in PROMPTS]
    for cache, prompt in zip(caches, PROMPTS, strict=True):
        feed(model, cache, *prompt)
    return caches


# --- one pass against lone steps


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "llama-gguf", "qwen2-gguf", "qwen3-gguf"])
def test_a_batched_step_is_one_lone_step_for_each_cache_and_writes_the_same(family: str) -> None:
    model, tokens = tiny(family, 9), (11, 12, 13)
    together, alone = filled_caches(model), filled_caches(model)
    for _ in range(2):
        rows = feed_together(model, together, tokens)
        expected = torch.stack(
            [feed(model, cache, token) for cache, token in zip(alone, tokens, strict=True)]
        )
        assert distance(rows, expected) < TOLERANCE
    for one, other in zip(together, alone, strict=True):
        assert one.cached_len == other.cached_len == 5
        assert distance(one.k[:, :, :5], other.k[:, :, :5]) < TOLERANCE
        assert distance(one.v[:, :, :5], other.v[:, :, :5]) < TOLERANCE
    assert distance(rows[0], rows[1]) > 0.1


def test_the_same_comparison_sees_two_caches_swapped(model: DecodeModel) -> None:
    right = feed_together(model, filled_caches(model), [11, 12, 13])
    a, b, c = filled_caches(model)
    swapped = feed_together(model, [b, a, c], [11, 12, 13])
    assert distance(right[2], swapped[2]) < TOLERANCE
    assert distance(right[:2], swapped[:2]) > 0.01


@pytest.mark.parametrize("order", [(2, 0, 1), (1, 0), (0,)])
def test_rows_stand_in_the_order_of_the_caches(model: DecodeModel, order: tuple[int, ...]) -> None:
    every = feed_together(model, filled_caches(model), [11, 12, 13])
    caches = filled_caches(model)
    rows = feed_together(model, [caches[i] for i in order], [11 + i for i in order])
    assert distance(rows, every[list(order)]) < TOLERANCE


# --- all or nothing


def _grow(model: DecodeModel, cache: KvCache) -> KvCache:
    feed(model, cache, 1)
    return cache


def _half(model: DecodeModel, cache: KvCache) -> KvCache:
    half = new_cache(model, 10, torch.bfloat16)
    feed(model, half, *PROMPTS[2])
    return half


def _other(model: DecodeModel, cache: KvCache) -> KvCache:
    other = KvCache(2, 1, 8, 10)
    other.cached_len = 3
    return other


def _full(model: DecodeModel, cache: KvCache) -> KvCache:
    full = new_cache(model, 3)
    feed(model, full, *PROMPTS[2])
    return full


@pytest.mark.parametrize("change", [_grow, _half, _other, _full])
@pytest.mark.parametrize("row", [0, 2])
def test_a_cache_that_does_not_fit_the_batch_leaves_every_cache_untouched(
    model: DecodeModel, change: Any, row: int
) -> None:
    caches = filled_caches(model)
    caches[row] = change(model, caches[row])
    says = {_grow: "holds", _half: "requested dtype torch.float32", _other: str(ModelDims(2, 1, 8))}
    error = CapacityError if change is _full else ModelContractError
    before = [content(cache) for cache in caches]
    with pytest.raises(error, match=says.get(change, "3 cached").replace("(", r"\(").replace(")", r"\)")):
        feed_together(model, caches, [1, 2, 3])
    assert [content(cache) for cache in caches] == before


@pytest.mark.parametrize(
    ("picked", "tokens", "error"),
    [
        ((0, 1, 2), (1, 2, -1), InvalidRequestError),
        ((0, 1, 2), (1, 2, 96), InvalidRequestError),
        ((0, 1, 2), (-96, 1, 2), InvalidRequestError),
        ((0, 1, 2), (1, 2), ModelContractError),
        ((0, 1), (1, 2, 3), ModelContractError),
        ((0, 1, 0), (1, 2, 3), ModelContractError),
        ((0, 1, 1), (1, 2, 2), ModelContractError),
        ((), (), ModelContractError),
    ],
)
def test_a_batch_that_is_refused_writes_nothing_and_can_be_put_right(
    model: DecodeModel, picked: tuple[int, ...], tokens: tuple[int, ...], error: type[FuelError]
) -> None:
    expected = feed_together(model, filled_caches(model), [1, 2, 3])
    caches = filled_caches(model)
    before = [content(cache) for cache in caches]
    with pytest.raises(error):
        feed_together(model, [caches[i] for i in picked], tokens)
    assert [content(cache) for cache in caches] == before
    assert torch.equal(feed_together(model, caches, [1, 2, 3]), expected)


def test_a_dtype_that_every_cache_has_and_nobody_asked_for_is_refused(model: DecodeModel) -> None:
    caches = [new_cache(model, 4, torch.bfloat16) for _ in range(2)]
    before = [content(cache) for cache in caches]
    with pytest.raises(ModelContractError, match=r"requested dtype torch\.float32"):
        feed_together(model, caches, [1, 2])
    assert [content(cache) for cache in caches] == before
    assert model.build_batched_decode_logits(caches, [1, 2], "cpu", torch.bfloat16).dtype == torch.float32


def test_a_batch_beyond_the_context_is_refused_before_anything_is_written() -> None:
    model = tiny(max_position_embeddings=3)
    caches = filled_caches(model)
    before = [content(cache) for cache in caches]
    with pytest.raises(InvalidRequestError, match="context"):
        feed_together(model, caches, [1, 2, 3])
    assert [content(cache) for cache in caches] == before


def test_a_layer_that_raises_in_a_batch_advances_no_cache(model: Any) -> None:
    expected = feed_together(model, filled_caches(model), [1, 2, 3])
    breakable = BreakableDecoder(model)
    caches = filled_caches(breakable)
    breakable.after = 1
    with pytest.raises(RuntimeError, match="after layer 1"):
        feed_together(breakable, caches, [9, 9, 9])
    assert [cache.cached_len for cache in caches] == [3, 3, 3]
    breakable.after = None
    assert torch.equal(feed_together(breakable, caches, [1, 2, 3]), expected)
