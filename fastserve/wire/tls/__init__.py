"""TLS below HTTP/1.1, HTTP/2 and gRPC: what they take for the transport of a socket encrypts.

    socket --> Handshake: hello, ALPN, handshake --> TlsTransport <--> Connection, Http2Connection

`credentials` is where certificates come from, `hello` reads what a client offers before OpenSSL sees it,
`handshake` is a connection until it is open, `transport` from then on, `port` what a listener's share.
"""

from fastserve.wire.tls.credentials import Credentials
from fastserve.wire.tls.port import TlsPort

__all__ = ["Credentials", "TlsPort"]
