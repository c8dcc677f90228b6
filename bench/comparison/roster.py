"""Who is compared, and where each finds its environment and its weights."""

from __future__ import annotations

import sys
from pathlib import Path

import attrs

WORKERS = Path(__file__).parents[1] / "peers"


class Absent(Exception):  # noqa: N818 (no fault of the comparison, which goes on)
    """Why someone cannot take part, or answer."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@attrs.frozen
class Participant:
    """Fuel or a peer.

    Attributes:
        name: for the table.
        worker: its script in ``bench/peers``.
        environment: its folder of those that ``bench/peers.sh`` makes; None is the Python that runs this.
        weights: ``gguf`` or ``float32``.
        rival: whether Fuel is compared with it.
    """

    name: str
    worker: str
    environment: str | None
    weights: str
    rival: bool = True

    def command(self, peers: Path, weights: dict[str, Path | Absent], threads: int) -> list[str]:
        """What starts its worker.

        Raises:
            Absent: its environment or its weights are not there.
        """
        python = Path(sys.executable) if self.environment is None else peers / self.environment / "bin/python"
        if not python.exists():
            raise Absent(f"no environment {self.environment} in {peers}: run bench/peers.sh {peers}")
        model = weights[self.weights]
        if isinstance(model, Absent):
            raise model
        return [str(python), str(WORKERS / self.worker), "--model", str(model), "--threads", str(threads)]


FUEL = Participant("Fuel", "fuel_worker.py", None, "gguf", rival=False)
FUEL_FLOAT = Participant("Fuel float32", "fuel_worker.py", None, "float32", rival=False)
ROSTER = (
    FUEL,
    FUEL_FLOAT,
    Participant("llama.cpp", "llama_cpp_worker.py", "llama", "gguf"),
    Participant("OpenVINO GenAI", "openvino_worker.py", "openvino", "gguf"),
    Participant("vLLM", "vllm_worker.py", "vllm", "float32"),
    Participant("Transformers", "transformers_worker.py", "transformers", "float32"),
)
