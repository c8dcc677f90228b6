"""The native kernels predict a text as llama.cpp does from the same file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from fuel_core.engine import Loaded, load
from fuel_core.engine.perplexity import perplexity

DATA = Path(__file__).resolve().parents[1] / "data"
TEXT = DATA / "perplexity.txt"
GOLDEN: dict[str, Any] = json.loads((DATA / "perplexity.json").read_text())

pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture(scope="module")
def tokens(smollm2_path: Path) -> list[int]:
    """The text, after a look at whether the golden value is of this text and this file."""
    assert hashlib.sha256(TEXT.read_bytes()).hexdigest() == GOLDEN["text_sha256"]
    assert hashlib.sha256(smollm2_path.read_bytes()).hexdigest() == GOLDEN["model_sha256"]
    ids = load(smollm2_path, kernels="native").tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    assert len(ids) == GOLDEN["tokens"] >= 4000
    return ids


@pytest.fixture
def loaded(smollm2_path: Path) -> Loaded:
    return load(smollm2_path, kernels="native")


def test_perplexity_is_that_of_llama_cpp(loaded: Loaded, tokens: list[int]) -> None:
    assert loaded.kv_dtype is torch.float16
    ours = perplexity(loaded, tokens, windows=GOLDEN["windows"])
    assert ours == pytest.approx(GOLDEN["perplexity"], rel=5e-3)


def test_keys_and_values_in_float16_cost_less_than_a_thousandth(
    smollm2_path: Path, tokens: list[int]
) -> None:
    """On exact inputs: rounded to bytes, a last bit moves a short text by more than that."""
    exact, some = load(smollm2_path, kernels="reference"), tokens[:800]
    wide, narrow = (perplexity(exact, some, kv_dtype=dtype) for dtype in (torch.float32, torch.float16))
    assert narrow == pytest.approx(wide, rel=1e-3)
    assert narrow != wide


def test_a_fault_would_be_seen(loaded: Loaded, tokens: list[int]) -> None:
    some, model = tokens[:800], loaded.model
    right, rope = perplexity(loaded, some), model.rope  # type: ignore[attr-defined]
    model.rope = attrs.evolve(rope, inv_freq=rope.inv_freq * 1.3)  # type: ignore[attr-defined]
    assert perplexity(loaded, some) != pytest.approx(right, rel=5e-3)
    model.rope = rope  # type: ignore[attr-defined]
    model.layers[0].post_norm.mul_(1.2)  # type: ignore[attr-defined]
    assert perplexity(loaded, some) != pytest.approx(right, rel=5e-3)
