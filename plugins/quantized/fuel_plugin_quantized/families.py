"""GGUF files as their base families load them, and small random ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fuel_core import registry
from fuel_core.contracts import BLOCK_TYPES, Checkpoint, DecodeModel, QuantizedTensor
from fuel_core.contracts.errors import CheckpointError
from fuel_core.weights import MemoryCheckpoint
from fuel_plugin_quantized.mapping import Matrix, map_config, map_tensors, neighbours_to_halves
from fuel_plugin_quantized.table import ENTRIES, Entry, family_name


def load(
    architecture: str, checkpoint: Checkpoint, *, device: str | torch.device, dtype: torch.dtype
) -> DecodeModel:
    """Load a file of ``architecture`` through its base family, with the weights left in their blocks.

    Raises:
        CheckpointError: the file is of another architecture, or a key or weight is missing, left over, or
            not one that the base family implements.
        PluginError: the base family is not installed.
    """
    if checkpoint.architecture != architecture:
        raise CheckpointError(
            f"{checkpoint.source}: a model of the architecture {checkpoint.architecture!r}",
            needed=f"{architecture!r}, which {family_name(architecture)} loads",
            remedy="load it with the family that registry.family_for() names",
            architecture=checkpoint.architecture,
        )
    entry = ENTRIES[architecture]
    return registry.family(entry.base).load(_mapped(checkpoint, entry), device=device, dtype=dtype)


def _mapped(checkpoint: Checkpoint, entry: Entry) -> MemoryCheckpoint:
    config = map_config(checkpoint)
    halves = partial(neighbours_to_halves, head_dim=config["head_dim"])
    return MemoryCheckpoint(
        source=checkpoint.source,
        format="gguf",
        architecture=entry.architecture if config["sliding_window"] is None else entry.windowed,
        config=config,
        tensors=map_tensors(checkpoint, dict.fromkeys(entry.reordered, halves)),
    )


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


def tiny(architecture: str, seed: int = 0, **overrides: Any) -> DecodeModel:
    """A small random model of Q8_0 blocks; ``overrides`` are GGUF keys without the architecture."""
    checkpoint = tiny_checkpoint(architecture, seed, **overrides)
    return load(architecture, checkpoint, device="cpu", dtype=torch.float32)


def tiny_checkpoint(architecture: str = "llama", seed: int = 0, **overrides: Any) -> MemoryCheckpoint:
    """The checkpoint of :func:`tiny`, with GGUF's names and row order."""
    entry = ENTRIES[architecture]
    keys = {**_TINY, **entry.tiny, **overrides}
    generator = torch.Generator().manual_seed(seed)
    hidden = keys["embedding_length"]
    shapes = {
        "token_embd.weight": (_TINY_VOCAB, hidden),
        "output_norm.weight": (hidden,),
        "output.weight": (_TINY_VOCAB, hidden),
    }
    layer = _layer_shapes(entry, keys)
    for i in range(keys["block_count"]):
        shapes |= {f"blk.{i}.{part}": shape for part, shape in layer.items()}
    return MemoryCheckpoint(
        source=f"tiny {family_name(architecture)}",
        format="gguf",
        architecture=architecture,
        config={f"{architecture}.{key}": value for key, value in keys.items()},
        tensors={name: _constant(_random(name, shape, generator)) for name, shape in shapes.items()},
    )


def _layer_shapes(entry: Entry, keys: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name after ``blk.N.`` → shape."""
    hidden, ffn, heads = keys["embedding_length"], keys["feed_forward_length"], keys["attention.head_count"]
    head_dim = keys.get("attention.key_length", hidden // heads)
    q, kv = heads * head_dim, keys["attention.head_count_kv"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {"attn_norm": (hidden,)}
    shapes |= {"attn_q": (q, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden)}
    shapes |= {"attn_output": (hidden, q), "ffn_norm": (hidden,)}
    shapes |= {"ffn_gate": (ffn, hidden), "ffn_up": (ffn, hidden), "ffn_down": (hidden, ffn)}
    if entry.norms_heads:
        shapes |= {"attn_q_norm": (head_dim,), "attn_k_norm": (head_dim,)}
    biases = {f"{part}.bias": shapes[part][:1] for part in entry.biased}
    return {f"{part}.weight": shape for part, shape in shapes.items()} | biases


def _constant(matrix: Matrix) -> Callable[[], Matrix]:
    return lambda: matrix


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Matrix:
    """Biases that matter, gains near one, and matrices of Q8_0 blocks of deviation ``1/sqrt(columns)``."""
    if name.endswith("bias"):
        return 0.3 * torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return 1 + 0.1 * torch.randn(shape, generator=generator)
    rows, columns = shape
    block = BLOCK_TYPES["Q8_0"]
    quants = torch.randint(-127, 128, (rows, columns // 32, 32), generator=generator, dtype=torch.int8)
    # Uniform integers up to 127 deviate by 127/sqrt(3).
    scale = torch.full((rows, columns // 32, 1), 3**0.5 / 127 / columns**0.5, dtype=torch.float16)
    data = torch.cat((scale.view(torch.uint8), quants.view(torch.uint8)), dim=-1)  # [rows, blocks, 34]
    return QuantizedTensor(data.reshape(rows, block.row_bytes(columns)), block, columns)
