"""Options that several commands take, checked before anything heavy is imported."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from fuel_core import registry
from fuel_core.contracts import DTYPES, SamplingParams
from fuel_core.contracts.errors import InvalidRequestError
from fuel_core.contracts.memory import parse_kv_memory
from fuel_core.registry.naming import one_of

_F = TypeVar("_F", bound=Callable[..., Any])
_MOST_THREADS = 1024  # as the engine's, which cannot be asked without importing torch


class Count(click.IntRange):
    """An integer of at least 1, refused as Fuel's errors are."""

    def __init__(self) -> None:
        super().__init__(min=1)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Raise InvalidRequestError for a number below 1, naming the option."""
        number: int = click.INT.convert(value, param, ctx)
        if number < 1:
            option = param.opts[0] if param else "a count"
            raise InvalidRequestError(
                f"{option} {number}", needed="an integer of at least 1", remedy=f"raise {option}"
            )
        return number


def _threads(_: click.Context, __: click.Parameter, threads: int | None) -> int | None:
    cores = os.cpu_count() or 1
    if threads is None or 1 <= threads <= cores:
        return threads
    if not 1 <= threads <= _MOST_THREADS:
        raise InvalidRequestError(
            f"{threads} threads",
            needed=f"an integer in [1, {_MOST_THREADS}]",
            remedy="leave --threads out, for one on each core",
        )
    click.echo(f"fuel: {threads} threads on {cores} cores get in each other's way", err=True)
    return threads


def _kernels(_: click.Context, __: click.Parameter, asked: str | None) -> str | None:
    """The name, where it or that of ``FUEL_KERNELS`` is one of some kernels."""
    wanted = asked or os.environ.get("FUEL_KERNELS")
    known = registry.kernel_backends()
    if wanted and known and wanted not in known:
        raise InvalidRequestError(
            f"--kernels {asked!r}" if asked else f"FUEL_KERNELS={wanted}",
            needed=one_of(wanted, known, none=""),
            remedy="choose one of these, or install the plugin that brings them",
        )
    return asked


def _kv_memory(_: click.Context, __: click.Parameter, size: str) -> str:
    parse_kv_memory(size)
    return size


_SAMPLING = (
    click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy."),
    click.option("--top-k", type=int, default=0, help="Keep the k most probable tokens; 0 keeps all."),
    click.option("--top-p", type=float, default=1.0, help="Keep the most probable tokens up to this mass."),
    click.option("--min-p", type=float, default=0.0, help="Drop tokens below this share of the best one's."),
    click.option("--seed", type=int, default=None, help="Of the random numbers; none draws one."),
    click.option(
        "--repetition-penalty",
        type=float,
        default=1.0,
        help="Above 1, make tokens of prompt and output less likely.",
    ),
    click.option(
        "--presence-penalty",
        type=float,
        default=0.0,
        help="Taken from the logit of each token in the output.",
    ),
    click.option(
        "--frequency-penalty", type=float, default=0.0, help="The same, once for each time that it is there."
    ),
    click.option(
        "--stop", multiple=True, metavar="TEXT", help="End the output before this text. May be repeated."
    ),
    click.option(
        "--min-new-tokens", type=int, default=0, metavar="N", help="Nothing ends the output before so many."
    ),
    click.option("--ignore-eos", is_flag=True, help="Go on where the model would end."),
)
_SAMPLING_NAMES = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "stop", "min_new_tokens", "ignore_eos"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
_RUNTIME = (
    click.option(
        "--device",
        default="auto",
        show_default=True,
        help="cpu, or what else PyTorch sees (cuda, cuda:1, ...); auto takes a GPU where there is one.",
    ),
    click.option("--dtype", type=click.Choice(("auto", *DTYPES)), default="auto", show_default=True),
    click.option(
        "--kv-dtype",
        type=click.Choice(("auto", *DTYPES)),
        default="auto",
        show_default=True,
        help="Of cached keys and values.",
    ),
    click.option(
        "--kernels",
        metavar="NAME",
        callback=_kernels,
        help="native, reference or a plugin's; see fuel doctor.",
    ),
    click.option(
        "--threads",
        type=int,
        metavar="N",
        callback=_threads,
        help=f"Of the CPU, up to {_MOST_THREADS}, with a warning above its cores; one on each if not given.",
    ),
)


def _all(options: tuple[Callable[[_F], _F], ...]) -> Callable[[_F], _F]:
    def decorate(function: _F) -> _F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


sampling_options = _all(_SAMPLING)
runtime_options = _all(_RUNTIME)
kv_memory_option = click.option(
    "--kv-memory",
    default="auto",
    show_default=True,
    metavar="SIZE",
    callback=_kv_memory,
    help="auto, 2GiB, 500M, 40%, ...",
)


def runtime(options: dict[str, Any]) -> dict[str, Any]:
    """Take the runtime options out of a command's keyword arguments: those that ``load`` takes."""
    return {name: options.pop(name) for name in ("device", "dtype", "kv_dtype", "kernels", "threads")}


def sampling_params(options: dict[str, Any]) -> SamplingParams:
    """Take the sampling options out of a command's keyword arguments.

    Raises:
        InvalidRequestError: one is out of range, or would have no effect at temperature 0.
    """
    params = SamplingParams(**{name: options.pop(name) for name in _SAMPLING_NAMES})
    greedy = SamplingParams()
    for name in ("top_k", "top_p", "min_p"):
        if params.temperature == 0 and (value := getattr(params, name)) != getattr(greedy, name):
            raise InvalidRequestError(
                f"{name} = {value:g} with temperature 0",
                needed="a temperature above 0: at 0 the most probable token is always taken",
                remedy=f"add --temperature 0.8, or leave {name} out",
            )
    return params
