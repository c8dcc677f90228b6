"""The registry: every installed plugin, and what the sound ones bring."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from pluggy import PluginManager

from fuel_core.contracts.checkpoint import Checkpoint
from fuel_core.contracts.errors import PluginError
from fuel_core.contracts.family import Capabilities, ModelFamily
from fuel_core.contracts.records import KernelBackend, WeightFormat
from fuel_core.contracts.tiers import DecodeModel
from fuel_core.registry import checkpoints, commands, loading, missing, resolving, vetting
from fuel_core.registry.catalogue import Catalogue
from fuel_core.registry.discovery import (
    Entry,
    PluginInfo,
    disabled_names,
    is_strict,
    ordered,
    unknown_disabled,
)
from fuel_core.registry.records import Claim, Kind

if TYPE_CHECKING:
    import click
    import torch

R = TypeVar("R", ModelFamily, WeightFormat, KernelBackend)


class Registry:
    """The plugins of some entry points. They are loaded when something is first asked for.

    A plugin that fails is kept in :meth:`plugins` with its error and takes nothing else down; the
    error is raised when a family is asked for that it may have brought. Of two plugins that
    register one name the later, by distribution name and after the core itself, is refused whole,
    and :meth:`family` and :meth:`family_for` refuse the contested name until one of them is gone.

    Args:
        entries: the entry points, such as :func:`fuel_core.registry.discovery.installed` finds.
        environ: where ``FUEL_STRICT_PLUGINS`` (``1``: the first failure is raised at once) and
            ``FUEL_DISABLE_PLUGINS`` (names of plugins or distributions, with commas) are read.
    """

    def __init__(self, entries: Iterable[Entry], environ: Mapping[str, str]) -> None:
        self._entries = tuple(entries)
        self._environ = dict(environ)
        # Re-entrant, so that a plugin that asks while it is being loaded gets an error and no deadlock.
        self._lock = threading.RLock()
        self._is_building = False
        self._built: Catalogue | None = None
        self._vetted: set[tuple[type, Capabilities]] = set()

    @property
    def manager(self) -> PluginManager:
        """The manager that holds the admitted plugins, each under its :attr:`PluginInfo.key`."""
        return self._catalogue().manager

    def families(self) -> Mapping[str, ModelFamily]:
        """Name -> family, of every admitted plugin."""
        return self._named(Kind.FAMILY, ModelFamily)

    def weight_formats(self) -> Mapping[str, WeightFormat]:
        """Name -> checkpoint format, of every admitted plugin."""
        return self._named(Kind.FORMAT, WeightFormat)

    def kernel_backends(self) -> Mapping[str, KernelBackend]:
        """Name -> kernel backend, of every admitted plugin."""
        return self._named(Kind.BACKEND, KernelBackend)

    def plugins(self) -> Sequence[PluginInfo]:
        """Every plugin, the broken and the disabled ones too."""
        return tuple(self._catalogue().plugins.values())

    def family(self, name: str) -> ModelFamily:
        """The family of this name.

        Raises:
            PluginError: no sound plugin has it. It names the nearest known family, the distribution
                to install where that is known, and every plugin that failed before it could say
                what it brings, and is chained to the failure of one.
        """
        return self._family((Kind.FAMILY, name))

    def family_for(self, checkpoint: Checkpoint) -> ModelFamily:
        """The family that loads a checkpoint, by its format and architecture.

        Raises:
            CheckpointError: no installed plugin has the architecture, or its family does not load the format.
            PluginError: as :meth:`family`, where a plugin that failed may have it.
        """
        is_gguf = checkpoint.format == "gguf"
        kind = Kind.GGUF_ARCHITECTURE if is_gguf else Kind.ARCHITECTURE
        family = self._family((kind, checkpoint.architecture))
        loading.check_format(family, checkpoint)
        return family

    def open_checkpoint(self, path: Path) -> Checkpoint:
        """Open a model on disk with the first format that matches.

        Raises:
            CheckpointError: nothing readable is there, or no known format.
            PluginError: the format failed with an error that is none of ours.
        """
        return checkpoints.open_checkpoint(self._catalogue(), path, self.weight_formats())

    def resolve(self, ref: str) -> Path:
        """The file or directory that a model reference stands for; the first plugin that answers decides.

        Raises:
            InvalidRequestError: no plugin knows the reference.
            FuelError: the plugin that knows it says why it cannot be had, and no other answers.
        """
        return resolving.resolve(self._catalogue(), ref)

    def add_commands(self, cli: click.Group) -> None:
        """Let every plugin add its commands. One that fails, or replaces a command, adds none."""
        commands.add_commands(self._catalogue(), cli)

    def load_model(
        self,
        family: ModelFamily,
        checkpoint: Checkpoint,
        *,
        device: str | torch.device,
        dtype: torch.dtype,
    ) -> DecodeModel:
        """Load a model, and compare its class with the family's claims when it is first seen.

        Raises:
            CheckpointError: the family does not load this format.
            InvalidRequestError: it does not compute on this device or in this dtype.
            ModelContractError: the model's class differs from the tiers that the family claims.
            PluginError: the family's loader failed with an error that is none of ours.
        """
        loading.check_format(family, checkpoint)
        loading.check_placement(family, device, dtype)
        owner = self._catalogue().owner((Kind.FAMILY, family.name))
        model = loading.call_plugin(
            lambda: family.load(checkpoint, device=device, dtype=dtype),
            f"the loader of the family {family.name!r}",
            owner,
        )
        self._vet(model, family.capabilities)
        # A model that was built only in part shows here, and not in the middle of a request.
        sizes = (model.n_layers, model.vocab_size, model.max_context, model.layer_state_specs)
        loading.call_plugin(
            lambda: [size() for size in sizes], f"the model of the family {family.name!r}", owner
        )
        return model

    def _vet(self, model: DecodeModel, capabilities: Capabilities) -> None:
        if (type(model), capabilities) not in self._vetted:
            vetting.vet_model_class(type(model), capabilities)
            self._vetted.add((type(model), capabilities))
        vetting.vet_predicate(model, capabilities)

    def _family(self, claim: Claim) -> ModelFamily:
        catalogue = self._catalogue()
        record = catalogue.records.get(claim)
        refusals = catalogue.refusals if record is None else catalogue.contested
        if claim in refusals:
            raise missing.refused(claim, catalogue.plugins[refusals[claim]])
        if not isinstance(record, ModelFamily):
            raise missing.missing(catalogue, claim)
        return record

    def _named(self, kind: Kind, record_type: type[R]) -> Mapping[str, R]:
        records = self._catalogue().records.items()
        found = {
            name: record for (of, name), record in records if of is kind and isinstance(record, record_type)
        }
        return MappingProxyType(found)

    def _catalogue(self) -> Catalogue:
        with self._lock:
            if self._built is None:
                self._built = self._guard_building()
            return self._built

    def _guard_building(self) -> Catalogue:
        if self._is_building:
            raise PluginError(
                "the registry was asked while it was loading this plugin",
                needed="an entry module that asks nothing of the registry when it is imported",
                remedy="ask inside load(), tiny() or a command",
            )
        self._is_building = True
        try:
            return self._build()
        finally:
            self._is_building = False

    def _build(self) -> Catalogue:
        catalogue = Catalogue(is_strict(self._environ))
        disabled = disabled_names(self._environ)
        candidates = ordered(self._entries)
        for info, entry in candidates:
            if info.names & disabled.keys():
                catalogue.skip(info)
            else:
                catalogue.admit(info, entry)
        everyone = [info for info, _ in candidates]
        known = frozenset().union(*(info.names for info in everyone))
        for name in sorted(disabled.keys() - known):
            catalogue.skip(unknown_disabled(disabled[name], everyone))
        return catalogue
