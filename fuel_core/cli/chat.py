"""``fuel chat``: a conversation in the terminal."""

from __future__ import annotations

import importlib
import sys
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

import click

from fuel_core.cli.console import as_typed, load_model
from fuel_core.cli.options import (
    Count,
    kv_memory_option,
    runtime,
    runtime_options,
    sampling_options,
    sampling_params,
)
from fuel_core.contracts import FinishReason, FuelError, RaggedDecodeModel
from fuel_core.contracts.errors import InvalidRequestError
from fuel_core.contracts.requests import check_lengths

if TYPE_CHECKING:
    from fuel_core.contracts import SamplingParams
    from fuel_core.engine import Engine, Loaded

Messages = list[dict[str, str]]

_COMMANDS = {
    "/clear": "forgets the conversation",
    "/exit": "ends it, as Ctrl-D does",
    "/help": "lists the commands",
}


@click.command()
@click.argument("model")
@click.option("--system", metavar="TEXT", help="A system message.")
@click.option(
    "--max-new-tokens", type=Count(), default=512, show_default=True, metavar="N", help="Per reply."
)
@sampling_options
@kv_memory_option
@runtime_options
def chat(model: str, system: str | None, max_new_tokens: int, kv_memory: str, **options: Any) -> None:
    """Talk with MODEL. Ctrl-C ends a reply, Ctrl-D or /exit the conversation, /help lists the commands."""
    if sys.stdin.isatty():
        click.echo("Ctrl-C ends a reply, Ctrl-D the conversation, /help lists the commands.", err=True)
    params = sampling_params(options)
    check_lengths(params, max_new_tokens)
    loaded, _ = load_model(model, runtime(options))
    start: Messages = [{"role": "system", "content": system}] if system else []
    loaded.tokenizer.encode_chat(
        [*start, {"role": "user", "content": "?"}]
    )  # a model without a template ends here
    engine = _engine(loaded, kv_memory)
    _edit_lines()
    messages = list(start)
    while (said := _ask()) is not None:
        if said == "/clear":
            messages = list(start)
        elif (text := _message(said)) is not None:
            messages = _reply(loaded, engine, messages, text, params, max_new_tokens)


def _engine(loaded: Loaded, kv_memory: str) -> Engine | None:
    """An engine for the whole conversation, so that what was said before is not computed again."""
    from fuel_core.engine import build_engine

    if not isinstance(loaded.model, RaggedDecodeModel):
        if kv_memory != "auto":
            raise InvalidRequestError(
                f"kv_memory = {kv_memory}",
                needed="auto: this model keeps a cache for each session",
                remedy="leave it out",
            )
        return None
    return build_engine(loaded, kv_memory=kv_memory, max_batch=1)


def _edit_lines() -> None:
    """Give a terminal's lines editing and a history, where this Python has them."""
    if sys.stdin.isatty():
        with suppress(ImportError):
            importlib.import_module("readline")  # input() uses it once it is there


def _ask() -> str | None:
    """What the user says; None at the end of the conversation."""
    try:
        said = input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        click.echo()
        return None
    except KeyboardInterrupt:
        click.echo()
        return ""
    return None if said == "/exit" else said


def _message(said: str) -> str | None:
    """What of a line is for the model. A command is answered here, and ``//`` stands for one slash."""
    if said.startswith("//"):
        return said[1:]
    if said.startswith("/"):
        click.echo(_help() if said == "/help" else f"fuel: unknown command {said}; {_help()}", err=True)
        return None
    return said or None


def _help() -> str:
    commands = ", ".join(f"{name} {effect}" for name, effect in _COMMANDS.items())
    return f"commands: {commands}; // begins a message that begins with /"


def _reply(
    loaded: Loaded, engine: Engine | None, messages: Messages, said: str, params: SamplingParams, limit: int
) -> Messages:
    """Stream a reply; the conversation with it, or as it was where it could not be given."""
    from fuel_core.engine import stream

    asked = [*messages, {"role": "user", "content": said}]
    text, error = "", None
    try:
        prompt = loaded.tokenizer.encode_chat(asked)
        with closing(stream(loaded, [prompt], params, max_new_tokens=limit, engine=engine)) as deltas:
            for delta in deltas:
                click.echo(delta.text, nl=False)
                text += delta.text
                if delta.completion is not None:
                    error = delta.completion.error
        if delta.finish_reason is FinishReason.LENGTH:
            click.echo(f" (cut at {limit} tokens)", nl=False)
    except KeyboardInterrupt:
        click.echo(" (stopped)", nl=False)
    except FuelError as refused:
        error = refused
    if error is not None:
        click.echo(f"fuel: {as_typed(error)}", err=True)
        return messages
    click.echo()
    return [*asked, {"role": "assistant", "content": text}]
