"""HTTP/2 (RFC 9113) on the event loop. Knows streams, not what they carry: see stream.Service.

connection.py is the place to begin; docs/wire-http2.md has the picture.
"""

from fastserve.wire.http2.connection import Http2Connection
from fastserve.wire.http2.errors import ErrorCode
from fastserve.wire.http2.stream import Finder, Piece, Service, Stream

__all__ = ["ErrorCode", "Finder", "Http2Connection", "Piece", "Service", "Stream"]
