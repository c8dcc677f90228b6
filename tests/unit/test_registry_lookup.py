"""What is asked for is found, or the error says what to do."""

import os
from pathlib import Path

import pytest
from support_plugins import FakeCheckpoint, entry, family, info_of, plugin, registry, weight_format

from fuel_core.contracts.errors import (
    CheckpointError,
    DownloadError,
    FuelError,
    InvalidRequestError,
    PluginError,
)
from fuel_core.registry import nearest
from fuel_core.registry.missing import distribution_of
from fuel_core.registry.records import Kind
from fuel_core.registry.references import ALIASES


def lookup_error(made, name: str) -> PluginError:
    with pytest.raises(PluginError) as caught:
        made.family(name)
    assert "\n" not in str(caught.value)
    assert str(caught.value)[0].islower()
    return caught.value


def test_a_family_is_found_by_its_name():
    toy = family("toy")
    made = registry(entry(plugin(toy, family("other"))))
    assert made.families()["toy"] is toy is made.family("toy")


def test_an_unknown_family_is_refused_with_all_and_the_nearest():
    error = lookup_error(registry(entry(plugin(family("mamba"), family("gemma")))), "gema")
    assert "'gema'" in str(error)
    assert "one of mamba, gemma (nearest: gemma)" in error.needed
    assert (error.nearest, error.known) == ("gemma", ("mamba", "gemma"))


@pytest.mark.parametrize(
    ("name", "distribution"),
    [
        ("llama", "fuel-plugin-llama"),
        ("qwen2", "fuel-plugin-qwen3"),
        ("qwen3", "fuel-plugin-qwen3"),
        ("llama-gguf", "fuel-plugin-quantized"),
        ("qwen2-gguf", "fuel-plugin-quantized"),
        ("qwen3-gguf", "fuel-plugin-quantized"),
    ],
)
def test_a_family_that_is_not_installed_names_the_package_to_install(name, distribution):
    error = lookup_error(registry(), name)
    assert f"pip install {distribution}" in error.remedy
    assert error.distribution == distribution


def test_an_unknown_stranger_names_no_package():
    assert "pip install" not in str(lookup_error(registry(), "mamba"))


def test_a_broken_package_is_to_be_mended_and_not_installed_again():
    error = lookup_error(registry(entry(ImportError("gone"), "llama")), "llama")
    assert "upgrade or mend fuel-plugin-llama" in error.remedy
    assert "gone" in error.remedy


def test_every_broken_plugin_is_named_and_a_sound_one_is_not():
    made = registry(
        entry(ImportError("gone"), "one"),
        entry(ValueError("odd"), "two"),
        entry(plugin(family("fine")), "three"),
    )
    error = lookup_error(made, "x")
    assert "fuel-plugin-one 1.0: ImportError: gone" in str(error)
    assert "fuel-plugin-two 1.0: ValueError: odd" in str(error)
    assert "fuel-plugin-three" not in str(error)
    assert [info.name for info in error.broken] == ["one", "two"]


def test_a_plugin_that_is_known_to_bring_something_else_is_not_blamed():
    made = registry(
        entry(plugin(family("old", api_version="0.1")), "old"),
        entry(plugin(family("odd"), fuel_resolve_model=lambda ref: 1 / 0), "odd"),
    )
    with pytest.raises(InvalidRequestError):
        made.resolve("x")
    assert info_of(made, "odd").error
    error = lookup_error(made, "absent")
    assert error.broken == ()
    assert error.__cause__ is None


BOTH = {
    "architectures": ("ToyForCausalLM",),
    "gguf_architectures": ("toy",),
    "weight_formats": ("safetensors", "gguf"),
}


def test_a_checkpoints_family_is_that_of_its_format_and_architecture():
    hugging_face = family("hf", architectures=("same",))
    gguf = family("gguf", architectures=(), gguf_architectures=("same",), weight_formats=("gguf",))
    made = registry(entry(plugin(hugging_face, gguf)))
    assert made.family_for(FakeCheckpoint("same", "safetensors")) is hugging_face
    assert made.family_for(FakeCheckpoint("same", "gguf")) is gguf


def test_the_architectures_of_one_format_are_not_those_of_the_other():
    made = registry(entry(plugin(family(**BOTH))))
    assert made.family_for(FakeCheckpoint("toy", "gguf")).name == "toy"
    for architecture, form in (("toy", "safetensors"), ("ToyForCausalLM", "gguf")):
        with pytest.raises(CheckpointError, match=architecture):
            made.family_for(FakeCheckpoint(architecture, form))


def test_a_family_that_does_not_load_the_format_is_refused():
    made = registry(entry(plugin(family(weight_formats=("safetensors",)))))
    with pytest.raises(CheckpointError, match="'toy'; needed: one of safetensors"):
        made.family_for(FakeCheckpoint("ToyForCausalLM", "awq"))


