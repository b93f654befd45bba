"""An ensemble: a request that runs through several models. It has no workers, only a plan.

Each step starts as soon as the tensors it reads are there, so branches run side by side. What a step answered
is copied while other steps are left, and its slot let go of: two ensembles that held slots of the models the
other one waits for would wait for ever. The last step's answer is held until the caller releases it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field, replace

from fastserve.config.options import EnsembleStep
from fastserve.engine.counters import BACKEND, CANCELED, OTHER, REJECTED, counters_of
from fastserve.engine.ensemble_plan import Plan
from fastserve.engine.scheduler import Runs, Scheduler
from fastserve.errors import DeadlineError, Kind, ModelError, ServeError
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.tensor import Tensor, count_items

LATE = "the request's time was up before step {} (model '{}')"
STUCK = "unexpected deadlock, at least one output is not set while no more ensemble steps can be made"


class Ensemble(Scheduler):
    """The scheduler of an ensemble's version."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._running: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False
        self._waiting = 0
        self._pins: dict[Version, int] = {}  # versions that requests under way run on
        self._letting_go: list[asyncio.Future[None]] = []
        self._gates = [asyncio.Semaphore(plan.max_inflight) for _ in plan.steps] if plan.max_inflight else []

    async def infer(self, engine: Runs, version: Version, request: InferRequest) -> InferResponse:
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
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._letting_go.append(waiter)
            await waiter

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
                raise ServeError(
                    Kind.INVALID_ARGUMENT, f"unexpected inference input '{name}' for model '{self.plan.name}'"
                )
        for name in self.plan.required:
            if name not in request.inputs:
                raise ServeError(Kind.INVALID_ARGUMENT, f"input {name!r} is missing")

    def _pin(self, engine: Runs) -> list[Version]:
        """The version of each step, the same from the first step to the last whatever is reloaded between."""
        found = [engine.catalog.available(step.model, step.version) for step in self.plan.steps]
        versions = [version for version in found if version is not None]
        if len(versions) < len(found):
            model = self.plan.steps[found.index(None)].model
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
        for waiter in self._letting_go:
            if not waiter.done():
                waiter.set_result(None)
        self._letting_go.clear()

    async def _run(self, engine: Runs, flow: _Flow, versions: list[Version]) -> None:
        """Steps as they become ready; the first that fails stops the others."""
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
            for task in running:
                task.cancel()
            if running:
                await asyncio.gather(*running, return_exceptions=True)

    async def _run_step(self, engine: Runs, flow: _Flow, index: int, version: Version) -> None:
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
    """Raises what the step raised; a step that `close` stopped is a version that went away."""
    if task.cancelled():
        raise ServeError(Kind.UNAVAILABLE, "the model version was unloaded")
    task.result()


def _named(ensemble: str, error: ServeError) -> ServeError:
    text = f"in ensemble '{ensemble}', {error.message}"
    if isinstance(error, DeadlineError):
        return DeadlineError(text, queued=error.queued)
    if isinstance(error, ModelError):
        return ModelError(error.kind, text)
    return ServeError(error.kind, text, retry_after_s=error.retry_after_s)


@dataclass(slots=True)
class _Flow:
    """One request under way: the tensors so far, and who still needs them."""

    plan: Plan
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
        """Steps that can start now; optional inputs that did not come do not hold anything up."""
        absent = self.plan.optional.difference(self.request.inputs)
        ready = [
            index
            for index in self._left
            if all(name in self.tensors or name in absent for name in self.plan.steps[index].inputs.values())
        ]
        self._left = [index for index in self._left if index not in ready]
        return ready

    def request_for(self, step: EnsembleStep) -> InferRequest:
        """What the step's model is asked: the caller's request with other tensors."""
        inputs = {name: self.tensors[t] for name, t in step.inputs.items() if t in self.tensors}
        return replace(self.request, inputs=inputs, outputs=tuple(step.outputs))

    def take(self, step: EnsembleStep, response: InferResponse) -> None:
        """The step has answered: keep what is wanted of it, and let go of what it was the last to read."""
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
        """Raises ServeError INTERNAL when a model left out a tensor that others waited for."""
        outputs = {name: self.tensors[name] for name in self._outputs() if name in self.tensors}
        if len(outputs) < len(set(self._outputs())):
            raise ServeError(Kind.INVALID_ARGUMENT, STUCK)
        return InferResponse(outputs, self.release)

    def release(self) -> None:
        """Let go of the answer still held."""
        held, self._held = self._held, None
        if held is not None:
            held.release()
        self.tensors = {}
