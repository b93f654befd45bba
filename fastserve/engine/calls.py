"""Calls that models make to other models (BLS), carried out by the process that owns their workers.

The words are in workers/line.py. A call is a task here: the request is read where the worker wrote it, run
like any other, and every response is copied into a slab that then is the worker's. Calls end with their
worker, and at their deadline: a model that waits for itself gets an error, not for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

from fastserve.backends.base import explain
from fastserve.codec.notes import AnswerNote, RequestNote, read_request_note, write_note
from fastserve.codec.slab_tensors import measure_tensors, read_note, read_tensors, write_tensors
from fastserve.engine.batch_queue import BatchQueue
from fastserve.errors import DeadlineError, Kind, ModelError, ServeError
from fastserve.repository.catalog import Catalog
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.tensor import Tensor

log = logging.getLogger(__name__)

# Responses a worker is sent ahead of what it has taken.
WINDOW = 8
LATE = "the model that was called took longer than the call's {:g} s"
NO_ROOM = "no room for the response of another model (max_queue_bytes)"
# Triton's words for a request that its model never saw, and for a model that is not there.
FAILED = "Model {} - Error when running inference: {}"
NOT_READY = "Failed for execute the inference request. Model '{}' is not ready."
UNREADABLE = "the request to another model cannot be read"


class Calls:
    """The calls of the workers behind one queue. `send` says something to a worker of it."""

    def __init__(self, engine: Runs, queue: BatchQueue, send: Tell) -> None:
        self._engine, self._queue, self._send = engine, queue, send
        self._running: dict[tuple[int, int], tuple[asyncio.Task[None], asyncio.Semaphore]] = {}

    def hear(self, worker: int, message: Mapping[str, Any]) -> None:
        """Something a worker says of its calls."""
        key = (worker, int(message["id"]))
        known = self._running.get(key)
        if message["op"] == "infer" and known is None:
            room = asyncio.Semaphore(WINDOW)
            task = asyncio.get_running_loop().create_task(self._run(worker, message, room))
            self._running[key] = task, room
        elif message["op"] == "taken" and known is not None:
            known[1].release()
        elif message["op"] == "leave" and known is not None:
            known[0].cancel()

    def forget(self, worker: int) -> None:
        """The worker is dead."""
        for key in [key for key in self._running if key[0] == worker]:
            self._running.pop(key)[0].cancel()

    async def close(self) -> None:
        """End every call."""
        tasks = [task for task, _ in self._running.values()]
        self._running.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, worker: int, message: Mapping[str, Any], room: asyncio.Semaphore) -> None:
        number, error = int(message["id"]), None
        try:
            await self._answer(worker, message, room)
        except asyncio.CancelledError:  # the caller has left, or is dead
            log.debug("a call of worker %d was given up", worker)
        except ServeError as fault:
            error = fault
        except Exception as fault:  # a call that is not answered would be waited for
            log.exception("a call of worker %d failed", worker)
            error = ServeError(Kind.INTERNAL, explain(fault))
        if self._running.pop((worker, number), None) is None:
            return  # the number may be another call's by now
        said = {} if error is None else {"kind": error.kind.value, "message": error.message}
        self._tell(worker, {"op": "answer", "id": number, "final": True, **said})

    async def _answer(self, worker: int, message: Mapping[str, Any], room: asyncio.Semaphore) -> None:
        timeout_s = int(message["timeout_us"]) / 1e6
        work = asyncio.ensure_future(self._respond(worker, message, room, timeout_s))
        done, _ = await _settle(work, timeout_s)
        if not done:
            raise ServeError(Kind.DEADLINE_EXCEEDED, LATE.format(timeout_s))
        try:
            work.result()
        except DeadlineError:
            raise ServeError(Kind.DEADLINE_EXCEEDED, LATE.format(timeout_s)) from None

    async def _respond(
        self, worker: int, message: Mapping[str, Any], room: asyncio.Semaphore, timeout_s: float
    ) -> None:
        note, tensors = self._read(message)
        try:
            version = find_version(self._engine.catalog, note)
            request = _make_request(version, note, tensors, timeout_s)
            responses = self._responses(version, request, many=message["many"])
            async with contextlib.aclosing(responses):
                async for response in responses:
                    try:
                        await room.acquire()
                        self._hand_over(worker, int(message["id"]), response)
                    finally:
                        response.release()
        except (ModelError, DeadlineError):  # the other model's own words, and ours
            raise
        except ServeError as fault:
            raise ServeError(fault.kind, FAILED.format(note.model, fault.message)) from fault

    async def _responses(
        self, version: Version, request: InferRequest, *, many: bool
    ) -> AsyncGenerator[InferResponse, None]:
        if not many:
            yield await self._engine.infer(version, request)
            return
        async with contextlib.aclosing(self._engine.stream(version, request)) as responses:
            async for response in responses:
                yield response

    def _read(self, message: Mapping[str, Any]) -> tuple[RequestNote, dict[str, Tensor]]:
        try:
            slab = self._queue.ring.slab(int(message["offset"]), int(message["nbytes"]))
            note = read_request_note(read_note(slab))
            return note, {note.extra[number]: tensor for number, tensor in read_tensors(slab)}
        except (ValueError, IndexError):
            raise ServeError(Kind.INVALID_ARGUMENT, UNREADABLE) from None

    def _hand_over(self, worker: int, number: int, response: InferResponse) -> None:
        if response.error is not None:
            said = {"kind": response.error.kind.value, "message": response.error.message}
            self._tell(worker, {"op": "answer", "id": number, **said})
            return
        parameters: Any = response.parameters
        note = write_note(AnswerNote(parameters=parameters, extra=list(response.outputs)))
        tensors = list(enumerate(response.outputs.values()))
        size = measure_tensors(tensors, note)
        ring = self._queue.ring
        offset = ring.lease(size)
        if offset == 0:
            raise ServeError(Kind.RESOURCE_EXHAUSTED, NO_ROOM)
        write_tensors(ring.slab(offset, size, True), tensors, note)
        ring.give_worker(offset, worker)
        if not self._tell(worker, {"op": "answer", "id": number, "offset": offset, "nbytes": size}):
            ring.return_lease(offset)

    def _tell(self, worker: int, message: Mapping[str, Any]) -> bool:
        return self._send(worker, message)


class Runs(Protocol):
    """The engine, as calls see it."""

    catalog: Catalog

    async def infer(self, version: Version, request: InferRequest) -> InferResponse:
        """One request, one response."""

    def stream(self, version: Version, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """One request, any number of responses."""


class Tell(Protocol):
    """Says something to a worker; False when it cannot hear."""

    def __call__(self, worker: int, message: Mapping[str, Any]) -> bool: ...


def find_version(catalog: Catalog, note: RequestNote) -> Version:
    """The version a call names. Raises ServeError NOT_FOUND."""
    version = catalog.available(note.model, note.version if note.version >= 0 else None)
    if version is None:
        raise ServeError(Kind.NOT_FOUND, NOT_READY.format(note.model))
    return version


def _make_request(
    version: Version, note: RequestNote, tensors: dict[str, Tensor], timeout_s: float
) -> InferRequest:
    for name in note.outputs:
        if name not in version.outputs:
            text = f"unexpected inference output '{name}' for model '{note.model}'"
            raise ServeError(Kind.INVALID_ARGUMENT, text)
    return InferRequest(
        tensors,
        tuple(note.outputs),
        note.request_id,
        note.priority,
        time.monotonic_ns() + int(timeout_s * 1e9),
        dict(note.parameters),
        note.sequence_id,
        bool(note.flags & 1),
        bool(note.flags & 2),
    )


async def _settle(work: asyncio.Future[None], timeout_s: float) -> tuple[set[Any], set[Any]]:
    """asyncio.wait for one, that leaves nothing running behind it."""
    try:
        return await asyncio.wait({work}, timeout=timeout_s)
    finally:
        if not work.done():
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
