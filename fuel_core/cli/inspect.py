"""``fuel plugins``, ``models`` and ``doctor``: what is installed, and whether it works."""

from __future__ import annotations

import os
import platform
from typing import Any

import click

from fuel_core import __version__, registry
from fuel_core.cli.console import echo_json, echo_table
from fuel_core.contracts import FuelError
from fuel_core.registry import references
from fuel_core.registry.cache import cache_dir
from fuel_core.registry.naming import one_line

_NO_KERNELS = "none: "

as_json = click.option("--json", "as_json", is_flag=True, help="One JSON document.")


@click.command()
@as_json
def plugins(as_json: bool) -> None:
    """List the installed plugins, the broken and the disabled too."""
    found = [_plugin(info) for info in registry.plugins()]
    if as_json:
        echo_json(found)
        return
    rows = [
        [p["name"], f"{p['distribution']} {p['version']}", ", ".join(p["families"]), _state(p)] for p in found
    ]
    echo_table(["plugin", "distribution", "families", "state"], rows)


def _plugin(info: registry.PluginInfo) -> dict[str, Any]:
    error = None if info.error is None else one_line(info.error)
    return {
        "name": info.name,
        "distribution": info.distribution,
        "version": info.version,
        "families": list(info.families),
        "disabled": info.disabled,
        "error": error,
        "warnings": list(info.warnings),
    }


def _state(plugin: dict[str, Any]) -> str:
    state = plugin["error"] or ("disabled" if plugin["disabled"] else "ok")
    return "; ".join([state, *plugin["warnings"]])


@click.command()
@as_json
def models(as_json: bool) -> None:
    """List the model families, and the aliases of models that can be pulled."""
    families = [
        {
            "name": family.name,
            "architectures": list(family.architectures),
            "gguf_architectures": list(family.gguf_architectures),
            "tiers": list(family.capabilities.tiers),
            "dtypes": list(family.capabilities.dtypes),
            "devices": list(family.capabilities.devices),
        }
        for family in registry.families().values()
    ]
    if as_json:
        echo_json({"families": families, "aliases": dict(references.ALIASES)})
        return
    rows = [
        [f.name, ", ".join(f.architectures), ", ".join(f.gguf_architectures), ", ".join(f.capabilities.tiers)]
        for f in registry.families().values()
    ]
    echo_table(["family", "Hugging Face architectures", "GGUF architectures", "tiers"], rows)
    click.echo()
    echo_table(["alias", "stands for"], [list(pair) for pair in references.ALIASES.items()])


@click.command()
@as_json
def doctor(as_json: bool) -> None:
    """Say what Fuel runs on, which kernels it has chosen and why, and what is broken.

    The exit code is 1 if anything is.
    """
    report = {**_machine(), "plugins": [_plugin(info) for info in registry.plugins()]}
    report["broken"] = broken = _broken(report)
    echo_json(report) if as_json else _echo(report)
    if broken:
        click.echo(f"fuel: broken: {'; '.join(broken)}", err=True)
        raise SystemExit(1)


def _broken(report: dict[str, Any]) -> list[str]:
    kernels = [
        f"kernels for {device}: {chosen}"
        for device, chosen in report["kernels"].items()
        if chosen.startswith(_NO_KERNELS)
    ]
    return kernels + [
        f"{_label(plugin)}: {plugin['error']}" for plugin in report["plugins"] if plugin["error"]
    ]


def _echo(report: dict[str, Any]) -> None:
    kernels = ", ".join(f"{device}: {chosen}" for device, chosen in report["kernels"].items())
    shown = {**report, "gpu": report["gpu"] or "none", "kernels": kernels}
    for key, value in shown.items():
        if key not in ("plugins", "broken"):
            click.echo(f"{key.replace('_', ' '):<14} {value}")
    for plugin in report["plugins"]:
        click.echo(f"{'plugin':<14} {_label(plugin)}: {_state(plugin)}")


def _label(plugin: dict[str, Any]) -> str:
    return f"{plugin['distribution'] or plugin['name']} {plugin['version']}".rstrip()


def _machine() -> dict[str, Any]:
    import torch

    from fuel_core.engine.kernels import default_threads

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    kernels = {device: _kernels(device) for device in ["cpu", *(["cuda"] if gpu else [])]}
    return {
        "fuel": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "threads": default_threads(),
        "cores": os.cpu_count(),
        "gpu": gpu,
        "kernels": kernels,
        "cache": str(cache_dir()),
    }


def _kernels(device: str) -> str:
    import torch

    from fuel_core.engine.kernels import choose_kernels

    try:
        name, reason = choose_kernels(torch.device(device))
    except FuelError as error:
        return _NO_KERNELS + one_line(error)
    return f"{name} with {_instruction_set()} ({reason})" if name == "native" else f"{name} ({reason})"


def _instruction_set() -> str:
    from fuel_core import _native

    return _native.chosen()
