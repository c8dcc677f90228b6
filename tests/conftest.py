"""Fixtures that several test files share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Idle OpenMP threads that spin starve whatever else runs on a small machine. Set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real SmolLM2-135M-Instruct Q4_1, fetched once into the user cache."""
    from fuel_core.registry import resolve

    return resolve("smollm2")
