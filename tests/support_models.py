"""Models for scheduler tests: stubs whose every token is known, and wrappers around real ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import attrs
import torch
from torch import Tensor

from fuel_core import registry
from fuel_core.contracts import DecodeModel, DecodeSession, KeyValue, ModelDims, Slots, StateSlot, hookimpl
from fuel_core.contracts.state import LayerStateSpec
from fuel_core.kv import KvBudget, KvCache
from fuel_core.layers import Decoder, Step
from fuel_core.schedule import Batched, RoundRobin, SessionId, SessionScheduler

Fault = Callable[[Tensor], Tensor]
"""What happens to the right logits ``[vocab]`` of one session: others come back, or it raises."""


def tiny(family: str = "llama", seed: int = 0, **overrides: Any) -> Decoder:
    """A small real model. Its vocabulary is small enough that a wrong token id is soon out of range."""
    model = registry.family(family).tiny(seed, **overrides)
    assert isinstance(model, Decoder)
    return model


def new_cache(model: DecodeModel, size: int, dtype: torch.dtype = torch.float32) -> KvCache:
    """A cache of the model's geometry for ``size`` tokens."""
    dims = ModelDims.from_model(model)
    return KvCache(dims.n_layers, dims.n_kv_heads, dims.head_dim, size, dtype=dtype)


def feed(model: DecodeModel, cache: KvCache, *tokens: int) -> Tensor:
    """Logits ``[vocab]`` of the last of ``tokens``."""
    return model.forward_with_kv_context_persistent(tokens, cache, DecodeSession())


def feed_together(model: DecodeModel, caches: Sequence[KvCache], tokens: Sequence[int]) -> Tensor:
    """Logits ``[K, vocab]`` of a batched step on the CPU in float32."""
    return model.build_batched_decode_logits(caches, tokens, "cpu", torch.float32)


def lone_run(model: DecodeModel, prompt: Sequence[int], max_new: int) -> tuple[list[int], Tensor]:
    """What a greedy session should do, without a scheduler: new tokens, and logits ``[max_new, vocab]``."""
    cache = new_cache(model, len(prompt) + max_new)
    rows = [feed(model, cache, *prompt)]
    tokens = [int(rows[0].argmax())]
    while len(tokens) < max_new:
        rows.append(feed(model, cache, tokens[-1]))
        tokens.append(int(rows[-1].argmax()))
    return tokens, torch.stack(rows)


