"""A model class is compared with the tiers that its family claims, and every difference is told."""

import functools
import inspect

import pluggy
import pytest
from support_plugins import (
    BatchedArm,
    BatchedModel,
    CoreModel,
    PagedMethods,
    PagedModel,
    RaggedModel,
)

from fuel_core.contracts import (
    Capabilities,
    DecodeModel,
    PagedDecodeModel,
    RaggedDecodeModel,
    hookimpl,
)
from fuel_core.contracts.errors import ModelContractError
from fuel_core.registry.vetting import Mismatch, vet_model_class

FORWARD = "forward_with_kv_context_persistent"
DECODE, BATCHED = ("decode",), ("decode", "batched")
PAGED, ALL = ("decode", "paged"), ("decode", "batched", "paged", "ragged")


def vet(cls: type, tiers=DECODE) -> None:
    vet_model_class(cls, Capabilities(tiers=tiers))


def faults(cls: type, tiers=DECODE) -> dict[str, Mismatch]:
    """What is wrong with a class, by subject."""
    with pytest.raises(ModelContractError) as caught:
        vet(cls, tiers)
    text = str(caught.value)
    assert cls.__qualname__ in text
    assert "\n" not in text
    assert all(str(each) in text for each in caught.value.mismatches)
    assert caught.value.model_class is cls
    return {each.subject: each for each in caught.value.mismatches}


def with_method(function, name: str = FORWARD, base: type = CoreModel, mark: bool = True) -> type:
    """A class that overrides one method."""
    return type("Changed", (base,), {name: hookimpl(function) if mark else function})


SOUND = [(CoreModel, DECODE), (BatchedModel, BATCHED), (PagedModel, PAGED), (RaggedModel, ALL)]


@pytest.mark.parametrize(("cls", "tiers"), SOUND)
def test_a_sound_class_of_every_tier_passes(cls, tiers):
    vet(cls, tiers)


@pytest.mark.parametrize(("cls", "tiers"), SOUND)
def test_a_family_that_inherits_its_implementation_passes(cls, tiers):
    vet(type("Inherits", (cls,), {}), tiers)


def test_every_method_of_a_tier_is_a_hook_specification():
    for tier in (DecodeModel, PagedDecodeModel, RaggedDecodeModel):
        own = {name: method for name, method in vars(tier).items() if inspect.isfunction(method)}
        assert own
        assert all(hasattr(method, "fuel_spec") for method in own.values())


def test_two_nested_tiers_in_one_manager_are_refused_by_pluggy():
    manager = pluggy.PluginManager("fuel")
    manager.add_hookspecs(PagedDecodeModel)
    with pytest.raises(ValueError, match="already registered"):
        manager.add_hookspecs(RaggedDecodeModel)


def passes_pluggy(cls: type, tier: type = DecodeModel) -> bool:
    """Whether pluggy alone has nothing against a class."""
    manager = pluggy.PluginManager("fuel")
    manager.add_hookspecs(tier)
    try:
        manager.register(cls)
        manager.check_pending()
    except pluggy.PluginValidationError:
        return False
    return True


def test_a_missing_method_passes_pluggy_and_is_refused():
    cls = type("Missing", (PagedDecodeModel,), {n: m for n, m in vars(CoreModel).items() if n != "n_layers"})
    assert passes_pluggy(cls, PagedDecodeModel)
    found = faults(cls, PAGED)
    assert found["n_layers"].expected == "@hookimpl def n_layers()"
    assert found["n_layers"].found == "no implementation"
    assert set(found) == {"n_layers", *(name for name in vars(PagedMethods) if name.startswith("forward"))}


EXPECTED = f"@hookimpl def {FORWARD}(tokens, cache, session)"

LET_PASS_BY_PLUGGY = {
    "fewer arguments": lambda self, tokens, cache: None,
    "reordered arguments": lambda self, cache, tokens, session: None,
    "a default": lambda self, tokens, cache, session=None: None,
    "by keyword only": lambda self, tokens, cache, *, session: None,
    "by position only": lambda self, tokens, cache, session, /: None,
    "one more by keyword": lambda self, tokens, cache, session, *, mode: None,
    "anything": lambda self, *args, **kwargs: None,
    "no arguments": lambda self: None,
}

REFUSED_BY_PLUGGY = {
    "renamed": lambda self, tokens, kv, session: None,
    "one more": lambda self, tokens, cache, session, mode: None,
}


