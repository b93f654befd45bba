"""The ensemble scheduler: a request runs through several models by a plan; an ensemble has no workers.

    config:  input X -> step(simple: INPUT0 = X, INPUT1 = X; OUTPUT0 = Y) -> output Y
    plan:    steps in the order written, each ready once the tensors it reads are there

`make_plan` checks the config, `check_models` the plan once the models are loaded, with Triton's texts. Each
step starts as soon as its tensors are there, so branches run side by side. The answer of a step is copied
while other steps are left, and its slot released: two ensembles that held slots of the models that the other
one waits for would deadlock. The last step's answer is held until the caller releases it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from fastserve.engine.batch_queue import version_gone
from fastserve.engine.counters import BACKEND, CANCELED, OTHER, REJECTED, counters_of
from fastserve.engine.engine import Engine, Scheduler
from fastserve.errors import DeadlineError, Kind, ModelError, ServeError, invalid
from fastserve.repository.catalog import Catalog
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.settings.model_options import EnsembleOptions, EnsembleStep
from fastserve.tensor import DType, Tensor, TensorSpec, count_items
from fastserve.util.offload import cancel_all

Lookup = Callable[[str, "int | None"], "Version | None"]

ANY_LENGTH = -1

_TYPE_NAMES = {"bytes": "STRING", "float16": "FP16", "bfloat16": "BF16", "float32": "FP32", "float64": "FP64"}


@dataclass(frozen=True, slots=True)
class EnsemblePlan:
    """An ensemble's steps. `required` inputs must be in a request, `optional` ones may be."""

    name: str
    steps: tuple[EnsembleStep, ...]
    required: tuple[str, ...]
    optional: frozenset[str]
    outputs: tuple[str, ...]
    max_inflight: int  # requests at a time in each step, 0 for any number

    @property
    def models(self) -> frozenset[str]:
        """Names of the models it needs."""
        return frozenset(step.model for step in self.steps)


def make_plan(name: str, options: EnsembleOptions) -> EnsemblePlan:
    """Make the plan of an ensemble. Raises ServeError INVALID_ARGUMENT for tensors that cannot flow."""
    steps, inputs, outputs = tuple(options.steps), options.inputs, tuple(options.outputs)
    if not steps:
        raise invalid(f"must specify 'step' for ensemble '{name}'")
    for index, step in enumerate(steps):
        _check_step(name, index, step)
    _check_writers(name, steps, inputs)
    _check_flow(name, steps, inputs, outputs)
    return EnsemblePlan(
        name,
        steps,
        tuple(i for i, optional in inputs.items() if not optional),
        frozenset(i for i, optional in inputs.items() if optional),
        outputs,
        options.max_inflight,
    )


def _check_step(name: str, index: int, step: EnsembleStep) -> None:
    for key, given in (
        ("model_name", step.model),
        ("input_map", step.inputs),
        ("output_map", step.outputs),
    ):
        if not given:
            raise invalid(f"must specify '{key}' in step {index} of ensemble '{name}'")


def _check_writers(name: str, steps: tuple[EnsembleStep, ...], inputs: Mapping[str, bool]) -> None:
    written = set(inputs)
    for index, step in enumerate(steps):
        for tensor in step.outputs.values():
            if tensor in written:
                raise invalid(
                    f"ensemble tensor '{tensor}' can appear in an output map only once "
                    f"for ensemble '{name}' step {index}"
                )
            written.add(tensor)


def _check_flow(
    name: str, steps: tuple[EnsembleStep, ...], inputs: Mapping[str, bool], outputs: tuple[str, ...]
) -> None:
    """Check that every tensor is written by a step that can run, and is used. A cycle of steps cannot run."""
    read = {tensor for step in steps for tensor in step.inputs.values()}
    known = read | {tensor for step in steps for tensor in step.outputs.values()}
    for tensor in inputs:
        if tensor not in read:
            raise invalid(f"ensemble input '{tensor}' for ensemble {name}' is not used")
    ready = _reachable(steps, inputs)
    for tensor in outputs:
        if tensor not in known:
            raise invalid(f"ensemble output '{tensor}' for ensemble {name}' is not used")
        if tensor not in ready:
            raise invalid(f"output '{tensor}' for ensemble '{name}' is not written")
    for tensor in sorted(known - set(outputs)):
        if tensor not in ready or tensor not in read:
            raise invalid(f"ensemble tensor '{tensor}' is unused in ensemble '{name}'")


def _reachable(steps: tuple[EnsembleStep, ...], inputs: Iterable[str]) -> set[str]:
    ready, left = set(inputs), list(steps)
    while True:
        able = [step for step in left if ready.issuperset(step.inputs.values())]
        if not able:
            return ready
        left = [step for step in left if step not in able]
        ready.update(tensor for step in able for tensor in step.outputs.values())


