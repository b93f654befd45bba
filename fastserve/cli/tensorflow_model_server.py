"""`fastserve tensorflow-model-server`: the command line of TensorFlow Serving, for scripts that have one.

Flags are read as the original reads them: only --name=value. It goes on after a flag that it does not know;
here that ends the start, since a server without what was asked for may be one without TLS.
"""

from __future__ import annotations

import sys

import click

from fastserve.config import load_settings
from fastserve.config.tensorflow import flag_settings, read_flags
from fastserve.errors import ConfigError

BAD_FLAGS = 255  # the original's exit status for a flag it cannot read


@click.command(
    "tensorflow-model-server",
    context_settings={"ignore_unknown_options": True, "help_option_names": ["--help"]},
    short_help="Serve with TensorFlow Serving's own flags.",
)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def tensorflow_model_server(flags: tuple[str, ...]) -> None:
    """Serve with TensorFlow Serving's flags: --port, --rest_api_port, --model_name, --model_base_path,
    --model_config_file, --enable_batching, --batching_parameters_file, --monitoring_config_file and others.

    \b
    Example:
      fastserve tensorflow-model-server --rest_api_port=8501 --model_name=m --model_base_path=/models/m
    """
    from fastserve.server import run

    read = read_flags(flags)
    for unknown in read.unrecognised:
        click.echo(
            f"unknown argument: {unknown}, allowed: flags of tensorflow_model_server, --name=value", err=True
        )
    for fault in read.faults:
        click.echo(fault, err=True)
    if read.unrecognised or read.faults:
        sys.exit(BAD_FLAGS)
    try:
        overrides, ignored = flag_settings(read.values)
        settings = load_settings(None, overrides)
    except ConfigError as error:
        click.echo(f"Failed to start server. Error: INVALID_ARGUMENT: {error}", err=False)
        sys.exit(1)
    for name in (*read.ignored, *ignored):
        click.echo(f"ignored: {name}", err=True)
    sys.exit(run(settings))