def test_an_unknown_architecture_is_refused_by_name_with_all_that_are_known():
    made = registry(entry(plugin(family(**BOTH))))
    with pytest.raises(CheckpointError, match=r"'TojForCausalLM'; needed: one of ToyForCausalLM \(nearest"):
        made.family_for(FakeCheckpoint("TojForCausalLM"))


def test_an_unknown_architecture_is_the_checkpoints_fault_unless_a_plugin_that_failed_may_have_it():
    sound = registry(entry(plugin(family(**BOTH))))
    with pytest.raises(CheckpointError) as caught:
        sound.family_for(FakeCheckpoint("TojForCausalLM"))
    assert (caught.value.nearest, caught.value.broken) == ("ToyForCausalLM", ())
    with pytest.raises(PluginError):
        sound.family("toj")  # no checkpoint is at fault where a family is asked for by name
    broken = registry(entry(plugin(family(**BOTH))), entry(ImportError("gone"), "one"))
    with pytest.raises(PluginError, match="ImportError: gone"):
        broken.family_for(FakeCheckpoint("TojForCausalLM"))


@pytest.mark.parametrize(
    ("kind", "name", "distribution"),
    [
        (Kind.ARCHITECTURE, "LlamaForCausalLM", "fuel-plugin-llama"),
        (Kind.ARCHITECTURE, "MistralForCausalLM", "fuel-plugin-llama"),
        (Kind.ARCHITECTURE, "Qwen2ForCausalLM", "fuel-plugin-qwen3"),
        (Kind.ARCHITECTURE, "Qwen3ForCausalLM", "fuel-plugin-qwen3"),
        (Kind.GGUF_ARCHITECTURE, "llama", "fuel-plugin-quantized"),
        (Kind.GGUF_ARCHITECTURE, "qwen3", "fuel-plugin-quantized"),
        (Kind.ARCHITECTURE, "MambaForCausalLM", None),
        (Kind.ARCHITECTURE, "strange-gguf", None),
    ],
)
def test_an_architecture_of_ours_names_the_package_that_brings_it(kind, name, distribution):
    assert distribution_of((kind, name)) == distribution


def test_a_contested_architecture_is_refused_by_both_distributions():
    made = registry(
        entry(plugin(family("one", architectures=("X",))), "one"),
        entry(plugin(family("two", architectures=("X",))), "two"),
    )
    with pytest.raises(PluginError, match=r"fuel-plugin-two 1\.0 and fuel-plugin-one 1\.0"):
        made.family_for(FakeCheckpoint("X"))
    assert made.family("one").name == "one"


def formats(*made):
    return registry(*(entry(plugin(formats=[each]), each.name) for each in made))


def test_the_first_format_that_matches_opens_a_checkpoint(tmp_path):
    path = tmp_path / "model.two"
    path.touch()
    made = formats(
        weight_format("a", suffix=".one", opened="first"),
        weight_format("b", suffix=".two", opened="second"),
        weight_format("c", suffix=".two", opened="third"),
    )
    assert made.open_checkpoint(path) == "second"


def test_a_file_of_no_format_is_refused_with_what_it_holds_and_what_is_known(tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(b"\x80\x02odd")
    with pytest.raises(CheckpointError) as caught:
        formats(weight_format("gguf"), weight_format("safetensors")).open_checkpoint(path)
    assert str(caught.value).startswith("no model:")
    for said in ("5 bytes", "odd", "gguf, safetensors", str(path)):
        assert said in str(caught.value)


def test_a_directory_of_no_format_is_refused_with_what_it_holds(tmp_path):
    with pytest.raises(CheckpointError, match="holds nothing"):
        formats(weight_format("gguf")).open_checkpoint(tmp_path)
    for name in "abcdefg":
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match="holds a, b, c, d, e and 2 more"):
        formats(weight_format("gguf")).open_checkpoint(tmp_path)


def test_a_path_to_nothing_is_refused_and_no_format_is_asked(tmp_path):
    asked = []
    made = formats(weight_format("odd", matches=lambda path: asked.append(path)))
    with pytest.raises(CheckpointError, match="neither a file nor a directory"):
        made.open_checkpoint(tmp_path / "gone")
    assert asked == []


def test_a_pipe_is_refused_without_waiting_for_a_writer(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="neither a file nor a directory"):
        formats(weight_format("odd", suffix="")).open_checkpoint(tmp_path / "pipe")


def test_a_path_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no model"):
        formats(weight_format("odd")).open_checkpoint(tmp_path / ("x" * 300))


