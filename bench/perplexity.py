"""Perplexity of a model on the fixed text, by kernels and by the type of the cached keys and values.

python bench/perplexity.py [MODEL] [--kernels native] [--kv-dtypes float32,float16,bfloat16]
python bench/perplexity.py --golden PYTHON    (one with llama-cpp-python) writes the golden file
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
from pathlib import Path

import torch

import fuel_core as fuel
from fuel_core.engine.perplexity import perplexity
from fuel_core.registry import resolve

ROOT = Path(__file__).resolve().parents[1]
TEXT = ROOT / "tests/data/perplexity.txt"
GOLDEN = ROOT / "tests/data/perplexity.json"
WINDOWS = 8


def main() -> None:
    """Print one line for each measurement, or write the golden file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--kernels")
    parser.add_argument("--kv-dtypes", default="float32,float16,bfloat16")
    parser.add_argument("--golden", metavar="PYTHON")
    args = parser.parse_args()
    loaded = fuel.load(args.model, kernels=args.kernels)
    tokens = loaded.tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    if args.golden:
        write_golden(args.golden, args.model, tokens)
        return
    for name in args.kv_dtypes.split(","):
        value = perplexity(loaded, tokens, windows=WINDOWS, kv_dtype=getattr(torch, name))
        print(f"{args.model} {args.kernels or 'default'} kernels, {name} KV: perplexity {value:.5f}")


def write_golden(python: str, model: str, tokens: list[int]) -> None:
    """Have llama.cpp compute it on the same file and tokens."""
    path = resolve(model)
    asked = json.dumps({"model": str(path), "tokens": tokens, "windows": WINDOWS})
    script = str(ROOT / "bench/peers/llama_cpp_perplexity.py")
    ran = subprocess.run([python, script], input=asked, capture_output=True, text=True, check=True)
    golden = {
        "model": model,
        "model_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "text_sha256": hashlib.sha256(TEXT.read_bytes()).hexdigest(),
        "tokens": len(tokens),
        "windows": WINDOWS,
        **json.loads(ran.stdout.splitlines()[-1]),
    }
    GOLDEN.write_text(json.dumps(golden, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