# --- the models behind it ------------------------------------------------------------------------------


def check_models(version: Version, plan: EnsemblePlan, catalog: Catalog) -> None:
    """Raise ServeError INVALID_ARGUMENT when a model is missing or its tensors do not fit."""
    seen: dict[str, _Seen] = {}
    batching = version.batching
    for side in (version.inputs, version.outputs):
        for name, spec in side.items():
            seen[name] = _Seen(plan.name, spec, batching)
    for step in plan.steps:
        if step.model == plan.name:
            raise invalid(f"circular dependency between ensembles: {plan.name} -> {plan.name}")
        _check_circle(plan.name, step.model, catalog)
        model = find_model(plan.name, step, catalog.available)
        _check_size(version, model)
        options = model.config.options
        if options.decoupled and not options.parts_if_asked:
            raise invalid(f"in ensemble {plan.name}, model {step.model} is decoupled: no step may be")
        _check_inputs(plan.name, step, model, seen)
        _check_outputs(plan.name, step, model, seen)


def find_model(ensemble: str, step: EnsembleStep, lookup: Lookup) -> Version:
    """Return the version a step runs on. Raises ServeError INVALID_ARGUMENT when it is not loaded."""
    found = lookup(step.model, step.version)
    if found is not None:
        return found
    if step.version is not None and lookup(step.model, None) is not None:
        raise invalid(
            f"ensemble '{ensemble}' depends on '{step.model}' whose required version {step.version} "
            "is not loaded"
        )
    raise invalid(f"ensemble '{ensemble}' depends on '{step.model}' which has no loaded version")


def _check_circle(ensemble: str, model: str, catalog: Catalog, path: tuple[str, ...] = ()) -> None:
    """Refuse ensembles that contain themselves; all configs are searched, loaded or not."""
    for inner in _models_of(catalog, model):
        if inner == ensemble:
            raise invalid(
                f"circular dependency between ensembles: {ensemble} -> ... -> {model} -> {ensemble}"
            )
        if inner not in path:
            _check_circle(ensemble, inner, catalog, (*path, model))


def _models_of(catalog: Catalog, name: str) -> set[str]:
    known = catalog.models.get(name)
    versions = known.versions.values() if known is not None else ()
    ensembles = [version.config.options.ensemble for version in versions]
    return {step.model for one in ensembles if one is not None for step in one.steps}


def _check_size(version: Version, model: Version) -> None:
    most, least = version.config.max_batch_size, model.config.max_batch_size
    if model.batching and least < most:
        raise invalid(
            f"ensemble {version.model} allows maximum batch size {most}, but it contains model {model.model} "
            f"which only allows maximum batch size to be {least}"
        )


@dataclass(frozen=True, slots=True)
class _Seen:
    """First place that declares a tensor's type and shape."""

    model: str
    spec: TensorSpec
    batching: bool

    @property
    def full(self) -> tuple[int, ...]:
        lead = (ANY_LENGTH,) if self.batching else ()
        return (*lead, *(self.spec.shape or ()))


def _check_inputs(ensemble: str, step: EnsembleStep, model: Version, seen: dict[str, _Seen]) -> None:
    for name, tensor in step.inputs.items():
        if name not in model.inputs:
            raise invalid(
                f"in ensemble {ensemble}, ensemble tensor {tensor} is mapping to non-existing input {name} "
                f"in model {step.model}"
            )
        _check_same(ensemble, tensor, _Seen(step.model, model.inputs[name], model.batching), seen)
    optional = model.config.options.optional_inputs
    for name in model.inputs:
        if name not in step.inputs and name not in optional:
            raise invalid(
                f"in ensemble {ensemble}, input {name} in model {step.model} is not mapped "
                "to any ensemble tensors"
            )


def _check_outputs(ensemble: str, step: EnsembleStep, model: Version, seen: dict[str, _Seen]) -> None:
    for name, tensor in step.outputs.items():
        if name not in model.outputs:
            raise invalid(
                f"in ensemble {ensemble}, ensemble tensor {tensor} is mapped from non-existing output {name} "
                f"in model {step.model}"
            )
        _check_same(ensemble, tensor, _Seen(step.model, model.outputs[name], model.batching), seen)


