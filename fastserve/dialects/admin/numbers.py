"""The console's numbers as JSON: the server, its devices, every model with its versions, failures.

Nothing here is known to this page alone: counters are those of /metrics, states those of /healthz/ready.
Replies are made in steps of a model each (`history.work_on`), since a server may have hundreds.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator

import msgspec

from fastserve import __version__
from fastserve.devices.inventory import GPUS, Gpu
from fastserve.dialects.admin import figures
from fastserve.dialects.admin.figures import Bar, ModelFigures, StageFigures, TextFigures
from fastserve.dialects.admin.history import ALL, INTERVAL_S, History, Points
from fastserve.dialects.admin.openapi import ExampleRequest, Examples
from fastserve.metrics import LoadFailure, ModelReadiness, Registry, names
from fastserve.metrics.readiness import MachineUsage
from fastserve.metrics.registry import FailedRequest
from fastserve.net.access_control import Restrictions, Scope
from fastserve.repository.version import Model, Version, VersionState
from fastserve.serving.api_operations import ModelFacts
from fastserve.serving.dialect import ServingContext
from fastserve.serving.model_view import ModelViews, TensorView
from fastserve.tensor import kserve_name

CAUSES_MAX = 50
ROW_SERIES = ("requests_per_s", "errors_per_s", "p99_ms")
LOADING = (VersionState.START, VersionState.LOADING)

_FACTS = (names.WORKERS_ALIVE, names.WORKERS_WANTED, names.WORKER_RESTARTS, names.WORKER_MEMORY)


class DeviceNumbers(msgspec.Struct, kw_only=True):
    """A device that workers run on. `utilization` is from 0 to 1, of the CPU since the last request,
    of a GPU as NVML has it, or None where it does not tell."""

    name: str
    utilization: float | None
    memory_used_bytes: int
    memory_total_bytes: int


class WorkerNumbers(msgspec.Struct):
    """A worker: its device, and the memory that is its own; None where nobody has looked yet."""

    device: str
    memory_bytes: int | None


class VersionNumbers(msgspec.Struct, kw_only=True):
    version: int
    state: str
    labels: list[str]
    error: str
    workers_alive: int
    workers_wanted: int
    worker_restarts: int
    shared_worker: str
    workers: list[WorkerNumbers]


class FailureNumbers(msgspec.Struct):
    """A request that was answered with an error. `at` is Unix time."""

    at: float
    status: str
    message: str
    request_id: str


class ModelNumbers(msgspec.Struct, kw_only=True):
    """`now` is of the last ten seconds, and so is `text`, of models that generate it; `points` are of
    intervals of `interval_s`, oldest first. `failures` are the last requests that the model or the server
    failed, `refusals` those that clients got wrong, both newest first."""

    model: str
    ready: bool
    reason: str
    failed: LoadFailure | None
    versions: list[VersionNumbers]
    now: ModelFigures
    text: TextFigures | None
    failures: list[FailureNumbers]
    refusals: list[FailureNumbers]
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


class TensorNumbers(msgspec.Struct):
    """An input or an output as V2 describes it; `shape` None for any rank."""

    name: str
    datatype: str
    shape: list[int] | None
    optional: bool


class ModelDetails(ModelNumbers, kw_only=True):
    """One model whole. Tensors, backend and example requests are of its latest available version, and left
    out where metadata is restricted; `may_load`: clients load and unload models."""

    history: str
    first_point: int
    next_point: int
    at: float
    causes: list[Cause]
    backend: str
    max_batch_size: int
    inputs: list[TensorNumbers]
    outputs: list[TensorNumbers]
    examples: list[ExampleRequest]
    may_load: bool


class RowFigures(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Figures of a row, of the last ten seconds. None, which is left out, is 0, and of durations nothing."""

    requests_per_s: float | None = None
    errors_per_s: float | None = None
    faults_per_s: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    queue_rows: float | None = None
    tokens_per_s: float | None = None
    running: int | None = None
    waiting: int | None = None


