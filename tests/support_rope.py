"""The RoPE scalings that tests go through, and the papers' formulas for them in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

LONG = 300
"""Positions that a test of the scalings reaches; their models were pretrained, so to say, for 64."""

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": _YARN,
    "yarn attention_factor": {**_YARN, "attention_factor": 1.7},
    "yarn mscale": {**_YARN, "mscale": 1.5, "mscale_all_dim": 0.6},
    "yarn betas": {**_YARN, "beta_fast": 4.0, "beta_slow": 0.25},
    "yarn not truncated": {**_YARN, "beta_fast": 4.0, "truncate": False},
    "yarn null factor": {**_YARN, "factor": None},
    "yarn without original": {"rope_type": "yarn", "factor": 4.0},
}
"""Every scaling that changes frequencies, in every shape that its parameters take."""


def exact_rotation(config: Mapping[str, Any]) -> tuple[list[float], float]:
    """Radians per position of each pair, and YaRN's factor, from the papers' formulas in float64."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    longest = config["max_position_embeddings"]
    original = config.get("original_max_position_embeddings") or rope.get(
        "original_max_position_embeddings", longest
    )
    plain = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    if kind in ("default", "dynamic"):  # dynamic scaling leaves positions within the original length alone
        return plain, 1.0
    factor = rope.get("factor") or longest / original
    if kind == "linear":
        return [f / factor for f in plain], 1.0
    if kind == "llama3":
        return [_llama3(f, factor, original, rope) for f in plain], 1.0
    assert kind == "yarn"
    weights = _yarn_weights(dim, theta, original, rope)
    mixed = [f * ((1 - w) + w / factor) for f, w in zip(plain, weights, strict=True)]
    return mixed, _yarn_factor(factor, rope)


def _llama3(frequency: float, factor: float, original: int, rope: Mapping[str, Any]) -> float:
    turns = original * frequency / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    if turns < low:
        return frequency / factor
    if turns > high:
        return frequency
    smooth = (turns - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def _yarn_weights(dim: int, theta: float, original: int, rope: Mapping[str, Any]) -> list[float]:
    """How far each pair is interpolated: from 0 for those that turn often to 1 for those that seldom do."""

    def pair(turns: float) -> float:
        return dim / 2 * math.log(original / (2 * math.pi * turns), theta)

    first, last = pair(rope.get("beta_fast") or 32), pair(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first or 0.001
    return [min(max((i - first) / width, 0.0), 1.0) for i in range(dim // 2)]


def _yarn_factor(factor: float, rope: Mapping[str, Any]) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    stretch = math.log(max(factor, 1.0)) / 10
    numerator, denominator = 1.0, 0.0
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        numerator, denominator = rope["mscale"], rope["mscale_all_dim"]
    return (1 + numerator * stretch) / (1 + denominator * stretch)
