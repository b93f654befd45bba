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

from fastserve.config.fields import fault_text
from fastserve.errors import ConfigError

TO_ONNX = "python -m tf2onnx.convert {kind} {place} --output {folder}/model.onnx"
"""What makes an ONNX model of one of TensorFlow's, in a version's folder."""
_PLACE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """One backend. `place` is "module:Class", imported in the worker; "" for what has no worker."""

    name: str
    place: str
    takes: Literal["arrays", "requests", "text"] = "arrays"
    """Batches as arrays, requests one by one, or prompts: see text_engine.TextBackend."""
    streams: bool = False
    """A request may have any number of responses."""
    model_file: str = ""
    """In a version's folder; "" when the folder is enough."""
    beside: str = ""
    """A pattern of files that must lie beside it where no config says whose model it is."""
    other_files: tuple[str, ...] = ()
    """What may lie there in its place."""
    class_name: str = ""
    """What a Python `model_file` must define, where its config does not say."""
    needs_tensors: bool = False
    """Its models cannot tell what they take and give: the config must."""
    needs_config: bool = True
    """A folder without any config is not taken for one of its models."""
    native: bool = True
    """May be named in model.yaml."""
    gpu: bool = False
    """Its models may compute on a GPU."""
    framework: str = ""
    """The module that must be installed."""
    beside_framework: tuple[str, ...] = ()
    """Modules that must be there too."""
    extra: str = ""
    """What brings it: pip install 'fastserve[extra]'."""
    instead: str = ""
    """What to do with its models where that is not wanted."""
    triton: str = ""
    """Triton's name for it."""
    triton_platform: str = ""
    """And its older one."""
    triton_instances: int = 1
    """Workers of an instance group on CPUs that does not say how many."""

    @property
    def installed(self) -> bool:
        """Whether all that it needs is there; nothing is imported."""
        needed = (self.framework, *self.beside_framework) if self.framework else ()
        return all(importlib.util.find_spec(name) is not None for name in needed)

    @property
    def shares(self) -> bool:
        """Whether its workers may be threads of one process: not of models that make calls and threads of
        their own, as if the process were theirs."""
        return bool(self.place) and self.takes == "arrays"

    @property
    def missing_text(self) -> str:
        """What to say where the framework is not installed."""
        instead = f", or {self.instead}" if self.instead else ""
        return (
            f"the {self.name} backend needs {self.framework}: pip install 'fastserve[{self.extra}]'{instead}"
        )


BACKENDS = {
    entry.name: entry
    for entry in (
        BackendEntry(
            "python",
            "fastserve.backends.python:PythonBackend",
            gpu=True,
            model_file="model.py",
            needs_tensors=True,
        ),
        BackendEntry(
            "onnx",
            "fastserve.backends.onnx:OnnxBackend",
            gpu=True,
            model_file="model.onnx",
            needs_config=False,
            framework="onnxruntime",
            extra="onnx",
            triton="onnxruntime",
            triton_platform="onnxruntime_onnx",
            triton_instances=2,
        ),
        BackendEntry(
            "torch",
            "fastserve.backends.torch:TorchBackend",
            gpu=True,
            model_file="model.pt",
            other_files=("model.pt2", "model.py"),
            framework="torch",
            extra="torch",
            triton="pytorch",
            triton_platform="pytorch_libtorch",
        ),
        BackendEntry(
            "tensorflow",
            "fastserve.backends.tensorflow:TensorFlowBackend",
            model_file="saved_model.pb",
            other_files=("saved_model.pbtxt",),
            needs_config=False,
            framework="tensorflow",
            extra="tensorflow",
            instead="convert the model: " + TO_ONNX.format(kind="--saved-model", place="N", folder="N"),
        ),
        BackendEntry(
            "triton_python",
            "fastserve.backends.triton_python:TritonPythonBackend",
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
            "text",
            "fastserve.backends.text_torch.backend:TextBackend",
            takes="text",
            streams=True,
            model_file="config.json",
            beside="*.safetensors",
            needs_config=False,
            framework="torch",
            beside_framework=("transformers", "tokenizers", "safetensors"),
            extra="llm",
        ),
        BackendEntry(
            "text_python",
            "fastserve.backends.text_python:TextPythonBackend",
            takes="text",
            streams=True,
            model_file="model.py",
        ),
        BackendEntry("ensemble", "", native=False),
    )
}
BY_TRITON_NAME = {entry.triton: entry for entry in BACKENDS.values() if entry.triton}
NAMES = ", ".join(entry.name for entry in BACKENDS.values() if entry.native) + " or module:Class"


def find_backend(name: str) -> BackendEntry:
    """The entry of a backend, or of a class of the user's own. Raises ConfigError for any other name."""
    entry = BACKENDS.get(name)
    if entry is not None:
        return entry
    if not _PLACE.fullmatch(name):
        raise ConfigError(fault_text("backend", name, NAMES))
    return BackendEntry(name, name, gpu=True)
