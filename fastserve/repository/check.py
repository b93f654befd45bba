"""Explains what a server with these settings would serve, on which devices, and why not the rest.

`fastserve check DIR` prints it. `explain` reads files, and parses model code without running it; what a load
finds out replaces its guesses (`Report.take`). Devices are printed in a line for all instances alike:

    instances 0, 2 on GPU 0 (NAME, 80.0 GiB) (devices: cuda)
    instance 0 on the CPU (instance_group[0]: KIND_AUTO, and there is no GPU)

The reason comes from the config as written, before defaults are filled in.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastserve.backends.llm.folder import check_folder, find_runtime
from fastserve.backends.model_errors import explain as explain_error
from fastserve.backends.registry import find_backend
from fastserve.devices.inventory import MACHINE, VISIBLE, DeviceInventory
from fastserve.errors import ConfigError, ServeError
from fastserve.repository.folder_config import model_file
from fastserve.repository.layout import Layout, ModelFolder, repository_root
from fastserve.repository.model_config import ModelConfig, build_signatures, build_specs
from fastserve.repository.placement import AUTO, CPU, Placement, why_no_gpu
from fastserve.repository.reconciler import no_version_text
from fastserve.repository.single_model import MODEL_SETTINGS
from fastserve.repository.triton_config.messages import config_schema
from fastserve.repository.triton_config.reading import TRITON_FILE
from fastserve.repository.version import Version, missing_versions, policy_text, wanted_versions
from fastserve.settings import RepositorySettings
from fastserve.settings.config_files import read_text
from fastserve.settings.model_options import TextOptions, check_listen
from fastserve.settings.text_proto import parse_text
from fastserve.tensor import TensorSpec
from fastserve.workers.remote.keys import MISSING_ZMQ, read_key
from fastserve.workers.remote.placer_process import NOT_GIVEN, find_shortages

NOT_READ = "inputs and outputs: read from the model when it is loaded"


@dataclass(slots=True)
class ModelReport:
    """One model: the versions that would be served, facts about it, and its problems."""

    name: str
    versions: list[int] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def fields(self) -> dict[str, list[int] | list[str]]:
        """Return the report as plain values, for JSON."""
        versions, facts, notes = self.versions, self.facts, self.notes
        return {"versions": versions, "facts": facts, "notes": notes, "problems": self.problems}

    def lines(self) -> list[str]:
        head = "not served" if not self.versions else "version " + ", ".join(map(str, self.versions))
        body = [f"  {fact}" for fact in self.facts]
        body += [f"  note: {note}" for note in self.notes]
        return [f"{self.name}: {head}", *body, *(f"  PROBLEM: {problem}" for problem in self.problems)]


@dataclass(slots=True)
class Report:
    """Every model found, and folders passed over. `ok` is False when a server would refuse to start."""

    models: list[ModelReport]
    passed_over: list[str]
    of_mlserver: list[str] = field(default_factory=list)
    """Names of folders of MLServer among them."""
    loaded: bool = False

    @property
    def ok(self) -> bool:
        return bool(self.models) and not any(model.problems for model in self.models)

    def take(self, problems: Mapping[str, list[str]], served: Mapping[str, list[Version]]) -> None:
        """Replace guesses by the result of loading: the server's problems, and the versions that loaded."""
        for name in problems.keys() - {model.name for model in self.models}:
            self.models.append(ModelReport(name))
        for model in self.models:
            model.problems = problems.get(model.name, [])
            versions = served.get(model.name, [])
            model.versions = [version.number for version in versions]
            told = [f for f in model.facts if f != NOT_READ]
            for version in versions[-1:] if len(told) < len(model.facts) else ():
                told.append(f"inputs: {_tensors_text(version.inputs.values())}")
                told.append(f"outputs: {_tensors_text(version.outputs.values())}")
            model.facts = told
        self.loaded = True

    def text(self) -> str:
        """Return the whole report, a paragraph per model."""
        parts = ["\n".join(model.lines()) for model in self.models]
        parts += [f"{name}: passed over, {self._why_not(name)}" for name in self.passed_over]
        served = sum(bool(model.versions) for model in self.models)
        faulty = sum(bool(model.problems) for model in self.models)
        seen = "were loaded" if self.loaded else "would be served, going by their files"
        parts.append(f"{served} model(s) {seen}, {faulty} with problems")
        return "\n\n".join(parts) + "\n"

    def _why_not(self, name: str) -> str:
        if name in self.of_mlserver:
            return f"it holds {MODEL_SETTINGS}: `fastserve mlserver start` serves MLServer's folders"
        return "neither a config nor a numbered folder"


