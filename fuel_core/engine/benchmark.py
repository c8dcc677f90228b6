"""How fast a model decodes and reads prompts here, and how fast the memory could give it its weights."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

import attrs
import torch
from torch import Tensor

from fuel_core import registry
from fuel_core.contracts import ModelDims, QuantizedTensor, RaggedBatch, RaggedDecodeModel, SamplingParams
from fuel_core.contracts.errors import InvalidRequestError
from fuel_core.engine.loading import Loaded
from fuel_core.engine.served import ragged
from fuel_core.kv import DeviceKvPool, KvBudget, SessionHandle
from fuel_core.kv.device_pool import SessionImage
from fuel_core.layers import Decoder
from fuel_core.sampling import SamplerState, sample
from fuel_core.schedule.table import geometry_of

Clock = Callable[[], float]

_BLOCK_SIZE = 16
_CHUNK = 512  # tokens of a prompt per pass, as an engine's
_STREAM_BYTES = 512_000_000
_STREAMS = 5
_PRODUCT = 1024  # rows and columns


@attrs.frozen
class Plan:
    """What is measured.

    Attributes:
        batches: numbers of sessions that decode in lockstep.
        context: tokens that each of them holds before its first step.
        steps: tokens that each of them decodes.
        prompt_len: tokens of the prompt that is read.
        repeats: how often each is measured.
    """

    batches: tuple[int, ...] = (1, 8, 32)
    context: int = 128
    steps: int = 24
    prompt_len: int = 512
    repeats: int = 3

    def check(self, max_context: int | None) -> None:
        """Refuse what no session of the model could do.

        Raises:
            InvalidRequestError: a number below 1, a batch twice, or more tokens than the model's context.
        """
        sizes = {"batch": self.batches, "context": (self.context,), "steps": (self.steps,)}
        for name, values in {**sizes, "prompt-len": (self.prompt_len,), "repeats": (self.repeats,)}.items():
            if not values or min(values) < 1 or len(set(values)) < len(values):
                raise InvalidRequestError(
                    f"{name} {', '.join(map(str, values)) or 'of nothing'}",
                    needed="integers of at least 1, each once",
                    remedy=f"change {name}",
                )
        total = max(self.context + self.steps, self.prompt_len)
        if max_context is not None and total > max_context:
            raise InvalidRequestError(
                f"{total} tokens in a session",
                needed=f"at most {max_context}, the model's context length",
                remedy="lower the context, the steps or the prompt's length",
                total=total,
                max_context=max_context,
            )


@attrs.frozen
class Spread:
    """Several measurements of one quantity."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one, or the mean of the two."""
        return median(self.values)

    def __str__(self) -> str:
        return f"{self.median:.4g} ({min(self.values):.4g} to {max(self.values):.4g})"


@attrs.frozen
class Report:
    """What was measured.

    Attributes:
        decode: tokens per second of all sessions together, by batch.
        prefill: tokens per second of one prompt.
        weight_bytes: see :func:`weight_bytes`.
        bandwidth: bytes per second; see :func:`read_bandwidth`.
        peak_bytes: the most that the process has had resident, the bandwidth's buffer aside.
    """

    decode: dict[int, Spread]
    prefill: Spread
    weight_bytes: int
    bandwidth: float
    peak_bytes: int

    @property
    def limit_fraction(self) -> float | None:
        """Batch 1 as a share of what reading the weights alone would allow; None if not measured."""
        if 1 not in self.decode:
            return None
        return self.decode[1].median * self.weight_bytes / self.bandwidth


def measure(loaded: Loaded, plan: Plan, peak: Callable[[], int], clock: Clock = time.perf_counter) -> Report:
    """Carry out a plan; ``peak`` gives the most bytes that were resident so far.

    Raises:
        InvalidRequestError: see :meth:`Plan.check`; nothing has run.
        UnsupportedTierError: the model has no ragged tier.
        CapacityError: no memory for the sessions of the largest batch.
    """
    plan.check(loaded.max_context)
    decode = {batch: _decode(loaded, batch, plan, clock) for batch in plan.batches}
    prompts = [plan.prompt_len / prefill(loaded, plan.prompt_len, clock) for _ in range(plan.repeats)]
    peak_bytes = peak()
    return Report(
        decode, Spread(tuple(prompts)), weight_bytes(loaded), read_bandwidth(clock=clock), peak_bytes
    )


