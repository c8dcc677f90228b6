"""The largest logit, and the filters and the draw.

Probabilities are held as weights: whole numbers ``round(p / p_max * 2**s)``, with s so that a row's sum stays
below 2**53. Sums of such numbers are exact in float64 in any order: no result depends on the number of rows,
on how a device splits a scan, or on whether tokens were selected or sorted. A token below ``2**-(s+1)`` of
the most probable one gets no weight, so less than ``V * 2**-(s+1)`` of the mass is lost: 2**-22 of it for
49,152 tokens (s is 37), 2**-18 for 151,936 (s is 35), if all of them lie just below that bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from fuel_core.contracts.sampling import SamplingParams
from fuel_core.kernels.rows import take_rows

TOP_P_SELECTION = 512
"""How many of the largest weights top-p looks at first; then 16 times as many, until they suffice."""


@attrs.frozen(eq=False)
class RowFilters:
    """The filters of R rows.

    Attributes:
        top_k: how many each row keeps, on the host; None keeps all.
        nucleus: the rows whose top_p is below 1, on the host.
        temperature, top_p, min_p: float64 ``[R, 1]``, where the logits are.
    """

    top_k: tuple[int | None, ...]
    nucleus: tuple[int, ...]
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> RowFilters:
        """The filters of ``params``, brought to ``device`` in one transfer."""
        top_k = tuple(p.top_k if 0 < p.top_k < vocab_size else None for p in params)
        nucleus = tuple(row for row, p in enumerate(params) if p.top_p < 1)
        table = [[p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params]]
        columns = torch.tensor(table, dtype=torch.float64).to(device).unsqueeze(-1)  # [3, R, 1]
        return cls(top_k, nucleus, *columns.unbind(0))


def largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`fuel_core.kernels.ops.largest`."""
    values, ids = logits.max(-1)
    return ids, values


def draw(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Tensor:
    """See :func:`fuel_core.kernels.ops.draw`."""
    filters = RowFilters.of(params, logits.shape[1], logits.device)
    column = torch.tensor(uniforms, dtype=torch.float64).to(logits.device)[:, None]  # [R, 1]
    return draw_weighted(kept_weights(logits.double(), filters), column)


def kept_weights(logits: Tensor, filters: RowFilters, selection: int = TOP_P_SELECTION) -> Tensor:
    """Top-k, temperature, top-p and min-p: each looks at what the one before has kept, and keeps all ties.

    (Top-k comes first since temperature changes no order.)

    Args:
        logits: float64 ``[R, V]``, overwritten. A row without a finite maximum gives a row without meaning.
        filters: of the R rows.
        selection: how many of the largest top-p looks at first; changes the cost, never the result.

    Returns:
        float64 ``[R, V]``: weights, 0 for a token that is filtered out.
    """
    _apply_top_k(logits, filters.top_k)
    weights = to_weights(logits, filters.temperature)
    floor = filters.min_p * scale(weights.shape[1])  # [R, 1]
    if filters.nucleus:
        rows = list(filters.nucleus)
        nucleus = take_rows(weights, rows)
        mass = nucleus.sum(-1, keepdim=True) * take_rows(filters.top_p, rows)  # [rows, 1]
        floor[rows] = torch.maximum(floor[rows], _mass_floor(nucleus, mass, selection))
    return weights.masked_fill_(weights < floor, 0)


def scale(vocab_size: int) -> float:
    """The weight of the most probable token: the largest power of two that keeps a row's sum below 2**53."""
    return 2.0 ** (53 - vocab_size.bit_length())


def to_weights(logits: Tensor, temperature: Tensor) -> Tensor:
    """Weights of the softmax of ``logits / temperature``, written over ``logits`` (float64 ``[R, V]``).

    The maximum is taken off first, so that neither a logit of 1e30 nor a temperature of 1e-300 overflows.
    """
    logits.sub_(logits.amax(-1, keepdim=True)).div_(temperature)
    return logits.exp_().mul_(scale(logits.shape[1])).round_()


def draw_weighted(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The inverse of the cumulative distribution, in the order of the ids.

    Args:
        weights: float64 ``[R, V]`` from :func:`kept_weights`.
        uniforms: float64 ``[R, 1]`` in ``[0, 1 - 2**-53]``.

    Returns:
        int64 ``[R]``: ids whose weight is not 0. Each has a probability of its weight over the row's sum.
    """
    cumulative = weights.cumsum(-1)  # [R, V]
    # Below the total even when rounded, since u is at most 1 - 2**-53: a token is always found.
    target = uniforms * cumulative[:, -1:]  # [R, 1]
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)


def _apply_top_k(logits: Tensor, top_k: Sequence[int | None]) -> None:
    ranks = {row: k for row, k in enumerate(top_k) if k is not None}
    if not ranks:
        return
    largest = torch.topk(take_rows(logits, list(ranks)), max(ranks.values())).values  # [rows, max k]
    last = torch.tensor([[k - 1] for k in ranks.values()], device=logits.device)  # [rows, 1]
    floor = logits.new_full((len(top_k), 1), -torch.inf)
    floor[list(ranks)] = largest.gather(1, last)
    logits.masked_fill_(logits < floor, -torch.inf)


def _mass_floor(weights: Tensor, mass: Tensor, width: int) -> Tensor:
    """The weight ``[R, 1]`` at which the sum of the largest of ``[R, V]`` reaches ``mass``, ``[R, 1]``."""
    width = min(width, weights.shape[1])
    largest = torch.topk(weights, width).values  # [R, width]
    position = torch.searchsorted(largest.cumsum(-1), mass)  # [R, 1]
    floor = largest.gather(1, position.clamp(max=width - 1))
    # One bit per row to the host, the price of not sorting every row.
    missing = (position[:, 0] == width).nonzero()[:, 0].tolist() if width < weights.shape[1] else []
    if missing:
        floor[missing] = _mass_floor(take_rows(weights, missing), take_rows(mass, missing), 16 * width)
    return floor
