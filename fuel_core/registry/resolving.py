"""Finds the plugin that knows a model reference."""

from __future__ import annotations

from pathlib import Path

from pluggy import HookImpl

from fuel_core.contracts.errors import FuelError, InvalidRequestError, PluginError
from fuel_core.registry.catalogue import Catalogue
from fuel_core.registry.discovery import guarded
from fuel_core.registry.hooks import call, implementations
from fuel_core.registry.naming import nearest, one_line

KINDS = "a GGUF file, a model directory, pypi:DISTRIBUTION[==VERSION], hf:ORG/NAME or an alias"


def resolve(catalogue: Catalogue, ref: str) -> Path:
    """Ask the plugins one by one; see :meth:`fuel_core.registry.Registry.resolve`."""
    failures: list[Exception] = []
    for implementation in implementations(catalogue.manager, "fuel_resolve_model"):
        path = _ask(catalogue, implementation, ref, failures)
        if path is not None:
            return path
    raise _unresolved(ref, failures)


def _ask(catalogue: Catalogue, implementation: HookImpl, ref: str, failures: list[Exception]) -> Path | None:
    try:
        return _path_or_none(guarded(lambda: call(implementation, ref=ref)))
    except Exception as error:
        failures.append(error)
        if not _is_answer(error):
            catalogue.fail(implementation.plugin_name, error)
        return None


def _path_or_none(answer: object) -> Path | None:
    if answer is None or isinstance(answer, Path):
        return answer
    raise PluginError(
        f"fuel_resolve_model returned {type(answer).__name__}",
        needed="a pathlib.Path, or None for a reference of another kind",
        remedy="mend the plugin",
    )


def _is_answer(error: Exception) -> bool:
    """A typed error about the reference says nothing against the plugin."""
    return isinstance(error, FuelError) and not isinstance(error, PluginError)


def _unresolved(ref: str, failures: list[Exception]) -> Exception:
    answer = next(filter(_is_answer, failures), None)
    if answer is not None:
        return answer
    from fuel_core.registry.references import ALIASES

    close = nearest(ref, ALIASES)
    error = InvalidRequestError(
        f"the model reference {ref!r} is known to no plugin",
        needed=KINDS + (f" (nearest alias: {close})" if close else ""),
        remedy="; ".join(
            ("check the reference", *(f"a plugin failed: {one_line(each)}" for each in failures))
        ),
        ref=ref,
        nearest=close,
    )
    error.__cause__ = failures[0] if failures else None
    return error
