"""TLS below HTTP/1.1, HTTP/2 and gRPC: a transport that encrypts takes the place of the socket's.

    socket --> Handshake: hello, ALPN, handshake --> TlsTransport <--> Http1Connection, Http2Connection

`credentials` has the certificates, `handshake` a connection until it is open, `transport` from then on.
"""

from fastserve.net.tls.credentials import Credentials
from fastserve.net.tls.transport import TlsPort

__all__ = ["Credentials", "TlsPort"]
