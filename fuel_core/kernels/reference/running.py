"""How the kernels run, beside what they compute."""

from __future__ import annotations

import torch


def arena() -> None:
    """Nothing is recorded: every call is made anew."""


def set_threads(count: int) -> None:
    """PyTorch's own threads."""
    torch.set_num_threads(count)