def test_without_any_format_the_error_says_that_none_is_registered(tmp_path):
    with pytest.raises(CheckpointError, match="a plugin that registers a format"):
        registry().open_checkpoint(tmp_path)


def test_a_format_that_fails_to_look_is_kept_as_a_failure_and_the_next_one_asked(tmp_path):
    made = formats(
        weight_format("a", matches=lambda path: 1 / 0), weight_format("b", suffix="", opened="model")
    )
    assert made.open_checkpoint(tmp_path) == "model"
    assert isinstance(info_of(made, "a").error, ZeroDivisionError)
    assert info_of(made, "b").error is None


def test_a_reader_that_fails_is_named_with_its_distribution_and_its_typed_errors_pass(tmp_path):
    def fail(path):
        raise RuntimeError("torn")

    def refuse(path):
        raise CheckpointError("torn", needed="a whole one", remedy="fetch it again")

    with pytest.raises(
        PluginError, match=r"reader of odd of fuel-plugin-odd 1\.0 failed: RuntimeError: torn"
    ):
        formats(weight_format("odd", suffix="", open=fail)).open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"^torn; needed: a whole one"):
        formats(weight_format("odd", suffix="", open=refuse)).open_checkpoint(tmp_path)


def resolvers(**functions):
    return registry(
        *(entry(plugin(fuel_resolve_model=function), name) for name, function in functions.items())
    )


def test_the_first_plugin_that_answers_a_reference_decides():
    asked = []

    def answer(name, path):
        def resolve(ref):
            asked.append((name, ref))
            return path

        return resolve

    made = resolvers(a=answer("a", Path("/a")), b=answer("b", Path("/b")), c=answer("c", None))
    assert made.resolve("some:ref") == Path("/b")
    assert asked == [("c", "some:ref"), ("b", "some:ref")]


def test_the_core_is_asked_last_so_that_a_plugin_may_answer_for_it():
    ours = entry(plugin(fuel_resolve_model=lambda ref: Path("/core")), "core", distribution="fuel-core")
    theirs = entry(plugin(fuel_resolve_model=lambda ref: Path("/mirror")), "aaa", distribution="aaa")
    assert registry(ours, theirs).resolve("x") == Path("/mirror")
    assert registry(ours).resolve("x") == Path("/core")


def test_a_resolver_that_raises_does_not_stop_the_next():
    made = resolvers(a=lambda ref: Path("/found"), broken=lambda ref: 1 / 0)
    assert made.resolve("x") == Path("/found")
    assert isinstance(info_of(made, "broken").error, ZeroDivisionError)
    assert info_of(made, "a").error is None


def test_a_resolver_that_ends_the_process_or_answers_with_text_is_a_failure():
    def leave(ref):
        raise SystemExit

    made = resolvers(a=lambda ref: Path("/found"), text=lambda ref: "/text", leave=leave)
    assert made.resolve("x") == Path("/found")
    assert "returned str" in str(info_of(made, "text").error)
    assert "SystemExit" in str(info_of(made, "leave").error)


def test_a_typed_error_about_the_reference_is_the_answer_unless_another_plugin_has_one():
    def unreachable(ref):
        raise DownloadError("no connection", needed="one", remedy="try again")

    with pytest.raises(DownloadError, match="no connection"):
        resolvers(a=lambda ref: None, net=unreachable).resolve("hf:a/b")
    made = resolvers(a=lambda ref: Path("/found"), net=unreachable)
    assert made.resolve("hf:a/b") == Path("/found")
    assert info_of(made, "net").error is None


def test_a_reference_that_nobody_knows_names_the_nearest_alias_and_the_kinds():
    with pytest.raises(InvalidRequestError) as caught:
        resolvers(a=lambda ref: None).resolve("smolm2")
    assert "smollm2" in ALIASES
    for said in (
        "'smolm2'",
        "nearest alias: smollm2",
        "pypi:",
        "hf:ORG/NAME",
        "GGUF file",
        "model directory",
    ):
        assert said in str(caught.value)


def test_a_reference_that_nobody_knows_is_chained_to_the_plugin_that_failed():
    with pytest.raises(InvalidRequestError, match="ZeroDivisionError") as caught:
        resolvers(a=lambda ref: 1 / 0).resolve("zzz")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "nearest" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "found"), [("lama", "llama"), ("LLAMA", "llama"), ("qwen-3", "qwen3"), ("xyz", None)]
)
def test_the_nearest_name_is_close_whatever_its_case_or_none(name, found):
    assert nearest(name, ["llama", "qwen3"]) == found


def test_every_refusal_is_an_error_of_ours():
    made = registry()
    for ask in (made.family, made.resolve, lambda name: made.family_for(FakeCheckpoint(name))):
        with pytest.raises(FuelError):
            ask("nothing")
