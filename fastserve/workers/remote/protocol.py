"""The messages between a remote runner and its remote workers, and nothing of sockets.

    runner                                              remote worker
      | <-- HELLO {fastserve, protocol, node, loaded} ----|      anew after every loss of the connection
      | --- WELCOME {model, config, files ...} ---------->|      or REFUSED {reason}
      | <-- FETCH {file, at}      DATA, raw bytes ------->|      the version's files, unless they are cached
      | <-- LOADED {inputs, outputs} ---------------------|      or FAILED {message, kind}
      | --- GO {dense} ---------------------------------->|      the form of the arena is known
      | <-- READY ----------------------------------------|      warm; or FAILED
      | --- BATCH ------------------ ANSWER ------------->|      several on their way at a time
      | --- PING                     PONG --------------->|
      | --- BYE {reason} -------------------------------->|      start over with HELLO, or end

A message is a header of 48 bytes, a table, the lengths of its parts, and the parts. Bodies of rare messages
are a part of JSON; tensors lie in their parts as they lie in the arena. Nothing is pickled.

    magic 4 | protocol 2 | kind 2 | batch 8 | rows 4 | entries 4 | word 4 | parts 4 | bytes 8 | ran_ns 8
    table: entries x 2 x 4 | lengths: parts x 8
    BATCH    table: (first row, rows)     parts: a column each, or a slab for each entry
    ANSWER   table: (first row, status)   parts: columns, then a text for each entry      of columns
             table: (first row, status)   parts: a slab or a text for each entry          of slabs
             word: status                 part: text                                      the batch failed

`word` is the milliseconds that a batch has, or the status of an answer. The number of a batch has the low
half of its slot's generation, the slot, and how often it was sent. Large parts are frames of their own, which
are not copied. Small messages lie in one frame with all they have, and one behind the other where several
are sent at a time: under load a send, a wake-up of libzmq's thread and one of the other side's serve many.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any, TypeVar

import msgspec

MAGIC = b"FSRW"
PROTOCOL = 2
_HEADER = struct.Struct("<4sHHQIIIIQQ")
HEADER_BYTES = _HEADER.size
_ENTRY_BYTES, _LENGTH_BYTES = 8, 8
MOST_PARTS = 1 << 16
MOST_JOINED = 64  # messages in one frame
BODY_BYTES = 16 << 20  # of a JSON body: a model's config may have 20,000 class labels
PIECE_BYTES = 1 << 20  # of a file in one message
COPIED_BYTES = 65536  # parts up to this size together are copied into their message's frame
T = TypeVar("T")


class ProtocolFault(Exception):
    """The other side has sent a message that breaks the rules above."""


class MessageKind(IntEnum):
    """The kinds of messages."""

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    FETCH = 4
    DATA = 5
    LOADED = 6
    GO = 7
    READY = 8
    BATCH = 9
    ANSWER = 10
    PING = 11
    PONG = 12
    BYE = 13
    FAILED = 14


_KINDS = {kind.value: kind for kind in MessageKind}  # an enum's own look-up takes a microsecond


@dataclass(slots=True)
class WireMessage:
    """One message. Parts that were received lie in the frames that brought them."""

    kind: MessageKind
    batch: int = 0
    rows: int = 0
    word: int = 0
    ran_ns: int = 0
    table: Sequence[tuple[int, int]] = ()
    parts: Sequence[Any] = ()

    def pack(self) -> list[Any]:
        """Return its frames."""
        parts, table = self.parts, self.table
        lengths = [len(part) for part in parts]
        nbytes, entries, count = sum(lengths), len(table), len(lengths)
        numbers = [number for entry in table for number in entry]
        head = struct.pack(
            f"<4sHHQIIIIQQ{2 * entries}I{count}Q",
            *(MAGIC, PROTOCOL, self.kind, self.batch, self.rows, entries, self.word, count),
            *(nbytes, self.ran_ns, *numbers, *lengths),
        )
        return [b"".join((head, *parts))] if nbytes < COPIED_BYTES else [head, *parts]


def read_messages(frames: Sequence[Any]) -> list[WireMessage]:
    """Read the messages that have come in these frames, one or more. Raises ProtocolFault."""
    head, apart, at = frames[0], frames[1:], 0
    end, found = len(head), list[WireMessage]()
    while at < end or not found:
        if end - at < HEADER_BYTES or len(found) == MOST_JOINED:
            raise ProtocolFault(
                f"a header of {end - at} bytes instead of {HEADER_BYTES}"
                if len(found) < MOST_JOINED
                else f"more than {MOST_JOINED} messages in one frame"
            )
        fields = _HEADER.unpack_from(head, at)
        magic, protocol, number, batch, rows, entries, word, parts, nbytes, ran_ns = fields
        kind, at = _KINDS.get(number), at + HEADER_BYTES
        if magic != MAGIC or protocol != PROTOCOL or kind is None or parts > MOST_PARTS:
            raise _explain(magic, protocol, number, parts)
        behind = at + entries * _ENTRY_BYTES + parts * _LENGTH_BYTES
        if behind > end:
            raise ProtocolFault(f"a table of {entries} entries and {parts} lengths in {end - at} bytes")
        numbers = struct.unpack_from(f"<{2 * entries}I{parts}Q", head, at)
        lengths, at = numbers[2 * entries :], behind
        if sum(lengths) != nbytes:
            raise ProtocolFault(f"{sum(lengths)} bytes of parts where {nbytes} were announced")
        pieces: Sequence[Any] = apart
        if not apart:
            pieces = []
            for length in lengths:
                pieces.append(head[at : at + length])
                at += length
        if at != end if apart else at > end:
            raise ProtocolFault("a message that is longer or shorter than was announced")
        if apart and [len(part) for part in apart] != list(lengths):
            raise ProtocolFault("frames of other lengths than were announced")
        table = list(zip(numbers[0 : 2 * entries : 2], numbers[1 : 2 * entries : 2], strict=True))
        found.append(WireMessage(kind, batch, rows, word, ran_ns, table, pieces))
    return found


def _explain(magic: bytes, protocol: int, kind: int, parts: int) -> ProtocolFault:
    """Say what is wrong about a header."""
    if magic != MAGIC:
        return ProtocolFault("a message that does not begin as one of fastserve's")
    if protocol != PROTOCOL:
        return ProtocolFault(f"a message of protocol {protocol}; protocol {PROTOCOL} is spoken here")
    return ProtocolFault(f"a message of kind {kind} and {parts} parts, which is none")


def receive_frames(socket: Any, flags: int) -> list[Any]:
    """Receive the frames of a message, lent and not copied. Raises what the socket raises when none is
    there."""
    frame = socket.recv(flags, copy=False)
    frames = [frame.buffer]
    while frame.more:
        frame = socket.recv(flags, copy=False)
        frames.append(frame.buffer)
    return frames


def read_protocol(frame: Any) -> int:
    """Return the protocol of a frame that may be of another version, 0 where it is no header."""
    if len(frame) < 6 or bytes(frame[:4]) != MAGIC:
        return 0
    return int.from_bytes(bytes(frame[4:6]), "little")


class Hello(msgspec.Struct, forbid_unknown_fields=False):
    """A remote worker's description of itself."""

    fastserve: Annotated[str, msgspec.Meta(max_length=64)]
    protocol: int
    node: Annotated[str, msgspec.Meta(max_length=256)]
    pid: int
    loaded: Annotated[str, msgspec.Meta(max_length=128)] = ""
    """The key of the version that it has loaded already, for a former connection."""
    place: int = 0
    """The number that the runner gave it when it had it started; 0: it came by itself."""


