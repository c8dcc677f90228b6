"""What to say when no plugin has the family that is asked for."""

from __future__ import annotations

from collections.abc import Iterable

from fuel_core.contracts.errors import CheckpointError, PluginError
from fuel_core.registry.catalogue import Catalogue
from fuel_core.registry.discovery import DISABLE, PluginInfo
from fuel_core.registry.naming import nearest, normalize, one_line, one_of
from fuel_core.registry.records import Claim, Kind

LLAMA, QWEN3, QUANTIZED = "fuel-plugin-llama", "fuel-plugin-qwen3", "fuel-plugin-quantized"

DISTRIBUTIONS = {
    (Kind.FAMILY, "llama"): LLAMA,
    (Kind.FAMILY, "qwen2"): QWEN3,
    (Kind.FAMILY, "qwen3"): QWEN3,
    (Kind.ARCHITECTURE, "LlamaForCausalLM"): LLAMA,
    (Kind.ARCHITECTURE, "MistralForCausalLM"): LLAMA,
    (Kind.ARCHITECTURE, "Qwen2ForCausalLM"): QWEN3,
    (Kind.ARCHITECTURE, "Qwen3ForCausalLM"): QWEN3,
    (Kind.GGUF_ARCHITECTURE, "llama"): QUANTIZED,
    (Kind.GGUF_ARCHITECTURE, "qwen2"): QUANTIZED,
    (Kind.GGUF_ARCHITECTURE, "qwen3"): QUANTIZED,
}
"""The distributions that bring the families made beside this core."""


def distribution_of(claim: Claim) -> str | None:
    """The distribution to install for a family or architecture, if it is one of ours."""
    kind, name = claim
    if kind is Kind.FAMILY and name.endswith("-gguf"):
        return QUANTIZED
    return DISTRIBUTIONS.get(claim)


def missing(catalogue: Catalogue, claim: Claim) -> PluginError | CheckpointError:
    """The error for a family or architecture that no admitted plugin has, chained to its likely cause.

    It is the checkpoint's where that asks for an architecture and every plugin has said what it brings.
    """
    kind, name = claim
    known = [known_name for known_kind, known_name in catalogue.records if known_kind is kind]
    wanted = distribution_of(claim)
    broken = _broken(catalogue.plugins.values(), wanted)
    of_checkpoint = kind is not Kind.FAMILY and not broken
    switched_off = _switched_off(catalogue.plugins.values(), wanted)
    error = (CheckpointError if of_checkpoint else PluginError)(
        switched_off or f"no installed plugin has the {kind.value} {name!r}",
        needed=one_of(name, known, none="a plugin that brings it, and none is installed"),
        remedy="; ".join((*_remedies(catalogue, wanted), *map(_report, broken))),
        name=name,
        known=tuple(known),
        nearest=nearest(name, known),
        distribution=wanted,
        broken=tuple(broken),
    )
    error.__cause__ = broken[0].error if broken else None
    return error


def refused(claim: Claim, info: PluginInfo) -> PluginError:
    """The error for a family or architecture that a plugin declares and was refused for or with."""
    kind, name = claim
    error = PluginError(
        f"the {kind.value} {name!r} is not usable",
        needed="a sound plugin that brings it",
        remedy=_report(info),
        name=name,
        distribution=info.distribution,
        broken=(info,),
    )
    error.__cause__ = info.error
    return error


def _switched_off(plugins: Iterable[PluginInfo], wanted: str | None) -> str | None:
    """Says that the wanted distribution is switched off, where it is."""
    for info in plugins:
        if info.disabled and normalize(info.distribution) == wanted:
            return f"{DISABLE} switches {wanted} off (its plugin {info.name})"
    return None


def _broken(plugins: Iterable[PluginInfo], wanted: str | None) -> list[PluginInfo]:
    """The plugins that failed before they could say what they bring, the wanted distribution's first."""
    failed = [info for info in plugins if info.error and not info.disabled and not info.families]
    return sorted(failed, key=lambda info: normalize(info.distribution) != wanted)


def _remedies(catalogue: Catalogue, wanted: str | None) -> list[str]:
    if wanted is None:
        return ["check the name, or install the plugin that brings it"]
    for info in catalogue.plugins.values():
        if normalize(info.distribution) == wanted:
            return [f"take {wanted} out of {DISABLE}" if info.disabled else f"upgrade or mend {wanted}"]
    return [f"pip install {wanted}"]


def _report(info: PluginInfo) -> str:
    return f"{info.label}: {one_line(info.error)}" if info.error else info.label
