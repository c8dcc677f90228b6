"""Which kernels serve a device."""

from __future__ import annotations

import os

import torch

from fuel_core import registry
from fuel_core.contracts import KernelBackend
from fuel_core.contracts.errors import InvalidRequestError, PluginError
from fuel_core.engine.machine import MachineFiles, available_cores
from fuel_core.kernels import ops
from fuel_core.registry.naming import one_line

_MOST_THREADS = 1024


def choose_kernels(
    device: torch.device, kernels: str | None = None, threads: int | None = None
) -> tuple[str, str]:
    """Install the kernels of a device: those asked for, or named by ``FUEL_KERNELS``, else the last there.

    Args:
        device: where the model computes.
        kernels: their name.
        threads: how many CPU threads work; where None, :func:`default_threads`.

    Returns:
        Their name, and why they were chosen.

    Raises:
        InvalidRequestError: kernels that are not there or not for this device, or less than one thread.
        PluginError: they cannot be loaded.
    """
    check_threads(threads)
    if not isinstance(kernels, str | None):
        raise InvalidRequestError(f"kernels {kernels!r}", needed="a name, or None", remedy="see fuel doctor")
    serving = {name: b for name, b in registry.kernel_backends().items() if device.type in b.devices}
    if kernels:
        backend, reason = _named(kernels, serving, device, f"kernels {kernels!r}"), "asked for"
    elif wanted := os.environ.get("FUEL_KERNELS"):
        backend = _named(wanted, serving, device, f"FUEL_KERNELS={wanted}")
        reason = "FUEL_KERNELS names them"
    else:
        if not serving:
            raise InvalidRequestError(
                f"no kernels for {device.type}",
                needed="the core's own plugin, which brings them",
                remedy="take core out of FUEL_DISABLE_PLUGINS",
            )
        # Core's own come first, so that a plugin's win over them.
        backend, reason = list(serving.values())[-1], f"the best installed for {device.type}"
        if device.type == "cpu" and "native" not in serving:
            reason += (
                "; the native ones, many times faster, were not built: install again with a C++ compiler"
            )
    try:
        ops.install(backend, device.type)
    except Exception as error:  # a plugin's own code: any kind may come out of it
        raise PluginError(
            f"the kernels {backend.name!r} cannot be loaded: {one_line(error)}",
            needed="a backend whose load() returns a module",
            remedy="set FUEL_KERNELS=reference, or mend or disable the plugin that brings them",
        ) from error
    ops.set_threads(device, threads or default_threads())
    return backend.name, reason


def default_threads() -> int:
    """``OMP_NUM_THREADS`` where it is a number, as PyTorch reads it, else the cores that may be used."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdecimal() and 1 <= int(asked) <= _MOST_THREADS:
        return int(asked)
    return available_cores(MachineFiles())


def check_threads(threads: int | None) -> None:
    """Refuse a number of threads that no machine has.

    Raises:
        InvalidRequestError: it is not in [1, 1024].
    """
    whole = isinstance(threads, int) and not isinstance(threads, bool)
    if threads is not None and not (whole and 1 <= threads <= _MOST_THREADS):
        raise InvalidRequestError(
            f"{threads!r} threads",
            needed=f"an integer in [1, {_MOST_THREADS}]",
            remedy="leave it out, for one on each core",
        )


def _named(wanted: str, serving: dict[str, KernelBackend], device: torch.device, given: str) -> KernelBackend:
    if wanted not in serving:
        raise InvalidRequestError(
            given,
            needed=f"kernels for {device.type}: {', '.join(serving)}",
            remedy="choose one of these, or install the plugin that brings them",
        )
    return serving[wanted]
