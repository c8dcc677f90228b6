"""How long a process takes to its first token, beside one that only imports torch."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from fuel_core.contracts.errors import InvalidRequestError

_GENERATE = "from fuel_core.cli import main; main()"
_IMPORT = "import time; start = time.perf_counter(); import torch; print(time.perf_counter() - start)"
_PROMPT = "The capital of France is"
_TIMES = 3


@attrs.frozen
class Start:
    """One start of each kind, in seconds.

    Attributes:
        first_token_s: from the start of the process ``fuel generate`` to its first output.
        import_torch_s: of the statement ``import torch`` in a fresh process.
    """

    first_token_s: float
    import_torch_s: float


def time_starts(
    model: str, runtime: Mapping[str, Any], clock: Callable[[], float] = time.perf_counter
) -> list[Start]:
    """Three starts of each kind, by turns; ``runtime`` are the options of ``fuel generate``.

    Raises:
        InvalidRequestError: ``fuel generate`` fails on this model.
    """
    given = [f"--{k.replace('_', '-')}={value}" for k, value in runtime.items() if value is not None]
    options = ["--max-new-tokens", "1", *given]
    command = [sys.executable, "-c", _GENERATE, "generate", *options, "--", model, _PROMPT]
    return [Start(_first_output(command, clock), _import_torch()) for _ in range(_TIMES)]


def _first_output(command: list[str], clock: Callable[[], float]) -> float:
    start = clock()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        seconds = clock() - start
        _, said = process.communicate()
    if process.returncode:
        last = said.decode(errors="replace").strip().splitlines()[-1:]
        raise InvalidRequestError(
            f"fuel generate ended with {process.returncode}: {''.join(last)}",
            needed="its first token, whose time is measured",
            remedy="run fuel generate on this model and mend what it says",
        )
    return seconds


def _import_torch() -> float:
    ran = subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, text=True, check=True)
    return float(ran.stdout)