class Row(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One model in the list. `trouble` is bad, warn or nothing, and `why` says what it is; `last` is the last
    request that the model or the server failed."""

    model: str
    state: str = "ready"
    trouble: str = ""
    why: str = ""
    text: bool = False
    versions: list[int] = []
    now: RowFigures
    last: FailureNumbers | None = None
    points: Points = {}


class ServerNumbers(msgspec.Struct, kw_only=True):
    """The server and its models. `certificate_expires` is None without TLS. `points` go up to the number
    `next_point`: ask for those after it the next time."""

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
    models: list[msgspec.Raw]
    causes: list[Cause]


class RowsNumbers(ServerNumbers, kw_only=True):
    """The reply for the list. `points` begin with number `first_point`; numbers of another `history` are of
    another process."""

    history: str
    first_point: int
    may_load: bool


class NumbersReader:
    """Reads the numbers of the server, in the owner of the models."""

    def __init__(self, context: ServingContext, history: History) -> None:
        self._registry, self._engine = context.registry, context.engine
        self._catalog = context.engine.catalog
        self._readiness, self._history = context.readiness, history
        self._repository = context.repository
        restrictions = Restrictions.over_http(context.settings.triton.restrictions_over_http)
        self._shows_tensors = not restrictions.wanted_of(Scope.METADATA, None)  # else a secret shows them
        self._views = ModelViews(self._catalog)
        self._machine = MachineUsage()
        self._begun_ns = context.started_ns
        self.name = secrets.token_hex(4)

    def numbers(self, after: int) -> Iterator[bytes]:
        """Yield the models one by one, and last the whole reply, with the points from number `after` on."""
        until, facts, models = self._history.seen, _Facts(self._registry), []
        for name in self._names():
            models.append(msgspec.Raw(msgspec.json.encode(self._read_model(name, facts, after, until))))
            yield models[-1]
        yield msgspec.json.encode(self._server(after, until, models))

    def rows(self, after: int) -> Iterator[bytes]:
        """Yield the rows one by one, and last the whole reply, with the points from number `after` on."""
        until, facts, models = self._history.seen, _Facts(self._registry), []
        for name in self._names():
            models.append(msgspec.Raw(msgspec.json.encode(self._read_row(name, facts, after, until))))
            yield models[-1]
        server = msgspec.structs.asdict(self._server(after, until, models))
        may_load = self._repository.explicit
        yield msgspec.json.encode(
            RowsNumbers(**server, history=self.name, first_point=after, may_load=may_load)
        )

    def details(self, name: str, after: int, examples: Examples) -> ModelDetails | None:
        """Return one model with example requests; None for a name that is none."""
        model = self._catalog.models.get(name)
        if model is None and name not in self._history.models():
            return None
        until = self._history.seen
        numbers = msgspec.structs.asdict(self._read_model(name, _Facts(self._registry), after, until))
        latest = model.latest if model is not None and self._shows_tensors else None
        view = self._views.of(latest) if latest is not None else None
        return ModelDetails(
            **numbers,
            history=self.name,
            first_point=after,
            next_point=until,
            at=time.time(),
            causes=[cause for cause in self._read_causes() if cause.model == name][:CAUSES_MAX],
            backend=view.version.config.backend if view else "",
            max_batch_size=view.max_batch_size if view else 0,
            inputs=[_read_tensor(one, view.full_dims(one)) for one in view.inputs.values()] if view else [],
            outputs=[_read_tensor(one, view.full_dims(one)) for one in view.outputs.values()] if view else [],
            examples=examples.of(ModelFacts(view, self._engine.text_info(view.version))) if view else [],
            may_load=self._repository.explicit,
        )

    def _names(self) -> list[str]:
        return sorted({*self._catalog.models, *self._history.models()})

    def _server(self, after: int, until: int, models: list[msgspec.Raw]) -> ServerNumbers:
        connections, expires = self._registry.read(names.CONNECTIONS, names.TLS_EXPIRES)
        growth = self._history.growth(ALL)
        return ServerNumbers(
            server=__version__,
            at=time.time(),
            up_s=(time.monotonic_ns() - self._begun_ns) / 1e9,
            ready=self._readiness.ready,
            reason=self._readiness.reason,
            connections=int(sum(value for (value,) in connections.values())),
            certificate_expires=next((value for (value,) in expires.values() if value), None),
            interval_s=INTERVAL_S,
            next_point=until,
            now=figures.describe(*growth),
            text=figures.describe_text(*growth),
            points=self._history.points(ALL, after, until),
            devices=[self._read_machine(), *map(_read_gpu, GPUS.latest())],
            models=models,
            causes=self._read_causes()[:CAUSES_MAX],
        )

    def _read_model(self, name: str, facts: _Facts, after: int, until: int) -> ModelNumbers:
        growth, seconds = self._history.growth(name)
        state = self._readiness.models.get(name)
        model = self._catalog.models.get(name)
        versions = sorted(model.versions.values(), key=lambda version: -version.number) if model else []
        failed = self._registry.failures
        return ModelNumbers(
            model=name,
            ready=state.ready if state else False,
            reason=state.reason if state else "not loaded",
            failed=state.failed if state else None,
            versions=[_read_version(model, version, facts) for version in versions if model],
            now=figures.describe(growth, seconds),
            text=figures.describe_text(growth, seconds),
            failures=[_read_failure(one) for one in failed.of(name)],
            refusals=[_read_failure(one) for one in failed.refused(name)],
            stages=figures.stages(growth),
            batches=figures.bars(growth),
            points=self._history.points(name, after, until),
        )

    def _read_row(self, name: str, facts: _Facts, after: int, until: int) -> Row:
        growth, seconds = self._history.growth(name, figures.POINTED)
        now, text = figures.describe(growth, seconds), figures.describe_text(growth, seconds)
        readiness, model = self._readiness.models.get(name), self._catalog.models.get(name)
        failures = self._registry.failures.of(name)
        state = state_of(readiness, model)
        trouble, why = find_trouble(state, readiness, now, facts.workers(model))
        return Row(
            model=name,
            state=state,
            trouble=trouble,
            why=why,
            text=text is not None or bool(model and model.latest and model.latest.text),
            versions=[version.number for version in reversed(model.available())] if model else [],
            now=RowFigures(
                requests_per_s=round(now.requests_per_s, 4) or None,
                errors_per_s=round(now.errors_per_s, 4) or None,
                faults_per_s=round(now.faults_per_s, 4) or None,
                p50_ms=now.p50_ms and round(now.p50_ms, 4),
                p99_ms=now.p99_ms and round(now.p99_ms, 4),
                queue_rows=now.queue_rows or None,
                tokens_per_s=round(text.tokens_per_s, 4) or None if text else None,
                running=text.running or None if text else None,
                waiting=text.waiting or None if text else None,
            ),
            last=_read_failure(failures[0]) if failures else None,
            points=self._history.points(name, after, until, ROW_SERIES),
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
            for (kind, model, cause), total, per_s in self._history.causes()
            if total
        ]


class _Facts:
    """Gauges and counters of workers, by model and version."""

    def __init__(self, registry: Registry) -> None:
        self.alive, self.wanted, self.restarts, memory = registry.read(*_FACTS)
        self.memory = {labels: int(value) for labels, (value,) in memory.items()}

    def workers(self, model: Model | None) -> tuple[int, int]:
        """Return how many workers of the latest version are alive, and how many there should be."""
        if model is None or model.latest is None:
            return 0, 0
        who = (model.name, str(model.latest.number))
        return int(self.alive.get(who, (0.0,))[0]), int(self.wanted.get(who, (0.0,))[0])


def state_of(readiness: ModelReadiness | None, model: Model | None) -> str:
    """Return ready, loading, down, unloaded, or dormant for a model that its next request loads."""
    if readiness is None:
        return "unloaded"
    versions = model.versions.values() if model is not None else ()
    states = {one.state for one in versions if not one.dormant}
    coming = model is not None and model.latest is None and not states.isdisjoint(LOADING)
    if readiness.ready:
        waits = model is not None and model.waits_for_demand
        return "dormant" if waits and not coming else "loading" if waits else "ready"
    return "loading" if coming else "down"


def find_trouble(
    state: str, readiness: ModelReadiness | None, now: ModelFigures, workers: tuple[int, int]
) -> tuple[str, str]:
    """Return bad or warn, and what is the matter; two empty texts for nothing. Errors that are the clients'
    own are no trouble of the model."""
    alive, wanted = workers
    if state == "down":
        return "bad", readiness.reason if readiness else ""
    if now.faults_per_s and 2 * now.faults_per_s >= now.requests_per_s:
        return "bad", "most requests fail"
    if state == "loading":
        return "warn", readiness.reason if readiness else ""
    if now.faults_per_s:
        return "warn", "some requests fail"
    if alive < wanted and state == "ready":
        return "warn", f"{alive} of {wanted} workers"
    if readiness is not None and readiness.failed is not None:
        return "warn", f"a change failed to load since {readiness.failed.since}: {readiness.failed.reason}"
    return "", ""


def _read_failure(one: FailedRequest) -> FailureNumbers:
    return FailureNumbers(one.at, one.kind, one.message, one.request_id)


def _read_tensor(tensor: TensorView, dims: tuple[int, ...]) -> TensorNumbers:
    shape = None if tensor.dims is None else [*dims]
    return TensorNumbers(tensor.name, kserve_name(tensor.dtype), shape, tensor.optional)


def _read_gpu(gpu: Gpu) -> DeviceNumbers:
    return DeviceNumbers(
        name=f"{gpu.name} {gpu.uuid[:12]}",
        utilization=gpu.utilization,
        memory_used_bytes=gpu.memory_used_bytes,
        memory_total_bytes=gpu.memory_total_bytes,
    )


def _read_version(model: Model, version: Version, facts: _Facts) -> VersionNumbers:
    who = (version.model, str(version.number))
    alive, wanted, restarts = (
        int(found.get(who, (0.0,))[0]) for found in (facts.alive, facts.wanted, facts.restarts)
    )
    places = version.config.places
    served = version.state is VersionState.AVAILABLE and bool(wanted)
    return VersionNumbers(
        version=version.number,
        state=version.state.name,
        labels=sorted(label for label, number in model.labels.items() if number == version.number),
        error=version.error.message if version.error else "",
        workers_alive=alive,
        workers_wanted=wanted,
        worker_restarts=restarts,
        shared_worker=version.config.shared_worker,
        workers=[
            WorkerNumbers(
                f"GPU {places[worker].gpu}" if worker < len(places) and places[worker].gpu >= 0 else "cpu",
                facts.memory.get((*who, str(worker))),
            )
            for worker in range(wanted if served else 0)
        ],
    )
