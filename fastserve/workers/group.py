"""All instances of one loaded version: started together, restarted one by one, stopped together.

Not a queue and not an engine: it tells who lives (`alive`, `on_death`, `on_alive`), and somebody else
decides what that means for the requests at hand.

    start: load x N -> all agree on inputs and outputs -> make the arena -> serve x N -> all ready
           (any failure fails all: a version is there or it is not)
    later: death -> on_death at once -> wait 0.1 s, 0.2 s ... 1 s -> load, serve -> on_alive
           a start that failed -> wait 0.1 s, 0.2 s ... 30 s -> load, serve

An Instance is one place of the group: the worker process that fills it now, and how far that has come.

    IDLE --load--> LOADING --"loaded"--> LOADED --serve--> ATTACHING --"ready"--> READY
      ^               |                    |                   |                    |
      +---------------+------- exit -------+-------------------+--------------------+
                      |                                        |
                      +-------------- "failed" ----------------+--> FAILED --exit--> IDLE

A message that is not in the table for its state is a fault of the worker, which is then killed. An instance
restarts nothing: the group does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import msgspec

from fastserve.backends.base import read_specs
from fastserve.backends.model_errors import clean, explain
from fastserve.codec.generation import Info
from fastserve.devices.inventory import VISIBLE
from fastserve.errors import ConfigError, Kind, RemoteTrace, ServeError, internal
from fastserve.tensor import TensorSpec
from fastserve.util.logs import current_logs
from fastserve.util.offload import cancel_all, gather_or_cancel
from fastserve.util.rate_limited_log import run_all
from fastserve.workers.control import ControlFault, PeerGone
from fastserve.workers.forked_worker import ForkServers
from fastserve.workers.liveness import Watchdog, WorkerHeartbeatLike
from fastserve.workers.pinning import Processors, WorkerPins, affinity_variable
from fastserve.workers.process import ENTRY, Child, OnExit, OnMessage, WorkerProcess, worker_environment
from fastserve.workers.shared_worker import SharedWorkers, place_in

log = logging.getLogger(__name__)
T = TypeVar("T")

LOAD_TIMEOUT_S = 600.0
# Seconds that a worker whose start failed may take to close its backend.
CLEANUP_GRACE_S = 2.0


class ArenaLike(Protocol):
    """The group's view of an arena, for workers to attach to it."""

    def pulse(self) -> WorkerHeartbeatLike | None:
        """Return the means to ask attached workers for signs of life; None where there is none."""

    def fds_for_worker(self, worker: int) -> tuple[dict[str, Any], list[int]]:
        """The layout message and the descriptors for one worker; the descriptors stay the arena's."""


ReadRecorded = Callable[[], Awaitable[int]]
MakeArena = Callable[[dict[str, TensorSpec], dict[str, TensorSpec]], ArenaLike]


@dataclass
class Backoff:
    """How long to wait before a worker is started again, by what ended the one before. Seconds.

    A start that failed will most likely fail again, and may be costly. A worker that was ready and died has
    shown that a start works, and every second without it is one without service: what kills it is one request
    in thousands, say, and the wait only keeps a model that dies of every request from taking a whole core.
    """

    first_s: float = 0.1
    cap_s: float = 30.0
    died_cap_s: float = 1.0
    settled_s: float = 60.0  # a life this long forgives what was before
    _failed_s: float = 0.0
    _died_s: float = 0.0

    def after_failure(self) -> float:
        """The wait after a start that failed."""
        wait_s = min(self._failed_s or self.first_s, self.cap_s)
        self._failed_s = 2 * wait_s
        return wait_s

    def after_kill(self) -> float:
        """The wait after a start that somebody killed: the model is not at fault."""
        wait_s = min(self._died_s or self.first_s, self.cap_s, self.died_cap_s)
        self._died_s = 2 * wait_s
        return wait_s

    def after_death(self, lived_s: float) -> float:
        """The wait after a worker was ready for `lived_s` seconds."""
        self._failed_s = 0.0
        if lived_s >= self.settled_s:
            self._died_s = 0.0
        return self.after_kill()


