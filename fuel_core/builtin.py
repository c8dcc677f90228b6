"""What the core itself brings, by the same hooks as any plugin."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from fuel_core.contracts import KernelBackend, WeightFormat, hookimpl
from fuel_core.registry import references
from fuel_core.weights.formats import GGUF, SAFETENSORS


@hookimpl
def fuel_register_weight_formats() -> list[WeightFormat]:
    """GGUF files and Hugging Face directories."""
    return [GGUF, SAFETENSORS]


def _reference() -> ModuleType:
    from fuel_core.kernels import reference

    return reference


def _native() -> ModuleType:
    from fuel_core.kernels import native

    return native


@hookimpl
def fuel_register_kernels() -> list[KernelBackend]:
    """Plain PyTorch on any device, and the native kernels where they were built."""
    kernels = [KernelBackend(name="reference", devices=("cpu", "cuda", "mps", "xpu"), load=_reference)]
    if find_spec("fuel_core._native") is not None:
        kernels.append(KernelBackend(name="native", devices=("cpu",), load=_native))
    return kernels


@hookimpl
def fuel_resolve_model(ref: str) -> Path | None:
    """Paths, aliases, ``pypi:`` and ``hf:``."""
    return references.resolve_model(ref)
