"""Generation for an event loop: the passes run in a thread, the loop goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from fuel_core.contracts import SamplingParams
from fuel_core.engine.generation import Prompt, stream
from fuel_core.engine.loading import Loaded
from fuel_core.engine.results import Completion, Delta
from fuel_core.engine.serving import Engine


async def generate_async(
    model: Loaded | str | Path,
    prompts: str | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    max_new_tokens: int = 64,
    max_batch: int = 32,
    scheduler: str = "auto",
    kv_memory: str | int = "auto",
    engine: Engine | None = None,
) -> list[Completion]:
    """:func:`generate`, awaited. Calls that share an ``engine`` run in its passes together.

    A call that is cancelled ends its own prompts; they leave the engine when the pass that is running ends.

    Args:
        model: a loaded model, or a reference to load one by.
        prompts: texts or lists of token ids; one string is one prompt.
        params: for all prompts, or one for each; None is greedy.
        max_new_tokens: the most that a prompt may generate.
        max_batch: the most prompts that run at a time; the others wait in order.
        scheduler: ``paged`` (one pool, continuous batching), ``contiguous`` (a cache for each prompt), or
            ``auto``: paged where the model can.
        kv_memory: for the paged scheduler, bytes or a text; see :func:`build_engine`.
        engine: one to run on, which keeps its prefix cache between calls, with its own ``max_batch`` and
            ``kv_memory``; None makes one for this call.

    Returns:
        One completion per prompt, in order. One that failed while running has ``finish_reason`` ``error`` and
        leaves the others as they are.

    Raises:
        InvalidRequestError: a prompt or argument that cannot be served, before anything has run.
        CapacityError: a prompt that needs more KV memory than there is, before anything has run.
        FuelError: as :func:`load`, where ``model`` is a reference.
    """
    deltas = stream_async(
        model,
        prompts,
        params,
        max_new_tokens=max_new_tokens,
        max_batch=max_batch,
        scheduler=scheduler,
        kv_memory=kv_memory,
        engine=engine,
    )
    completions = {delta.index: delta.completion async for delta in deltas if delta.completion is not None}
    return [completions[index] for index in sorted(completions)]


async def stream_async(
    model: Loaded | str | Path,
    prompts: str | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    max_new_tokens: int = 64,
    max_batch: int = 32,
    scheduler: str = "auto",
    kv_memory: str | int = "auto",
    engine: Engine | None = None,
) -> AsyncGenerator[Delta, None]:
    """:func:`stream`, asynchronously. A task that is cancelled ends its own prompts and no others.

    They leave the engine when the pass that is running ends, and not before. A loop that may leave early
    closes the stream with :func:`contextlib.aclosing`, which ends all its prompts in this way at once.

    Args: those of :func:`generate`.

    Raises:
        FuelError: as :func:`stream`, at the first delta.
    """
    start = partial(
        stream,
        model,
        prompts,
        params,
        max_new_tokens=max_new_tokens,
        max_batch=max_batch,
        scheduler=scheduler,
        kv_memory=kv_memory,
        engine=engine,
    )
    loop = asyncio.get_running_loop()
    # One thread for each stream: what ends it comes after the step that is running, never beside it.
    thread = ThreadPoolExecutor(1, thread_name_prefix="fuel-stream")
    try:
        deltas = await loop.run_in_executor(thread, start)
        try:
            while (delta := await loop.run_in_executor(thread, next, deltas, None)) is not None:
                yield delta
        finally:
            thread.submit(deltas.close)
    finally:
        thread.shutdown(wait=False)
