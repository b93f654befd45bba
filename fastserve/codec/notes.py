"""What travels beside the tensors of a slab: a request's own words, and an answer's.

    b"" or msgpack of a Note's fields      nearly every request has nothing to say, and says it with nothing

A note is for backends that see requests one by one (workers/requests.py); others never look at it.
`extra` names tensors that the model does not declare (control inputs of a sequence, its states): the
slab numbers them on after the declared ones.
"""

from __future__ import annotations

import msgspec

Scalar = str | int | float | bool


class RequestNote(msgspec.Struct, omit_defaults=True, gc=False):
    """What a model may ask of a request besides its tensors. `flags`: 1 starts a sequence, 2 ends it."""

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


class AnswerNote(msgspec.Struct, omit_defaults=True, gc=False):
    """What comes with the outputs: parameters, names of outputs not declared, or an error in their place."""

    parameters: dict[str, Scalar] = msgspec.field(name="a", default_factory=dict)
    extra: list[str] = msgspec.field(name="x", default_factory=list)
    kind: int = msgspec.field(name="k", default=0)
    message: str = msgspec.field(name="e", default="")


_encode = msgspec.msgpack.Encoder().encode
_read_request = msgspec.msgpack.Decoder(RequestNote).decode
_read_answer = msgspec.msgpack.Decoder(AnswerNote).decode
_NOTHING = b"\x80"


def write_note(note: RequestNote | AnswerNote) -> bytes:
    """The note's bytes, none when every field has its default. Raises TypeError or ValueError for a
    parameter that is no scalar."""
    data = _encode(note)
    return b"" if data == _NOTHING else data


def read_request_note(data: memoryview | bytes) -> RequestNote:
    """Raises ValueError when these bytes are none."""
    return _read_request(data) if len(data) else RequestNote()


def read_answer_note(data: memoryview | bytes) -> AnswerNote:
    """Raises ValueError when these bytes are none."""
    return _read_answer(data) if len(data) else AnswerNote()
