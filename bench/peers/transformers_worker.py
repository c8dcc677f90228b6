"""Transformers, eager, in float32 on the dequantized weights, with the attention that it chooses itself."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence

import protocol
import torch
import transformers


class Transformers:
    """A model, and the keys and values of the last question's prompts."""

    def __init__(self, path: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._held: tuple[int, int] | None = None
        self.about = {
            "version": transformers.__version__,
            "torch": torch.__version__,
            "kv": "float32",
            "weights": "dequantized to float32",
        }

    @torch.inference_mode()
    def decode(self, contexts: Sequence[int], steps: int) -> float:
        """See :class:`protocol.Peer`.

        Raises:
            ValueError: contexts of several lengths, which it would pad.
        """
        if len(set(contexts)) > 1:
            raise ValueError("contexts of several lengths: it pads them to the longest")
        self._hold(len(contexts), contexts[0])
        tokens = torch.full((len(contexts), 1), 13)  # [B, 1]
        self._step(tokens, copy.deepcopy(self._cache))  # warms up
        cache = copy.deepcopy(self._cache)
        start = time.perf_counter()
        for _ in range(steps):
            tokens = self._step(tokens, cache)
        return time.perf_counter() - start

    @torch.inference_mode()
    def prefill(self, length: int) -> float:
        """See :class:`protocol.Peer`."""
        ids = self._prompt(length)
        start = time.perf_counter()
        self._model(ids, use_cache=True, logits_to_keep=1).logits.argmax(-1).tolist()
        return time.perf_counter() - start

    def _prompt(self, length: int) -> torch.Tensor:
        """``[1, length]``."""
        return torch.tensor([protocol.prompt(length, self._model.config.vocab_size)])

    def _hold(self, batch: int, context: int) -> None:
        """The keys and values of ``batch`` prompts: one is computed, and repeated."""
        if self._held == (batch, context):
            return
        read = self._model(self._prompt(context), use_cache=True, logits_to_keep=1)
        self._cache = read.past_key_values
        self._cache.batch_repeat_interleave(batch)
        self._held = batch, context

    def _step(self, tokens: torch.Tensor, cache: transformers.Cache) -> torch.Tensor:
        """``[B, 1]`` → the next ``[B, 1]``."""
        return self._model(tokens, past_key_values=cache, use_cache=True).logits.argmax(-1)


if __name__ == "__main__":
    protocol.main(Transformers)
