"""The ways over HTTP/1.1 whose bodies are tensors' bytes, read by the fast path out of the socket itself.

What is large by rights is small here: a head is read byte by byte, and one byte of tensors, whose rest is
still in the socket then, in bodies of any size.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from fastserve.dialects.kserve.http_infer import HEADER_LENGTH
from fastserve.net.http1.connection import BODY, Http1Connection
from fastserve.net.http1.large_bodies import ShortReads
from tests.conformance.grps_ways import GrpsBytes
from tests.conformance.ways import HttpLine, HttpWay, RestRaw, V1Http, V2Binary

if TYPE_CHECKING:
    from tests.conformance.rig import Rig


NOT_CACHED = ("columns", "slabs", "whole")  # the cache asks for the bytes again: one way is enough for that


class Bites(ShortReads):
    """Reads so, for good."""

    def get_buffer(self, sizehint: int) -> bytearray:
        head = self._connection._head if self._connection._state == BODY else None
        told = None if head is None else head.find(HEADER_LENGTH)  # V2: so much JSON comes before tensors
        self._buffer = bytearray(1 + int(told or 0))
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._connection.data_received(bytes(self._buffer[:nbytes]))


class Arriving(HttpWay):
    """Over a connection that is read so."""

    async def connect(self, rig: Rig) -> HttpLine:
        reader, writer = await asyncio.open_connection(*rig.http)
        here = writer.get_extra_info("sockname")
        await rig.until(lambda: rig.connection_from(here) is not None)
        connection = rig.connection_from(here)
        assert isinstance(connection, Http1Connection)
        transport: Any = connection._transport
        transport.set_protocol(Bites(connection, transport))
        return HttpLine(self, rig, reader, writer)


class RestRawArriving(Arriving, RestRaw):
    name = "tfserving-raw-arriving"


class V2BinaryArriving(Arriving, V2Binary):
    name, forms = "v2-binary-arriving", NOT_CACHED


class V1Arriving(Arriving, V1Http):
    name, forms = "v1-http-arriving", NOT_CACHED


class GrpsBytesArriving(Arriving, GrpsBytes):
    name, forms = "grps-bytes-arriving", ("columns", "whole")


ARRIVING_WAYS = (
    RestRawArriving(),
    V2BinaryArriving(),
    V1Arriving(),
    GrpsBytesArriving(),
)
