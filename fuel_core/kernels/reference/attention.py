"""QK norm, rotary embedding, the write into the cache, and attention over it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fuel_core.kernels.reference.pointwise import rms_norm


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs ``(i, i + D/2)`` of ``x [T, H, D]`` by the angles of ``cos, sin [T, D/2]``."""
    low, high = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]  # [T, 1, D/2]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


def write_kv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_slots: Sequence[Tensor],
    v_slots: Sequence[Tensor],
    qk_norm: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """Norm, rotate and write; see :func:`fuel_core.kernels.ops.write_kv`."""
    n_kv_heads, _, head_dim = k_slots[0].shape
    rows = qkv.view(qkv.shape[0], -1, head_dim)  # [T, Hq + 2 Hkv, D]
    q, k, v = torch.split(rows, [rows.shape[1] - 2 * n_kv_heads, n_kv_heads, n_kv_heads], dim=1)
    if qk_norm is not None:
        q_gain, k_gain, eps = qk_norm
        q, k = rms_norm(q, q_gain, eps), rms_norm(k, k_gain, eps)
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    start = 0
    for k_slot, v_slot in zip(k_slots, v_slots, strict=True):
        end = start + k_slot.shape[1]
        k_slot.copy_(k[start:end].transpose(0, 1))
        v_slot.copy_(v[start:end].transpose(0, 1))
        start = end
    return q


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
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
        enable_gqa=q.shape[1] != k.shape[0],
    )
    return out[0].transpose(0, 1).flatten(1)  # [T, Hq D]
