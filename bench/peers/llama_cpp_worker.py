"""llama.cpp by its low-level calls: one ``llama_decode`` a step, a batch of one token per sequence.

The KV cache is float16 and the attention implementation is chosen by llama.cpp, its defaults both.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import llama_cpp
import numpy as np
import protocol

CHUNK = 512


class LlamaCpp:
    """A model, and the context of the last question, whose prompts are kept while it is asked again."""

    def __init__(self, path: str, threads: int) -> None:
        llama_cpp.llama_log_set(_SILENT, None)
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        if not self._model:
            raise OSError(f"llama.cpp cannot load {path}")
        self._threads, self._context, self._made_for = threads, None, None
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(CHUNK, 0, 1)
        self.about = {"version": llama_cpp.__version__, "kv": "float16", "weights": "the GGUF file"}

    def decode(self, contexts: Sequence[int], steps: int) -> float:
        """See :class:`protocol.Peer`."""
        self._hold(tuple(contexts), steps)
        tokens = [13] * len(contexts)
        self._step(tokens, contexts)  # warms up, and is taken back
        self._rewind(contexts)
        start = time.perf_counter()
        for step in range(steps):
            tokens = self._step(tokens, [context + step for context in contexts])
        seconds = time.perf_counter() - start
        self._rewind(contexts)
        return seconds

    def prefill(self, length: int) -> float:
        """See :class:`protocol.Peer`."""
        self._open(("prefill", length), sequences=1, room=length + 1)
        llama_cpp.llama_memory_clear(self._memory, True)
        start = time.perf_counter()
        self._read(length)
        self._best(-1)
        return time.perf_counter() - start

    def _hold(self, contexts: tuple[int, ...], steps: int) -> None:
        """Sequences of these lengths: the longest is computed, the others are copies cut to length."""
        longest = max(contexts)
        if not self._open((contexts, steps), sequences=len(contexts), room=longest + steps + 1):
            return
        self._read(longest)
        for sequence in range(1, len(contexts)):
            llama_cpp.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)
        self._rewind(contexts)

    def _open(self, made_for: object, *, sequences: int, room: int) -> bool:
        """A context for so many sequences of so much room each; False where the last one is it."""
        if made_for == self._made_for:
            return False
        if self._context:
            llama_cpp.llama_free(self._context)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.n_batch = sequences * room, sequences, CHUNK
        params.n_threads = params.n_threads_batch = self._threads
        params.kv_unified = False  # each sequence attends over its own keys alone
        self._context, self._made_for = llama_cpp.llama_init_from_model(self._model, params), made_for
        if not self._context:
            self._made_for = None
            raise MemoryError(f"llama.cpp has no context of {sequences} by {room} tokens")
        self._memory = llama_cpp.llama_get_memory(self._context)
        return True

    def _rewind(self, contexts: Sequence[int]) -> None:
        for sequence, context in enumerate(contexts):
            llama_cpp.llama_memory_seq_rm(self._memory, sequence, context, -1)

    def _read(self, length: int) -> None:
        """Compute the prompt as sequence 0; logits of its last token."""
        tokens = protocol.prompt(length, self._vocab)
        for first in range(0, length, CHUNK):
            part = range(first, min(first + CHUNK, length))
            self._decode([(tokens[i], i, 0, i == length - 1) for i in part])

    def _step(self, tokens: Sequence[int], positions: Sequence[int]) -> list[int]:
        """One token per sequence; the next ones."""
        rows = zip(tokens, positions, strict=True)
        self._decode([(token, place, sequence, True) for sequence, (token, place) in enumerate(rows)])
        return [self._best(row) for row in range(len(tokens))]

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        code = llama_cpp.llama_decode(self._context, batch)
        if code:
            raise RuntimeError(f"llama_decode of {len(rows)} tokens returned {code}")

    def _best(self, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, (self._vocab,)).argmax())


@llama_cpp.llama_log_callback
def _SILENT(level: int, text: bytes, data: object) -> None:  # noqa: N802 (a constant: it must outlive the calls)
    pass


if __name__ == "__main__":
    protocol.main(LlamaCpp)