def explain(settings: RepositorySettings, ray: str = "") -> Report:
    """Report on every folder the settings name; `ray` is the cluster that runs workers. Blocking. Raises
    ConfigError when a folder does not exist, and where Ray cannot be used."""
    layout = Layout(settings)
    layout.check()
    try:
        found = layout.scan()
    except OSError as fault:
        raise ConfigError(f"repository: cannot be read: {fault.strerror}") from None
    reports = [_explain_model(folder) for _, folder in sorted(found.items())]
    _look_for_nodes(reports, found, ray)
    passed_over, root = _passed_over(settings, found), repository_root(settings.repository)
    of_mlserver = [
        name for name in passed_over if root is not None and (root / name / MODEL_SETTINGS).is_file()
    ]
    return Report(reports, passed_over, of_mlserver)


def _look_for_nodes(reports: Iterable[ModelReport], found: Mapping[str, ModelFolder], ray: str) -> None:
    """Add why workers of models that Ray is to place cannot be placed."""
    placed = {
        name: folder.config.placement.ray
        for name, folder in found.items()
        if folder.config is not None and folder.config.placement is not None and folder.config.placement.ray
    }
    shortages = find_shortages(ray, placed) if ray else dict.fromkeys(placed, NOT_GIVEN)
    for report in reports:
        if report.name in shortages:
            report.problems.append(shortages[report.name])


def _passed_over(settings: RepositorySettings, found: Iterable[str]) -> list[str]:
    root = repository_root(settings.repository)
    children = [] if root is None else [child.name for child in root.iterdir() if child.is_dir()]
    return sorted(n for n in children if n not in found and not n.startswith(".") and n != "__pycache__")


def _explain_model(folder: ModelFolder) -> ModelReport:
    report = ModelReport(folder.name, notes=list(folder.notes))
    config = folder.config
    if folder.error or config is None:
        report.problems.append(folder.error)
        return report
    policy = config.version_policy
    report.versions = wanted_versions(policy, folder.versions)
    for number in missing_versions(policy, folder.versions):
        report.problems.append(f"version {number}: wanted by version_policy, but there is no such version")
    if not folder.versions:
        report.problems.append(no_version_text(folder.notes))
    for label, number in config.labels.items():
        if number not in report.versions:
            report.problems.append(f"label {label}: points at version {number}, which would not be served")
    report.problems += config.rules.find_problems(config.labels, report.versions)
    if config.fault:
        report.problems.append(config.fault)
        report.versions = []
        return report
    report.problems += _backend_problems(config)
    for number in report.versions:
        fault = folder.config_of(number).fault
        report.problems += [f"version {number}: {fault}"] if fault else []
        report.problems += _file_problems(folder.versions[number].folder, number, folder.config_of(number))
        report.problems += _runtime_problems(folder.versions[number].folder, number, config)
    report.facts = _facts(folder, config, report)
    return report


