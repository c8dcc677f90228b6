"""Which kernels serve a device."""

from __future__ import annotations

import os

import torch

from fuel_core import registry
from fuel_core.contracts import KernelBackend
from fuel_core.contracts.errors import InvalidRequestError, PluginError
from fuel_core.kernels import ops
from fuel_core.registry.naming import one_line


def choose_kernels(device: torch.device) -> tuple[str, str]:
    """Install the kernels for a device: those that ``FUEL_KERNELS`` names, else the last that serve it.

    Returns:
        Their name, and why they were chosen.

    Raises:
        InvalidRequestError: ``FUEL_KERNELS`` names kernels that are not there, or not for this device.
    """
    serving = {name: b for name, b in registry.kernel_backends().items() if device.type in b.devices}
    wanted = os.environ.get("FUEL_KERNELS")
    if wanted:
        backend, reason = _named(wanted, serving, device), "FUEL_KERNELS names them"
    else:
        if not serving:
            raise InvalidRequestError(
                f"no kernels for {device.type}",
                needed="the core's own plugin, which brings them",
                remedy="take core out of FUEL_DISABLE_PLUGINS",
            )
        # Core's own come first, so that a plugin's win over them.
        backend, reason = list(serving.values())[-1], f"the best installed for {device.type}"
    try:
        ops.install(backend, device.type)
    except Exception as error:  # a plugin's own code: any kind may come out of it
        raise PluginError(
            f"the kernels {backend.name!r} cannot be loaded: {one_line(error)}",
            needed="a backend whose load() returns a module",
            remedy="set FUEL_KERNELS=reference, or mend or disable the plugin that brings them",
        ) from error
    return backend.name, reason


def _named(wanted: str, serving: dict[str, KernelBackend], device: torch.device) -> KernelBackend:
    if wanted not in serving:
        raise InvalidRequestError(
            f"FUEL_KERNELS={wanted}",
            needed=f"kernels for {device.type}: {', '.join(serving)}",
            remedy="unset it, or install the plugin that brings them",
        )
    return serving[wanted]
