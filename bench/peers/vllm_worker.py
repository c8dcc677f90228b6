"""vLLM for CPUs, compiled, in float32 on the dequantized weights: its engine, step by step, in this process.

It cannot go back to a shorter context, so every question gets sessions of its own. Its prefix cache spares it
the prompts that it has seen; each session has another prompt, so that none shares keys and values.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import protocol

CONTEXT = 4096


class Vllm:
    """An engine, whose requests are aborted after each question."""

    def __init__(self, path: str, threads: int) -> None:
        # Read when vLLM is imported.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "3"  # GiB
        os.environ["OMP_NUM_THREADS"] = str(threads)
        import vllm

        self._vllm, self._asked = vllm, 0
        llm = vllm.LLM(
            model=path,
            dtype="float32",
            max_model_len=CONTEXT,
            max_num_seqs=64,
            enable_prefix_caching=True,
            skip_tokenizer_init=True,
            disable_log_stats=True,
        )
        self._engine = llm.llm_engine
        self._vocab = llm.llm_engine.model_config.get_vocab_size()
        self.about = {"version": vllm.__version__, "kv": "float32", "weights": "dequantized to float32"}

    def decode(self, contexts: Sequence[int], steps: int) -> float:
        """See :class:`protocol.Peer`. A session whose prompt is done waits for no other: some are ahead."""
        # None may end while it is measured: the others' prompts give it time for many tokens.
        most = steps + 2 + sum(contexts) // 256 + len(contexts)
        names = [self._ask(context, salt, most) for salt, context in enumerate(contexts)]
        try:
            begun: set[str] = set()
            while len(begun) < len(names):
                begun |= self._advance()
            start = time.perf_counter()
            counts = [len(self._advance()) for _ in range(steps)]
            seconds = time.perf_counter() - start
        finally:
            self._end(names)
        if counts != [len(names)] * steps:
            raise RuntimeError(f"{counts} sessions got a token in {steps} steps of {len(names)}")
        return seconds

    def prefill(self, length: int) -> float:
        """See :class:`protocol.Peer`."""
        name = self._ask(length, 1000 + self._asked, 2)
        start = time.perf_counter()
        while not self._advance():
            pass
        seconds = time.perf_counter() - start
        self._end([name])
        return seconds

    def _ask(self, length: int, salt: int, most: int) -> str:
        params = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=most, ignore_eos=True, detokenize=False, output_kind=_deltas()
        )
        self._asked += 1
        ids = protocol.prompt(length, self._vocab, salt)
        self._engine.add_request(str(self._asked), {"prompt_token_ids": ids}, params)
        return str(self._asked)

    def _advance(self) -> set[str]:
        """One step; the requests that got a token from it."""
        return {done.request_id for done in self._engine.step() if any(o.token_ids for o in done.outputs)}

    def _end(self, names: Sequence[str]) -> None:
        self._engine.abort_request(list(names))
        while self._engine.has_unfinished_requests():
            self._engine.step()


def _deltas() -> object:
    from vllm.sampling_params import RequestOutputKind

    return RequestOutputKind.DELTA


if __name__ == "__main__":
    protocol.main(Vllm)
