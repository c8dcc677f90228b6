"""The next token of every session of a batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from fuel_core.contracts.errors import FuelError, ModelContractError, SamplingError
from fuel_core.kernels import ops
from fuel_core.kernels.rows import take_rows
from fuel_core.sampling.state import SamplerState

Outcome: TypeAlias = int | FuelError

_NO_MAXIMUM = -1  # in place of a token id


@torch.inference_mode()
def sample(logits: Tensor, states: Sequence[SamplerState]) -> list[Outcome]:
    """Choose and record one token for each session.

    In this order: ``logit_bias`` is added; the repetition penalty (over prompt and output) divides positive
    and multiplies negative logits; the frequency and presence penalties (over the output) are subtracted; EOS
    is masked until ``min_new_tokens`` are generated. Temperature 0 takes the largest logit, of a tie the
    lowest id. Any other divides the logits; top-k, top-p and min-p filter them, ties kept; and one number of
    the session's stream draws from what is left. A row's outcome is the same, to the bit, in any company.

    Args:
        logits: float32 ``[B, V]``, any device; not changed. An entry of -inf is a banned token.
        states: one per row.

    Returns:
        One outcome per row: the id, recorded in its state; or a SamplingError, not raised and nothing
        recorded, for a row that holds NaN or +inf or has nothing finite left.

    Raises:
        ModelContractError: shape or dtype of ``logits`` do not fit the states. Nothing is recorded.
    """
    _check_logits(logits, states)
    tokens, peaks = ops.largest(logits)  # [B] each
    drawn = [row for row, state in enumerate(states) if not state.greedy and not state.adjusts]
    adjusted = [row for row, state in enumerate(states) if state.adjusts]
    if drawn:
        tokens[drawn] = _draw(take_rows(logits, drawn), [states[row] for row in drawn])
    if adjusted:
        tokens[adjusted] = _choose(take_rows(logits, adjusted).double(), [states[row] for row in adjusted])
    rows = zip(tokens.tolist(), peaks.tolist(), states, strict=True)
    return [_outcome(row, *each) for row, each in enumerate(rows)]


def _choose(logits: Tensor, states: Sequence[SamplerState]) -> Tensor:
    """Ids int64 ``[R]`` for float64 logits ``[R, V]``, which are overwritten."""
    _add_offsets(logits, states)
    _penalise(logits, states)
    tokens, peaks = ops.largest(logits)  # [R] each
    drawn = [row for row, state in enumerate(states) if not state.greedy]
    if drawn:
        tokens[drawn] = _draw(take_rows(logits, drawn), [states[row] for row in drawn])
    return tokens.masked_fill_(~peaks.isfinite(), _NO_MAXIMUM)


def _draw(logits: Tensor, states: Sequence[SamplerState]) -> Tensor:
    return ops.draw(logits, [state.params for state in states], [state.uniform() for state in states])


def _add_offsets(logits: Tensor, states: Sequence[SamplerState]) -> None:
    offsets = {row: state.offsets for row, state in enumerate(states) if state.offsets is not None}
    if offsets:
        where, values, _ = _entries(offsets, logits.device)
        logits[where] += values


def _penalise(logits: Tensor, states: Sequence[SamplerState]) -> None:
    """The penalties of CTRL (arXiv:1909.05858) and of OpenAI's API, in float64 as the logits are."""
    seen = {row: state.history.entries() for row, state in enumerate(states) if state.history is not None}
    if not seen:
        return
    where, counts, entry = _entries(seen, logits.device)
    repetition, presence, frequency = _penalties([states[row] for row in seen], entry)  # [N] each
    part = logits[where]  # [N]
    repeated = torch.where(part < 0, part * repetition, part / repetition)
    logits[where] = repeated - frequency * counts - presence * (counts > 0)


def _entries(
    sparse: Mapping[int, tuple[Tensor, Tensor]], device: torch.device
) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """All of ``row -> (ids [n], values [n])`` end to end, ``[N]``: (rows, ids), values, the row's place."""
    ids, values = (torch.cat(parts).to(device) for parts in zip(*sparse.values(), strict=True))
    sizes = torch.tensor([part.numel() for part, _ in sparse.values()])
    entry = torch.repeat_interleave(sizes).to(device)
    rows = torch.tensor(list(sparse), device=device)[entry]
    return (rows, ids), values, entry


def _penalties(states: Sequence[SamplerState], entry: Tensor) -> list[Tensor]:
    params = [state.params for state in states]
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    table = torch.tensor([[getattr(p, name) for p in params] for name in names], dtype=torch.float64)
    return [column[entry] for column in table.to(entry.device)]


def _outcome(row: int, token: int, largest: float, state: SamplerState) -> Outcome:
    """The token, recorded; or what is wrong with the row, whose largest raw logit is given."""
    if math.isfinite(largest) and token != _NO_MAXIMUM:
        state.record(token)
        return token
    lacking = "no finite maximum after logit_bias, penalties and min_new_tokens"
    fault = "NaN" if math.isnan(largest) else "+inf" if largest == math.inf else lacking
    return SamplingError(
        f"logits of row {row} hold {fault}",
        needed="a largest logit that is finite, -inf only for banned tokens",
        remedy="lift a ban, or check the model's weights and dtype",
        row=row,
        generated=state.generated,
        vocab_size=state.vocab_size,
    )


def _check_logits(logits: Tensor, states: Sequence[SamplerState]) -> None:
    sizes = {state.vocab_size for state in states}
    shape = tuple(logits.shape)
    fits = logits.dim() == 2 and shape[0] == len(states) and sizes <= {shape[1]}
    if fits and logits.dtype == torch.float32:
        return
    raise ModelContractError(
        f"logits {shape} of {logits.dtype} for {len(states)} sessions of vocabulary {sorted(sizes)}",
        needed="float32 [sessions, vocabulary]",
        remedy="give sample() one row per session, of one model",
        shape=shape,
        sessions=len(states),
    )
