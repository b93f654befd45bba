"""Versions, models, the states of a version as a table, and the policies that choose versions.

A version is loaded once and unloaded once. A fresh try, after a failure or a change of its config, is a new
Version of the same number; the old one serves until the new one is available.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Generic, TypeVar

from fastserve.codec.generation import Info
from fastserve.errors import ServeError
from fastserve.repository.model_config import (
    ModelConfig,
    Signature,
    build_signatures,
    build_specs,
    with_signatures,
    with_streams,
)
from fastserve.repository.triton_config.reading import amend, with_tensors
from fastserve.settings import VersionPolicy
from fastserve.settings.model_options import NO_RULES, TrafficRules, arm_number
from fastserve.tensor import TensorSpec

T = TypeVar("T")


class VersionState(Enum):
    """States of a version, numbered as in TensorFlow Serving (spec 3.6)."""

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
    tells them only once it is loaded. `text` describes a loaded text engine. `down` is the server's reason
    why an available version could not answer now, "" while it could. A version in START that is `dormant`
    is loaded on demand.
    """

    def __init__(self, model: str, number: int, folder: Path, config: ModelConfig) -> None:
        self.model = model
        self.number = number
        self.folder = folder
        self.config = config
        self.state = VersionState.START
        self.error: ServeError | None = None
        self.down = ""
        self.dormant = False
        self.inputs: dict[str, TensorSpec] = build_specs(config.inputs)
        self.outputs: dict[str, TensorSpec] = build_specs(config.outputs)
        self.signatures: dict[str, Signature] = {}
        self.text: Info | None = None
        self._attached: dict[Attachment[Any], Any] = {}
        if self.inputs and self.outputs:
            self.signatures = build_signatures(config, self.inputs, self.outputs)

    @classmethod
    def unloaded(cls, model: str, number: int) -> Version:
        """Make a version that another process reports and that cannot serve here: only its state means
        anything."""
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
        """Take over what the loaded model says of its tensors and signatures. Raises ConfigError when a
        signature does not fit."""
        self.inputs = dict(inputs)
        self.outputs = dict(outputs)
        self.config = with_tensors(self.config, inputs, outputs)
        if signatures:
            self.config = with_signatures(self.config, inputs, outputs, signatures)
        self.signatures = build_signatures(self.config, self.inputs, self.outputs)

    def amend(self, fields: Mapping[str, Any]) -> None:
        """Take over what the model itself says of fields of its config.pbtxt; of a model.yaml, that its `run`
        yields. Raises ConfigError."""
        native = self.config.triton is None
        self.config = with_streams(self.config) if native else amend(self.config, fields)

    def end(self) -> None:
        """Drop the attachments that are of no use once the version has ended."""
        for attachment in [attachment for attachment in self._attached if not attachment.outlives]:
            del self._attached[attachment]

    def __repr__(self) -> str:
        return f"<Version {self.model}/{self.number} {self.state.name}>"


class Attachment(Generic[T]):
    """A typed value that an upper floor keeps with each version; a module-level constant of that floor.

    An attachment that `outlives` its version stays when the version has ended.
    """

    def __init__(self, *, outlives: bool = False) -> None:
        self.outlives = outlives

    def get(self, version: Version) -> T | None:
        """Return the value, None where there is none."""
        return version._attached.get(self)

    def put(self, version: Version, value: T) -> T:
        """Attach the value and return it."""
        version._attached[self] = value
        return value

    def drop(self, version: Version) -> None:
        """Detach the value, if there is one."""
        version._attached.pop(self, None)


def sort_arms(traffic: Mapping[str, float]) -> list[str]:
    """Return the keys of `traffic`, the largest weight first."""
    return sorted(traffic, key=lambda key: -traffic[key])


class Model:
    """A named model and its versions. `versions` keeps every number ever seen; ended ones stay listed.

    `latest` is the version of requests that name none: the highest available one, or the available one of the
    largest weight in `rules`; never a shadow. `error` says why the model's own folder or config cannot be
    used, while what was loaded before keeps serving, and `failed_at` since when, as Unix time; only the
    catalog sets them. `on_demand`: the server loads and unloads the model by itself, within its memory
    budget. `rules` are the versions that requests without a version go to; `set_rules` are those that a
    client has set in place of those of the config, `config_rules`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.versions: dict[int, Version] = {}
        self.labels: dict[str, int] = {}
        self.rules = NO_RULES
        self.config_rules = NO_RULES
        self.set_rules: TrafficRules | None = None
        self.config: ModelConfig | None = None
        self.latest: Version | None = None
        self.error: ServeError | None = None
        self.failed_at = 0.0
        self.on_demand = False

    @property
    def waits_for_demand(self) -> bool:
        """True when the model is not loaded and its next request loads it, as far as anybody knows."""
        return self.on_demand and self.latest is None and self.error is None

    def available(self) -> list[Version]:
        """Return the available versions, lowest first."""
        found = [v for v in self.versions.values() if v.state is VersionState.AVAILABLE]
        return found if len(found) < 2 else sorted(found, key=lambda version: version.number)

    def arm(self, key: str) -> Version | None:
        """Return the available version of a key of `rules.traffic`; None where there is none."""
        number = arm_number(key, self.labels)
        version = None if number is None else self.versions.get(number)
        return version if version is not None and version.state is VersionState.AVAILABLE else None

    def find_default(self) -> Version | None:
        """Return what `latest` should be."""
        found = [version for version in self.available() if version.number != self.rules.shadowed]
        arms = (self.arm(key) for key in sort_arms(self.rules.traffic))
        up = [version for version in arms if version in found]
        return up[0] if up else found[-1] if found else None


_NUMBER = re.compile(r"[0-9]{1,40}")

HIGHEST = 2**63 - 1


def version_number(folder_name: str) -> int | None:
    """Return the version of a folder name ("00000123" is 123), None when it is no int64 (spec 5)."""
    if not _NUMBER.fullmatch(folder_name):
        return None
    number = int(folder_name)
    return number if number <= HIGHEST else None


def wanted_versions(policy: VersionPolicy, numbers: Iterable[int]) -> list[int]:
    """Return the versions that the policy wants of these, lowest first."""
    ordered = sorted(set(numbers))
    if policy == "all":
        return ordered
    if policy.specific is not None:
        return [number for number in ordered if number in policy.specific]
    return ordered[-(policy.latest or 1) :]


def missing_versions(policy: VersionPolicy, numbers: Iterable[int]) -> list[int]:
    """Return the versions that the policy names outright and that do not exist."""
    if policy == "all" or policy.specific is None:
        return []
    return sorted(set(policy.specific) - set(numbers))


def policy_text(policy: VersionPolicy) -> str:
    """Describe the policy in words: "all versions", "the latest 2", "versions 1, 3"."""
    if policy == "all":
        return "all versions"
    if policy.specific is not None:
        return "versions " + ", ".join(map(str, sorted(policy.specific)))
    count = policy.latest or 1
    return "the latest version" if count == 1 else f"the latest {count} versions"
