"""What plugins register is checked before it is taken, and no two share a name."""

import attrs
import pytest
from support_plugins import (
    backend,
    entry,
    family,
    info_of,
    plugin,
    registry,
    weight_format,
)

from fuel_core.contracts import API_VERSION, Capabilities, ModelFamily
from fuel_core.contracts.errors import PluginError
from fuel_core.registry import PluginInfo
from fuel_core.registry.records import check_api_version


def refusal(*families, **hooks) -> str:
    """Why a plugin is refused, and that nothing of it stays."""
    made = registry(entry(plugin(*families, **hooks), "toy"))
    error = info_of(made, "toy").error
    assert isinstance(error, PluginError)
    assert not made.families()
    assert not made.weight_formats()
    assert not made.kernel_backends()
    assert "\n" not in str(error)
    return str(error)


def test_a_family_is_a_frozen_record_of_seven_fields():
    assert [field.name for field in attrs.fields(ModelFamily)] == [
        "name",
        "architectures",
        "gguf_architectures",
        "capabilities",
        "api_version",
        "load",
        "tiny",
    ]
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        family().name = "other"


def test_capabilities_are_tiers_dtypes_devices_and_weight_formats():
    names = [field.name for field in attrs.fields(Capabilities)]
    assert names == ["tiers", "dtypes", "devices", "weight_formats"]


def test_each_hook_gives_its_own_kind_of_record():
    toy, form, kernels = family(), weight_format("odd"), backend("fast")
    made = registry(entry(plugin(toy, formats=[form], backends=[kernels])))
    assert made.families() == {"toy": toy}
    assert made.weight_formats() == {"odd": form}
    assert made.kernel_backends() == {"fast": kernels}


def test_the_listing_of_families_cannot_be_written_to():
    with pytest.raises(TypeError):
        registry().families()["toy"] = family()


@pytest.mark.parametrize(
    "returned",
    [None, family(), "toy", 3, ["toy"], {"toy": family()}, [family(), weight_format("odd")], [None]],
    ids=["None", "bare record", "text", "number", "list of text", "dict", "mixed list", "list of None"],
)
def test_anything_but_a_list_of_families_is_refused(returned):
    text = refusal(fuel_register_models=lambda: returned)
    assert "needed: a list of ModelFamily" in text


def test_a_hook_that_is_a_coroutine_is_refused():
    made = []

    async def fuel_register_models():
        return []

    def register():
        made.append(fuel_register_models())
        return made[0]

    assert "fuel_register_models returned" in refusal(fuel_register_models=register)
    made[0].close()


def test_each_hook_takes_records_of_its_own_kind_only():
    assert "a list of WeightFormat" in refusal(fuel_register_weight_formats=lambda: [family()])
    assert "a list of KernelBackend" in refusal(fuel_register_kernels=lambda: [weight_format("odd")])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": ""}, "name=''"),
        ({"name": 3}, "name=3"),
        ({"load": None}, "load cannot be called"),
        ({"tiny": "tiny"}, "tiny cannot be called"),
        ({"architectures": ("A", 3)}, "architectures="),
        ({"gguf_architectures": ("",)}, "gguf_architectures="),
        ({"capabilities": {"tiers": ("decode",)}}, "no Capabilities"),
    ],
)
def test_a_field_that_is_not_what_the_contract_says_is_refused_by_its_name(change, said):
    assert said in refusal(attrs.evolve(family(), **change))


def test_every_faulty_field_of_a_record_is_named():
    text = refusal(attrs.evolve(family(), load=None, tiny=None))
    assert "load" in text
    assert "tiny" in text


def test_formats_and_backends_are_checked_by_field_too():
    odd, fast = weight_format("odd", matches=None), attrs.evolve(backend("fast"), devices="cpu")
    assert "matches cannot be called" in refusal(fuel_register_weight_formats=lambda: [odd])
    assert "devices='cpu'" in refusal(fuel_register_kernels=lambda: [fast])


DUPLICATES = {
    "family 'same'": ({"architectures": ("A",)}, {"architectures": ("B",)}),
    "architecture 'X'": ({"architectures": ("X", "A")}, {"name": "other", "architectures": ("B", "X")}),
    "GGUF architecture 'x'": (
        {"gguf_architectures": ("x",)},
        {"name": "other", "architectures": (), "gguf_architectures": ("x",)},
    ),
}


@pytest.mark.parametrize("what", DUPLICATES)
def test_a_duplicate_is_an_error_that_names_both_distributions(what):
    first, second = ({"name": "same", **fields} for fields in DUPLICATES[what])
    extra = family("extra")
    made = registry(
        entry(plugin(family(**second), extra), "zeta", version="3.1"),
        entry(plugin(family(**first)), "alpha", version="0.2"),
    )
    error = info_of(made, "zeta").error
    for said in ("fuel-plugin-zeta 3.1", "fuel-plugin-alpha 0.2", what, "FUEL_DISABLE_PLUGINS"):
        assert said in str(error)
    assert info_of(made, "alpha").error is None
    assert list(made.families()) == ["same"]


