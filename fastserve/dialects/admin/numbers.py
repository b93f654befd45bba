"""The console's numbers as JSON: the server, its devices, every model with its versions, failures.

Nothing here is known to this page alone: counters are those of /metrics, states those of /healthz/ready.
"""

from __future__ import annotations

import time

import msgspec

from fastserve import __version__
from fastserve.devices.nvml import GPUS, Gpu
from fastserve.dialects.admin import figures
from fastserve.dialects.admin.figures import Bar, ModelFigures, StageFigures, TextFigures
from fastserve.dialects.admin.history import ALL, INTERVAL_S, History
from fastserve.metrics import LoadFailure, Readiness, Registry, names
from fastserve.metrics.readiness import MachineUsage
from fastserve.repository.catalog import Catalog
from fastserve.repository.version import Model, Version

Points = dict[str, list[float | None]]
CAUSES_MAX = 50

_FACTS = (
    names.WORKERS_ALIVE,
    names.WORKERS_WANTED,
    names.WORKER_RESTARTS,
    names.CONNECTIONS,
    names.TLS_EXPIRES,
)


class DeviceNumbers(msgspec.Struct, kw_only=True):
    """A device that workers run on. `utilization` is from 0 to 1, of the CPU since the last request,
    of a GPU as NVML has it, or None where it does not tell."""

    name: str
    utilization: float | None
    memory_used_bytes: int
    memory_total_bytes: int


class VersionNumbers(msgspec.Struct, kw_only=True):
    version: int
    state: str
    labels: list[str]
    error: str
    workers_alive: int
    workers_wanted: int
    worker_restarts: int
    shared_worker: str


class FailureNumbers(msgspec.Struct):
    """A request that the model or the server failed. `at` is Unix time."""

    at: float
    status: str
    message: str
    request_id: str


class ModelNumbers(msgspec.Struct, kw_only=True):
    """`now` is of the last ten seconds, and so is `text`, of models that generate it; `points` are of
    intervals of `interval_s`, oldest first; `failures` the last ones, newest first, of this front process."""

    model: str
    ready: bool
    reason: str
    failed: LoadFailure | None
    versions: list[VersionNumbers]
    now: ModelFigures
    text: TextFigures | None
    failures: list[FailureNumbers]
    stages: list[StageFigures]
    batches: list[Bar]
    points: Points


class Cause(msgspec.Struct, kw_only=True):
    """A kind of failure. `kind`: status (of a reply), reject (before it ran), cancel (its client left, while
    queued or running), wire (before any dialect saw it)."""

    kind: str
    model: str
    cause: str
    total: int
    per_s: float


class Numbers(msgspec.Struct, kw_only=True):
    """The whole reply. `certificate_expires` is None without TLS. `points` go up to the number `next_point`:
    ask for those after it the next time."""

    server: str
    at: float
    up_s: float
    ready: bool
    reason: str
    connections: int
    certificate_expires: float | None
    interval_s: float
    next_point: int
    now: ModelFigures
    text: TextFigures | None
    points: Points
    devices: list[DeviceNumbers]
    models: list[ModelNumbers]
    causes: list[Cause]


class NumbersReader:
    """Reads the numbers of one front process, which are summed over all."""

    def __init__(self, registry: Registry, catalog: Catalog, readiness: Readiness, history: History) -> None:
        self._registry, self._catalog = registry, catalog
        self._readiness, self._history = readiness, history
        self._machine = MachineUsage()
        self._begun_ns = time.monotonic_ns()

    def read(self, after: int) -> Numbers:
        """Return the numbers, with the points from number `after` on."""
        history = self._history
        alive, wanted, restarts, connections, expires = self._registry.read(*_FACTS)
        facts = (alive, wanted, restarts)
        known = sorted({*self._catalog.models, *history.models()})
        return Numbers(
            server=__version__,
            at=time.time(),
            up_s=(time.monotonic_ns() - self._begun_ns) / 1e9,
            ready=self._readiness.ready,
            reason=self._readiness.reason,
            connections=int(sum(value for (value,) in connections.values())),
            certificate_expires=next((value for (value,) in expires.values() if value), None),
            interval_s=INTERVAL_S,
            next_point=history.seen,
            now=figures.describe(*history.growth(ALL)),
            text=figures.describe_text(*history.growth(ALL)),
            points=history.points(ALL, after),
            devices=[self._read_machine(), *map(_read_gpu, GPUS.latest())],
            models=[self._read_model(name, facts, after) for name in known],
            causes=self._read_causes(),
        )

    def _read_model(self, name: str, facts: tuple[_Facts, ...], after: int) -> ModelNumbers:
        growth, seconds = self._history.growth(name)
        state = self._readiness.models.get(name)
        model = self._catalog.models.get(name)
        versions = sorted(model.versions.values(), key=lambda version: -version.number) if model else []
        return ModelNumbers(
            model=name,
            ready=state.ready if state else False,
            reason=state.reason if state else "not loaded",
            failed=state.failed if state else None,
            versions=[_read_version(model, version, facts) for version in versions if model],
            now=figures.describe(growth, seconds),
            text=figures.describe_text(growth, seconds),
            failures=[FailureNumbers(*failure) for failure in self._registry.failures.of(name)],
            stages=figures.stages(growth),
            batches=figures.bars(growth),
            points=self._history.points(name, after),
        )

    def _read_machine(self) -> DeviceNumbers:
        total, used = self._machine.memory_bytes()
        return DeviceNumbers(
            name="cpu",
            utilization=self._machine.cpu_utilization(),
            memory_used_bytes=used,
            memory_total_bytes=total,
        )

    def _read_causes(self) -> list[Cause]:
        return [
            Cause(kind=kind, model=model, cause=cause, total=int(total), per_s=per_s)
            for (kind, model, cause), total, per_s in self._history.causes()[:CAUSES_MAX]
            if total
        ]


def _read_gpu(gpu: Gpu) -> DeviceNumbers:
    return DeviceNumbers(
        name=f"{gpu.name} {gpu.uuid[:12]}",
        utilization=gpu.utilization,
        memory_used_bytes=gpu.memory_used_bytes,
        memory_total_bytes=gpu.memory_total_bytes,
    )


_Facts = dict[tuple[str, ...], tuple[float, ...]]


def _read_version(model: Model, version: Version, facts: tuple[_Facts, ...]) -> VersionNumbers:
    who = (version.model, str(version.number))
    alive, wanted, restarts = (int(found.get(who, (0.0,))[0]) for found in facts)
    return VersionNumbers(
        version=version.number,
        state=version.state.name,
        labels=sorted(label for label, number in model.labels.items() if number == version.number),
        error=version.error.message if version.error else "",
        workers_alive=alive,
        workers_wanted=wanted,
        worker_restarts=restarts,
        shared_worker=version.config.shared_worker,
    )
