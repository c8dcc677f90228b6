"""Fuel: the ragged tier over a pool, as ``fuel bench`` measures it."""

from __future__ import annotations

from collections.abc import Sequence

import protocol

import fuel_core
from fuel_core.engine import benchmark, load
from fuel_core.kernels import ops


class Fuel:
    """A model, and the sessions of the last question."""

    def __init__(self, path: str, threads: int) -> None:
        self._loaded = load(path, threads=threads)
        self._sessions: benchmark.Sessions | None = None
        self.about = {
            "version": fuel_core.__version__,
            "kernels": ops.installed(self._loaded.device),
            "kv": str(self._loaded.kv_dtype).removeprefix("torch."),
            "weight_bytes": benchmark.weight_bytes(self._loaded),
            "kv_bytes_per_token": benchmark.kv_bytes_per_token(self._loaded),
            **self._products(),
        }

    def _products(self) -> dict[str, int]:
        """Operations of a token's matrix products in a batch, and in a prompt, which has one head for all."""
        if self._loaded.source.is_file():  # quantized: its products are not those of float32
            return {}
        values = benchmark.weight_bytes(self._loaded) // self._loaded.dtype.itemsize
        rows, columns = self._loaded.model.parts.embedding.shape
        return {
            "operations_per_token": 2 * values,
            "operations_per_prompt_token": 2 * (values - rows * columns),
        }

    def decode(self, contexts: Sequence[int], steps: int) -> float:
        """See :class:`protocol.Peer`."""
        if self._sessions is None or (self._sessions.contexts, self._sessions.room) != (
            list(contexts),
            steps,
        ):
            self._sessions = None  # its pool's memory goes before the next one's comes
            self._sessions = benchmark.Sessions(self._loaded, contexts, steps)
        return self._sessions.decode(steps)

    def prefill(self, length: int) -> float:
        """See :class:`protocol.Peer`."""
        self._sessions = None
        return benchmark.prefill(self._loaded, length)

    def machine(self) -> dict[str, float]:
        """How fast this machine reads memory, and multiplies float32 matrices, with these threads."""
        return {"bytes_per_s": benchmark.read_bandwidth(), "operations_per_s": benchmark.product_rate()}


if __name__ == "__main__":
    protocol.main(Fuel)
