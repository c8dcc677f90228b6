"""Options that several commands take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from fuel_core.contracts import SamplingParams

_F = TypeVar("_F", bound=Callable[..., Any])

_SAMPLING = (
    click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy."),
    click.option("--top-k", type=int, default=0, help="Keep the k most probable tokens; 0 keeps all."),
    click.option("--top-p", type=float, default=1.0, help="Keep the most probable tokens up to this mass."),
    click.option("--min-p", type=float, default=0.0, help="Drop tokens below this share of the best one's."),
    click.option("--seed", type=int, default=None, help="Of the random numbers; none draws one."),
    click.option(
        "--stop", multiple=True, metavar="TEXT", help="End the output before this text. May be repeated."
    ),
)
_RUNTIME = (
    click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1, ..."),
    click.option("--dtype", default="auto", show_default=True, help="auto, float32, bfloat16 or float16."),
    click.option(
        "--kv-dtype", default="auto", show_default=True, help="Of cached keys and values; as --dtype."
    ),
    click.option("--kernels", metavar="NAME", help="native, reference or a plugin's; see fuel doctor."),
    click.option("--threads", type=int, metavar="N", help="Of the CPU; one on each core if not given."),
)


def _all(options: tuple[Callable[[_F], _F], ...]) -> Callable[[_F], _F]:
    def decorate(function: _F) -> _F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


sampling_options = _all(_SAMPLING)
runtime_options = _all(_RUNTIME)


def runtime(options: dict[str, Any]) -> dict[str, Any]:
    """Take the runtime options out of a command's keyword arguments: those that ``load`` takes."""
    return {name: options.pop(name) for name in ("device", "dtype", "kv_dtype", "kernels", "threads")}


def sampling_params(options: dict[str, Any]) -> SamplingParams:
    """Take the sampling options out of a command's keyword arguments.

    Raises:
        InvalidRequestError: one is out of range.
    """
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "stop")
    return SamplingParams(**{name: options.pop(name) for name in names})
