"""Every RoPE scaling gives the logits of Transformers, at short and at long positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support_parity import (
    DROPPED,
    TOLERANCE,
    altered,
    ask_transformers,
    assert_parity,
    load,
    new_cache,
    random_ids,
    read_config,
    respell,
    run,
    write_model,
)
from support_rope import LONG, SCALINGS
from transformers import AutoConfig

from fuel_core.contracts import DecodeSession
from fuel_core.contracts.errors import InvalidRequestError

UNSCALED = {"rope_type": "default", "rope_theta": 10000.0}
HEADS = {"num_key_value_heads": 3, "head_dim": 64}
"""Enough pairs that each parameter of a scaling moves some of them."""

DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
by_scaling = pytest.mark.parametrize("name", SCALINGS)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama without scaling, whose weights the scaled ones share."""
    return write_model(tmp_path_factory.mktemp("plain"), **HEADS)


def scaled(plain: Path, into: Path, **rope: Any) -> Path:
    return respell(plain, into, rope_parameters={"rope_theta": 10000.0, **rope})


@by_scaling
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_scaled_llama_gives_the_logits_of_transformers_at_any_position(
    name: str, tied: bool, tmp_path: Path
) -> None:
    rope = {"rope_theta": 10000.0, **SCALINGS[name]}
    path = write_model(tmp_path, rope_parameters=rope, tie_word_embeddings=tied, **HEADS)
    assert_parity(load(path), ask_transformers(path, random_ids(LONG)))


@by_scaling
def test_angles_without_the_scaling_are_seen(name: str, plain: Path, tmp_path: Path) -> None:
    oracle = ask_transformers(scaled(plain, tmp_path / "scaled", **SCALINGS[name]), random_ids(LONG))
    unscaled = load(plain)
    # A token alone attends to itself, whatever its angle.
    first, early, late = (oracle.distance(run(unscaled, oracle.ids, [n]), [n]) for n in (1, 41, LONG))
    assert first < TOLERANCE
    assert early > 10 * TOLERANCE
    assert late > 100 * TOLERANCE


@by_scaling
def test_each_parameter_of_a_scaling_is_heard(name: str, plain: Path, tmp_path: Path) -> None:
    path = scaled(plain, tmp_path / "scaled", **SCALINGS[name])
    oracle = ask_transformers(path, random_ids(LONG))
    for key, value in SCALINGS[name].items():
        if key in ("rope_type", "attention_factor") or value is None:
            continue
        changed = {**read_config(path)["rope_parameters"], key: value * 1.5 if value else True}
        model = load(altered(path, rope_parameters=changed))
        assert oracle.distance(run(model, oracle.ids, [LONG]), [LONG]) > 3 * TOLERANCE, key


@pytest.mark.parametrize("kind", ["rope_type", "type", "both"])
@pytest.mark.parametrize("holder", ["rope_parameters", "rope_scaling"])
@by_scaling
def test_every_spelling_of_a_scaling_means_the_same(
    name: str, holder: str, kind: str, plain: Path, tmp_path: Path
) -> None:
    """Fuel's angles are the same bit by bit, and Transformers reads the spelling so, too."""
    path = scaled(plain, tmp_path / "usual", **SCALINGS[name])
    rope = dict(SCALINGS[name])
    rope |= dict.fromkeys(("rope_type", "type") if kind == "both" else (kind,), rope.pop("rope_type"))
    other = respell(plain, tmp_path / "other", drop=["rope_parameters"], **{holder: rope}, rope_theta=10000.0)
    usual, spelled = load(path).rope, load(other).rope
    assert torch.equal(usual.inv_freq, spelled.inv_freq)
    assert (usual.attention_factor, usual.max_context) == (spelled.attention_factor, spelled.max_context)
    theirs = AutoConfig.from_pretrained(other).rope_parameters
    assert {key: theirs[key] for key in SCALINGS[name]} == SCALINGS[name]


@pytest.mark.parametrize("name", ["llama3", "yarn"])
@pytest.mark.parametrize("inner", [None, 128], ids=["nothing inside", "another inside"])
def test_an_original_length_beside_the_parameters_wins(
    name: str, inner: int | None, plain: Path, tmp_path: Path
) -> None:
    rope = {key: value for key, value in SCALINGS[name].items() if key != "original_max_position_embeddings"}
    rope |= {} if inner is None else {"original_max_position_embeddings": inner}
    path = respell(
        plain,
        tmp_path / "other",
        drop=["rope_parameters"],
        rope_scaling=rope,
        original_max_position_embeddings=32,
    )
    oracle = ask_transformers(path, random_ids(LONG))
    assert_parity(load(path), oracle)
    ignorant = load(altered(path, original_max_position_embeddings=DROPPED))
    assert oracle.distance(run(ignorant, oracle.ids, [LONG]), [LONG]) > 10 * TOLERANCE


@pytest.mark.parametrize("name", ["llama3", "yarn"])
def test_without_an_original_length_the_longest_position_stands_in(
    name: str, plain: Path, tmp_path: Path
) -> None:
    rope = {key: value for key, value in SCALINGS[name].items() if key != "original_max_position_embeddings"}
    path = respell(plain, tmp_path / "other", drop=["rope_parameters"], rope_scaling=rope)
    assert_parity(load(path), ask_transformers(path, random_ids(LONG)))


