"""Rows of a matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def take_rows(matrix: Tensor, rows: Sequence[int]) -> Tensor:
    """``matrix[rows]``, ``rows`` ascending; no copy where they are all of them."""
    if len(rows) == matrix.shape[0]:
        return matrix
    return matrix.index_select(0, torch.tensor(rows, dtype=torch.int64, device=matrix.device))
