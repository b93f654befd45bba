"""Commands that serve by the configuration or flags of grps, MindIE, TensorFlow Serving and Triton.

`fastserve grps` reads conf/server.yml and conf/inference.yml of a deployment, `fastserve mindie` MindIE's
config.json; each also has every flag of `fastserve serve`, which overrides the file. `fastserve
tensorflow-model-server` and `fastserve tritonserver` take the original's flags, with its defaults. The former
reads only --name=value, as the original does. An unknown flag ends the start, where the original goes on: a
server that lacks a flag's effect may lack TLS.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from fastserve.cli.serve import AS_ORIGINAL, NO_FLAG, ServeCommand, config_option, make_option, read_flags
from fastserve.errors import ConfigError
from fastserve.repository.reconciler import NO_LABEL
from fastserve.repository.repository import LoadFailures
from fastserve.settings import Settings, list_fields, load_settings
from fastserve.settings.grps import grps_overrides
from fastserve.settings.mindie import mindie_overrides, read_config
from fastserve.settings.sources import read_environment
from fastserve.settings.tensorflow import (
    StartFault,
    TensorFlowFlags,
    read_tensorflow_flags,
    tensorflow_overrides,
    tensorflow_usage,
)
from fastserve.settings.tritonserver import read_triton_flags, triton_overrides, triton_usage


@click.command("grps", cls=ServeCommand, short_help="Serve a grps deployment.")
@click.argument("folder", metavar="DEPLOYMENT", type=click.Path(exists=True, file_okay=False, path_type=Path))
@config_option("More settings, in YAML.")
def grps(folder: Path, config: Path | None, **flags: Any) -> None:
    """Serve the grps deployment in a folder: conf/server.yml, conf/inference.yml and src/ are read.

    \b
    Examples:
      fastserve grps my_deployment
      fastserve grps my_deployment --http 127.0.0.1:7080=grps --grps-start-online
    """
    from fastserve.repository.grps_config import read_deployment
    from fastserve.server import run

    try:
        said, ignored = grps_overrides(read_deployment(folder).server)
        said = {**said, **AS_ORIGINAL, "deployment": str(folder.absolute())}
        settings = load_settings(config, {**said, **read_environment(os.environ), **read_flags(flags)})
    except ConfigError as error:
        raise click.ClickException(str(error)) from None
    for name in ignored:
        click.echo(f"ignored: {name} of server.yml", err=True)
    sys.exit(run(settings))


grps.params.extend(make_option(field) for field in list_fields(Settings) if field.path not in NO_FLAG)


@click.command("mindie", cls=ServeCommand, short_help="Serve by MindIE's config.json.")
@click.argument("file", metavar="CONFIG", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@config_option("More settings, in YAML.")
def mindie(file: Path, config: Path | None, **flags: Any) -> None:
    """Serve the models of MindIE's config.json on its ports, with its limits.

    \b
    Examples:
      fastserve mindie conf/config.json
      fastserve mindie conf/config.json --textgen-stop-service --textgen-token-id-style list
    """
    from fastserve.server import run

    try:
        given = read_config(file)
        said = {**mindie_overrides(given), **AS_ORIGINAL}
        settings = load_settings(config, {**said, **read_environment(os.environ), **read_flags(flags)})
    except ConfigError as error:
        raise click.ClickException(str(error)) from None
    for key in given.ignored:
        click.echo(f"ignored: {key} of config.json", err=True)
    sys.exit(run(settings))


mindie.params.extend(make_option(setting) for setting in list_fields(Settings) if setting.path not in NO_FLAG)

BAD_TENSORFLOW_FLAGS = 255  # the original's exit status for a flag it cannot read, and for --help


@click.command(
    "tensorflow-model-server",
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    short_help="Serve with TensorFlow Serving's own flags.",
)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def tensorflow_model_server(flags: tuple[str, ...]) -> None:
    """Serve with TensorFlow Serving's flags: --port, --rest_api_port, --model_name, --model_base_path,
    --model_config_file, --enable_batching, --batching_parameters_file, --monitoring_config_file and others.
    FASTSERVE_KEYS=FILE asks for API keys.

    \b
    Example:
      fastserve tensorflow-model-server --rest_api_port=8501 --model_name=m --model_base_path=/models/m
    """
    from fastserve.server import run

    if {"--help", "-h"} & set(flags):
        click.echo(f"{click.get_current_context().get_help()}\n\n{tensorflow_usage()}")
        sys.exit(BAD_TENSORFLOW_FLAGS)
    values = check_flags(read_tensorflow_flags(flags))
    if values.get("version"):
        click.echo(f"TensorFlow ModelServer: fastserve {version('fastserve')}\nTensorFlow Library: none")
        return
    try:
        overrides, ignored = tensorflow_overrides(values)
        settings = load_settings(None, overrides, {**AS_ORIGINAL, **read_environment(os.environ)})
    except ConfigError as error:
        give_up(error)
        sys.exit(1)
    for name in ignored:
        click.echo(f"ignored: {name}", err=True)
    sys.exit(run(settings, give_up=give_up))


def check_flags(read: TensorFlowFlags) -> dict[str, int | bool | str]:
    """Return the flags' values. End the process when one cannot be read."""
    for unknown in read.unrecognised:
        click.echo(
            f"unknown argument: {unknown}, allowed: flags of tensorflow_model_server, --name=value", err=True
        )
    for fault in read.faults:
        click.echo(fault, err=True)
    if read.unrecognised or read.faults:
        click.echo(tensorflow_usage())
        sys.exit(BAD_TENSORFLOW_FLAGS)
    for name in read.ignored:
        click.echo(f"ignored: {name}", err=True)
    return read.values


