"""Admits plugins one by one and keeps what the sound ones register."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import attrs
from pluggy import PluginManager

from fuel_core.contracts.errors import PluginError
from fuel_core.registry.discovery import DISABLE, Entry, PluginInfo, guarded
from fuel_core.registry.hooks import new_manager, vet_plugin
from fuel_core.registry.naming import one_line
from fuel_core.registry.records import Claim, Record, Records, check_api_version, check_unique, collect

_HEAVY = "torch"


@attrs.define(eq=False)
class Catalogue:
    """The plugins that were met, and the records of those that were admitted.

    Attributes:
        strict: raise a plugin's failure instead of keeping it.
        manager: holds every admitted plugin, under its key, and no other.
        plugins: by key, in the order in which they were met.
        records: who holds a name.
        owners: the key of the plugin that registered it.
        refusals: names that a refused plugin declares -> its key.
        contested: names of an admitted plugin that another was refused for -> that one's key.
    """

    strict: bool
    manager: PluginManager = attrs.field(factory=new_manager)
    plugins: dict[str, PluginInfo] = attrs.field(factory=dict)
    records: dict[Claim, Record] = attrs.field(factory=dict)
    owners: dict[Claim, str] = attrs.field(factory=dict)
    refusals: dict[Claim, str] = attrs.field(factory=dict)
    contested: dict[Claim, str] = attrs.field(factory=dict)

    def admit(self, info: PluginInfo, entry: Entry) -> None:
        """Load a plugin and take its records: all of them, or on any failure none."""
        self.plugins[info.key] = info
        try:
            plugin = self._load(info, entry)
            records = collect(vet_plugin(plugin, info.key))
            self._declare(info, records)
            self._take(info, plugin, records)
        except Exception as error:
            self.fail(info.key, error)

    def skip(self, info: PluginInfo) -> None:
        """List a plugin that is switched off, without loading it."""
        self.plugins[info.key] = attrs.evolve(info, disabled=True)
        if self.strict and info.error is not None:
            raise info.error

    def fail(self, key: str, error: Exception) -> None:
        """Keep a plugin's first failure, or raise it where plugins are strict."""
        info = self.plugins[key]
        if self.strict:
            raise PluginError(
                f"{info.label} is broken: {one_line(error)}",
                needed="only sound plugins, since FUEL_STRICT_PLUGINS is set",
                remedy=f"mend or uninstall it, or set {DISABLE}={info.name}",
                plugin=info,
            ) from error
        self.plugins[key] = attrs.evolve(info, error=info.error or error)

    def owner(self, claim: Claim) -> str:
        """Distribution and version that registered a name, for messages."""
        return self.plugins[self.owners[claim]].label if claim in self.owners else "no installed plugin"

    def _load(self, info: PluginInfo, entry: Entry) -> Any:
        was_loaded = _HEAVY in sys.modules
        plugin = guarded(entry.load)
        if not was_loaded and _HEAVY in sys.modules:
            warning = f"its entry module imports {_HEAVY}: import it inside load() and tiny()"
            self._warn(info.key, warning)
        return plugin

    def _declare(self, info: PluginInfo, records: Records) -> None:
        names = tuple(family.name for family in records.families)
        self.plugins[info.key] = attrs.evolve(self.plugins[info.key], families=names)
        # Taken out again below if the plugin is admitted.
        for claim, _ in records.claims():
            self.refusals.setdefault(claim, info.key)

    def _take(self, info: PluginInfo, plugin: object, records: Records) -> None:
        for family in records.families:
            check_api_version(info, family)
        check_unique(records)
        self._refuse_taken(info, records)
        self._register(plugin, info.key)
        for claim, record in records.claims():
            self.records[claim], self.owners[claim] = record, info.key
            self.refusals.pop(claim, None)

    def _refuse_taken(self, info: PluginInfo, records: Records) -> None:
        taken = [claim for claim, _ in records.claims() if claim in self.owners]
        if taken:
            self.contested.update(dict.fromkeys(taken, info.key))
            names = ", ".join(f"{kind.value} {name!r}" for kind, name in taken)
            owners = sorted({self.owners[claim] for claim in taken})
            for key in owners:
                self._warn(key, f"{info.label} registers {names} too, so neither is used for it")
            raise self._duplicate(names, info, owners)

    def _warn(self, key: str, warning: str) -> None:
        known = self.plugins[key]
        self.plugins[key] = attrs.evolve(known, warnings=(*known.warnings, warning))

    def _duplicate(self, names: str, info: PluginInfo, keys: Iterable[str]) -> PluginError:
        claimants = [info, *(self.plugins[key] for key in keys)]
        distributions = tuple(each.distribution for each in claimants)
        distinct = len(set(distributions)) == len(claimants)
        labels = " and ".join(each.label if distinct else each.key for each in claimants)
        choices = distributions if distinct else tuple(each.name for each in claimants)
        return PluginError(
            f"{labels} both register {names}",
            needed="one plugin for each name",
            remedy=f"uninstall one of them, or set {DISABLE} to one of {', '.join(choices)}",
            distributions=distributions,
        )

    def _register(self, plugin: object, key: str) -> None:
        if self.manager.is_registered(plugin):
            raise PluginError(
                f"{self.manager.get_name(plugin)} registers the same module or object",
                needed="one entry point for each",
                remedy="drop one of the entry points",
            )
        self.manager.register(plugin, key)
