"""OpenVINO GenAI: its continuous batching pipeline, step by step, on the GGUF file.

It cannot go back to a shorter context, so every question gets sessions of its own. Its prefix cache spares it
the prompts that it has seen; each session has another prompt, so that none shares keys and values.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import openvino
import openvino_genai
import protocol

VOCAB = 32_000
"""Ids below this: the pipeline does not tell its vocabulary, and every model's is larger."""


class OpenVino:
    """A pipeline, whose requests are ended after each question."""

    def __init__(self, path: str, threads: int) -> None:
        config = openvino_genai.SchedulerConfig()
        config.cache_size = 2  # GB
        config.max_num_seqs = 256
        config.max_num_batched_tokens = 2048
        config.enable_prefix_caching = True
        self._pipe = openvino_genai.ContinuousBatchingPipeline(
            path, config, "CPU", {"INFERENCE_NUM_THREADS": threads}
        )
        self._asked = 0
        self.about = {
            "version": openvino_genai.__version__,
            "kv": "the CPU plugin's default",
            "weights": "the GGUF file",
        }

    def decode(self, contexts: Sequence[int], steps: int) -> float:
        """See :class:`protocol.Peer`. A session whose prompt is done waits for no other: some are ahead."""
        # None may end while it is measured: the others' prompts give it time for many tokens.
        most = steps + 2 + sum(contexts) // 256 + len(contexts)
        handles = [self._ask(context, salt, most) for salt, context in enumerate(contexts)]
        try:
            begun: set[int] = set()
            while len(begun) < len(handles):
                begun |= {i for i, count in enumerate(self._advance(handles)) if count}
            start = time.perf_counter()
            counts = [sum(self._advance(handles)) for _ in range(steps)]
            seconds = time.perf_counter() - start
        finally:
            self._end(handles)
        if counts != [len(handles)] * steps:
            raise RuntimeError(f"{counts} tokens in {steps} steps of {len(handles)} sessions")
        return seconds

    def prefill(self, length: int) -> float:
        """See :class:`protocol.Peer`."""
        self._asked += 1
        handle = self._ask(length, 1000 + self._asked, 1)
        start = time.perf_counter()
        while not sum(self._advance([handle])):
            pass
        seconds = time.perf_counter() - start
        self._end([handle])
        return seconds

    def _ask(self, length: int, salt: int, most: int) -> openvino_genai.py_openvino_genai.GenerationHandle:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = most, True, False
        ids = np.array([protocol.prompt(length, VOCAB, salt)], dtype=np.int64)  # [1, length]
        self._asked += 1
        return self._pipe.add_request(self._asked, openvino.Tensor(ids), config)

    def _advance(self, handles: Sequence[openvino_genai.py_openvino_genai.GenerationHandle]) -> list[int]:
        """One step; how many tokens each request has now had from it."""
        self._pipe.step()
        return [
            sum(len(output.generated_ids) for output in handle.read().values()) if handle.can_read() else 0
            for handle in handles
        ]

    def _end(self, handles: Sequence[openvino_genai.py_openvino_genai.GenerationHandle]) -> None:
        for handle in handles:
            handle.cancel()
        while self._pipe.has_non_finished_requests():
            self._pipe.step()


if __name__ == "__main__":
    protocol.main(OpenVino)
