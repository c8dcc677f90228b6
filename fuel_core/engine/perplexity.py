"""How well a model predicts a text: the measure by which kernels and number formats are compared."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fuel_core.contracts import RaggedBatch
from fuel_core.contracts.errors import InvalidRequestError, counted
from fuel_core.contracts.state import ModelDims
from fuel_core.engine.loading import Loaded, check_loaded
from fuel_core.engine.served import check_positive, ragged
from fuel_core.kv import DeviceKvPool
from fuel_core.kv.geometry import KvGeometry

_BLOCK = 16


def perplexity(
    loaded: Loaded, token_ids: Sequence[int], *, windows: int = 8, kv_dtype: torch.dtype | None = None
) -> float:
    """``exp`` of the mean negative log-likelihood, in nats, of each token after those before it.

    The text is cut into ``windows`` of one length; what is left at its end is not looked at. Each begins
    anew, and all are decoded in lockstep, token by token, through the paged tier.

    Args:
        loaded: the model.
        token_ids: the text, at least ``2 * windows`` tokens.
        windows: how many are decoded together.
        kv_dtype: of the cached keys and values; ``loaded.kv_dtype`` where None.

    Raises:
        InvalidRequestError: no loaded model, less than one window, or too short a text for them.
    """
    check_loaded(loaded)
    check_positive(windows=windows)
    if len(token_ids) < 2 * windows:
        raise InvalidRequestError(
            f"{counted(len(token_ids), 'token')} for {counted(windows, 'window')}",
            needed="two tokens or more in each",
            remedy="give a longer text, or ask for fewer windows",
        )
    length = len(token_ids) // windows
    rows = torch.tensor(token_ids[: windows * length]).view(windows, length)  # [windows, length]
    model = ragged(loaded.model)
    pool = _pool(loaded, windows, length, kv_dtype or loaded.kv_dtype)
    sessions = tuple(pool.core.open() for _ in range(windows))
    total = 0.0
    for at in range(length - 1):
        tokens = tuple((int(token),) for token in rows[:, at])
        logits = model.forward_paged_ragged(RaggedBatch(pool, sessions, tokens))  # [windows, vocab]
        total -= float(logits.log_softmax(-1).gather(1, rows[:, at + 1 : at + 2]).sum())
    return math.exp(total / (windows * (length - 1)))


def _pool(loaded: Loaded, windows: int, length: int, dtype: torch.dtype) -> DeviceKvPool:
    dims = ModelDims.from_model(ragged(loaded.model))
    blocks = windows * -(-length // _BLOCK)
    geometry = KvGeometry(
        n_layers=dims.n_layers,
        n_kv_heads=dims.n_kv_heads,
        head_dim=dims.head_dim,
        num_blocks=blocks,
        block_size=_BLOCK,
        elem_size=dtype.itemsize,
    )
    return DeviceKvPool(geometry, dtype, loaded.device)
