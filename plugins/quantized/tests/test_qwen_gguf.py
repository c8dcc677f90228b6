"""GGUF files of Qwen2 and Qwen3 give the logits of Transformers, in every tier, their weights in blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support_models import distance, feed, feed_together, tiny
from support_parity import (
    DROPPED,
    TOLERANCE,
    altered,
    ask_transformers,
    assert_disparity,
    assert_parity,
    load,
    new_cache,
    random_ids,
    run,
)
from support_rope import LONG, SCALINGS
from support_twins import LINEAR, YARN, Twin, interleaved
from torch import Tensor

from fuel_core import registry
from fuel_core.contracts import TIERS, DecodeModel, DecodeSession, ModelDims, QuantizedTensor, RaggedBatch
from fuel_core.contracts.errors import InvalidRequestError
from fuel_core.kv import DeviceKvPool, KvGeometry

CLASSES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
WIDE = {"head_dim": 64}
"""Heads that are wider together than the model."""

by_architecture = pytest.mark.parametrize("architecture", CLASSES)


def make(where: Path, architecture: str, kind: str = "Q8_0", **config: Any) -> Twin:
    return Twin(where, kind, architecture=CLASSES[architecture], **config)


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Twin]:
    where = tmp_path_factory.mktemp("twins")
    return {architecture: make(where / architecture, architecture) for architecture in CLASSES}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0"])
@by_architecture
def test_a_qwen_file_of_any_block_type_gives_the_logits_of_transformers(
    architecture: str, kind: str, tied: bool, tmp_path: Path
) -> None:
    twin = make(tmp_path, architecture, kind, tie_word_embeddings=tied)
    checkpoint = registry.open_checkpoint(twin.file)
    assert ("output.weight" in checkpoint) is not tied
    assert registry.family_for(checkpoint).name == f"{architecture}-gguf"
    oracle = ask_transformers(twin.directory, random_ids(70))
    assert_parity(load(checkpoint), oracle)
    # And the model is not one whose attention does not matter.
    assert oracle.truth.std() > 0.3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@by_architecture
def test_narrow_types_stay_near_the_truth(
    architecture: str, dtype: torch.dtype, twins: dict[str, Twin]
) -> None:
    twin = twins[architecture]
    oracle = ask_transformers(twin.directory, random_ids(40))
    ends = list(range(1, 41))
    error = oracle.distance(run(load(twin.file, dtype), oracle.ids, ends, dtype), ends)
    assert TOLERANCE < error < (5e-2 if dtype == torch.bfloat16 else 1e-2)


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("qwen2", {"num_key_value_heads": 3}),
        ("qwen2", {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2}),
        ("qwen3", {"num_key_value_heads": 3}),
        ("qwen3", WIDE),
        ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 2, **WIDE}),
        ("qwen3", {"attention_bias": True}),
    ],
    ids=str,
)
def test_a_qwen_file_of_any_shape_is_served(
    architecture: str, config: dict[str, Any], tmp_path: Path
) -> None:
    twin = make(tmp_path, architecture, **config)
    assert_parity(load(twin.file), ask_transformers(twin.directory, random_ids(70)))


# Row order, biases, norms.


@by_architecture
def test_rows_in_the_order_of_a_llama_are_seen(architecture: str, tmp_path: Path) -> None:
    twin = make(tmp_path, architecture, permuted=True)
    assert_disparity(load(twin.file), ask_transformers(twin.directory, random_ids(70)), at_least=0.1)


def without_biases(name: str, tensor: Any) -> Any:
    return torch.zeros_like(tensor) if name.endswith("bias") else tensor


def with_flat_head_gains(name: str, tensor: Any) -> Any:
    return torch.ones_like(tensor) if "_q_norm" in name or "_k_norm" in name else tensor


def with_one_gain_reordered(name: str, tensor: Any) -> Any:
    return tensor[torch.tensor(interleaved(32, 32))] if name == "blk.1.attn_k_norm.weight" else tensor


def with_one_bias_reordered(name: str, tensor: Any) -> Any:
    return tensor[torch.tensor(interleaved(32, 32))] if name == "blk.1.attn_k.bias" else tensor


@pytest.mark.parametrize(
    ("architecture", "fault"),
    [
        ("qwen2", without_biases),
        ("qwen2", with_one_bias_reordered),
        ("qwen3", with_flat_head_gains),
        ("qwen3", with_one_gain_reordered),
    ],
)
def test_a_fault_in_biases_or_gains_is_seen(architecture: str, fault: Any, twins: dict[str, Twin]) -> None:
    twin = twins[architecture]
    oracle = ask_transformers(twin.directory, random_ids(70))
    assert_parity(load(altered(twin.file)), oracle)
    assert_disparity(load(altered(twin.file, fault)), oracle, at_least=10 * TOLERANCE)


# Keys.


@pytest.mark.parametrize(("name", "keys"), [("yarn", YARN), ("linear", LINEAR)])
@by_architecture
def test_keys_of_a_scaling_are_that_scaling(
    architecture: str, name: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    rope = {"rope_theta": 10000.0, **SCALINGS[name]}
    twin = make(tmp_path, architecture, keys=keys, rope_parameters=rope)
    oracle = ask_transformers(twin.directory, random_ids(LONG))
    assert_parity(load(twin.file), oracle)
    unscaled = load(altered(twin.file, **{f"{architecture}.{key}": DROPPED for key in keys}))
    assert oracle.distance(run(unscaled, oracle.ids, [41]), [41]) > 1e-3


@by_architecture
def test_the_base_of_the_file_is_the_models(architecture: str, tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e6}
    twin = make(tmp_path, architecture, keys={"rope.freq_base": 1e6}, rope_parameters=rope)
    oracle = ask_transformers(twin.directory, random_ids(70))
    assert_parity(load(twin.file), oracle)
    assert_disparity(load(altered(twin.file, **{f"{architecture}.rope.freq_base": 10000.0})), oracle)


@by_architecture
def test_a_window_limits_the_context(architecture: str, tmp_path: Path) -> None:
    window = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 0}
    twin = make(tmp_path, architecture, keys={"attention.sliding_window": 24}, **window)
    model = load(twin.file)
    assert model.max_context() == 24
    oracle = ask_transformers(twin.directory, random_ids(40))
    ends = [5, 23, 24]
    assert oracle.distance(run(model, oracle.ids, ends), ends) <= 4 * oracle.noise + 1e-7
    with pytest.raises(InvalidRequestError, match="at most 24"):
        model.forward_with_kv_context_persistent(oracle.ids[:25], new_cache(model, 40), DecodeSession())
    # Beyond the window a model without one is another model.
    full = load(altered(twin.file, **{f"{architecture}.attention.sliding_window": 0}))
    assert full.max_context() == 512
    assert oracle.distance(run(full, oracle.ids, [40]), [40]) > 10 * TOLERANCE


# The base family, its tiers, its memory.


def weights(model: Any) -> Iterator[Tensor | QuantizedTensor]:
    for layer in model.layers:
        maps = (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down)
        yield from (weight for each in maps for weight in each.product.weights)
    yield from (model.parts.embedding, model.parts.head)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
@by_architecture
def test_the_weights_stay_in_their_blocks(architecture: str, kind: str, tmp_path: Path) -> None:
    held = list(weights(load(make(tmp_path, architecture, kind).file)))
    assert len(held) == 7 * 2 + 2
    for weight in held:
        assert isinstance(weight, QuantizedTensor)
        assert weight.block_type.name == kind
        assert weight.data.numel() == weight.shape[0] * weight.block_type.row_bytes(weight.shape[1])


def test_quantized_qwen3_reports_inner_cache_geometry(tmp_path: Path) -> None:
    twin = make(tmp_path, "qwen3", num_attention_heads=6, num_key_value_heads=2, **WIDE)
    model, base = load(twin.file), load(twin.directory)
    assert type(model) is type(base)
    # Neither the width nor the count of heads follows from the size of the model.
    assert ModelDims.from_model(model) == ModelDims.from_model(base) == ModelDims(2, 2, 64)
    assert model.supports_batched_decode() == base.supports_batched_decode()
    assert (model.vocab_size(), model.max_context()) == (base.vocab_size(), base.max_context()) == (97, 512)


def poisoned_pool(model: DecodeModel) -> DeviceKvPool:
    """Blocks of four tokens whose every slot is NaN until it is written."""
    dims = ModelDims.from_model(model)
    pool = DeviceKvPool(KvGeometry(dims.n_layers, dims.n_kv_heads, dims.head_dim, 32, 4, 4), torch.float32)
    for layer in range(dims.n_layers):
        pool.k_pool(layer).fill_(torch.nan)
        pool.v_pool(layer).fill_(torch.nan)
    return pool


@by_architecture
def test_every_tier_that_the_family_claims_gives_the_logits_of_a_lone_session(architecture: str) -> None:
    name, ends = f"{architecture}-gguf", list(range(1, 10))
    assert registry.family(name).capabilities.tiers == TIERS
    model, prompts = tiny(name), [random_ids(9, 96, seed) for seed in range(3)]
    lone = torch.stack([run(model, prompt, ends) for prompt in prompts])  # [3, 9, vocab]
    expected, last = lone[:, -1], [prompt[-1] for prompt in prompts]
    assert distance(expected, expected[[1, 2, 0]]) > 0.1
    caches = [new_cache(model, 9) for _ in prompts]
    for prompt, cache in zip(prompts, caches, strict=True):
        feed(model, cache, *prompt[:8])
    assert distance(feed_together(model, caches, last), expected) < TOLERANCE
    pool = poisoned_pool(model)
    sessions = [pool.core.open() for _ in prompts]
    for rows, prompt, session in zip(lone, prompts, sessions, strict=True):
        steps = [model.forward_paged_step(token, pool, session) for token in prompt[:8]]
        assert distance(torch.stack(steps), rows[:8]) < TOLERANCE
    assert distance(model.forward_paged_step_batched(last, pool, sessions), expected) < TOLERANCE
    fresh = tuple(pool.core.open() for _ in prompts)
    batch = RaggedBatch(pool, fresh, tuple(map(tuple, prompts)))
    assert distance(model.forward_paged_ragged(batch), expected) < TOLERANCE
