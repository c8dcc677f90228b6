"""The operations that layers call, each passed to the kernels installed for its device.

T is the number of new tokens of all sessions in a step, Hq and Hkv the numbers of query and KV heads, D the
head dimension, L the keys that a session has. Floats are float32, bfloat16 or float16 unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fuel_core.contracts.checkpoint import QuantizedTensor
from fuel_core.contracts.errors import PluginError
from fuel_core.contracts.records import KernelBackend
from fuel_core.contracts.sampling import SamplingParams
from fuel_core.kernels import reference
from fuel_core.kernels.protocols import Arena, Product

_installed: dict[str, tuple[str, ModuleType]] = {}


def install(backend: KernelBackend, device_type: str) -> None:
    """Send the operations on a device type to the backend's kernels; ops that it lacks stay reference."""
    module = backend.load()
    if not isinstance(module, ModuleType):
        raise PluginError(
            f"the kernels {backend.name!r} loaded as {type(module).__name__}",
            needed="a module",
            remedy="return the module of the kernels from load()",
        )
    _installed[device_type] = (backend.name, module)


def installed(device: str | torch.device) -> str:
    """The name of the kernels that serve a device type."""
    return _installed.get(torch.device(device).type, ("reference", reference))[0]


def _kernel(name: str, device: torch.device) -> Any:
    _, module = _installed.get(device.type, ("reference", reference))
    return getattr(module, name, None) or getattr(reference, name)


def set_threads(device: torch.device, count: int) -> None:
    """Have ``count`` threads of the CPU work on what runs there."""
    _kernel("set_threads", device)(count)


def product(weights: Sequence[Tensor | QuantizedTensor], biases: Sequence[Tensor | None]) -> Product:
    """Maps of one input, ``[out, in]`` each with a bias ``[out]`` or None, in the form that is fastest.

    What comes back need not hold the weights: kernels may have copied them to an order of their own.
    """
    made: Product = _kernel("product", weights[0].device)(weights, biases)
    return made


def arena(device: torch.device) -> Arena | None:
    """What records the calls of a run on this device, or None where its kernels record none."""
    made: Arena | None = _kernel("arena", device)()
    return made


def embedding(ids: Tensor, weight: Tensor | QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Rows ``ids [T]`` (int64) of ``weight [vocab, hidden]`` → ``[T, hidden]`` in ``dtype``."""
    out: Tensor = _kernel("embedding", ids.device)(ids, weight, dtype)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x²) + eps) * weight`` over the last dimension (arXiv:1910.07467)."""
    out: Tensor = _kernel("rms_norm", x.device)(x, weight, eps)
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``[T, 2 F]``, gate first → ``[T, F]`` (SwiGLU, arXiv:2002.05202)."""
    out: Tensor = _kernel("silu_mul", gate_up.device)(gate_up)
    return out


def write_kv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_slots: Sequence[Tensor],
    v_slots: Sequence[Tensor],
    qk_norm: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """Norm Q and K per head, rotate both, and write K and V into the sessions' cache slots.

    Args:
        qkv: ``[T, (Hq + 2 Hkv) D]``, Q then K then V; rows of one session stand together.
        cos, sin: float32 ``[T, D/2]``, of pairs ``(i, i + D/2)`` (arXiv:2104.09864).
        k_slots, v_slots: per session the slots ``[Hkv, T_session, D]`` that its rows go to.
        qk_norm: gains ``[D]`` of Q and of K and the epsilon, where the model norms them.

    Returns:
        The rotated Q, ``[T, Hq, D]``.
    """
    q: Tensor = _kernel("write_kv", qkv.device)(qkv, cos, sin, k_slots, v_slots, qk_norm)
    return q


def write_paged_kv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slots: Tensor,
    qk_norm: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """:func:`write_kv` into the blocks of a pool.

    Args:
        qkv, cos, sin, qk_norm: as there.
        k_pool, v_pool: ``[num_blocks, block_size, Hkv, D]``, contiguous.
        slots: int64 ``[T]``, ``block * block_size + slot`` of each row; all different.

    Returns:
        The rotated Q, ``[T, Hq, D]``.
    """
    q: Tensor = _kernel("write_paged_kv", qkv.device)(qkv, cos, sin, k_pool, v_pool, slots, qk_norm)
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
    """Causal attention of many sessions' new tokens over their blocks.

    Args:
        q: ``[T, Hq, D]``; rows of one session stand together and are the last of its positions.
        k_pool, v_pool: ``[num_blocks, block_size, Hkv, D]``.
        block_table: int32 ``[B, W]``, each session's blocks in order; entries past its length are not read.
        context_lens: int32 ``[B]``, the keys that each session has.
        counts: int32 ``[B]`` on the CPU, how many rows of ``q`` each session has; their sum is T.
        scale: of the scores; ``1/sqrt(D)`` where None.

    Returns:
        ``[T, Hq D]``. A session's rows depend on its own keys and on nothing else in the call.
    """
    args = (q, k_pool, v_pool, block_table, context_lens, counts, scale)
    out: Tensor = _kernel("paged_attention", q.device)(*args)
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs ``(i, i + D/2)`` of ``x [T, H, D]`` by the angles of float32 ``cos, sin [T, D/2]``."""
    out: Tensor = _kernel("rotate", x.device)(x, cos, sin)
    return out


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one session's new tokens over all that it has.

    Args:
        q: ``[T, Hq, D]``, the last T of the L positions.
        k, v: ``[Hkv, L, D]``; query head h reads KV head ``h // (Hq / Hkv)``.

    Returns:
        ``[T, Hq D]``, scores scaled by ``1/sqrt(D)``.
    """
    out: Tensor = _kernel("attention", q.device)(q, k, v)
    return out


def largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The first of the largest of each row of ``[R, V]``, a NaN above all: ids int64 ``[R]``, and values."""
    ids, values = _kernel("largest", logits.device)(logits)
    return ids, values


def draw(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Tensor:
    """One token of each row by its temperature, top-k, top-p and min-p, in this order, ties kept.

    Args:
        logits: float32 or float64 ``[R, V]``, not changed. A row whose largest is not finite gives an id
            without meaning.
        params: of each row; the temperature is above 0.
        uniforms: of each row, in ``[0, 1 - 2**-53]``: where in the order of ids the token is taken.

    Returns:
        int64 ``[R]``; a row's id does not depend on the rows beside it.
    """
    out: Tensor = _kernel("draw", logits.device)(logits, params, uniforms)
    return out