def _decode(loaded: Loaded, batch: int, plan: Plan, clock: Clock) -> Spread:
    sessions = Sessions(loaded, [plan.context] * batch, plan.steps)
    seconds = [sessions.decode(plan.steps, clock) for _ in range(plan.repeats)]
    return Spread(tuple(batch * plan.steps / each for each in seconds))


# -- sessions --------------------------------------------------------------------------------------


class Sessions:
    """Sessions that hold a prompt each and decode greedily in lockstep from there, as often as is asked.

    Args:
        loaded: the model.
        contexts: the length of each session's prompt.
        room: the most steps.

    Raises:
        UnsupportedTierError: the model has no ragged tier.
        CapacityError: no memory for the pool.
    """

    def __init__(self, loaded: Loaded, contexts: Sequence[int], room: int) -> None:
        self.contexts, self.room = list(contexts), room
        self._model, longest = ragged(loaded.model), max(contexts)
        # One prompt more than the sessions: each begins as a copy of the longest.
        self._pool = _pool(loaded, [longest, *(context + room for context in contexts)])
        first, _ = _read_prompt(self._model, self._pool, longest)
        image = self._pool.swap_out(first)
        self._handles = tuple(self._copy(image, context) for context in contexts)
        self._states = [_greedy(self._model) for _ in contexts]

    def _copy(self, image: SessionImage, context: int) -> SessionHandle:
        handle = self._pool.swap_in(image)
        self._pool.core.truncate(handle, context)
        return handle

    def decode(self, steps: int, clock: Clock = time.perf_counter) -> float:
        """Seconds of ``steps`` steps, sampling included; the sessions are as they were after it."""
        self._step(1)  # what is made on first use is made now
        self._rewind()
        start = clock()
        self._step(steps)
        seconds = clock() - start
        self._rewind()
        return seconds

    def time_kernels(self) -> list[tuple[str, int]]:
        """The kernel calls of a step but for the head's, in order, with the nanoseconds that each took.

        Raises:
            InvalidRequestError: the kernels keep no recording of a step.
        """
        self._step(1)
        for step in self._pool.plans.get(self._model, {}).values():
            if step.recording is not None:
                timed: list[tuple[str, int]] = step.recording.run_timed()
                self._rewind()
                return timed
        raise InvalidRequestError(
            "kernels that record no steps",
            needed="recorded steps",
            remedy="load the model with the native kernels",
        )

    def _step(self, count: int) -> None:
        tokens = [0] * len(self._handles)
        for _ in range(count):
            new = tuple((token,) for token in tokens)
            logits = self._model.forward_paged_ragged(RaggedBatch(self._pool, self._handles, new))
            tokens = _chosen(logits, self._states)

    def _rewind(self) -> None:
        for handle, context in zip(self._handles, self.contexts, strict=True):
            self._pool.core.truncate(handle, context)


def prefill(loaded: Loaded, length: int, clock: Clock = time.perf_counter) -> float:
    """Seconds until the first new token of a prompt of ``length`` tokens; raises as :class:`Sessions`."""
    model, pool = ragged(loaded.model), _pool(loaded, [length])
    states = [_greedy(model)]
    start = clock()
    _, logits = _read_prompt(model, pool, length)
    _chosen(logits, states)
    return clock() - start


