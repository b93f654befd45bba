"""What RPCs of every dialect have in common: messages of the protobuf library's, and their answers.

Imported where a listener speaks gRPC, and nowhere else: HTTP needs neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from fastserve.errors import ServeError
from fastserve.serving.slow_path import SlowRequest, answer_slowly
from fastserve.wire.grpc import Awaited


async def answer_rpc(received_ns: int, make: Callable[[Awaited], SlowRequest]) -> bytes:
    """What answers an RPC whose method is a coroutine, by the general path: `make` gives the request, for the
    exchange it is answered by. Raises ServeError."""
    exchange = Awaited(received_ns)
    await answer_slowly(exchange, make(exchange))
    return await exchange.answer()


def parse_message(kind: Any, wrong: Callable[[str], ServeError], data: bytes) -> Any:
    """A message of the protobuf library's, of the class `kind`. Raises what `wrong` makes of the text."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise wrong(f"malformed {kind.DESCRIPTOR.name}") from None


def serialize(message: Any) -> bytes:
    """The way back."""
    data: bytes = message.SerializeToString()
    return data
