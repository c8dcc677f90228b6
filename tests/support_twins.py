"""A random model twice: as a GGUF file, and as a Transformers directory of the values in its blocks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from support_gguf import HALVES, random_blocks
from support_parity import DROPPED, randomize

from fuel_core.contracts import BLOCK_TYPES

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


ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""What GGUF calls the architectures of Transformers."""


def gguf_keys(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    """What a converter writes; each architecture has its own way to give the width of a head."""
    dim = config["head_dim"]
    width: dict[str, dict[str, Any]] = {
        "llama": {"rope.dimension_count": dim, "vocab_size": config["vocab_size"]},
        "qwen2": {},
        "qwen3": {"attention.key_length": dim, "attention.value_length": dim},
    }
    return {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "block_count": config["num_hidden_layers"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": 10000.0,
        **width[architecture],
    }


def add_keys(writer: gguf.GGUFWriter, architecture: str, keys: dict[str, Any]) -> None:
    adders = {
        str: writer.add_string,
        float: writer.add_float32,
        int: writer.add_uint32,
        list: writer.add_array,
    }
    for key, value in keys.items():
        if value is not DROPPED:
            adders[type(value)](f"{architecture}.{key}", value)


class Twin:
    """A random model, as a GGUF file and as a Transformers directory of the same values.

    ``permuted`` is whether the file has the rows of Q and K in llama.cpp's order for Llamas; None goes by
    the architecture.
    """

    def __init__(
        self,
        where: Path,
        kind: str = "Q8_0",
        *,
        keys: dict[str, Any] | None = None,
        divisors: list[float] | None = None,
        architecture: str = "LlamaForCausalLM",
        permuted: bool | None = None,
        **config: Any,
    ) -> None:
        self.config = {**(K_SIZES if kind.endswith("_K") else SIZES), **config}
        where.mkdir(exist_ok=True)
        self.file, self.directory = where / "model.gguf", where / "transformers"
        cls = getattr(transformers, architecture)
        model = cls(cls.config_class(**self.config))
        randomize(model)
        name_in_gguf = ARCHITECTURES[architecture]
        permuted = name_in_gguf == "llama" if permuted is None else permuted
        writer = gguf.GGUFWriter(self.file, name_in_gguf)
        add_keys(writer, name_in_gguf, {**gguf_keys(self.config, name_in_gguf), **(keys or {})})
        names = gguf.get_tensor_name_map(
            gguf.MODEL_ARCH[name_in_gguf.upper()], self.config["num_hidden_layers"]
        )
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


LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
}
