"""HTTP/2 (RFC 9113) on the event loop: `connection` is one connection, `stream` what serves its streams.

docs/wire-http2.md has the picture.
"""
