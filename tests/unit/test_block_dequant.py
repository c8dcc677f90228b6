"""Blocks expand to the bits that the ``gguf`` library's dequantizers give."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType
from support_gguf import HALVES, random_blocks

from fuel_core.contracts import BLOCK_TYPES, BlockType, QuantizedTensor
from fuel_core.contracts.errors import CheckpointError, ModelContractError
from fuel_core.kernels.reference.blocks import dequantize
from fuel_core.weights.gguf import open_gguf

by_format = pytest.mark.parametrize("block", BLOCK_TYPES.values(), ids=list(BLOCK_TYPES))


def oracle(data: torch.Tensor, block: BlockType) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(data.numpy(), GGMLQuantizationType[block.name]))


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Minus zero is not zero here."""
    assert ours.dtype == theirs.dtype == torch.float32
    return torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


@by_format
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (1, 6), (3, 1), (37, 4)])
def test_random_blocks_expand_to_the_same_bits(block: BlockType, rows: int, blocks: int) -> None:
    columns = blocks * block.length
    data = random_blocks(block, rows, columns, seed=rows)
    theirs = oracle(data, block)
    assert torch.isfinite(theirs).all()
    assert same_bits(dequantize(data, block, columns), theirs)


@by_format
def test_random_blocks_have_subnormal_zero_and_negative_scales(block: BlockType) -> None:
    data = random_blocks(block, 1, 4096 * block.length).view(-1, block.bytes)
    for start in HALVES[block.name]:
        halves = data[:, start : start + 2].contiguous().view(torch.float16)
        assert torch.isfinite(halves).all()
        assert (halves < 0).any()
        assert (halves == 0).any()
        assert ((halves != 0) & (halves.abs() < 2**-14)).any()


@by_format
def test_swapped_nibbles_do_not_expand_to_the_same_bits(block: BlockType) -> None:
    data = random_blocks(block, 5, 2 * block.length)
    swapped = (data << 4) | (data >> 4)
    halves = torch.zeros(block.bytes, dtype=torch.bool)
    halves[[start + byte for start in HALVES[block.name] for byte in (0, 1)]] = True
    damaged = torch.where(halves.repeat(2), data, swapped)
    assert not same_bits(dequantize(damaged, block, 2 * block.length), oracle(data, block))


@by_format
def test_any_alignment_and_any_choice_of_rows_expand_alike(block: BlockType) -> None:
    data = random_blocks(block, 6, block.length)
    whole = dequantize(data, block, block.length)
    odd = torch.empty(block.bytes + 1, dtype=torch.uint8)[1:].copy_(data[4]).view(1, -1)
    assert same_bits(dequantize(odd, block, block.length), whole[4:5])
    assert same_bits(dequantize(data[1::2], block, block.length), whole[1::2])
    assert same_bits(dequantize(data[torch.tensor([5, 0, 0])], block, block.length), whole[[5, 0, 0]])
    assert dequantize(data[:0], block, block.length).shape == (0, block.length)


@by_format
def test_the_blocks_are_left_as_they_were(block: BlockType) -> None:
    data = random_blocks(block, 4, block.length)
    before = data.clone()
    dequantize(data, block, block.length).zero_()
    assert torch.equal(data, before)


@pytest.mark.parametrize("name", ["blk.0.attn_q.weight", "blk.29.ffn_down.weight", "token_embd.weight"])
def test_tensors_of_a_real_file_expand_to_the_same_bits(name: str, smollm2_path: Path) -> None:
    tensor = open_gguf(smollm2_path).tensor(name)
    assert isinstance(tensor, QuantizedTensor)
    rows = tensor.select_rows(slice(0, 1024))
    ours = dequantize(rows.data, rows.block_type, rows.columns)
    assert same_bits(ours, oracle(rows.data, rows.block_type))
    assert 0 < ours.std() < 1


@pytest.mark.parametrize(
    "data",
    [
        torch.zeros(2, 19, dtype=torch.uint8),
        torch.zeros(2, 40, dtype=torch.uint8),
        torch.zeros(20, dtype=torch.uint8),
        torch.zeros(2, 20, dtype=torch.int8),
    ],
    ids=["short", "long", "one dimension", "signed"],
)
def test_bytes_that_are_not_rows_of_blocks_are_refused(data: torch.Tensor) -> None:
    block = BLOCK_TYPES["Q4_1"]
    assert dequantize(torch.zeros(2, 20, dtype=torch.uint8), block, 32).shape == (2, 32)
    with pytest.raises(ModelContractError, match=r"uint8 \[rows, 20\]"):
        dequantize(data, block, 32)


def test_formats_and_widths_that_do_not_exist_are_refused() -> None:
    data = torch.zeros(1, 18, dtype=torch.uint8)
    with pytest.raises(ModelContractError, match="Q9_9"):
        dequantize(data, BlockType("Q9_9", 99, 32, 18), 32)
    with pytest.raises(CheckpointError, match="a multiple of 32"):
        dequantize(data, BLOCK_TYPES["Q4_0"], 33)
