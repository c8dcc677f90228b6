"""Compares a model class with the tiers that its family claims.

pluggy lets a missing method, fewer or reordered arguments and an override without a marker pass, so its
verdict is joined by a comparison of signatures.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import attrs
from pluggy import PluginManager, PluginValidationError

from fuel_core.contracts.errors import ModelContractError
from fuel_core.contracts.family import Capabilities
from fuel_core.contracts.markers import PROJECT
from fuel_core.contracts.tiers import DecodeModel, PagedDecodeModel, RaggedDecodeModel
from fuel_core.registry.naming import nearest, one_line

TIER_CLASSES: dict[str, type] = {
    "decode": DecodeModel,
    "paged": PagedDecodeModel,
    "ragged": RaggedDecodeModel,
}
PREDICATE, BATCHED = "supports_batched_decode", "build_batched_decode_logits"
_EMPTY = inspect.Parameter.empty
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@attrs.frozen
class Mismatch:
    """One difference between a class and its claims.

    Attributes:
        subject: a method, or a tier as ``tier 'paged'``.
        expected: the signature or the state that the contract asks for.
        found: what the class has.
    """

    subject: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.subject}: expected {self.expected}, found {self.found}"


def vet_model_class(cls: type, capabilities: Capabilities) -> None:
    """Compare a class with its most derived tier, and its tiers with those that are declared.

    A method must be implemented and marked with ``@hookimpl``, itself or by inheritance, and take the
    tier's parameters: the same names, order, kinds and defaults. Annotations are not compared, and more
    parameters may follow if every one of them is optional.

    Raises:
        ModelContractError: with every difference in its text and, as :class:`Mismatch`, in ``mismatches``.
    """
    tier = _tier_of(cls, capabilities)
    by_method = {each.subject: each for each in _method_mismatches(cls, tier)}
    for each in _marker_mismatches(cls, tier):
        by_method.setdefault(each.subject, each)
    _refuse(cls, [*_tier_mismatches(cls, capabilities), *_batched_mismatches(cls), *by_method.values()])


def vet_predicate(model: DecodeModel, capabilities: Capabilities) -> None:
    """Compare what a model says of its batched arm with what its family declares.

    Raises:
        ModelContractError: they differ, or the predicate gives no bool.
    """
    declared, said = "batched" in capabilities.tiers, model.supports_batched_decode()
    if said is not declared:
        found = f"{said!r} from this model"
        expected = f"{declared}, since the family declares tiers={capabilities.tiers}"
        _refuse(type(model), [Mismatch(f"{PREDICATE}()", expected, found)])


def _refuse(cls: type, mismatches: list[Mismatch]) -> None:
    if mismatches:
        raise ModelContractError(
            f"the model class {cls.__qualname__} breaks its contract ({len(mismatches)} found): "
            + "; ".join(f"({number}) {each}" for number, each in enumerate(mismatches, 1)),
            needed="what its tiers specify",
            remedy="change the class, or the tiers in the family's Capabilities",
            model_class=cls,
            mismatches=tuple(mismatches),
        )


def _tier_of(cls: type, capabilities: Capabilities) -> type:
    """The most derived tier that the class has or its family declares."""
    reached = [
        tier for name, tier in TIER_CLASSES.items() if name in capabilities.tiers or issubclass(cls, tier)
    ]
    return reached[-1]


def _tier_mismatches(cls: type, capabilities: Capabilities) -> Iterator[Mismatch]:
    for name, tier in TIER_CLASSES.items():
        derives, declared = issubclass(cls, tier), name in capabilities.tiers
        if declared and not derives:
            yield Mismatch(f"tier {name!r}", f"a class that derives from {tier.__name__}", _bases(cls))
        if derives and not declared:
            yield _undeclared(name, capabilities, _bases(cls))
    arm = [_overrides(cls, method) for method in (PREDICATE, BATCHED)]
    if all(arm) and "batched" not in capabilities.tiers:
        yield _undeclared("batched", capabilities, f"a class that implements {BATCHED}")
    if not any(arm) and "batched" in capabilities.tiers:
        yield Mismatch("tier 'batched'", f"{PREDICATE} and {BATCHED} in the class", "neither")


def _undeclared(name: str, capabilities: Capabilities, found: str) -> Mismatch:
    return Mismatch(f"tier {name!r}", f"{name!r} among the declared tiers {capabilities.tiers}", found)


def _bases(cls: type) -> str:
    tiers = [tier.__name__ for tier in TIER_CLASSES.values() if issubclass(cls, tier)]
    return f"a class that derives from {tiers[-1] if tiers else 'no tier'}"


def _batched_mismatches(cls: type) -> Iterator[Mismatch]:
    has_predicate, has_method = _overrides(cls, PREDICATE), _overrides(cls, BATCHED)
    if has_predicate and not has_method:
        yield Mismatch(PREDICATE, f"{BATCHED} beside it", "the predicate alone")
    if has_method and not has_predicate:
        yield Mismatch(BATCHED, f"{PREDICATE} beside it", "the method alone, with a predicate that denies it")


def _overrides(cls: type, name: str) -> bool:
    return inspect.getattr_static(cls, name, None) not in (None, vars(DecodeModel)[name])


def _methods(tier: type) -> list[str]:
    return [name for name in dir(tier) if hasattr(inspect.getattr_static(tier, name), f"{PROJECT}_spec")]


def _method_mismatches(cls: type, tier: type) -> Iterator[Mismatch]:
    for name in _methods(tier):
        expected = inspect.signature(MethodType(inspect.getattr_static(tier, name), tier))
        found = _found(cls, name, expected)
        if found:
            yield Mismatch(name, f"@hookimpl def {name}{_written(expected)}", found)
    for name in sorted(set(_methods(RaggedDecodeModel)) - set(_methods(tier))):
        if inspect.getattr_static(cls, name, None) is not None:
            yield Mismatch(name, f"a class that derives from {_home(name).__name__}", _bases(cls))


def _home(name: str) -> type:
    return next(tier for tier in TIER_CLASSES.values() if hasattr(tier, name))


def _found(cls: type, name: str, expected: inspect.Signature) -> str:
    """What is wrong with one method, or ``""``."""
    attribute = inspect.getattr_static(cls, name, None)
    if attribute is None or getattr(attribute, "__isabstractmethod__", False):
        return "no implementation"
    method = _bound(attribute, cls)
    if method is None:
        return f"a {type(attribute).__name__}"
    try:
        found = inspect.signature(method)
    except ValueError:
        return f"{name}() without self"
    faults = [note for note, applies in _notes(attribute, method) if applies]
    if faults or _differs(expected, found):
        return " ".join((f"{name}{_written(found)}", *faults))
    return ""


def _notes(attribute: object, method: Callable[..., Any]) -> Iterator[tuple[str, bool]]:
    yield "without @hookimpl", not _is_marked(attribute)
    yield "as a coroutine", inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)
    yield "as a generator", inspect.isgeneratorfunction(method)


def _bound(attribute: object, cls: type) -> Callable[..., Any] | None:
    """The method as the token loop calls it, or None if it is no method."""
    function = getattr(attribute, "__func__", attribute)
    if not inspect.isfunction(function):
        return None
    return function if isinstance(attribute, staticmethod) else MethodType(function, cls)


def _is_marked(attribute: object) -> bool:
    holders = (attribute, getattr(attribute, "__func__", None))
    return any(hasattr(holder, f"{PROJECT}_impl") for holder in holders)


def _differs(expected: inspect.Signature, found: inspect.Signature) -> bool:
    wanted, given = list(expected.parameters.values()), list(found.parameters.values())
    same = [_essence(parameter) for parameter in given[: len(wanted)]] == [_essence(each) for each in wanted]
    return not same or any(
        each.default is _EMPTY and each.kind not in _VARIADIC for each in given[len(wanted) :]
    )


def _essence(parameter: inspect.Parameter) -> tuple[str, object, object]:
    return parameter.name, parameter.kind, parameter.default


def _written(signature: inspect.Signature) -> str:
    bare = [parameter.replace(annotation=_EMPTY) for parameter in signature.parameters.values()]
    return " ".join(
        str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)).split()
    )


def _marker_mismatches(cls: type, tier: type) -> Iterator[Mismatch]:
    """pluggy's own verdict, one method at a time so that the first fault does not hide the others."""
    manager = PluginManager(PROJECT)
    manager.add_hookspecs(tier)
    for name in dir(cls):
        attribute = inspect.getattr_static(cls, name, None)
        if _is_marked(attribute):
            yield from _register(manager, name, attribute)


def _register(manager: PluginManager, name: str, attribute: object) -> Iterator[Mismatch]:
    # An instance of a class with this one method: pluggy strips self from what is bound, and a model
    # cannot be made without its weights.
    holder = type("Holder", (), {name: attribute})()
    try:
        manager.register(holder, name)
    except PluginValidationError as error:
        yield Mismatch(name, f"@hookimpl def {name} as the tier has it", one_line(error))
        return
    try:
        manager.check_pending()
    except PluginValidationError:
        close = nearest(name, _methods(RaggedDecodeModel))
        expected = f"a method of the tier{f' (nearest: {close})' if close else ''}"
        yield Mismatch(name, expected, "@hookimpl on a name that no tier has")
        manager.unregister(name=name)
