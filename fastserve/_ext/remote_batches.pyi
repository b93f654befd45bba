from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from fastserve._ext.batch_ring import BatchRing

PROTOCOL: int
MOST_PARTS: int
MOST_JOINED: int
COPIED_BYTES: int
HEADER_BYTES: int
AHEAD_S: float
MOST_AHEAD: int
FEW: int
_Part = bytes | bytearray | memoryview

class ProtocolFault(Exception): ...

class MessageKind(IntEnum):
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
    WAITING = 15

class WireMessage:
    batch: int
    rows: int
    word: int
    ran_ns: int
    table: Sequence[tuple[int, int]]
    parts: Sequence[_Part]
    def __init__(
        self,
        kind: MessageKind,
        batch: int = 0,
        rows: int = 0,
        word: int = 0,
        ran_ns: int = 0,
        table: Sequence[tuple[int, int]] = (),
        parts: Sequence[_Part] = (),
    ) -> None: ...
    @property
    def kind(self) -> MessageKind: ...
    def pack(self) -> list[_Part]: ...

def read_messages(frames: Sequence[_Part]) -> list[WireMessage]: ...
def read_protocol(frame: _Part) -> int: ...

class RemoteBatch:
    sent_s: float
    requests: int
    def __init__(self, number: int, slot: int, attempt: int, sent_s: float, requests: int) -> None: ...
    @property
    def number(self) -> int: ...
    @property
    def slot(self) -> int: ...
    @property
    def attempt(self) -> int: ...

class RemotePeer:
    state: Any
    model: Any
    heard_s: float
    head_s: float
    run_s: float
    batches: int
    flights: dict[int, RemoteBatch]
    joined: list[bytes]
    joined_bytes: int
    def __init__(
        self, identity: bytes, instance: int, name: str, node: str, place: int, state: Any, heard_s: float
    ) -> None: ...
    @property
    def identity(self) -> bytes: ...
    @property
    def instance(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def node(self) -> str: ...
    @property
    def place(self) -> int: ...

class SlotColumns:
    def __init__(
        self, ring: BatchRing, memory: memoryview, inputs: int, outputs: int, *, dense: bool
    ) -> None: ...
    def close(self) -> None: ...

class OutgoingBatches(SlotColumns):
    flying: int
    rows: int
    def __init__(
        self,
        ring: BatchRing,
        memory: memoryview,
        inputs: int,
        outputs: int,
        *,
        dense: bool,
        connections: Any,
        notes: tuple[Any, int, int, int],
        in_flight: int,
        limit_ms: int,
        lost_status: int,
    ) -> None: ...
    def choose(self, ready: list[RemotePeer]) -> RemotePeer | None: ...
    def take(self, ready: list[RemotePeer]) -> bool: ...
    def send(self, slot: int, attempt: int, peer: RemotePeer) -> None: ...
    def land(self, peer: RemotePeer, answer: WireMessage) -> None: ...

class IncomingBatches(SlotColumns):
    @property
    def notes(self) -> _Part: ...
    def put(self, batch: WireMessage) -> list[tuple[int, int]]: ...
    def collect(self, batch: WireMessage, slot: int, leases: list[tuple[int, int]]) -> list[_Part]: ...
