"""GGUF files of Llamas give the logits of Transformers on the weights that their blocks stand for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from support_gguf import HALVES, random_blocks
from support_parity import (
    DROPPED,
    LONG,
    SCALINGS,
    TOLERANCE,
    altered,
    ask_transformers,
    assert_disparity,
    assert_parity,
    load,
    random_ids,
    randomize,
    run,
)

from fuel_core import registry
from fuel_core.contracts import BLOCK_TYPES, QuantizedTensor
from fuel_core.contracts.errors import CheckpointError, FuelError

QUANTIZED_BY_GGUF = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
DRAWN = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL")
KINDS = (*QUANTIZED_BY_GGUF, *DRAWN)
MEAN_QUANT = {"Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}
"""Where a block's minimum is this many scales, its values lie around zero."""

SIZES = {
    "vocab_size": 97,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-3,
    "max_position_embeddings": 512,
}
K_SIZES = {
    **SIZES,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def drawn_blocks(name: str, rows: int, columns: int, seed: int) -> np.ndarray:
    """Random blocks of a format that ``gguf`` cannot write, of deviation ``1/sqrt(columns)``."""
    blocks = random_blocks(BLOCK_TYPES[name], rows, columns, seed).view(-1, BLOCK_TYPES[name].bytes)
    halves = torch.tensor([1.0, MEAN_QUANT.get(name, 0.0)])
    for _ in range(2):  # once to measure, once at the right size
        for half, start in zip(halves, HALVES[name], strict=False):
            blocks[:, start : start + 2] = half.half().view(1).view(torch.uint8)
        values = gguf.quants.dequantize(blocks.view(rows, -1).numpy(), Kind[name])
        halves = halves / (values.std() * math.sqrt(columns))
    return blocks.view(rows, -1).numpy()


def encode(values: np.ndarray, name: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """What the file holds, and the float32 values that it stands for."""
    if name in DRAWN:
        data = drawn_blocks(name, *values.shape, seed)
    else:
        data = gguf.quants.quantize(values, Kind[name])
    return data, gguf.quants.dequantize(data, Kind[name]).reshape(values.shape)


def interleaved(rows: int, head_dim: int) -> list[int]:
    """Which row of Transformers stands at each row of a GGUF file: pairs side by side, head by head."""
    order = []
    for head in range(rows // head_dim):
        for pair in range(head_dim // 2):
            order += [head * head_dim + pair, head * head_dim + head_dim // 2 + pair]
    return order


def gguf_keys(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "block_count": config["num_hidden_layers"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.dimension_count": config["head_dim"],
        "rope.freq_base": 10000.0,
        "vocab_size": config["vocab_size"],
    }


def add_keys(writer: gguf.GGUFWriter, keys: dict[str, Any]) -> None:
    adders = {
        str: writer.add_string,
        float: writer.add_float32,
        int: writer.add_uint32,
        list: writer.add_array,
    }
    for key, value in keys.items():
        if value is not DROPPED:
            adders[type(value)](f"llama.{key}", value)


class Twin:
    """A random model, as a GGUF file and as a Transformers directory of the same values."""

    def __init__(
        self,
        where: Path,
        kind: str = "Q8_0",
        *,
        keys: dict[str, Any] | None = None,
        divisors: list[float] | None = None,
        architecture: str = "LlamaForCausalLM",
        permuted: bool = True,
        **config: Any,
    ) -> None:
        self.config = {**(K_SIZES if kind.endswith("_K") else SIZES), **config}
        where.mkdir(exist_ok=True)
        self.file, self.directory = where / "model.gguf", where / "transformers"
        cls = getattr(transformers, architecture)
        model = cls(cls.config_class(**self.config))
        randomize(model)
        writer = gguf.GGUFWriter(self.file, "llama")
        add_keys(writer, {**gguf_keys(self.config), **(keys or {})})
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, self.config["num_hidden_layers"])
        for place, (name, weight) in enumerate(model.named_parameters()):
            known = names.get_name(name, try_suffixes=(".weight", ".bias"))
            order = slice(None)
            if permuted and ("q_proj" in name or "k_proj" in name):
                order = interleaved(weight.shape[0], self.config["head_dim"])
            stored = kind if weight.ndim == 2 else "F32"
            data, values = encode(weight.detach().numpy()[order], stored, seed=place)
            writer.add_tensor(known, data, raw_dtype=Kind[stored])
            with torch.no_grad():
                weight[order] = torch.from_numpy(values.copy())
        if divisors is not None:
            writer.add_tensor("rope_freqs.weight", np.array(divisors, dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        model.save_pretrained(self.directory)


def matrices(model: Any) -> Iterator[tuple[int, int]]:
    """The values in each stored matrix of a loaded model, and the bytes that they take."""
    for layer in model.layers:
        linears = [*layer.attention.qkv.parts, layer.attention.out, *layer.mlp.gate_up.parts, layer.mlp.down]
        yield from (_size(linear.weight) for linear in linears)
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


LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
}


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


# Refusals.


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
