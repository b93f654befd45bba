"""Requests and responses of Triton's Python API, as a model's execute() sees and makes them.

The worker's runner puts a ResponseSink into every request, which transports its responses, and a BlsChannel
into `bls.line`, which calls other models.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from enum import IntEnum
from typing import Any, NoReturn, Protocol

from fastserve._ext.triton_requests import Outputs, WholeRequest
from fastserve.backends.triton_api.tensor import Tensor, TritonModelException
from fastserve.errors import Kind
from fastserve.util.tracing import TraceContext

REQUEST_SEQUENCE_START, REQUEST_SEQUENCE_END = 1, 2
RELEASE_ALL, RELEASE_RESCHEDULE = 1, 2
COMPLETE_FINAL = 1
CLOSED = "Unable to send response. Response sender has been closed."
_NEEDED = "Inference Response object must be provided when the response flags is set to zero."
_FLAGS = "Unable to send response. Unsupported flag provided."


class TritonError:
    """The error of a model's response, with one of Triton's codes."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG = 0, 1, 2, 3
    UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = 4, 5, 6, 7

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message, self._code = str(message), int(code)

    def message(self) -> str:
        """Return the text."""
        return self._message

    def code(self) -> int:
        """Return the code, one of those of the class."""
        return self._code

    def __str__(self) -> str:
        return self._message


# Triton's code -> ours; both ways.
KINDS = (
    Kind.UNKNOWN,
    Kind.INTERNAL,
    Kind.NOT_FOUND,
    Kind.INVALID_ARGUMENT,
    Kind.UNAVAILABLE,
    Kind.UNIMPLEMENTED,
    Kind.ALREADY_EXISTS,
    Kind.CANCELLED,
)


class MemoryType(IntEnum):
    """Kinds of memory, numbered as in Triton."""

    GPU, CPU = 0, 1


class PreferredMemory:
    """The memory a caller prefers for outputs: accepted, and always the host's here."""

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        self.memory_type, self.device_id = preferred_memory_type, preferred_device_id


class InferenceResponse(Outputs):
    """Output tensors, or an error in their place; parameters are scalars by name."""

    __slots__ = ()

    def parameters(self) -> str:
        """Return the parameters as JSON."""
        return json.dumps(self._parameters or {})

    @property
    def plain_parameters(self) -> dict[str, Any]:
        """The parameters as values."""
        return self._parameters or {}

    def _read_parameters(self, given: Mapping[str, Any] | str) -> dict[str, Any]:
        return _read_parameters(given)

    def _read_error(self, given: Any) -> TritonError:
        error = TritonError(given) if isinstance(given, str) else given
        if not isinstance(error, TritonError):
            raise TritonModelException("error must be a TritonError")
        return error

    def _refuse(self, tensor: object) -> NoReturn:
        raise TritonModelException(f"an output tensor must be a Tensor, not {type(tensor).__name__}")


class ResponseSink(Protocol):
    """Transports the responses of one request."""

    decoupled: bool
    ended: bool

    def send(self, response: InferenceResponse | None, final: bool) -> None:
        """Pass one response on; `final` ends the answer. Blocks while the reader is behind."""

    def cancelled(self) -> bool:
        """Return whether the client has left."""

    def trace_context(self) -> TraceContext | None:
        """Return what spans of the model are to have as their parent; None for a request that is not
        traced."""


class ResponseSender:
    """Answers one request, from any thread, at any time, any number of times until the final flag."""

    __slots__ = ("_reply",)

    def __init__(self, reply: ResponseSink) -> None:
        self._reply = reply

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response, `flags` 0 or COMPLETE_FINAL. Raises TritonModelException after the final one."""
        if self._reply.ended:
            raise TritonModelException(CLOSED)
        if flags not in (0, COMPLETE_FINAL):
            raise TritonModelException(_FLAGS)
        if response is None and not flags:
            raise TritonModelException(_NEEDED)
        if response is not None and not isinstance(response, InferenceResponse):
            kind = type(response).__name__
            raise TritonModelException(f"a response must be an InferenceResponse, not {kind}")
        self._reply.send(response, bool(flags))

    def is_cancelled(self) -> bool:
        """Return whether the client has left."""
        return self._reply.cancelled()


class BlsChannel(Protocol):
    """Calls to other models of the server."""

    def call(self, request: InferenceRequest) -> InferenceResponse:
        """Send one request, and return its one response."""

    def answer(self, request: InferenceRequest) -> InferenceResponse:
        """Send one request, and return its one response. Raises ServeError of the other model's kind."""

    def stream(self, request: InferenceRequest) -> Iterator[InferenceResponse]:
        """Send one request, and iterate over its responses."""


class _ThreadLine(threading.local):
    """Holds the BlsChannel of a worker that is a thread of the server's process."""

    line: BlsChannel | None = None


class bls:
    """Holds the worker's BlsChannel."""

    line: BlsChannel | None = None
    of_thread = _ThreadLine()
    threads: ThreadPoolExecutor | None = None


class InferenceTrace:
    """The trace of a request, as a model continues it."""

    def __init__(self, context: TraceContext | None = None) -> None:
        self.context = context

    def get_context(self) -> str | None:
        """Return the span that the model's own are to be below, as JSON of the headers `traceparent` and
        `tracestate`; None for a request that is not traced."""
        context = self.context
        if context is None:
            return None
        carrier = {"traceparent": context.traceparent}
        return json.dumps({**carrier, "tracestate": context.state} if context.state else carrier)


NOT_TRACED = InferenceTrace()


