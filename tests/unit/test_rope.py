"""Rotary frequencies, factors and limits against the papers' formulas in float64 and against Transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_rope import SCALINGS, exact_rotation
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from fuel_core.contracts.errors import CheckpointError
from fuel_core.layers import Rope, rope_from_config

# What a float32 power and a few float32 operations may lose.
ROUNDING = 1e-6


def config_of(head_dim: int, rope: dict[str, Any], longest: int = 512, **more: Any) -> dict[str, Any]:
    parameters = {"rope_theta": 10000.0, **rope}
    sizes = {"hidden_size": 3 * head_dim, "num_attention_heads": 3, "head_dim": head_dim}
    return {**sizes, "max_position_embeddings": longest, "rope_parameters": parameters, **more}


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest relative difference."""
    return float(((ours.double() - theirs.double()) / theirs.double()).abs().max())


def transformers_rotation(config: dict[str, Any]) -> tuple[torch.Tensor, float]:
    embedding = LlamaRotaryEmbedding(LlamaConfig(**config))
    return embedding.inv_freq, float(embedding.attention_scaling)


def assert_agreement(config: dict[str, Any], limit: float = ROUNDING) -> Rope:
    rope = rope_from_config(config, config["head_dim"])
    exact, factor = exact_rotation(config)
    theirs, their_factor = transformers_rotation(config)
    assert rope.inv_freq.dtype == torch.float32
    assert apart(rope.inv_freq, torch.tensor(exact, dtype=torch.float64)) < limit
    assert apart(rope.inv_freq, theirs) < limit
    assert rope.attention_factor == pytest.approx(factor, rel=1e-12)
    assert rope.attention_factor == pytest.approx(their_factor, rel=1e-12)
    return rope


@pytest.mark.parametrize("head_dim", [2, 10, 64, 128])
@pytest.mark.parametrize("rope", [{"rope_type": "default"}, *SCALINGS.values()], ids=["default", *SCALINGS])
def test_frequencies_are_those_of_the_papers_and_of_transformers(rope: dict[str, Any], head_dim: int) -> None:
    assert_agreement(config_of(head_dim, rope))


