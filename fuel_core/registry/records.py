"""Collects what a plugin registers, and refuses records that are not what the contracts say."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, TypeAlias

import attrs
from pluggy import PluginManager

from fuel_core.contracts.errors import PluginError
from fuel_core.contracts.family import API_VERSION, Capabilities, ModelFamily
from fuel_core.contracts.records import KernelBackend, WeightFormat
from fuel_core.registry.discovery import CORE, PluginInfo, guarded
from fuel_core.registry.hooks import call, implementations
from fuel_core.registry.naming import one_line

Record: TypeAlias = ModelFamily | WeightFormat | KernelBackend


class Kind(str, Enum):
    """The kinds of names that no two plugins may share."""

    FAMILY = "family"
    ARCHITECTURE = "architecture"
    GGUF_ARCHITECTURE = "GGUF architecture"
    FORMAT = "weight format"
    BACKEND = "kernel backend"


Claim: TypeAlias = tuple[Kind, str]

HOOK_OF: Mapping[type[Record], str] = {
    ModelFamily: "fuel_register_models",
    WeightFormat: "fuel_register_weight_formats",
    KernelBackend: "fuel_register_kernels",
}

_CALLABLES = {ModelFamily: ("load", "tiny"), WeightFormat: ("matches", "open"), KernelBackend: ("load",)}
_NAME_TUPLES = {
    ModelFamily: ("architectures", "gguf_architectures"),
    WeightFormat: (),
    KernelBackend: ("devices",),
}


@attrs.frozen(eq=False)
class Records:
    """Everything that one plugin registers."""

    records: tuple[Record, ...]

    @property
    def families(self) -> tuple[ModelFamily, ...]:
        """Its model families."""
        return tuple(record for record in self.records if isinstance(record, ModelFamily))

    def claims(self) -> Iterator[tuple[Claim, Record]]:
        """Every name that it takes, with the record that takes it."""
        for record in self.records:
            yield from ((claim, record) for claim in claims_of(record))


def claims_of(record: Record) -> list[Claim]:
    """The names that a record takes."""
    if isinstance(record, WeightFormat):
        return [(Kind.FORMAT, record.name)]
    if isinstance(record, KernelBackend):
        return [(Kind.BACKEND, record.name)]
    huggingface = [(Kind.ARCHITECTURE, name) for name in record.architectures]
    gguf = [(Kind.GGUF_ARCHITECTURE, name) for name in record.gguf_architectures]
    return [(Kind.FAMILY, record.name), *huggingface, *gguf]


def collect(manager: PluginManager) -> Records:
    """Call the registering hooks of a manager's plugins, one implementation at a time.

    Raises:
        PluginError: a hook that raises (from its error) or returns anything but records of its kind.
    """
    pairs = [
        (record, hook, each) for record, hook in HOOK_OF.items() for each in implementations(manager, hook)
    ]
    return Records(tuple(made for record, hook, each in pairs for made in _made_by(each, hook, record)))


def _made_by(implementation: Any, hook: str, record_type: type[Record]) -> list[Record]:
    try:
        # Drawn inside the guard: the hook may be a generator.
        records = guarded(lambda: _listed(call(implementation)))
    except Exception as error:
        raise PluginError(
            f"{hook} raised {one_line(error)}", needed="a list of records", remedy="mend the plugin"
        ) from error
    if records is None or not all(isinstance(record, record_type) for record in records):
        found = "something else" if records is None else _types(records)
        raise PluginError(
            f"{hook} returned {found}",
            needed=f"a list of {record_type.__name__}",
            remedy="return a list, an empty one if there is nothing to register",
        )
    for record in records:
        _check_fields(record, record_type)
    return records


def _listed(result: object) -> list[Any] | None:
    return list(result) if isinstance(result, Iterable) and not isinstance(result, str | bytes) else None


def _types(records: Iterable[object]) -> str:
    return f"a list with {', '.join(sorted({type(record).__name__ for record in records}))}"


def _check_fields(record: Any, record_type: type[Record]) -> None:
    faults = [] if _is_name(record.name) else [f"name={record.name!r} is no name"]
    faults += [
        f"{field} cannot be called"
        for field in _CALLABLES[record_type]
        if not callable(getattr(record, field))
    ]
    for field in _NAME_TUPLES[record_type]:
        value = getattr(record, field)
        if not isinstance(value, tuple) or not all(map(_is_name, value)):
            faults.append(f"{field}={value!r} is no tuple of names")
    if record_type is ModelFamily and not isinstance(record.capabilities, Capabilities):
        faults.append(f"capabilities={record.capabilities!r} are no Capabilities")
    if faults:
        raise PluginError(
            f"{record_type.__name__} {record.name!r}: {'; '.join(faults)}",
            needed=f"the field types of {record_type.__name__}",
            remedy="correct the record in the plugin",
        )


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def check_unique(records: Records) -> None:
    """Refuse a plugin that takes one name twice.

    Raises:
        PluginError: naming what is taken twice.
    """
    counts = Counter(claim for claim, _ in records.claims())
    twice = [f"{kind.value} {name!r}" for (kind, name), count in counts.items() if count > 1]
    if twice:
        raise PluginError(
            f"it registers {', '.join(twice)} twice", needed="each name once", remedy="drop one of them"
        )


def check_api_version(info: PluginInfo, family: ModelFamily, core: str = API_VERSION) -> None:
    """Refuse a family that was written for contracts that this core does not have.

    The same major and a minor that is no newer are accepted: a newer minor may rely on what this
    core lacks.

    Raises:
        PluginError: saying which distribution to upgrade.
    """
    given = f"family {family.name!r} was written for API {family.api_version!r}"
    version = _parsed(family.api_version)
    own = _parsed(core)
    if version is None or own is None:
        raise PluginError(given, needed="MAJOR.MINOR, such as '1.0'", remedy=f"mend {info.label}")
    if version[0] == own[0] and version[1] <= own[1]:
        return
    upgrade = info.distribution if version < own else CORE
    raise PluginError(
        given,
        needed=f"API {core}, which this {CORE} has, or an older minor version of it",
        remedy=f"upgrade {upgrade or info.label} (pip install --upgrade {upgrade})",
        family=family.name,
        api_version=family.api_version,
        core_api_version=core,
        upgrade=upgrade,
    )


def _parsed(version: object) -> tuple[int, int] | None:
    match = re.fullmatch(r"([0-9]{1,9})\.([0-9]{1,9})", version) if isinstance(version, str) else None
    return (int(match[1]), int(match[2])) if match else None
