"""Commands that serve by the command lines that KServe gives its own runtimes.

`fastserve kserve-server` takes the flags of KServe's Python servers (sklearnserver, xgbserver and
predictiveserver), `fastserve mlserver start` the variables of MLServer and its model-settings.json. Both
serve one model that lies in a folder, as KServe's storage initializer leaves it. With
`--framework=sklearn` the originals open a pickle, and so do these: the operator trusts its author.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from fastserve.cli.serve import AS_ORIGINAL
from fastserve.errors import ConfigError
from fastserve.repository.single_model import find_single
from fastserve.settings import ModelEntry, Settings, load_settings
from fastserve.settings.fields import BOOLS, fault_text
from fastserve.settings.sources import read_environment

FRAMEWORKS = {"sklearn": (".joblib", ".pkl", ".pickle"), "xgboost": (".json", ".ubj"), "onnx": (".onnx",)}
"""Frameworks that are built, with the endings of their files, the preferred one first."""
MODELS_DIR = "/mnt/models"
# Flags with their original's defaults; of the second kind no answer depends on it.
_FLAGS = {
    "framework": "",
    "grpc_port": "8081",
    "enable_grpc": "true",
    "http_port": "8080",
    "model_dir": MODELS_DIR,
    "model_name": "model",
    "nthread": "0",
    "workers": "1",
}
_IDLE = frozenset(
    (
        "access_log_format",
        "configure_logging",
        "enable_docs_url",
        "enable_latency_logging",
        "grpc_max_send_message_length",
        "grpc_max_receive_message_length",
        "log_config_file",
        "max_asyncio_workers",
        "max_threads",
    )
)
_IMPLEMENTATIONS = {
    "mlserver_sklearn.SKLearnModel": "sklearn",
    "mlserver_xgboost.XGBoostModel": "xgboost",
    "mlserver_onnx.OnnxModel": "onnx",
}


def find_model(place: Path, name: str, framework: str) -> ModelEntry:
    """Return the model of a framework that lies in a folder, or is the file. Raises ConfigError."""
    if framework not in (*FRAMEWORKS, ""):
        raise ConfigError(fault_text("framework", framework, ", ".join(FRAMEWORKS)))
    known = FRAMEWORKS[framework] if framework else tuple(s for some in FRAMEWORKS.values() for s in some)
    files = [place] if place.is_file() else sorted(one for one in place.glob("*") if one.suffix in known)
    files = [one for one in files if one.name != "model-settings.json"]
    if len(files) != 1:
        held = ", ".join(one.name for one in files) or "none"
        raise ConfigError(f"{place}: given {held}, allowed: one file that ends in {', '.join(known)}")
    found = find_single(files[0], name, allow_pickle=framework == "sklearn")
    if found is None:
        raise ConfigError(f"{files[0]}: this is no model")
    if framework == "sklearn":  # the originals answer what `predict` returns
        parameters = {**found.fields["parameters"], "probabilities": False}
        found = msgspec.structs.replace(found, fields={**found.fields, "parameters": parameters})
    return found


def read_flags(argv: Sequence[str]) -> dict[str, str]:
    """Return the flags, `--name=value` or `--name value`, over their defaults. Raises ConfigError."""
    values, rest = dict(_FLAGS), iter(argv)
    for argument in rest:
        name, equals, value = argument[2:].partition("=")
        if not argument.startswith("--") or (name not in _FLAGS and name not in _IDLE):
            raise ConfigError(f"unknown argument: {argument}, allowed: {', '.join(sorted(_FLAGS))}")
        given = value if equals else next(rest, None)
        if given is None:
            raise ConfigError(f"--{name}: missing its value, write --{name}=VALUE")
        if name in _IDLE:
            click.echo(f"ignored: --{name}", err=True)
        else:
            values[name] = given
    return values


def kserve_settings(argv: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Return the settings of KServe's flags; variables of this server go before them. Raises ConfigError."""
    values = read_flags(argv)
    if values["enable_grpc"].lower() not in BOOLS:
        raise ConfigError(fault_text("--enable_grpc", values["enable_grpc"], "true or false"))
    for name in ("http_port", "grpc_port", "nthread", "workers"):
        if not values[name].isdecimal():
            raise ConfigError(fault_text(f"--{name}", values[name], "a whole number from 0 on"))
    entry = find_model(Path(values["model_dir"]), values["model_name"], values["framework"])
    if int(values["nthread"]):
        entry = msgspec.structs.replace(entry, fields={**entry.fields, "threads": int(values["nthread"])})
    grpc = values["grpc_port"] if BOOLS[values["enable_grpc"].lower()] else ""
    return _settings(entry, values["http_port"], grpc, environment, frontends=max(1, int(values["workers"])))


