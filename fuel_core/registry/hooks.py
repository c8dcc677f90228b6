"""Vets a plugin in a manager of its own, and calls hook implementations one at a time."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from pluggy import HookCaller, HookImpl, PluginManager, PluginValidationError

from fuel_core import hookspecs
from fuel_core.contracts.errors import PluginError
from fuel_core.contracts.markers import PROJECT
from fuel_core.registry.naming import nearest, one_line

PREFIX = f"{PROJECT}_"
"""Functions of a plugin that begin so are hooks."""


def new_manager() -> PluginManager:
    """A manager that knows the hooks and no plugin."""
    manager = PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def _hooks() -> dict[str, str]:
    """Hook name -> how it is written."""
    functions = inspect.getmembers(hookspecs, lambda value: hasattr(value, f"{PROJECT}_spec"))
    return {name: name + _signature(function) for name, function in functions}


def _signature(function: Any) -> str:
    return f"({', '.join(map(str, inspect.signature(function).parameters))})"


HOOKS = _hooks()


def vet_plugin(plugin: object, name: str) -> PluginManager:
    """Register a plugin alone, in a manager of its own.

    Args:
        plugin: the module or the instance that an entry point names.
        name: what the manager calls it.

    Returns:
        A manager that holds this plugin and nothing else.

    Raises:
        PluginError: no module or instance, an unknown hook, a forgotten marker, arguments that differ,
            a hook wrapper, or no hook at all.
    """
    _refuse_no_plugin(plugin)
    _refuse_unmarked(plugin)
    manager = new_manager()
    try:
        manager.register(plugin, name)
    except PluginValidationError as error:
        raise _misfit(one_line(error), str(error)) from error
    _refuse_unknown_hooks(manager)
    _refuse_misuse(manager)
    _refuse_nothing(manager)
    return manager


def implementations(manager: PluginManager, hook: str) -> Iterator[HookImpl]:
    """A hook's implementations in pluggy's order: ``tryfirst``, then the last registered first."""
    caller: HookCaller = getattr(manager.hook, hook)
    return reversed(caller.get_hookimpls())


def call(implementation: HookImpl, **arguments: object) -> Any:
    """Call one implementation with those of the arguments that it takes."""
    positional = [arguments[name] for name in implementation.argnames]
    optional = {name: arguments[name] for name in implementation.kwargnames if name in arguments}
    return implementation.function(*positional, **optional)


def _refuse_no_plugin(plugin: object) -> None:
    if plugin is None or inspect.isclass(plugin):
        what = "None" if plugin is None else f"the class {plugin.__name__}"
        raise PluginError(
            f"the entry point names {what}",
            needed="a module or an instance",
            remedy="name the module that holds the hook functions, or an instance of the class",
        )


def _refuse_unmarked(plugin: object) -> None:
    unmarked = [name for name in dir(plugin) if name.startswith(PREFIX) and _is_unmarked(plugin, name)]
    if unmarked:
        raise PluginError(
            f"{', '.join(unmarked)} {'is' if len(unmarked) == 1 else 'are'} not marked as a hook",
            needed="@fuel_core.hookimpl on every function whose name begins with fuel_",
            remedy="mark the function, or rename it if it is no hook",
        )


def _is_unmarked(plugin: object, name: str) -> bool:
    # A static look-up runs no property of the plugin.
    value = inspect.getattr_static(plugin, name, None)
    function = getattr(value, "__func__", value)
    marked = any(hasattr(v, PROJECT + mark) for v in (value, function) for mark in ("_impl", "_spec"))
    return callable(function) and not inspect.isclass(function) and not marked


def _refuse_unknown_hooks(manager: PluginManager) -> None:
    try:
        manager.check_pending()
    except PluginValidationError as error:
        raise PluginError(
            "; ".join(f"there is no hook {name}{_meant(name)}" for name in _unknown_hooks(manager)),
            needed=f"one of {', '.join(HOOKS)}",
            remedy="correct the name, or upgrade fuel-core if the hook is newer",
        ) from error


def _unknown_hooks(manager: PluginManager) -> list[str]:
    unknown = {name: caller for name, caller in vars(manager.hook).items() if not caller.has_spec()}
    return sorted(
        n for n, caller in unknown.items() if not all(i.optionalhook for i in caller.get_hookimpls())
    )


def _meant(name: str) -> str:
    close = nearest(name, HOOKS)
    return f" (did you mean {close}?)" if close else ""


def _refuse_misuse(manager: PluginManager) -> None:
    found = [(hook, each) for hook in HOOKS for each in implementations(manager, hook)]
    for hook, implementation in found:
        if implementation.wrapper or implementation.hookwrapper:
            raise _misfit(f"{hook} is a hook wrapper, and each plugin's hooks are called alone", hook)
        try:
            optional = dict.fromkeys(implementation.kwargnames)
            inspect.signature(implementation.function).bind(*implementation.argnames, **optional)
        except TypeError as error:
            raise _misfit(f"{hook}{inspect.signature(implementation.function)}", hook) from error


def _refuse_nothing(manager: PluginManager) -> None:
    if not any(caller.get_hookimpls() for caller in vars(manager.hook).values()):
        raise _misfit("it implements no hook", "")


def _misfit(given: str, about: str) -> PluginError:
    expected = [written for name, written in HOOKS.items() if name in about] or list(HOOKS.values())
    return PluginError(
        given,
        needed=f"@hookimpl def {' or '.join(expected)}",
        remedy="change the function in the plugin",
    )
