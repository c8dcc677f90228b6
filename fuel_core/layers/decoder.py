"""The decoder described once: a family writes its layer, this gives it the tiers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fuel_core.contracts.checkpoint import QuantizedTensor
from fuel_core.contracts.markers import hookimpl
from fuel_core.contracts.requests import check_tokens
from fuel_core.contracts.session import DecodeSession
from fuel_core.contracts.state import KeyValue, LayerStateSpec, ModelDims
from fuel_core.contracts.tiers import DecodeModel
from fuel_core.kernels import ops
from fuel_core.kv.cache import KvCache
from fuel_core.layers.checks import check_cache, check_lockstep, check_room
from fuel_core.layers.config import DecoderSizes
from fuel_core.layers.rope import Rope, rope_from_config
from fuel_core.layers.step import ContiguousStep, Step
from fuel_core.weights import Weights, take_plain


@attrs.frozen(eq=False, kw_only=True)
class DecoderParts:
    """What surrounds the layers of a decoder.

    Attributes:
        dims: layers, KV heads, head dimension.
        rope: the rotation, with its context limit.
        embedding: ``[vocab, hidden]``.
        final_norm: gain ``[hidden]``.
        head: ``[vocab, hidden]``; the embedding itself where the model ties them.
        norm_eps: epsilon of every RMS norm.
        max_context: the most tokens of one session.
        dtype: of the activations.
    """

    dims: ModelDims
    rope: Rope
    embedding: Tensor | QuantizedTensor
    final_norm: Tensor
    head: Tensor | QuantizedTensor
    norm_eps: float
    max_context: int
    dtype: torch.dtype

    @classmethod
    def load(
        cls,
        weights: Weights,
        config: Mapping[str, Any],
        sizes: DecoderSizes,
        dtype: torch.dtype,
        *,
        window: int | None = None,
    ) -> DecoderParts:
        """Take embedding, final norm and head by the names that Hugging Face checkpoints share.

        ``window`` is a sliding window of the attention. Within it, it is full attention, which is all that a
        decoder does here, so it limits the context.

        Raises:
            CheckpointError: a tensor is missing or of another shape, or the RoPE scaling is not supported.
        """
        rope = rope_from_config(config, sizes.head_dim)
        matrix = (sizes.vocab_size, sizes.hidden_size)
        embedding = weights.take("model.embed_tokens.weight", matrix)
        return cls(
            dims=ModelDims(sizes.num_hidden_layers, sizes.num_key_value_heads, sizes.head_dim),
            rope=rope,
            embedding=embedding,
            final_norm=take_plain(weights, "model.norm.weight", (sizes.hidden_size,)),
            head=embedding if sizes.tie_word_embeddings else weights.take("lm_head.weight", matrix),
            norm_eps=sizes.rms_norm_eps,
            max_context=min(rope.max_context, window or rope.max_context),
            dtype=dtype,
        )


class Decoder(DecodeModel):
    """A pre-norm decoder with rotary attention. A family overrides :meth:`layer` and nothing else."""

    def __init__(self, parts: DecoderParts) -> None:
        self.parts = parts
        self.eps = parts.norm_eps
        self.device = parts.final_norm.device
        self._rope = parts.rope.to(self.device)

    @abstractmethod
    def layer(self, i: int, x: Tensor, step: Step) -> Tensor:
        """Run layer ``i`` on ``x [T, hidden]``, attending through ``step``."""

    @hookimpl
    def n_layers(self) -> int:
        """The number of layers."""
        return self.parts.dims.n_layers

    @hookimpl
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.parts.embedding.shape[0]

    @hookimpl
    def max_context(self) -> int | None:
        """The shorter of the config's limit and the RoPE scaling's."""
        return self.parts.max_context

    @hookimpl
    def layer_state_specs(self) -> Sequence[LayerStateSpec]:
        """Per-head keys and values, the same in every layer."""
        dims = self.parts.dims
        return (KeyValue(dims.n_kv_heads, dims.head_dim),) * dims.n_layers

    @hookimpl
    def forward_with_kv_context_persistent(
        self, tokens: Sequence[int], cache: KvCache, session: DecodeSession
    ) -> Tensor:
        """See :meth:`DecodeModel.forward_with_kv_context_persistent`."""
        check_tokens(tokens, self.vocab_size())
        check_cache(cache, self.parts.dims, self.device)
        check_room(cache, len(tokens), self.parts.max_context)
        return self._run(tokens, [cache], [len(tokens)])[0]

    @hookimpl
    def supports_batched_decode(self) -> bool:
        """Always."""
        return True

    @hookimpl
    def build_batched_decode_logits(
        self,
        caches: Sequence[KvCache],
        last_tokens: Sequence[int],
        device: str | torch.device,
        dtype: torch.dtype,
    ) -> Tensor:
        """See :meth:`DecodeModel.build_batched_decode_logits`."""
        check_lockstep(caches, last_tokens, torch.device(device), dtype)
        check_tokens(last_tokens, self.vocab_size())
        for cache in caches:
            check_cache(cache, self.parts.dims, self.device)
            check_room(cache, 1, self.parts.max_context)
        return self._run(last_tokens, caches, [1] * len(caches))

    @torch.inference_mode()
    def _run(self, tokens: Sequence[int], caches: Sequence[KvCache], counts: Sequence[int]) -> Tensor:
        """Run the layers; float32 logits ``[len(caches), vocab]`` of each cache's last token."""
        step = ContiguousStep(self._rope, caches, counts, self.device)
        ids = torch.tensor(tokens, dtype=torch.int64, device=self.device)  # [T]
        x = ops.embedding(ids, self.parts.embedding, self.parts.dtype)  # [T, hidden]
        for i in range(self.parts.dims.n_layers):
            x = self.layer(i, x, step)
        last = torch.tensor(counts, device=self.device).cumsum(0) - 1  # [B]
        logits = self._head(x[last])
        step.commit()
        return logits

    def _head(self, x: Tensor) -> Tensor:
        x = ops.rms_norm(x, self.parts.final_norm, self.eps)  # [B, hidden]
        return ops.linear(x, self.parts.head).float()  # [B, vocab]
