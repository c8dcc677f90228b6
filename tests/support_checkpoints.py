"""A small random Llama on disk, with a tokenizer of single bytes: as a directory and as a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from fuel_core.layers import ConfigReader
from fuel_core.weights import RandomWeights
from fuel_plugin_llama.model import build

# A piece per byte, and one merge, since a vocabulary without any is refused.
PIECES = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th"]
BOS, EOS, VOCAB = len(PIECES), len(PIECES) + 1, len(PIECES) + 2
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
)

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": EOS,
    "tie_word_embeddings": False,
}


class _Recording(RandomWeights):
    """Random weights that remember what was taken."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.taken: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self.taken[name] = super().take(name, shape)
        return self.taken[name]


def random_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Weights by their Hugging Face names."""
    recording = _Recording(seed)
    build(recording, ConfigReader(config, "test"), torch.float32)
    return recording.taken


def byte_tokenizer() -> Tokenizer:
    """A token per byte, one for ``th``, then ``<s>`` and ``</s>``."""
    vocab = {piece: i for i, piece in enumerate(PIECES)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return tokenizer


def write_directory(path: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """A Hugging Face directory; ``overrides`` are keys of config.json, None drops one."""
    path.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, **overrides}
    tensors = random_tensors({key: value for key, value in config.items() if value is not None}, seed)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    written = {key: value for key, value in config.items() if value is not None}
    (path / "config.json").write_text(json.dumps(written))
    byte_tokenizer().save(str(path / "tokenizer.json"))
    tokenizer_config = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": True,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return path


def write_gguf(path: Path, *, seed: int = 0, layers: int = 2) -> Path:
    """A GGUF file of the ``llama`` architecture, its matrices in Q8_0."""
    config = {**CONFIG, "num_hidden_layers": layers}
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(layers)
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-6)
    _write_vocabulary(writer)
    for name, tensor in random_tensors(config, seed).items():
        _write_tensor(writer, name, tensor, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_vocabulary(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*PIECES, "<s>", "</s>"])
    writer.add_token_types([gguf.TokenType.NORMAL] * len(PIECES) + [gguf.TokenType.CONTROL] * 2)
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHAT_TEMPLATE)


_GGUF_NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 64)


def _write_tensor(writer: gguf.GGUFWriter, name: str, tensor: Tensor, config: dict[str, Any]) -> None:
    base, _, kind = name.rpartition(".")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(
        base.split(".")[-1]
    )
    if heads is not None:  # llama.cpp's converter interleaves the halves of each head
        rows, columns = tensor.shape
        tensor = tensor.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)
    mapped = f"{_GGUF_NAMES.get_name(base)}.{kind}"
    if tensor.ndim == 1:
        writer.add_tensor(mapped, tensor.numpy())
        return
    blocks = gguf.quants.quantize(tensor.contiguous().numpy(), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor(mapped, blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
