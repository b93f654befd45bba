"""Converts a grps deployment into models of ours: conf/inference.yml, read and checked.

    DEPLOYMENT/conf/inference.yml    models: [{name, version, inferer_type, batching, ...}], dag: {...}
    DEPLOYMENT/conf/server.yml       interface, max_concurrency, ...            (settings: config.grps)
    DEPLOYMENT/src/customized_*.py   converters and inferers

`your_model` of version 1.0.0 is served as the model `your_model-1.0.0`, as its clients call it. Its requests
and answers are serialized messages. A dag of one node is that node; one of several is an ensemble of the name
`dag.NAME`. Models of the inferer_types `torch`, `tensorflow` and `onnx`, the last of which the original
lacks, take and return tensors, which their files describe. A TorchScript program does not: inferer_args does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from fastserve.backends.registry import find_backend
from fastserve.errors import ConfigError
from fastserve.repository.model_config import ModelConfig, TensorConfig
from fastserve.settings import convert
from fastserve.settings.config_files import parse_yaml, read_text
from fastserve.settings.confined_file import is_inner_path
from fastserve.settings.grps import FILE as SERVER_FILE
from fastserve.settings.grps import ServerFile, read_server_file
from fastserve.settings.model_options import EnsembleOptions, EnsembleStep, Options

FILE = "inference.yml"
CONF = "conf"
MESSAGE = "message"
NUMBER = 1  # of the one version each of them has
DAG = "dag."
# inferer_type -> what to do with such a model here
_ELSEWHERE = {
    "tensorrt": "take the ONNX model it was built from and say inferer_type: onnx, or load it in a "
    "customized inferer",
}
# inferer_type of models of tensors -> the backend, endings of their paths, and what these are
_OF_TENSORS = {
    "onnx": ("onnx", (".onnx",), "an .onnx file"),
    "torch": ("torch", (".pt2", ".pt"), "a .pt2 or .pt file"),
    "tensorflow": ("tensorflow", ("",), "the folder of a SavedModel"),
}
_TENSORS = (
    "inferer_args: given {}, allowed: {{inputs: {{NAME: {{dtype, shape}}}}, outputs: {{...}}}}, without the "
    "batch axis where batching is dynamic; or a program of torch.export (.pt2), which has them"
)
Text = Annotated[str, Meta(min_length=1)]


class Batching(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Batching of a model's requests."""

    type: Literal["none", "dynamic"] = "none"
    max_batch_size: Annotated[int, Meta(ge=1, le=65535)] = 1
    batch_timeout_us: Annotated[int, Meta(ge=1, le=60_000_000)] = 1


class Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of `models`."""

    name: Text
    version: str | int | float
    inferer_type: Literal["torch", "tensorflow", "tensorrt", "customized", "onnx"]
    device: str | None = None
    inp_device: str | None = None
    inferer_name: str | None = None
    inferer_path: str | None = None
    inferer_args: Any = None
    converter_type: Literal["torch", "tensorflow", "tensorrt", "customized", "none"] = "none"
    converter_name: str | None = None
    converter_path: str | None = None
    converter_args: Any = None
    batching: Batching = Batching()

    @property
    def full_name(self) -> str:
        """The name that clients use."""
        return f"{self.name}-{self.version}"


class DagNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One step of the dag."""

    model: str
    name: str = ""
    type: Literal["model"] = "model"


