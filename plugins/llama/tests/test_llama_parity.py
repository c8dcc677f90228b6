"""Llama and Mistral give the logits of Transformers, however a prompt is fed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support_parity import (
    DROPPED,
    SMALL,
    TOLERANCE,
    altered,
    ask_transformers,
    assert_disparity,
    assert_parity,
    distance,
    load,
    logits_of,
    new_cache,
    one_thread,
    random_ids,
    respell,
    run,
    worst,
    write_model,
)
from transformers import AutoModelForCausalLM

from fuel_core import registry
from fuel_core.contracts import DecodeSession
from fuel_core.contracts.errors import InvalidRequestError
from fuel_core.kernels import ops

SHAPES: dict[str, dict[str, Any]] = {
    "odd sizes": {},
    "tied": {"tie_word_embeddings": True},
    "no grouping": {"num_key_value_heads": 3},
    "one layer": {"num_hidden_layers": 1},
    "groups of three": {
        "hidden_size": 54,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 18,
        "num_hidden_layers": 3,
    },
    "attention biases": {"attention_bias": True},
    "mlp biases": {"mlp_bias": True},
    "all biases, tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "derived head_dim": {"hidden_size": 66, "num_attention_heads": 3, "head_dim": None},
    "wide heads": {"head_dim": 34},
    "another base": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with biases everywhere and groups of three query heads."""
    path = tmp_path_factory.mktemp("llama")
    return write_model(path, attention_bias=True, mlp_bias=True, **SHAPES["groups of three"])


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_llama_of_any_shape_gives_the_logits_of_transformers(shape: dict[str, Any], tmp_path: Path) -> None:
    path = write_model(tmp_path, **shape)
    model = load(path)
    assert model.n_layers() == shape.get("num_hidden_layers", SMALL["num_hidden_layers"])
    assert model.vocab_size() == SMALL["vocab_size"]
    assert model.max_context() == SMALL["max_position_embeddings"]
    assert_parity(model, ask_transformers(path, random_ids(140)))


def test_the_tests_models_are_loud_enough_to_be_heard(small: Path) -> None:
    oracle = ask_transformers(small, random_ids(60))
    assert oracle.truth.std() > 0.3
    # No position's logits resemble another's: a fault in one place of the cache cannot hide.
    apart = torch.cdist(oracle.truth, oracle.truth).fill_diagonal_(1e9)
    assert apart.min() > 100 * TOLERANCE * oracle.truth.abs().max()


def test_weights_in_shards_and_in_one_file_load_alike(small: Path, tmp_path: Path) -> None:
    sharded = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(small).save_pretrained(sharded, max_shard_size="20KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    one, many = registry.open_checkpoint(small), registry.open_checkpoint(sharded)
    assert sorted(one) == sorted(many)
    assert all(torch.equal(one.tensor(name), many.tensor(name)) for name in one)
    assert_parity(load(sharded), ask_transformers(small, random_ids(30)))


@one_thread()
def test_sessions_of_equal_length_decode_together_as_they_do_alone(small: Path) -> None:
    model = load(small)
    prompts = [random_ids(40, seed=seed) for seed in range(3)]
    oracles = [ask_transformers(small, ids) for ids in prompts]
    caches = [new_cache(model, 40) for _ in prompts]
    for ids, cache in zip(prompts, caches, strict=True):
        model.forward_with_kv_context_persistent(ids[:33], cache, DecodeSession())
    for place in range(33, 40):
        last = [ids[place] for ids in prompts]
        together = model.build_batched_decode_logits(caches, last, "cpu", torch.float32)
        for row, oracle in zip(together, oracles, strict=True):
            assert oracle.distance(row[None], [place + 1]) <= 4 * oracle.noise + 1e-7
    assert oracles[0].distance(together[1][None], [40]) > 100 * TOLERANCE


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 4e-2), (torch.float16, 5e-3)])
def test_narrow_types_stay_as_near_the_truth_as_transformers_does(
    small: Path, dtype: torch.dtype, limit: float
) -> None:
    ids = random_ids(60)
    oracle = ask_transformers(small, ids)
    theirs = logits_of(AutoModelForCausalLM.from_pretrained(small, dtype=dtype).eval(), ids)
    ours = run(load(small, dtype), ids, list(range(1, 61)), dtype)
    assert ours.dtype == torch.float32
    error, noise = (distance(rows, oracle.truth, oracle.truth) for rows in (ours, theirs))
    assert TOLERANCE < error <= limit
    assert error <= 2 * noise


def test_files_in_narrow_types_are_computed_in_the_type_that_is_asked_for(
    small: Path, tmp_path: Path
) -> None:
    AutoModelForCausalLM.from_pretrained(small, dtype=torch.bfloat16).save_pretrained(tmp_path)
    model = load(tmp_path)
    assert model.layers[0].mlp.down.product.weights[0].dtype == torch.bfloat16  # no larger than its file
    assert model.parts.final_norm.dtype == torch.float32
    assert_parity(model, ask_transformers(tmp_path, random_ids(70)))


# What a fault would look like.


