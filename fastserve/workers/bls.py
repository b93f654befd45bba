"""Business logic scripting (BLS): calls from one model to another, over the control channel, tensors in
slabs.

    worker                                              owner
      | -- infer {id, offset, nbytes, many, timeout_us} ->|   the request, in a slab of the worker's
      | <- answer {id, offset, nbytes, final}             |   a response, in a slab that is now the worker's
      | <- answer {id, kind, message, final}              |   or an error, or with neither just the end
      | -- taken {id} ----------------------------------->|   many: one response more may come
      | -- leave {id} ----------------------------------->|   nobody waits any more; a final answer follows

Any thread of the model may call. A thread that waits reads the channel for all: there is no thread for it,
and the batch loop reads it too. A call has a deadline, so that a model that waits for itself gets an error.
"""

from __future__ import annotations

import itertools
import logging
import select
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fastserve.backends import model_callbacks
from fastserve.backends.cancellation import cancelled, running
from fastserve.backends.triton_api.requests import InferenceRequest, InferenceResponse, TritonError, bls
from fastserve.backends.triton_api.tensor import Tensor as TritonTensor
from fastserve.backends.triton_api.tensor import TritonModelException
from fastserve.codec.slab_contents import RequestNote, read_answer_note, write_note
from fastserve.errors import Kind, ServeError
from fastserve.workers.arena import Arena
from fastserve.workers.arrays import open_slab_codec, read_array
from fastserve.workers.control import ControlChannel, ControlFault, PeerGone, in_pieces
from fastserve.workers.request_codec import KINDS, STRINGS, to_entry
from fastserve.workers.requests import KeptSlab

if TYPE_CHECKING:
    from fastserve._ext.batch_ring import BatchRing


log = logging.getLogger(__name__)
# How long a call may take whose request names no timeout.
DEFAULT_TIMEOUT_S = 60.0
# How long a model callback may take, such as a load of another model.
CALLBACK_S = 600.0
# The owner ends a call at its deadline; should it not, this much later the call ends by itself.
SLACK_S = 1.0
# A thread that waits while another reads the line looks this often whether the other has stopped reading.
LOOK_S = 0.05
# A call of a model looks this often whether anybody still waits for the requests that it answers.
WATCH_S = 0.1
NOBODY_WAITS = "nobody waits any more for the request that this call is part of"
LATE = "the model that was called did not answer within {:g} s"
GONE = "the server is stopping"
NO_RESPONSE = "there was no response"
NO_ROOM = "there is no room for a request to another model (max_queue_bytes)"


class OutgoingCall:
    """One call under way: responses not yet taken, and whether more will come."""

    def __init__(self, number: int, offset: int, deadline: float, timeout_s: float) -> None:
        self.number, self.offset = number, offset
        self.deadline, self.timeout_s = deadline, timeout_s
        self.answers: deque[dict[str, Any]] = deque()
        self.final = self.left = False
        self.news = threading.Event()


