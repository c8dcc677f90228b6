"""The two halves of a layer, loaded by the names that Hugging Face checkpoints share."""

from __future__ import annotations

import attrs
from torch import Tensor

from fuel_core.kernels import ops
from fuel_core.layers.config import DecoderSizes
from fuel_core.layers.linear import Linear
from fuel_core.layers.step import Step
from fuel_core.weights import Weights, take_plain


@attrs.frozen(eq=False)
class Attention:
    """Grouped-query attention: Q, K and V of one product, through the step, and out.

    Attributes:
        qkv: ``[(Hq + 2 Hkv) D, hidden]``.
        out: ``[hidden, Hq D]``.
        qk_norm: gains ``[D]`` of Q and K and their epsilon, where the family norms heads.
    """

    qkv: Linear
    out: Linear
    qk_norm: tuple[Tensor, Tensor, float] | None = None

    @classmethod
    def load(
        cls,
        weights: Weights,
        prefix: str,
        s: DecoderSizes,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: bool = False,
    ) -> Attention:
        """Take ``{prefix}.{q,k,v,o}_proj`` and, for ``qk_norm``, ``{prefix}.{q,k}_norm``.

        Raises:
            CheckpointError: a tensor is missing or of another shape.
        """
        q_out, kv_out = s.num_attention_heads * s.head_dim, s.num_key_value_heads * s.head_dim
        names = (f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj")
        norm = None
        if qk_norm:
            q_gain, k_gain = (take_plain(weights, f"{prefix}.{x}_norm.weight", (s.head_dim,)) for x in "qk")
            norm = (q_gain, k_gain, s.rms_norm_eps)
        return cls(
            Linear.load_fused(weights, names, (q_out, kv_out, kv_out), s.hidden_size, bias=qkv_bias),
            Linear.load(weights, f"{prefix}.o_proj", s.hidden_size, q_out, bias=out_bias),
            norm,
        )

    def __call__(self, i: int, x: Tensor, step: Step, residual: Tensor | None = None) -> Tensor:
        """Attend in layer ``i``: ``[T, hidden]``, added to ``residual`` where given."""
        return self.out(step.attention(i, self.qkv(x), self.qk_norm), residual)


@attrs.frozen(eq=False)
class GatedMlp:
    """``down(silu(gate x) * up x)``.

    Attributes:
        gate_up: ``[2 intermediate, hidden]``, gate first.
        down: ``[hidden, intermediate]``.
    """

    gate_up: Linear
    down: Linear

    @classmethod
    def load(cls, weights: Weights, prefix: str, s: DecoderSizes, *, bias: bool = False) -> GatedMlp:
        """Take ``{prefix}.{gate,up,down}_proj``.

        Raises:
            CheckpointError: a tensor is missing or of another shape.
        """
        names, outs = (f"{prefix}.gate_proj", f"{prefix}.up_proj"), (s.intermediate_size,) * 2
        return cls(
            Linear.load_fused(weights, names, outs, s.hidden_size, bias=bias),
            Linear.load(weights, f"{prefix}.down_proj", s.hidden_size, s.intermediate_size, bias=bias),
        )

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """``[T, hidden]``, added to ``residual`` where given."""
        return self.down(ops.silu_mul(self.gate_up(x)), residual)
