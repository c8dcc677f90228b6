"""The command group, and how errors become exit codes."""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import click

from fuel_core import __version__, registry
from fuel_core.cli.bench import bench
from fuel_core.cli.chat import chat
from fuel_core.cli.console import as_typed
from fuel_core.cli.generate import generate
from fuel_core.cli.inspect import doctor, models, plugins
from fuel_core.cli.pull import pull
from fuel_core.contracts.errors import (
    CapacityError,
    CheckpointError,
    FuelError,
    InvalidRequestError,
    PluginError,
)

_BAD_INPUT = (InvalidRequestError, CheckpointError, CapacityError)
_INTERRUPTED = 128 + signal.SIGINT  # as a shell says it


class _Commands(click.Group):
    """A group whose errors know which command was used wrongly; click's do not, where a value is missing."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            command = self.commands.get(ctx.invoked_subcommand or "")
            if error.ctx is None and command is not None:
                error.ctx = click.Context(command, info_name=command.name, parent=ctx)
            raise


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fuel")
def cli() -> None:
    """Run language models whose families are plugins."""


for command in (generate, chat, bench, models, plugins, pull, doctor):
    cli.add_command(command)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 2 wrong usage or bad input, 130 interrupted, 1 anything else."""
    # Idle OpenMP threads that spin starve whatever else runs on the machine, and are starved in turn.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (for as long as the process lives)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a model may say what the terminal's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(_run(args))


def _run(args: Sequence[str] | None) -> int:
    try:
        registry.add_commands(cli)
        cli.main(args, prog_name="fuel", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 0
    except click.UsageError as error:
        return _say(_usage(error), 2)
    except click.ClickException as error:
        return _say(error.format_message(), 2)
    except FuelError as error:
        if os.environ.get("FUEL_TRACEBACK"):
            traceback.print_exception(error)
        return _say(as_typed(error, cli), 2 if isinstance(error, _BAD_INPUT) or _is_lacking(error) else 1)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return _INTERRUPTED
    except OSError as error:
        # Nothing can be written any more; Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1 if isinstance(error, BrokenPipeError) else _say(f"cannot write: {error}", 1)
    return 0


def _is_lacking(error: FuelError) -> bool:
    """Whether a family is asked for that no plugin has, and none is broken that might have it."""
    return isinstance(error, PluginError) and "known" in error.figures and not error.figures["broken"]


def _usage(error: click.UsageError) -> str:
    command = error.ctx.command_path if error.ctx else "fuel"
    said = f"{error.format_message().rstrip('.')}; see {command} --help"
    takes_prompt = error.ctx is not None and any(p.name == "prompt" for p in error.ctx.command.params)
    if isinstance(error, click.NoSuchOption) and takes_prompt:
        said += ", or put -- before a prompt that begins with -"
    return said


def _say(text: str, code: int) -> int:
    click.echo(f"fuel: {' '.join(text.split())}", err=True)
    return code
