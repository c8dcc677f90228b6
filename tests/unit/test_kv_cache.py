"""What a cache shows is all that a model reads, however the tokens came in and whatever failed meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from support_models import (
    BreakableDecoder,
    content,
    distance,
    feed,
    feed_together,
    lone_run,
    new_cache,
    tiny,
)
from support_paged import FAMILIES, model_of

from fuel_core.contracts import DecodeModel, DecodeSession, ModelDims
from fuel_core.contracts.errors import CapacityError, InvalidRequestError, ModelContractError
from fuel_core.kv import KvCache
from fuel_core.layers import Decoder

PROMPT = (5, 17, 3, 60, 44, 9, 2, 80, 31, 7)


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Decoder:
    return model_of(request.param, 2)


def in_chunks(model: DecodeModel, prompt: Sequence[int], cuts: Sequence[int]) -> tuple[torch.Tensor, KvCache]:
    """Logits after each chunk, ``[len(cuts) + 1, vocab]``, and the cache."""
    cache, bounds = new_cache(model, len(prompt)), [0, *cuts, len(prompt)]
    chunks = [prompt[start:end] for start, end in pairwise(bounds)]
    return torch.stack([feed(model, cache, *chunk) for chunk in chunks]), cache


# --- the cache itself


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cache_has_a_slot_per_layer_head_and_token(dtype: torch.dtype) -> None:
    cache = KvCache(2, 3, 4, 5, dtype=dtype)
    assert cache.k.shape == cache.v.shape == (2, 3, 5, 4)
    assert cache.k.dtype == cache.v.dtype == cache.dtype == dtype
    assert (cache.cached_len, cache.max_seq_len, cache.dims) == (0, 5, ModelDims(2, 3, 4))
    assert cache.k.data_ptr() != cache.v.data_ptr()


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("size", [0, -1])
def test_a_cache_without_room_is_refused(place: int, size: int) -> None:
    sizes = [2, 2, 4, 8]
    sizes[place] = size
    with pytest.raises(CapacityError, match="sizes of at least 1"):
        KvCache(*sizes)


@pytest.mark.parametrize("tokens", [2**50, 2**62])
def test_a_cache_that_memory_cannot_hold_is_a_capacity_error(tokens: int) -> None:
    with pytest.raises(CapacityError, match="that much free memory"):
        KvCache(2, 2, 64, tokens)


@pytest.mark.parametrize("n", [-1, 4, 99])
def test_truncating_below_nothing_or_beyond_what_is_held_changes_nothing(n: int) -> None:
    cache = KvCache(1, 1, 2, 8)
    cache.cached_len = 3
    with pytest.raises(InvalidRequestError, match=r"\[0, 3\]"):
        cache.truncate(n)
    assert cache.cached_len == 3
    for length in (3, 1, 0):
        cache.truncate(length)
        assert cache.cached_len == length


def test_a_released_cache_has_no_room_and_says_so() -> None:
    model = tiny()
    cache = new_cache(model, 8)
    feed(model, cache, 1, 2)
    cache.release()
    assert (cache.k.nbytes, cache.v.nbytes, cache.cached_len, cache.max_seq_len) == (0, 0, 0, 0)
    with pytest.raises(CapacityError, match="at most 0"):
        feed(model, cache, 3)


# --- one prompt, many ways in


@pytest.mark.parametrize("cuts", [[1], [9], [5], [3, 4], [2, 5, 8], list(range(1, 10))])
def test_a_prompt_in_chunks_is_the_prompt_whole(model: Decoder, cuts: list[int]) -> None:
    whole = torch.stack([feed(model, new_cache(model, 10), *PROMPT[:end]) for end in [*cuts, 10]])
    chunked, cache = in_chunks(model, PROMPT, cuts)
    assert distance(chunked, whole) < 1e-4
    full = new_cache(model, 10)
    feed(model, full, *PROMPT)
    assert distance(cache.k, full.k) < 1e-4
    assert distance(cache.v, full.v) < 1e-4


def test_the_comparison_of_chunks_sees_a_chunk_out_of_place(model: Decoder) -> None:
    turned = (*PROMPT[:2], PROMPT[3], PROMPT[2], *PROMPT[4:])
    assert distance(in_chunks(model, turned, [5])[0], in_chunks(model, PROMPT, [5])[0]) > 1e-2


def test_a_later_token_changes_nothing_that_stands_before_it(model: Decoder) -> None:
    caches = [new_cache(model, 10) for _ in range(2)]
    logits = [feed(model, caches[0], *PROMPT), feed(model, caches[1], *PROMPT[:6], 1, 1, 1, 1)]
    for one, other in ((caches[0].k, caches[1].k), (caches[0].v, caches[1].v)):
        # The last layer's keys and values have seen whatever attention let through below.
        assert distance(one[:, :, :6], other[:, :, :6]) < 1e-6
        assert distance(one[:, :, 6:], other[:, :, 6:]) > 1e-2
    assert distance(*logits) > 1e-2


def test_an_earlier_token_changes_what_comes_after_it(model: Decoder) -> None:
    one, other = (feed(model, new_cache(model, 10), first, *PROMPT[1:]) for first in (5, 6))
    assert distance(one, other) > 1e-3


def test_a_truncated_cache_goes_on_as_if_the_rest_had_never_been(model: Decoder) -> None:
    tokens, expected = lone_run(model, PROMPT, 3)
    cache = new_cache(model, 20)
    feed(model, cache, *PROMPT)
    feed(model, cache, 1, 2, 3)
    cache.truncate(len(PROMPT))
    assert torch.equal(feed(model, cache, tokens[0]), expected[1])


# --- what lies beyond what is cached


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 1e30])
def test_the_content_of_unused_slots_changes_no_bit(model: Decoder, poison: float) -> None:
    tokens, expected = lone_run(model, PROMPT[:4], 4)
    cache = new_cache(model, 9)  # one token more than is ever used
    rows, chunk = [], PROMPT[:4]
    for token in (*tokens[:3], None):
        for part in (cache.k, cache.v):
            part[:, :, cache.cached_len :] = poison
        rows.append(feed(model, cache, *chunk))
        chunk = (token,) if token is not None else ()
    assert torch.equal(torch.stack(rows), expected)
    for part in (cache.k, cache.v):
        part[:, :, cache.cached_len :] = poison
    assert bool(feed_together(model, [cache], [1]).isfinite().all())


def test_poison_in_a_slot_that_is_used_would_be_seen(model: Decoder) -> None:
    cache = new_cache(model, 9)
    feed(model, cache, *PROMPT[:4])
    cache.v[0, :, 2] = torch.nan
    assert bool(feed(model, cache, 1).isnan().any())


# --- a step that fails


@pytest.mark.parametrize("place", ["before", "inside", "after"])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("held", [0, 4])
def test_a_layer_that_raises_leaves_the_cache_as_long_as_it_was_and_fit_for_use(
    model: Decoder, place: str, layer: int, held: int
) -> None:
    breakable, sound, cache = BreakableDecoder(model), new_cache(model, 12), new_cache(model, 12)
    if held:
        feed(model, sound, *PROMPT[:held])
        feed(breakable, cache, *PROMPT[:held])
    setattr(breakable, place, layer)
    for wrong in (PROMPT[5:8], PROMPT[8:9]):
        with pytest.raises(RuntimeError):
            feed(breakable, cache, *wrong)
        assert cache.cached_len == held
    setattr(breakable, place, None)
    rest = PROMPT[held : held + 3]
    assert torch.equal(feed(breakable, cache, *rest), feed(model, sound, *rest))
    assert torch.equal(feed(breakable, cache, 1), feed(model, sound, 1))


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        ([], InvalidRequestError),
        ([1, -1], InvalidRequestError),
        ([96, 1], InvalidRequestError),
        ([1] * 7, CapacityError),
        ([1] * 13, InvalidRequestError),
    ],
)
def test_a_refused_step_writes_nothing(tokens: list[int], error: type[Exception]) -> None:
    model = tiny(max_position_embeddings=16)
    cache = new_cache(model, 10)
    feed(model, cache, 1, 2, 3, 4)
    before = content(cache)
    with pytest.raises(error):
        feed(model, cache, *tokens)
    assert content(cache) == before
    feed(model, cache, *[1] * 6)
    assert cache.cached_len == cache.max_seq_len


def test_a_cache_of_another_geometry_is_refused_with_both_named() -> None:
    model = tiny()
    for dims in (ModelDims(3, 2, 8), ModelDims(2, 1, 8), ModelDims(2, 2, 4)):
        cache = KvCache(dims.n_layers, dims.n_kv_heads, dims.head_dim, 8)
        with pytest.raises(ModelContractError) as caught:
            model.forward_with_kv_context_persistent([1], cache, DecodeSession())
        assert str(dims) in str(caught.value)
        assert str(ModelDims(2, 2, 8)) in str(caught.value)
        assert cache.cached_len == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cache_of_half_the_width_loses_precision_and_nothing_else(dtype: torch.dtype) -> None:
    model = tiny(seed=2)
    wide, narrow = new_cache(model, 12), new_cache(model, 12, dtype)
    for chunk in (PROMPT, (1,), (2,)):
        error = distance(feed(model, narrow, *chunk), feed(model, wide, *chunk))
        assert 0 < error < (0.1 if dtype is torch.bfloat16 else 0.02)
