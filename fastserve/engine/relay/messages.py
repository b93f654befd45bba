"""Requests, responses and errors as they lie in a relay channel: a head in msgpack, then the tensors' bytes.

    | head bytes 4 | head | ... | tensor 0 | ... | tensor 1 | ...        each tensor at a multiple of 64

Nothing is pickled, and no tensor is copied on its way out: readers get views, valid until the memory is
released."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from fastserve._ext.fast_path import Account
from fastserve.engine.relay.channel import Parts
from fastserve.errors import DeadlineError, Kind, ModelError, Reason, ServeError, invalid
from fastserve.request import InferRequest, InferResponse, by_name
from fastserve.tensor import DTYPE_BY_CODE, Tensor
from fastserve.util.tracing import TraceContext

ALIGN = 64
_LENGTH_BYTES = 4
_PADS = [bytes(count) for count in range(ALIGN)]

TensorHead = tuple[str, int, tuple[int, ...], int]
"""Name, dtype code, shape and bytes of a tensor."""

Packed = tuple[Parts, int]
"""Parts of a message in order, and its size."""


class RelayedError(msgspec.Struct, array_like=True, gc=False):
    """A ServeError. `sort`: 0 any, 1 a ModelError, 2 a DeadlineError before it ran, 3 one later."""

    sort: int
    kind: int
    reason: int
    message: str
    retry_after_s: float | None
    step: RelayedError | None


class RelayedRequest(msgspec.Struct, array_like=True, gc=False):
    """A request without its tensors' bytes. `version` is the owner's id of it; `flags`: 1 starts a
    sequence, 2 ends it, 4 asks for the times of its batch; `account` is the name of its API key, `trace` the
    context of a traced request."""

    version: int
    tensors: list[TensorHead]
    outputs: tuple[str, ...]
    request_id: str
    priority: int
    deadline_ns: int
    timeout_us: int
    sequence_id: int | str
    flags: int
    parameters: dict[str, Any]
    account: str
    trace: TraceContext | None


class RelayedReply(msgspec.Struct, array_like=True, gc=False):
    """A response without its tensors' bytes, or the error in its place."""

    tensors: list[TensorHead]
    parameters: dict[str, Any]
    times: list[int]
    error: RelayedError | None


_encode = msgspec.msgpack.Encoder().encode
_read_request = msgspec.msgpack.Decoder(RelayedRequest).decode
_read_reply = msgspec.msgpack.Decoder(RelayedReply).decode


def pack_request(version: int, request: InferRequest) -> Packed:
    """Return the parts of a request. Raises ServeError INVALID_ARGUMENT for parameters that are no plain
    values."""
    flags = request.sequence_start | request.sequence_end << 1 | (request.times is not None) << 2
    head = RelayedRequest(
        version,
        _heads_of(request.inputs.items()),
        request.outputs,
        request.request_id,
        request.priority,
        request.deadline_ns,
        request.timeout_us,
        request.sequence_id,
        flags,
        request.parameters,
        "" if request.account is None else request.account.name,
        None if request.trace is None else request.trace.context,
    )
    try:
        data = _encode(head)
    except (TypeError, ValueError, OverflowError):
        raise invalid("parameters are strings, numbers and bools") from None
    return _lay_out(data, [tensor.data for tensor in request.inputs.values()])


def unpack_request(
    memory: memoryview, find_account: Callable[[str], Account | None]
) -> tuple[int, InferRequest, TraceContext | None]:
    """Return the owner's id of the version, the request, whose tensors are views, and the context of a traced
    one. Raises ValueError."""
    data, at = _head_of(memory)
    head = _read_request(data)
    request = InferRequest(
        dict(_tensors_of(memory, at, head.tensors)),
        head.outputs,
        head.request_id,
        head.priority,
        head.deadline_ns,
        head.parameters,
        head.sequence_id,
        bool(head.flags & 1),
        bool(head.flags & 2),
        head.timeout_us,
        [] if head.flags & 4 else None,
        account=find_account(head.account) if head.account else None,
    )
    return head.version, request, head.trace


def pack_response(response: InferResponse, times: list[int] | None) -> Packed:
    """Return the parts of a response."""
    told = list(response.in_order())
    head = RelayedReply(_heads_of(told), response.parameters, times or [], None)
    return _lay_out(_encode(head), [tensor.data for _, tensor in told])


def pack_error(error: ServeError) -> Packed:
    """Return the parts of an error."""
    return _lay_out(_encode(RelayedReply([], {}, [], _write_error(error))), [])


def unpack_reply(memory: memoryview) -> tuple[InferResponse, list[int]]:
    """Return the response, whose tensors are views, and the times of its batch. Raises the ServeError that
    came in its place, or ValueError."""
    data, at = _head_of(memory)
    head = _read_reply(data)
    if head.error is not None:
        raise _read_error(head.error)
    outputs, repeated = by_name(_tensors_of(memory, at, head.tensors))
    return InferResponse(outputs, None, head.parameters, repeated=repeated), head.times


def _heads_of(tensors: Iterable[tuple[str, Tensor]]) -> list[TensorHead]:
    return [(name, tensor.dtype.code, tensor.shape, _size_of(tensor)) for name, tensor in tensors]


def _size_of(tensor: Tensor) -> int:
    return tensor.data.nbytes if isinstance(tensor.data, memoryview) else len(tensor.data)


def _lay_out(head: bytes, tensors: Iterable[bytes | bytearray | memoryview]) -> Packed:
    parts: list[bytes | bytearray | memoryview] = [len(head).to_bytes(_LENGTH_BYTES, "little"), head]
    at = _LENGTH_BYTES + len(head)
    for data in tensors:
        pad = -at % ALIGN
        parts += (_PADS[pad], data)
        at += pad + (data.nbytes if isinstance(data, memoryview) else len(data))
    return parts, at


def _head_of(memory: memoryview) -> tuple[memoryview, int]:
    end = _LENGTH_BYTES + int.from_bytes(memory[:_LENGTH_BYTES], "little")
    return memory[_LENGTH_BYTES:end], end


def _tensors_of(memory: memoryview, at: int, heads: list[TensorHead]) -> list[tuple[str, Tensor]]:
    found = []
    for name, code, shape, nbytes in heads:
        at += -at % ALIGN
        found.append((name, Tensor(DTYPE_BY_CODE[code], shape, memory[at : at + nbytes])))
        at += nbytes
    return found


def _write_error(error: ServeError) -> RelayedError:
    sort = int(isinstance(error, ModelError))
    if isinstance(error, DeadlineError):
        sort = 2 if error.queued else 3
    step = None if error.step is None else _write_error(error.step)
    message = error.message.encode("utf-8", "replace").decode()
    return RelayedError(sort, error.kind.value, error.reason.value, message, error.retry_after_s, step)


def _read_error(form: RelayedError) -> ServeError:
    kind, reason = Kind(form.kind), Reason(form.reason)
    error: ServeError
    if form.sort == 1:
        error = ModelError(kind, form.message, retry_after_s=form.retry_after_s, reason=reason)
    elif form.sort:
        error = DeadlineError(form.message, queued=form.sort == 2, reason=reason)
    else:
        error = ServeError(kind, form.message, retry_after_s=form.retry_after_s, reason=reason)
    error.step = None if form.step is None else _read_error(form.step)
    return error
