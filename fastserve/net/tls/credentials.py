"""The server's certificate, its key and the clients' authorities, as contexts of `ssl` that never change.

    files or settings --read--> Pems --make--> a context for each set of protocols (ALPN)

A set of files is used whole or not at all: new contexts replace the old ones, running connections keep the
context they began with, and a pair that does not fit leaves everything as it was.

`ssl` does not tell until when its own side's certificate holds, so that is read here (RFC 5280 4.1):

    Certificate ::= SEQUENCE { tbsCertificate SEQUENCE { [0] version, serialNumber, signature, issuer,
                               validity SEQUENCE { notBefore, notAfter }, ... } ... }

This is for certificates that OpenSSL has accepted; it is not a parser for other ones.
"""

from __future__ import annotations

import contextlib
import os
import re
import ssl
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any, NamedTuple

from fastserve.errors import ConfigError
from fastserve.settings.server_settings import PASSWORD_VARIABLE, TlsOptions, names_file

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_VERSION, _UTC_TIME = 0xA0, 0x17  # tags


def expires_at(chain: bytes) -> float:
    """Return the Unix seconds at which the first certificate of a PEM chain ends; 0 for an unknown form."""
    try:
        return min(_not_after(ssl.PEM_cert_to_DER_cert(pem)) for pem in _PEM.findall(chain.decode("latin-1")))
    except (IndexError, ValueError):
        return 0.0


