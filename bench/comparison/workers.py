"""A worker process: started once, asked line by line, and what became of it."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from comparison.roster import Absent


class Worker:
    """Starts a worker and waits until it has loaded. It is one that ``bench/peers/protocol.py`` describes.

    Args:
        command: what to run.
        threads: as OMP_NUM_THREADS, for libraries that look there.
        log: where its standard error goes.
        patience: seconds until it must have loaded, and to each answer.

    Attributes:
        about: what it says of itself.

    Raises:
        Absent: it did not load.
    """

    def __init__(self, command: Sequence[str], *, threads: int, log: Path, patience: float) -> None:
        self._log, self._patience = log, patience
        env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=env
            )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True).start()
        self.about: dict[str, Any] = {}
        try:
            ready = self._answer()
        except BaseException:
            self.close()
            raise
        self.about = {**ready["about"], "load_s": round(ready["load_s"], 2)}

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Its answer.

        Raises:
            Absent: it says that it cannot, has died, or takes too long, after which it is gone.
        """
        if self._process.poll() is not None or self._process.stdin is None:
            raise self._died()
        try:
            print(json.dumps(question), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._died() from None
        return self._answer()

    def close(self) -> None:
        """End it. What it still does is of no use, and may take long."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _listen(self, answers: TextIO) -> None:
        try:
            for line in answers:
                self._lines.put(line)
        except ValueError:  # closed while it was read
            pass
        self._lines.put(None)

    def _answer(self) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=self._patience)
        except queue.Empty:
            self._process.kill()
            raise Absent(f"no answer within {self._patience:.0f} s") from None
        if line is None:
            raise self._died()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Absent(answer["error"])
        return answer

    def _died(self) -> Absent:
        code = self._process.wait()
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        last = lines[-1].strip() if lines else "without a word"
        return Absent(f"it ended with {code}: {last[:300]}")
