"""Shapes that the native kernels were not made for are refused, where a kernel would read beyond a tensor."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from fuel_core.contracts.errors import ModelContractError


@pytest.mark.parametrize("shape", [(3, 31), (3, 33), (3, 16), (32,), (1, 3, 32), (0, 31)], ids=str)
def test_a_product_refuses_an_input_of_another_width(native: ModuleType, shape: tuple[int, ...]) -> None:
    made = native.product([torch.ones(5, 32)], [None])
    with pytest.raises(ModelContractError, match="32"):
        made(torch.ones(shape))
    assert torch.equal(made(torch.ones(2, 32)), torch.full((2, 5), 32.0))


@pytest.mark.parametrize("width", [1, 31, 33])
def test_a_gain_of_another_width_is_never_read_beyond_its_end(native: ModuleType, width: int) -> None:
    x, gain = torch.ones(2, 32), torch.full((width,), 2.0)
    if width == 1:
        assert torch.allclose(native.rms_norm(x, gain, 0.0), torch.full((2, 32), 2.0))
        return
    with pytest.raises(RuntimeError):
        native.rms_norm(x, gain, 0.0)


@pytest.mark.parametrize("id", [-1, 5, 2**40])
def test_an_id_outside_the_vocabulary_is_refused(native: ModuleType, id: int) -> None:
    table = torch.arange(20.0).view(5, 4)
    with pytest.raises(IndexError):
        native.embedding(torch.tensor([0, id]), table, torch.float32)
    assert torch.equal(native.embedding(torch.tensor([4]), table, torch.float32), table[4:])


def test_ids_of_another_type_are_the_same_ids(native: ModuleType) -> None:
    table = torch.arange(20.0).view(5, 4)
    assert torch.equal(
        native.embedding(torch.tensor([3, 1], dtype=torch.int32), table, torch.float32), table[[3, 1]]
    )
