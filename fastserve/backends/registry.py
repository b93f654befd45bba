"""Every backend there is, an entry each: the only list of them. Nothing is imported here, numpy included.

    BACKENDS["onnx"]                 what fastserve brings
    find_backend("mine.fast:Net")    a user's own: any importable class with the face of `base.Backend`

What is asked elsewhere about a backend (which file is its model, what must be installed, what Triton calls
it) is a field here.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from typing import Literal

from fastserve.errors import ConfigError, install_text
from fastserve.settings.fields import fault_text

TO_ONNX = "python -m tf2onnx.convert {kind} {place} --output {folder}/model.onnx"
"""The command that converts a TensorFlow model to ONNX, in a version's folder."""
_PLACE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """One backend. `entry_point` is "module:Class", imported in the worker; "" for what has no worker."""

    name: str
    entry_point: str
    takes: Literal["arrays", "requests", "text"] = "arrays"
    """Batches as arrays, requests one by one, or prompts: see llm.protocols.TextBackend."""
    streams: bool = False
    """A request may have any number of responses."""
    model_file: str = ""
    """The model's file in a version's folder; "" when the folder is enough."""
    weights_pattern: str = ""
    """A pattern of files that must lie beside it where no config says whose model it is."""
    architectures: tuple[str, ...] = ()
    """Endings of the names in config.json's `architectures`, one of which its models have."""
    other_files: tuple[str, ...] = ()
    """Files that may lie there instead of the model file."""
    class_name: str = ""
    """The class that a Python `model_file` must define, where its config does not name one."""
    needs_tensors: bool = False
    """The config must declare inputs and outputs, as its models cannot."""
    needs_config: bool = True
    """A folder without any config is not taken for one of its models."""
    native: bool = True
    """The name is valid in model.yaml."""
    listed: bool = True
    """Errors name it among those that people write; models of scripts are written by `fastserve.app`."""
    gpu: bool = False
    """Its models may compute on a GPU."""
    forks: bool = False
    """Its workers import torch and transformers, and may be forked from a process that has."""
    framework: str = ""
    """The module that must be installed."""
    framework_needs: tuple[str, ...] = ()
    """Modules that must be installed besides."""
    extra: str = ""
    """The extra that brings the framework."""
    packages: str = ""
    """The packages of that extra, by the names that pip knows on every machine."""
    alternative: str = ""
    """The alternative for its models where the framework is not wanted."""
    batch_rows: int = 0
    """Most rows of a batch, where the config does not say and the ordinary number does not suit."""
    triton: str = ""
    """Triton's name of the backend."""
    triton_platform: str = ""
    """Triton's older name of it."""
    triton_file: str = ""
    """Triton's name of its file or folder in a version's folder, where it is another."""
    triton_instances: int = 1
    """Workers of an instance group on CPUs that gives no count."""

    @property
    def installed(self) -> bool:
        """Whether all modules it needs are installed; nothing is imported."""
        needed = (self.framework, *self.framework_needs) if self.framework else ()
        return all(importlib.util.find_spec(name) is not None for name in needed)

    @property
    def shares(self) -> bool:
        """Whether its workers may be threads of one process. Not for models that make calls and threads of
        their own, as if the process were theirs."""
        return bool(self.entry_point) and self.takes == "arrays"

    @property
    def missing_text(self) -> str:
        """The error text where the framework is not installed."""
        instead = f", or {self.alternative}" if self.alternative else ""
        install = install_text(self.packages, self.extra)
        return f"the {self.name} backend needs {self.framework}: {install}{instead}"


