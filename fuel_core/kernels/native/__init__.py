"""The CPU kernels in C++: the functions of :mod:`fuel_core.kernels.ops`, over ``_native``.

They compute in float32. What they do not take (another activation type, a rare block format) goes to the
reference. With quantized weights, the inputs of a product are rounded to a signed byte per value, a scale for
each 32 of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fuel_core import _native
from fuel_core.contracts.checkpoint import QuantizedTensor
from fuel_core.contracts.sampling import SamplingParams
from fuel_core.kernels import reference
from fuel_core.kernels.native.recording import Arena, empty
from fuel_core.kernels.native.tiles import TiledProduct, kind_of, tiled_product
from fuel_core.kernels.reference.selection import scale as top_weight

__all__ = [
    "Arena",
    "TiledProduct",
    "arena",
    "attention",
    "draw",
    "embedding",
    "largest",
    "paged_attention",
    "product",
    "rms_norm",
    "set_threads",
    "silu_mul",
    "write_kv",
    "write_paged_kv",
]

QkNorm = tuple[Tensor, Tensor, float]
_ELEMENTS = {
    torch.float32: _native.Element.F32,
    torch.bfloat16: _native.Element.BF16,
    torch.float16: _native.Element.F16,
}

arena = Arena
product = tiled_product


def _takes(*tensors: Tensor) -> bool:
    """Whether all are float32 without gaps."""
    return all(tensor.dtype is torch.float32 and tensor.is_contiguous() for tensor in tensors)


def embedding(ids: Tensor, weight: Tensor | QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Rows ``ids [T]`` of ``weight [vocab, hidden]`` → ``[T, hidden]`` in ``dtype``."""
    kind = kind_of(weight)
    data = weight.data if isinstance(weight, QuantizedTensor) else weight
    if kind is None or not (data.is_contiguous() and ids.is_contiguous()) or ids.dtype is not torch.int64:
        return reference.embedding(ids, weight, dtype)
    rows, columns = weight.shape
    out = empty(*ids.shape, columns)
    _native.embedding(kind, data.data_ptr(), rows, columns, ids.data_ptr(), ids.numel(), out.data_ptr())
    return out.to(dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension of ``x [T, n]``."""
    if not _takes(x, weight) or weight.shape != x.shape[-1:]:
        return reference.rms_norm(x, weight, eps)
    out = empty(*x.shape)
    n = x.shape[-1]
    _native.rms_norm(x.data_ptr(), weight.data_ptr(), eps, x.numel() // n, n, out.data_ptr())
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``[T, 2 F]`` → ``[T, F]``."""
    if not _takes(gate_up) or gate_up.ndim != 2:
        return reference.silu_mul(gate_up)
    rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    out = empty(rows, n)
    _native.silu_mul(gate_up.data_ptr(), rows, n, out.data_ptr())
    return out


def set_threads(count: int) -> None:
    """These kernels' threads. PyTorch keeps one: what is left for it is small, and its idle threads spin."""
    _native.set_threads(count)
    torch.set_num_threads(1)


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
    _, _, heads, dim = k_pool.shape
    if not _heads(qkv, cos, sin, dim) or k_pool.dtype not in _ELEMENTS or not _norms(qk_norm, dim):
        return reference.write_paged_kv(qkv, cos, sin, k_pool, v_pool, slots, qk_norm)
    return _write(qkv, cos, sin, k_pool, v_pool, slots, (heads * dim, dim), (heads, dim), qk_norm)


def write_kv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_slots: Sequence[Tensor],
    v_slots: Sequence[Tensor],
    qk_norm: QkNorm | None = None,
) -> Tensor:
    """Norm, rotate and write; see :func:`fuel_core.kernels.ops.write_kv`."""
    heads, _, dim = k_slots[0].shape
    regular = all(
        k.stride() == v.stride() and k.stride(2) == 1 for k, v in zip(k_slots, v_slots, strict=True)
    )
    known = {k.dtype for k in k_slots} <= _ELEMENTS.keys()
    if not _heads(qkv, cos, sin, dim) or not regular or not known or not _norms(qk_norm, dim):
        return reference.write_kv(qkv, cos, sin, k_slots, v_slots, qk_norm)
    outs, start = [], 0
    for k, v in zip(k_slots, v_slots, strict=True):
        rows = slice(start, start := start + k.shape[1])
        strides = k.stride(1), k.stride(0)
        slots = torch.arange(k.shape[1])
        outs.append(_write(qkv[rows], cos[rows], sin[rows], k, v, slots, strides, (heads, dim), qk_norm))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _heads(qkv: Tensor, cos: Tensor, sin: Tensor, dim: int) -> bool:
    """Whether these are whole heads; what is not, the reference refuses."""
    return _takes(qkv, cos, sin) and qkv.shape[1] % dim == 0


