"""llama.cpp's perplexity of given tokens, in windows that begin anew: JSON in, JSON out. Float32 KV cache."""

from __future__ import annotations

import json
import sys

import llama_cpp
import numpy as np


def main() -> None:
    """Read the question, print the answer as the last line."""
    asked = json.load(sys.stdin)
    model = llama_cpp.Llama(
        asked["model"],
        n_ctx=len(asked["tokens"]) // asked["windows"] + 1,
        logits_all=True,
        verbose=False,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
    )
    windows = np.array(asked["tokens"])
    length = len(windows) // asked["windows"]
    total = 0.0
    for window in windows[: asked["windows"] * length].reshape(-1, length):
        model.reset()
        model.eval(window.tolist())
        logits = np.asarray(model.scores[: length - 1], dtype=np.float64)  # [length - 1, vocab]
        most = logits.max(axis=1)
        norms = most + np.log(np.exp(logits - most[:, None]).sum(axis=1))
        total += float((norms - logits[np.arange(length - 1), window[1:]]).sum())
    value = float(np.exp(total / (asked["windows"] * (length - 1))))
    print(json.dumps({"perplexity": value, "by": f"llama-cpp-python {llama_cpp.__version__}, float32 KV"}))


if __name__ == "__main__":
    main()
