"""Which kernels serve a device, and what a backend that cannot be loaded does."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support_checkpoints import write_directory

import fuel_core as fuel
from fuel_core import _native, builtin, registry
from fuel_core.contracts import KernelBackend
from fuel_core.contracts.errors import InvalidRequestError, PluginError
from fuel_core.engine.kernels import choose_kernels, default_threads
from fuel_core.kernels import ops, reference

CPU = torch.device("cpu")


def backend(name: str, load: Any, devices: tuple[str, ...] = ("cpu",)) -> KernelBackend:
    return KernelBackend(name=name, devices=devices, load=load)


REFERENCE = backend("reference", lambda: reference)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set the backends that are registered."""
    monkeypatch.delenv("FUEL_KERNELS", raising=False)

    def set_to(*backends: KernelBackend) -> None:
        monkeypatch.setattr(registry, "kernel_backends", lambda: {each.name: each for each in backends})

    return set_to


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


# --- the native kernels


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_directory(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def threads_put_back(native: ModuleType) -> None:
    """The number of threads is the process's; the fixture ``native`` leaves it as it was."""


def test_the_native_kernels_are_chosen_where_they_were_built(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, threads_put_back: None
) -> None:
    monkeypatch.delenv("FUEL_KERNELS")
    assert choose_kernels(CPU) == ("native", "the best installed for cpu")
    ops._installed.clear()
    fuel.load(tiny_model)
    assert ops.installed("cpu") == "native"
    assert ops.installed("cuda") == "reference"


def test_kernels_asked_for_win_over_the_environment(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, threads_put_back: None
) -> None:
    for named, asked in (("native", "reference"), ("reference", "native"), ("nonsense", "native")):
        monkeypatch.setenv("FUEL_KERNELS", named)
        fuel.load(tiny_model, kernels=asked)
        assert ops.installed("cpu") == asked
    assert choose_kernels(CPU, "native") == ("native", "asked for")


@pytest.mark.parametrize("kernels", ["nonsense", "Native", "native "])
def test_kernels_that_are_not_there_are_refused_with_those_that_are(kernels: str, tiny_model: Path) -> None:
    before = ops.installed("cpu")
    with pytest.raises(InvalidRequestError, match=r"kernels for cpu: reference, native") as caught:
        fuel.load(tiny_model, kernels=kernels)
    assert repr(kernels) in caught.value.given
    assert ops.installed("cpu") == before


def test_the_threads_asked_for_work_in_the_kernels_in_use(tiny_model: Path, threads_put_back: None) -> None:
    for threads in (1, 3, 2, None):
        count = threads or default_threads()
        fuel.load(tiny_model, kernels="native", threads=threads)
        assert (_native.threads(), torch.get_num_threads()) == (count, 1)
        fuel.load(tiny_model, kernels="reference", threads=threads)
        assert torch.get_num_threads() == count


@pytest.mark.parametrize("threads", [0, -1, True, False, "2", 5000, 1025, 2.0])
@pytest.mark.parametrize("kernels", ["native", "reference", None])
def test_numbers_of_threads_that_no_machine_has_are_refused(
    kernels: str | None, threads: Any, tiny_model: Path
) -> None:
    before = torch.get_num_threads(), _native.threads(), ops.installed("cpu")
    with pytest.raises(InvalidRequestError, match=r"an integer in \[1, 1024\]") as caught:
        fuel.load(tiny_model, kernels=kernels, threads=threads)
    assert caught.value.given == f"{threads!r} threads"
    assert (torch.get_num_threads(), _native.threads(), ops.installed("cpu")) == before


def test_the_native_kernels_are_listed_only_where_they_can_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [each.name for each in builtin.fuel_register_kernels()] == ["reference", "native"]
    monkeypatch.setattr(builtin, "find_spec", lambda name: None)
    assert [each.name for each in builtin.fuel_register_kernels()] == ["reference"]


WITHOUT = """
    import sys

    sys.modules["fuel_core._native"] = None  # as if it had not been built
    import fuel_core as fuel
    from fuel_core.contracts.errors import InvalidRequestError
    from fuel_core.kernels import ops

    loaded = fuel.load(sys.argv[1])
    [completion] = fuel.generate(loaded, ["one"], max_new_tokens=5)
    try:
        fuel.load(sys.argv[1], kernels="native")
    except InvalidRequestError as error:
        print(ops.installed("cpu"), len(completion.token_ids), error.needed)
"""


def test_without_them_all_is_computed_by_the_reference(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FUEL_KERNELS")
    code = [sys.executable, "-c", textwrap.dedent(WITHOUT), str(tiny_model)]
    ran = subprocess.run(code, capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stdout) == (0, "reference 5 kernels for cpu: reference\n"), ran.stderr
