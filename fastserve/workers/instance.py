"""One place of a group: the worker process that fills it now, and how far that has come.

    IDLE --load--> LOADING --"loaded"--> LOADED --serve--> ATTACHING --"ready"--> READY
      ^               |                    |                   |                    |
      +---------------+------- exit -------+-------------------+--------------------+
                      |                                        |
                      +-------------- "failed" ----------------+--> FAILED --exit--> IDLE

A message that is not in the table for its state is a fault of the worker, which is then killed. Nothing
here restarts anything: the group does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Annotated, Any

import msgspec

from fastserve.backends.base import read_specs
from fastserve.backends.model_errors import clean
from fastserve.codec.generation import Info
from fastserve.errors import ConfigError, Kind, RemoteTrace, ServeError, internal
from fastserve.tensor import TensorSpec
from fastserve.workers.control import ControlFault, PeerGone
from fastserve.workers.process import Child, OnExit, OnMessage

log = logging.getLogger(__name__)

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