def test_the_older_key_wins_where_a_config_has_both(plain: Path, tmp_path: Path) -> None:
    path = respell(plain, tmp_path / "both", rope_scaling={"type": "linear", "factor": 4.0})
    assert read_config(path)["rope_parameters"]["rope_type"] == "default"
    assert_parity(load(path), ask_transformers(path, random_ids(LONG)))


def test_a_config_of_before_rope_parameters_is_read(plain: Path, tmp_path: Path) -> None:
    changes = {"rope_scaling": None, "rope_theta": 500.0}
    path = respell(plain, tmp_path / "old", drop=["rope_parameters"], **changes)
    assert_parity(load(path), ask_transformers(path, random_ids(LONG)))


def test_the_base_of_a_config_that_names_none_is_ten_thousand(plain: Path, tmp_path: Path) -> None:
    path = respell(plain, tmp_path / "bare", drop=["rope_parameters"])
    assert_parity(load(path), ask_transformers(path, random_ids(LONG)))


# Dynamic NTK: beyond the original length its angles depend on how a prompt is cut, so it stops there.


def dynamic(plain: Path, tmp_path: Path, **changes: Any) -> Path:
    rope = {"rope_parameters": {"rope_theta": 10000.0, **DYNAMIC}}
    return respell(plain, tmp_path / "dynamic", **{**rope, "max_position_embeddings": 64, **changes})


def test_dynamic_scaling_gives_the_logits_of_transformers_up_to_the_original_length(
    plain: Path, tmp_path: Path
) -> None:
    path = dynamic(plain, tmp_path)
    model = load(path)
    assert model.max_context() == 64
    assert_parity(model, ask_transformers(path, random_ids(64)))


def test_dynamic_scaling_is_refused_beyond_the_original_length(plain: Path, tmp_path: Path) -> None:
    model = load(dynamic(plain, tmp_path))
    ids = random_ids(65)
    cache = new_cache(model, 80)
    with pytest.raises(InvalidRequestError, match=r"65 tokens.*at most 64") as refused:
        model.forward_with_kv_context_persistent(ids, cache, DecodeSession())
    assert (refused.value.total, refused.value.max_context) == (65, 64)
    assert cache.cached_len == 0
    model.forward_with_kv_context_persistent(ids[:64], cache, DecodeSession())
    with pytest.raises(InvalidRequestError, match=r"65 tokens.*at most 64"):
        model.forward_with_kv_context_persistent(ids[64:], cache, DecodeSession())
    with pytest.raises(InvalidRequestError, match=r"65 tokens.*at most 64"):
        model.build_batched_decode_logits([cache], ids[64:], "cpu", torch.float32)
    assert cache.cached_len == 64


def test_transformers_itself_is_of_two_minds_beyond_the_original_length(plain: Path, tmp_path: Path) -> None:
    """Why it is refused: at position 64 the whole prompt's angles differ from those that its prefix had."""
    path = dynamic(plain, tmp_path)
    ids = random_ids(100)
    short, long = ask_transformers(path, ids[:64]), ask_transformers(path, ids)
    there = long.plain[:64].double() - short.truth
    assert there.abs().max() > 100 * TOLERANCE * short.truth.abs().max()


def test_a_shorter_original_length_beside_the_parameters_limits_dynamic_scaling(
    plain: Path, tmp_path: Path
) -> None:
    path = dynamic(plain, tmp_path, original_max_position_embeddings=40)
    assert load(path).max_context() == 40


# Context limits, and what a wrong scaling would do.


@pytest.mark.parametrize(
    ("name", "longest", "context"),
    [
        ("linear", 512, 512),
        ("llama3", 512, 512),
        ("yarn", 512, 512),
        ("yarn", 64, 256),
        ("yarn null factor", 512, 512),
        ("yarn without original", 512, 2048),
    ],
)
def test_each_scaling_states_its_context_limit(
    name: str, longest: int, context: int, plain: Path, tmp_path: Path
) -> None:
    path = respell(plain, tmp_path / "other", rope_parameters=SCALINGS[name], max_position_embeddings=longest)
    assert load(path).max_context() == context


def test_no_scaling_passes_for_another(plain: Path, tmp_path: Path) -> None:
    """The cases of these tests are all different models, so that none hides behind another."""
    ids = random_ids(LONG)
    models = [load(scaled(plain, tmp_path / name, **rope)) for name, rope in SCALINGS.items()]
    rows = torch.stack([run(model, ids, [LONG])[0] for model in [load(plain), *models]])
    apart = torch.cdist(rows, rows).fill_diagonal_(1e9)
    assert apart.min() > 30 * TOLERANCE * rows.abs().max()


def test_a_base_that_is_off_by_a_thousandth_is_seen(plain: Path) -> None:
    oracle = ask_transformers(plain, random_ids(LONG))
    off = load(altered(plain, rope_parameters={**UNSCALED, "rope_theta": 10010.0}))
    assert oracle.distance(run(off, oracle.ids, [LONG]), [LONG]) > TOLERANCE