REAL = {
    "Llama 3": (128, 8192, {"rope_type": "default", "rope_theta": 500000.0}),
    "Llama 3.1": (
        128,
        131072,
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "Llama 3.2": (
        64,
        131072,
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "Qwen3 with YaRN": (
        128,
        40960,
        {
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
        },
    ),
    "SmolLM2": (64, 8192, {"rope_type": "default", "rope_theta": 100000.0}),
}


@pytest.mark.parametrize(("head_dim", "longest", "rope"), REAL.values(), ids=list(REAL))
def test_the_parameters_of_real_models_are_read_right(
    head_dim: int, longest: int, rope: dict[str, Any]
) -> None:
    model = assert_agreement(config_of(head_dim, rope, longest))
    assert model.max_context == (131072 if rope["rope_type"] == "yarn" else longest)


numbers = {
    "factor": st.floats(1.0, 64.0),
    "original_max_position_embeddings": st.integers(8, 100_000),
    "rope_theta": st.floats(100.0, 1e7),
}
dims = st.integers(2, 80).map(lambda half: 2 * half)
drawn = settings(deadline=None, max_examples=60, derandomize=True)


@drawn
@given(
    dims,
    st.fixed_dictionaries(
        numbers,
        optional={
            "attention_factor": st.one_of(st.none(), st.floats(0.1, 3.0)),
            "beta_fast": st.floats(8.0, 64.0),
            "beta_slow": st.floats(0.1, 2.0),
            "mscale": st.sampled_from([0, 0.5, 1.0]),
            "mscale_all_dim": st.sampled_from([0, 0.7, 1.0]),
            "truncate": st.booleans(),
        },
    ),
)
def test_any_yarn_is_that_of_transformers(head_dim: int, rope: dict[str, Any]) -> None:
    # The ramp between the two betas is a difference of near numbers, which the factor magnifies.
    limit = ROUNDING * (1 + 5 * rope["factor"])
    assert_agreement(config_of(head_dim, {"rope_type": "yarn", **rope}, longest=200_000), limit)


@drawn
@given(dims, st.fixed_dictionaries(numbers), st.floats(0.1, 4.0), st.floats(0.25, 60.0))
def test_any_llama3_is_that_of_transformers(
    head_dim: int, rope: dict[str, Any], low: float, gap: float
) -> None:
    rope = {"rope_type": "llama3", **rope, "low_freq_factor": low, "high_freq_factor": low + gap}
    # As above: the ramp from low to high.
    limit = ROUNDING * (1 + rope["factor"] * (low + gap) / gap)
    model = assert_agreement(config_of(head_dim, rope, longest=200_000), limit)
    plain = rope_from_config(config_of(head_dim, {"rope_theta": rope["rope_theta"]}), head_dim)
    stretched = plain.inv_freq / model.inv_freq
    assert float(stretched.min()) > 1 - ROUNDING
    assert float(stretched.max()) < rope["factor"] * (1 + ROUNDING)


def test_a_pair_that_turns_once_more_or_less_is_seen() -> None:
    """The agreement is fine enough to tell an original length from the next."""
    for name in ("llama3", "yarn not truncated"):
        config = config_of(64, SCALINGS[name])
        off = config_of(64, {**SCALINGS[name], "original_max_position_embeddings": 65})
        ours = rope_from_config(off, 64).inv_freq
        assert apart(ours, torch.tensor(exact_rotation(config)[0], dtype=torch.float64)) > 1000 * ROUNDING


# Angles.


def test_angles_are_frequency_times_position() -> None:
    rope = rope_from_config(config_of(64, {"rope_type": "default"}, 131072), 64)
    positions = torch.tensor([0, 1, 63, 4095, 131071])
    cos, sin = rope.angles(positions)
    assert cos.shape == sin.shape == (5, 32)
    assert cos.dtype == sin.dtype == torch.float32
    exact = positions[:, None].double() * rope.inv_freq.double()
    # A float32 angle of 131,071 radians is off by half of 2^-7 at most.
    for row, limit in enumerate((0, 1e-7, 1e-5, 3e-4, 8e-3)):
        assert float((cos[row] - exact[row].cos()).abs().max()) <= limit
        assert float((sin[row] - exact[row].sin()).abs().max()) <= limit
    assert torch.equal(cos[0], torch.ones(32))


def test_the_attention_factor_multiplies_both() -> None:
    plain = rope_from_config(config_of(64, SCALINGS["yarn"]), 64)
    loud = rope_from_config(config_of(64, SCALINGS["yarn attention_factor"]), 64)
    assert plain.attention_factor == pytest.approx(1 + math.log(4) / 10)
    assert loud.attention_factor == 1.7
    positions = torch.arange(7)
    for ours, theirs in zip(loud.angles(positions), plain.angles(positions), strict=True):
        assert torch.allclose(ours / 1.7, theirs / plain.attention_factor, atol=1e-6)


def test_a_rope_moved_to_a_device_is_the_same() -> None:
    rope = rope_from_config(config_of(64, SCALINGS["yarn"]), 64)
    moved = rope.to("cpu")
    assert torch.equal(moved.inv_freq, rope.inv_freq)
    assert (moved.attention_factor, moved.max_context) == (rope.attention_factor, rope.max_context)


# Limits.


@pytest.mark.parametrize(
    ("rope", "more", "limit"),
    [
        ({}, {}, 512),
        ({"rope_type": "linear", "factor": 4.0}, {}, 512),
        ({"rope_type": "dynamic", "factor": 4.0}, {}, 512),
        ({"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 64}, {}, 64),
        ({"rope_type": "dynamic", "factor": 4.0}, {"original_max_position_embeddings": 64}, 64),
        ({"rope_type": "dynamic", "factor": 4.0}, {"original_max_position_embeddings": 9999}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, {}, 512),
        ({"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64}, {}, 1024),
        ({"rope_type": "yarn", "original_max_position_embeddings": 64}, {}, 512),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            {"original_max_position_embeddings": 256},
            1024,
        ),
    ],
    ids=str,
)
def test_a_scaling_states_how_far_it_is_good(rope: dict[str, Any], more: dict[str, Any], limit: int) -> None:
    assert rope_from_config(config_of(64, rope, **more), 64).max_context == limit


def test_a_config_without_a_length_is_good_for_that_of_the_first_llama() -> None:
    assert rope_from_config({}, 64).max_context == LlamaConfig().max_position_embeddings == 2048


# Divisors, as GGUF files carry a scaling.


def divisors(values: Any, head_dim: int = 8) -> Rope:
    config = config_of(head_dim, {"rope_type": "divisors", "divisors": values})
    return rope_from_config(config, head_dim)


def test_divisors_divide_the_frequencies_one_by_one() -> None:
    plain = rope_from_config(config_of(8, {}), 8)
    values = torch.tensor([1.0, 1.5, 4.0, 8.0])
    for form in (values, values.tolist(), values.half(), values.double()):
        rope = divisors(form)
        assert torch.equal(rope.inv_freq, plain.inv_freq / values)
        assert (rope.attention_factor, rope.max_context) == (1.0, 512)


@pytest.mark.parametrize(
    "values",
    [[1.0] * 3, [1.0] * 5, [[1.0] * 4], [1.0, 0.0, 1.0, 1.0], [1.0, -2.0, 1.0, 1.0], [math.nan] * 4, []],
    ids=str,
)
def test_divisors_that_fit_no_head_or_divide_by_nothing_are_refused(values: Any) -> None:
    with pytest.raises(CheckpointError, match="needed: 4 positive numbers"):
        divisors(values)