class Dag(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The models that run for calls without a model name."""

    nodes: Annotated[list[DagNode], Meta(min_length=1)]
    name: str = "dag"
    type: Literal["sequential"] = "sequential"


class InferenceFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole of inference.yml."""

    models: Annotated[list[Node], Meta(min_length=1)]
    dag: Dag


@dataclass(frozen=True, slots=True)
class Deployment:
    """A deployment as read. `texts` are those of inference.yml and server.yml."""

    folder: Path
    inference: InferenceFile
    server: ServerFile
    texts: tuple[str, str]

    @property
    def default(self) -> str:
        """The model that runs for calls without a model name."""
        nodes = self.inference.dag.nodes
        return nodes[0].model if len(nodes) == 1 else DAG + self.inference.dag.name

    @property
    def names(self) -> list[str]:
        """Names of all models, the ensemble of a dag with several nodes included."""
        return list(dict.fromkeys([*(node.full_name for node in self.inference.models), self.default]))

    def described(self) -> list[dict[str, Any]]:
        """Return the models as inference.yml has them, with their defaults."""
        return [{**msgspec.to_builtins(node), "version": str(node.version)} for node in self.inference.models]

    def files(self, config: ModelConfig) -> list[Path]:
        """Return the files of a model with this configuration: a change of any loads it again."""
        if config.options.model_file:
            return [self.folder / config.options.model_file]
        code = sorted((self.folder / "src").glob("*.py"))
        return [self.folder / CONF / FILE, *code]

    def config(self, name: str) -> ModelConfig:
        """Return the ModelConfig of one of `names`. Raises ConfigError."""
        node = next((one for one in self.inference.models if one.full_name == name), None)
        if node is None:
            return _chain([step.model for step in self.inference.dag.nodes])
        if node.inferer_type in _OF_TENSORS:
            return _of_tensors(node)
        return _custom(node, self.server.max_concurrency)


def read_deployment(folder: Path) -> Deployment:
    """Read both files. Raises ConfigError naming file, field and allowed values."""
    conf = folder / CONF
    if not (conf / FILE).is_file():
        raise ConfigError(f"deployment: {folder} holds no {CONF}/{FILE}, which a grps deployment has")
    texts = read_text(conf / FILE, FILE), ""
    if (conf / SERVER_FILE).is_file():
        texts = texts[0], read_text(conf / SERVER_FILE, SERVER_FILE)
    inference = convert(_worded(parse_yaml(texts[0], FILE)), InferenceFile, FILE)
    _check(inference)
    return Deployment(
        folder.absolute(), inference, read_server_file(parse_yaml(texts[1], SERVER_FILE)), texts
    )


def _worded(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values without nulls, which stand for defaults."""
    models = raw.get("models")
    if not isinstance(models, list):
        return dict(raw)
    kept = [
        {k: v for k, v in one.items() if v is not None} if isinstance(one, dict) else one for one in models
    ]
    return {**raw, "models": kept}


def _check(inference: InferenceFile) -> None:
    seen: dict[str, Node] = {}
    for node in inference.models:
        where = f"{FILE}: model {node.full_name}"
        if node.full_name in seen:
            raise ConfigError(f"{where} is there twice")
        seen[node.full_name] = node
        if node.inferer_type in _ELSEWHERE:
            raise ConfigError(
                f"{where}: inferer_type {node.inferer_type} is not run here; {_ELSEWHERE[node.inferer_type]}"
            )
        if node.inferer_type == "customized" and not node.inferer_name:
            raise ConfigError(
                f"{where}: inferer_name: given nothing, allowed: the name an inferer is registered by"
            )
        if node.converter_type == "customized" and not node.converter_name:
            raise ConfigError(
                f"{where}: converter_name: given nothing, allowed: the name a converter is registered by"
            )
        if node.inferer_type == "customized" and node.converter_type not in ("customized", "none"):
            raise ConfigError(
                f"{where}: converter_type: given {node.converter_type}, allowed: customized or none"
            )
        if node.inferer_type in _OF_TENSORS and node.converter_type == "customized":
            raise ConfigError(
                f"{where}: converter_type: given customized, allowed: none, with inferer_type "
                f"{node.inferer_type}; a customized inferer may have one"
            )
    steps = [step.model for step in inference.dag.nodes]
    for model in steps:
        if model not in seen:
            raise ConfigError(f"{FILE}: dag: model: given {model!r}, allowed: {', '.join(seen)}")
        if len(steps) > 1 and seen[model].inferer_type != "customized":
            raise ConfigError(
                f"{FILE}: dag: model {model}: of several nodes each is of inferer_type customized"
            )


def _custom(node: Node, max_concurrency: int) -> ModelConfig:
    batching = node.batching.type == "dynamic"
    message = {MESSAGE: TensorConfig("bytes", [])}
    return ModelConfig(
        backend="grps",
        inputs=message,
        outputs=message,
        max_batch_size=node.batching.max_batch_size if batching else 1,
        max_queue_delay_us=node.batching.batch_timeout_us if batching else 0,
        warmup="off",
        parameters={
            "inferer_name": node.inferer_name,
            "inferer_path": node.inferer_path,
            "inferer_args": node.inferer_args,
            "converter_name": node.converter_name if node.converter_type == "customized" else None,
            "converter_path": node.converter_path,
            "converter_args": node.converter_args,
            "device": node.device,
            "batching": batching,
            "max_concurrency": max_concurrency,
        },
        options=Options(origin=FILE, decoupled=True, parts_if_asked=True),
    )


def _of_tensors(node: Node) -> ModelConfig:
    """Return the config of a model whose requests are tensors. Raises ConfigError."""
    where = f"{FILE}: model {node.full_name}"
    backend, endings, what = _OF_TENSORS[node.inferer_type]
    path = (node.inferer_path or "").removeprefix("./").rstrip("/")
    if not is_inner_path(path) or not path.endswith(endings):
        raise ConfigError(f"{where}: inferer_path: given {path!r}, allowed: {what} inside the deployment")
    entry = find_backend(backend)
    if not entry.installed:
        raise ConfigError(f"{where}: {entry.missing_text}")
    if backend == "tensorflow":
        path = f"{path}/{entry.model_file}"
    dynamic = node.batching.type == "dynamic"
    fields: dict[str, Any] = {
        "backend": backend,
        "max_batch_size": node.batching.max_batch_size if dynamic else 0,
        "max_queue_delay_us": node.batching.batch_timeout_us if dynamic else 0,
    }
    if backend == "torch" and path.endswith(".pt"):
        given = node.inferer_args
        if not isinstance(given, Mapping) or not {"inputs", "outputs"} <= given.keys():
            raise ConfigError(f"{where}: {_TENSORS.format(given)}")
        fields |= {side: given[side] for side in ("inputs", "outputs")}
    config = convert(fields, ModelConfig, where)
    return msgspec.structs.replace(config, options=Options(origin=FILE, model_file=path))


def _chain(models: list[str]) -> ModelConfig:
    message = {MESSAGE: TensorConfig("bytes", [])}
    tensors = [MESSAGE, *(f"after_{number}" for number in range(1, len(models))), "answer"]
    steps = [
        EnsembleStep(
            model=model, version=None, inputs={MESSAGE: tensors[at]}, outputs={MESSAGE: tensors[at + 1]}
        )
        for at, model in enumerate(models)
    ]
    ensemble = EnsembleOptions(steps=steps, inputs={MESSAGE: False}, outputs=["answer"])
    return ModelConfig(
        backend="ensemble",
        inputs=message,
        outputs={"answer": TensorConfig("bytes", [])},
        max_batch_size=1,
        warmup="off",
        options=Options(origin=FILE, ensemble=ensemble),
    )
