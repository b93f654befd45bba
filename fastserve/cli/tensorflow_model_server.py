"""`fastserve tensorflow-model-server`: the command line of TensorFlow Serving, for scripts that have one.

Flags are read as the original reads them: only --name=value. It goes on after a flag that it does not know;
here that ends the start, since a server without what was asked for may be one without TLS.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from importlib.metadata import version

import click

from fastserve.config import load_settings
from fastserve.config.tensorflow import Flags, flag_settings, read_flags, usage
from fastserve.config.tensorflow_files import StartFault
from fastserve.errors import ConfigError
from fastserve.repository.repository import LoadFailures
from fastserve.repository.succession import NO_LABEL

BAD_FLAGS = 255  # the original's exit status for a flag it cannot read, and for --help


@click.command(
    "tensorflow-model-server",
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
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

    if {"--help", "-h"} & set(flags):
        click.echo(f"{click.get_current_context().get_help()}\n\n{usage()}")
        sys.exit(BAD_FLAGS)
    values = check_flags(read_flags(flags))
    if values.get("version"):
        click.echo(f"TensorFlow ModelServer: fastserve {version('fastserve')}\nTensorFlow Library: none")
        return
    try:
        overrides, ignored = flag_settings(values)
        settings = load_settings(None, overrides)
    except ConfigError as error:
        give_up(error)
        sys.exit(1)
    for name in ignored:
        click.echo(f"ignored: {name}", err=True)
    sys.exit(run(settings, give_up=give_up))


def check_flags(read: Flags) -> dict[str, int | bool | str]:
    """The flags' values; ends the process when one cannot be read."""
    for unknown in read.unrecognised:
        click.echo(
            f"unknown argument: {unknown}, allowed: flags of tensorflow_model_server, --name=value", err=True
        )
    for fault in read.faults:
        click.echo(fault, err=True)
    if read.unrecognised or read.faults:
        click.echo(usage())
        sys.exit(BAD_FLAGS)
    for name in read.ignored:
        click.echo(f"ignored: {name}", err=True)
    return read.values


def give_up(error: Exception) -> None:
    """Why it does not start, on standard output in the original's form (spec 5, 6.2)."""
    code, text = "INVALID_ARGUMENT", str(error)
    if isinstance(error, StartFault):
        code = error.code
        if error.detail:
            click.echo(error.detail, err=True)
    elif isinstance(error, LoadFailures):
        code, text = load_fault(error.problems)
    elif isinstance(error, OSError):
        code, text = "UNKNOWN", error.strerror or str(error)
    click.echo(f"Failed to start server. Error: {code}: {text}")


def load_fault(problems: Mapping[str, list[str]]) -> tuple[str, str]:
    """Code and text: labels are given when every model is there, and are told of only then (spec 5)."""
    texts = [text for _, told in sorted(problems.items()) for text in told]
    if all(text.startswith(NO_LABEL) for text in texts):
        return "FAILED_PRECONDITION", texts[0]
    return "UNKNOWN", servables_text(problems)


def servables_text(problems: Mapping[str, list[str]]) -> str:
    """Models that did not come up, as the original lists them."""
    parts = []
    for name, told in sorted(problems.items()):
        for text in told:
            number = re.match(r"version (\d+): ", text)
            which, error = (f" version: {number[1]}", text[number.end() :]) if number else ("", text)
            parts.append(f"{{name: {name}{which}}} due to error: {error}}}, ")
    return f"{len(parts)} servable(s) did not become available: {{{''.join(parts)}}}"
