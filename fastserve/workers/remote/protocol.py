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

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from fastserve._ext.remote_batches import MessageKind, ProtocolFault, WireMessage

BODY_BYTES = 16 << 20  # of a JSON body: a model's config may have 20,000 class labels
PIECE_BYTES = 1 << 20  # of a file in one message
T = TypeVar("T")


def receive_frames(socket: Any, flags: int) -> list[Any]:
    """Receive the frames of a message, lent and not copied. Raises what the socket raises when none is
    there."""
    frame = socket.recv(flags, copy=False)
    frames = [frame.buffer]
    while frame.more:
        frame = socket.recv(flags, copy=False)
        frames.append(frame.buffer)
    return frames


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


def sendable_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a version's config as its remote workers get it: one instance, and no placement."""
    return {**config, "instances": 1, "placement": None}