def _check_same(ensemble: str, tensor: str, found: _Seen, seen: dict[str, _Seen]) -> None:
    known = seen.setdefault(tensor, found)
    head = f"in ensemble {ensemble}, ensemble tensor {tensor}: "
    if known.spec.dtype is not found.spec.dtype:
        raise invalid(
            f"{head}inconsistent data type: {_type_name(known.spec.dtype)} is inferred from model "
            f"{known.model} while {_type_name(found.spec.dtype)} is inferred from model {found.model}"
        )
    if None in (known.spec.shape, found.spec.shape):
        return
    if not _alike(known.spec.shape or (), found.spec.shape or ()) and not _alike(known.full, found.full):
        raise invalid(
            f"{head}inconsistent shape: {_listed(known.full)} is inferred from model {known.model} "
            f"while {_listed(found.full)} is inferred from model {found.model}"
        )


def _alike(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return len(a) == len(b) and all(
        ANY_LENGTH in pair or pair[0] == pair[1] for pair in zip(a, b, strict=True)
    )


def _listed(shape: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, shape))}]"


def _type_name(dtype: DType) -> str:
    return "TYPE_" + _TYPE_NAMES.get(dtype.name, dtype.name.upper())


LATE = "the request's time was up before step {} (model '{}')"

STUCK = "unexpected deadlock, at least one output is not set while no more ensemble steps can be made"


class EnsembleScheduler(Scheduler):
    """The scheduler of an ensemble's version."""

    def __init__(self, plan: EnsemblePlan) -> None:
        self.plan = plan
        self._running: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False
        self._waiting = 0
        self._pins: dict[Version, int] = {}  # versions that requests under way run on
        self._unpinned = asyncio.Event()
        self._gates = [asyncio.Semaphore(plan.max_inflight) for _ in plan.steps] if plan.max_inflight else []

    async def infer(self, engine: Engine, version: Version, request: InferRequest) -> InferResponse:
        if self._closed:
            raise ServeError(Kind.UNAVAILABLE, f"version {version.number} of model {version.model} is gone")
        self._check(request)
        flow = _Flow(self.plan, request)
        began_ns = time.monotonic_ns()
        self._waiting += 1
        self._idle.clear()
        versions: list[Version] = []
        try:
            versions = self._pin(engine)
            await self._run(engine, flow, versions)
            response = flow.respond()
            rows = _rows_of(request) if version.batching else 1
            counters_of(version).serve(rows, time.monotonic_ns() - began_ns, flow.model_ns)
            return response
        except ServeError as error:
            flow.release()
            counters_of(version).end(_end_of(error), time.monotonic_ns() - began_ns)
            raise _named(self.plan.name, error) from error
        except BaseException as error:
            flow.release()
            left = CANCELED if isinstance(error, asyncio.CancelledError) else OTHER
            counters_of(version).end(left, time.monotonic_ns() - began_ns)
            raise
        finally:
            self._waiting -= 1
            self._unpin(versions)
            if not self._waiting:
                self._idle.set()

    async def let_go(self, version: Version) -> None:
        """Return when no request under way will run on that version any more."""
        while version in self._pins:
            self._unpinned.clear()
            await self._unpinned.wait()

    @property
    def busy(self) -> bool:
        return self._waiting > 0

    async def drain(self) -> None:
        await self._idle.wait()

    def close(self) -> None:
        self._closed = True
        for task in list(self._running):
            task.cancel()

    def _check(self, request: InferRequest) -> None:
        known = {*self.plan.required, *self.plan.optional}
        for name, tensor in request.inputs.items():
            count_items(tensor.shape)
            if name not in known:
                raise invalid(f"unexpected inference input '{name}' for model '{self.plan.name}'")
        for name in self.plan.required:
            if name not in request.inputs:
                raise invalid(f"input {name!r} is missing")

    def _pin(self, engine: Engine) -> list[Version]:
        """Pin the version of each step at the start: a reload meanwhile changes none of them."""
        found = [engine.catalog.available(step.model, step.version) for step in self.plan.steps]
        versions = [version for version in found if version is not None]
        if len(versions) < len(found):
            model = self.plan.steps[found.index(None)].model
            engine.catalog.explain_absence(model)
            raise ServeError(
                Kind.NOT_FOUND, f"Request for unknown model: '{model}' has no available versions"
            )
        for version in versions:
            self._pins[version] = self._pins.get(version, 0) + 1
        return versions

    def _unpin(self, versions: list[Version]) -> None:
        for version in versions:
            self._pins[version] -= 1
            if not self._pins[version]:
                del self._pins[version]
        self._unpinned.set()

    async def _run(self, engine: Engine, flow: _Flow, versions: list[Version]) -> None:
        """Run steps as they become ready; the first that fails stops the others."""
        running: set[asyncio.Task[None]] = set()
        try:
            while True:
                for index in flow.take_ready():
                    task = asyncio.ensure_future(self._run_step(engine, flow, index, versions[index]))
                    running.add(task)
                    self._running.add(task)
                    task.add_done_callback(self._running.discard)
                if not running:
                    return
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    await _result_of(task)
        finally:
            await cancel_all(*running)

    async def _run_step(self, engine: Engine, flow: _Flow, index: int, version: Version) -> None:
        step = self.plan.steps[index]
        async with self._gates[index] if self._gates else contextlib.nullcontext():
            began_ns = time.monotonic_ns()
            if 0 < flow.request.deadline_ns <= began_ns:
                raise DeadlineError(LATE.format(index, step.model), queued=True)
            response = await engine.infer(version, flow.request_for(step))
            flow.model_ns += time.monotonic_ns() - began_ns
            flow.take(step, response)