@pytest.mark.parametrize("function", LET_PASS_BY_PLUGGY.values(), ids=LET_PASS_BY_PLUGGY)
def test_a_signature_that_pluggy_lets_pass_is_refused_with_both_signatures(function):
    cls = with_method(function)
    function.__qualname__ = f"Changed.{FORWARD}"
    assert passes_pluggy(cls)
    (only,) = faults(cls).values()
    bare = str(inspect.signature(function)).replace("(self, ", "(").replace("(self)", "()")
    assert only == Mismatch(FORWARD, EXPECTED, f"{FORWARD}{bare}")


@pytest.mark.parametrize("function", REFUSED_BY_PLUGGY.values(), ids=REFUSED_BY_PLUGGY)
def test_a_signature_that_pluggy_refuses_is_told_once_in_our_words(function):
    (only,) = faults(with_method(function)).values()
    assert only.expected == EXPECTED
    assert only.found.startswith(f"{FORWARD}(tokens, ")


@pytest.mark.parametrize(
    "function",
    [
        lambda self, tokens, cache, session, mode=None: None,
        lambda self, tokens, cache, session, *, mode=None: None,
        lambda self, tokens, cache, session, *more, **others: None,
        lambda this, tokens, cache, session: None,
    ],
    ids=["default", "keyword default", "variadic", "self by another name"],
)
def test_more_arguments_are_accepted_where_every_one_of_them_is_optional(function):
    vet(with_method(function))


def test_annotations_do_not_matter():
    def forward(self, tokens: bytes, cache: "Nonsense", session: int) -> str:  # noqa: F821
        return ""

    vet(with_method(forward))


def test_an_override_without_the_marker_passes_pluggy_and_is_refused():
    cls = with_method(lambda self: 7, "n_layers", mark=False)
    assert passes_pluggy(cls)
    (only,) = faults(cls).values()
    assert only == Mismatch("n_layers", "@hookimpl def n_layers()", "n_layers() without @hookimpl")


def test_the_marker_survives_a_decorator_above_or_below_it():
    def traced(function):
        @functools.wraps(function)
        def run(*args, **kwargs):
            return function(*args, **kwargs)

        return run

    vet(with_method(traced(lambda self, tokens, cache, session: None)))
    vet(with_method(traced(hookimpl(lambda self, tokens, cache, session: None)), mark=False))


@pytest.mark.parametrize("wrap", [staticmethod, classmethod])
def test_a_static_or_class_method_counts_by_how_it_is_called(wrap):
    takes_cls = wrap is classmethod
    function = hookimpl((lambda cls: 1) if takes_cls else (lambda: 1))
    vet(with_method(wrap(function), "n_layers", mark=False))
    vet(with_method(wrap((lambda cls: 1) if takes_cls else (lambda: 1)), "n_layers"))
    wrong = hookimpl((lambda: 1) if takes_cls else (lambda self: 1))
    assert "n_layers" in faults(with_method(wrap(wrong), "n_layers", mark=False))


def test_a_method_that_takes_no_self_is_refused():
    assert faults(with_method(lambda: 1, "n_layers"))["n_layers"].found == "n_layers() without self"


@pytest.mark.parametrize("value", [7, property(lambda self: 7), functools.partial(int, 7)])
def test_what_is_no_method_is_refused_by_its_type(value):
    found = faults(type("Odd", (CoreModel,), {"n_layers": value}))
    assert found["n_layers"].found == f"a {type(value).__name__}"


def test_a_coroutine_or_generator_is_no_implementation():
    async def coroutine(self):
        return 1

    def generator(self):
        yield 1

    assert "as a coroutine" in faults(with_method(coroutine, "n_layers"))["n_layers"].found
    assert "as a generator" in faults(with_method(generator, "n_layers"))["n_layers"].found


def test_a_hook_wrapper_is_no_implementation():
    cls = with_method(hookimpl(wrapper=True)(lambda self: 1), "n_layers", mark=False)
    assert "wrapper" in faults(cls)["n_layers"].found


def test_an_implementation_under_another_name_is_none():
    named = hookimpl(specname="n_layers")(lambda self: 1)
    named.__qualname__ = "Renamed.layers"
    methods = {name: method for name, method in vars(CoreModel).items() if name != "n_layers"}
    cls = type("Renamed", (DecodeModel,), {**methods, "layers": named})
    assert passes_pluggy(cls)
    assert faults(cls)["n_layers"].found == "no implementation"


def test_a_misspelled_method_is_answered_with_the_nearest_right_name():
    found = faults(with_method(lambda self, batch: None, "forward_paged_raged", RaggedModel), ALL)
    (only,) = found.values()
    assert only.subject == "forward_paged_raged"
    assert "nearest: forward_paged_ragged" in only.expected
    assert only.found == "@hookimpl on a name that no tier has"


