"""Plugins and what they bring: discovery, isolation of broken ones, families, model references.

The functions ask one registry that is built from the installed entry points when it is first needed.
Nothing here imports torch.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fuel_core.contracts.checkpoint import Checkpoint
from fuel_core.contracts.family import ModelFamily
from fuel_core.contracts.records import KernelBackend, WeightFormat
from fuel_core.contracts.tiers import DecodeModel
from fuel_core.registry.discovery import PluginInfo, installed
from fuel_core.registry.naming import nearest
from fuel_core.registry.registry import Registry
from fuel_core.registry.vetting import Mismatch, vet_model_class, vet_predicate

if TYPE_CHECKING:
    import click
    import torch

__all__ = [
    "Mismatch",
    "PluginInfo",
    "Registry",
    "add_commands",
    "default",
    "families",
    "family",
    "family_for",
    "kernel_backends",
    "load_model",
    "nearest",
    "open_checkpoint",
    "plugins",
    "refresh",
    "resolve",
    "vet_model_class",
    "vet_predicate",
    "weight_formats",
]

_lock = threading.Lock()
_default: Registry | None = None


def default() -> Registry:
    """The registry of the installed plugins; the functions of this module ask it."""
    global _default
    with _lock:
        if _default is None:
            _default = Registry(installed(), os.environ)
        return _default


def refresh() -> None:
    """Forget every plugin, so that the next question looks again at what is installed."""
    global _default
    with _lock:
        _default = None


def families() -> Mapping[str, ModelFamily]:
    """See :meth:`Registry.families`."""
    return default().families()


def family(name: str) -> ModelFamily:
    """See :meth:`Registry.family`."""
    return default().family(name)


def family_for(checkpoint: Checkpoint) -> ModelFamily:
    """See :meth:`Registry.family_for`."""
    return default().family_for(checkpoint)


def weight_formats() -> Mapping[str, WeightFormat]:
    """See :meth:`Registry.weight_formats`."""
    return default().weight_formats()


def kernel_backends() -> Mapping[str, KernelBackend]:
    """See :meth:`Registry.kernel_backends`."""
    return default().kernel_backends()


def open_checkpoint(path: Path) -> Checkpoint:
    """See :meth:`Registry.open_checkpoint`."""
    return default().open_checkpoint(path)


def resolve(ref: str) -> Path:
    """See :meth:`Registry.resolve`."""
    return default().resolve(ref)


def add_commands(cli: click.Group) -> None:
    """See :meth:`Registry.add_commands`."""
    default().add_commands(cli)


def plugins() -> Sequence[PluginInfo]:
    """See :meth:`Registry.plugins`."""
    return default().plugins()


def load_model(
    family: ModelFamily, checkpoint: Checkpoint, *, device: str | torch.device, dtype: torch.dtype
) -> DecodeModel:
    """See :meth:`Registry.load_model`."""
    return default().load_model(family, checkpoint, device=device, dtype=dtype)