def scheduler_of(
    model: DecodeModel,
    policy: RoundRobin | Batched = RoundRobin(),  # noqa: B008 (frozen)
    *,
    block_size: int = 16,
    num_blocks: int = 4096,
) -> SessionScheduler:
    """A scheduler on the CPU in float32, with memory for any test that does not look at memory."""
    return SessionScheduler(model, KvBudget(block_size, num_blocks), policy=policy)


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference; shapes must be equal, and a NaN counts as infinitely far."""
    assert a.shape == b.shape
    return (a - b).abs().nan_to_num(nan=torch.inf).max().item()


def content(cache: KvCache) -> tuple[int, bytes, bytes]:
    """Every byte of a cache, whether it shows or not."""
    keys, values = (part.contiguous().view(torch.uint8).numpy().tobytes() for part in (cache.k, cache.v))
    return cache.cached_len, keys, values


class CoreOnlyModel(DecodeModel):
    """The core tier and nothing else. Its argmax walks with the tokens cached: a step that is lost shows."""

    def __init__(self, vocab: int = 16, max_context: int | None = None) -> None:
        self.vocab, self.context = vocab, max_context
        self.calls: list[tuple[int, ...]] = []

    @hookimpl
    def n_layers(self) -> int:
        return 2

    @hookimpl
    def vocab_size(self) -> int:
        return self.vocab

    @hookimpl
    def max_context(self) -> int | None:
        return self.context

    @hookimpl
    def layer_state_specs(self) -> Sequence[LayerStateSpec]:
        return (KeyValue(2, 4),) * self.n_layers()

    @hookimpl
    def forward_with_kv_context_persistent(
        self, tokens: Sequence[int], cache: Any, session: DecodeSession
    ) -> Tensor:
        self.calls.append(tuple(tokens))
        return self._advance(tokens, cache)

    def _advance(self, tokens: Sequence[int], cache: KvCache) -> Tensor:
        length = cache.cached_len + len(tokens)
        row = self._row(tokens, cache, length)
        cache.cached_len = length
        return row

    def _row(self, tokens: Sequence[int], cache: KvCache, length: int) -> Tensor:
        row = torch.zeros(self.vocab)  # [vocab]
        row[length % self.vocab] = 1.0
        return row


class LockstepModel(CoreOnlyModel):
    """:class:`CoreOnlyModel` with a batched arm; ``batched`` holds the lengths before each batched call.

    ``faults`` maps the first token of a session's prompt to what befalls its logits.
    """

    def __init__(self, vocab: int = 16, faults: Mapping[int, Fault] | None = None) -> None:
        super().__init__(vocab)
        self.faults = dict(faults or {})
        self.batched: list[tuple[int, ...]] = []
        self._names: WeakKeyDictionary[KvCache, int] = WeakKeyDictionary()

    @hookimpl
    def supports_batched_decode(self) -> bool:
        return True

    @hookimpl
    def build_batched_decode_logits(
        self,
        caches: Sequence[Any],
        last_tokens: Sequence[int],
        device: str | torch.device,
        dtype: torch.dtype,
    ) -> Tensor:
        self.batched.append(tuple(cache.cached_len for cache in caches))
        rows = [self._advance((token,), cache) for cache, token in zip(caches, last_tokens, strict=True)]
        return torch.stack(rows)

    def _row(self, tokens: Sequence[int], cache: KvCache, length: int) -> Tensor:
        name = self._names.setdefault(cache, tokens[0])
        return self.faults.get(name, lambda row: row)(super()._row(tokens, cache, length))


class ReshapingModel(LockstepModel):
    """A batched arm that gives back other logits than it should."""

    def __init__(self, reshape: Fault) -> None:
        super().__init__()
        self._reshape = reshape

    @hookimpl
    def build_batched_decode_logits(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._reshape(super().build_batched_decode_logits(*args, **kwargs))


class MlaShapedModel(CoreOnlyModel):
    """Two layers that keep a latent and a rotary key, as multi-head latent attention does."""

    @hookimpl
    def layer_state_specs(self) -> Sequence[LayerStateSpec]:
        return (Slots((StateSlot((512,)), StateSlot((64,)))),) * 2


def raising(error: BaseException) -> Fault:
    """A fault that raises."""

    def fault(_: Tensor) -> NoReturn:
        raise error

    return fault


def filled(value: float) -> Fault:
    """A fault that makes every logit ``value``."""
    return lambda row: torch.full_like(row, value)


def once(fault: Fault, after: int = 0) -> Fault:
    """``fault`` for one call only, after ``after`` sound ones."""
    calls = iter(range(after + 1))
    return lambda row: fault(row) if next(calls, None) == after else row


@attrs.frozen
class Call:
    """One call of a model: which arm, how many tokens each cache held before, and the new tokens."""

    arm: str
    lengths: tuple[int, ...]
    tokens: tuple[int, ...]


class RecordingModel(DecodeModel):
    """Delegates to a real model, and keeps every call and every logits vector of every cache."""

    def __init__(self, inner: DecodeModel) -> None:
        self.inner = inner
        self.calls: list[Call] = []
        self._rows: WeakKeyDictionary[KvCache, list[tuple[str, Tensor]]] = WeakKeyDictionary()

    def logits(self, cache: KvCache) -> Tensor:
        """``[steps, vocab]``: what was sampled from, for one session."""
        return torch.stack([row for _, row in self._rows[cache]])

    def arms(self, cache: KvCache) -> list[str]:
        """Through which arm each of :meth:`logits` came."""
        return [arm for arm, _ in self._rows[cache]]

    def served(self, scheduler: SessionScheduler, id: SessionId) -> tuple[list[int], Tensor]:
        """A session's new tokens and logits, in the form of :func:`lone_run`."""
        session = scheduler.session(id)
        return session.new_tokens, self.logits(session.cache)

    def batched_calls(self) -> list[Call]:
        """The calls of the batched arm."""
        return [call for call in self.calls if call.arm == "batched"]

    @hookimpl
    def n_layers(self) -> int:
        return self.inner.n_layers()

    @hookimpl
    def vocab_size(self) -> int:
        return self.inner.vocab_size()

    @hookimpl
    def max_context(self) -> int | None:
        return self.inner.max_context()

    @hookimpl
    def layer_state_specs(self) -> Sequence[LayerStateSpec]:
        return self.inner.layer_state_specs()

    @hookimpl
    def forward_with_kv_context_persistent(
        self, tokens: Sequence[int], cache: Any, session: DecodeSession
    ) -> Tensor:
        call = Call("serial", (cache.cached_len,), tuple(tokens))
        row = self.inner.forward_with_kv_context_persistent(tokens, cache, session)  # [vocab]
        self._keep(call, [cache], row[None])
        return row

    @hookimpl
    def supports_batched_decode(self) -> bool:
        return self.inner.supports_batched_decode()

    @hookimpl
    def build_batched_decode_logits(
        self,
        caches: Sequence[Any],
        last_tokens: Sequence[int],
        device: str | torch.device,
        dtype: torch.dtype,
    ) -> Tensor:
        call = Call("batched", tuple(cache.cached_len for cache in caches), tuple(last_tokens))
        rows = self.inner.build_batched_decode_logits(caches, last_tokens, device, dtype)  # [K, vocab]
        self._keep(call, caches, rows)
        return rows

    def _keep(self, call: Call, caches: Sequence[KvCache], rows: Tensor) -> None:
        self.calls.append(call)
        for cache, row in zip(caches, rows, strict=True):
            self._rows.setdefault(cache, []).append((call.arm, row.clone()))


