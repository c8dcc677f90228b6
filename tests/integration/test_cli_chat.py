"""``fuel chat``: its commands, its lines, its memory."""

from __future__ import annotations

import io
import os
import pty
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support_checkpoints import write_directory

from fuel_core.cli import main
from fuel_core.layers.paged import PagedStep
from fuel_core.text import Tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_directory(tmp_path_factory.mktemp("chat") / "tiny")


Talk = Callable[..., tuple[list[str], str]]


@pytest.fixture
def talk(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Talk:
    """Holds a conversation: what the model was asked last each time, and what went to standard error."""

    def run(said: str, *options: str, code: int = 0) -> tuple[list[str], str]:
        asked: list[str] = []
        real = Tokenizer.encode_chat

        def encode_chat(self: Tokenizer, messages: Any) -> list[int]:
            asked.append(messages[-1]["content"])
            return real(self, messages)

        monkeypatch.setattr(Tokenizer, "encode_chat", encode_chat)
        monkeypatch.setattr(sys, "stdin", io.StringIO(said))
        with pytest.raises(SystemExit) as ended:
            main(["chat", str(model), "--max-new-tokens", "2", *options])
        monkeypatch.setattr(Tokenizer, "encode_chat", real)
        assert int(ended.value.code or 0) == code
        return asked[1:], capsys.readouterr().err  # the first asks whether there is a template

    return run


def test_an_unknown_command_is_answered_and_never_reaches_the_model(talk: Talk) -> None:
    asked, err = talk("/foo\n/\n/clear all\nhi\n")
    assert asked == ["hi"]
    lines = err.splitlines()
    assert [line.split(";")[0] for line in lines] == [
        f"fuel: unknown command {each}" for each in ("/foo", "/", "/clear all")
    ]
    assert all(command in lines[0] for command in ("commands: ", "/clear", "/exit", "/help"))


def test_help_lists_the_commands(talk: Talk) -> None:
    asked, err = talk("/help\n")
    assert asked == []
    assert err.startswith("commands: ")
    assert all(command in err for command in ("/clear", "/exit", "/help", "//"))


def test_two_slashes_send_the_rest_with_one(talk: Talk) -> None:
    assert talk("//etc is a folder\n///x\n//\n") == (["/etc is a folder", "//x", "/"], "")


def test_its_memory_is_what_was_asked_for(talk: Talk) -> None:
    asked, err = talk("hi\n", "--kv-memory", "1KiB", code=2)
    assert (asked, "1024 bytes for KV blocks" in err) == ([], True)
    assert talk("hi\n", "--kv-memory", "1MiB") == (["hi"], "")


def test_in_a_pipe_no_line_editor_is_loaded(model: Path) -> None:
    code = (
        "import sys; from fuel_core.cli import main\n"
        f"try: main(['chat', {str(model)!r}])\n"
        "except SystemExit: print('readline' in sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], input="", capture_output=True, text=True, timeout=120, check=True
    )
    assert ran.stdout.split() == ["False"]


def _until(terminal: int, what: bytes) -> bytes:
    """What the terminal shows up to and with ``what``."""
    shown = b""
    while what not in shown:
        assert select.select([terminal], [], [], 60)[0], shown  # it waits for something else
        shown += os.read(terminal, 1)
    return shown


def test_a_terminal_has_its_lines_again(model: Path) -> None:
    pytest.importorskip("readline")
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "fuel_core", "chat", str(model), "--max-new-tokens", "1"]
    env = {**os.environ, "TERM": "xterm"}
    process = subprocess.Popen(
        command, stdin=follower, stdout=follower, stderr=subprocess.PIPE, env=env, text=True
    )
    os.close(follower)
    try:
        for line in (b"/foo\n", b"\x1b[A\n", b"/bar\x7f\x7f\x7f\x7f/baz\n", b"\x04"):
            _until(leader, b"> ")
            os.write(leader, line)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
        os.close(leader)
    unknown = [line.split(";")[0] for line in err.splitlines() if "unknown" in line]
    assert unknown == [f"fuel: unknown command {each}" for each in ("/foo", "/foo", "/baz")]


def test_a_pass_that_fails_costs_a_reply_and_not_the_conversation(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[object] = []
    real = PagedStep.bind

    def bind(self: PagedStep, tokens: Any, sessions: Any) -> None:
        passes.append(sessions)
        if len(passes) == 1:
            raise RuntimeError("no memory\nfor this")
        real(self, tokens, sessions)

    monkeypatch.setattr(PagedStep, "bind", bind)
    asked, errors = talk("one\ntwo\n", "--kv-memory", "1MiB")
    assert asked == ["one", "two"]
    assert errors.strip().splitlines() == ["fuel: RuntimeError: no memory for this"]
    assert len(passes) > 1
