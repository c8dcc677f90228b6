"""One broken plugin never takes down another, and its failure is kept until someone asks for it."""

import threading

import pytest
from support_plugins import FakeEntry, entry, family, info_of, module, plugin, registry

from fuel_core import registry as registry_module
from fuel_core.contracts import FuelError, hookimpl
from fuel_core.contracts.errors import InvalidRequestError, PluginError


class UntidyError(Exception):
    """An exception that cannot even be printed."""

    def __str__(self):
        raise RuntimeError


def sound(name: str = "sound"):
    return entry(plugin(family(name)), name)


FAILURES = {
    "an error": ImportError("no module named 'gone'"),
    "an error of many lines": SyntaxError("first\nsecond"),
    "an error that cannot be printed": UntidyError(),
    "a call of sys.exit": SystemExit(3),
    "an exception outside Exception": GeneratorExit(),
    "a typed error of ours": PluginError("no luck", needed="luck", remedy="try again"),
}


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
def test_a_plugin_whose_import_fails_leaves_the_others_alone(failure):
    made = registry(sound("alpha"), entry(failure, "broken", version="2.3"), sound("omega"))
    assert list(made.families()) == ["alpha", "omega"]
    info = info_of(made, "broken")
    assert (info.distribution, info.version) == ("fuel-plugin-broken", "2.3")
    assert isinstance(info.error, Exception)
    assert info.error is failure or info.error.__cause__ is failure
    with pytest.raises(PluginError, match=r"fuel-plugin-broken 2\.3: ") as caught:
        made.family("absent")
    assert "\n" not in str(caught.value)


def test_an_interrupt_from_the_keyboard_is_nobodys_failure():
    made = registry(sound(), entry(KeyboardInterrupt(), "broken"))
    with pytest.raises(KeyboardInterrupt):
        made.families()


def test_after_an_interrupt_the_next_question_starts_afresh():
    loads = iter([KeyboardInterrupt(), None])

    def load():
        failure = next(loads)
        if failure:
            raise failure
        return plugin(family("late"))

    made = registry(sound(), entry(load, "late"))
    with pytest.raises(KeyboardInterrupt):
        made.families()
    assert sorted(made.families()) == ["late", "sound"]


def test_a_hook_that_ends_the_process_is_kept_as_its_plugins_failure():
    def leave():
        raise SystemExit

    made = registry(entry(plugin(fuel_register_kernels=leave), "broken"), sound())
    assert list(made.families()) == ["sound"]
    assert "SystemExit" in str(info_of(made, "broken").error)


def test_a_hook_that_raises_takes_all_records_of_its_plugin_and_none_of_another():
    def fail():
        raise ValueError("boom")

    made = registry(entry(plugin(family("half"), fuel_register_kernels=fail), "broken"), sound())
    assert list(made.families()) == ["sound"]
    error = info_of(made, "broken").error
    assert "fuel_register_kernels raised ValueError: boom" in str(error)
    assert isinstance(error.__cause__, ValueError)


@pytest.mark.parametrize("failure", [ValueError("boom"), SystemExit("boom")])
def test_a_hook_that_fails_while_its_records_are_drawn_is_isolated_too(failure):
    def drawn():
        yield family("half")
        raise failure

    made = registry(entry(plugin(fuel_register_models=drawn), "broken"), sound())
    assert list(made.families()) == ["sound"]
    assert "boom" in str(info_of(made, "broken").error)


def test_a_hook_may_draw_its_records_one_by_one():
    def drawn():
        yield family("one")
        yield family("two")

    assert list(registry(entry(plugin(fuel_register_models=drawn))).families()) == ["one", "two"]


def test_a_failure_is_raised_only_when_a_family_is_asked_for_that_it_may_hide():
    failure = ImportError("no module named 'gone'")
    made = registry(sound(), entry(failure, "broken"))
    assert made.family("sound").name == "sound"
    with pytest.raises(PluginError) as caught:
        made.family("broken")
    assert caught.value.__cause__ is failure
    assert "fuel-plugin-broken 1.0: ImportError: no module named 'gone'" in str(caught.value)


