"""HTTP/1.1 (RFC 9112): the parser of requests, the connection, and large bodies read into their place."""
