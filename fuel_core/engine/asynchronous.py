"""Generation for an event loop: the passes run in a thread, the loop goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fuel_core.engine.generation import stream
from fuel_core.engine.results import Completion, Delta


async def generate_async(*args: Any, **options: Any) -> list[Completion]:
    """:func:`generate`, awaited. Calls that share an ``engine`` run in its passes together.

    Raises:
        InvalidRequestError, CapacityError: as :func:`generate`.
    """
    completions = {}
    async for delta in stream_async(*args, **options):
        if delta.completion is not None:
            completions[delta.index] = delta.completion
    return [completions[index] for index in sorted(completions)]


async def stream_async(*args: Any, **options: Any) -> AsyncGenerator[Delta, None]:
    """:func:`stream`, asynchronously. A task that is cancelled ends its own prompts and no others.

    Raises:
        InvalidRequestError, CapacityError: as :func:`stream`, at the first delta.
    """
    loop = asyncio.get_running_loop()
    # One thread for each stream: what ends it comes after the step that is running, never beside it.
    thread = ThreadPoolExecutor(1, thread_name_prefix="fuel-stream")
    try:
        deltas = await loop.run_in_executor(thread, lambda: stream(*args, **options))
        try:
            while (delta := await loop.run_in_executor(thread, next, deltas, None)) is not None:
                yield delta
        finally:
            thread.submit(deltas.close)
    finally:
        thread.shutdown(wait=False)
