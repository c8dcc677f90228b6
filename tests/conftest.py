"""Fixtures that several test files share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

# Idle OpenMP threads that spin starve whatever else runs on a small machine. Set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Most tests compare to the last bits, which a byte per activation would hide; those of the native kernels ask
# for them by name.
os.environ.setdefault("FUEL_KERNELS", "reference")


@pytest.fixture(autouse=True)
def kernels_put_back() -> Iterator[None]:
    """Which kernels serve a device is known to the whole process: a test leaves it as it was."""
    name = "fuel_core.kernels.ops"  # looked up, since many a test needs no torch
    before = dict(sys.modules[name]._installed) if name in sys.modules else {}
    yield
    if name in sys.modules:
        sys.modules[name]._installed.clear()
        sys.modules[name]._installed.update(before)


@pytest.fixture
def native() -> Iterator[ModuleType]:
    """The native kernels, in use on the CPU for this test; instruction set and threads are put back."""
    import torch

    from fuel_core import _native
    from fuel_core.contracts import KernelBackend
    from fuel_core.kernels import native, ops

    chosen, threads, of_torch = _native.chosen(), _native.threads(), torch.get_num_threads()
    ops.install(KernelBackend(name="native", devices=("cpu",), load=lambda: native), "cpu")
    yield native
    _native.use(chosen)
    _native.set_threads(threads)
    torch.set_num_threads(of_torch)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real SmolLM2-135M-Instruct Q4_1, fetched once into the user cache."""
    from fuel_core.registry import resolve

    return resolve("smollm2")
