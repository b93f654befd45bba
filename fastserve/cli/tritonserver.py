"""`fastserve tritonserver`: the command line of Triton, for scripts that have one.

Its defaults are Triton's: ports 8000, 8001 and 8002 on every address, models loaded once.
"""

from __future__ import annotations

import sys

import click

from fastserve.config import Settings, load_settings
from fastserve.config.tritonserver import flag_settings, read_flags, usage
from fastserve.errors import ConfigError

BAD_FLAGS = 1  # the original's exit status


@click.command(
    "tritonserver",
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    short_help="Serve with Triton's own flags.",
)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def tritonserver(flags: tuple[str, ...]) -> None:
    """Serve with Triton's flags: --model-repository, --http-port, --grpc-port, --log-verbose, --load-model,
    --model-control-mode, --cache-config, --trace-config and others.

    \b
    Example:
      fastserve tritonserver --model-repository=/models --http-port=8000 --log-verbose=1
    """
    from fastserve.server import run

    if {"--help", "-h"} & set(flags):
        click.echo(f"{click.get_current_context().get_help()}\n\n{usage()}")
        return
    sys.exit(run(read_settings(flags)))


def read_settings(flags: tuple[str, ...]) -> Settings:
    """What the flags ask for; ends the process when one cannot be taken."""
    read = read_flags(flags)
    for fault in read.faults:
        click.echo(f"error: {fault}", err=True)
    if read.faults:
        sys.exit(BAD_FLAGS)
    for name in read.ignored:
        click.echo(f"ignored: {name}", err=True)
    try:
        return load_settings(None, flag_settings(read.given))
    except ConfigError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(BAD_FLAGS)