class SwappedCaches(RecordingModel):
    """A fault that comparisons must see: in a batch, each session reads and writes its neighbour's cache."""

    @hookimpl
    def build_batched_decode_logits(
        self,
        caches: Sequence[Any],
        last_tokens: Sequence[int],
        device: str | torch.device,
        dtype: torch.dtype,
    ) -> Tensor:
        call = Call("batched", tuple(cache.cached_len for cache in caches), tuple(last_tokens))
        turned = [*caches[1:], caches[0]]
        rows = self.inner.build_batched_decode_logits(turned, last_tokens, device, dtype)
        self._keep(call, caches, rows)
        return rows


class StuckCache(RecordingModel):
    """A fault that comparisons must see: a decode step writes its token and does not advance the cache."""

    @hookimpl
    def forward_with_kv_context_persistent(
        self, tokens: Sequence[int], cache: Any, session: DecodeSession
    ) -> Tensor:
        before = cache.cached_len
        row = super().forward_with_kv_context_persistent(tokens, cache, session)
        if before:
            cache.truncate(before)
        return row


class _NarrowStep:
    """A step that is handed a column too few, so that it raises with views of the caches in its hands."""

    def __init__(self, inner: Step) -> None:
        self._inner = inner

    def attention(
        self, layer: int, qkv: Tensor, qk_norm: tuple[Tensor, Tensor, float] | None = None
    ) -> Tensor:
        return self._inner.attention(layer, qkv[:, :-1], qk_norm)


class BreakableDecoder(Decoder):
    """The layers of a real decoder, one of which raises.

    ``before``, ``inside`` and ``after`` are the layer that raises at that place; None for none.
    """

    def __init__(self, inner: Decoder) -> None:
        super().__init__(inner.parts)
        self.inner = inner
        self.before: int | None = None
        self.inside: int | None = None
        self.after: int | None = None

    def layer(self, i: int, x: Tensor, step: Step) -> Tensor:
        """The inner model's layer, or a RuntimeError."""
        if i == self.before:
            raise RuntimeError(f"before layer {i}")
        x = self.inner.layer(i, x, _NarrowStep(step) if i == self.inside else step)
        if i == self.after:
            raise RuntimeError(f"after layer {i}")
        return x
