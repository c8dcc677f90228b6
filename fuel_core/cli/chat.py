"""``fuel chat``: a conversation in the terminal."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

import click

from fuel_core.cli.console import load_model
from fuel_core.cli.options import runtime, runtime_options, sampling_options, sampling_params
from fuel_core.contracts import FinishReason, FuelError, RaggedDecodeModel
from fuel_core.contracts.requests import check_lengths
from fuel_core.registry.naming import one_line

if TYPE_CHECKING:
    from fuel_core.contracts import SamplingParams
    from fuel_core.engine import Engine, Loaded

Messages = list[dict[str, str]]


@click.command()
@click.argument("model")
@click.option("--system", metavar="TEXT", help="A system message.")
@click.option("--max-new-tokens", type=int, default=512, show_default=True, metavar="N", help="Per reply.")
@sampling_options
@runtime_options
def chat(model: str, system: str | None, max_new_tokens: int, **options: Any) -> None:
    """Talk with MODEL. Ctrl-C ends a reply, Ctrl-D or /exit the conversation, /clear forgets it."""
    if sys.stdin.isatty():
        click.echo("Ctrl-C ends a reply, /clear forgets the conversation, Ctrl-D or /exit ends it.", err=True)
    params = sampling_params(options)
    check_lengths(params, max_new_tokens)
    loaded, _ = load_model(model, runtime(options))
    start: Messages = [{"role": "system", "content": system}] if system else []
    loaded.tokenizer.encode_chat(
        [*start, {"role": "user", "content": "?"}]
    )  # a model without a template ends here
    engine = _engine(loaded)
    messages = list(start)
    while (said := _ask()) is not None:
        if said == "/clear":
            messages = list(start)
        elif said:
            messages = _reply(loaded, engine, messages, said, params, max_new_tokens)


def _engine(loaded: Loaded) -> Engine | None:
    """An engine for the whole conversation, so that what was said before is not computed again."""
    from fuel_core.engine import build_engine

    return build_engine(loaded, max_batch=1) if isinstance(loaded.model, RaggedDecodeModel) else None


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


def _reply(
    loaded: Loaded, engine: Engine | None, messages: Messages, said: str, params: SamplingParams, limit: int
) -> Messages:
    """Stream a reply; the conversation with it, or as it was where it could not be given."""
    from fuel_core.engine import stream

    asked = [*messages, {"role": "user", "content": said}]
    text = ""
    try:
        prompt = loaded.tokenizer.encode_chat(asked)
        with closing(stream(loaded, [prompt], params, max_new_tokens=limit, engine=engine)) as deltas:
            for delta in deltas:
                click.echo(delta.text, nl=False)
                text += delta.text
                if delta.completion is not None and delta.completion.error is not None:
                    raise delta.completion.error
        if delta.finish_reason is FinishReason.LENGTH:
            click.echo(f" (cut at {limit} tokens)", nl=False)
    except KeyboardInterrupt:
        click.echo(" (stopped)", nl=False)
    except FuelError as error:
        click.echo(f"fuel: {one_line(error)}", err=True)
        return messages
    click.echo()
    return [*asked, {"role": "assistant", "content": text}]
