"""Certificates: what is said of those that cannot be used, those that are renewed, and clients' own."""

from __future__ import annotations

import ssl
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives import serialization

from fastserve.errors import ConfigError
from fastserve.net import Call, HttpListener
from fastserve.net.tls import Credentials
from fastserve.settings.server_settings import TlsOptions
from tests.certificates import issue, root_file, trusting
from tests.net.kit import run, until
from tests.net.tls.kit import client, serving
from tests.net.tls.test_transport import GET, hello


def locked(options: TlsOptions, password: str) -> Path:
    path = Path(options.key)
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    lock = serialization.BestAvailableEncryption(password.encode())
    text = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock)
    made = path.with_suffix(".locked")
    made.write_bytes(text)
    return made


def load(options: TlsOptions) -> Credentials:
    made = Credentials(options)
    made.load()
    return made


def test_files_text_and_one_file_for_both(tmp_path: Path) -> None:
    given = issue(tmp_path)
    cert, key = Path(given.cert).read_text(), Path(given.key).read_text()
    both = tmp_path / "both.pem"
    both.write_text(cert + key)
    for options in (
        given,
        TlsOptions(cert=cert, key=key),
        TlsOptions(cert=str(both)),
        TlsOptions(cert=cert + key),
    ):
        load(options).context(("h2",))


def test_a_password_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = issue(tmp_path)
    options = msgspec.structs.replace(given, key=str(locked(given, "open sesame")))
    with pytest.raises(ConfigError, match="the key wants a password, allowed: one in "):
        load(options)
    monkeypatch.setenv("FASTSERVE_TLS_KEY_PASSWORD", "open sesame")
    load(options)
    monkeypatch.setenv("FASTSERVE_TLS_KEY_PASSWORD", "guess")
    with pytest.raises(ConfigError) as fault:
        load(options)
    assert "password is wrong" in str(fault.value)
    assert "guess" not in str(fault.value)
    (tmp_path / "password").write_text("open sesame\n")
    load(msgspec.structs.replace(options, key_password_file=str(tmp_path / "password")))


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    one, other = issue(tmp_path, "one"), issue(tmp_path, "other")
    (tmp_path / "empty").write_text("")
    (tmp_path / "broken").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    replace = msgspec.structs.replace
    for options, said in (
        (replace(one, cert=str(tmp_path / "none")), f"tls.cert {tmp_path}/none: No such file or directory"),
        (replace(one, cert=str(tmp_path / "empty")), "there is no certificate in it"),
        (
            replace(one, cert=str(tmp_path / "broken")),
            f"tls.cert {tmp_path}/broken, tls.key .*cannot be read",
        ),
        (replace(one, key=other.key), "the key is not that of the certificate"),
        (replace(one, key=one.cert), "tls.key .*: there is no private key in it"),
        (replace(one, client_ca=str(tmp_path / "empty")), "tls.client_ca .*: there is no certificate in it"),
        (replace(one, client_ca=str(tmp_path / "broken")), "tls.client_ca .*: cannot be read as PEM"),
    ):
        with pytest.raises(ConfigError, match=said):
            load(options)


def test_text_is_not_told(tmp_path: Path) -> None:
    text = Path(issue(tmp_path).key).read_text()
    with pytest.raises(ConfigError) as fault:
        load(msgspec.structs.replace(issue(tmp_path, "other"), key=text))
    assert "PRIVATE" not in str(fault.value)
    assert "(text)" in str(fault.value)


def test_settings_that_do_not_fit() -> None:
    for given in ({"key": "k"}, {"client_ca": "c"}, {"cert": "c", "client_auth": "optional"}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(given, TlsOptions)


def common_name(peer) -> str:  # type: ignore[no-untyped-def]
    subject = peer.writer.get_extra_info("peercert")["subject"]
    return next(value for part in subject for name, value in part if name == "commonName")


def test_renewed_files_are_for_new_connections(tmp_path: Path) -> None:
    given, other = issue(tmp_path, "old"), issue(tmp_path, "new")
    held = load(given)

    async def main() -> None:
        async with serving({"/": hello}, held) as listener, client(listener) as before:
            assert common_name(before) == "old"
            assert not held.renew()
            Path(given.cert).write_text(Path(other.cert).read_text())
            for _ in range(2):  # half of the pair: what there was stays
                with pytest.raises(ConfigError, match="the key is not that of the certificate"):
                    held.renew()
            async with client(listener) as peer:
                assert common_name(peer) == "old"
            Path(given.key).write_text(Path(other.key).read_text())
            assert held.renew()
            assert not held.renew()
            async with client(listener) as after:
                assert common_name(after) == "new"
                for peer in (before, after):
                    peer.send(GET)
                    assert (await peer.reply()).body == b"hello"

    run(main())


@pytest.mark.parametrize("mode", ["required", "optional"])
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_clients_with_certificates(tmp_path: Path, mode: str, version: ssl.TLSVersion) -> None:
    ours = issue(tmp_path)
    options = msgspec.structs.replace(ours, client_ca=str(root_file(tmp_path, "clients")), client_auth=mode)
    good, bad = issue(tmp_path, "alice", ca="clients"), issue(tmp_path, "mallory", ca="strangers")
    seen: list[str] = []

    def who(call: Call) -> None:
        seen.append(call.client)
        call.reply(200, b"hello")

    async def ask(listener, cert: TlsOptions | None) -> bytes:  # type: ignore[no-untyped-def]
        context = trusting(maximum_version=version)
        if cert is not None:
            context.load_cert_chain(cert.cert, cert.key)
        async with client(listener, context) as peer:
            peer.send(GET)
            return (await peer.reply()).body

    async def main() -> None:
        async with serving({"/": who}, load(options)) as listener:
            assert await ask(listener, good) == b"hello"
            with pytest.raises((ssl.SSLError, OSError, EOFError)):
                await ask(listener, bad)
            if mode == "optional":
                assert await ask(listener, None) == b"hello"
            else:
                with pytest.raises((ssl.SSLError, OSError, EOFError)):
                    await ask(listener, None)
            await until(lambda: not listener.connections)

    run(main())
    assert "CN=alice" in seen[0]
    assert seen[1:] == ([""] if mode == "optional" else [])


def test_a_renewed_authority_is_for_new_connections(tmp_path: Path) -> None:
    """Clients that it did not issue are refused from then on; connections that run go on."""
    root, other = root_file(tmp_path, "clients"), root_file(tmp_path, "others")
    held = load(msgspec.structs.replace(issue(tmp_path), client_ca=str(root)))
    pairs = [issue(tmp_path, name, ca=ca) for name, ca in (("alice", "clients"), ("olga", "others"))]

    def showing(pair: TlsOptions) -> ssl.SSLContext:
        context = trusting()
        context.load_cert_chain(pair.cert, pair.key)
        return context

    async def asked(listener: HttpListener, pair: TlsOptions) -> bool:
        try:
            async with client(listener, showing(pair)) as peer:
                peer.send(GET)
                return (await peer.reply()).body == b"hello"
        except (OSError, EOFError):
            return False

    async def main() -> None:
        async with serving({"/": hello}, held) as listener, client(listener, showing(pairs[0])) as before:
            assert [await asked(listener, pair) for pair in pairs] == [True, False]
            root.write_text("nonsense")
            with pytest.raises(ConfigError, match=r"tls\.client_ca"):
                held.renew()
            assert [await asked(listener, pair) for pair in pairs] == [True, False]
            root.write_text(other.read_text())
            assert held.renew()
            assert [await asked(listener, pair) for pair in pairs] == [False, True]
            before.send(GET)
            assert (await before.reply()).body == b"hello"

    run(main())
