"""What is not a Llama that this family computes rightly is refused, by the name of what is wrong."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support_parity import (
    DROPPED,
    SMALL,
    altered,
    load,
    respell,
    write_model,
)
from support_rope import SCALINGS

from fuel_core import registry
from fuel_core.contracts import BLOCK_TYPES, QuantizedTensor
from fuel_core.contracts.errors import CheckpointError, FuelError, PluginError

LAYER = "model.layers.1"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"), attention_bias=True, mlp_bias=True)


def refusal(source: Any) -> CheckpointError:
    """The error of loading it: one line that says where, what was given, and what was needed."""
    with pytest.raises(CheckpointError) as refused:
        load(source)
    assert "\n" not in str(refused.value)
    assert refused.value.needed
    assert refused.value.remedy
    return refused.value


def test_what_the_refusals_start_from_is_served(small: Path) -> None:
    assert load(altered(small)).n_layers() == 2


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        *(f"{LAYER}.self_attn.{p}_proj.{kind}" for p in "qkvo" for kind in ("weight", "bias")),
        *(f"{LAYER}.mlp.{p}_proj.{kind}" for p in ("gate", "up", "down") for kind in ("weight", "bias")),
        f"{LAYER}.input_layernorm.weight",
        f"{LAYER}.post_attention_layernorm.weight",
    ],
)
def test_a_weight_that_is_missing_or_of_another_shape_is_named(name: str, small: Path) -> None:
    missing = refusal(altered(small, drop=[name]))
    assert f"no tensor {name}" in missing.given
    assert missing.name == name

    def longer(other: str, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat((tensor, tensor[:1])) if other == name else tensor

    wrong = refusal(altered(small, longer))
    assert name in wrong.given
    assert str(registry.open_checkpoint(small).tensor(name).shape[0] + 1) in wrong.given


def test_weights_left_over_are_named(small: Path) -> None:
    spare = torch.zeros(3)
    extra = {f"{LAYER}.self_attn.q_norm.weight": spare, "model.layers.2.mlp.up_proj.weight": spare}
    error = refusal(altered(small, add=extra))
    assert error.names == tuple(extra)
    assert all(name in str(error) for name in extra)


def test_biases_that_the_config_does_not_speak_of_are_left_over(small: Path) -> None:
    assert f"{LAYER}.mlp.up_proj.bias" in refusal(altered(small, mlp_bias=False)).names
    assert f"{LAYER}.self_attn.q_proj.bias" in refusal(altered(small, attention_bias=DROPPED)).names


def test_weights_that_no_llama_needs_may_be_there(small: Path) -> None:
    old = {f"{LAYER}.self_attn.rotary_emb.inv_freq": torch.zeros(5)}
    assert load(altered(small, add=old)).vocab_size() == SMALL["vocab_size"]
    assert load(altered(small, tie_word_embeddings=True)).vocab_size() == SMALL["vocab_size"]


def test_a_weight_of_integers_is_refused(small: Path) -> None:
    name = f"{LAYER}.mlp.up_proj.weight"
    error = refusal(altered(small, lambda other, t: t.to(torch.int8) if other == name else t))
    assert name in error.given
    assert "int8" in error.given


def test_gains_in_blocks_are_refused(small: Path) -> None:
    blocks = QuantizedTensor(torch.zeros(1, 34, dtype=torch.uint8), BLOCK_TYPES["Q8_0"], 32)
    assert "model.norm.weight" in refusal(altered(small, add={"model.norm.weight": blocks})).given


# Config.

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")
OPTIONAL_SIZES = ("num_key_value_heads", "head_dim")


@pytest.mark.parametrize("key", SIZES)
def test_a_size_that_is_absent_is_named(key: str, small: Path) -> None:
    for value in (DROPPED, None):
        error = refusal(altered(small, **{key: value}))
        assert error.key == key
        assert key in error.given


@pytest.mark.parametrize("value", [0, -3, True, "51", 51.0, [51], 2**70])
@pytest.mark.parametrize("key", [*SIZES, *OPTIONAL_SIZES])
def test_a_size_that_is_not_one_is_named(key: str, value: Any, small: Path) -> None:
    error = refusal(altered(small, **{key: value}))
    assert error.key == key
    assert f"{key} = {value!r}" in error.given


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("hidden_act", "relu"),
        ("quantization_config", {"quant_method": "gptq", "bits": 4}),
        ("num_key_value_heads", 2),
        ("head_dim", 9),
        ("head_dim", 2**30),
        ("rms_norm_eps", "1e-5"),
        ("rms_norm_eps", -1e-5),
        ("rms_norm_eps", math.nan),
        ("rms_norm_eps", math.inf),
        ("rms_norm_eps", True),
        ("tie_word_embeddings", "yes"),
        ("tie_word_embeddings", 1),
        ("attention_bias", 0),
        ("mlp_bias", "false"),
    ],
    ids=str,
)
def test_a_value_that_no_llama_has_is_named(key: str, value: Any, small: Path) -> None:
    error = refusal(altered(small, **{key: value}))
    assert error.key == key
    assert f"{key} = {value!r}" in error.given


def test_a_head_dim_that_follows_from_the_sizes_must_be_even(small: Path) -> None:
    error = refusal(altered(small, head_dim=DROPPED))  # 51 / 3
    assert "head_dim = 17" in error.given


def test_values_that_are_null_count_as_absent(small: Path) -> None:
    absent = dict.fromkeys(("hidden_act", "quantization_config", "rope_scaling", "partial_rotary_factor"))
    assert load(altered(small, **absent)).n_layers() == 2


@pytest.mark.parametrize("value", [0, -1, True, "2048", 0.5, math.inf, math.nan])
def test_a_context_that_is_no_length_is_named(value: Any, small: Path) -> None:
    assert "max_position_embeddings" in refusal(altered(small, max_position_embeddings=value)).given


@pytest.mark.parametrize("value", [0, -4, True, "24", 2.5])
def test_a_window_that_is_no_length_is_named(value: Any, tmp_path: Path) -> None:
    path = write_model(tmp_path, "MistralForCausalLM")
    assert refusal(altered(path, sliding_window=value)).key == "sliding_window"


# RoPE.


def test_an_unknown_scaling_is_named(small: Path) -> None:
    for kind in ("longrope", "proportional", "mrope", "su", "ntk", ""):
        for spelling in ("type", "rope_type"):
            error = refusal(altered(small, rope_scaling={spelling: kind, "factor": 2.0}))
            assert repr(kind) in error.given
            assert "llama3" in error.needed


@pytest.mark.parametrize("holder", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("linear", "factor"),
        ("dynamic", "factor"),
        ("llama3", "factor"),
        ("llama3", "low_freq_factor"),
        ("llama3", "high_freq_factor"),
    ],
)
def test_a_key_that_a_scaling_needs_is_named(name: str, key: str, holder: str, small: Path) -> None:
    rope = {"rope_type": name, "factor": 2.0, **SCALINGS.get(name, {})}
    assert load(altered(small, **{holder: rope})).n_layers() == 2
    for broken in ({k: v for k, v in rope.items() if k != key}, {**rope, key: None}):
        error = refusal(altered(small, **{holder: broken}))
        assert error.key == key
        assert repr(key) in error.given
        assert repr(name) in error.given


@pytest.mark.parametrize("value", [0, -2.0, True, "2", math.nan, math.inf, [2]])
@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("linear", "factor"),
        ("dynamic", "factor"),
        ("llama3", "factor"),
        ("llama3", "low_freq_factor"),
        ("llama3", "original_max_position_embeddings"),
        ("yarn", "factor"),
        ("yarn", "original_max_position_embeddings"),
        ("yarn", "attention_factor"),
        ("yarn", "beta_fast"),
        ("yarn", "beta_slow"),
        ("linear", "rope_theta"),
    ],
)
def test_a_parameter_that_is_no_positive_number_is_named(
    name: str, key: str, value: Any, small: Path
) -> None:
    rope = {"rope_type": name, "factor": 2.0, **SCALINGS.get(name, {}), key: value}
    error = refusal(altered(small, rope_parameters=rope))
    assert error.key == key
    assert f"{key} = {value!r}" in error.given


def test_factors_in_the_wrong_order_are_refused(small: Path) -> None:
    rope = {**SCALINGS["llama3"], "low_freq_factor": 4.0, "high_freq_factor": 4.0}
    error = refusal(altered(small, rope_parameters=rope))
    assert "low_freq_factor" in error.given
    assert "high_freq_factor" in error.given


def test_a_base_that_turns_nothing_is_refused(small: Path) -> None:
    error = refusal(altered(small, rope_parameters={"rope_type": "default", "rope_theta": 1.0}))
    assert "rope_theta" in error.given


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "beside"])
def test_a_rotation_of_part_of_the_head_is_refused(inside: bool, small: Path) -> None:
    part = {"partial_rotary_factor": 0.5}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = {"rope_parameters": {**rope, **part}} if inside else part
    assert "partial_rotary_factor" in refusal(altered(small, **config)).given
    whole = {"rope_parameters": {**rope, "partial_rotary_factor": 1.0}, "partial_rotary_factor": None}
    assert load(altered(small, **whole)).n_layers() == 2


@pytest.mark.parametrize(
    "value", ["linear", [4.0], 4.0, {"full_attention": {"rope_type": "default"}}], ids=str
)
def test_rope_parameters_that_are_not_one_object_are_refused(value: Any, small: Path) -> None:
    assert "rope" in refusal(altered(small, rope_scaling=value)).given


# Families.


def test_an_unknown_architecture_is_named(small: Path, tmp_path: Path) -> None:
    path = respell(small, tmp_path / "other", architectures=["Llama5ForCausalLM"])
    with pytest.raises(FuelError, match="Llama5ForCausalLM") as refused:
        registry.family_for(registry.open_checkpoint(path))
    assert isinstance(refused.value, PluginError | CheckpointError)


def test_another_familys_checkpoint_is_not_taken_for_a_llama(tmp_path: Path) -> None:
    path = write_model(tmp_path, "Qwen2ForCausalLM")
    with pytest.raises(CheckpointError, match=r"left over.*self_attn.q_proj.bias"):
        registry.family("llama").load(registry.open_checkpoint(path), device="cpu", dtype=torch.float32)
