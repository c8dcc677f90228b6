"""A GGUF file that is no Qwen which this plugin maps rightly is refused, by the name of what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support_parity import DROPPED, altered, ask_transformers, assert_parity, load, random_ids
from support_twins import Twin

from fuel_core import registry
from fuel_core.contracts import QuantizedTensor
from fuel_core.contracts.errors import CheckpointError, PluginError
from fuel_core.registry.discovery import installed
from fuel_plugin_quantized.families import tiny_checkpoint

CLASSES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
by_architecture = pytest.mark.parametrize("architecture", CLASSES)


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Twin]:
    where = tmp_path_factory.mktemp("twins")
    return {name: Twin(where / name, architecture=CLASSES[name]) for name in CLASSES}


def refusal(source: Any) -> CheckpointError:
    with pytest.raises(CheckpointError) as refused:
        load(source)
    assert "\n" not in str(refused.value)
    assert refused.value.needed
    assert refused.value.remedy
    return refused.value


@pytest.mark.parametrize(
    ("architecture", "name", "named"),
    [
        ("qwen2", "blk.1.attn_q.bias", "model.layers.1.self_attn.q_proj.bias"),
        ("qwen2", "blk.0.attn_q.bias", "model.layers.0.self_attn.q_proj.bias"),
        ("qwen2", "blk.1.attn_k.bias", "model.layers.1.self_attn.k_proj.bias"),
        ("qwen2", "blk.0.attn_v.bias", "model.layers.0.self_attn.v_proj.bias"),
        ("qwen3", "blk.1.attn_q_norm.weight", "model.layers.1.self_attn.q_norm.weight"),
        ("qwen3", "blk.0.attn_k_norm.weight", "model.layers.0.self_attn.k_norm.weight"),
        ("qwen3", "blk.1.ffn_gate.weight", "model.layers.1.mlp.gate_proj.weight"),
    ],
)
def test_a_weight_that_is_missing_or_of_another_shape_is_named(
    architecture: str, name: str, named: str, twins: dict[str, Twin]
) -> None:
    file = twins[architecture].file
    assert f"no tensor {named}" in refusal(altered(file, drop=[name])).given

    def shorter(other: str, tensor: Any) -> Any:
        if other != name:
            return tensor
        return tensor.select_rows(slice(0, 5)) if isinstance(tensor, QuantizedTensor) else tensor[:5]

    assert f"{named} has the shape" in refusal(altered(file, shorter)).given


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("qwen2", "blk.0.attn_q_norm.weight"),
        ("qwen2", "blk.0.attn_output.bias"),
        ("qwen2", "blk.0.ffn_up.bias"),
        ("qwen2", "blk.2.attn_q.bias"),
        ("qwen3", "blk.1.attn_q.bias"),
        ("qwen3", "blk.0.ffn_down.bias"),
        ("qwen3", "blk.0.ffn_gate_inp.weight"),
    ],
)
def test_weights_left_over_are_named(architecture: str, name: str, twins: dict[str, Twin]) -> None:
    given = refusal(altered(twins[architecture].file, add={name: torch.zeros(32)})).given
    assert "left over" in given
    assert name.split(".")[1] in given


@pytest.mark.parametrize("key", ["block_count", "attention.head_count", "context_length"])
@by_architecture
def test_a_key_that_is_missing_is_named(architecture: str, key: str, twins: dict[str, Twin]) -> None:
    key = f"{architecture}.{key}"
    assert key in refusal(altered(twins[architecture].file, **{key: DROPPED})).given


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_count", 8),
        ("attention.value_length", 16),
        ("rope.dimension_count", 16),
        ("rope.scaling.attn_factor", 1.5),
        ("attention.sliding_window", -1),
        ("attention.sliding_window", "24"),
    ],
    ids=str,
)
@by_architecture
def test_a_value_that_no_qwen_has_is_named(
    architecture: str, key: str, value: Any, twins: dict[str, Twin]
) -> None:
    key = f"{architecture}.{key}"
    assert key in refusal(altered(twins[architecture].file, **{key: value})).given


def test_the_width_of_a_head_is_the_files_and_else_its_share_of_the_model(
    twins: dict[str, Twin], tmp_path: Path
) -> None:
    absent = {"attention.key_length": DROPPED, "attention.value_length": DROPPED}
    shared = Twin(tmp_path / "shared", architecture=CLASSES["qwen3"], keys=absent)
    assert_parity(load(shared.file), ask_transformers(shared.directory, random_ids(30)))
    wide = Twin(tmp_path / "wide", architecture=CLASSES["qwen3"], keys=absent, head_dim=64)
    assert "q_norm.weight has the shape (64,)" in refusal(wide.file).given
    narrow = altered(twins["qwen2"].file, **{"qwen2.attention.key_length": 16})
    assert "q_proj.weight has the shape (96, 96)" in refusal(narrow).given


@by_architecture
def test_a_base_family_that_is_not_installed_is_named_with_its_package(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tiny_checkpoint(architecture)
    entries = [entry for entry in installed() if entry.name != "qwen3"]
    monkeypatch.setattr(registry, "_default", registry.Registry(entries, {}))
    with pytest.raises(PluginError, match=f"family '{architecture}'") as refused:
        load(checkpoint)
    assert refused.value.distribution == "fuel-plugin-qwen3"
    assert "pip install fuel-plugin-qwen3" in refused.value.remedy


def test_a_file_of_another_architecture_is_refused_by_every_family() -> None:
    for of in ("llama", *CLASSES):
        for other in {"llama", *CLASSES} - {of}:
            with pytest.raises(CheckpointError, match=f"architecture '{of}'.*{other}-gguf"):
                registry.family(f"{other}-gguf").load(tiny_checkpoint(of), device="cpu", dtype=torch.float32)
