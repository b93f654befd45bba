"""Helpers of RPCs in every dialect: messages of the protobuf library, and their answers.

Imported only where a listener speaks gRPC.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from fastserve._ext.proto_wire import MOST_ENTRIES, Fault, WireFault
from fastserve.errors import ServeError, invalid
from fastserve.net.grpc import AwaitedExchange
from fastserve.serving.slow_path import SlowRequest, answer_slowly

T = TypeVar("T")


async def answer_rpc(received_ns: int, make: Callable[[AwaitedExchange], SlowRequest]) -> bytes:
    """Answer an RPC whose method is a coroutine, by the general path: `make` gives the request, for the
    exchange it is answered by. Raises ServeError."""
    exchange = AwaitedExchange(received_ns)
    await answer_slowly(exchange, make(exchange))
    return await exchange.answer()


def parse_message(kind: Any, wrong: Callable[[str], ServeError], data: bytes) -> Any:
    """A message of the protobuf library's, of the class `kind`. Raises what `wrong` makes of the text."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise wrong(f"malformed {kind.DESCRIPTOR.name}") from None


def read_in_place(
    read: Callable[[bytes], T], data: bytes, name: str, parts: str, refuse: Callable[[str], ServeError]
) -> T:
    """A message that is read where it lies, by one of the compiled readers: these bound its `parts`. Raises
    ServeError; `refuse` makes the one for bytes that are no message of this `name`."""
    try:
        return read(data)
    except WireFault as fault:
        if fault.code is Fault.TOO_MANY:
            text = f"{name}: at most {MOST_ENTRIES} {parts} are read, more begin at byte {fault.offset}"
            raise invalid(text) from None
        raise refuse(f"malformed {name}: {fault}") from None


def serialize(message: Any) -> bytes:
    """The way back."""
    data: bytes = message.SerializeToString()
    return data