def swap_kv_heads(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Query heads read the other KV head: what a wrong grouping does."""
    return tensor.roll(18, 0) if "k_proj" in name or "v_proj" in name else tensor


def swap_gate_and_up(small: Path) -> dict[str, torch.Tensor]:
    checkpoint = registry.open_checkpoint(small)
    names = [name for name in checkpoint if "gate_proj" in name or "up_proj" in name]
    swapped = {
        name: name.replace("gate", "#").replace("up_proj", "gate_proj").replace("#", "up") for name in names
    }
    return {name: checkpoint.tensor(other).clone() for name, other in swapped.items()}


def without_biases(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor) if name.endswith("bias") else tensor


def with_flat_gains(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(tensor) if "norm" in name else tensor


def neighbouring_pairs(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (2 i, 2 i + 1) instead of (i, i + D/2)."""
    if "q_proj" not in name and "k_proj" not in name:
        return tensor
    order = torch.arange(tensor.shape[0]).view(-1, 2, 9).transpose(1, 2).reshape(-1)
    return tensor[order]


@pytest.mark.parametrize(
    "fault",
    [swap_kv_heads, without_biases, with_flat_gains, neighbouring_pairs],
    ids=["wrong grouping", "biases dropped", "gains dropped", "neighbours rotated"],
)
def test_a_fault_in_the_weights_is_seen(small: Path, fault: Any) -> None:
    oracle = ask_transformers(small, random_ids(70))
    assert_parity(load(altered(small)), oracle)
    assert_disparity(load(altered(small, fault)), oracle)


def test_gate_and_up_in_each_others_place_are_seen(small: Path) -> None:
    oracle = ask_transformers(small, random_ids(20))
    assert_disparity(load(altered(small, add=swap_gate_and_up(small))), oracle)


@pytest.mark.parametrize(
    "change",
    [
        {"rms_norm_eps": 1e-6},
        {"rms_norm_eps": DROPPED},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
        {"tie_word_embeddings": True},
    ],
    ids=["epsilon", "default epsilon", "base", "tied"],
)
def test_a_fault_in_the_config_is_seen(small: Path, change: dict[str, Any]) -> None:
    oracle = ask_transformers(small, random_ids(70))
    assert_disparity(load(altered(small, **change)), oracle, at_least=20 * TOLERANCE)


def test_attention_to_what_comes_later_is_seen(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = ask_transformers(small, random_ids(70))
    model = load(small)

    def blind(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = q.transpose(0, 1)[None], k[None], v[None]
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)

    monkeypatch.setattr(ops, "attention", blind)
    assert_disparity(model, oracle)


def test_positions_that_start_anew_in_each_chunk_are_seen(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = ask_transformers(small, random_ids(70))
    model = load(small)
    write = ops.write_kv

    def restarted(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any) -> torch.Tensor:
        angles = torch.arange(len(cos))[:, None] * model.rope.inv_freq
        return write(qkv, angles.cos(), angles.sin(), *rest)

    monkeypatch.setattr(ops, "write_kv", restarted)
    assert oracle.distance(run(model, oracle.ids, [70]), [70]) < TOLERANCE  # a whole prompt hides it
    assert_disparity(model, oracle)


# Mistral, whose attention sees no further back than its window.

MISTRAL = {"hidden_size": 44, "num_attention_heads": 3, "head_dim": 16}


@pytest.mark.parametrize(("window", "context"), [(None, 512), (4096, 512), (24, 24), (512, 512)], ids=str)
def test_mistral_is_served_within_its_window(window: int | None, context: int, tmp_path: Path) -> None:
    path = write_model(tmp_path, "MistralForCausalLM", sliding_window=window, **MISTRAL)
    model = load(path)
    assert model.max_context() == context
    assert_parity(model, ask_transformers(path, random_ids(min(context, 140))))


def test_mistral_without_the_key_has_the_window_of_its_first_version(tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "a", "MistralForCausalLM", **{**MISTRAL, "max_position_embeddings": 8192}, sliding_window=7
    )
    path = respell(path, tmp_path / "b", drop=["sliding_window"])
    assert AutoModelForCausalLM.from_pretrained(path).config.sliding_window == 4096
    assert load(path).max_context() == 4096


def test_mistral_beyond_its_window_is_refused_since_full_attention_would_be_wrong(tmp_path: Path) -> None:
    path = write_model(tmp_path, "MistralForCausalLM", sliding_window=24, **MISTRAL)
    oracle = ask_transformers(path, random_ids(60))
    model = load(path)
    cache = new_cache(model, 60)
    with pytest.raises(InvalidRequestError, match="24"):
        model.forward_with_kv_context_persistent(oracle.ids[:25], cache, DecodeSession())
    assert cache.cached_len == 0
    model.forward_with_kv_context_persistent(oracle.ids[:24], cache, DecodeSession())
    with pytest.raises(InvalidRequestError, match="24"):
        model.forward_with_kv_context_persistent([1], cache, DecodeSession())
    assert cache.cached_len == 24
    # Full attention agrees up to the window and not a token further.
    full = load(altered(path, sliding_window=None))
    assert oracle.distance(run(full, oracle.ids, [23, 24]), [23, 24]) < TOLERANCE
    assert oracle.distance(run(full, oracle.ids, [25]), [25]) > 10 * TOLERANCE


def test_a_llama_has_no_window_even_where_its_config_has_the_key(tmp_path: Path) -> None:
    path = respell(write_model(tmp_path / "a"), tmp_path / "b", sliding_window=24)
    model = load(path)
    assert model.max_context() == 512
    assert worst(model, ask_transformers(path, random_ids(70))) < TOLERANCE