def give_up(error: Exception) -> None:
    """Write the reason of a failed start to standard output in the original's form (spec 5, 6.2)."""
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
    """Return code and text of a failed load; labels count once every model is there (spec 5)."""
    texts = [text for _, told in sorted(problems.items()) for text in told]
    if all(text.startswith(NO_LABEL) for text in texts):
        return "FAILED_PRECONDITION", texts[0]
    return "UNKNOWN", servables_text(problems)


def servables_text(problems: Mapping[str, list[str]]) -> str:
    """Return the models that failed, as the original lists them."""
    parts = []
    for name, told in sorted(problems.items()):
        for text in told:
            number = re.match(r"version (\d+): ", text)
            which, error = (f" version: {number[1]}", text[number.end() :]) if number else ("", text)
            parts.append(f"{{name: {name}{which}}} due to error: {error}}}, ")
    return f"{len(parts)} servable(s) did not become available: {{{''.join(parts)}}}"


BAD_TRITON_FLAGS = 1  # the original's exit status
FILES = "admin.file_overrides"


@click.command(
    "tritonserver",
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    short_help="Serve with Triton's own flags.",
)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def tritonserver(flags: tuple[str, ...]) -> None:
    """Serve with Triton's flags: --model-repository, --http-port, --grpc-port, --log-verbose, --load-model,
    --model-control-mode, --cache-config, --trace-config and others. FASTSERVE_KEYS=FILE asks for API keys.

    \b
    Example:
      fastserve tritonserver --model-repository=/models --http-port=8000 --log-verbose=1
    """
    from fastserve.server import run

    if {"--help", "-h"} & set(flags):
        click.echo(f"{click.get_current_context().get_help()}\n\n{triton_usage()}")
        return
    sys.exit(run(read_triton_settings(flags)))


def asks_everybody(settings: Settings) -> bool:
    """Return whether every client needs an API key, or a certificate."""
    from fastserve.server.dialect_selection import all_listeners

    mutual = bool(settings.tls.client_ca) and settings.tls.client_auth == "required"
    http, grpc = all_listeners(settings)
    return bool(settings.keys) or (mutual and all(one.tls for one in (*http, *grpc)))


def read_triton_settings(flags: tuple[str, ...]) -> Settings:
    """Return the settings of the flags. End the process when one cannot be taken."""
    read = read_triton_flags(flags)
    for fault in read.faults:
        click.echo(f"error: {fault}", err=True)
    if read.faults:
        sys.exit(BAD_TRITON_FLAGS)
    for name in read.ignored:
        click.echo(f"ignored: {name}", err=True)
    try:
        environment = {**AS_ORIGINAL, **read_environment(os.environ)}
        settings = load_settings(None, triton_overrides(read.given), environment)
        if settings.model_control != "explicit" or FILES in environment or not asks_everybody(settings):
            return settings
        # As there, a load may bring files, which run as code: here from clients who say who they are.
        return load_settings(None, {**triton_overrides(read.given), FILES: True}, environment)
    except ConfigError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(BAD_TRITON_FLAGS)
