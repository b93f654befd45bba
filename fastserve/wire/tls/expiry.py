"""Until when a certificate holds: the one fact of X.509 that `ssl` does not tell of its own side's.

    Certificate ::= SEQUENCE { tbsCertificate SEQUENCE { [0] version, serialNumber, signature, issuer,
                               validity SEQUENCE { notBefore, notAfter }, ... } ... }        (RFC 5280 4.1)

For certificates that OpenSSL has taken already; it is not a parser for those of others.
"""

from __future__ import annotations

import re
import ssl
from datetime import datetime, timezone

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_VERSION, _UTC_TIME = 0xA0, 0x17  # tags


def expires_at(chain: bytes) -> float:
    """Unix seconds at which the first certificate of a PEM chain ends; 0 for a form not known here."""
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
    """Where the content of the element at `at` begins, and where it ends."""
    size, begin = der[at + 1], at + 2
    if size & 0x80:
        begin += size & 0x7F
        size = int.from_bytes(der[at + 2 : begin], "big")
    return begin, begin + size
