import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import Buffer

class StreamFields:
    connection: Any
    head: Any
    state: Any
    context: Any
    inlet: Any
    outbox: Any
    id: int
    window: int
    held: int
    def __init__(self, connection: Http2Path, number: int, head: Any, state: Any) -> None: ...

class Http2Path:
    blocks: dict[bytes, Any]
    streams: dict[int, Any]
    last: int
    _stop: int
    _most: int
    _most_queued: int
    sending: Any
    client_window: int
    over: bool
    _ended: bool
    _reader: Any
    _scratch: bytearray
    _sip: memoryview | None
    arriving: Any
    backlog: Any
    _transport: asyncio.Transport
    _lifetime: Any
    _half: Any
    _out: list[Any] | None
    _credit: int
    _low: int
    _abuse_budget: int
    held: int
    _most_held: int
    _least_held: int
    _served: int
    _leaving: int
    def __init__(
        self,
        terms: tuple[int, int, int, Any, Any, type[StreamFields]],
        stop: int,
        most: int,
        most_queued: int,
    ) -> None: ...
    def spend_window(self, counted: int) -> None: ...
    def hold(self, stream: StreamFields, nbytes: int) -> bool: ...
    def release_bytes(self, stream: StreamFields, nbytes: int) -> None: ...
    def request(self, number: int, block: bytes, body: bytes) -> None: ...
    def get_buffer(self, sizehint: int) -> bytearray | memoryview: ...
    def buffer_updated(self, nbytes: int) -> None: ...
    def go_on(self, events: list[Any], data: Buffer) -> None: ...
    def sent_end(self, stream: Any) -> None: ...

class SendingPath:
    window: int
    queued: int
    choked: bool
    _prefix: bytes
    _connection: Any
    def __init__(self, connection: Any, window: int) -> None: ...
    def reply(self, stream: Any, block: bytes, body: bytes, trailers: bytes) -> None: ...

class CallsPath:
    running: int
    most_at_once: int
    plain_bytes: int
    most_bytes: int
    deadlines: Any
    opening: Any
    logged: bool
    epoch: int
    def __init__(self, terms: tuple[bytes, bytes, Any, type[CallPath]]) -> None: ...

class HeadPath:
    calls: Any
    start: Callable[[bytes, Any], bool] | None
    count: Callable[[], object] | None
    timeout_ns: int
    usage: Any
    ordinary: bool
    takes_stream: bool
    epoch: int
    def answer(self, stream: StreamFields, body: bytes) -> None: ...

class CallPath:
    head: Any
    stream: Any
    on_gone: Any
    received_ns: int
    deadline_ns: int
    over: bool
    sent_bytes: int
    begun: bool
    coding: bytes
    trailing: Any
    writable: Any
    def __init__(self, head: HeadPath, stream: StreamFields) -> None: ...
    def begin(self, message: bytes, compressed: bool) -> None: ...
    def reply(self, message: bytes | Sequence[bytes]) -> None: ...
    def settle(self, code: int) -> None: ...
