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

A message is a header of 48 bytes and parts behind it, one frame each. Bodies of rare messages are JSON;
tensors lie in frames of their own as they lie in the arena. Nothing is pickled.

    magic 4 | protocol 2 | kind 2 | batch 8 | rows 4 | entries 4 | word 4 | parts 4 | bytes 8 | ran_ns 8
    BATCH    header | table: entries x (first row, rows) | a column each, or a slab for each entry
    ANSWER   header | table: entries x (first row, status) | columns | a text for each entry      of columns
             header | table: entries x (first row, status) | a slab or a text for each entry      of slabs
             header, word: status | text                                              the batch failed

`word` is the milliseconds that a batch has, or the status of an answer; `bytes` are those of all parts
behind the
table. The number of a batch has the low half of its slot's generation, the slot, and how often it was sent.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any, TypeVar

import msgspec

MAGIC = b"FSRW"
PROTOCOL = 1
_HEADER = struct.Struct("<4sHHQIIIIQQ")
HEADER_BYTES = _HEADER.size
ENTRY = struct.Struct("<II")
MOST_PARTS = 1 << 16
BODY_BYTES = 16 << 20  # of a JSON body: a model's config may have 20,000 class labels
PIECE_BYTES = 1 << 20  # of a file in one message
COPIED_BYTES = 65536  # a message up to this size is copied on its way into a socket and out of it
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


@dataclass(slots=True)
class Header:
    """The first frame of a message."""

    kind: MessageKind
    batch: int = 0
    rows: int = 0
    entries: int = 0
    word: int = 0
    parts: int = 0
    nbytes: int = 0
    ran_ns: int = 0

    def pack(self) -> bytes:
        """Return the frame."""
        return _HEADER.pack(
            *(MAGIC, PROTOCOL, self.kind, self.batch, self.rows, self.entries, self.word, self.parts),
            *(self.nbytes, self.ran_ns),
        )


def read_header(frame: Any) -> Header:
    """Read a message's first frame. Raises ProtocolFault."""
    if len(frame) != HEADER_BYTES:
        raise ProtocolFault(f"a header of {len(frame)} bytes instead of {HEADER_BYTES}")
    magic, protocol, kind, batch, rows, entries, word, parts, nbytes, ran_ns = _HEADER.unpack(frame)
    if magic != MAGIC:
        raise ProtocolFault("a message that does not begin as one of fastserve's")
    if protocol != PROTOCOL:
        raise ProtocolFault(f"a message of protocol {protocol}; protocol {PROTOCOL} is spoken here")
    if kind not in MessageKind._value2member_map_:
        raise ProtocolFault(f"a message of unknown kind {kind}")
    return Header(MessageKind(kind), batch, rows, entries, word, parts, nbytes, ran_ns)


def receive_parts(socket: Any, flags: int, more: int) -> list[Any]:
    """Receive the frames of a message, header first. Raises what the socket raises when none is there. Frames
    of small messages are copied, which costs less than to lend them; `more` is zmq.RCVMORE."""
    parts = [socket.recv(flags)]
    head = parts[0]
    copy = len(head) != HEADER_BYTES or int.from_bytes(head[32:40], "little") < COPIED_BYTES
    while socket.getsockopt(more):
        parts.append(socket.recv(flags) if copy else socket.recv(flags, copy=False).buffer)
    return parts


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


def pack_message(kind: MessageKind, body: msgspec.Struct | None = None) -> list[bytes]:
    """Return the frames of a message that is not about a batch."""
    if body is None:
        return [Header(kind).pack()]
    data = msgspec.json.encode(body)
    return [Header(kind, parts=1, nbytes=len(data)).pack(), data]


def read_body(frames: Sequence[Any], kind: type[T]) -> T:
    """Read the JSON body behind a header. Raises ProtocolFault."""
    if len(frames) != 2 or len(frames[1]) > BODY_BYTES:
        raise ProtocolFault("a message without its body, or with a body that is too long")
    try:
        return msgspec.json.decode(bytes(frames[1]), type=kind)
    except (msgspec.MsgspecError, RecursionError, ValueError) as fault:
        raise ProtocolFault(f"a body that is no {kind.__name__}") from fault


def read_table(header: Header, frames: Sequence[Any]) -> list[tuple[int, int]]:
    """Read the table of a BATCH or an ANSWER, having checked the number of its frames and their bytes. Raises
    ProtocolFault."""
    if header.parts > MOST_PARTS or len(frames) != 2 + header.parts:
        raise ProtocolFault(f"{len(frames)} frames where {2 + header.parts} were announced")
    if len(frames[1]) != header.entries * ENTRY.size:
        raise ProtocolFault(f"a table of {len(frames[1])} bytes for {header.entries} entries")
    nbytes = sum(map(len, frames[2:]))
    if nbytes != header.nbytes:
        raise ProtocolFault(f"{nbytes} bytes of parts where {header.nbytes} were announced")
    return [(first, second) for first, second in ENTRY.iter_unpack(frames[1])]


def pack_table(entries: Sequence[tuple[int, int]]) -> bytes:
    """Return the table's frame."""
    return b"".join(ENTRY.pack(first, second) for first, second in entries)


def batch_number(generation: int, slot: int, attempt: int) -> int:
    """Return the number under which a batch is sent, and answered."""
    return (generation & 0xFFFF_FFFF) << 32 | (slot & 0xFFFF) << 16 | attempt & 0xFFFF


def sendable_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a version's config as its remote workers get it: one instance, and no placement."""
    return {**config, "instances": 1, "placement": None}