def test_a_plugin_that_is_refused_for_a_duplicate_leaves_none_of_its_records():
    duplicate = plugin(
        family("fresh"), family("same"), formats=[weight_format("odd")], backends=[backend("fast")]
    )
    made = registry(entry(plugin(family("same")), "alpha"), entry(duplicate, "zeta"))
    assert (list(made.families()), dict(made.weight_formats()), dict(made.kernel_backends())) == (
        ["same"],
        {},
        {},
    )
    assert info_of(made, "zeta").families == ("fresh", "same")
    with pytest.raises(PluginError, match=r"'fresh' is not usable.*both register family 'same'"):
        made.family("fresh")


def test_a_name_that_a_refused_plugin_took_is_free_for_the_next():
    duplicate = plugin(family("fresh"), family("same"))
    made = registry(
        entry(plugin(family("same")), "alpha"),
        entry(duplicate, "beta"),
        entry(plugin(family("fresh")), "gamma"),
    )
    assert info_of(made, "gamma").error is None
    assert made.family("fresh") is made.families()["fresh"]


def test_a_contested_family_or_architecture_is_refused_when_asked_for_and_no_other():
    made = registry(
        entry(plugin(family("same"), family("other")), "alpha"), entry(plugin(family("same")), "zeta")
    )
    with pytest.raises(PluginError, match=r"fuel-plugin-zeta 1\.0 and fuel-plugin-alpha 1\.0") as caught:
        made.family("same")
    assert caught.value.__cause__ is info_of(made, "zeta").error
    assert made.family("other").name == "other"


def test_disabling_one_of_two_contestants_settles_it():
    theirs = family("same")
    entries = [entry(plugin(family("same")), "alpha"), entry(plugin(theirs), "zeta")]
    assert registry(*entries, FUEL_DISABLE_PLUGINS="alpha").family("same") is theirs


def test_a_plugin_that_is_refused_for_its_version_contests_nothing():
    old = family("same", api_version="0.1")
    duplicate = plugin(family("same"))
    made = registry(entry(plugin(family("same")), "alpha"), entry(plugin(old), "beta"))
    assert made.family("same") is made.families()["same"]
    contested = registry(
        entry(plugin(family("same")), "alpha"), entry(plugin(old), "beta"), entry(duplicate, "zeta")
    )
    with pytest.raises(PluginError, match="fuel-plugin-zeta"):
        contested.family("same")


def test_two_plugins_of_one_distribution_are_told_apart_by_their_entry_points():
    made = registry(
        entry(plugin(family("same")), "one", distribution="acme", value="acme:one"),
        entry(plugin(family("same")), "two", distribution="acme", value="acme:two"),
    )
    text = str(info_of(made, "two").error)
    assert "one = acme:one (acme)" in text
    assert "two = acme:two (acme)" in text


@pytest.mark.parametrize("kind", ["weight format", "kernel backend"])
def test_a_duplicate_format_or_backend_is_refused_too(kind):
    records = (
        {"formats": [weight_format("same")]} if kind == "weight format" else {"backends": [backend("same")]}
    )
    made = registry(entry(plugin(**records), "alpha"), entry(plugin(**records), "zeta"))
    assert f"{kind} 'same'" in str(info_of(made, "zeta").error)
    assert info_of(made, "alpha").error is None


def test_a_plugin_that_takes_one_name_twice_is_refused():
    assert "family 'same' twice" in refusal(family("same"), family("same", architectures=()))
    assert "architecture 'A' twice" in refusal(
        family("a", architectures=("A",)), family("b", architectures=("A",))
    )


def test_one_name_may_be_a_family_an_architecture_and_a_format():
    both = family("same", architectures=("same",), gguf_architectures=("same",))
    made = registry(entry(plugin(both, formats=[weight_format("same")], backends=[backend("same")])))
    assert info_of(made, "toy").error is None


INFO = PluginInfo(name="toy", distribution="acme-toy", version="2.0")


@pytest.mark.parametrize("written", ["1.0", "1.2", "1.3"])
def test_the_same_major_and_a_minor_that_is_no_newer_are_accepted(written):
    check_api_version(INFO, family(api_version=written), core="1.3")


@pytest.mark.parametrize(
    ("written", "upgrade"),
    [("0.9", "acme-toy"), ("2.0", "fuel-core"), ("1.4", "fuel-core"), ("1.10", "fuel-core")],
)
def test_another_version_is_refused_with_what_to_upgrade(written, upgrade):
    with pytest.raises(PluginError, match=rf"API '{written}'.*upgrade {upgrade}") as caught:
        check_api_version(INFO, family(api_version=written), core="1.3")
    assert caught.value.upgrade == upgrade
    assert caught.value.core_api_version == "1.3"


@pytest.mark.parametrize(
    "written", ["1", "1.0.0", "one", "", " 1.0", "1.0\n", "-1.0", "\N{ARABIC-INDIC DIGIT ONE}.0", 1.0, None]
)
def test_a_version_that_is_no_major_and_minor_is_refused(written):
    with pytest.raises(PluginError, match=r"MAJOR\.MINOR"):
        check_api_version(INFO, family(api_version=written))


def test_a_major_mismatch_refuses_the_whole_plugin():
    major = int(API_VERSION.split(".")[0]) + 1
    assert "upgrade fuel-core" in refusal(family("fine"), family("late", api_version=f"{major}.0"))
