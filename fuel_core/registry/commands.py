"""Lets plugins add commands, each alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pluggy import HookImpl

from fuel_core.contracts.errors import PluginError
from fuel_core.registry.catalogue import Catalogue
from fuel_core.registry.discovery import guarded
from fuel_core.registry.hooks import call, implementations

if TYPE_CHECKING:
    import click


def add_commands(catalogue: Catalogue, cli: click.Group) -> None:
    """Call every plugin's ``fuel_register_commands``; one that fails leaves no command behind."""
    for implementation in implementations(catalogue.manager, "fuel_register_commands"):
        before = dict(cli.commands)
        try:
            _add(implementation, cli, before)
        except Exception as error:
            cli.commands.clear()
            cli.commands.update(before)
            catalogue.fail(implementation.plugin_name, error)


def _add(implementation: HookImpl, cli: click.Group, before: dict[str, click.Command]) -> None:
    guarded(lambda: call(implementation, cli=cli))
    replaced = [name for name, command in before.items() if cli.commands.get(name) is not command]
    if replaced:
        raise PluginError(
            f"it replaces or removes the command {', '.join(replaced)}",
            needed="names that are not taken",
            remedy="rename the plugin's command",
            commands=tuple(replaced),
        )
