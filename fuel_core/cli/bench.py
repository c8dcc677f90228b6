"""``fuel bench``: how fast a model decodes and reads prompts on this machine, and how fast it could."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

import click

from fuel_core import registry
from fuel_core.cli.console import echo_json, echo_table, load_model
from fuel_core.cli.options import Count, runtime, runtime_options
from fuel_core.cli.starts import Start, time_starts
from fuel_core.contracts.errors import InvalidRequestError

if TYPE_CHECKING:
    from fuel_core.engine.benchmark import Report


@click.command()
@click.argument("model")
@click.option("--batch", default="1,8,32", show_default=True, metavar="LIST", help="Sessions in lockstep.")
@click.option(
    "--context", type=Count(), default=128, show_default=True, help="Tokens that each holds at first."
)
@click.option("--steps", type=Count(), default=24, show_default=True, help="Tokens that each decodes.")
@click.option(
    "--prompt-len", type=Count(), default=512, show_default=True, help="Tokens of the prompt to read."
)
@runtime_options
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def bench(model: str, batch: str, context: int, steps: int, prompt_len: int, **options: Any) -> None:
    """Measure MODEL: decoding, a prompt, its start, and the memory.

    Each figure is the median of three. Decoding and prompts run on the paged pool, sampling greedily. The
    start is that of `fuel generate` in a process of its own, to its first token; beside it, the time that
    `import torch` takes in another one.
    """
    batches, chosen = parse_batches(batch), runtime(options)
    path = registry.resolve(model)
    # Imports torch, so that the load's time does not have it.
    from fuel_core.engine import benchmark
    from fuel_core.kv.residency import peak_resident_bytes

    plan = benchmark.Plan(batches, context, steps, prompt_len)
    loaded, load_s = load_model(str(path), chosen)
    report = benchmark.measure(loaded, plan, peak_resident_bytes)
    starts = time_starts(model, chosen)
    figures = figures_of(report, load_s, starts)
    echo_json(figures) if options["as_json"] else _echo(report, figures)


def parse_batches(text: str) -> tuple[int, ...]:
    """The numbers of a list such as ``1,8,32``.

    Raises:
        InvalidRequestError: an entry is no integer of at least 1, or is there twice.
    """
    try:
        batches = tuple(int(entry) for entry in text.split(","))
    except ValueError as error:
        raise _bad_batches(repr(text)) from error
    if min(batches) < 1 or len(set(batches)) < len(batches):
        raise _bad_batches(", ".join(map(str, batches)))
    return batches


def _bad_batches(given: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"--batch {given}",
        needed="integers of at least 1, each once, with commas between them",
        remedy="write for example 1,8,32",
    )


def figures_of(report: Report, load_s: float, starts: list[Start]) -> dict[str, Any]:
    """What ``--json`` prints; rates in tokens per second, sizes in bytes or 10⁶ bytes."""
    fraction = report.limit_fraction
    return {
        "decode_tokens_per_s": {str(batch): round(rate.median, 3) for batch, rate in report.decode.items()},
        "prefill_tokens_per_s": round(report.prefill.median, 3),
        "load_s": round(load_s, 4),
        "first_token_s": round(median(start.first_token_s for start in starts), 4),
        "import_torch_s": round(median(start.import_torch_s for start in starts), 4),
        "peak_rss_mb": round(report.peak_bytes / 1e6, 1),
        "weight_bytes": report.weight_bytes,
        "read_bandwidth_gb_s": round(report.bandwidth / 1e9, 3),
        "bandwidth_limit_fraction": None if fraction is None else round(fraction, 4),
    }


def _echo(report: Report, figures: dict[str, Any]) -> None:
    rows = [
        *([f"decode, {batch} together", f"{rate} tokens/s"] for batch, rate in report.decode.items()),
        ["prompt", f"{report.prefill} tokens/s"],
        ["load", f"{figures['load_s']:.2f} s"],
        ["start to first token", f"{figures['first_token_s']:.2f} s"],
        ["import torch alone", f"{figures['import_torch_s']:.2f} s"],
        ["peak memory", f"{figures['peak_rss_mb']:.0f} MB"],
        ["weights read per step", f"{figures['weight_bytes'] / 1e6:.1f} MB"],
        ["memory bandwidth", f"{figures['read_bandwidth_gb_s']:.1f} GB/s"],
    ]
    if report.limit_fraction is not None:
        rows.append(["decode of 1 / bandwidth's limit", f"{report.limit_fraction:.0%}"])
    echo_table(["", "median (least to most)"], rows)
