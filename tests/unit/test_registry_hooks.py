"""A plugin is vetted alone, before anything of it is used."""

import inspect
import re

import attrs
import pluggy
import pytest
from support_plugins import entry, family, info_of, module, plugin, registry, weight_format

from fuel_core import hookspecs
from fuel_core.contracts import FuelError, hookimpl
from fuel_core.contracts.errors import PluginError
from fuel_core.registry.discovery import GROUP
from fuel_core.registry.hooks import HOOKS, call, implementations, new_manager, vet_plugin

SIGNATURES = {
    "fuel_register_models": [],
    "fuel_register_weight_formats": [],
    "fuel_register_kernels": [],
    "fuel_resolve_model": ["ref"],
    "fuel_register_commands": ["cli"],
}


def nothing():
    """A fresh function, not marked, that registers nothing."""

    def register():
        return []

    return register


def refusal(made) -> PluginError:
    with pytest.raises(PluginError) as caught:
        vet_plugin(made, "toy")
    assert "\n" not in str(caught.value)
    return caught.value


def test_the_project_and_the_entry_point_group_are_both_called_fuel():
    assert GROUP == new_manager().project_name == "fuel"


def test_the_hooks_are_those_of_the_design_with_its_arguments():
    specs = {
        name: list(inspect.signature(function).parameters)
        for name, function in vars(hookspecs).items()
        if hasattr(function, "fuel_spec")
    }
    assert specs == SIGNATURES
    assert HOOKS["fuel_resolve_model"] == "fuel_resolve_model(ref)"


def test_resolving_is_the_only_hook_whose_first_result_decides():
    decided = {name for name in SIGNATURES if getattr(hookspecs, name).fuel_spec["firstresult"]}
    assert decided == {"fuel_resolve_model"}


def test_a_sound_plugin_is_admitted_to_a_manager_of_its_own():
    first, second = vet_plugin(plugin(), "first"), vet_plugin(plugin(), "second")
    assert [name for name, _ in first.list_name_plugin()] == ["first"]
    assert [name for name, _ in second.list_name_plugin()] == ["second"]


def test_a_misspelled_hook_is_answered_with_the_nearest_right_name():
    error = refusal(module(fuel_registr_models=hookimpl(nothing())))
    assert "fuel_registr_models (did you mean fuel_register_models?)" in str(error)


def test_every_misspelled_hook_is_named_in_one_error():
    hooks = {name: hookimpl(nothing()) for name in ("fuel_registr_models", "fuel_resolve_modle")}
    error = refusal(module(**hooks))
    assert "fuel_register_models?" in str(error)
    assert "fuel_resolve_model?" in str(error)


def test_a_hook_that_a_newer_core_may_have_is_accepted_where_the_plugin_calls_it_optional():
    optional = hookimpl(optionalhook=True)(nothing())
    vet_plugin(module(fuel_register_telepathy=optional), "toy")
    error = refusal(module(fuel_register_telepathy=optional, fuel_resolve_modle=hookimpl(lambda ref: None)))
    assert "telepathy" not in str(error)


def test_a_function_named_like_a_hook_without_the_marker_is_refused():
    error = refusal(module(fuel_register_models=nothing()))
    assert "fuel_register_models is not marked as a hook" in str(error)
    assert "hookimpl" in error.needed


def test_a_forgotten_marker_beside_a_marked_hook_is_refused_too():
    error = refusal(module(fuel_register_models=hookimpl(nothing()), fuel_resolve_model=lambda ref: None))
    assert "fuel_resolve_model" in error.given
    assert "fuel_register_models" not in error.given


def test_the_marker_of_another_project_does_not_count():
    foreign = pluggy.HookimplMarker("pytest")
    assert "fuel_register_models" in refusal(module(fuel_register_models=foreign(nothing()))).given


def test_names_that_begin_like_a_hook_and_are_no_function_are_left_alone():
    vet_plugin(module(fuel_version="1", fuel_core=hookspecs, fuel_Thing=int, **vars(plugin())), "toy")


def test_a_hook_specification_that_the_plugin_imports_is_no_forgotten_marker():
    hooks = {"fuel_register_models": hookimpl(nothing())}
    vet_plugin(module(fuel_resolve_model=hookspecs.fuel_resolve_model, **hooks), "toy")


@pytest.mark.parametrize(
    "function",
    [lambda reference: None, lambda ref, extra: None, lambda *, ref: None],
    ids=["renamed", "one too many", "by keyword only"],
)
def test_arguments_that_differ_are_answered_with_the_right_ones(function):
    error = refusal(module(fuel_resolve_model=hookimpl(function)))
    assert "fuel_resolve_model(ref)" in error.needed
    assert "fuel_register_models" not in error.needed


def test_a_hook_may_leave_out_arguments_and_add_optional_ones():
    def fuel_resolve_model(depth=3):
        return depth

    manager = vet_plugin(module(fuel_resolve_model=hookimpl(fuel_resolve_model)), "toy")
    (each,) = implementations(manager, "fuel_resolve_model")
    assert call(each, ref="x") == 3


