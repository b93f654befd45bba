"""Versions, models, and the life of a version as a table.

A version is loaded once and unloaded once. A fresh try, after a failure or a change of its
config, is a new Version of the same number; the old one serves until the new one is available.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from fastserve.codec.text import Info
from fastserve.errors import ServeError
from fastserve.repository.model_config import ModelConfig, build_specs
from fastserve.repository.signature import Signature, build_signatures, with_signatures
from fastserve.repository.triton_config import amend, with_tensors
from fastserve.tensor import TensorSpec


class VersionState(Enum):
    """Numbered as TensorFlow Serving numbers them (spec 3.6)."""

    START = 10
    LOADING = 20
    AVAILABLE = 30
    UNLOADING = 40
    END = 50


# From -> to. END is final; docs/architecture.md draws its picture from this table.
TRANSITIONS: dict[VersionState, frozenset[VersionState]] = {
    VersionState.START: frozenset({VersionState.LOADING, VersionState.END}),
    VersionState.LOADING: frozenset({VersionState.AVAILABLE, VersionState.END}),
    VersionState.AVAILABLE: frozenset({VersionState.UNLOADING}),
    VersionState.UNLOADING: frozenset({VersionState.END}),
    VersionState.END: frozenset(),
}


class Version:
    """One version of a model. Only the catalog moves it from state to state.

    `inputs` and `outputs` are the model's own tensors; empty until `describe` when the model
    tells them only once it is loaded. `scheduler` and `counters` belong to the engine, `view` and
    `text_model` to the serving floor: they are opaque here. `text` is what a loaded text engine says of
    itself.
    """

    __slots__ = (
        "__weakref__",
        "config",
        "counters",
        "error",
        "folder",
        "inputs",
        "model",
        "number",
        "outputs",
        "scheduler",
        "signatures",
        "state",
        "text",
        "text_model",
        "view",
    )

    def __init__(self, model: str, number: int, folder: Path, config: ModelConfig) -> None:
        self.model = model
        self.number = number
        self.folder = folder
        self.config = config
        self.state = VersionState.START
        self.error: ServeError | None = None
        self.inputs: dict[str, TensorSpec] = build_specs(config.inputs)
        self.outputs: dict[str, TensorSpec] = build_specs(config.outputs)
        self.signatures: dict[str, Signature] = {}
        self.scheduler: object | None = None
        self.counters: object | None = None
        self.view: object | None = None
        self.text: Info | None = None
        self.text_model: object | None = None
        if self.inputs and self.outputs:
            self.signatures = build_signatures(config, self.inputs, self.outputs)

    @classmethod
    def unloaded(cls, model: str, number: int) -> Version:
        """One that another process tells of and that cannot serve here: only its state says anything."""
        return cls(model, number, Path(), ModelConfig(backend="onnx"))

    @property
    def batching(self) -> bool:
        """True when shapes of `inputs` and `outputs` leave out a batch axis that tensors have."""
        return self.config.batching

    def describe(
        self,
        inputs: Mapping[str, TensorSpec],
        outputs: Mapping[str, TensorSpec],
        signatures: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """What the loaded model says of its tensors, and of signatures of its own. Raises ConfigError when a
        signature does not fit."""
        self.inputs = dict(inputs)
        self.outputs = dict(outputs)
        self.config = with_tensors(self.config, inputs, outputs)
        if signatures:
            self.config = with_signatures(self.config, inputs, outputs, signatures)
        self.signatures = build_signatures(self.config, self.inputs, self.outputs)

    def amend(self, fields: Mapping[str, Any]) -> None:
        """What the model itself says of fields of its config.pbtxt. Raises ConfigError."""
        self.config = amend(self.config, fields)

    def __repr__(self) -> str:
        return f"<Version {self.model}/{self.number} {self.state.name}>"


class Model:
    """A name that has versions. `versions` keeps every number ever seen; ended ones stay listed.

    `latest` is the highest available version. `error` says why the model's own folder or config
    cannot be used, while what was loaded before keeps serving.
    """

    __slots__ = ("config", "error", "labels", "latest", "name", "versions")

    def __init__(self, name: str) -> None:
        self.name = name
        self.versions: dict[int, Version] = {}
        self.labels: dict[str, int] = {}
        self.config: ModelConfig | None = None
        self.latest: Version | None = None
        self.error: ServeError | None = None

    def available(self) -> list[Version]:
        """The available versions, lowest first."""
        found = [v for v in self.versions.values() if v.state is VersionState.AVAILABLE]
        return sorted(found, key=lambda version: version.number)
