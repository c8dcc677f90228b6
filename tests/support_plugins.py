"""Plugins made up for tests: entry points without an installation, and small sound models."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs

from fuel_core.contracts import (
    API_VERSION,
    Capabilities,
    DecodeModel,
    KernelBackend,
    KeyValue,
    ModelFamily,
    PagedDecodeModel,
    RaggedDecodeModel,
    WeightFormat,
    hookimpl,
)
from fuel_core.registry import PluginInfo, Registry


@attrs.frozen
class FakeDistribution:
    """What an entry point's distribution says of itself."""

    name: str
    version: str = "1.0"


@attrs.frozen(eq=False)
class FakeEntry:
    """An entry point; loading it gives the plugin, or calls ``load_by``."""

    name: str
    value: str
    dist: FakeDistribution | None
    load_by: Callable[[], Any]

    def load(self) -> Any:
        return self.load_by()


def entry(
    plugin: object,
    name: str = "toy",
    *,
    distribution: str | None = None,
    version: str = "1.0",
    value: str = "",
) -> FakeEntry:
    """An entry point for a plugin, for an exception that importing it raises, or for a function to call."""
    dist = FakeDistribution(distribution or f"fuel-plugin-{name}", version)
    value = value or f"{dist.name.replace('-', '_')}:{name}"
    if isinstance(plugin, BaseException):
        return FakeEntry(name, value, dist, lambda: _raise(plugin))
    is_function = callable(plugin) and not isinstance(plugin, ModuleType | type)
    return FakeEntry(name, value, dist, plugin if is_function else lambda: plugin)


def _raise(error: BaseException) -> Any:
    raise error


def module(name: str = "toy", **functions: Any) -> ModuleType:
    """A module with these attributes, as they are."""
    made = ModuleType(name)
    vars(made).update(functions)
    return made


def plugin(
    *families: ModelFamily,
    formats: Iterable[WeightFormat] = (),
    backends: Iterable[KernelBackend] = (),
    **functions: Callable[..., Any],
) -> ModuleType:
    """A sound plugin that registers these records; further functions are marked as hooks."""
    hooks: dict[str, Callable[..., Any]] = {
        "fuel_register_models": lambda: list(families),
        "fuel_register_weight_formats": lambda: list(formats),
        "fuel_register_kernels": lambda: list(backends),
        **functions,
    }
    return module(**{name: hookimpl(function) for name, function in hooks.items()})


def registry(*entries: FakeEntry, **environ: str) -> Registry:
    """A registry of these entry points; the keywords are its environment."""
    return Registry(entries, environ)


def info_of(made: Registry, name: str) -> PluginInfo:
    """The plugin with this entry point name."""
    (found,) = (info for info in made.plugins() if info.name == name)
    return found


class CoreModel(DecodeModel):
    """A sound model of the core tier, with no weights."""

    @hookimpl
    def n_layers(self):
        return 1

    @hookimpl
    def vocab_size(self):
        return 4

    @hookimpl
    def max_context(self):
        return None

    @hookimpl
    def layer_state_specs(self):
        return [KeyValue(1, 2)]

    @hookimpl
    def forward_with_kv_context_persistent(self, tokens, cache, session):
        return [0.0] * 4


class BatchedArm:
    """The batched arm, to be mixed in."""

    @hookimpl
    def supports_batched_decode(self):
        return True

    @hookimpl
    def build_batched_decode_logits(self, caches, last_tokens, device, dtype):
        return [[0.0] * 4 for _ in caches]


class PagedMethods:
    """The methods of the paged tier, to be mixed in."""

    @hookimpl
    def forward_paged_step(self, token, pool, session):
        return [0.0] * 4

    @hookimpl
    def forward_paged_step_batched(self, tokens, pool, sessions):
        return [[0.0] * 4 for _ in tokens]

    @hookimpl
    def forward_paged_step_persistent(self, token, pool, session, max_blocks_cap, plan, decode_session):
        return [0.0] * 4


class BatchedModel(BatchedArm, CoreModel):
    """A sound model with the batched arm."""


class PagedModel(PagedMethods, CoreModel, PagedDecodeModel):
    """A sound model of the paged tier."""


class RaggedModel(BatchedArm, PagedMethods, CoreModel, RaggedDecodeModel):
    """A sound model of every tier."""

    @hookimpl
    def forward_paged_ragged(self, batch):
        return [[0.0] * 4 for _ in batch.sessions]


def family(name: str = "toy", *, model: Callable[[], Any] = CoreModel, tiers=("decode",), **fields: Any):
    """A family whose loader and whose tiny model are made by ``model``."""
    claims = {key: fields.pop(key) for key in ("dtypes", "devices", "weight_formats") if key in fields}
    defaults = {
        "architectures": (f"{name.title()}ForCausalLM",),
        "capabilities": Capabilities(tiers=tiers, **claims),
        "api_version": API_VERSION,
        "load": lambda checkpoint, *, device, dtype: model(),
        "tiny": lambda seed=0, **overrides: model(),
    }
    return ModelFamily(name=name, **{**defaults, **fields})


@attrs.frozen
class FakeCheckpoint:
    """As much of a checkpoint as a look-up reads."""

    architecture: str = "ToyForCausalLM"
    format: str = "safetensors"
    source: str = "/models/toy"


def weight_format(name: str, *, suffix: str = ".odd", opened: object = None, **fields: Any) -> WeightFormat:
    """A format that knows its files by their suffix and opens them as ``opened``."""
    defaults = {"matches": lambda path: path.suffix == suffix, "open": lambda path: opened}
    return WeightFormat(name=name, **{**defaults, **fields})


def backend(name: str) -> KernelBackend:
    """A kernel backend with no kernels."""
    return KernelBackend(name=name, devices=("cpu",), load=lambda: module(name))


def write_distribution(
    site: Path, name: str, source: str, *, version: str = "1.0", points: str | None = None
) -> str:
    """Lay out an installed distribution with one module; gives the module's name.

    ``points`` is the text of ``entry_points.txt``, the entry point of the module unless given.
    """
    imported = name.replace("-", "_")
    info = site / f"{imported}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    short = name.removeprefix("fuel-plugin-")
    (info / "entry_points.txt").write_text(points or f"[fuel]\n{short} = {imported}\n")
    (site / f"{imported}.py").write_text(source)
    return imported
