"""A GGUF file that is no Llama which this plugin maps rightly is refused, by the name of what is wrong."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from support_parity import (
    DROPPED,
    altered,
    load,
)
from support_twins import LINEAR, YARN, Twin

from fuel_core import registry
from fuel_core.contracts import BLOCK_TYPES, QuantizedTensor
from fuel_core.contracts.errors import CheckpointError, FuelError


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return Twin(tmp_path_factory.mktemp("twin"))


def refusal(source: Any) -> CheckpointError:
    with pytest.raises(CheckpointError) as refused:
        load(source)
    assert "\n" not in str(refused.value)
    assert refused.value.needed
    assert refused.value.remedy
    return refused.value


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(FuelError, match="mamba"):
        load(path)


REQUIRED = (
    "embedding_length",
    "feed_forward_length",
    "block_count",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
    "context_length",
)


@pytest.mark.parametrize("key", REQUIRED)
def test_a_key_that_is_missing_is_named(key: str, twin: Twin) -> None:
    assert f"llama.{key}" in refusal(altered(twin.file, **{f"llama.{key}": DROPPED})).given


@pytest.mark.parametrize(
    "value", [-1, "three", True, np.array([3, 3]), ["3"], 1.5, 2**70], ids=lambda value: repr(value)
)
@pytest.mark.parametrize(
    "key",
    [
        "embedding_length",
        "feed_forward_length",
        "block_count",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "rope.dimension_count",
        "context_length",
        "attention.sliding_window",
    ],
)
def test_a_size_that_is_not_one_is_refused(key: str, value: Any, twin: Twin) -> None:
    refusal(altered(twin.file, **{f"llama.{key}": value}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_count", 8),
        ("rope.dimension_count", 16),
        ("attention.key_length", 16),
        ("attention.value_length", 16),
        ("attention.head_count", 0),
        ("block_count", 0),
        ("rope.scaling.attn_factor", 1.5),
        ("rope.scaling.yarn_attn_factor", 0.5),
        ("rope.scaling.yarn_ext_factor", 0.0),
        ("rope.scale_linear", 2.0),
        ("expert_count", np.array([0, 8])),
        ("attention.layer_norm_rms_epsilon", math.nan),
        ("attention.layer_norm_rms_epsilon", "1e-5"),
        ("rope.freq_base", "1e4"),
        ("rope.scaling.type", 3),
    ],
    ids=str,
)
def test_a_value_that_no_llama_has_is_named(key: str, value: Any, twin: Twin) -> None:
    given = refusal(altered(twin.file, **{f"llama.{key}": value})).given
    # A head that is not rotated whole is seen from either of its two keys.
    assert f"llama.{key}" in given or (key == "attention.key_length" and "rope.dimension_count" in given)


@pytest.mark.parametrize("factor", [0.0, -1.0, DROPPED, math.nan])
def test_a_scaling_without_a_factor_is_refused(factor: Any, twin: Twin) -> None:
    keys = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": factor}
    assert "factor" in refusal(altered(twin.file, **keys)).given


def test_an_unknown_scaling_is_named(twin: Twin) -> None:
    keys = {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 4.0}
    assert "longrope" in refusal(altered(twin.file, **keys)).given


@pytest.mark.parametrize(
    "keys", [LINEAR, {"rope.scaling.factor": 4.0}, YARN], ids=["linear", "no type", "yarn"]
)
def test_two_scalings_at_once_are_refused(keys: dict[str, Any], twin: Twin) -> None:
    divisors = {"rope_freqs.weight": torch.ones(16)}
    assert load(altered(twin.file, add=divisors)).n_layers() == 2
    both = altered(twin.file, add=divisors, **{f"llama.{key}": value for key, value in keys.items()})
    assert "llama.rope.scaling.type" in refusal(both).given


@pytest.mark.parametrize(
    "divisors",
    [torch.ones(15), torch.zeros(16), torch.ones(4, 4)],
    ids=["short", "zero", "square"],
)
def test_divisors_that_fit_no_head_are_refused(divisors: torch.Tensor, twin: Twin) -> None:
    error = refusal(altered(twin.file, add={"rope_freqs.weight": divisors}))
    assert error.needed == "16 positive numbers"


def test_divisors_in_blocks_are_refused(twin: Twin) -> None:
    blocks = QuantizedTensor(torch.zeros(1, 34, dtype=torch.uint8), BLOCK_TYPES["Q8_0"], 32)
    error = refusal(altered(twin.file, add={"rope_freqs.weight": blocks}))
    assert "rope_freqs.weight in Q8_0" in error.given


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("output_norm.weight", "model.norm.weight"),
        ("blk.1.attn_q.weight", "model.layers.1.self_attn.q_proj.weight"),
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"),
        ("blk.1.ffn_norm.weight", "model.layers.1.post_attention_layernorm.weight"),
    ],
)
def test_a_weight_that_is_missing_or_of_another_shape_is_named(name: str, named: str, twin: Twin) -> None:
    assert named in refusal(altered(twin.file, drop=[name])).given

    def shorter(other: str, tensor: Any) -> Any:
        if other != name:
            return tensor
        return tensor.select_rows(slice(0, 5)) if isinstance(tensor, QuantizedTensor) else tensor[:5]

    assert f"{named} has the shape" in refusal(altered(twin.file, shorter)).given


def test_an_embedding_that_is_missing_or_of_another_length_is_named(twin: Twin) -> None:
    assert "no tensor token_embd.weight" in refusal(altered(twin.file, drop=["token_embd.weight"])).given
    short = registry.open_checkpoint(twin.file).tensor("token_embd.weight").select_rows(slice(0, 5))
    # The embedding says how many tokens there are, and so the head does not fit.
    given = refusal(altered(twin.file, add={"token_embd.weight": short})).given
    assert "lm_head.weight has the shape (97, 96)" in given


def test_weights_left_over_are_named(twin: Twin) -> None:
    for name in (
        "blk.0.attn_q_norm.weight",
        "blk.2.attn_q.weight",
        "blk.0.ffn_gate_inp.weight",
        "spare.bias",
    ):
        error = refusal(altered(twin.file, add={name: torch.zeros(32)}))
        assert "left over" in error.given
        assert name.split(".")[-2].removeprefix("attn_")[:3] in str(error)


def test_gains_in_blocks_are_refused(twin: Twin) -> None:
    blocks = registry.open_checkpoint(twin.file).tensor("blk.0.attn_q.weight").select_rows(slice(0, 1))
    assert "model.norm.weight" in refusal(altered(twin.file, add={"output_norm.weight": blocks})).given
