"""Which kernels serve a device, and what a backend that cannot be loaded does."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from fuel_core import registry
from fuel_core.contracts import KernelBackend
from fuel_core.contracts.errors import InvalidRequestError, PluginError
from fuel_core.engine.kernels import choose_kernels
from fuel_core.kernels import ops, reference

CPU = torch.device("cpu")


def backend(name: str, load: Any, devices: tuple[str, ...] = ("cpu",)) -> KernelBackend:
    return KernelBackend(name=name, devices=devices, load=load)


REFERENCE = backend("reference", lambda: reference)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Set the backends that are registered; the reference is back in use afterwards."""
    monkeypatch.delenv("FUEL_KERNELS", raising=False)

    def set_to(*backends: KernelBackend) -> None:
        monkeypatch.setattr(registry, "kernel_backends", lambda: {each.name: each for each in backends})

    yield set_to
    ops.install(REFERENCE, "cpu")


def doubling() -> ModuleType:
    module = ModuleType("doubling")
    module.silu_mul = lambda gate_up: 2 * reference.silu_mul(gate_up)  # type: ignore[attr-defined]
    return module


def test_a_plugins_kernels_win_over_the_cores_and_what_they_lack_stays_reference(installed: Any) -> None:
    installed(REFERENCE, backend("fast", doubling))
    assert choose_kernels(CPU)[0] == "fast"
    x = torch.ones(1, 4)
    assert torch.equal(ops.silu_mul(x), 2 * reference.silu_mul(x))
    assert torch.equal(ops.rms_norm(x, torch.ones(4), 1e-5), reference.rms_norm(x, torch.ones(4), 1e-5))
    assert ops.installed("cpu") == "fast"


def test_the_environment_names_the_kernels(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(REFERENCE, backend("fast", doubling))
    monkeypatch.setenv("FUEL_KERNELS", "reference")
    assert choose_kernels(CPU) == ("reference", "FUEL_KERNELS names them")
    monkeypatch.setenv("FUEL_KERNELS", "slow")
    with pytest.raises(InvalidRequestError, match=r"reference, fast"):
        choose_kernels(CPU)


def test_kernels_of_another_device_are_no_choice(installed: Any) -> None:
    installed(REFERENCE, backend("gpu", doubling, devices=("cuda",)))
    assert choose_kernels(CPU)[0] == "reference"
    installed()
    with pytest.raises(InvalidRequestError, match="no kernels for cpu"):
        choose_kernels(CPU)


@pytest.mark.parametrize("load", [lambda: 1 / 0, lambda: None])
def test_kernels_that_cannot_be_loaded_are_named_with_the_way_round_them(installed: Any, load: Any) -> None:
    installed(REFERENCE, backend("broken", load))
    with pytest.raises(PluginError, match=r"'broken' cannot be loaded.*FUEL_KERNELS=reference"):
        choose_kernels(CPU)
