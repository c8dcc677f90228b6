"""GGUF files of Llamas give the logits of Transformers on the weights that their blocks stand for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support_parity import (
    DROPPED,
    TOLERANCE,
    altered,
    ask_transformers,
    assert_disparity,
    assert_parity,
    load,
    random_ids,
    run,
)
from support_rope import LONG, SCALINGS
from support_twins import KINDS, LINEAR, YARN, Twin, interleaved

from fuel_core import registry
from fuel_core.contracts import BLOCK_TYPES, QuantizedTensor


def matrices(model: Any) -> Iterator[tuple[int, int]]:
    """The values in each stored matrix of a loaded model, and the bytes that they take."""
    for layer in model.layers:
        maps = (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down)
        yield from (_size(weight) for each in maps for weight in each.product.weights)
    yield _size(model.parts.embedding)
    if model.parts.head is not model.parts.embedding:
        yield _size(model.parts.head)


def _size(weight: torch.Tensor | QuantizedTensor) -> tuple[int, int]:
    rows, columns = weight.shape
    data = weight.data if isinstance(weight, QuantizedTensor) else weight
    return rows * columns, data.numel() * data.element_size()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_any_block_type_gives_the_logits_of_transformers(
    kind: str, tied: bool, tmp_path: Path
) -> None:
    twin = Twin(tmp_path, kind, tie_word_embeddings=tied)
    checkpoint = registry.open_checkpoint(twin.file)
    assert ("output.weight" in checkpoint) is not tied
    assert registry.family_for(checkpoint).name == "llama-gguf"
    model = load(checkpoint)
    oracle = ask_transformers(twin.directory, random_ids(70))
    assert_parity(model, oracle)
    # And the model is not one whose attention does not matter.
    assert oracle.truth.std() > 0.3


@pytest.mark.parametrize("kind", KINDS)
def test_the_loaded_model_is_no_larger_than_its_blocks(kind: str, tmp_path: Path) -> None:
    model = load(Twin(tmp_path, kind).file)
    block_bytes, length = {"F32": (4, 1), "F16": (2, 1), "BF16": (2, 1)}.get(kind, (0, 0))
    if length == 0:
        block_bytes, length = BLOCK_TYPES[kind].bytes, BLOCK_TYPES[kind].length
    sizes = list(matrices(model))
    assert len(sizes) == 7 * 2 + 2
    for values, size in sizes:
        assert size <= values * block_bytes / length


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["F32", "BF16", "Q4_1"])
def test_narrow_types_stay_near_the_truth(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    twin = Twin(tmp_path, kind)
    oracle = ask_transformers(twin.directory, random_ids(40))
    ends = list(range(1, 41))
    error = oracle.distance(run(load(twin.file, dtype), oracle.ids, ends, dtype), ends)
    assert TOLERANCE < error < (5e-2 if dtype == torch.bfloat16 else 1e-2)


def test_blocks_of_several_types_in_one_model_are_served(tmp_path: Path) -> None:
    """As quantizers write them: one type for most, a finer one for some."""
    coarse, fine = Twin(tmp_path / "a", "Q4_0"), Twin(tmp_path / "b", "Q8_0")
    finer = registry.open_checkpoint(fine.file)
    names = [name for name in finer if "attn_v" in name or "ffn_down" in name or name == "output.weight"]
    mixed = altered(coarse.file, add={name: finer.tensor(name) for name in names})
    model = transformers.AutoModelForCausalLM.from_pretrained(coarse.directory)
    other = transformers.AutoModelForCausalLM.from_pretrained(fine.directory).state_dict()
    taken = {
        key: value for key, value in other.items() if any(part in key for part in ("v_proj", "down", "lm"))
    }
    assert len(taken) == len(names)
    model.load_state_dict({**model.state_dict(), **taken})
    model.save_pretrained(tmp_path / "mixed")
    oracle = ask_transformers(tmp_path / "mixed", random_ids(70))
    assert_parity(load(mixed), oracle)
    assert_disparity(load(coarse.file), oracle)


# Row order.


def test_rows_left_in_the_order_of_the_file_are_seen(tmp_path: Path) -> None:
    twin = Twin(tmp_path, permuted=False)
    assert_disparity(load(twin.file), ask_transformers(twin.directory, random_ids(70)), at_least=0.1)


def test_the_order_of_the_file_is_that_of_llama_cpps_converter() -> None:
    """The test's own permutation against the converter's, and that neither undoes itself."""
    rows, dim = 3 * 32, 32
    weights = np.arange(rows * 2).reshape(rows, 2)
    converted = weights.reshape(3, 2, dim // 2, 2).swapaxes(1, 2).reshape(weights.shape)
    assert (weights[interleaved(rows, dim)] == converted).all()
    assert (converted[interleaved(rows, dim)] != weights).any()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_biases_are_reordered_with_their_rows(tied: bool, tmp_path: Path) -> None:
    twin = Twin(tmp_path, attention_bias=True, mlp_bias=True, tie_word_embeddings=tied)
    oracle = ask_transformers(twin.directory, random_ids(70))
    assert_parity(load(twin.file), oracle)

    def unordered(name: str, tensor: Any) -> Any:
        order = torch.tensor(interleaved(32, 32))
        return tensor[order] if name == "blk.1.attn_k.bias" else tensor

    assert_disparity(load(altered(twin.file, unordered)), oracle, at_least=10 * TOLERANCE)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_heads_of_any_grouping_and_width_are_told_apart(kv_heads: int, tmp_path: Path) -> None:
    twin = Twin(
        tmp_path,
        num_attention_heads=6,
        num_key_value_heads=kv_heads,
        head_dim=48,
        keys={"attention.key_length": 48, "attention.value_length": 48},
    )
    assert_parity(load(twin.file), ask_transformers(twin.directory, random_ids(70)))


def test_a_file_that_names_no_kv_heads_has_as_many_as_query_heads(tmp_path: Path) -> None:
    twin = Twin(tmp_path, num_key_value_heads=3, keys={"attention.head_count_kv": DROPPED})
    assert_parity(load(twin.file), ask_transformers(twin.directory, random_ids(30)))


def test_a_file_without_optional_keys_has_the_usual_values(tmp_path: Path) -> None:
    absent = dict.fromkeys(("rope.dimension_count", "rope.freq_base", "vocab_size"), DROPPED)
    twin = Twin(tmp_path, keys=absent)
    model = load(twin.file)
    assert_parity(model, ask_transformers(twin.directory, random_ids(70)))
    assert model.max_context() == 512


# RoPE.


def llama3_divisors(head_dim: int) -> list[float]:
    """What a converter writes as rope_freqs for the ``llama3`` of :data:`SCALINGS`."""
    rope = SCALINGS["llama3"]
    values = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * 10000.0 ** (2 * pair / head_dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        smooth = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        smooth = min(max(smooth, 0.0), 1.0)
        values.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return values


def scaled(name: str) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **SCALINGS[name]}}


@pytest.mark.parametrize("kind", ["F32", "Q4_1"])
def test_rope_freqs_are_the_scaling_of_llama_3_1(kind: str, tmp_path: Path) -> None:
    twin = Twin(tmp_path, kind, divisors=llama3_divisors(32), **scaled("llama3"))
    oracle = ask_transformers(twin.directory, random_ids(LONG))
    assert_parity(load(twin.file), oracle)
    unscaled = load(altered(twin.file, drop=["rope_freqs.weight"]))
    steps = list(range(40, 48))
    for place in [*steps, LONG]:
        assert oracle.distance(run(unscaled, oracle.ids, [place]), [place]) > 1e-3
    assert oracle.distance(run(unscaled, oracle.ids, [1]), [1]) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("linear", LINEAR),
        ("linear", {"rope.scaling.factor": 4.0}),
        ("yarn", YARN),
        ("yarn", {**YARN, "rope.scaling.attn_factor": 1.0, "rope.scaling.yarn_ext_factor": 1.0}),
        ("yarn betas", {**YARN, "rope.scaling.yarn_beta_fast": 4.0, "rope.scaling.yarn_beta_slow": 0.25}),
        ("yarn without original", {key: YARN[key] for key in ("rope.scaling.type", "rope.scaling.factor")}),
    ],
    ids=["linear", "no type", "yarn", "yarn, defaults spelled out", "yarn betas", "yarn without original"],
)
def test_keys_of_a_scaling_are_that_scaling(name: str, keys: dict[str, Any], tmp_path: Path) -> None:
    twin = Twin(tmp_path, keys=keys, **scaled(name))
    oracle = ask_transformers(twin.directory, random_ids(LONG))
    assert_parity(load(twin.file), oracle)
    unscaled = load(altered(twin.file, **{f"llama.{key}": DROPPED for key in keys}))
    assert oracle.distance(run(unscaled, oracle.ids, [41]), [41]) > 1e-3


def test_the_scaling_none_scales_nothing(tmp_path: Path) -> None:
    twin = Twin(tmp_path, keys={"rope.scaling.type": "none", "rope.scaling.factor": 4.0})
    assert_parity(load(twin.file), ask_transformers(twin.directory, random_ids(70)))


def test_the_base_of_the_file_is_the_models(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    twin = Twin(tmp_path, keys={"rope.freq_base": 500000.0}, rope_parameters=rope)
    oracle = ask_transformers(twin.directory, random_ids(70))
    assert_parity(load(twin.file), oracle)
    assert_disparity(load(altered(twin.file, **{"llama.rope.freq_base": 10000.0})), oracle)


def test_a_window_makes_it_a_mistral(tmp_path: Path) -> None:
    twin = Twin(
        tmp_path,
        architecture="MistralForCausalLM",
        sliding_window=24,
        keys={"attention.sliding_window": 24},
    )
    model = load(twin.file)
    assert model.max_context() == 24
    assert_parity(model, ask_transformers(twin.directory, random_ids(24)))
    assert load(altered(twin.file, **{"llama.attention.sliding_window": 0})).max_context() == 512