def test_an_argument_with_a_default_gets_what_the_hook_is_called_with():
    manager = vet_plugin(module(fuel_resolve_model=hookimpl(lambda ref=None: ref)), "toy")
    (each,) = implementations(manager, "fuel_resolve_model")
    assert call(each, ref="x") == "x"


def test_a_hook_wrapper_is_refused_since_there_is_nothing_to_wrap():
    @hookimpl(wrapper=True)
    def fuel_register_models():
        return (yield)

    assert "wrapper" in refusal(module(fuel_register_models=fuel_register_models)).given


def test_a_plugin_without_any_hook_is_refused():
    assert "implements no hook" in refusal(module(helper=lambda: None)).given


def test_a_hook_under_another_name_counts_if_it_says_which_it_is():
    named = hookimpl(specname="fuel_register_models")(nothing())
    manager = vet_plugin(module(models=named), "toy")
    assert len(list(implementations(manager, "fuel_register_models"))) == 1


class Methods:
    """A plugin as an object."""

    @hookimpl
    def fuel_register_models(self):
        return [family("from-object")]

    @property
    def fuel_trap(self):
        raise AssertionError("vetting must not run a plugin's properties")


def test_an_object_with_methods_is_a_plugin_like_a_module():
    assert list(registry(entry(Methods())).families()) == ["from-object"]


def test_an_object_that_cannot_be_hashed_is_a_plugin_too():
    unhashable = attrs.define(
        type("Unhashable", (), {"fuel_register_models": Methods.fuel_register_models})
    )()
    with pytest.raises(TypeError):
        hash(unhashable)
    assert list(registry(entry(unhashable), entry(plugin(), "other")).families()) == ["from-object"]


@pytest.mark.parametrize("named", [Methods, None], ids=["class", "None"])
def test_an_entry_point_that_names_no_module_or_object_says_what_it_should_name(named):
    error = refusal(named)
    assert "a module or an instance" in error.needed


def test_a_method_of_an_object_without_the_marker_is_refused():
    class Forgetful:
        def fuel_register_models(self):
            return []

    assert "fuel_register_models" in refusal(Forgetful()).given


def test_pluggy_leaves_nothing_of_a_plugin_whose_registration_fails():
    manager = new_manager()
    sound_then_bad = {
        "fuel_register_models": hookimpl(nothing()),
        "fuel_resolve_model": hookimpl(lambda wrong: None),
    }
    with pytest.raises(pluggy.PluginValidationError):
        manager.register(module(**sound_then_bad))
    assert manager.list_name_plugin() == []
    assert not list(implementations(manager, "fuel_register_models"))


BROKEN = {
    "misspelled": {"fuel_registr_models": hookimpl(nothing())},
    "unmarked": {"fuel_register_models": nothing()},
    "arguments": {"fuel_resolve_model": hookimpl(lambda wrong: None)},
    "raises": {"fuel_register_models": hookimpl(lambda: 1 / 0)},
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_fault_of_one_plugin_stays_its_own(fault):
    hooks = {"fuel_register_weight_formats": hookimpl(lambda: [weight_format("odd")]), **BROKEN[fault]}
    sound = [entry(plugin(family(name)), name) for name in ("alpha", "omega")]
    made = registry(sound[0], entry(module(**hooks), "broken"), sound[1])
    assert list(made.families()) == ["alpha", "omega"]
    assert "odd" not in made.weight_formats()
    assert isinstance(info_of(made, "broken").error, FuelError)
    assert [info_of(made, name).error for name in ("alpha", "omega")] == [None, None]


def test_only_sound_plugins_are_in_the_manager_whose_hooks_are_called():
    resolve = hookimpl(lambda ref: None)
    broken = module(fuel_resolve_model=resolve, fuel_registr_models=resolve)
    made = registry(entry(plugin(), "sound"), entry(broken, "broken"))
    registered = [plugin for _, plugin in made.manager.list_name_plugin()]
    assert broken not in registered
    assert len(registered) == 1
    assert not list(implementations(made.manager, "fuel_resolve_model"))


def test_pluggy_is_required_in_a_version_that_undoes_a_failed_registration():
    text = (hookspecs_root() / "pyproject.toml").read_text()
    floor = re.search(r'"pluggy>=(\d+)\.(\d+)', text)
    assert floor
    assert tuple(map(int, floor.groups())) >= (1, 7)


def hookspecs_root():
    from pathlib import Path

    return Path(hookspecs.__file__).parents[1]


def test_only_the_markers_and_the_registry_know_pluggy_so_no_hook_is_in_the_token_loop():
    package = hookspecs_root() / "fuel_core"
    users = {path.relative_to(package) for path in package.rglob("*.py") if "pluggy" in imports(path)}
    assert {path.parts[0] for path in users} == {"contracts", "registry"}
    assert {path.name for path in users if path.parts[0] == "contracts"} == {"markers.py"}


def imports(path) -> set[str]:
    found = re.findall(r"^\s*(?:from|import)\s+(\w+)", path.read_text(), re.M)
    return set(found)