def test_the_failure_of_the_plugin_that_brings_the_family_is_the_chained_one():
    first, second = ImportError("first"), ImportError("second")
    made = registry(entry(first, "aaa"), entry(second, "llama"))
    with pytest.raises(PluginError, match=r"first.*|second.*") as caught:
        made.family("llama")
    assert caught.value.__cause__ is second
    assert {"first", "second"} <= set(str(caught.value).replace(";", " ").split())


def test_a_refused_plugin_that_did_declare_the_family_is_blamed_alone():
    made = registry(
        entry(plugin(family("old", api_version="0.9")), "old"), entry(ImportError("gone"), "other")
    )
    with pytest.raises(PluginError, match="upgrade fuel-plugin-old") as caught:
        made.family("old")
    assert "gone" not in str(caught.value)
    assert caught.value.__cause__ is info_of(made, "old").error


def test_strict_plugins_raise_the_first_failure_at_once():
    failure = ImportError("gone")
    entries = [sound(), entry(failure, "broken")]
    assert list(registry(*entries).families()) == ["sound"]
    with pytest.raises(PluginError, match=r"fuel-plugin-broken 1\.0.*gone") as caught:
        registry(*entries, FUEL_STRICT_PLUGINS="1").families()
    assert caught.value.__cause__ is failure


@pytest.mark.parametrize("off", ["", "0"])
def test_strictness_can_be_switched_off(off):
    made = registry(entry(ImportError("gone"), "broken"), FUEL_STRICT_PLUGINS=off)
    assert made.families() == {}


def test_a_strictness_that_is_neither_on_nor_off_is_refused():
    with pytest.raises(InvalidRequestError, match="FUEL_STRICT_PLUGINS='maybe'"):
        registry(FUEL_STRICT_PLUGINS="maybe").families()


def unloadable():
    raise AssertionError("a disabled plugin must not be loaded")


@pytest.mark.parametrize("name", ["my-toy", "MY_TOY", "acme.toys", " Acme-Toys ", "x,my-toy", ",my.toy,,"])
def test_a_plugin_is_disabled_by_its_name_or_its_distributions_however_they_are_spelled(name):
    off = entry(unloadable, "my_toy", distribution="acme_toys")
    made = registry(off, sound(), FUEL_DISABLE_PLUGINS=name)
    info = info_of(made, "my_toy")
    assert (info.disabled, info.error) == (True, None)
    assert list(made.families()) == ["sound"]
    assert not info_of(made, "sound").disabled


def test_a_plugin_is_loaded_where_the_disabled_name_is_another():
    made = registry(entry(unloadable, "toy"), sound(), FUEL_DISABLE_PLUGINS="sound")
    assert "must not be loaded" in str(info_of(made, "toy").error)


def test_a_disabled_name_that_fits_no_plugin_is_listed_with_the_nearest_one():
    made = registry(sound("llama"), FUEL_DISABLE_PLUGINS="lama")
    info = info_of(made, "lama")
    assert info.disabled
    assert "nearest: llama" in str(info.error)
    assert list(made.families()) == ["llama"]


def test_a_disabled_name_that_fits_no_plugin_is_raised_where_plugins_are_strict():
    with pytest.raises(PluginError, match="'lama', which is not installed"):
        registry(sound("llama"), FUEL_DISABLE_PLUGINS="lama", FUEL_STRICT_PLUGINS="1").families()


def test_a_disabled_plugins_family_is_missing_because_it_is_disabled():
    made = registry(entry(unloadable, "llama"), FUEL_DISABLE_PLUGINS="llama")
    with pytest.raises(PluginError, match="take fuel-plugin-llama out of FUEL_DISABLE_PLUGINS") as caught:
        made.family("llama")
    assert str(caught.value).startswith(
        "FUEL_DISABLE_PLUGINS switches fuel-plugin-llama off (its plugin llama)"
    )


def test_a_plugin_that_asks_the_registry_while_it_is_loaded_is_refused_alone():
    def load():
        made.families()

    made = registry(entry(load, "eager"), sound())
    assert list(made.families()) == ["sound"]
    assert "while it was loading" in str(info_of(made, "eager").error)


