"""Lines of the access log, and the log of requests that failed."""

from __future__ import annotations

import pytest

from fastserve.net import Call
from fastserve.net.request import Endpoint
from tests.net.kit import Held, Pipe, client, echo, run, serving, until

POST = b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello"


def test_an_access_log_sees_every_reply() -> None:
    lines = []
    pipe = Pipe(
        {"/echo": echo}, access_log=lambda call, status, size: lines.append((call.target, status, size))
    )
    pipe.feed(POST + b"GET /nowhere HTTP/1.1\r\nHost: a\r\n\r\n")
    assert lines == [("/echo", 200, 16), ("/nowhere", 404, 49)]


def test_an_access_log_sees_streams_at_their_end_and_clients_that_leave() -> None:
    lines: list[tuple[str, int, int]] = []

    def note(call: Call, status: int, size: int) -> None:
        lines.append((call.target, status, size))

    async def parts(call: Call) -> None:
        stream = call.stream(200, b"text/plain")
        await stream.write(b"one")
        assert not lines
        await stream.write(b"two!")
        await stream.close()

    async def broken(call: Call) -> None:
        await call.stream(200, b"text/plain").write(b"half")

    held = Held()

    async def main() -> None:
        routes: dict[str, Endpoint] = {"/parts": parts, "/broken": broken, "/held": held}
        async with serving(routes, access_log=note) as listener:
            async with client(listener) as peer:
                peer.send(b"GET /parts HTTP/1.1\r\nHost: a\r\n\r\n")
                assert (await peer.reply()).body == b"onetwo!"
                peer.send(b"GET /broken HTTP/1.1\r\nHost: a\r\n\r\n")
                await until(lambda: len(lines) == 2)
            async with client(listener) as peer:
                peer.send(b"GET /held HTTP/1.1\r\nHost: a\r\n\r\n")
                await until(lambda: held.calls)
            await until(lambda: len(lines) == 3)

    run(main())
    assert lines == [("/parts", 200, 7), ("/broken", 200, 4), ("/held", 499, 0)]


def test_what_was_answered_500_is_logged_under_its_id(caplog: pytest.LogCaptureFixture) -> None:
    pipe = Pipe({"/": lambda call: call.reply(500, b'{"error": "ValueError: bad\\n row"}')})
    pipe.feed(b"GET / HTTP/1.1\r\nHost: a\r\nX-Request-Id: r-1\r\n\r\n")
    (line,) = caplog.records
    assert (line.levelname, vars(line)["request_id"]) == ("WARNING", "r-1")
    assert "answered 500" in line.getMessage()
    assert "ValueError: bad" in line.getMessage()


HEAD = "GET /{} HTTP/1.1\r\nHost: a\r\n{}\r\n"


@pytest.mark.parametrize(
    ("path", "more", "logged", "expected"),
    [
        ("echo", "X-Request-Id: r-1\r\n", False, "r-1"),
        ("raw", "X-Request-Id: r-1\r\n", False, "r-1"),
        ("parts", "X-Request-Id: r-1\r\n", False, "r-1"),
        ("nowhere", "X-Request-Id: r-1\r\n", False, "r-1"),
        ("nowhere", "X-Request-Id: two words\r\n", False, "made"),
        ("nowhere", "", False, "made"),
        ("echo", "", True, "made"),
        ("raw", "", True, "made"),
        ("echo", "", False, ""),
        ("raw", "", False, ""),
    ],
)
def test_a_reply_names_its_request(path: str, more: str, logged: bool, expected: str) -> None:
    """Where the client did, on every error, and while there is an access log, which has the same id."""
    ids: list[str] = []

    async def parts(call: Call) -> None:
        stream = call.stream(200, b"text/plain")
        await stream.write(b"one")
        await stream.close()

    def raw(call: Call) -> None:
        head = call.raw_head()
        if head:
            call.reply_raw(head + b"Content-Length: 0\r\n\r\n")
        else:
            call.reply(200)

    def note(call: Call, status: int, size: int) -> None:
        ids.append(call.request_id)

    async def main() -> str:
        routes: dict[str, Endpoint] = {"/echo": echo, "/raw": raw, "/parts": parts}
        log = note if logged else None
        async with serving(routes, access_log=log) as listener, client(listener) as peer:
            peer.send(HEAD.format(path, more).encode())
            return (await peer.reply()).headers.get("x-request-id", "")

    told = run(main())
    assert bool(told) == bool(expected)
    assert expected in (told, "made", "")
    assert ids == ([told] if logged else [])
