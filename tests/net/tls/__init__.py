"""TLS below the wire: first bytes, handshakes, the transport that encrypts, certificates."""
