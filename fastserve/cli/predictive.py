"""Commands that serve trained models by the flags of KServe's Python servers and by MLServer's settings.

`fastserve kserve-server` takes the flags of sklearnserver, xgbserver, lgbserver and predictiveserver, and
serves the one model that lies in a folder, as KServe's storage initializer leaves it. `fastserve mlserver
start FOLDER` reads settings.json, the model-settings.json of each model below the folder, and MLServer's
variables.

Models have the outputs of the originals, under their names, and take V2 inputs as their clients send them
(`loose_inputs`). The originals open pickles of scikit-learn, and so do these: the operator trusts their
author.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec

from fastserve.backends.llm.folder import read_json
from fastserve.backends.registry import BACKENDS
from fastserve.cli.serve import AS_ORIGINAL, FetchedPlaces
from fastserve.errors import ConfigError
from fastserve.repository.layout import is_model_name
from fastserve.repository.mlflow_model import holds_mlflow
from fastserve.repository.single_model import MODEL_SETTINGS, find_single
from fastserve.repository.storage_sources import is_uri
from fastserve.settings import ModelEntry, Settings, load_settings
from fastserve.settings.fields import BOOLS, fault_text
from fastserve.settings.sources import read_environment

Fetch = Callable[[str], Path]
"""Gives the local path of a folder or an address."""
FRAMEWORKS = {
    "sklearn": (".joblib", ".pkl", ".pickle"),
    "xgboost": (".bst", ".json", ".ubj"),
    "lightgbm": (".bst", ".txt"),
    "catboost": (".cbm", ".bin"),
    "onnx": (".onnx",),
}
"""Frameworks that are built, with the endings of their files."""
MODELS_DIR = "/mnt/models"
SERVER_SETTINGS = "settings.json"
_TABULAR = ("sklearn", "xgboost", "lightgbm", "catboost")


def find_model(place: Path, name: str, framework: str) -> ModelEntry:
    """Return the model of a framework that lies in a folder, or is the file. Raises ConfigError."""
    if framework not in (*FRAMEWORKS, ""):
        raise ConfigError(fault_text("framework", framework, ", ".join(FRAMEWORKS)))
    endings = {ending for some in FRAMEWORKS.values() for ending in some}
    known = FRAMEWORKS[framework] if framework else tuple(sorted(endings))
    files = [place] if place.is_file() else sorted(one for one in place.glob("*") if one.suffix in known)
    files = [one for one in files if one.name not in (MODEL_SETTINGS, SERVER_SETTINGS)]
    first = next((one for ending in known for one in files if one.name == f"model{ending}"), None)
    if first is not None and framework:  # as MLServer, which looks for these names in this order
        files = [first]
    if len(files) != 1:
        held = ", ".join(one.name for one in files) or "none"
        raise ConfigError(f"{place}: given {held}, allowed: one file that ends in {', '.join(known)}")
    found = find_single(files[0], name, trust_pickle=framework == "sklearn")
    if found is None:
        raise ConfigError(f"{files[0]}: this is no model")
    return found


def with_fields(entry: ModelEntry, parameters: Mapping[str, Any], **fields: Any) -> ModelEntry:
    """Return the model with more fields of model.yaml."""
    merged = {**entry.fields, **fields}
    if parameters:
        merged["parameters"] = {**entry.fields.get("parameters", {}), **parameters}
    return msgspec.structs.replace(entry, fields=merged)


# ---- KServe's servers

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
_KSERVE_OUTPUT = "output-0"


def read_runtime_flags(argv: Sequence[str]) -> dict[str, str]:
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


def kserve_settings(argv: Sequence[str], environment: Mapping[str, str], fetch: Fetch = Path) -> Settings:
    """Return the settings of KServe's flags; variables of this server go before them. Raises ConfigError."""
    values = read_runtime_flags(argv)
    if values["enable_grpc"].lower() not in BOOLS:
        raise ConfigError(fault_text("--enable_grpc", values["enable_grpc"], "true or false"))
    for name in ("http_port", "grpc_port", "nthread", "workers"):
        if not values[name].isdecimal():
            raise ConfigError(fault_text(f"--{name}", values[name], "a whole number from 0 on"))
    entry = find_model(fetch(values["model_dir"]), values["model_name"], values["framework"])
    entry = _as_kserve(entry, proba=environment.get("PREDICT_PROBA", "").lower() == "true")
    if int(values["nthread"]):
        entry = with_fields(entry, {}, threads=int(values["nthread"]))
    overrides: dict[str, object] = {"frontends": max(1, int(values["workers"]))}
    if not BOOLS[values["enable_grpc"].lower()]:
        overrides["grpc"] = "off"
    return _settings(
        [entry], ["0.0.0.0:" + values["http_port"]], "0.0.0.0:" + values["grpc_port"], environment, overrides
    )