def test_every_difference_is_told_in_one_error():
    methods = {
        "n_layers": lambda self: 1,
        "vocab_size": hookimpl(lambda self, extra: 1),
        "max_context": 3,
        FORWARD: hookimpl(lambda self, cache, tokens, session: None),
        "forwrad": hookimpl(lambda self: None),
        "froward": hookimpl(lambda self: None),
    }
    found = faults(type("Many", (CoreModel,), methods), PAGED)
    assert set(methods) <= set(found)
    assert "tier 'paged'" in found
    assert "forward_paged_step" in found


@pytest.mark.parametrize(
    ("cls", "tiers", "tier", "base"),
    [
        (CoreModel, PAGED, "paged", "DecodeModel"),
        (PagedModel, ("decode", "paged", "ragged"), "ragged", "PagedDecodeModel"),
        (CoreModel, ("decode", "ragged"), "ragged", "DecodeModel"),
        (int, DECODE, "decode", "no tier"),
    ],
)
def test_a_declared_tier_that_the_class_does_not_have_is_told(cls, tiers, tier, base):
    found = faults(cls, tiers)[f"tier '{tier}'"]
    assert f"derives from {tier.title()}DecodeModel".replace("DecodeDecode", "Decode") in found.expected
    assert found.found == f"a class that derives from {base}"


def test_a_declared_tier_that_is_missing_lists_the_methods_to_write():
    assert set(faults(CoreModel, PAGED)) == {
        "tier 'paged'",
        "forward_paged_step",
        "forward_paged_step_batched",
        "forward_paged_step_persistent",
    }


@pytest.mark.parametrize(
    ("cls", "tiers", "undeclared"),
    [
        (PagedModel, DECODE, {"paged"}),
        (RaggedModel, ("decode", "batched", "paged"), {"ragged"}),
        (RaggedModel, ("decode", "batched", "ragged"), {"paged"}),
        (BatchedModel, DECODE, {"batched"}),
        (RaggedModel, DECODE, {"batched", "paged", "ragged"}),
    ],
)
def test_a_tier_that_the_class_has_and_the_family_does_not_declare_is_told(cls, tiers, undeclared):
    found = faults(cls, tiers)
    assert set(found) == {f"tier {name!r}" for name in undeclared}
    assert all("among the declared tiers" in each.expected for each in found.values())


def test_the_methods_of_a_tier_without_its_base_class_are_told():
    found = faults(type("Duck", (PagedMethods, CoreModel), {}))
    assert found["forward_paged_step"].expected == "a class that derives from PagedDecodeModel"
    unmarked = faults(with_method(lambda self, batch: None, "forward_paged_ragged", mark=False))
    assert unmarked["forward_paged_ragged"].expected == "a class that derives from RaggedDecodeModel"


def test_a_class_that_is_only_registered_as_a_model_has_no_methods():
    class Claimed:
        pass

    DecodeModel.register(Claimed)
    assert faults(Claimed)["n_layers"].found == "no implementation"


def test_the_batched_predicate_without_the_method_is_told():
    cls = with_method(lambda self: True, "supports_batched_decode")
    for tiers in (DECODE, BATCHED):
        (only,) = faults(cls, tiers).values()
        assert only.subject == "supports_batched_decode"
        assert "build_batched_decode_logits" in only.expected


def test_the_batched_method_without_the_predicate_is_told():
    method = vars(BatchedArm)["build_batched_decode_logits"]
    cls = with_method(method, "build_batched_decode_logits")
    for tiers in (DECODE, BATCHED):
        (only,) = faults(cls, tiers).values()
        assert only.subject == "build_batched_decode_logits"
        assert "supports_batched_decode" in only.expected


def test_a_declared_batched_arm_that_is_missing_is_told():
    (only,) = faults(CoreModel, BATCHED).values()
    assert only.subject == "tier 'batched'"
    assert only.found == "neither"


def test_vetting_one_class_leaves_nothing_behind_for_the_next():
    broken = with_method(lambda self, wrong: 1, "n_layers")
    for _ in range(2):
        vet(CoreModel)
        assert set(faults(broken)) == {"n_layers"}
        vet(RaggedModel, ALL)


def test_vetting_makes_no_model_and_runs_no_property():
    def fail(self):
        raise AssertionError

    vet(type("Guarded", (CoreModel,), {"__init__": fail, "weights": property(fail)}))