def mlserver_settings(folder: str, environment: Mapping[str, str]) -> Settings:
    """Return the settings of MLServer's variables and its model-settings.json. Raises ConfigError."""
    said = {name[9:].lower(): value for name, value in environment.items() if name.startswith("MLSERVER_")}
    root = Path(folder or said.get("models_dir") or said.get("model_uri") or MODELS_DIR)
    name, uri = said.get("model_name", ""), said.get("model_uri") or str(root)
    implementation = said.get("model_implementation", "")
    file = root / "model-settings.json"
    if file.is_file():
        try:
            written: dict[str, Any] = json.loads(file.read_text())
            parameters = written.get("parameters") or {}
            name = str(written.get("name") or name)
            implementation = str(written.get("implementation") or implementation)
            uri = str(root / str(parameters.get("uri") or uri))
        except (ValueError, AttributeError) as error:
            raise ConfigError(f"{file}: {error}") from error
    if implementation not in _IMPLEMENTATIONS:
        raise ConfigError(fault_text("implementation", implementation, ", ".join(_IMPLEMENTATIONS)))
    entry = find_model(Path(uri), name or root.name, _IMPLEMENTATIONS[implementation])
    return _settings(
        entry, said.get("http_port", "8080"), said.get("grpc_port", "8081"), environment, frontends=1
    )


def _settings(
    entry: ModelEntry, http: str, grpc: str, environment: Mapping[str, str], *, frontends: int
) -> Settings:
    overrides: dict[str, object] = {
        "http": [f"0.0.0.0:{http}"],
        "grpc": [f"0.0.0.0:{grpc}"] if grpc else "off",
        "frontends": frontends,
        **AS_ORIGINAL,
        "log.format": "json",
        **read_environment(environment),
    }
    settings = load_settings(None, overrides)
    return msgspec.structs.replace(settings, models=(*settings.models, entry))


def _run(settings: Settings) -> None:
    from fastserve.server import run

    sys.exit(run(settings))


@click.command(
    "kserve-server",
    context_settings={"ignore_unknown_options": True},
    short_help="Serve with the flags of KServe's Python servers.",
)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def kserve_server(flags: tuple[str, ...]) -> None:
    """Serve one model with the flags of sklearnserver, xgbserver and predictiveserver: --model_name,
    --model_dir, --http_port, --grpc_port, --enable_grpc, --framework, --nthread, --workers. It is read from
    --model_dir: a pickle with --framework=sklearn, XGBoost's model.json or .ubj, or an ONNX file.

    \b
    Example:
      fastserve kserve-server --model_name=iris --model_dir=/mnt/models --framework=sklearn
    """
    try:
        settings = kserve_settings(flags, os.environ)
    except ConfigError as error:
        raise click.ClickException(str(error)) from None
    _run(settings)


@click.command("mlserver", short_help="Serve by MLServer's variables.")
@click.argument("action", type=click.Choice(["start"]))
@click.argument("folder", default="")
def mlserver(action: str, folder: str) -> None:
    """Serve one model by MLServer's variables MLSERVER_MODEL_NAME, MLSERVER_MODEL_URI,
    MLSERVER_MODEL_IMPLEMENTATION, MLSERVER_HTTP_PORT and MLSERVER_GRPC_PORT, and the model-settings.json of
    FOLDER.

    \b
    Example:
      MLSERVER_MODEL_IMPLEMENTATION=mlserver_sklearn.SKLearnModel fastserve mlserver start /mnt/models
    """
    try:
        settings = mlserver_settings(folder, os.environ)
    except ConfigError as error:
        raise click.ClickException(str(error)) from None
    _run(settings)
