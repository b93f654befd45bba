"""Images that requests name: which values are images, and what nobody gets at with them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from fastserve.errors import Kind, ServeError
from fastserve.serving.text import Info, TextModels
from fastserve.serving.text.images import Fetch, ImageRules, Images, check_url, is_public
from tests.text_rig import LocalEngine, Scripted

JPEG = b"\xff\xd8\xff\xe0" + bytes(range(200))
PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(200))
SEES = Info(vocab_size=9, tokenizer="words", vision=True)
OK = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b"


def load(*values: str, vision: bool = True, **rules: Any) -> list[bytes]:
    async def work() -> list[bytes]:
        with LocalEngine() as engine:
            engine.add("m1", Scripted([], info=SEES if vision else Info(tokenizer="words")))
            return await Images(ImageRules(**rules)).load(TextModels(engine.context).find("m1"), values)

    return asyncio.run(work())


def refused(*values: str, **rules: Any) -> str:
    with pytest.raises(ServeError) as fault:
        load(*values, **rules)
    assert fault.value.kind is Kind.INVALID_ARGUMENT
    return fault.value.message


def text(data: bytes) -> str:
    return b64encode(data).decode()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    inner = tmp_path / "pictures"
    (inner / "cats").mkdir(parents=True)
    (inner / "cats" / "1.png").write_bytes(PNG)
    (inner / "a b.JPG").write_bytes(JPEG)
    (inner / "large.png").write_bytes(PNG * 20)
    (inner / "text.png").write_text("not a picture")
    (inner / "other.txt").write_bytes(PNG)
    (tmp_path / "secret.png").write_bytes(PNG)
    os.symlink(tmp_path / "secret.png", inner / "out.png")
    os.symlink("cats/1.png", inner / "in.png")
    os.mkfifo(inner / "pipe.png")
    return inner


def test_images_of_every_form(root: Path) -> None:
    values = [
        "cats/1.png",
        "in.png",
        f"{root}/a b.JPG",
        f"file://{root}/a%20b.JPG",
        f"data:image/png;base64,{text(PNG)}",
        f"data:image/JPEG;base64,{text(JPEG)}",
        text(JPEG),
        text(PNG),
    ]
    assert load(*values, root=str(root)) == [PNG, PNG, JPEG, JPEG, PNG, JPEG, JPEG, PNG]
    assert load() == []


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("../secret.png", "leads out"),
        ("{root}/../secret.png", "leads out"),
        ("{root}2/1.png", "leads out"),
        ("/etc/passwd.png", "leads out"),
        ("out.png", "leads out"),
        ("file:///etc/x.png", "leads out"),
        ("file://{root}/%2e%2e/secret.png", "leads out"),
        ("file://other.example/x.png", "names a path"),
        ("file:///x.png?a", "names a path"),
        ("cats/2.png", "cannot be read"),
        ("cats\0/1.png", "leads out"),
        ("pipe.png", "not a regular file"),
        ("other.txt", "ends with .jpg"),
        ("large.png", "larger than"),
        ("text.png", "neither a JPEG nor a PNG"),
        ("gopher://x/1.png", "allowed: a path"),
        ("data:image/gif;base64,R0lG", "allowed: a path"),
        ("data:image/png;base64,%%%", "not base64"),
        ("data:image/png;base64,aGVsbG8=", "neither a JPEG"),
        ("data:image/png;base64," + "A" * 3000, "more than 2000 bytes"),
        ("http://a.example/1.png", "URLs are not fetched here"),
        ("", "ends with"),
    ],
)
def test_what_is_no_image_to_be_had(root: Path, value: str, words: str) -> None:
    said = refused("cats/1.png", value.format(root=root), root=str(root), most_bytes=2000)
    assert said.startswith("image 2: ")
    assert words in said


def test_files_need_a_root_and_images_a_model_that_sees(root: Path) -> None:
    assert "image_root" in refused(f"{root}/cats/1.png")
    assert refused(text(PNG), vision=False) == "model 'm1' takes text only, not images"


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "100.64.0.1",
        "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1",
        "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "2002:a00:1::",
        "2001:0:4136:e378:8000:63bf:80ff:fffe",
        "198.18.0.1", "192.0.2.1", "2001:db8::1", "no address",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["93.184.216.34", "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8"])
def test_addresses_that_are(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "url",
    [
        "http://", "http:///x", "ftp://a/x", "http://a:b@c/x", "http://a b/", "http://a/\r\nX: y", "http://a:99999/",
        "http://a/é", "//a/x", "http://[::1/", "http://a/" + "x" * 4096,
    ],
)  # fmt: skip
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(ServeError):
        check_url(url)


@contextlib.asynccontextmanager
async def origin(*answers: bytes, pause: bool = False) -> AsyncIterator[tuple[int, list[bytes]]]:
    """A server that gives these answers, one a connection; what it was asked."""
    asked: list[bytes] = []
    answering: list[asyncio.Task[None] | None] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering.append(asyncio.current_task())
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answers[len(asked) - 1])
        with contextlib.suppress(ConnectionError):
            await writer.drain()
            if pause:
                await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], asked
    finally:
        server.close()
        # From Python 3.12 on wait_for ends in the turn in which its time is over: before `answer` sees it.
        await asyncio.wait_for(asyncio.gather(*filter(None, answering)), 60)


def fetch(path: str, *answers: bytes, pause: bool = False, **more: Any) -> tuple[bytes | str, list[bytes]]:
    async def work() -> tuple[bytes | str, list[bytes]]:
        rules = {"most_bytes": 1000, "most_s": 5.0, "private": True, **more}
        async with origin(*answers, pause=pause) as (port, asked):
            try:
                return await Fetch(**rules)(path.replace("PORT", str(port))), asked
            except ServeError as fault:
                return fault.message, asked

    return asyncio.run(work())


def test_a_url_is_got() -> None:
    got, asked = fetch("http://127.0.0.1:PORT/a/b.png?c=d", OK % (len(PNG), PNG))
    assert got == PNG
    assert asked[0].startswith(b"GET /a/b.png?c=d HTTP/1.1\r\nHost: 127.0.0.1:")
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    assert fetch("http://127.0.0.1:PORT", chunked)[0] == b"abc"
    assert fetch("http://127.0.0.1:PORT/", b"HTTP/1.0 200 OK\r\n\r\nabc")[0] == b"abc"


def test_redirects_are_followed_and_looked_at() -> None:
    moved = b"HTTP/1.1 302 Found\r\nLocation: /next\r\nContent-Length: 0\r\n\r\n"
    got, asked = fetch("http://127.0.0.1:PORT/", moved, OK % (3, b"abc"))
    assert (got, asked[1].split()[1]) == (b"abc", b"/next")
    assert "redirects" in str(fetch("http://127.0.0.1:PORT/", *[moved] * 5)[0])
    away = b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n"
    assert "not a URL" in str(fetch("http://127.0.0.1:PORT/", away)[0])


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (OK % (5000, b""), "more than 1000 bytes"),
        (b"HTTP/1.0 200 OK\r\n\r\n" + bytes(5000), "more than 1000 bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", "cannot be fetched"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 0\r\n\r\n", "compressed"),
        (b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n", "status 404"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20000, "head"),
        (b"SSH-2.0-OpenSSH\r\n", "cannot be fetched"),
        (b"", "cannot be fetched"),
    ],
)
def test_answers_that_are_none(answer: bytes, words: str) -> None:
    assert words in str(fetch("http://127.0.0.1:PORT/", answer)[0])


def test_an_answer_that_does_not_end() -> None:
    slow = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc"
    got, _ = fetch("http://127.0.0.1:PORT/", slow, pause=True, most_s=0.2)
    assert got == "the URL gave no answer within 0.2 s"


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "2130706433",
        "0177.0.0.1",
        "0x7f.1",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "0.0.0.0",
    ],
)
def test_private_networks_are_not_reached(host: str) -> None:
    got, asked = fetch(f"http://{host}:PORT/", OK % (3, b"abc"), private=False)
    assert got in ("the URL's host is not a public one", "the URL's host is not known")
    assert asked == []


def resolves_to(monkeypatch: pytest.MonkeyPatch, *turns: list[str]) -> Callable[[], int]:
    """Let names resolve to these, one list a look-up; yields how often they were looked up."""
    left = list(turns)

    async def getaddrinfo(self: Any, host: str, port: int, **more: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in left.pop(0)]

    monkeypatch.setattr(asyncio.base_events.BaseEventLoop, "getaddrinfo", getaddrinfo)
    return lambda: len(turns) - len(left)


def test_a_name_with_one_private_address_is_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    resolves_to(monkeypatch, ["8.8.8.8", "127.0.0.1"])
    got, asked = fetch("http://a.example:PORT/", OK % (3, b"abc"), private=False)
    assert (got, asked) == ("the URL's host is not a public one", [])


def test_the_address_that_was_checked_is_the_one_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is public when looked at and private when connected to."""
    connected: list[str] = []
    real = asyncio.open_connection

    async def connect(host: str, port: int, **more: Any) -> Any:
        connected.append(host)
        return await real("127.0.0.1", port, **{**more, "server_hostname": None})

    looked = resolves_to(monkeypatch, ["8.8.8.8"], ["127.0.0.1"], ["127.0.0.1"])
    monkeypatch.setattr(asyncio, "open_connection", connect)
    fetch("http://a.example:PORT/", OK % (3, b"abc"), private=False)
    assert connected == ["8.8.8.8"]
    assert looked() >= 1
