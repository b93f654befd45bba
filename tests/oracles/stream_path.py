"""fastserve._ext.stream_path in plain Python."""

from __future__ import annotations

from typing import Any


class StreamPath:
    """See the compiled one."""

    def __init__(self, call: Any, connection: Any, head: bytes, chunked: bool, silent: bool) -> None:
        self._call, self._connection, self._head = call, connection, head
        self._chunked, self._silent, self._closed = chunked, silent, False
        self.sent_bytes = 0

    @property
    def ready(self) -> bool:
        return not self._closed and not self._call.gone and self._may_send()

    def send(self, data: bytes) -> None:
        self.sent_bytes += len(data)
        self._send_piece(data)

    def _may_send(self) -> bool:
        return self._connection._current is self._call and not self._connection._choked

    def _send_piece(self, data: bytes) -> None:
        framed = b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data
        if not data or self._silent:
            framed = b""
        head, self._head = self._head, b""
        if head or framed:
            self._connection._transport.write(head + framed)