def test_each_plugin_is_loaded_once_however_many_threads_ask():
    loads = []

    def load():
        loads.append(1)
        return plugin(family("toy"))

    made = registry(entry(load))
    threads = [threading.Thread(target=made.families) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loads == [1]


def test_nothing_is_loaded_before_something_is_asked():
    loads = []
    made = registry(entry(lambda: loads.append(1) or plugin()))
    assert loads == []
    made.plugins()
    assert loads == [1]


def test_the_default_registry_is_kept_until_it_is_refreshed():
    registry_module.refresh()
    before = registry_module.default()
    assert registry_module.default() is before
    registry_module.refresh()
    assert registry_module.default() is not before


def test_the_commands_of_a_plugin_that_raises_do_not_stop_the_next():
    cli = Group(core="core")
    made = registry(
        entry(plugin(fuel_register_commands=lambda cli: cli.commands.update(one=1)), "one"),
        entry(plugin(family("kept"), fuel_register_commands=half_a_command), "broken"),
        entry(plugin(fuel_register_commands=lambda cli: cli.commands.update(two=2)), "two"),
    )
    made.add_commands(cli)
    assert cli.commands == {"core": "core", "one": 1, "two": 2}
    assert "boom" in str(info_of(made, "broken").error)
    assert [info_of(made, name).error for name in ("one", "two")] == [None, None]
    assert list(made.families()) == ["kept"]


class Group:
    """As much of a click.Group as a plugin is given."""

    def __init__(self, **commands):
        self.commands = commands


def half_a_command(cli):
    cli.commands["half"] = "half"
    raise ValueError("boom")


@pytest.mark.parametrize("change", [lambda c: c.update(generate="theirs"), lambda c: c.pop("generate")])
def test_a_plugin_cannot_replace_or_remove_a_command(change):
    cli = Group(generate="ours")
    made = registry(entry(plugin(fuel_register_commands=lambda cli: change(cli.commands)), "pushy"))
    made.add_commands(cli)
    assert cli.commands == {"generate": "ours"}
    assert "command generate" in str(info_of(made, "pushy").error)


def test_two_plugins_that_add_one_command_are_told_apart():
    def adds(value):
        return plugin(fuel_register_commands=lambda cli: cli.commands.update(same=value))

    cli = Group()
    made = registry(entry(adds(1), "one"), entry(adds(2), "two"))
    made.add_commands(cli)
    assert len(cli.commands) == 1
    assert sum(info.error is not None for info in made.plugins()) == 1


def test_commands_reach_a_real_click_group():
    click = pytest.importorskip("click")
    cli = click.Group()

    @hookimpl
    def fuel_register_commands(cli):
        @cli.command("hello")
        def hello():
            pass

    registry(entry(module(fuel_register_commands=fuel_register_commands))).add_commands(cli)
    assert list(cli.commands) == ["hello"]


def test_strict_plugins_raise_a_failing_command_at_once():
    made = registry(entry(plugin(fuel_register_commands=half_a_command), "broken"), FUEL_STRICT_PLUGINS="1")
    with pytest.raises(PluginError, match="boom"):
        made.add_commands(Group())


def test_a_plugin_without_a_distribution_is_named_by_its_entry_point():
    made = registry(FakeEntry("orphan", "orphan", None, lambda: 1 / 0))
    info = info_of(made, "orphan")
    assert (info.distribution, info.version) == ("", "")
    with pytest.raises(FuelError, match="the plugin 'orphan': ZeroDivisionError"):
        made.family("x")


def test_a_first_failure_is_not_overwritten_by_a_later_one():
    texts = iter(["first", "second"])

    def fail(ref):
        raise ValueError(next(texts))

    made = registry(entry(plugin(fuel_resolve_model=fail), "broken"))
    for _ in range(2):
        with pytest.raises(InvalidRequestError):
            made.resolve("nothing")
    assert str(info_of(made, "broken").error) == "first"