def _pool(loaded: Loaded, lengths: Iterable[int]) -> DeviceKvPool:
    """Room for sessions of these lengths."""
    blocks = sum(-(-length // _BLOCK_SIZE) for length in lengths)
    dims = ModelDims.from_model(ragged(loaded.model))
    pool = DeviceKvPool(
        geometry_of(dims, KvBudget(_BLOCK_SIZE, blocks), loaded.kv_dtype), loaded.kv_dtype, loaded.device
    )
    for layer in range(dims.n_layers):
        # A pool that has served has its pages; a new one would get them while the clock runs.
        pool.k_pool(layer).zero_()
        pool.v_pool(layer).zero_()
    return pool


def _read_prompt(model: RaggedDecodeModel, pool: DeviceKvPool, length: int) -> tuple[SessionHandle, Tensor]:
    """A session that holds a prompt, and the logits ``[1, vocab]`` after it."""
    vocab, session = model.vocab_size(), pool.core.open()
    tokens = tuple((i * 7919 + 13) % vocab for i in range(length))
    for first in range(0, length, _CHUNK):
        chunk = tokens[first : first + _CHUNK]
        logits = model.forward_paged_ragged(RaggedBatch(pool, (session,), (chunk,)))
    return session, logits


def _greedy(model: RaggedDecodeModel) -> SamplerState:
    return SamplerState(SamplingParams(), (), eos_ids=frozenset(), vocab_size=model.vocab_size())


def _chosen(logits: Tensor, states: Sequence[SamplerState]) -> list[int]:
    tokens = []
    for outcome in sample(logits, states):
        if not isinstance(outcome, int):
            raise outcome
        tokens.append(outcome)
    return tokens


# -- the machine ----------------------------------------------------------------------------------------


def weight_bytes(loaded: Loaded) -> int:
    """Bytes that a step reads: all that are stored, but for an embedding that is not the head too."""
    checkpoint = registry.open_checkpoint(loaded.source)
    total = sum(_bytes(checkpoint.tensor(name), loaded.dtype) for name in checkpoint)
    if isinstance(loaded.model, Decoder) and loaded.model.parts.head is not loaded.model.parts.embedding:
        total -= _bytes(loaded.model.parts.embedding, loaded.dtype)
    return total


def _bytes(tensor: Tensor | QuantizedTensor, dtype: torch.dtype) -> int:
    """As a model in ``dtype`` keeps it: blocks as they are, and the narrower one of two element types."""
    if isinstance(tensor, QuantizedTensor):
        return tensor.data.nbytes
    return tensor.numel() * min(tensor.itemsize, dtype.itemsize)


def kv_bytes_per_token(loaded: Loaded) -> int:
    """Bytes of keys and values that each token of a context adds to every step."""
    dims = ModelDims.from_model(loaded.model)
    return 2 * dims.n_layers * dims.n_kv_heads * dims.head_dim * loaded.kv_dtype.itemsize


def read_bandwidth(size: int = _STREAM_BYTES, clock: Clock = time.perf_counter) -> float:
    """Bytes per second that the CPU reads with its threads: the best of five streams over ``size`` bytes."""
    buffer = torch.ones(size // 4)
    return 4 * len(buffer) / min(_seconds_of_stream(buffer, clock) for _ in range(_STREAMS))


def _seconds_of_stream(buffer: Tensor, clock: Clock) -> float:
    stream = getattr(_native(), "read_stream", None)
    start = clock()
    if stream is None:
        buffer.sum()
    else:
        stream(buffer.data_ptr(), buffer.nbytes)
    return clock() - start


def product_rate(clock: Clock = time.perf_counter) -> float:
    """Float32 operations per second, two a multiply-add, of PyTorch's best of five large matrix products."""
    a, b = torch.ones(_PRODUCT, _PRODUCT), torch.ones(_PRODUCT, _PRODUCT)
    return 2.0 * _PRODUCT**3 / min(_seconds_of_product(a, b, clock) for _ in range(_STREAMS))


def _seconds_of_product(a: Tensor, b: Tensor, clock: Clock) -> float:
    start = clock()
    a @ b
    return clock() - start


def _native() -> Any:
    """The CPU kernels' module, or None in an installation without it."""
    try:
        return importlib.import_module("fuel_core._native")
    except ImportError:
        return None
