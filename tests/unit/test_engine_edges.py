"""Small promises at the edges: what fails late shows nothing, and what does not fit yet waits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from support_checkpoints import write_directory

import fuel_core as fuel
from fuel_core import registry
from fuel_core.contracts import Capabilities, DecodeSession, ModelDims
from fuel_core.contracts.errors import CapacityError
from fuel_core.engine import Loaded
from fuel_core.engine.loading import _dtype
from fuel_core.kv import KvCache
from fuel_core.schedule import SessionScheduler
from fuel_core.text import Tokenizer


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return fuel.load(write_directory(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.mark.parametrize("batch", [1, 3])
def test_a_head_that_fails_after_the_layers_leaves_every_cache_as_long_as_it_was(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = registry.family("llama").tiny(0)
    dims = ModelDims.from_model(model)
    caches = [KvCache(dims.n_layers, dims.n_kv_heads, dims.head_dim, 8) for _ in range(batch)]
    for cache in caches:
        model.forward_with_kv_context_persistent([1, 2], cache, DecodeSession())

    def head(x: Any) -> Any:
        raise RuntimeError("no head")

    monkeypatch.setattr(model, "_head", head)
    step = (
        partial(model.forward_with_kv_context_persistent, [3], caches[0], DecodeSession())
        if batch == 1
        else partial(model.build_batched_decode_logits, caches, [3] * batch, "cpu", torch.float32)
    )
    with pytest.raises(RuntimeError, match="no head"):
        step()
    assert [cache.cached_len for cache in caches] == [2] * batch


def test_a_prompt_that_memory_cannot_hold_beside_others_waits_for_them(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> list[list[int]]:
        completions = fuel.generate(loaded, ["one", "two"], max_new_tokens=4, scheduler="contiguous")
        return [completion.token_ids for completion in completions]

    alone = run()
    real, refused = SessionScheduler.add_session, []

    def add_session(self: SessionScheduler, prompt: Sequence[int], *args: Any, **options: Any) -> Any:
        if not self.is_all_finished and not refused:
            refused.append(1)
            raise CapacityError("no memory", needed="some", remedy="wait")
        return real(self, prompt, *args, **options)

    monkeypatch.setattr(SessionScheduler, "add_session", add_session)
    assert run() == alone
    assert refused


def test_generated_text_continues_its_prompt(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    real = Tokenizer.detokenizer

    def detokenizer(self: Tokenizer, *, continues: bool = False) -> Any:
        asked.append(continues)
        return real(self, continues=continues)

    monkeypatch.setattr(Tokenizer, "detokenizer", detokenizer)
    fuel.generate(loaded, "x", max_new_tokens=1)
    assert asked == [True]


@pytest.mark.parametrize(
    ("dtypes", "device", "chosen"),
    [
        (("float32", "bfloat16", "float16"), "cpu", torch.float32),
        (("float32", "bfloat16", "float16"), "cuda", torch.bfloat16),
        (("float32", "float16"), "cuda", torch.float16),
        (("float32",), "cuda", torch.float32),
    ],
)
def test_auto_is_float32_on_a_cpu_and_the_better_16_bit_type_elsewhere(
    dtypes: tuple[str, ...], device: str, chosen: torch.dtype
) -> None:
    family = registry.family("llama")
    family = attrs.evolve(family, capabilities=Capabilities(tiers=family.capabilities.tiers, dtypes=dtypes))
    assert _dtype("auto", torch.device(device), family) is chosen


def test_more_than_the_kv_memory_holds_is_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from fuel_core.cli import main

    path = write_directory(tmp_path / "m")
    with pytest.raises(SystemExit) as ended:
        main(["generate", str(path), "x" * 90, "--max-new-tokens", "4", "--kv-memory", "40KB"])
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