class Welcome(msgspec.Struct):
    """The version that a remote worker is to run."""

    key: str
    """Changes whenever the version's files or config do."""
    name: str
    version: str
    config: dict[str, Any]
    files: str
    """The hash of the version's files; "" where they lie at `path` for both."""
    path: str
    heartbeat_s: float
    most_bytes: int
    """Of an answer."""
    instance: int


class FileRequest(msgspec.Struct):
    """A question for the list of files, or for a piece of one."""

    file: Annotated[int, msgspec.Meta(ge=-1)]
    """The number of a file; -1: the list."""
    at: Annotated[int, msgspec.Meta(ge=0)] = 0


class LoadedModel(msgspec.Struct):
    """The tensors of a loaded version."""

    inputs: dict[str, dict[str, Any]]
    outputs: dict[str, dict[str, Any]]
    signatures: dict[str, dict[str, Any]] = {}


class Failure(msgspec.Struct):
    """Why a version could not be loaded or warmed up."""

    message: Annotated[str, msgspec.Meta(max_length=65536)]
    kind: int
    trace: Annotated[str, msgspec.Meta(max_length=1 << 20)] = ""


class Go(msgspec.Struct):
    """The form of the arena."""

    dense: bool


class Words(msgspec.Struct):
    """A reason, for logs."""

    reason: Annotated[str, msgspec.Meta(max_length=65536)]


def pack_message(kind: MessageKind, body: msgspec.Struct | None = None) -> list[Any]:
    """Return the frames of a message that is not about a batch."""
    return WireMessage(kind, parts=() if body is None else (msgspec.json.encode(body),)).pack()


def read_body(message: WireMessage, kind: type[T]) -> T:
    """Read the JSON body of a message. Raises ProtocolFault."""
    if len(message.parts) != 1 or len(message.parts[0]) > BODY_BYTES:
        raise ProtocolFault("a message without its body, or with a body that is too long")
    try:
        return msgspec.json.decode(bytes(message.parts[0]), type=kind)
    except (msgspec.MsgspecError, RecursionError, ValueError) as fault:
        raise ProtocolFault(f"a body that is no {kind.__name__}") from fault


def batch_number(generation: int, slot: int, attempt: int) -> int:
    """Return the number under which a batch is sent, and answered."""
    return (generation & 0xFFFF_FFFF) << 32 | (slot & 0xFFFF) << 16 | attempt & 0xFFFF


def sendable_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a version's config as its remote workers get it: one instance, and no placement."""
    return {**config, "instances": 1, "placement": None}
