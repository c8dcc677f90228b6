"""Every hook that a plugin may implement, on one page.

A plugin is a module named by an entry point of the group ``fuel``. It marks its functions with
``fuel_core.hookimpl`` and imports nothing heavy: no hook is called in the token loop.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from fuel_core.contracts.markers import hookspec

if TYPE_CHECKING:
    import click

    from fuel_core.contracts.family import ModelFamily
    from fuel_core.contracts.records import KernelBackend, WeightFormat


@hookspec
def fuel_register_models() -> Iterable[ModelFamily]:  # type: ignore[empty-body]
    """Return the model families that the plugin brings."""


@hookspec
def fuel_register_weight_formats() -> Iterable[WeightFormat]:  # type: ignore[empty-body]
    """Return the checkpoint formats that the plugin can open."""


@hookspec
def fuel_register_kernels() -> Iterable[KernelBackend]:  # type: ignore[empty-body]
    """Return the kernel backends that the plugin brings."""


@hookspec(firstresult=True)
def fuel_resolve_model(ref: str) -> Path | None:
    """Turn a model reference into a file or directory, fetching it if need be.

    Return None for a reference of another kind; the first plugin that answers decides.
    """


@hookspec
def fuel_register_commands(cli: click.Group) -> None:
    """Add commands to the ``fuel`` command line."""
