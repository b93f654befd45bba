"""Certificates for tests, made by each run: an authority, what it issues, and clients that trust it."""

from __future__ import annotations

import functools
import ssl
from pathlib import Path
from typing import Any

import trustme

from fastserve.settings.server_settings import TlsOptions


def authority(name: str = "first") -> trustme.CA:
    return _made(name)


@functools.lru_cache
def _made(name: str) -> trustme.CA:
    return trustme.CA(organization_name=name)


def issue(folder: Path, name: str = "server", ca: str = "first") -> TlsOptions:
    """A certificate for 127.0.0.1 and its key in two files; whose they are stands in its common name."""
    made = authority(ca).issue_cert("127.0.0.1", "localhost", common_name=name)
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    cert.write_bytes(b"".join(one.bytes() for one in made.cert_chain_pems))
    key.write_bytes(made.private_key_pem.bytes())
    return TlsOptions(cert=str(cert), key=str(key))


def root_file(folder: Path, ca: str = "first") -> Path:
    path = folder / f"{ca}-ca.pem"
    path.write_bytes(authority(ca).cert_pem.bytes())
    return path


def trusting(*protocols: str, ca: str = "first", **options: Any) -> ssl.SSLContext:
    """A client's context. `options` are attributes of it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority(ca).configure_trust(context)
    if protocols:
        context.set_alpn_protocols(protocols)
    for name, value in options.items():
        setattr(context, name, value)
    return context
