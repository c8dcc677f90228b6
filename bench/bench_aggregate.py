"""Many prompts together against one after another, on the same model in one run, alternating.

python bench/bench_aggregate.py --prompts 64 --rounds 2
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import fuel_core as fuel

WORDS = [
    "river",
    "mountain",
    "the",
    "of",
    "a",
    "bridge",
    "light",
    "slowly",
    "under",
    "green",
    "and",
    "old",
    "stone",
    "water",
    "across",
    "with",
    "time",
    "city",
]


def prompts(count: int, seed: int = 1) -> list[str]:
    """Texts of 3 to 60 words."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(3, 60))) for _ in range(count)]


def timed(
    loaded: fuel.Loaded, texts: list[str], max_batch: int, tokens: int
) -> tuple[float, list[list[int]]]:
    start = time.perf_counter()
    completions = fuel.generate(loaded, texts, max_new_tokens=tokens, max_batch=max_batch)
    return time.perf_counter() - start, [completion.token_ids for completion in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    loaded, texts, ratios = fuel.load(args.model), prompts(args.prompts), []
    for _ in range(args.rounds):
        together, ids = timed(loaded, texts, args.max_batch, args.tokens)
        alone, lone_ids = timed(loaded, texts, 1, args.tokens)
        same = sum(a == b for a, b in zip(ids, lone_ids, strict=True))
        ratios.append(alone / together)
        print(
            f"together {together:.1f} s, one after another {alone:.1f} s, ratio {ratios[-1]:.2f}, "
            f"same ids {same}/{len(ids)}"
        )
    print(f"ratio: median {statistics.median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    main()