class WorkerGroup:
    """The workers of one version. Everything happens on the loop that `start` runs on.

    `config` is the JSON of model.yaml, already checked; all of it goes to the backend, and used here are
    instances, threads, env, load_timeout_s, restart_backoff_s and restart_backoff_max_s.
    `on_death(i)` is called at once when worker i, ready before, is gone; `on_alive(i)` when it is ready
    again. Neither is called during `start` or `stop`.
    `on_call(i, message)` is called with messages of a worker about its calls to other models.
    `recorded` gives a descriptor of requests that every worker runs before it is ready (workers/warmup.py),
    -1 for none, once the workers have loaded; the group closes it.
    `pins` are the processors of each worker, `others` those of shared ones.
    `sys_path` is appended to the workers' module path. `shared` has the processes of models that share one,
    `forks` those that fork workers; without them every worker is spawned.
    """

    def __init__(
        self,
        version_dir: Path,
        config: Mapping[str, Any],
        make_arena: MakeArena,
        on_death: Callable[[int], None],
        on_alive: Callable[[int], None],
        *,
        name: str = "",
        on_call: OnCall | None = None,
        recorded: ReadRecorded | None = None,
        sys_path: Sequence[str] = (),
        entry: Sequence[str] = ENTRY,
        shared: SharedWorkers | None = None,
        forks: ForkServers | None = None,
        in_process: bool = False,
        pins: WorkerPins | None = None,
        others: Processors = (),
        on_silent: Callable[[], None] = lambda: None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name or version_dir.parent.name
        self.inputs: dict[str, TensorSpec] = {}
        self.outputs: dict[str, TensorSpec] = {}
        self.restarts, self.trouble = 0, ""  # successful restarts; why a worker that is not back is missing
        self._title = f"{self.name}/{version_dir.name}"
        self._make_arena, self._read_recorded, self._recorded = make_arena, recorded, -1
        self._arena: ArenaLike | None = None
        self._on_death, self._on_alive = on_death, on_alive
        self._entry, self._shared, self._sleep, self._clock = entry, shared, sleep, clock
        self._in_process, self._pins, self._others = in_process, pins, others
        self._forks, self._forked = forks, list[tuple[str, Mapping[str, str]]]()  # of workers that fork
        self._unhold: list[Callable[..., None]] = []
        self._load_timeout_s = float(config.get("load_timeout_s") or LOAD_TIMEOUT_S)
        self._backoff_s = float(config.get("restart_backoff_s") or Backoff.first_s)
        self._backoff_max_s = float(config.get("restart_backoff_max_s") or Backoff.cap_s)
        self._environment = worker_environment(config.get("threads", 1), config.get("env") or {})
        self._tenders: list[asyncio.Task[None]] = []
        self._started = self._stopped = False
        order = {
            **{"name": self.name, "version_dir": str(version_dir)},
            **{"sys_path": list(sys_path), "logs": current_logs()},
            "aside": forks is not None and forks.on_demand,
        }
        self._instances = [
            self._make_instance(i, order, config, on_call) for i in range(int(config.get("instances") or 1))
        ]
        self._born = [0.0] * len(self._instances)  # when each worker became ready
        self._watchdog = Watchdog(self._title, self._instances, on_silent)

    def _make_instance(
        self, number: int, order: Mapping[str, Any], config: Mapping[str, Any], on_call: OnCall | None
    ) -> Instance:
        device, environment = place_worker(config, number, self._environment)
        own_place = self._pins.workers[number] if self._pins is not None else ()
        limit = {"run_timeout_ms": 0} if self._in_process else {}  # a thread cannot be killed
        own = {**order, "config": {**config, **device, **limit}}
        key = place_in(config, number) if self._shared is not None else None
        make: Callable[[OnMessage, OnExit], Child]
        if self._in_process:
            from fastserve.workers.in_process import InProcessWorker

            make = partial(InProcessWorker, f"{self._title}#{number}", environment)
        elif self._shared is not None and key is not None:
            environment = {**environment, **affinity_variable(self._others)}
            make = partial(self._shared.thread_worker, key, f"{self._title}#{number}", environment)
        elif self._forks is not None and (imports := self._forks.imports(own["config"], environment)):
            environment = {**environment, **affinity_variable(own_place)}
            self._forked.append((imports, environment))
            make = partial(self._forks.worker, imports, environment)
        else:
            environment = {**environment, **affinity_variable(own_place)}
            make = partial(WorkerProcess, environment, entry=self._entry)
        return Instance(number, own, make, self._revived, self._lost, on_call)

    @property
    def alive(self) -> int:
        """How many workers are ready to run batches now. 0 means: not ready."""
        return sum(instance.ready for instance in self._instances)

    @property
    def silent(self) -> frozenset[int]:
        """Workers that have not answered for so long that nobody should count on them (liveness.py)."""
        return self._watchdog.silent

    def silence(self, worker: int) -> str:
        """Why a silent worker counts as such."""
        return self._watchdog.reason(worker)

    @property
    def waits_for(self) -> str:
        """The step that a worker waits for before it loads, as text; "" for none."""
        return next((one.waits_for for one in self._instances if one.waits_for), "")

    @property
    def text(self) -> Info | None:
        """The description of a text engine, as the first worker has loaded it."""
        return self._instances[0].text

    @property
    def signatures(self) -> Mapping[str, Mapping[str, Any]]:
        """The model's own signatures, as the first worker has loaded it."""
        return self._instances[0].signatures

    @property
    def on_device(self) -> bool:
        """Whether all workers read clients' memory on their device by themselves."""
        return all(instance.on_device for instance in self._instances)

    @property
    def recorded_ns(self) -> int:
        """How long the recorded requests took the slowest worker."""
        return max(instance.recorded_ns for instance in self._instances)

    @property
    def pids(self) -> list[int]:
        """The worker of each instance, 0 where none is."""
        return [instance.pid for instance in self._instances]

    async def start(self) -> None:
        """Starts every instance; returns when all are ready, and otherwise leaves none behind.

        Raises ServeError: the backend's own words (no folders, no traceback: that is in the log), how a
        worker died, that it took longer than load_timeout_s, or what make_arena raised.
        """
        if not self._in_process:  # a person at a breakpoint is no silence
            self._watchdog.open()
        if self._forks is not None:
            self._unhold = [self._forks.hold(*forked) for forked in self._forked]
        try:
            self.inputs, self.outputs = await self._load_all()
            self._arena = self._open_arena()
            self._watchdog.attach(self._arena.pulse())
            if self._read_recorded is not None:
                self._recorded = await self._read_recorded()
            await gather_or_cancel(self._serve(instance) for instance in self._instances)
            if self.alive < len(self._instances):
                raise ServeError(Kind.UNAVAILABLE, self.trouble)
        except BaseException as error:
            await gather_or_cancel(instance.stop(CLEANUP_GRACE_S) for instance in self._instances)
            self._watchdog.close()
            self._drop_recorded()
            self._release_forks()
            if self._stopped and isinstance(error, ServeError):
                raise ServeError(Kind.UNAVAILABLE, "the model was unloaded while it was loading") from error
            raise
        self._started = True
        self._tenders = [asyncio.create_task(self._tend(instance)) for instance in self._instances]

    async def stop(self, grace_s: float) -> None:
        """Stops every worker: asked, and killed after `grace_s` seconds. Idempotent, and at any time:
        also during `start` (which then raises) and while a restart is being waited for."""
        self._stopped = True
        self._watchdog.close()
        await cancel_all(*self._tenders)
        await gather_or_cancel(instance.stop(grace_s) for instance in self._instances)
        self._drop_recorded()
        self._release_forks()

    def abandon(self) -> None:
        """Ends every worker at once, when the loop that `start` ran on is gone or will not run again.

        Blocks for some milliseconds. `stop` is the way while the loop lives.
        """
        self._stopped = True
        self._watchdog.close()
        run_all(self._instances, methodcaller("abandon"))
        self._drop_recorded()
        self._release_forks(abandon=True)

    def kill(self, worker: int, reason: str) -> None:
        """Ends one worker at once, as the watchdog does with a batch beyond run_timeout_ms. It is
        reported and restarted like any other death."""
        self._instances[worker].kill(reason)

    def tell(self, worker: int, message: Mapping[str, Any]) -> bool:
        """Send a message to a worker at work; returns False when it cannot arrive."""
        return self._instances[worker].tell(message)

    def notify_attached(self, worker: int, message: Mapping[str, Any]) -> bool:
        """Like `tell`, but only for a worker attached to the arena; returns False otherwise."""
        return self._instances[worker].notify_attached(message)

    async def _load_all(self) -> Specs:
        specs = await gather_or_cancel(self._load(instance) for instance in self._instances)
        for index, other in enumerate(specs):
            if other != specs[0]:
                text = f"worker {index} loaded other inputs or outputs than worker 0"
                raise ServeError(Kind.FAILED_PRECONDITION, text)
        return specs[0]

    def _open_arena(self) -> ArenaLike:
        try:
            return self._make_arena(self.inputs, self.outputs)
        except (OSError, MemoryError) as error:
            reason = getattr(error, "strerror", None) or "out of memory"
            text = f"there is no shared memory for its batches: {reason}"
            raise ServeError(Kind.RESOURCE_EXHAUSTED, text) from error

    async def _load(self, instance: Instance) -> Specs:
        return await self._in_time(instance, instance.load())

    async def _serve(self, instance: Instance) -> None:
        assert self._arena is not None
        layout, fds = self._arena.fds_for_worker(instance.index)
        if self._recorded >= 0:
            layout, fds = {**layout, "recorded": True}, [*fds, self._recorded]
        await self._in_time(instance, instance.serve(layout, fds))

    def _release_forks(self, *, abandon: bool = False) -> None:
        unhold, self._unhold = self._unhold, []
        run_all(unhold, methodcaller("__call__", abandon=abandon))

    def _drop_recorded(self) -> None:
        fd, self._recorded = self._recorded, -1
        if fd >= 0:
            os.close(fd)

    async def _in_time(self, instance: Instance, work: Coroutine[Any, Any, T]) -> T:
        # Not asyncio.wait_for: before 3.12 it swallows a cancellation that meets the result.
        doing = asyncio.ensure_future(work)
        try:
            done, _ = await asyncio.wait({doing}, timeout=None if self._in_process else self._load_timeout_s)
        except asyncio.CancelledError:
            await cancel_all(doing)
            raise
        if done:
            return doing.result()
        await cancel_all(doing)
        text = (
            f"worker {instance.index} was still {instance.state.value} after "
            f"{self._load_timeout_s:g} s (load_timeout_s)"
        )
        instance.kill(text)
        raise ServeError(Kind.DEADLINE_EXCEEDED, text)

    async def _tend(self, instance: Instance) -> None:
        backoff = Backoff(self._backoff_s, self._backoff_max_s)
        while not self._stopped:
            if instance.ready:
                await instance.exited()
                await self._sleep(backoff.after_death(self._clock() - self._born[instance.index]))
            else:
                await self._sleep(
                    backoff.after_kill() if instance.killed_outside else backoff.after_failure()
                )
            await self._revive(instance)

    async def _revive(self, instance: Instance) -> None:
        try:
            if await self._load(instance) != (self.inputs, self.outputs):
                raise ServeError(Kind.FAILED_PRECONDITION, "the model's inputs or outputs have changed")
            await self._serve(instance)
        # Whatever goes wrong here, the next try must come: nobody else would ever restart this worker.
        except Exception as error:
            before, self.trouble = self.trouble, explain(error)
            trace = error.__cause__ if isinstance(error, ServeError) else error
            text = "%s: worker %d could not be restarted: %s"
            more = None if self.trouble == before else trace  # it fails the same way again and again
            log.error(text, self._title, instance.index, self.trouble, exc_info=more)
            await instance.stop(CLEANUP_GRACE_S)

    def _revived(self, worker: int) -> None:
        # Here, not where it is waited for: that task runs some turns of the loop later.
        self._born[worker] = self._clock()
        if not self._started or self._stopped:
            return
        self.restarts += 1
        if self.alive == len(self._instances):
            self.trouble = ""
        log.info("%s: worker %d is ready again", self._title, worker)
        self._on_alive(worker)

    def _lost(self, worker: int, words: str) -> None:
        self._watchdog.forget(worker)
        if self._stopped:
            return
        self.trouble = f"worker {worker} died: {words}"
        log.error("%s: %s", self._title, self.trouble)
        if self._started:
            self._on_death(worker)


def place_worker(
    config: Mapping[str, Any], number: int, environment: Mapping[str, str]
) -> tuple[dict[str, Any], Mapping[str, str]]:
    """The device fields of worker `number`'s config, and its environment, which limits the GPUs that CUDA
    shows it. A model's own `env` comes first."""
    places = config.get("places") or ()
    if not places:
        return {}, environment
    place = places[int(config.get("first_instance") or 0) + number]
    told = {"device": place["device"], "gpu": place["gpu"], "device_memory_bytes": place["bytes"]}
    if place.get("dtype"):
        told["torch"] = {**(config.get("torch") or {}), "dtype": place["dtype"]}
    if not place["visible"] or VISIBLE in (config.get("env") or ()):
        return told, environment
    return told, {**environment, VISIBLE: place["visible"]}


Specs = tuple[dict[str, TensorSpec], dict[str, TensorSpec]]


class CompletedError(ServeError):
    """The model has completed `fields` of its configuration, and is to be loaded again with these."""

    def __init__(self, message: str, fields: Mapping[str, Any]) -> None:
        super().__init__(Kind.FAILED_PRECONDITION, message)
        self.fields = fields


class WorkerState(Enum):
    """How far the worker in a place has come; the value is what it is said to be doing."""

    IDLE = "not running"
    LOADING = "loading"
    LOADED = "loaded"
    ATTACHING = "warming up"
    READY = "ready"
    FAILED = "closing after a failure"


_NEXT = {
    (WorkerState.LOADING, "loaded"): WorkerState.LOADED,
    (WorkerState.ATTACHING, "ready"): WorkerState.READY,
}


class _Loaded(msgspec.Struct, tag="loaded", tag_field="op"):
    inputs: dict[str, dict[str, Any]]
    outputs: dict[str, dict[str, Any]]
    text: Info | None = None
    signatures: dict[str, dict[str, Any]] = {}
    on_device: bool = False


class _Ready(msgspec.Struct, tag="ready", tag_field="op"):
    recorded_ns: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)] = 0


