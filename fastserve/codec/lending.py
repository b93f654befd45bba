"""How a place tells its worker of a client's device memory: in a slab beside its columns, as msgpack.

    [[[number of the input, handle, device, offset, bytes], ...], [the same of outputs]]

Rows that are named here are not in the columns: the worker copies them from and to where they lie.
"""

from __future__ import annotations

import msgspec

Lent = tuple[int, bytes, int, int, int]
"""A tensor's number in the model's own order; the handle, its device, where in that memory, and how much."""


class LentNote(msgspec.Struct, array_like=True):
    """Of one request."""

    inputs: list[Lent]
    outputs: list[Lent]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(LentNote).decode


def write_lent(note: LentNote) -> bytes:
    """The bytes of the slab."""
    return _encode(note)


def read_lent(data: memoryview | bytes) -> LentNote:
    """Raises ValueError when these bytes are none."""
    return _decode(data)
