"""A loader gives every tensor in its place, and lets none be missing or left over."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from support_gguf import random_blocks

from fuel_core.contracts import BLOCK_TYPES, QuantizedTensor
from fuel_core.contracts.errors import CheckpointError
from fuel_core.weights import MemoryCheckpoint, WeightLoader

Tensor = torch.Tensor | QuantizedTensor
Q8_0 = BLOCK_TYPES["Q8_0"]
TENSORS: dict[str, Tensor] = {
    "layers.0.gain": torch.arange(4, dtype=torch.float32),
    "layers.0.weight": torch.arange(12, dtype=torch.bfloat16).view(3, 4),
    "layers.0.blocks": QuantizedTensor(random_blocks(Q8_0, 2, 64), Q8_0, 64),
}


def checkpoint(tensors: Mapping[str, Tensor] = TENSORS) -> MemoryCheckpoint:
    return MemoryCheckpoint(
        source="memory",
        format="test",
        architecture="Test",
        config={},
        tensors={name: (lambda kept=tensor: kept) for name, tensor in tensors.items()},
    )


def loader(tensors: Mapping[str, Tensor] = TENSORS, ignore: tuple[str, ...] = ()) -> WeightLoader:
    return WeightLoader(checkpoint(tensors), device="cpu", dtype=torch.float32, ignore=ignore)


def plain(tensor: Tensor | None) -> torch.Tensor:
    assert isinstance(tensor, torch.Tensor)
    return tensor


def test_a_tensor_of_the_right_kind_is_not_copied() -> None:
    gain = loader().take("layers.0.gain", (4,))
    assert plain(gain).data_ptr() == plain(TENSORS["layers.0.gain"]).data_ptr()


def test_a_matrix_is_never_widened_and_everything_else_has_the_models_dtype() -> None:
    tensors = {
        f"{dtype}".split(".")[1]: torch.ones(3, 4, dtype=dtype) for dtype in (torch.bfloat16, torch.float64)
    }
    tensors["gain"] = torch.ones(4, dtype=torch.bfloat16)
    weights = loader(tensors)
    assert plain(weights.take("bfloat16", (3, 4))).dtype == torch.bfloat16
    assert plain(weights.take("float64", (3, 4))).dtype == torch.float32
    assert plain(weights.take("gain", (4,))).dtype == torch.float32
    assert tensors["gain"].dtype == torch.bfloat16, "the stored one stays"
    narrow = WeightLoader(checkpoint({"wide": torch.ones(3, 4)}), device="cpu", dtype=torch.float16)
    assert plain(narrow.take("wide", (3, 4))).dtype == torch.float16


def test_a_tensor_goes_to_the_device() -> None:
    on_meta = WeightLoader(checkpoint(), device="meta", dtype=torch.float32)
    assert plain(on_meta.take("layers.0.gain", (4,))).device.type == "meta"
    blocks = on_meta.take("layers.0.blocks", (2, 64))
    assert isinstance(blocks, QuantizedTensor)
    assert blocks.device.type == "meta"


def test_blocks_stay_blocks() -> None:
    blocks, stored = loader().take("layers.0.blocks", (2, 64)), TENSORS["layers.0.blocks"]
    assert isinstance(blocks, QuantizedTensor)
    assert isinstance(stored, QuantizedTensor)
    assert (blocks.block_type, blocks.columns) == (Q8_0, 64)
    assert blocks.data.data_ptr() == stored.data.data_ptr()


def test_a_missing_tensor_is_named_with_its_nearest_names() -> None:
    with pytest.raises(CheckpointError, match=r"memory: no tensor layers\.0\.wieght;.*layers\.0\.weight"):
        loader().take("layers.0.wieght", (3, 4))
    with pytest.raises(CheckpointError, match="none of a similar name"):
        loader().take("zzz", (3, 4))


@pytest.mark.parametrize(
    ("name", "shape", "has"),
    [
        ("layers.0.weight", (4, 3), (3, 4)),
        ("layers.0.weight", (12,), (3, 4)),
        ("layers.0.gain", (4, 1), (4,)),
        ("layers.0.blocks", (2, 68), (2, 64)),
    ],
)
def test_another_shape_is_refused_with_both(name: str, shape: tuple[int, ...], has: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointError) as caught:
        loader().take(name, shape)
    assert f"{name} has the shape {has}; needed: the shape {shape}" in str(caught.value)


def test_integers_are_refused_as_weights() -> None:
    with pytest.raises(CheckpointError, match=r"ids has the type torch\.int64"):
        loader({"ids": torch.arange(3)}).take("ids", (3,))


def test_tensors_that_are_left_over_are_named() -> None:
    weights = loader()
    weights.take("layers.0.gain", (4,))
    with pytest.raises(CheckpointError, match=r"2 tensors left over: layers\.0\.weight, layers\.0\.blocks;"):
        weights.finish()


def test_a_tensor_of_the_wrong_shape_does_not_count_as_taken() -> None:
    weights = loader({"a": torch.zeros(2)})
    with pytest.raises(CheckpointError):
        weights.take("a", (3,))
    with pytest.raises(CheckpointError, match="1 tensors left over: a;"):
        weights.finish()


def test_of_many_tensors_left_over_five_are_named() -> None:
    with pytest.raises(CheckpointError) as caught:
        loader({f"t{i}": torch.zeros(1) for i in range(9)}).finish()
    assert "9 tensors left over: t0, t1, t2, t3, t4, ...;" in str(caught.value)
    assert caught.value.figures["names"] == tuple(f"t{i}" for i in range(9))


def test_nothing_is_left_over_once_all_is_taken_or_ignored() -> None:
    weights = loader(ignore=(r".*\.weight", r"layers\.\d+\.blocks"))
    weights.take("layers.0.gain", (4,))
    weights.finish()


def test_a_pattern_ignores_only_what_it_matches_whole() -> None:
    weights = loader({"weight": torch.zeros(1), "weight.extra": torch.zeros(1)}, ignore=("weight",))
    with pytest.raises(CheckpointError, match=r"1 tensors left over: weight\.extra;"):
        weights.finish()