BACKENDS = {
    entry.name: entry
    for entry in (
        BackendEntry(
            "python",
            "fastserve.backends.frameworks.python:PythonBackend",
            gpu=True,
            model_file="model.py",
            needs_tensors=True,
        ),
        BackendEntry(
            "python_stream",
            "fastserve.backends.frameworks.python_stream:PythonStreamBackend",
            takes="requests",
            streams=True,
            gpu=True,
            model_file="model.py",
            needs_tensors=True,
            listed=False,
        ),
        BackendEntry(
            "onnx",
            "fastserve.backends.frameworks.onnx:OnnxBackend",
            gpu=True,
            model_file="model.onnx",
            needs_config=False,
            framework="onnxruntime",
            extra="onnx",
            packages="onnxruntime",
            triton="onnxruntime",
            triton_platform="onnxruntime_onnx",
            triton_instances=2,
        ),
        BackendEntry(
            "torch",
            "fastserve.backends.frameworks.torch:TorchBackend",
            gpu=True,
            model_file="model.pt",
            other_files=("model.pt2", "model.py"),
            framework="torch",
            extra="torch",
            packages="torch",
            triton="pytorch",
            triton_platform="pytorch_libtorch",
        ),
        BackendEntry(
            "tensorflow",
            "fastserve.backends.frameworks.tensorflow:TensorFlowBackend",
            model_file="saved_model.pb",
            other_files=("saved_model.pbtxt",),
            needs_config=False,
            framework="tensorflow",
            extra="tensorflow",
            packages="tensorflow",
            alternative="convert the model: " + TO_ONNX.format(kind="--saved-model", place="N", folder="N"),
            triton="tensorflow",
            triton_platform="tensorflow_savedmodel",
            triton_file="model.savedmodel",
        ),
        BackendEntry(
            "sklearn",
            "fastserve.backends.tabular.scikit_learn:SklearnBackend",
            model_file="model.skops",
            other_files=("model.joblib", "model.pkl"),
            needs_config=False,
            framework="sklearn",
            extra="sklearn",
            packages="scikit-learn skops",
            batch_rows=1024,
        ),
        BackendEntry(
            "xgboost",
            "fastserve.backends.tabular.xgboost:XGBoostBackend",
            model_file="model.json",
            other_files=("model.ubj",),
            needs_config=False,
            framework="xgboost",
            extra="xgboost",
            packages="xgboost",
            batch_rows=1024,
        ),
        BackendEntry(
            "lightgbm",
            "fastserve.backends.tabular.lightgbm:LightGBMBackend",
            model_file="model.txt",
            needs_config=False,
            framework="lightgbm",
            extra="lightgbm",
            packages="lightgbm",
            batch_rows=1024,
        ),
        BackendEntry(
            "catboost",
            "fastserve.backends.tabular.catboost:CatBoostBackend",
            model_file="model.cbm",
            needs_config=False,
            framework="catboost",
            extra="catboost",
            packages="catboost",
            batch_rows=1024,
        ),
        BackendEntry(
            "treelite",
            "fastserve.backends.tabular.treelite:TreeliteBackend",
            model_file="model.tl",
            other_files=("model.json", "model.ubj", "model.txt"),
            needs_config=False,
            framework="treelite",
            extra="treelite",
            packages="treelite",
            batch_rows=1024,
        ),
        BackendEntry(
            "triton_fil",
            "fastserve.backends.tabular.treelite:FilBackend",
            native=False,
            framework="treelite",
            extra="treelite",
            packages="treelite",
            triton="fil",
        ),
        BackendEntry(
            "triton_python",
            "fastserve.backends.triton_api.backend:TritonPythonBackend",
            gpu=True,
            takes="requests",
            streams=True,
            model_file="model.py",
            class_name="TritonPythonModel",
            needs_config=False,
            native=False,
            triton="python",
        ),
        BackendEntry(
            "grps",
            "fastserve.backends.grps:GrpsBackend",
            takes="requests",
            streams=True,
            needs_tensors=True,
            native=False,
        ),
        BackendEntry(
            "transformers",
            "fastserve.backends.frameworks.transformers:TextTensorBackend",
            forks=True,
            model_file="config.json",
            weights_pattern="*.safetensors",
            architectures=("ForSequenceClassification", "ForTokenClassification"),
            needs_config=False,
            framework="torch",
            framework_needs=("transformers", "tokenizers", "safetensors"),
            extra="llm",
            packages="torch transformers safetensors",
        ),
        BackendEntry(
            "text",
            "fastserve.backends.llm.backend:TransformersBackend",
            takes="text",
            forks=True,
            streams=True,
            model_file="config.json",
            weights_pattern="*.safetensors",
            needs_config=False,
            framework="torch",
            framework_needs=("transformers", "tokenizers", "safetensors"),
            extra="llm",
            packages="torch transformers safetensors",
        ),
        BackendEntry(
            "text_python",
            "fastserve.backends.llm.python_engine:TextPythonBackend",
            takes="text",
            streams=True,
            model_file="model.py",
        ),
        BackendEntry(
            "script",
            "fastserve.backends.script.backend:ScriptBackend",
            gpu=True,
            needs_tensors=True,
            listed=False,
        ),
        BackendEntry(
            "script_json",
            "fastserve.backends.script.backend:ScriptJsonBackend",
            takes="requests",
            gpu=True,
            needs_tensors=True,
            listed=False,
        ),
        BackendEntry(
            "script_stream",
            "fastserve.backends.script.backend:ScriptJsonBackend",
            takes="requests",
            streams=True,
            gpu=True,
            needs_tensors=True,
            listed=False,
        ),
        BackendEntry("ensemble", "", native=False),
    )
}
BY_TRITON_NAME = {entry.triton: entry for entry in BACKENDS.values() if entry.triton}
NAMES = (
    ", ".join(entry.name for entry in BACKENDS.values() if entry.native and entry.listed) + " or module:Class"
)


def find_backend(name: str) -> BackendEntry:
    """Return the entry of a backend, or of a class of the user's own. Raises ConfigError for any other
    name."""
    entry = BACKENDS.get(name)
    if entry is not None:
        return entry
    if not _PLACE.fullmatch(name):
        raise ConfigError(fault_text("backend", name, NAMES))
    return BackendEntry(name, name, gpu=True)
