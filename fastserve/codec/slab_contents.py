"""Contents of a slab: the tensors of a request or answer, the notes beside them, references to GPU memory.

    b"" or msgpack of a note's fields      most requests have no note
    [[[number of the input, handle, device, offset, bytes, region], ...], [outputs alike]]      LentNote

A note is for backends that see requests one by one; others never read it. `extra` names tensors that the
model does not declare (control inputs of a sequence, its states): the slab numbers them after the declared
ones. Rows that a LentNote names lie in a client's device memory, from and to which the worker copies them.

The layout is in ext/include/slab_tensors.h, and `_ext.slab_tensors` reads and writes it. An entry has its
tensor's number in the model's order of inputs or outputs. Reading checks every number against the slab's
size: the other process is not trusted with this one's memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fastserve._ext import slab_tensors
from fastserve._ext.slab_tensors import read_note
from fastserve.tensor import DTYPE_BY_CODE, Tensor

Scalar = str | int | float | bool


class RequestNote(msgspec.Struct, omit_defaults=True, gc=False):
    """Properties of a request besides its tensors. `flags`: 1 starts a sequence, 2 ends it."""

    request_id: str = msgspec.field(name="i", default="")
    sequence_id: int | str = msgspec.field(name="s", default=0)
    flags: int = msgspec.field(name="f", default=0)
    timeout_us: int = msgspec.field(name="t", default=0)
    priority: int = msgspec.field(name="p", default=0)
    parameters: dict[str, Scalar] = msgspec.field(name="a", default_factory=dict)
    outputs: list[str] = msgspec.field(name="o", default_factory=list)
    extra: list[str] = msgspec.field(name="x", default_factory=list)
    # For calls from one model to another, which name their tensors themselves.
    model: str = msgspec.field(name="m", default="")
    version: int = msgspec.field(name="v", default=-1)
    trace: tuple[str, str] | None = msgspec.field(name="c", default=None)
    """traceparent and tracestate of the span that the call is part of."""


class AnswerNote(msgspec.Struct, omit_defaults=True, gc=False):
    """Properties of an answer besides its outputs, or an error in their place."""

    parameters: dict[str, Scalar] = msgspec.field(name="a", default_factory=dict)
    extra: list[str] = msgspec.field(name="x", default_factory=list)
    kind: int = msgspec.field(name="k", default=0)
    message: str = msgspec.field(name="e", default="")


_encode_note = msgspec.msgpack.Encoder().encode
_read_request = msgspec.msgpack.Decoder(RequestNote).decode
_read_answer = msgspec.msgpack.Decoder(AnswerNote).decode
_NOTHING = b"\x80"


def write_note(note: RequestNote | AnswerNote) -> bytes:
    """Return a note's bytes, b"" when every field has its default.

    Raises TypeError or ValueError for a parameter that is no scalar.
    """
    data = _encode_note(note)
    return b"" if data == _NOTHING else data


def read_request_note(data: memoryview | bytes) -> RequestNote:
    """Return the note of a request. Raises ValueError."""
    return _read_request(data) if len(data) else RequestNote()


def read_answer_note(data: memoryview | bytes) -> AnswerNote:
    """Return the note of an answer. Raises ValueError."""
    return _read_answer(data) if len(data) else AnswerNote()


LentTensor = tuple[int, bytes, int, int, int, str]
"""A tensor's number in the model's order; handle, device, offset and bytes; the region's name for errors."""


class LentNote(msgspec.Struct, array_like=True):
    """References to device memory of one request."""

    inputs: list[LentTensor]
    outputs: list[LentTensor]


_encode_lent = msgspec.msgpack.Encoder().encode
_decode_lent = msgspec.msgpack.Decoder(LentNote).decode


def write_lent(note: LentNote) -> bytes:
    """Return the bytes of a note."""
    return _encode_lent(note)


def read_lent(data: memoryview | bytes) -> LentNote:
    """Return a note. Raises ValueError."""
    return _decode_lent(data)


__all__ = [
    "measure_tensors",
    "read_note",
    "read_tensors",
    "write_tensors",
]

Numbered = Sequence[tuple[int, Tensor]]


def measure_tensors(tensors: Numbered, note: bytes = b"") -> int:
    """Return the bytes a slab needs for numbered tensors and a note. Raises ValueError for over 16 axes."""
    return slab_tensors.measure([(n, t.dtype.code, t.shape, t.data) for n, t in tensors], note)


def write_tensors(slab: memoryview, tensors: Numbered, note: bytes = b"") -> None:
    """Fill a slab of at least measure_tensors() bytes; the note is at its very end.

    Raises ValueError for more than 16 axes.
    """
    slab_tensors.write(slab, [(n, t.dtype.code, t.shape, t.data) for n, t in tensors], note)


def read_tensors(slab: memoryview) -> list[tuple[int, Tensor]]:
    """Return the numbered tensors of a slab, as views of it. Raises ValueError."""
    return [(n, Tensor(DTYPE_BY_CODE[code], shape, data)) for n, code, shape, data in slab_tensors.read(slab)]