def _as_kserve(entry: ModelEntry, *, proba: bool) -> ModelEntry:
    """Return the model with the one output that KServe's servers give it."""
    backend = entry.fields.get("backend")
    if backend not in _TABULAR:
        return with_fields(entry, {}, loose_inputs=True)
    output = "probabilities" if proba and backend == "sklearn" else "predictions"
    parameters = {"output_names": {output: _KSERVE_OUTPUT}, "outputs": [_KSERVE_OUTPUT]}
    return with_fields(entry, parameters, loose_inputs=True)


# ---- MLServer


@dataclass(frozen=True, slots=True)
class MlserverRuntime:
    """One of MLServer's inference runtimes: the framework of its file, and how its outputs are called."""

    framework: str
    outputs: Mapping[str, str]
    """Their names by ours."""
    default: str = "predict"
    """The output of a reply to a request that names none."""


_PREDICT = {"predictions": "predict", "probabilities": "predict_proba", "transformed": "transform"}
_RUNTIMES = {
    "SKLearnModel": MlserverRuntime("sklearn", _PREDICT),
    "XGBoostModel": MlserverRuntime("xgboost", _PREDICT),
    "LightGBMModel": MlserverRuntime("lightgbm", _PREDICT),
    "CatboostModel": MlserverRuntime("catboost", _PREDICT),
    "OnnxModel": MlserverRuntime("onnx", {}, ""),
    "MLflowRuntime": MlserverRuntime("mlflow", {}, "output-1"),
    "HuggingFaceRuntime": MlserverRuntime("transformers", {}, "output"),
}
IMPLEMENTATIONS = (
    *("mlserver_sklearn.SKLearnModel", "mlserver_xgboost.XGBoostModel", "mlserver_lightgbm.LightGBMModel"),
    *("mlserver_catboost.CatboostModel", "mlserver_onnx.OnnxModel", "mlserver_mlflow.MLflowRuntime"),
    "mlserver_huggingface.HuggingFaceRuntime",
)
_TASKS = {
    "text-classification": "ForSequenceClassification",
    "sentiment-analysis": "ForSequenceClassification",
    "token-classification": "ForTokenClassification",
    "ner": "ForTokenClassification",
    "feature-extraction": "",
}
"""Tasks of HuggingFaceRuntime, with the endings of their models' classes; "" for any encoder."""
_HUB = "; a model of the Hugging Face Hub is hf://ORGANISATION/NAME"
_REFUSED = {
    "kafka_enabled": "false: there is no Kafka server here",
    "model_repository_implementation": "nothing: models are read from a folder",
    "root_path": "nothing: a proxy can take a prefix away",
}
_PORTS = {"http_port": 8080, "grpc_port": 8081, "metrics_port": 8082, "parallel_workers": 1}