def _facts(folder: ModelFolder, config: ModelConfig, report: ModelReport) -> list[str]:
    at_hand = ", ".join(map(str, sorted(folder.versions))) or "none"
    batch = f"batches of up to {config.max_batch_size} rows" if config.batching else "no batching"
    if find_backend(config.backend).takes == "text":  # the engine's scheduler mixes sequences by itself
        batch = "sequences batched at every token"
    workers = "1 worker a version" if config.instances == 1 else f"{config.instances} workers a version"
    if config.backend == "ensemble":
        workers = "no worker of its own"
    if config.placement is not None and config.placement.remote is not None:
        remote = config.placement.remote
        workers = f"{remote.workers.min} remote workers or more, which connect to {remote.listen}"
    elif config.placement is not None and config.placement.ray is not None:
        wanted = config.placement.ray.workers
        most = f" to {wanted.max}" if wanted.max > wanted.min else ""
        workers = f"{wanted.min}{most} workers on nodes of a Ray cluster"
    facts = [
        f"versions at hand: {at_hand}; policy: {policy_text(config.version_policy)}",
        f"backend {config.backend}, {batch}, {workers}",
    ]
    if config.backend != "ensemble":
        facts += describe_places(config, folder.folder, MACHINE)
    if config.shared_worker:
        facts.append(f"shares worker {config.shared_worker} with the models of its device that name it")
    facts += _scheduling_facts(config)
    inputs, outputs = build_specs(config.inputs), build_specs(config.outputs)
    if not (inputs and outputs):
        facts.append(NOT_READ)
    else:
        facts += [f"inputs: {_tensors_text(inputs.values())}", f"outputs: {_tensors_text(outputs.values())}"]
        facts += _signature_facts(config, inputs, outputs, report)
    if config.labels:
        facts.append("labels: " + ", ".join(f"{label} -> {n}" for label, n in config.labels.items()))
    facts += config.rules.describe()
    return facts


def _scheduling_facts(config: ModelConfig) -> list[str]:
    """Return the scheduling options of a model, in a line."""
    parts, options = [], config.options
    if options.queue is not None:
        parts.append(f"dynamic batching, up to {config.max_queue_delay_us} microseconds")
    if options.sequences is not None:
        strategy = "direct" if options.sequences.direct else "oldest"
        parts.append(f"sequences ({strategy}), {options.sequences.idle_us} idle microseconds")
    if options.ensemble is not None:
        parts.append("ensemble of " + ", ".join(step.model for step in options.ensemble.steps))
    if options.decoupled:
        parts.append("decoupled")
    if options.cached:
        parts.append("response cache")
    return ["scheduling: " + "; ".join(parts)] if parts else []


def _signature_facts(
    config: ModelConfig, inputs: dict[str, TensorSpec], outputs: dict[str, TensorSpec], report: ModelReport
) -> list[str]:
    try:
        signatures = build_signatures(config, inputs, outputs)
    except ConfigError as fault:
        report.problems.append(str(fault))
        return []
    return ["signatures: " + ", ".join(f"{name} ({s.method})" for name, s in signatures.items())]


def _tensors_text(specs: Iterable[TensorSpec]) -> str:
    return ", ".join(
        f"{s.name} {s.dtype.name}" + ("" if s.shape is None else str(list(s.shape))) for s in specs
    )


def _backend_problems(config: ModelConfig) -> list[str]:
    entry = find_backend(config.backend)
    problems = [] if entry.installed or config.backend == "text" else [entry.missing_text]
    return problems + _placement_problems(config)


def _placement_problems(config: ModelConfig) -> list[str]:
    """Return why remote workers could not connect. The model itself is loaded here by `check`."""
    remote = config.placement.remote if config.placement is not None else None
    if remote is None:
        return []
    try:
        check_listen(remote.listen, remote.key)
        if remote.key:
            read_key(Path(remote.key), "server")
        if importlib.util.find_spec("zmq") is None:
            return [MISSING_ZMQ]
    except ConfigError as fault:
        return [str(fault)]
    return []


def _runtime_problems(folder: Path, number: int, config: ModelConfig) -> list[str]:
    """Return why a text model's folder cannot run here: torch is needed by some, and may be missing."""
    if config.backend != "text":
        return []
    options = config.text or TextOptions()
    try:
        find_runtime(folder, check_folder(folder, options), options)
    except (ConfigError, ServeError) as error:
        return [f"version {number}: {error}"]
    return []


