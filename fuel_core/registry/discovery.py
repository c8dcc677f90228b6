"""Which plugins are installed, in which order they are met, and which of them are switched off."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from typing import Any, NoReturn, Protocol, TypeVar

import attrs

from fuel_core.contracts.errors import InvalidRequestError, PluginError
from fuel_core.contracts.markers import PROJECT
from fuel_core.registry.naming import nearest, normalize, one_line

GROUP = PROJECT
"""The entry-point group of plugins."""

CORE = "fuel-core"
DISABLE = "FUEL_DISABLE_PLUGINS"
STRICT = "FUEL_STRICT_PLUGINS"

T = TypeVar("T")


class Named(Protocol):
    """What is asked of an entry point's distribution."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...


class Entry(Protocol):
    """What is asked of an entry point; :class:`importlib.metadata.EntryPoint` has it."""

    @property
    def name(self) -> str: ...
    @property
    def value(self) -> str: ...
    @property
    def dist(self) -> Named | None: ...
    def load(self) -> Any: ...


@attrs.frozen(kw_only=True, eq=False)
class PluginInfo:
    """One plugin, sound or not.

    Attributes:
        name: of its entry point.
        distribution: that installs it, ``""`` if its metadata does not say.
        version: of the distribution.
        value: the module, or ``module:object``, that the entry point names.
        families: names of the families that it declares, refused ones included; empty if it failed
            before it could say.
        error: why it is refused, or the first failure of one of its hooks; None for a sound plugin.
        disabled: left out by ``FUEL_DISABLE_PLUGINS``. A name there that fits no plugin is listed too,
            disabled and with an error.
        warnings: what its author should mend although it works.
    """

    name: str
    distribution: str = ""
    version: str = ""
    value: str = ""
    families: tuple[str, ...] = ()
    error: Exception | None = None
    disabled: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Distribution and version, for messages."""
        return f"{self.distribution or f'the plugin {self.name!r}'} {self.version}".rstrip()

    @property
    def key(self) -> str:
        """What no other plugin shares."""
        return f"{self.name} = {self.value} ({self.distribution})"

    @property
    def names(self) -> frozenset[str]:
        """The names under which ``FUEL_DISABLE_PLUGINS`` knows it."""
        return frozenset(normalize(name) for name in (self.name, self.distribution) if name)


@attrs.frozen(eq=False)
class UnreadableEntry:
    """Stands for the plugins of a distribution whose ``entry_points.txt`` cannot be read."""

    dist: Named
    error: Exception
    value: str = ""

    @property
    def name(self) -> str:
        return describe(self.dist)[0]

    def load(self) -> NoReturn:
        raise PluginError(
            f"entry_points.txt cannot be read ({one_line(self.error)})",
            needed=f"lines 'name = module' under [{GROUP}]",
            remedy="reinstall the distribution",
        ) from self.error


def installed() -> Iterator[Entry]:
    """The entry points of every installed plugin, read one distribution at a time.

    ``importlib.metadata.entry_points`` fails as a whole if one distribution's file is damaged.
    """
    seen: set[str] = set()
    for distribution in metadata.distributions():
        entries = _entries(distribution)
        name = normalize(describe(distribution)[0]) if entries else ""
        if name not in seen:
            yield from entries
        # A distribution that comes later on sys.path is hidden by its namesake.
        seen |= {name} if name else set()


def _entries(distribution: metadata.Distribution) -> list[Entry]:
    try:
        if f"[{GROUP}]" not in (distribution.read_text("entry_points.txt") or ""):
            return []
        return [entry for entry in distribution.entry_points if entry.group == GROUP]
    except Exception as error:
        return [UnreadableEntry(distribution, error)]


def describe(distribution: Named | None) -> tuple[str, str]:
    """Name and version, empty where the metadata is missing or damaged."""
    try:
        return (distribution.name or "", distribution.version or "") if distribution else ("", "")
    except Exception:
        return "", ""


def ordered(entries: Iterable[Entry]) -> list[tuple[PluginInfo, Entry]]:
    """Each plugin once: the core's own first, then by distribution and name.

    The order decides which of two plugins with the same record is refused, so that no stranger can
    displace what the core brings. An entry point found twice is one plugin, the first found.
    """
    first: dict[tuple[str, str], tuple[PluginInfo, Entry]] = {}
    for entry in entries:
        name, version = describe(entry.dist)
        info = PluginInfo(name=entry.name, distribution=name, version=version, value=entry.value)
        first.setdefault((entry.name, entry.value), (info, entry))
    return sorted(first.values(), key=lambda pair: _rank(pair[0]))


def _rank(info: PluginInfo) -> tuple[bool, str, str, str]:
    distribution = normalize(info.distribution)
    return distribution != CORE, distribution, info.name, info.value


def is_strict(environ: Mapping[str, str]) -> bool:
    """Whether ``FUEL_STRICT_PLUGINS`` asks for the first failure to be raised at once."""
    value = environ.get(STRICT, "").strip()
    if value not in ("", "0", "1"):
        raise InvalidRequestError(
            f"{STRICT}={value!r}", needed="1 or 0", remedy="set it to 1 to raise a plugin's failure at once"
        )
    return value == "1"


def disabled_names(environ: Mapping[str, str]) -> dict[str, str]:
    """Normalized name -> name as written, of ``FUEL_DISABLE_PLUGINS``."""
    written = (name.strip() for name in environ.get(DISABLE, "").split(","))
    return {normalize(name): name for name in written if name}


def unknown_disabled(name: str, plugins: Iterable[PluginInfo]) -> PluginInfo:
    """The entry that reports a name in ``FUEL_DISABLE_PLUGINS`` that fits no plugin."""
    known = sorted(set().union(*(info.names for info in plugins)))
    close = nearest(name, known)
    error = PluginError(
        f"{DISABLE} names {name!r}, which is not installed",
        needed="the name of a plugin or of its distribution" + (f" (nearest: {close})" if close else ""),
        remedy="correct or drop it",
    )
    return PluginInfo(name=name, disabled=True, error=error)


def guarded(call: Callable[[], T]) -> T:
    """Run a plugin's code, so that whatever it raises is an Exception that the caller can keep.

    An interrupt from the keyboard is nobody's failure and passes.
    """
    try:
        return call()
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise PluginError(
            f"it raised {one_line(error)}",
            needed="a plugin that does not end the process",
            remedy="raise an Exception instead",
        ) from error
