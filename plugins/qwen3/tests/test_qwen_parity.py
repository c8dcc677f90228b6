"""Qwen2 and Qwen3 give the logits of Transformers, however a prompt is fed, and refuse what they cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support_parity import (
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
    write_model,
)
from support_rope import LONG, SCALINGS
from transformers import AutoModelForCausalLM

from fuel_core import registry
from fuel_core.contracts import DecodeSession
from fuel_core.contracts.errors import CheckpointError, FuelError, InvalidRequestError
from fuel_core.kernels import ops

QWEN2, QWEN3 = "Qwen2ForCausalLM", "Qwen3ForCausalLM"

# Groups of three query heads, and heads that are wider together than the model.
GROUPED = {
    "hidden_size": 44,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 14,
    "num_hidden_layers": 3,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2, odd sizes": (QWEN2, {}),
    "qwen2, tied": (QWEN2, {"tie_word_embeddings": True}),
    "qwen2, no grouping": (QWEN2, {"num_key_value_heads": 3}),
    "qwen2, groups of three": (QWEN2, GROUPED),
    "qwen3, odd sizes": (QWEN3, {}),
    "qwen3, tied": (QWEN3, {"tie_word_embeddings": True}),
    "qwen3, no grouping": (QWEN3, {"num_key_value_heads": 3}),
    "qwen3, groups of three": (QWEN3, GROUPED),
    "qwen3, attention biases": (QWEN3, {"attention_bias": True}),
    "qwen3, wide heads": (QWEN3, {"head_dim": 66}),
    "qwen3, another base": (QWEN3, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
}
by_family = pytest.mark.parametrize("architecture", [QWEN2, QWEN3])


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen2"), QWEN2, **GROUPED)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen3"), QWEN3, attention_bias=True, **GROUPED)


@pytest.mark.parametrize(("architecture", "shape"), SHAPES.values(), ids=list(SHAPES))
def test_qwen_of_any_shape_gives_the_logits_of_transformers(
    architecture: str, shape: dict[str, Any], tmp_path: Path
) -> None:
    path = write_model(tmp_path, architecture, **shape)
    model = load(path)
    assert model.max_context() == SMALL["max_position_embeddings"]
    assert_parity(model, ask_transformers(path, random_ids(140)))


def test_the_familys_own_names_serve_its_architectures(qwen2: Path, qwen3: Path) -> None:
    assert registry.family_for(registry.open_checkpoint(qwen2)).name == "qwen2"
    assert registry.family_for(registry.open_checkpoint(qwen3)).name == "qwen3"


@by_family
@pytest.mark.parametrize("name", SCALINGS)
def test_a_scaled_qwen_gives_the_logits_of_transformers_at_any_position(
    architecture: str, name: str, tmp_path: Path
) -> None:
    rope = {"rope_theta": 10000.0, **SCALINGS[name]}
    path = write_model(tmp_path, architecture, rope_parameters=rope, head_dim=32)
    oracle = ask_transformers(path, random_ids(LONG))
    assert_parity(load(path), oracle)
    unscaled = load(altered(path, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}))
    assert oracle.distance(run(unscaled, oracle.ids, [LONG]), [LONG]) > 100 * TOLERANCE


@by_family
def test_dynamic_scaling_is_served_up_to_the_original_length(architecture: str, tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    path = write_model(tmp_path, architecture, rope_parameters=rope, max_position_embeddings=64)
    model = load(path)
    assert_parity(model, ask_transformers(path, random_ids(64)))
    with pytest.raises(InvalidRequestError, match="at most 64"):
        model.forward_with_kv_context_persistent(random_ids(65), new_cache(model, 65), DecodeSession())


@one_thread()
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_sessions_of_equal_length_decode_together_as_they_do_alone(
    name: str, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(name)
    model = load(path)
    prompts = [random_ids(36, seed=seed) for seed in range(3)]
    oracles = [ask_transformers(path, ids) for ids in prompts]
    caches = [new_cache(model, 36) for _ in prompts]
    for ids, cache in zip(prompts, caches, strict=True):
        model.forward_with_kv_context_persistent(ids[:33], cache, DecodeSession())
    for place in range(33, 36):
        last = [ids[place] for ids in prompts]
        together = model.build_batched_decode_logits(caches, last, "cpu", torch.float32)
        for row, oracle in zip(together, oracles, strict=True):
            assert oracle.distance(row[None], [place + 1]) <= 4 * oracle.noise + 1e-7
    assert oracles[0].distance(together[1][None], [36]) > 100 * TOLERANCE


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 6e-2), (torch.float16, 6e-3)])
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_narrow_types_stay_as_near_the_truth_as_transformers_does(
    name: str, dtype: torch.dtype, limit: float, request: pytest.FixtureRequest
) -> None:
    path, ids = request.getfixturevalue(name), random_ids(60)
    oracle = ask_transformers(path, ids)
    theirs = logits_of(AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval(), ids)
    ours = run(load(path, dtype), ids, list(range(1, 61)), dtype)
    error, noise = (distance(rows, oracle.truth, oracle.truth) for rows in (ours, theirs))
    assert TOLERANCE < error <= limit
    assert error <= 2 * noise


# What a fault would look like.


def without_biases(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor) if name.endswith("bias") else tensor


def with_flat_head_gains(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(tensor) if "q_norm" in name or "k_norm" in name else tensor


def swap_kv_heads(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Query heads read the other KV head: what a wrong grouping does."""
    return tensor.roll(14, 0) if "k_proj" in name or "v_proj" in name else tensor


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("qwen2", without_biases),
        ("qwen2", swap_kv_heads),
        ("qwen3", without_biases),
        ("qwen3", swap_kv_heads),
        ("qwen3", with_flat_head_gains),
    ],
)
def test_a_fault_in_the_weights_is_seen(name: str, fault: Any, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(name)
    oracle = ask_transformers(path, random_ids(70))
    assert_parity(load(altered(path)), oracle)
    assert_disparity(load(altered(path, fault)), oracle)


def test_gains_of_queries_on_keys_are_seen(qwen3: Path) -> None:
    checkpoint = registry.open_checkpoint(qwen3)
    swapped = {}
    for i in range(3):
        q, k = (f"model.layers.{i}.self_attn.{part}_norm.weight" for part in "qk")
        swapped |= {q: checkpoint.tensor(k), k: checkpoint.tensor(q)}
    # A dot product does not care which side a gain is on, unless a rotation stands between.
    assert_disparity(load(altered(qwen3, add=swapped)), ask_transformers(qwen3, random_ids(70)))


@pytest.mark.parametrize("fault", ["not at all", "after the rotation", "with a wrong epsilon"])
def test_heads_normed_wrongly_are_seen(fault: str, qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = ask_transformers(qwen3, random_ids(70))
    model = load(qwen3)
    write = ops.write_kv

    def wrong(
        qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, ks: Any, vs: Any, norm: Any
    ) -> torch.Tensor:
        if fault == "not at all":
            return write(qkv, cos, sin, ks, vs)
        q_gain, k_gain, eps = norm
        if fault == "with a wrong epsilon":
            return write(qkv, cos, sin, ks, vs, (q_gain, k_gain, 100 * eps))
        q = write(qkv, cos, sin, ks, vs, (torch.ones_like(q_gain), torch.ones_like(k_gain), eps))
        for slots in ks:
            slots.mul_(k_gain)
        return q * q_gain

    monkeypatch.setattr(ops, "write_kv", wrong)
    assert_disparity(model, oracle)


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
@pytest.mark.parametrize("change", [{"rms_norm_eps": 1e-6}, {"tie_word_embeddings": True}], ids=str)
def test_a_fault_in_the_config_is_seen(
    name: str, change: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(name)
    oracle = ask_transformers(path, random_ids(70))
    assert_disparity(load(altered(path, **change)), oracle, at_least=20 * TOLERANCE)


# Windows, which every config names and few use.


@by_family
def test_a_window_that_is_not_in_use_limits_nothing(architecture: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "a", architecture)
    path = respell(path, tmp_path / "b", use_sliding_window=False, sliding_window=16, max_window_layers=0)
    model = load(path)
    assert model.max_context() == 512
    assert_parity(model, ask_transformers(path, random_ids(70)))


@by_family
def test_a_window_in_use_limits_the_context(architecture: str, tmp_path: Path) -> None:
    window = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
    path = write_model(tmp_path, architecture, **window)
    model = load(path)
    assert model.max_context() == 24
    oracle = ask_transformers(path, random_ids(60))
    ends = [5, 23, 24]
    assert oracle.distance(run(model, oracle.ids, ends), ends) <= 4 * oracle.noise + 1e-7
    with pytest.raises(InvalidRequestError, match="at most 24"):
        model.forward_with_kv_context_persistent(oracle.ids[:25], new_cache(model, 60), DecodeSession())
    full = load(altered(path, use_sliding_window=False))
    assert oracle.distance(run(full, oracle.ids, [25]), [25]) > 10 * TOLERANCE


# Refusals.


@pytest.mark.parametrize("part", ["q_norm", "k_norm"])
def test_a_qwen3_without_norms_on_its_heads_is_refused(part: str, qwen3: Path) -> None:
    name = f"model.layers.1.self_attn.{part}.weight"
    with pytest.raises(CheckpointError, match=f"no tensor {name}"):
        load(altered(qwen3, drop=[name]))
    with pytest.raises(CheckpointError, match=rf"{name} has the shape \(7,\)"):
        load(altered(qwen3, add={name: torch.ones(7)}))


@pytest.mark.parametrize("part", ["q_proj", "k_proj", "v_proj"])
def test_a_qwen2_without_its_biases_is_refused(part: str, qwen2: Path) -> None:
    name = f"model.layers.1.self_attn.{part}.bias"
    with pytest.raises(CheckpointError, match=f"no tensor {name}"):
        load(altered(qwen2, drop=[name]))


def test_weights_left_over_are_named(qwen2: Path, qwen3: Path) -> None:
    extra = "model.layers.0.self_attn.o_proj.bias"
    with pytest.raises(CheckpointError, match=extra):
        load(altered(qwen2, add={extra: torch.zeros(44)}))
    with pytest.raises(CheckpointError, match=r"left over.*q_proj\.bias"):
        load(altered(qwen3, attention_bias=False))
    experts = "model.layers.0.mlp.experts.0.up_proj.weight"
    with pytest.raises(CheckpointError, match=experts):
        load(altered(qwen3, add={experts: torch.zeros(4, 4)}))


def test_a_tied_model_may_carry_its_head_twice(qwen3: Path) -> None:
    tied = load(altered(qwen3, tie_word_embeddings=True))
    assert tied.parts.head is tied.parts.embedding


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", None),
        ("num_attention_heads", None),
        ("vocab_size", 0),
        ("num_key_value_heads", 4),
        ("hidden_act", "gelu"),
        ("quantization_config", {"quant_method": "awq"}),
        ("use_sliding_window", "no"),
        ("head_dim", 13),
    ],
)
def test_a_value_that_no_qwen_has_is_named(
    name: str, key: str, value: Any, request: pytest.FixtureRequest
) -> None:
    with pytest.raises(CheckpointError, match=key) as refused:
        load(altered(request.getfixturevalue(name), **{key: value}))
    assert refused.value.key == key


def test_a_qwen3_that_names_no_head_dim_has_heads_of_128(tmp_path: Path) -> None:
    path = respell(write_model(tmp_path / "a", QWEN3, head_dim=128), tmp_path / "b", drop=["head_dim"])
    assert_parity(load(path), ask_transformers(path, random_ids(20)))
    narrow = respell(write_model(tmp_path / "c", QWEN3, head_dim=16), tmp_path / "d", drop=["head_dim"])
    with pytest.raises(CheckpointError, match=r"needed: the shape \(128,\)"):
        load(narrow)


def test_a_mixture_of_experts_is_no_dense_qwen(qwen3: Path, tmp_path: Path) -> None:
    path = respell(qwen3, tmp_path / "moe", architectures=["Qwen3MoeForCausalLM"])
    with pytest.raises(FuelError, match="Qwen3MoeForCausalLM"):
        registry.family_for(registry.open_checkpoint(path))