class InferenceRequest(WholeRequest):
    """One request: the server's, or one the model makes to call another model with exec()."""

    preferred: PreferredMemory | None = None
    _trace = NOT_TRACED

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] | None = None,
        requested_output_names: Sequence[str] | None = None,
        model_name: str | None = None,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: Any = None,
        parameters: Mapping[str, Any] | str | None = None,
        priority: int = 0,
    ) -> None:
        """Arguments are in Triton's order: `inputs`, `requested_output_names` and `model_name` are required,
        mostly by name. Raises TypeError where one is missing."""
        if inputs is None or requested_output_names is None or model_name is None:
            raise TypeError("InferenceRequest needs inputs, requested_output_names and model_name")
        if isinstance(requested_output_names, str):
            raise TypeError("requested_output_names is a list of names, not one")
        if not all(isinstance(tensor, Tensor) for tensor in inputs):
            raise TritonModelException("every input must be a Tensor")
        self._model, self._version = model_name, int(model_version)
        self._outputs = list(requested_output_names)
        self._inputs = {tensor.name(): tensor for tensor in inputs}
        self._request_id, self._correlation_id, self._flags = request_id, correlation_id, flags
        self._timeout_us, self._priority = int(timeout), int(priority)
        self._parameters = _read_parameters(parameters)
        self.preferred = preferred_memory
        if isinstance(trace, InferenceTrace):
            self._trace = trace

    def set_flags(self, flags: int) -> None:
        """Set the flags, before exec()."""
        self._flags = flags

    def timeout(self) -> int:
        """Return the timeout in microseconds, 0 for none."""
        return self._timeout_us

    def priority(self) -> int:
        """Return the priority, 0 for the default."""
        return self._priority

    def parameters(self) -> str:
        """Return the parameters as JSON."""
        return json.dumps(self.plain_parameters)

    def model_name(self) -> str:
        """Return the name of the model to call."""
        return self._model

    def model_version(self) -> int:
        """Return the version to call, -1 for the latest."""
        return self._version

    def preferred_memory(self) -> PreferredMemory | None:
        """Return the memory the caller prefers for outputs."""
        return self.preferred

    def trace(self) -> InferenceTrace:
        """Return the trace of a request of the server, from which a model's own spans go on."""
        context = None if self._reply is None else self._reply.trace_context()
        return self._trace if context is None else InferenceTrace(context)

    @property
    def plain_parameters(self) -> dict[str, Any]:
        """The parameters as values."""
        return dict(self._parameters or {})

    # --- requests of the server ---

    def get_response_sender(self) -> ResponseSender:
        """Return the sender of this request's responses. Raises TritonModelException for a request the model
        made itself."""
        if self._reply is None:
            raise TritonModelException("only a request of the server has a response sender")
        return ResponseSender(self._reply)

    def is_cancelled(self) -> bool:
        """Return whether the client has left."""
        return self._reply is not None and self._reply.cancelled()

    def set_release_flags(self, flags: int) -> None:
        """Accept RELEASE_ALL, the only behaviour there is. Raises TritonModelException for rescheduling."""
        if flags != RELEASE_ALL:
            raise TritonModelException(
                f"set_release_flags: given {flags}, allowed: {RELEASE_ALL} "
                "(TRITONSERVER_REQUEST_RELEASE_ALL): requests are not rescheduled on this server"
            )

    # --- requests to other models ---

    def exec(self, decoupled: bool = False, execution_timeout: int = 0) -> Any:
        """Call the model: returns its one response, or with `decoupled` an iterator over its responses.

        Errors of the other model are in the response. Raises TritonModelException where no call can be made
        (while the model loads).
        """
        return self._call(decoupled, execution_timeout)

    async def async_exec(self, decoupled: bool = False, execution_timeout: int = 0) -> Any:
        """Call the model without blocking the caller's event loop. With `decoupled` the result works with
        `for`, which blocks until the next response, and with `async for`, which does not."""
        result = await _in_thread(self._call, decoupled, execution_timeout)
        return Responses(result) if decoupled else result

    def _call(self, decoupled: bool, execution_timeout: int) -> Any:
        line = channel_of_models()
        if execution_timeout:
            self._timeout_us = execution_timeout
        return line.stream(self) if decoupled else line.call(self)


class Responses:
    """The responses of another model, one by one as they come."""

    def __init__(self, responses: Iterator[InferenceResponse]) -> None:
        self._responses = responses

    def __iter__(self) -> Iterator[InferenceResponse]:
        return self._responses

    def __next__(self) -> InferenceResponse:
        return next(self._responses)

    def __aiter__(self) -> Responses:
        return self

    async def __anext__(self) -> InferenceResponse:
        response: InferenceResponse | None = await _in_thread(next, self._responses, None)
        if response is None:
            raise StopAsyncIteration
        return response


async def _in_thread(work: Callable[..., Any], *arguments: Any) -> Any:
    if bls.threads is None:
        bls.threads = ThreadPoolExecutor(thread_name_prefix="bls")
    loop, context = asyncio.get_running_loop(), copy_context()  # it knows whom the call is for
    return await loop.run_in_executor(bls.threads, context.run, work, *arguments)


def channel_of_models() -> BlsChannel:
    """Return the channel to other models. Raises TritonModelException while the model loads."""
    line = bls.of_thread.line or bls.line
    if line is None:
        raise TritonModelException("other models can be called from execute() only")
    return line


def _read_parameters(given: Mapping[str, Any] | str | None) -> dict[str, Any]:
    parameters = json.loads(given) if isinstance(given, str) and given else dict(given or {})
    for name, value in parameters.items():
        if not isinstance(value, str | int | float):
            raise TritonModelException(f"parameter '{name}' must be a string, a number or a bool")
    return parameters
