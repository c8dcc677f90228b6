"""``llama-gguf``: a GGUF file of the ``llama`` architecture, as the llama family loads it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fuel_core import registry
from fuel_core.contracts import BLOCK_TYPES, Checkpoint, DecodeModel, QuantizedTensor
from fuel_core.weights import MemoryCheckpoint
from fuel_plugin_quantized.mapping import Matrix, map_config, map_tensors, neighbours_to_halves


def load(checkpoint: Checkpoint, *, device: str | torch.device, dtype: torch.dtype) -> DecodeModel:
    """Load through ``registry.family("llama")``, with the weights left in their blocks.

    Raises:
        CheckpointError: a key or weight is missing, left over, or not one that the llama family implements.
        PluginError: the llama family is not installed.
    """
    config = map_config(checkpoint)
    halves = partial(neighbours_to_halves, head_dim=config["head_dim"])
    mapped = MemoryCheckpoint(
        source=checkpoint.source,
        format="gguf",
        # The key stands only in files that were converted from a Mistral with a window.
        architecture="LlamaForCausalLM" if config["sliding_window"] is None else "MistralForCausalLM",
        config=config,
        tensors=map_tensors(checkpoint, {"attn_q": halves, "attn_k": halves}),
    )
    return registry.family("llama").load(mapped, device=device, dtype=dtype)


_TINY: dict[str, Any] = {
    "embedding_length": 64,
    "feed_forward_length": 96,
    "block_count": 2,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "context_length": 256,
    "rope.freq_base": 10000.0,
}
_TINY_VOCAB = 96


def tiny(seed: int = 0, **overrides: Any) -> DecodeModel:
    """A small random model of Q8_0 blocks; ``overrides`` are GGUF keys without ``llama.``."""
    checkpoint = tiny_checkpoint(seed, **overrides)
    return load(checkpoint, device="cpu", dtype=torch.float32)


def tiny_checkpoint(seed: int = 0, **overrides: Any) -> MemoryCheckpoint:
    """The checkpoint of :func:`tiny`, with GGUF's names and row order."""
    keys = {**_TINY, **overrides}
    generator = torch.Generator().manual_seed(seed)
    hidden, ffn = keys["embedding_length"], keys["feed_forward_length"]
    kv = hidden // keys["attention.head_count"] * keys["attention.head_count_kv"]
    shapes = {"token_embd": (_TINY_VOCAB, hidden), "output_norm": (hidden,), "output": (_TINY_VOCAB, hidden)}
    layer = {
        "attn_norm": (hidden,),
        "attn_q": (hidden, hidden),
        "attn_k": (kv, hidden),
        "attn_v": (kv, hidden),
    }
    layer |= {"attn_output": (hidden, hidden), "ffn_norm": (hidden,), "ffn_gate": (ffn, hidden)}
    layer |= {"ffn_up": (ffn, hidden), "ffn_down": (hidden, ffn)}
    for i in range(keys["block_count"]):
        shapes |= {f"blk.{i}.{part}": shape for part, shape in layer.items()}
    return MemoryCheckpoint(
        source="tiny llama-gguf",
        format="gguf",
        architecture="llama",
        config={f"llama.{key}": value for key, value in keys.items()},
        tensors={f"{name}.weight": _constant(_random(shape, generator)) for name, shape in shapes.items()},
    )


def _constant(matrix: Matrix) -> Callable[[], Matrix]:
    return lambda: matrix


def _random(shape: tuple[int, ...], generator: torch.Generator) -> Matrix:
    """Gains near one, and matrices of Q8_0 blocks of deviation ``1/sqrt(columns)``."""
    if len(shape) == 1:
        return 1 + 0.1 * torch.randn(shape, generator=generator)
    rows, columns = shape
    block = BLOCK_TYPES["Q8_0"]
    quants = torch.randint(-127, 128, (rows, columns // 32, 32), generator=generator, dtype=torch.int8)
    # Uniform integers up to 127 deviate by 127/sqrt(3).
    scale = torch.full((rows, columns // 32, 1), 3**0.5 / 127 / columns**0.5, dtype=torch.float16)
    data = torch.cat((scale.view(torch.uint8), quants.view(torch.uint8)), dim=-1)  # [rows, blocks, 34]
    return QuantizedTensor(data.reshape(rows, block.row_bytes(columns)), block, columns)
