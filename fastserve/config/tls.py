"""The settings of TLS. What they mean in OpenSSL's words is `fastserve.wire.tls.credentials`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

PASSWORD_VARIABLE = "FASTSERVE_TLS_KEY_PASSWORD"  # of the front processes' environment, not of models'
PEM = "-----BEGIN "  # what a value that is the text itself begins with


class TlsOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """TLS for every listener whose address does not begin with tcp://. None without `cert`."""

    cert: Annotated[
        str, Meta(description="PEM file of the certificate and its chain, or the text itself; empty: no TLS.")
    ] = ""
    key: Annotated[
        str,
        Meta(description="PEM file of its private key, or the text itself; empty: it is in `cert`."),
    ] = ""
    key_password_file: Annotated[
        str, Meta(description="File whose first line opens the key; else $FASTSERVE_TLS_KEY_PASSWORD does.")
    ] = ""
    client_ca: Annotated[
        str,
        Meta(description="PEM file, or text, of authorities whose clients are let in; empty: anyone."),
    ] = ""
    client_auth: Annotated[
        Literal["required", "optional"],
        Meta(description="Whether a client may come without a certificate, where client_ca is set."),
    ] = "required"
    min_version: Annotated[Literal["1.2", "1.3"], Meta(description="Oldest version of TLS spoken.")] = "1.2"
    poll_s: Annotated[
        float, Meta(gt=0, description="Seconds between two looks whether the files have changed.")
    ] = 5.0
    handshake_timeout_s: Annotated[
        float, Meta(gt=0, description="Seconds a client may take for its handshake.")
    ] = 10.0
    handshakes: Annotated[
        int, Meta(ge=1, description="Handshakes under way per listener and front; one more ends the oldest.")
    ] = 1024

    def __post_init__(self) -> None:
        given = [name for name in ("key", "key_password_file", "client_ca") if getattr(self, name)]
        if given and not self.cert:
            raise ValueError(f"{given[0]}: given without cert, allowed: with it")
        if self.client_auth == "optional" and not self.client_ca:
            raise ValueError('client_auth: given "optional" without client_ca, allowed: with it')


def names_file(value: str) -> bool:
    """Whether a value of `cert`, `key` or `client_ca` is a path."""
    return bool(value) and not value.lstrip().startswith(PEM)
