"""Until when a certificate holds, against what the library `cryptography` reads."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fastserve.net.tls import Credentials
from fastserve.net.tls.credentials import expires_at
from tests.certificates import issue

KEY = ec.generate_private_key(ec.SECP256R1())


def made(ends: datetime, name: str = "x") -> bytes:
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    builder = (
        x509.CertificateBuilder().subject_name(subject).issuer_name(subject).public_key(KEY.public_key())
    )
    builder = builder.serial_number(x509.random_serial_number()).not_valid_after(ends)
    signed = builder.not_valid_before(datetime(2001, 2, 3, tzinfo=timezone.utc)).sign(KEY, hashes.SHA256())
    return signed.public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize("year", [2020, 2049, 2050, 2199])  # from 2050 on in another form
@pytest.mark.parametrize("name", ["x", "y" * 60])
def test_of_one(year: int, name: str) -> None:
    ends = datetime(year, 12, 31, 23, 59, 58, tzinfo=timezone.utc)
    assert expires_at(made(ends, name)) == ends.timestamp()


def test_of_a_chain_the_first_to_end() -> None:
    now = datetime(2030, 1, 1, tzinfo=timezone.utc)
    chain = b"text before\n" + b"".join(made(now + timedelta(days=days)) for days in (9, 2, 5))
    assert expires_at(chain) == (now + timedelta(days=2)).timestamp()


@pytest.mark.parametrize(
    "text", [b"", b"no certificate", made(datetime(2030, 1, 1))[:90]], ids=["empty", "other", "cut"]
)
def test_of_none(text: bytes) -> None:
    assert expires_at(text) == 0


def test_it_is_renewed_with_its_certificate(tmp_path: Path) -> None:
    options = issue(tmp_path)
    credentials = Credentials(options)
    credentials.load()
    first = x509.load_pem_x509_certificates(Path(options.cert).read_bytes())
    assert credentials.expires_at == min(one.not_valid_after_utc for one in first).timestamp()
    ends = datetime(2031, 1, 1, tzinfo=timezone.utc)
    Path(options.cert).write_bytes(made(ends))
    kind = serialization.PrivateFormat.PKCS8
    key = KEY.private_bytes(serialization.Encoding.PEM, kind, serialization.NoEncryption())
    Path(options.key).write_bytes(key)
    assert credentials.renew()
    assert credentials.expires_at == ends.timestamp()