def mlserver_settings(folder: str, environment: Mapping[str, str], fetch: Fetch = Path) -> Settings:
    """Return the settings of MLServer's settings.json and variables, with the model of each
    model-settings.json below the folder, or of the variables where there is none. Raises ConfigError."""
    told = {name[9:].lower(): value for name, value in environment.items() if name.startswith("MLSERVER_")}
    given = folder or told.get("models_dir") or told.get("model_uri") or MODELS_DIR
    root = fetch(given)
    server = _read_server(root / SERVER_SETTINGS, told)
    found = sorted(root.glob(f"**/{MODEL_SETTINGS}")) if root.is_dir() else []
    entries = [_read_model(file, told, fetch) for file in found]
    if not entries:
        uri = told.get("model_uri") or given
        place = root if uri == given else fetch(uri)
        written = {"implementation": told.get("model_implementation", ""), "name": told.get("model_name", "")}
        entries = [_make_entry(written, {"extra": _told_extra(told)}, place, root.name)]
    names = [entry.name for entry in entries]
    for name in names:
        if names.count(name) > 1:
            files = ", ".join(str(file) for file, one in zip(found, names, strict=True) if one == name)
            raise ConfigError(f"{files}: the model {name} is given twice; versions lie in folders of numbers")
    shared: dict[str, Any] = {"shared_worker": "mlserver"} if len(entries) > 1 else {}  # as there
    workers = max(1, int(server["parallel_workers"]))
    entries = [with_fields(entry, {}, instances=workers, **shared) for entry in entries]
    host = str(server["host"])
    http = [f"{host}:{server['http_port']}"]
    if server["metrics_endpoint"] is not None:
        http.append(f"{host}:{server['metrics_port']}=metrics")
    return _settings(entries, http, f"{host}:{server['grpc_port']}", environment, {"frontends": 1})