def _not_after(der: bytes) -> float:
    whole = _open(der, 0)
    at = _open(der, whole[0])[0]  # of tbsCertificate
    if der[at] == _VERSION:
        at = _open(der, at)[1]
    for _ in ("serialNumber", "signature", "issuer"):
        at = _open(der, at)[1]
    begin = _open(der, at)[0]  # of validity
    after = _open(der, begin)[1]
    first, last = _open(der, after)
    text = der[first:last].decode("ascii").removesuffix("Z")
    if der[after] == _UTC_TIME:  # two digits of the year: 50 is 1950 (RFC 5280 4.1.2.5.1)
        text = ("19" if text[:2] >= "50" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%S").replace(tzinfo=timezone.utc).timestamp()


def _open(der: bytes, at: int) -> tuple[int, int]:
    """Return where the content of the DER element at `at` begins and ends."""
    size, begin = der[at + 1], at + 2
    if size & 0x80:
        begin += size & 0x7F
        size = int.from_bytes(der[at + 2 : begin], "big")
    return begin, begin + size


# With forward secrecy and AEAD alone: of TLS 1.2 no suite that RFC 9113 9.2.2 forbids, for HTTP/1.1 either.
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
MOST_BYTES = 1 << 20  # of a file
_VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
_SHORT = {"commonName": "CN", "organizationName": "O", "organizationalUnitName": "OU", "countryName": "C"}


class Pems(NamedTuple):
    """The PEM texts of a context."""

    cert: bytes
    key: bytes
    client_ca: bytes
    password: str


class Credentials:
    """Certificate, key and client authorities of one process. `load` once, then `renew` whenever the
    files may have changed."""

    def __init__(self, options: TlsOptions) -> None:
        self.options = options
        self._pems = Pems(b"", b"", b"", "")
        self._contexts: dict[tuple[str, ...], ssl.SSLContext] = {}
        self.expires_at = 0.0
        """Unix seconds, of the first of the served chain that ends."""

    def load(self) -> None:
        """Read the files. Raises ConfigError, which names the setting and the file."""
        self._take(self._read())

    def renew(self) -> bool:
        """Read the files again; return whether anything has changed. Raises ConfigError for files that
        cannot be used: the old ones stay."""
        pems = self._read()
        if pems == self._pems:
            return False
        self._take(pems)
        return True

    def context(self, protocols: tuple[str, ...]) -> ssl.SSLContext:
        """Return the context of a new connection on a port with these ALPN protocols, the best first."""
        context = self._contexts.get(protocols)
        if context is None:
            context = self._contexts[protocols] = self._make(self._pems, protocols)
        return context

    @property
    def pems(self) -> Pems:
        """Return the PEM texts in use."""
        return self._pems

    def _take(self, pems: Pems) -> None:
        contexts = {protocols: self._make(pems, protocols) for protocols in (*self._contexts, ())}
        self._pems, self._contexts = pems, contexts
        self.expires_at = expires_at(pems.cert)

    def _read(self) -> Pems:
        options = self.options
        cert = _read_pem("cert", options.cert, b"CERTIFICATE-----")
        key = _read_pem("key", options.key or options.cert, b"PRIVATE KEY-----")
        ca = _read_pem("client_ca", options.client_ca, b"CERTIFICATE-----") if options.client_ca else b""
        return Pems(cert, key, ca, self._password() if _is_locked(key) else "")

    def _password(self) -> str:
        path = self.options.key_password_file
        text = _read("key_password_file", path).decode("utf-8", "replace") if path else ""
        password = text.partition("\n")[0].rstrip("\r") or os.environ.get(PASSWORD_VARIABLE, "")
        if not password:
            raise ConfigError(
                "tls.key: the key wants a password, allowed: one in tls.key_password_file or "
                f"${PASSWORD_VARIABLE}"
            )
        return password

    def _make(self, pems: Pems, protocols: tuple[str, ...]) -> ssl.SSLContext:
        options = self.options
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = _VERSIONS[options.min_version]
        context.set_ciphers(CIPHERS)
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        if protocols:
            context.set_alpn_protocols(protocols)
        self._load_pair(context, pems)
        if pems.client_ca:
            self._load_authorities(context, pems)
        return context

    def _load_pair(self, context: ssl.SSLContext, pems: Pems) -> None:
        with _as_file(pems.cert) as cert, _as_file(pems.key) as key:
            try:
                context.load_cert_chain(cert, key, password=pems.password)
            except (OSError, ValueError) as fault:  # ssl.SSLError is an OSError
                options = self.options
                reason = _REASONS.get(getattr(fault, "reason", None) or "", "cannot be read as PEM")
                if pems.password:
                    reason += ", or the password is wrong"
                named = [f"tls.{name} {shown(value)}" for name, value in
                         (("cert", options.cert), ("key", options.key)) if value]  # fmt: skip
                raise ConfigError(f"{', '.join(named)}: {reason}") from None

    def _load_authorities(self, context: ssl.SSLContext, pems: Pems) -> None:
        try:
            context.load_verify_locations(cadata=pems.client_ca.decode("ascii", "replace"))
        except (OSError, ValueError):
            given = shown(self.options.client_ca)
            raise ConfigError(f"tls.client_ca {given}: cannot be read as PEM") from None
        optional = self.options.client_auth == "optional"
        context.verify_mode = ssl.CERT_OPTIONAL if optional else ssl.CERT_REQUIRED


_REASONS = {"KEY_VALUES_MISMATCH": "the key is not that of the certificate"}


def shown(value: str) -> str:
    """Return a value for messages: a text, which may be a key, is not shown."""
    return value if names_file(value) else "(text)"


def subject_of(peer: ssl.SSLObject) -> str:
    """Return the subject of a client's certificate, as "CN=name,O=company"; "" without a certificate.

    A comma or backslash within a value has a backslash before it: no value passes for two."""
    said: Any = peer.getpeercert() or {}
    fields = [field for part in said.get("subject", ()) for field in part]
    return ",".join(f"{_SHORT.get(name, name)}={_SPECIAL.sub(_ESCAPED, value)}" for name, value in fields)


_SPECIAL, _ESCAPED = re.compile(r"[\\,]"), r"\\\g<0>"


def _read(field: str, value: str) -> bytes:
    if not names_file(value):
        return value.encode()
    try:
        with open(value, "rb") as file:
            return file.read(MOST_BYTES)
    except OSError as fault:
        raise ConfigError(f"tls.{field} {value}: {fault.strerror or 'cannot be read'}") from None


def _read_pem(field: str, value: str, mark: bytes) -> bytes:
    text = _read(field, value)
    if mark not in text:
        what = "private key" if field == "key" else "certificate"
        raise ConfigError(f"tls.{field} {shown(value)}: there is no {what} in it")
    return text


def _is_locked(key: bytes) -> bool:
    return b"BEGIN ENCRYPTED PRIVATE KEY" in key or b"Proc-Type: 4,ENCRYPTED" in key


@contextlib.contextmanager
def _as_file(text: bytes) -> Iterator[str]:
    """Yield a path of a text in memory: `ssl` loads pairs from paths alone, and a key belongs on no disk."""
    number = os.memfd_create("pem")
    try:
        os.write(number, text)
        yield f"/proc/self/fd/{number}"
    finally:
        os.close(number)