def _file_problems(folder: Path, number: int, config: ModelConfig) -> list[str]:
    file = folder / model_file(config, folder)
    if file.suffix != ".py":
        return [] if file.is_dir() or file.stat().st_size else [f"version {number}: {file.name} is empty"]
    try:
        tree = ast.parse(file.read_bytes(), file.name)
    except (SyntaxError, ValueError) as fault:
        return [f"version {number}: {explain_error(fault)}"]
    class_name = find_backend(config.backend).class_name or config.class_name
    if class_name in _bound_names(tree):
        return []
    return [f"version {number}: {file.name} has no class {class_name!r}"]


def _bound_names(tree: ast.Module) -> set[str]:
    """Yield names a module may bind, generously: bindings inside `if` or `try` count."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    return names


def describe_places(config: ModelConfig, folder: Path, machine: DeviceInventory) -> list[str]:
    """Return a line for all instances with the same device and reason. `folder` is the model's."""
    places = config.places or [Placement()] * config.instances
    reasons = list(_reasons(config, folder, machine))
    numbers: dict[tuple[str, str], list[int]] = {}
    for number, place in enumerate(places):
        told = _device(place, machine) + (f", in {place.dtype}" if place.dtype else "")
        numbers.setdefault((told, reasons[number % len(reasons)]), []).append(number)
    lines = [f"{_counted(found)} on {told} ({why})" for (told, why), found in numbers.items()]
    if VISIBLE in config.env and any(place.gpu >= 0 for place in places):
        lines.append(f"but {VISIBLE}={config.env[VISIBLE]} in env is what the workers see")
    return lines


def _reasons(config: ModelConfig, folder: Path, machine: DeviceInventory) -> Iterator[str]:
    """Yield the reason for the device of each instance, or of each of a round of them."""
    if config.triton is not None:
        yield from _of_groups(config, folder, machine)
        return
    asked = [config.devices] if isinstance(config.devices, str) else config.devices
    for one in asked:
        name = one.partition("=")[0]
        count = len(machine.devices()) if name == "cuda" else 1
        if name == AUTO:
            why = why_no_gpu(find_backend(config.backend), machine)
            count = 1 if why else len(machine.devices())
            one += f", and {why or 'it can use a GPU'}"
        yield from [f"devices: {one}" + ", the default" * (asked == [CPU])] * count


def _of_groups(config: ModelConfig, folder: Path, machine: DeviceInventory) -> Iterator[str]:
    assert config.triton is not None
    written = _written(folder)
    for number, group in enumerate(config.triton.get("instance_group") or [{}]):
        if group.get("passive"):
            continue
        given = written[number] if number < len(written) else {}
        kind = str(given.get("kind") or "KIND_AUTO")
        on_gpus = group.get("kind") == "KIND_GPU"
        where = f", gpus {given['gpus']}" if given.get("gpus") else ", every GPU" if on_gpus else ""
        why = why_no_gpu(find_backend(config.backend), machine) or "it can use a GPU"
        said = f"instance_group[{number}]: " if number < len(written) else "no instance_group: "
        count = max(int(group.get("count") or 1), 1) * (
            max(len(group.get("gpus") or ()), 1) if on_gpus else 1
        )
        yield from [said + kind + where + (f", and {why}" if kind == "KIND_AUTO" else "")] * count


def _written(folder: Path) -> Sequence[dict[str, Any]]:
    """Return the instance groups as config.pbtxt has them; none where it has none, or does not exist."""
    try:
        raw = parse_text(read_text(folder / TRITON_FILE, TRITON_FILE), config_schema(), TRITON_FILE)
    except (ConfigError, OSError):  # made up by the server, or given with a load call
        return []
    return list(raw.get("instance_group") or ())


def _device(place: Placement, machine: DeviceInventory) -> str:
    if place.gpu < 0:
        return "the CPU"
    device, given = machine.devices()[place.gpu], os.environ.get(VISIBLE)
    mig = f", the MIG instance {device.select}" if device.select.startswith("MIG-") else ""
    return device.title + mig + (f", of {VISIBLE}={given}" if given else "")


def _counted(numbers: Sequence[int]) -> str:
    return ("instance " if len(numbers) == 1 else "instances ") + ", ".join(map(str, numbers))
