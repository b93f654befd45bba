from typing import Any

class StreamFields:
    connection: Any
    head: Any
    state: Any
    context: Any
    inlet: Any
    outbox: Any
    id: int
    window: int
    def __init__(self, connection: Any, number: int, head: Any, state: Any) -> None: ...

class CallFields:
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
    def __init__(self, head: Any, stream: Any) -> None: ...