def _norms(qk_norm: QkNorm | None, dim: int) -> bool:
    return dim <= _native.MOST_HEAD_DIM and (qk_norm is None or _takes(*qk_norm[:2]))


def _write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    strides: tuple[int, int],
    shape: tuple[int, int],
    qk_norm: QkNorm | None,
) -> Tensor:
    """Rows into ``slot * strides[0] + head * strides[1]``; ``shape`` is (KV heads, head dimension)."""
    kv_heads, dim = shape
    rows, q_heads = qkv.shape[0], qkv.shape[1] // dim - 2 * kv_heads
    q = empty(rows, q_heads, dim)
    q_gain = k_gain = 0
    eps = 0.0
    if qk_norm is not None:
        q_gain, k_gain, eps = qk_norm[0].data_ptr(), qk_norm[1].data_ptr(), qk_norm[2]
    _native.write_kv(
        _ELEMENTS[k.dtype],
        *(qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), q_gain, k_gain),
        eps,
        *(rows, q_heads, kv_heads, dim),
        *(q.data_ptr(), k.data_ptr(), v.data_ptr(), slots.data_ptr(), *strides),
    )
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
    """Attend over blocks; see :func:`fuel_core.kernels.ops.paged_attention`."""
    if not _takes(q) or k_pool.dtype not in _ELEMENTS:
        return reference.paged_attention(q, k_pool, v_pool, block_table, context_lens, counts, scale)
    _, size, kv_heads, dim = k_pool.shape
    strides = size * kv_heads * dim, kv_heads * dim, dim
    table = block_table.data_ptr(), block_table.shape[1], size
    return _attend(q, k_pool, v_pool, table, context_lens, counts, kv_heads, strides, scale)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Attend over one contiguous cache; see :func:`fuel_core.kernels.ops.attention`."""
    if not _takes(q) or k.dtype not in _ELEMENTS or k.stride() != v.stride() or k.stride(2) != 1:
        return reference.attention(q, k, v, scale)
    lengths, counts = (torch.tensor([n], dtype=torch.int32) for n in (k.shape[1], q.shape[0]))
    strides = 0, k.stride(1), k.stride(0)
    return _attend(q, k, v, (0, 0, 1), lengths, counts, k.shape[0], strides, scale)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: tuple[int, int, int],
    lengths: Tensor,
    counts: Tensor,
    kv_heads: int,
    strides: tuple[int, int, int],
    scale: float | None,
) -> Tensor:
    """``table`` is (address, width, block size), ``strides`` those of a block, a slot and a head."""
    rows, q_heads, dim = q.shape
    out = empty(rows, q_heads * dim)
    address, width, size = table
    _native.attention(
        _ELEMENTS[k.dtype],
        *(q.data_ptr(), k.data_ptr(), v.data_ptr(), address, lengths.data_ptr(), counts.data_ptr()),
        *(len(lengths), width, size, q_heads, kv_heads, dim, *strides),
        *(dim**-0.5 if scale is None else scale, out.data_ptr()),
    )
    return out


def largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each row; see :func:`fuel_core.kernels.ops.largest`."""
    if not _takes(logits):
        return reference.largest(logits)
    rows, vocab = logits.shape
    ids, values = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    _native.largest(logits.data_ptr(), rows, vocab, ids.data_ptr(), values.data_ptr())
    return ids, values


def draw(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Tensor:
    """One token of each row; see :func:`fuel_core.kernels.ops.draw`."""
    rows, vocab = logits.shape
    if logits.dtype not in (torch.float32, torch.float64) or not logits.is_contiguous():
        return reference.draw(logits, params, uniforms)
    top_k = torch.tensor([min(p.top_k, vocab) for p in params], dtype=torch.int32)
    filters = [[p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params]]
    columns = torch.tensor([*filters, list(uniforms)], dtype=torch.float64)
    out = torch.empty(rows, dtype=torch.int64)
    is_double = logits.dtype is torch.float64
    _native.draw(
        *(logits.data_ptr(), is_double, rows, vocab, top_k.data_ptr(), columns.data_ptr()),
        *(top_weight(vocab), out.data_ptr()),
    )
    return out
