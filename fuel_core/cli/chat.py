"""``fuel chat``: a conversation in the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from fuel_core.cli.console import load_model, one_line
from fuel_core.cli.options import runtime_options, sampling_options, sampling_params
from fuel_core.contracts.errors import FuelError

if TYPE_CHECKING:
    from fuel_core.contracts import SamplingParams
    from fuel_core.engine import Loaded

Messages = list[dict[str, str]]


@click.command()
@click.argument("model")
@click.option("--system", metavar="TEXT", help="A system message.")
@click.option("--max-new-tokens", type=int, default=512, show_default=True, metavar="N", help="Per reply.")
@sampling_options
@runtime_options
def chat(model: str, system: str | None, max_new_tokens: int, **options: Any) -> None:
    """Talk with MODEL. Ctrl-C ends a reply, Ctrl-D or /exit the conversation, /clear forgets it."""
    params = sampling_params(options)
    loaded, _ = load_model(model, **options)
    start: Messages = [{"role": "system", "content": system}] if system else []
    loaded.tokenizer.encode_chat(
        [*start, {"role": "user", "content": "?"}]
    )  # a model without a template ends here
    messages = list(start)
    while (said := _ask()) is not None:
        if said == "/clear":
            messages = list(start)
        elif said:
            messages = _reply(loaded, messages, said, params, max_new_tokens)


def _ask() -> str | None:
    """What the user says; None at the end of the conversation."""
    try:
        said = input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        click.echo()
        return None
    return None if said == "/exit" else said


def _reply(loaded: Loaded, messages: Messages, said: str, params: SamplingParams, limit: int) -> Messages:
    """Stream a reply; the conversation with it, or as it was where it could not be given."""
    from fuel_core.engine import stream

    asked = [*messages, {"role": "user", "content": said}]
    text = ""
    try:
        for delta in stream(loaded, [loaded.tokenizer.encode_chat(asked)], params, max_new_tokens=limit):
            click.echo(delta.text, nl=False)
            text += delta.text
            if delta.completion is not None and delta.completion.error is not None:
                raise delta.completion.error
    except KeyboardInterrupt:
        click.echo(" (stopped)", nl=False)
    except FuelError as error:
        click.echo(f"fuel: {one_line(error)}", err=True)
        return messages
    click.echo()
    return [*asked, {"role": "assistant", "content": text}]