def _read_server(file: Path, told: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of settings.json, else of variables, else MLServer's own. Raises ConfigError."""
    known: dict[str, Any] = {"host": "0.0.0.0", "metrics_endpoint": "/metrics", **_PORTS}
    written = _read_json(file) if file.is_file() else {}
    values = {**known, **{name: told[name] for name in known if name in told}, **written}
    for name, value in written.items():
        if name in _REFUSED and value:
            raise ConfigError(fault_text(f"{file}: {name}", value, _REFUSED[name]))
        if name not in known and name not in _REFUSED:
            _ignore(name, file)
    for name in _PORTS:
        if not str(values[name]).isdecimal():
            where = str(file) if name in written else f"MLSERVER_{name.upper()}"
            raise ConfigError(fault_text(f"{where}: {name}", values[name], "a whole number from 0 on"))
    if values["metrics_endpoint"] not in (None, "/metrics"):
        raise ConfigError(
            fault_text(f"{file}: metrics_endpoint", values["metrics_endpoint"], "/metrics or null")
        )
    return values


def _read_model(file: Path, told: Mapping[str, str], fetch: Fetch) -> ModelEntry:
    """Return the model of a model-settings.json. Raises ConfigError."""
    written = _read_json(file)
    parameters = written.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise ConfigError(fault_text(f"{file}: parameters", parameters, "an object"))
    for name in written:
        if name not in (
            "implementation",
            "name",
            "parameters",
            "version",
            "max_batch_size",
            "max_batch_time",
        ):
            _ignore(name, file)
    for name in parameters:
        if name not in ("content_type", "extra", "uri", "version"):
            _ignore(f"parameters.{name}", file)
    for name in ("name", "implementation"):
        written[name] = str(written.get(name) or told.get(f"model_{name}", ""))
    parameters = {**parameters, "extra": {**_told_extra(told), **(parameters.get("extra") or {})}}
    saved = str(parameters["extra"].get("pretrained_model") or "")
    uri = str(parameters.get("uri") or told.get("model_uri") or saved)
    try:
        place = fetch(uri) if is_uri(uri) else file.parent / uri
        return _make_entry(written, parameters, place, file.parent.name)
    except ConfigError as fault:
        raise ConfigError(f"{file}: {fault}") from None


def _told_extra(told: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of HuggingFaceRuntime that MLServer's variables have."""
    start = "model_huggingface_"
    return {name[len(start) :]: value for name, value in told.items() if name.startswith(start)}


def _make_entry(
    written: Mapping[str, Any], parameters: Mapping[str, Any], place: Path, folder: str
) -> ModelEntry:
    """Return a model by the fields of model-settings.json, whose file or folder is `place`. Raises
    ConfigError."""
    name, implementation = written["name"] or folder, written["implementation"]
    module, _, kind = implementation.rpartition(".")
    runtime = _RUNTIMES.get(kind) if module.split(".")[0].startswith("mlserver") else None
    if runtime is None:
        own = "; a class of your own is a Python model (backend: python)" if implementation else ""
        raise ConfigError(fault_text("implementation", implementation, ", ".join(IMPLEMENTATIONS)) + own)
    found: ModelEntry | None
    of_hub = runtime.framework == "transformers"
    if not place.exists():
        words = fault_text("parameters.uri", place, "a file or folder that exists")
        raise ConfigError(words + _HUB * of_hub)
    if of_hub:
        found = _of_transformers(place, name, parameters.get("extra") or {}, runtime.default)
    elif runtime.framework == "mlflow":
        folder_of = place if place.is_dir() else place.parent
        found = find_single(folder_of, name, trust_pickle=True) if holds_mlflow(folder_of) else None
        if found is None:
            raise ConfigError(fault_text("parameters.uri", place, "a folder that MLflow has written"))
    else:
        found = find_model(place, name, runtime.framework)
    version = parameters.get("version") or written.get("version")
    if version and not str(version).isdecimal():
        found = msgspec.structs.replace(found, labels={str(version): 1})
    found = with_fields(found, {}, **_read_batching(written), loose_inputs=True)
    return _with_outputs(found, runtime, parameters.get("extra") or {})


def _of_transformers(folder: Path, name: str, extra: Mapping[str, Any], output: str) -> ModelEntry:
    """Return the model of a task, which lies in a folder of transformers' form. Raises ConfigError."""
    if not is_model_name(name):
        raise ConfigError(fault_text("name", name, "1 to 128 of letters, digits, _ . -"))
    task = str(extra.get("task") or "")
    if task not in _TASKS:
        raise ConfigError(
            fault_text("parameters.extra.task", task, ", ".join(_TASKS))
            + "; `fastserve serve FOLDER` serves a model that writes text, and a Python model that calls the "
            "pipeline any other (backend: python)"
        )
    if (extra.get("framework") or "pt") != "pt":
        raise ConfigError(fault_text("parameters.extra.framework", extra["framework"], "pt"))
    kinds = ", ".join(map(str, read_json(folder / "config.json").get("architectures") or ()))
    if not kinds.endswith(_TASKS[task]):
        fit = [one for one, ending in _TASKS.items() if ending and kinds.endswith(ending)]
        allowed = f"{', '.join(fit) or 'none of them'}, by config.json: architectures: {kinds or 'none'}"
        raise ConfigError(fault_text("parameters.extra.task", task, allowed))
    for field in extra:
        if field not in ("device", "framework", "pretrained_model", "pretrained_tokenizer", "task"):
            click.echo(f"ignored: parameters.extra.{field} of {MODEL_SETTINGS}", err=True)
    entry = BACKENDS["transformers"]
    if not entry.installed:
        raise ConfigError(entry.missing_text)
    fields = {"backend": entry.name, "parameters": {"json_output": output, "pairs": False}}
    return ModelEntry(name, str(folder), file=entry.model_file, fields=fields)


def _with_outputs(found: ModelEntry, runtime: MlserverRuntime, extra: Mapping[str, Any]) -> ModelEntry:
    """Return the model with the outputs that MLServer's runtime gives it."""
    backend = found.fields.get("backend")
    if backend not in _TABULAR:
        return found
    if runtime.framework == "mlflow":
        names = dict.fromkeys(found.fields["parameters"]["outputs"], runtime.default)
        return with_fields(
            found, {"output_names": names, "outputs": [runtime.default], "column_outputs": True}
        )
    parameters: dict[str, Any] = {"output_names": dict(runtime.outputs), "column_outputs": True}
    if backend == "xgboost":
        parameters |= {"as_estimator": True, "best_iteration": True}
    chosen = str(extra.get("predict_fn") or runtime.default)
    if chosen not in runtime.outputs.values():
        allowed = ", ".join(runtime.outputs.values())
        raise ConfigError(fault_text("parameters.extra.predict_fn", chosen, allowed))
    return with_fields(found, parameters, default_outputs=[chosen])


def _read_batching(written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of model.yaml for MLServer's adaptive batching. Raises ConfigError."""
    fields: dict[str, Any] = {}
    for name, kind, field, scale in (
        ("max_batch_size", int, "max_batch_size", 1),
        ("max_batch_time", (int, float), "max_queue_delay_us", 1_000_000),
    ):
        value = written.get(name) or 0
        if not isinstance(value, kind) or isinstance(value, bool) or value < 0:
            raise ConfigError(fault_text(name, value, "a number from 0 on"))
        if value > (1 if field == name else 0):  # one request at a time is what it is without batches
            fields[field] = int(value * scale)
    return fields


def _read_json(file: Path) -> dict[str, Any]:
    try:
        written = json.loads(file.read_text())
    except (ValueError, OSError) as error:
        raise ConfigError(f"{file}: {error}") from error
    if not isinstance(written, dict):
        raise ConfigError(f"{file}: given a {type(written).__name__}, allowed: an object")
    return written


def _ignore(name: str, file: Path) -> None:
    click.echo(f"ignored: {name} of {file.name}", err=True)


# ---- the commands


def _settings(
    entries: Sequence[ModelEntry],
    http: Sequence[str],
    grpc: str,
    environment: Mapping[str, str],
    more: Mapping[str, object],
) -> Settings:
    overrides: dict[str, object] = {
        "http": list(http),
        "grpc": [grpc],
        **more,
        **AS_ORIGINAL,
        "log.format": "json",
        **read_environment(environment),
    }
    settings = load_settings(None, overrides)
    return msgspec.structs.replace(settings, models=(*settings.models, *entries))


def _run(read: Callable[[FetchedPlaces], Settings]) -> None:
    """Serve with the settings that `read` makes, for which it may fetch models."""
    from fastserve.server import run

    try:
        fetch = FetchedPlaces(load_settings(None, {"log.format": "json", **read_environment(os.environ)}))
        settings = read(fetch)
    except ConfigError as error:
        raise click.ClickException(str(error)) from None
    sys.exit(run(settings, mirror=fetch.mirror))


@click.command(
    "kserve-server",
    context_settings={"ignore_unknown_options": True},
    short_help="Serve with the flags of KServe's Python servers.",
)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def kserve_server(flags: tuple[str, ...]) -> None:
    """Serve one model with the flags of sklearnserver, xgbserver, lgbserver and predictiveserver:
    --model_name, --model_dir, --http_port, --grpc_port, --enable_grpc, --framework, --nthread, --workers. It
    is read from --model_dir: a pickle with --framework=sklearn, a file of XGBoost, LightGBM or CatBoost, or
    an ONNX file.

    \b
    Example:
      fastserve kserve-server --model_name=iris --model_dir=/mnt/models --framework=sklearn
    """
    _run(lambda fetch: kserve_settings(flags, os.environ, fetch))


@click.command("mlserver", short_help="Serve by MLServer's settings.")
@click.argument("action", type=click.Choice(["start"]))
@click.argument("folder", default="")
def mlserver(action: str, folder: str) -> None:
    """Serve the models of a folder by MLServer's files: settings.json, and the model-settings.json of each.
    Where there is none, one model by MLSERVER_MODEL_NAME, MLSERVER_MODEL_URI and
    MLSERVER_MODEL_IMPLEMENTATION.

    \b
    Examples:
      fastserve mlserver start /models
      MLSERVER_MODEL_IMPLEMENTATION=mlserver_sklearn.SKLearnModel fastserve mlserver start /mnt/models
    """
    _run(lambda fetch: mlserver_settings(folder, os.environ, fetch))
