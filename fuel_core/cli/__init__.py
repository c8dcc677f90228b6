"""The ``fuel`` command line."""

from fuel_core.cli.main import main

__all__ = ["main"]