class CallMessage(msgspec.Struct, tag_field="op", kw_only=True):
    """A worker's message about a call to another model (bls.py); `id` is the call's own."""

    id: int


class _Infer(CallMessage, tag="infer"):
    offset: int
    nbytes: int
    many: bool
    timeout_us: int


class _Taken(CallMessage, tag="taken"):
    pass


class _Leave(CallMessage, tag="leave"):
    pass


class _CallbackPiece(CallMessage, tag="callback"):
    text: str
    more: bool


class _Failed(msgspec.Struct, tag="failed", tag_field="op"):
    message: str
    kind: int = Kind.INTERNAL.value
    trace: str = ""
    completed: dict[str, Any] | None = None


_Answer = _Loaded | _Ready | _Failed | _Infer | _Taken | _Leave | _CallbackPiece
OnCall = Callable[[int, Mapping[str, Any]], None]


class Instance:
    """One worker of a group. `on_call(index, message)` gets calls to other models, which only a READY worker
    may make, and model callbacks, which a model may make from its first line to its last. `on_ready(index)`
    and `on_lost(index, reason)` are called at once, from the loop; `on_lost` only for a worker that was
    READY."""

    def __init__(
        self,
        index: int,
        order: Mapping[str, Any],
        make_process: Callable[[OnMessage, OnExit], Child],
        on_ready: Callable[[int], None],
        on_lost: Callable[[int, str], None],
        on_call: OnCall | None = None,
    ) -> None:
        self.index = index
        self.state = WorkerState.IDLE
        self.text: Info | None = None  # what its engine says of itself, once it is loaded
        self.signatures: Mapping[
            str, Mapping[str, Any]
        ] = {}  # the model's own, as model.yaml would have them
        self.on_device = False  # whether it reads clients' memory on its device by itself
        self.recorded_ns = 0  # how long its recorded requests took
        self._order = order
        self._make_process = make_process
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._on_call = on_call
        self._process: Child | None = None
        self._answer: asyncio.Future[_Loaded | None] | None = None

    @property
    def pid(self) -> int:
        """Process id of the worker, 0 when there is none."""
        return self._process.pid if self._process is not None and self._process.running else 0

    @property
    def ready(self) -> bool:
        """Whether the worker can run batches now."""
        return self.state is WorkerState.READY

    @property
    def killed_outside(self) -> bool:
        """Whether the last worker here was killed, by nobody of this server and not for want of memory."""
        return self._process is not None and self._process.killed_outside

    @property
    def waits_for(self) -> str:
        """The step that the worker waits for before it loads, as text; "" for none."""
        return self._process.waits_for if self._process is not None else ""

    async def load(self) -> Specs:
        """Spawns a worker and waits until its backend has loaded; (inputs, outputs) as it says they are.

        Raises ServeError with the backend's own words, or with how the worker ended.
        """
        self._process = self._make_process(self._hear, self._end)
        try:
            self._process.spawn()
        except OSError as error:
            raise ServeError(
                Kind.UNAVAILABLE, f"a worker process could not be started: {error.strerror}"
            ) from error
        loaded = await self._ask(
            WorkerState.LOADING, {**self._order, "op": "load", "instance": self.index}, ()
        )
        assert loaded is not None
        if self.on_device and not loaded.on_device:  # it would answer with what its columns happen to hold
            raise ServeError(Kind.FAILED_PRECONDITION, "its batches do not go over the device any more")
        self.text, self.signatures, self.on_device = loaded.text, loaded.signatures, loaded.on_device
        return _read_loaded(loaded)

    async def serve(self, layout: Mapping[str, Any], fds: Sequence[int]) -> None:
        """Hands the loaded worker its arena and waits until it is attached and warm."""
        await self._ask(WorkerState.ATTACHING, {**layout, "op": "serve", "worker": self.index}, fds)

    async def stop(self, grace_s: float) -> None:
        """Stops the worker, if there is one: asked when it is able to listen, else killed."""
        if self._process is None:
            return
        if self.state is WorkerState.LOADING:
            self._process.kill("the load was given up")
        await self._process.stop(grace_s)

    def tell(self, message: Mapping[str, Any]) -> bool:
        """Send a message to the worker; returns False when it cannot arrive."""
        if self._process is None or self.state is WorkerState.IDLE:
            return False
        try:
            self._process.send(message)
        except ControlFault:
            return False
        return True

    def notify_attached(self, message: Mapping[str, Any]) -> bool:
        """Like `tell`, but only for a worker attached to the arena; returns False otherwise. A worker that
        loads would take the next message for its arena, and one that warms up reads nothing for minutes.
        Messages that have arrived are read first: it may be ready, and in its first batch."""
        behind = (
            self.state is WorkerState.ATTACHING and self._process is not None and not self._process.catch_up()
        )
        return (self.state is WorkerState.READY or behind) and self.tell(message)

    async def exited(self) -> None:
        """Returns once no worker is here."""
        if self._process is not None:
            await self._process.wait()

    def occupy(self, occupied: bool) -> bool:
        """Note whether the worker does what may take long: loads, or runs a batch. Whether another worker in
        its process does."""
        return self._process is not None and self._process.occupy(occupied)

    def kill(self, reason: str) -> None:
        """SIGKILL; the reason is what `on_lost` and a waiting `load` or `serve` will say."""
        if self._process is not None:
            self._process.kill(reason)

    def abandon(self) -> None:
        """End the worker at once, without the loop; no callback is called."""
        self.state = WorkerState.IDLE
        if self._process is not None:
            self._process.abandon()

    async def _ask(self, state: WorkerState, message: dict[str, Any], fds: Sequence[int]) -> _Loaded | None:
        assert self._process is not None
        self.state = state
        self._answer = asyncio.get_running_loop().create_future()
        try:
            self._process.send(message, fds)
        except ControlFault as fault:
            if not self._process.running:
                raise ServeError(Kind.UNAVAILABLE, f"worker {self.index} is not running") from fault
            # A worker that hung up is dying; `_end` gives the reason, and not that of a kill that came too
            # late.
            if not isinstance(fault, PeerGone):
                self._process.kill(str(fault))
        return await self._answer

    def _hear(self, message: dict[str, Any]) -> None:
        try:
            answer: _Answer = msgspec.convert(message, _Answer)
        except (msgspec.ValidationError, RecursionError) as error:
            raise ControlFault("a message that is none of loaded, ready, failed") from error
        if isinstance(answer, CallMessage):
            if self._on_call is None and isinstance(answer, _CallbackPiece) and not answer.id:
                return  # a notification; the batching library's has no receiver
            may = self.state is WorkerState.READY or (
                isinstance(answer, _CallbackPiece) and self.state is not WorkerState.IDLE
            )
            if not may or self._on_call is None:
                raise ControlFault(f"a call while it was {self.state.value}")
            self._on_call(self.index, message)
            return
        if isinstance(answer, _Failed):
            self._fail(answer)
            return
        op = "loaded" if isinstance(answer, _Loaded) else "ready"
        if (self.state, op) not in _NEXT:
            raise ControlFault(f"{op!r} while it was {self.state.value}")
        self.state = _NEXT[self.state, op]
        if isinstance(answer, _Ready):
            self.recorded_ns = answer.recorded_ns
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(answer if isinstance(answer, _Loaded) else None)
        if self.state is WorkerState.READY:
            self._on_ready(self.index)

    def _fail(self, failed: _Failed) -> None:
        words = clean(failed.message)
        kind = Kind(failed.kind) if failed.kind in Kind._value2member_map_ else Kind.INTERNAL
        error = ServeError(kind, words)
        error.__cause__ = RemoteTrace("\n" + failed.trace) if failed.trace else None
        if self.state is WorkerState.READY:
            log.error("worker %d failed: %s", self.index, words, exc_info=error.__cause__)
            self.kill(words)  # its batch loop has ended: whatever it still does is of no use
            return
        self.state = WorkerState.FAILED  # it closes its backend and exits
        if self._answer is not None and not self._answer.done():
            if failed.completed is not None:
                self._answer.set_exception(CompletedError(words, failed.completed))
            else:
                self._answer.set_exception(error)

    def _end(self, words: str) -> None:
        state, self.state = self.state, WorkerState.IDLE
        if self._answer is not None and not self._answer.done():
            text = f"worker {self.index} died while it was {state.value}: {words}"
            self._answer.set_exception(ServeError(Kind.UNAVAILABLE, text))
        if state is WorkerState.READY:
            self._on_lost(self.index, words)


def _read_loaded(loaded: _Loaded) -> Specs:
    try:
        return read_specs(loaded.inputs), read_specs(loaded.outputs)
    except ConfigError as error:
        raise internal(f"the backend describes its tensors wrongly: {error}") from error