def _rows_of(request: InferRequest) -> int:
    return next((tensor.shape[0] for tensor in request.inputs.values() if tensor.shape), 1)


def _end_of(error: ServeError) -> int:
    if isinstance(error, ModelError):
        return BACKEND
    return REJECTED if error.kind is Kind.UNAVAILABLE or isinstance(error, DeadlineError) else OTHER


async def _result_of(task: asyncio.Task[None]) -> None:
    """Raise the error of a step; one that `close` cancelled fails as unavailable."""
    if task.cancelled():
        raise version_gone()
    task.result()


def _named(ensemble: str, error: ServeError) -> ServeError:
    named = _renamed(error, f"in ensemble '{ensemble}', {error.message}")
    named.step = error
    return named


def _renamed(error: ServeError, text: str) -> ServeError:
    if isinstance(error, DeadlineError):
        return DeadlineError(text, queued=error.queued)
    if isinstance(error, ModelError):
        return ModelError(error.kind, text)
    return ServeError(error.kind, text, retry_after_s=error.retry_after_s, reason=error.reason)


@dataclass(slots=True)
class _Flow:
    """One request under way: its tensors so far, and how many uses of each are left."""

    plan: EnsemblePlan
    request: InferRequest
    tensors: dict[str, Tensor] = field(default_factory=dict)
    model_ns: int = 0  # what its steps took together, queues included
    _uses: dict[str, int] = field(default_factory=dict)
    _held: InferResponse | None = None  # of the last step
    _left: list[int] = field(default_factory=list)
    _unanswered: int = 0

    def __post_init__(self) -> None:
        self._left = list(range(len(self.plan.steps)))
        self._unanswered = len(self._left)
        self.tensors.update(self.request.inputs)
        for step in self.plan.steps:
            for tensor in step.inputs.values():
                self._uses[tensor] = self._uses.get(tensor, 0) + 1
        for tensor in self._outputs():
            self._uses[tensor] = self._uses.get(tensor, 0) + 1

    def _outputs(self) -> tuple[str, ...]:
        return self.request.outputs or self.plan.outputs

    def take_ready(self) -> list[int]:
        """Take the steps that can start now; they do not wait for optional inputs missing in the request."""
        absent = self.plan.optional.difference(self.request.inputs)
        ready = [
            index
            for index in self._left
            if all(name in self.tensors or name in absent for name in self.plan.steps[index].inputs.values())
        ]
        self._left = [index for index in self._left if index not in ready]
        return ready

    def request_for(self, step: EnsembleStep) -> InferRequest:
        """Return the request to the step's model: the caller's request with other tensors."""
        inputs = {name: self.tensors[t] for name, t in step.inputs.items() if t in self.tensors}
        return replace(self.request, inputs=inputs, outputs=tuple(step.outputs))

    def take(self, step: EnsembleStep, response: InferResponse) -> None:
        """Take a step's answer: keep the outputs still needed, drop the tensors that it read last."""
        self._unanswered -= 1
        wanted = {t: response.outputs[n] for n, t in step.outputs.items() if n in response.outputs}
        if self._unanswered:
            wanted = {
                name: Tensor(t.dtype, t.shape, bytes(t.data))
                for name, t in wanted.items()
                if self._uses.get(name)
            }
            response.release()
        else:
            self._held = response
        self.tensors.update(wanted)
        for tensor in step.inputs.values():
            self._uses[tensor] -= 1
            if not self._uses[tensor]:
                self.tensors.pop(tensor, None)

    def respond(self) -> InferResponse:
        """Return the response. Raises ServeError INVALID_ARGUMENT when a model left out a needed tensor."""
        outputs = {name: self.tensors[name] for name in self._outputs() if name in self.tensors}
        if len(outputs) < len(set(self._outputs())):
            raise invalid(STUCK)
        return InferResponse(outputs, self.release)

    def release(self) -> None:
        """Let go of the answer still held."""
        held, self._held = self._held, None
        if held is not None:
            held.release()
        self.tensors = {}
