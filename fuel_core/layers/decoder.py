"""The decoder described once: a family writes its layer, this gives it the tiers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from fuel_core.contracts.checkpoint import QuantizedTensor
from fuel_core.contracts.markers import hookimpl
from fuel_core.contracts.requests import check_tokens
from fuel_core.contracts.session import DecodeSession, PagedDecodePlan
from fuel_core.contracts.state import KeyValue, LayerStateSpec, ModelDims
from fuel_core.contracts.tiers import RaggedBatch, RaggedDecodeModel
from fuel_core.kernels import ops
from fuel_core.kv.cache import KvCache
from fuel_core.kv.device_pool import DeviceKvPool
from fuel_core.kv.pool import SessionHandle
from fuel_core.layers.checks import check_cache, check_lockstep, check_room
from fuel_core.layers.config import DecoderSizes
from fuel_core.layers.paged import (
    HeldStep,
    PagedStep,
    appended,
    check_batch,
    check_one_position,
    check_pool,
    step_for,
)
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


class Decoder(RaggedDecodeModel):
    """A pre-norm decoder with rotary attention. A family overrides :meth:`layer` and has every tier.

    Attributes:
        parts: what surrounds the layers.
        rope: the rotation, on the model's device.
        eps: epsilon of every RMS norm.
        device: where the weights are.
    """

    def __init__(self, parts: DecoderParts) -> None:
        self.parts = parts
        self.eps = parts.norm_eps
        self.device = parts.final_norm.device
        self.rope = parts.rope.to(self.device)
        self._head = ops.product([parts.head], [None])
        self._arena = ops.arena(self.device)

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
        return self._run_contiguous(tokens, [cache], [len(tokens)])[0]

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
        return self._run_contiguous(last_tokens, caches, [1] * len(caches))

    @hookimpl
    def forward_paged_step(self, token: int, pool: DeviceKvPool, session: SessionHandle) -> Tensor:
        """See :meth:`PagedDecodeModel.forward_paged_step`."""
        return self._run_paged(pool, [session], [[token]])[0]

    @hookimpl
    def forward_paged_step_batched(
        self, tokens: Sequence[int], pool: DeviceKvPool, sessions: Sequence[SessionHandle]
    ) -> Tensor:
        """See :meth:`PagedDecodeModel.forward_paged_step_batched`."""
        check_one_position(pool, sessions)
        return self._run_paged(pool, sessions, [[token] for token in tokens])

    @hookimpl
    def forward_paged_step_persistent(
        self,
        token: int,
        pool: DeviceKvPool,
        session: SessionHandle,
        max_blocks_cap: int,
        plan: PagedDecodePlan,
        decode_session: DecodeSession,
    ) -> Tensor:
        """See :meth:`PagedDecodeModel.forward_paged_step_persistent`."""
        if plan is PagedDecodePlan.REPLAN:
            decode_session.plan, decode_session.rebinds = None, 0
            return self.forward_paged_step(token, pool, session)
        return self._run_paged(pool, [session], [[token]], HeldStep(self, decode_session, max_blocks_cap))[0]

    @hookimpl
    def forward_paged_ragged(self, batch: RaggedBatch) -> Tensor:
        """See :meth:`RaggedDecodeModel.forward_paged_ragged`."""
        return self._run_paged(batch.pool, batch.sessions, batch.tokens)

    def _run_contiguous(
        self, tokens: Sequence[int], caches: Sequence[KvCache], counts: Sequence[int]
    ) -> Tensor:
        step = ContiguousStep(self.rope, caches, counts, self.device)
        ids = torch.tensor(tokens, dtype=torch.int64, device=self.device)  # [T]
        logits = self._run(ids, step, counts)
        step.commit()
        return logits

    def _run_paged(
        self,
        pool: DeviceKvPool,
        sessions: Sequence[SessionHandle],
        tokens: Sequence[Sequence[int]],
        held: HeldStep | None = None,
    ) -> Tensor:
        """Append the tokens and run them; the pool is as it was where that fails."""
        check_pool(pool, self.parts.dims, self.device)
        check_batch(pool, sessions, tokens, vocab_size=self.vocab_size(), max_context=self.parts.max_context)
        counts = [len(new) for new in tokens]
        with appended(pool, sessions, counts):
            step = held.of(pool, sessions[0]) if held else step_for(self, pool, sessions, counts)
            step.bind([token for new in tokens for token in new], sessions)
            return self._run_kept(step, counts) if step.is_kept else self._run(step.token_ids, step, counts)

    @torch.inference_mode()
    def _run(self, ids: Tensor, step: Step, counts: Sequence[int]) -> Tensor:
        """Float32 logits ``[B, vocab]`` of each session's last token of ``ids [T]``."""
        return self._head(self._last_hidden(ids, step, counts)).float()

    @torch.inference_mode()
    def _run_kept(self, step: PagedStep, counts: Sequence[int]) -> Tensor:
        """The same, by a recording of an earlier run where the kernels make one."""
        if self._arena is None:
            return self._run(step.token_ids, step, counts)
        with self._arena.lock:
            if step.recording is not None:
                return self._head(step.recording.run()).float()
            compute = partial(self._last_hidden, step.token_ids, step, counts)
            x, step.recording = self._arena.record(compute)
            step.is_kept = step.recording is not None
            return self._head(x).float()

    def _last_hidden(self, ids: Tensor, step: Step, counts: Sequence[int]) -> Tensor:
        """Run the layers on ``ids [T]``; the normed ``[B, hidden]`` of each session's last token."""
        x = ops.embedding(ids, self.parts.embedding, self.parts.dtype)  # [T, hidden]
        for i in range(self.parts.dims.n_layers):
            x = self.layer(i, x, step)
        if len(counts) != len(ids):
            x = x[torch.tensor(counts, device=self.device).cumsum(0) - 1]
        return ops.rms_norm(x, self.parts.final_norm, self.eps)