class BlsClient:
    """The worker's side of BLS. `turn` belongs to the batch loop, the rest to the model's threads."""

    def __init__(self, control: ControlChannel, arena: Arena, ring: BatchRing) -> None:
        self._control, self._ring = control, ring
        self._codec = open_slab_codec(arena, ring)
        self._calls: dict[int, OutgoingCall] = {}
        self._numbers = itertools.count(1)
        self._reading = threading.Lock()
        self._poll = select.poll()
        self._poll.register(control.fileno(), select.POLLIN)
        self._gone = False
        self._kept: set[KeptSlab] = set()

    @classmethod
    def open(cls, control: ControlChannel, arena: Arena, ring: BatchRing) -> BlsClient:
        """Open the channel that requests of this process go through from now on."""
        line = cls(control, arena, ring)
        bls.line = model_callbacks.process.channel = line
        if model_callbacks.thread.channel is not None:  # a thread of the server's: others have their own
            bls.of_thread.line = model_callbacks.thread.channel = line
        return line

    def turn(self) -> bool:
        """Read a message of the owner, unless another thread is reading; returns True when the worker is to
        stop."""
        if self._reading.acquire(blocking=False):
            try:
                self._read(0)
            finally:
                self._reading.release()
        return self._gone

    def call(self, request: InferenceRequest) -> InferenceResponse:
        """Send a request and return its response, which holds an error as well."""
        call = self._begin(request, many=False)
        try:
            answer = self._next(call)
            return self._response(answer) if answer else _failed(NO_RESPONSE)
        finally:
            self._leave(call)

    def answer(self, request: InferenceRequest) -> InferenceResponse:
        """Send a request and return its response. Raises ServeError of the other model's kind, and
        UNAVAILABLE where the server is stopping."""
        call = self._begin(request, many=False)
        try:
            answer = self._next(call) or {"kind": Kind.INTERNAL.value, "message": NO_RESPONSE}
            if "kind" in answer:
                raise ServeError(Kind(answer["kind"]), answer["message"])
            return self._response(answer)
        finally:
            self._leave(call)

    def stream(self, request: InferenceRequest) -> Iterator[InferenceResponse]:
        """Send a request now, and return an iterator of its responses."""
        return self._responses(self._begin(request, many=True))

    def _responses(self, call: OutgoingCall) -> Iterator[InferenceResponse]:
        try:
            while answer := self._next(call):
                yield self._response(answer)
                if not call.final:
                    self._control.send({"op": "taken", "id": call.number})
        finally:
            self._leave(call)

    # --- model callbacks ---

    def ask(self, callback: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a callback and return the reply, an empty one once the server is stopping."""
        call = OutgoingCall(next(self._numbers), 0, time.monotonic() + CALLBACK_S, CALLBACK_S)
        self._calls[call.number] = call
        try:
            for piece in in_pieces(call.number, callback):
                self._control.send(piece)
            return {} if self._gone else self._next(call) or {}
        except ControlFault:
            raise TritonModelException(GONE) from None
        finally:
            self._calls.pop(call.number, None)

    def tell(self, callback: Mapping[str, Any]) -> None:
        try:
            for piece in in_pieces(0, callback):
                self._control.send(piece)
        except ControlFault:
            log.warning("the server did not hear of %s", callback["do"])

    # --- requests out ---

    def _begin(self, request: InferenceRequest, *, many: bool) -> OutgoingCall:
        tensors = [to_entry(i, t.raw, t.triton_dtype()) for i, t in enumerate(request.inputs())]
        offset, size = self._codec.put(tensors, write_note(_note_of(request)))
        if offset == 0:
            raise TritonModelException(NO_ROOM)
        timeout_us = request.timeout() or int(DEFAULT_TIMEOUT_S * 1e6)
        call = OutgoingCall(
            next(self._numbers), offset, time.monotonic() + timeout_us / 1e6, timeout_us / 1e6
        )
        self._calls[call.number] = call
        told = {"offset": offset, "nbytes": size, "many": many, "timeout_us": timeout_us}
        try:
            if self._gone:
                raise PeerGone(GONE)
            self._control.send({"op": "infer", "id": call.number, **told})
        except ControlFault:
            del self._calls[call.number]
            self._ring.free_slab(offset)
            raise TritonModelException(GONE) from None
        return call

    def _leave(self, call: OutgoingCall) -> None:
        """End a call. The request's slab stays until the owner, too, has released it."""
        self._drop_answers(call)
        if call.final or call.left:
            return
        call.left = True
        if not self._gone:
            self._control.send({"op": "leave", "id": call.number})

    # --- answers in ---

    def _next(self, call: OutgoingCall) -> dict[str, Any] | None:
        """Return the next response, an error once the deadline has passed, None after the last one."""
        while not call.answers:
            if call.final:
                return None
            left_s = call.deadline + SLACK_S - time.monotonic()
            if self._gone or left_s <= 0:
                self._leave(call)
                call.final = True
                kind, text = (Kind.UNAVAILABLE, GONE) if self._gone else (Kind.DEADLINE_EXCEEDED, LATE)
                return {"kind": kind.value, "message": text.format(call.timeout_s)}
            if cancelled():
                self._leave(call)
                call.final = True
                return {"kind": Kind.CANCELLED.value, "message": NOBODY_WAITS}
            self._await_news(call, min(left_s, WATCH_S))
        return call.answers.popleft()

    def _await_news(self, call: OutgoingCall, left_s: float) -> None:
        call.news.clear()
        if call.answers or call.final:
            return
        if self._reading.acquire(blocking=False):
            try:
                if not call.answers and not call.final:  # another may have read it just before
                    self._read(min(left_s, 1.0))
            finally:
                self._reading.release()
        else:
            call.news.wait(min(left_s, LOOK_S))

    def _read(self, wait_s: float) -> None:
        """Read one message, if one comes in time. Only under the lock."""
        if self._gone or not self._poll.poll(wait_s * 1000):
            return
        try:
            message = self._control.receive().message
        except PeerGone:
            message = {"op": "stop"}
        if message["op"] == "stop":
            self._gone = True
            self._control.deafen()  # so that the batch loop, which may sleep, wakes too
            for call in list(self._calls.values()):  # threads that begin calls go on meanwhile
                call.news.set()
        elif message["op"] in ("answer", "reply"):
            self._hear(message)

    def _hear(self, message: dict[str, Any]) -> None:
        call = self._calls.get(message["id"])
        if call is None:
            return
        if message.get("offset") or message.get("kind") or message["op"] == "reply":
            call.answers.append(message)
        if message.get("final"):
            call.final = True
            del self._calls[call.number]
            if call.offset:
                self._ring.free_slab(call.offset)
        if call.left:
            self._drop_answers(call)
        call.news.set()

    def _drop_answers(self, call: OutgoingCall) -> None:
        while call.answers:
            offset = call.answers.popleft().get("offset")
            if offset:
                self._ring.free_slab(offset)

    def _response(self, answer: dict[str, Any]) -> InferenceResponse:
        offset = answer.get("offset")
        if not offset:
            return _failed(answer["message"])
        entries, said = self._codec.arrays(offset, answer["nbytes"])
        note = read_answer_note(said)
        tensors = [
            TritonTensor.made_of(name, read_array(code, shape, data), KINDS[code], code != STRINGS)
            for (_, code, shape, data), name in zip(entries, note.extra, strict=True)
        ]
        views = [data for _, code, _, data in entries if code != STRINGS]
        if views:
            KeptSlab(self._ring, offset, views, self._kept)
        else:
            self._ring.free_slab(offset)
        return InferenceResponse(tensors, parameters=note.parameters)


def _note_of(request: InferenceRequest) -> RequestNote:
    return RequestNote(
        request_id=request.request_id(),
        sequence_id=request.correlation_id(),
        flags=request.flags(),
        timeout_us=request.timeout(),
        priority=request.priority(),
        parameters=request.plain_parameters,
        outputs=request._outputs,
        extra=[tensor.name() for tensor in request.inputs()],
        model=request.model_name(),
        version=request.model_version(),
        trace=_trace_of(request),
    )


def _trace_of(request: InferenceRequest) -> tuple[str, str] | None:
    """Return the span that a call is part of: what the model has named, else that of the request that it
    runs. A model that runs several has to say for which."""
    context = request.trace().context
    if context is None and (watched := running()) is not None and len(watched.gone()) == 1:
        context = next((context for _, context in watched.traced()), None)
    return None if context is None else (context.traceparent, context.state)


def _failed(text: str) -> InferenceResponse:
    """As in Triton, every error of another model is INTERNAL: a model that passes it on answers with that."""
    return InferenceResponse(error=TritonError(text))
