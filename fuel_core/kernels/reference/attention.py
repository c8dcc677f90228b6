"""QK norm, rotary embedding, the write into the cache, and attention over it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fuel_core.kernels.reference.pointwise import rms_norm

QkNorm = tuple[Tensor, Tensor, float]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs ``(i, i + D/2)`` of ``x [T, H, D]`` by the angles of ``cos, sin [T, D/2]``."""
    low, high = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]  # [T, 1, D/2]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


def _rotated(
    qkv: Tensor, cos: Tensor, sin: Tensor, n_kv_heads: int, head_dim: int, qk_norm: QkNorm | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Q ``[T, Hq, D]`` and K ``[T, Hkv, D]``, normed and rotated, and V ``[T, Hkv, D]``."""
    rows = qkv.view(qkv.shape[0], -1, head_dim)  # [T, Hq + 2 Hkv, D]
    q, k, v = torch.split(rows, [rows.shape[1] - 2 * n_kv_heads, n_kv_heads, n_kv_heads], dim=1)
    if qk_norm is not None:
        q_gain, k_gain, eps = qk_norm
        q, k = rms_norm(q, q_gain, eps), rms_norm(k, k_gain, eps)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def write_kv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_slots: Sequence[Tensor],
    v_slots: Sequence[Tensor],
    qk_norm: QkNorm | None = None,
) -> Tensor:
    """Norm, rotate and write; see :func:`fuel_core.kernels.ops.write_kv`."""
    n_kv_heads, _, head_dim = k_slots[0].shape
    q, k, v = _rotated(qkv, cos, sin, n_kv_heads, head_dim, qk_norm)
    start = 0
    for k_slot, v_slot in zip(k_slots, v_slots, strict=True):
        end = start + k_slot.shape[1]
        k_slot.copy_(k[start:end].transpose(0, 1))
        v_slot.copy_(v[start:end].transpose(0, 1))
        start = end
    return q


def write_paged_kv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slots: Tensor,
    qk_norm: QkNorm | None = None,
) -> Tensor:
    """Norm, rotate and write; see :func:`fuel_core.kernels.ops.write_paged_kv`."""
    _, _, n_kv_heads, head_dim = k_pool.shape
    q, k, v = _rotated(qkv, cos, sin, n_kv_heads, head_dim, qk_norm)
    rows = (-1, n_kv_heads, head_dim)  # viewed, not flattened: a copy would swallow the write
    k_pool.view(rows).index_copy_(0, slots, k.to(k_pool.dtype))
    v_pool.view(rows).index_copy_(0, slots, v.to(v_pool.dtype))
    return q


def paged_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    counts: Tensor,
    scale: float | None = None,
) -> Tensor:
    """Gather each session's blocks, then attend; see :func:`fuel_core.kernels.ops.paged_attention`."""
    block_size = k_pool.shape[1]
    outs = []
    for rows, table, length in zip(
        torch.split(q, counts.tolist()), block_table, context_lens.tolist(), strict=True
    ):
        blocks = table[: -(-length // block_size)].long()  # what pads the table is never looked at
        k = k_pool[blocks].flatten(0, 1)[:length].transpose(0, 1)  # [Hkv, L, D]
        v = v_pool[blocks].flatten(0, 1)[:length].transpose(0, 1)
        outs.append(attention(rows, k, v, scale))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Causal attention of one session; see :func:`fuel_core.kernels.ops.attention`."""
    n_new, n_keys = q.shape[0], k.shape[1]
    mask = None
    if 1 < n_new < n_keys:
        mask = torch.ones(n_new, n_keys, dtype=torch.bool, device=q.device).tril(n_keys - n_new)
    out = scaled_dot_product_attention(
        q.transpose(0, 1)[None],  # [1, Hq, T, D]
        k[None].to(q.dtype),  # [1, Hkv, L, D]
        v[None].to(q.dtype),
        attn_mask=mask,
        is_causal=n_new == n_keys > 1,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[0],
    )
    # PyTorch's CPU kernel gives 0 where a score is NaN; a fault must stay one.
    poison = (q * 0).sum(-1, keepdim=True) + (k * 0).sum().to(q.dtype)  # [T, Hq, 1], 0 or NaN
    return (out[0].transpose(0, 1) + poison).flatten(1)  # [T, Hq D]
