"""Both schedulers keep keys and values in the loaded model's ``kv_dtype``, and say the same."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import attrs
import pytest
import torch
from support_checkpoints import write_directory
from support_models import distance
from torch import Tensor

import fuel_core as fuel
from fuel_core import registry
from fuel_core.contracts import Capabilities, ModelFamily
from fuel_core.engine import Loaded
from fuel_core.schedule import table

PROMPTS = ["one", "another prompt", "x"]
NARROW = [torch.float16, torch.bfloat16]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return fuel.load(write_directory(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Every logits ``[vocab]`` that a scheduler or an engine samples from."""
    seen: list[Tensor] = []
    sample = table.sample
    monkeypatch.setattr(
        table, "sample", lambda logits, states: [seen.extend(logits.clone()), sample(logits, states)][1]
    )
    return seen


def said(
    loaded: Loaded, rows: list[Tensor], prompt: str, scheduler: str, kv_dtype: torch.dtype
) -> tuple[list[int], Tensor]:
    """A greedy prompt's ids, and its logits ``[steps, vocab]``."""
    rows.clear()
    narrow = attrs.evolve(loaded, kv_dtype=kv_dtype)
    [completion] = fuel.generate(narrow, prompt, max_new_tokens=12, scheduler=scheduler)
    return completion.token_ids, torch.stack(rows)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("kv_dtype", NARROW)
def test_either_scheduler_says_the_same_in_the_kv_dtype_of_the_model(
    loaded: Loaded, rows: list[Tensor], kv_dtype: torch.dtype, prompt: str
) -> None:
    paged_ids, paged = said(loaded, rows, prompt, "paged", kv_dtype)
    contiguous_ids, contiguous = said(loaded, rows, prompt, "contiguous", kv_dtype)
    assert contiguous_ids == paged_ids
    assert distance(contiguous, paged) < 1e-5


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("kv_dtype", NARROW)
def test_a_scheduler_that_kept_another_dtype_would_be_seen(
    loaded: Loaded, rows: list[Tensor], kv_dtype: torch.dtype, prompt: str
) -> None:
    for scheduler in ("paged", "contiguous"):
        _, wide = said(loaded, rows, prompt, scheduler, torch.float32)
        _, narrow = said(loaded, rows, prompt, scheduler, kv_dtype)
        steps = min(len(wide), len(narrow))
        assert distance(wide[:steps], narrow[:steps]) > 1e-4


def test_many_prompts_in_lockstep_are_in_the_kv_dtype_too(loaded: Loaded) -> None:
    narrow = attrs.evolve(loaded, kv_dtype=torch.float16)
    paged, contiguous = (
        fuel.generate(narrow, ["same length", "same lengtg", "xame lengtg"], scheduler=scheduler)
        for scheduler in ("paged", "contiguous")
    )
    assert [c.token_ids for c in contiguous] == [c.token_ids for c in paged]
    assert all(c.error is None for c in contiguous)


@pytest.mark.parametrize(
    ("tiers", "expected"),
    [(("decode", "batched", "paged", "ragged"), torch.float16), (("decode",), torch.float32)],
)
def test_auto_is_float16_where_the_native_kernels_attend(
    native: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tiers: tuple[str, ...],
    expected: torch.dtype,
) -> None:
    whole = registry.family("llama")
    capabilities: Capabilities = attrs.evolve(whole.capabilities, tiers=tiers)
    family: ModelFamily = attrs.evolve(whole, capabilities=capabilities)
    monkeypatch.setattr(registry, "family_for", lambda checkpoint: family)
    monkeypatch.setattr(
        registry,
        "load_model",
        lambda family, source, device, dtype: whole.load(source, device=device, dtype=dtype),
    )
    path = write_directory(tmp_path / "tiny")
    assert fuel.load(path, kernels="native").kv_dtype is expected
    assert fuel.load(path, kernels="native", kv_dtype="float16").kv_dtype is torch.float16
    assert fuel.load(path, kernels="reference").kv_dtype is torch.float32
