"""A model whose state the per-head caches cannot hold is declined, and one without an arm says so."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from support_models import CoreOnlyModel, MlaShapedModel, feed, feed_together, new_cache, tiny

from fuel_core.contracts import DecodeModel, KeyValue, ModelDims, Slots, StateSlot, collapse_uniform
from fuel_core.contracts.errors import ModelContractError, NonUniformStateError, UnsupportedTierError
from fuel_core.contracts.state import LayerStateSpec
from fuel_core.contracts.tiers import PagedDecodeModel, RaggedDecodeModel

KV = KeyValue(2, 4)
LATENT = Slots((StateSlot((512,)), StateSlot((64,), torch.float32)))


class SpecModel(CoreOnlyModel):
    def __init__(self, specs: Sequence[LayerStateSpec], layers: int) -> None:
        super().__init__()
        self._specs, self._layers = specs, layers

    def n_layers(self) -> int:
        return self._layers

    def layer_state_specs(self) -> Sequence[LayerStateSpec]:
        return self._specs


@pytest.mark.parametrize("layers", [1, 2, 7])
def test_layers_that_agree_collapse_to_their_one_shape(layers: int) -> None:
    assert collapse_uniform([KeyValue(3, 8) for _ in range(layers)]) == (3, 8)
    assert ModelDims.from_model(SpecModel([KeyValue(3, 8)] * layers, layers)) == ModelDims(layers, 3, 8)


def test_a_model_without_layers_is_declined_as_such() -> None:
    with pytest.raises(NonUniformStateError, match="no layers"):
        collapse_uniform([])


@pytest.mark.parametrize(("specs", "layer"), [([LATENT], 0), ([KV, KV, LATENT, KV], 2), ([LATENT, KV], 0)])
def test_slots_are_declined_as_not_per_head_kv_wherever_they_stand(
    specs: list[LayerStateSpec], layer: int
) -> None:
    with pytest.raises(NonUniformStateError, match="not per-head KV") as caught:
        collapse_uniform(specs)
    assert caught.value.layer == layer  # type: ignore[attr-defined]
    assert f"layer {layer} " in str(caught.value)


@pytest.mark.parametrize("other", [KeyValue(1, 4), KeyValue(2, 8), KeyValue(4, 2)])
def test_the_first_two_layers_that_differ_are_named(other: KeyValue) -> None:
    with pytest.raises(NonUniformStateError, match="layers 1 and 2 differ") as caught:
        collapse_uniform([KV, KV, other, KV, KeyValue(9, 9)])
    assert caught.value.layers == (1, 2)  # type: ignore[attr-defined]
    assert str(KV) in str(caught.value)
    assert str(other) in str(caught.value)


@pytest.mark.parametrize("layers", [1, 3])
def test_a_model_that_counts_its_layers_in_two_ways_is_refused(layers: int) -> None:
    with pytest.raises(ModelContractError, match="one entry per layer"):
        ModelDims.from_model(SpecModel([KV, KV], layers))


def test_dims_of_a_real_model_are_those_of_its_config() -> None:
    model = tiny(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=1, head_dim=12)
    assert ModelDims.from_model(model) == ModelDims(n_layers=3, n_kv_heads=1, head_dim=12)


def test_latent_state_has_no_dims() -> None:
    with pytest.raises(NonUniformStateError, match="not per-head KV"):
        ModelDims.from_model(MlaShapedModel())


def test_a_core_only_model_declines_the_batched_arm_in_word_and_deed() -> None:
    model = CoreOnlyModel()
    assert not model.supports_batched_decode()
    caches = [new_cache(model, 8) for _ in range(2)]
    with pytest.raises(UnsupportedTierError, match="core DecodeModel surface") as caught:
        feed_together(model, caches, [1, 2])
    assert "CoreOnlyModel" in str(caught.value)
    assert [cache.cached_len for cache in caches] == [0, 0]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "llama-gguf", "qwen2-gguf", "qwen3-gguf"])
def test_a_model_that_claims_the_batched_arm_delivers_it(family: str) -> None:
    model = tiny(family)
    assert model.supports_batched_decode()
    caches = [new_cache(model, 8) for _ in range(2)]
    for cache in caches:
        feed(model, cache, 1, 2)
    rows = feed_together(model, caches, [3, 4])
    assert rows.shape == (2, model.vocab_size())
    assert rows.dtype == torch.float32
    assert bool(rows.isfinite().all())
    assert [cache.cached_len for cache in caches] == [3, 3]


@pytest.mark.parametrize("tier", [DecodeModel, PagedDecodeModel, RaggedDecodeModel])
def test_a_tier_with_a_method_missing_cannot_be_instantiated(tier: type) -> None:
    missing = set(tier.__abstractmethods__)
    assert missing >= {"n_layers", "vocab_size", "max_context", "layer_state_specs"}
    with pytest.raises(TypeError, match="abstract"):
        type("Bare", (tier,), {})()


def test_specs_compare_by_value() -> None:
    assert KeyValue(2, 4) == KeyValue(2, 4) != KeyValue(4, 2)
    assert Slots((StateSlot((1,)),)) != Slots((StateSlot((1,), torch.float16),))
    assert len({KV, KeyValue(2, 4), LATENT}) == 2
