"""What every worker speaks: a JSON object a line, questions on standard input, answers on standard output.

A worker loads once and says ``{"ready": true, ...}`` or ``{"error": ...}``. Then it answers each of

    {"op": "decode", "contexts": [128, 128], "steps": 24}   each context a session, all decoded in lockstep
    {"op": "prefill", "length": 512}                        one prompt, none of it known before

with ``{"tokens_per_s": ...}`` or ``{"error": ...}``, and ends with its standard input. This needs nothing but
the standard library, since it runs in the environment of a peer.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TextIO

Answer = dict[str, Any]


class Peer(Protocol):
    """A loaded model.

    Attributes:
        about: what the report should say of it: version, element types, settings.
    """

    about: dict[str, Any]

    def decode(self, contexts: Sequence[int], steps: int) -> float:
        """Seconds of ``steps`` steps of as many sessions, each holding a context of that many tokens."""
        ...

    def prefill(self, length: int) -> float:
        """Seconds until the first new token of a prompt of ``length`` tokens."""
        ...


def prompt(length: int, vocab: int, salt: int = 0) -> list[int]:
    """The tokens that everyone is given; another salt gives others, which no prefix cache knows."""
    return [(i * 7919 + salt * 104_729 + 13) % vocab for i in range(length)]


def answer(peer: Peer, question: dict[str, Any]) -> Answer:
    """The rate that a question asks for; ``seconds`` and ``tokens`` are what it is made of."""
    if question["op"] == "prefill":
        tokens, seconds = question["length"], peer.prefill(question["length"])
    elif question["op"] == "decode":
        contexts, steps = question["contexts"], question["steps"]
        tokens, seconds = len(contexts) * steps, peer.decode(contexts, steps)
    else:
        return dict(getattr(peer, question["op"])())
    return {"tokens_per_s": tokens / seconds, "seconds": seconds, "tokens": tokens}


def serve(load: Callable[[], Peer], questions: TextIO, answers: TextIO) -> None:
    """Load, then answer until the questions end. An error is an answer, and the next question comes."""
    start = time.perf_counter()
    for said in _said(load, questions, start):
        print(json.dumps(said), file=answers, flush=True)


def _said(load: Callable[[], Peer], questions: TextIO, start: float) -> Iterator[Answer]:
    try:
        peer = load()
    except Exception as error:  # a peer's library may raise anything
        yield {"error": text_of(error)}
        return
    yield {"ready": True, "load_s": time.perf_counter() - start, "about": peer.about}
    for line in questions:
        yield _answer_or_error(peer, line)


def _answer_or_error(peer: Peer, line: str) -> Answer:
    try:
        return answer(peer, json.loads(line))
    except Exception as error:
        return {"error": text_of(error)}


def text_of(error: Exception) -> str:
    """An error on one line, with its type."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


def main(load: Callable[[str, int], Peer]) -> None:
    """Run a worker: ``load`` makes the peer of a model's path and a number of threads."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    # What a library prints must not stand between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(lambda: load(args.model, args.threads), sys.stdin, answers)
