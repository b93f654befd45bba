"""Bytes of whole connections, exact where it matters, whole and in every split."""

from __future__ import annotations

import asyncio
import re
import zlib

import pytest

from fastserve.net import Call, HttpListener
from fastserve.net.http1.connection import Http1Connection
from fastserve.settings import Limits
from tests.net.kit import Held, Paths, Pipe, client, echo, read_replies, run, serving

GET = b"GET /echo?a=%20b HTTP/1.1\r\nHost: a\r\n\r\n"
POST = b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3\r\nhel\r\n2;ext=1\r\nlo\r\n0\r\nX-Sum: 1\r\n\r\n"
)
ANSWERS = {GET: b"GET /echo?a=%20b ", POST: b"POST /echo hello", CHUNKED: b"POST /echo hello"}


def exchange(data: bytes, size: int = 0) -> Pipe:
    pipe = Pipe({"/echo": echo})
    pipe.feed(data, size)
    return pipe


def test_a_reply_byte_for_byte() -> None:
    sent = exchange(POST).sent
    assert re.fullmatch(
        rb"HTTP/1\.1 200 OK\r\nContent-Type: text/plain\r\n"
        rb"Date: [A-Z][a-z]{2}, \d\d [A-Z][a-z]{2} \d{4} \d\d:\d\d:\d\d GMT\r\n"
        rb"Content-Length: 16\r\n\r\nPOST /echo hello",
        sent,
    )


@pytest.mark.parametrize("request_bytes", ANSWERS)
def test_one_request_in_every_two_pieces(request_bytes: bytes) -> None:
    whole = exchange(request_bytes).sent
    for cut in range(1, len(request_bytes)):
        pipe = Pipe({"/echo": echo})
        pipe.feed(request_bytes[:cut])
        assert pipe.sent == b""
        pipe.feed(request_bytes[cut:])
        assert pipe.sent[:17] == whole[:17]
        assert pipe.replies()[0].body == ANSWERS[request_bytes]


@pytest.mark.parametrize("size", [0, *range(1, 60), 101, 150])
def test_many_requests_in_pieces_of_every_size(size: int) -> None:
    requests = [POST, POST, GET, CHUNKED, POST, GET, GET, CHUNKED, CHUNKED, b"\r\n" + POST, POST]
    pipe = exchange(b"".join(requests), size)
    assert [reply.body for reply in pipe.replies()] == [ANSWERS[r.removeprefix(b"\r\n")] for r in requests]
    assert not pipe.closed


def test_an_equal_head_is_not_read_again() -> None:
    pipe = Pipe({"/echo": echo})
    for _ in range(3):
        pipe.feed(POST)
        pipe.feed(POST[:-1])  # the same head, its body in two reads
        pipe.feed(POST[-1:])
        pipe.feed(POST.replace(b"5", b"3")[:-2])
    assert [r.body[11:] for r in pipe.replies()] == [b"hello", b"hello", b"hel"] * 3


def test_keep_alive_over_a_socket() -> None:
    async def main() -> None:
        async with serving({"/echo": echo}) as listener, client(listener) as peer:
            for request, answer in ANSWERS.items():
                peer.send(request)
                reply = await peer.reply()
                assert (reply.status, reply.body, reply.closes) == (200, answer, False)

    run(main())


@pytest.mark.parametrize(
    ("head", "mode"),
    [
        (b"GET /echo HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", "close"),
        (b"GET /echo HTTP/1.1\r\nHost: a\r\nConnection: x, Close\r\n\r\n", "close"),
        (b"GET /echo HTTP/1.0\r\n\r\n", "close"),
        (b"GET /echo HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", "keep-alive"),
        (b"GET /echo HTTP/1.1\r\nHost: a\r\nConnection: keep-alive\r\n\r\n", None),
        (b"GET /echo HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n", None),
    ],
)
def test_what_the_client_asks_of_the_connection(head: bytes, mode: str | None) -> None:
    pipe = exchange(head + GET)
    first, *more = pipe.replies()
    assert first.headers.get("connection") == mode
    assert len(more) == (0 if mode == "close" else 1)
    assert pipe.ended is (mode == "close")


def test_an_upgrade_with_a_body_is_an_ordinary_request() -> None:
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
    pipe = exchange(POST.replace(b"Content-L", upgrade + b"Content-L") + GET)
    assert [r.body for r in pipe.replies()] == [ANSWERS[POST], ANSWERS[GET]]


def test_what_nobody_has_a_path_or_words_for() -> None:
    pipe = exchange(b"GET /nowhere HTTP/1.1\r\nHost: a\r\n\r\n" + GET)
    reply, more = pipe.replies()
    assert (reply.status, reply.headers["content-type"]) == (404, "application/json")
    assert reply.body == b'{"error":"no API of this listener has this path"}'
    assert more.status == 200


def test_head_has_headers_and_no_body() -> None:
    async def main() -> None:
        async with serving({"/echo": echo}) as listener, client(listener) as peer:
            peer.send(b"HEAD /echo HTTP/1.1\r\nHost: a\r\n\r\n" + GET)
            head = await peer.reply(bodiless=True)
            assert head.headers["content-length"] == "11"
            assert (await peer.reply()).body == ANSWERS[GET]

    run(main())


@pytest.mark.parametrize("status", [204, 304])
def test_statuses_without_a_body(status: int) -> None:
    pipe = Pipe({"/": lambda call: call.reply(status, b"dropped")})
    pipe.feed(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    assert pipe.sent.endswith(b"GMT\r\n\r\n")
    assert b"Content-Length" not in pipe.sent


EXPECT = b"POST /echo HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n"


def test_continue_is_sent_before_the_body() -> None:
    pipe = exchange(EXPECT)
    assert pipe.sent == b"HTTP/1.1 100 Continue\r\n\r\n"
    pipe.feed(b"hello")
    assert pipe.replies()[1].body == b"POST /echo hello"
    pipe.feed(EXPECT + b"hello" + EXPECT)  # with its body there, nothing needs asking
    assert [r.status for r in pipe.replies()] == [100, 200, 200, 100]


def test_continue_waits_for_earlier_replies() -> None:
    held = Held()
    pipe = Pipe({"/echo": echo, "/held": held})
    pipe.feed(GET.replace(b"/echo", b"/held") + EXPECT)
    assert pipe.sent == b""
    held.calls[0].reply(200, b"first")
    assert [r.status for r in pipe.replies()] == [200, 100]
    pipe.feed(b"hello")
    assert [r.status for r in pipe.replies()] == [200, 100, 200]


def test_http_1_0_gets_no_continue() -> None:
    pipe = exchange(EXPECT.replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert pipe.sent == b""


def test_replies_keep_the_order_of_requests() -> None:
    held = Held()
    pipe = Pipe({"/held": held, "/echo": echo})
    pipe.feed(b"".join(b"GET /held?%d HTTP/1.1\r\nHost: a\r\n\r\n" % i for i in range(4)) + GET)
    for i in (2, 1, 3):
        held.calls[i].reply(200, b"%d" % i)
    assert pipe.sent == b""
    held.calls[0].reply(200, b"0")
    assert [r.body for r in pipe.replies()] == [b"0", b"1", b"2", b"3", ANSWERS[GET]]


def test_close_in_the_middle_drops_what_follows() -> None:
    held = Held()
    pipe = Pipe({"/held": held})
    pipe.feed(b"GET /held HTTP/1.1\r\nHost: a\r\n\r\n" * 3)
    held.calls[2].reply(200, b"never sent")
    held.calls[0].reply(200, b"last", close=True)
    assert [r.body for r in pipe.replies()] == [b"last"]
    assert (held.left, held.calls[1].gone) == ([held.calls[1]], True)


def test_a_call_knows_its_request() -> None:
    seen: list[Call] = []

    def endpoint(call: Call) -> None:
        seen.append(call)
        call.reply(200)

    pipe = Pipe({"/": endpoint})
    pipe.feed(
        b"POST /?q=1 HTTP/1.1\r\nHost: a\r\nX-Request-ID: abc-1\r\nx-A:  b \r\nContent-Length: 1\r\n\r\nz"
    )
    call = seen[0]
    assert (call.method, call.target, call.body, call.http_1_0) == ("POST", "/?q=1", b"z", False)
    assert call.headers == [
        (b"host", b"a"),
        (b"x-request-id", b"abc-1"),
        (b"x-a", b"b"),
        (b"content-length", b"1"),
    ]
    assert (call.header(b"x-a"), call.header(b"absent"), call.request_id) == (b"b", b"", "abc-1")
    assert call.received_ns > 0


@pytest.mark.parametrize("given", [b"", b"a" * 129, b"a\x9bb", b'"', b"a b"])
def test_request_ids_that_are_not_plain_are_replaced(given: bytes) -> None:
    seen: list[Call] = []
    pipe = Pipe({"/": seen.append})
    pipe.feed(b"GET / HTTP/1.1\r\nHost: a\r\nX-Request-Id: " + given + b"\r\n\r\n")
    made = seen[0].request_id
    assert re.fullmatch("[0-9a-f]{12}-[0-9a-f]+", made)
    assert seen[0].request_id == made


def test_a_request_without_an_id_goes_by_its_trace() -> None:
    seen: list[Call] = []
    pipe = Pipe({"/": seen.append})
    parent = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    pipe.feed(b"GET / HTTP/1.1\r\nHost: a\r\nTraceparent: " + parent + b"\r\n\r\n")
    assert seen[0].request_id == "0af7651916cd43dd8448eb211c80319c"


@pytest.mark.parametrize("bad", [b"a\r\nX: y", b"a\nb", b"a\rb", b"a\0b", b"\x1b[31m"])
def test_no_control_character_reaches_a_reply_header(bad: bytes) -> None:
    errors = []

    def endpoint(call: Call) -> None:
        for send in (
            lambda: call.reply(200, headers=[(b"x-echo", bad)]),
            lambda: call.reply(200, headers=[(bad, b"x")]),
            lambda: call.reply(200, content_type=bad),
        ):
            with pytest.raises(ValueError):
                send()
            errors.append(send)
        call.reply(200, headers=[(b"x-echo", b"fine")])

    pipe = Pipe({"/": endpoint})
    pipe.feed(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    assert len(errors) == 3
    assert pipe.replies()[0].headers["x-echo"] == "fine"


def test_two_replies_are_an_error_of_the_endpoint() -> None:
    def endpoint(call: Call) -> None:
        call.reply(200, b"one")
        with pytest.raises(RuntimeError):
            call.reply(200, b"two")
        with pytest.raises(RuntimeError):
            call.reply_raw(b"three")

    pipe = Pipe({"/": endpoint})
    pipe.feed(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    assert [r.body for r in pipe.replies()] == [b"one"]


def test_the_raw_reply_is_for_plain_connections_only() -> None:
    plain = []

    def endpoint(call: Call) -> None:
        plain.append(bool(call.raw_head()))
        if call.raw_head():
            call.reply_raw(call.raw_head() + b"Content-Length: 2\r\n\r\n{}")
        else:
            call.reply(200, b"{}")

    pipe = Pipe({"/": endpoint})
    pipe.feed(b"GET / HTTP/1.1\r\nHost: a\r\n\r\nGET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    pipe.feed(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    assert plain == [True, False, False]
    assert [(r.status, r.body, r.headers["content-type"]) for r in pipe.replies()] == [
        (200, b"{}", "application/json")
    ] * 3


def test_an_endpoint_that_fails_tells_the_client_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def plain(call: Call) -> None:
        raise RuntimeError("secret /etc/path")

    async def coroutine(call: Call) -> None:
        await asyncio.sleep(0)
        raise RuntimeError("secret /etc/path")

    async def silent(call: Call) -> None:
        pass

    async def main() -> None:
        routes = {"/plain": plain, "/coroutine": coroutine, "/silent": silent, "/echo": echo}
        async with serving(routes) as listener, client(listener) as peer:
            for path in routes:
                peer.send(GET.replace(b"/echo?a=%20b", path.encode()))
                reply = await peer.reply()
                if path != "/echo":
                    assert (reply.status, reply.body) == (500, b'{"error":"Internal error"}')
                else:
                    assert reply.status == 200

    run(main())
    assert len(caplog.records) == 3
    assert "secret" in caplog.text


def test_logs_are_escaped_and_short(caplog: pytest.LogCaptureFixture) -> None:
    def plain(call: Call) -> None:
        raise RuntimeError

    pipe = Pipe({"/" + "a" * 8000: plain})
    pipe.feed(b"GET /" + b"a" * 8000 + b" HTTP/1.1\r\nHost: a\r\n\r\n")
    assert len(caplog.records[0].getMessage()) < 300


@pytest.mark.parametrize("size", [1_500_000, 600_000, 65536, 65535])
def test_large_bodies_both_ways(size: int) -> None:
    body = bytes(range(256)) * (size // 256 + 1)

    async def main() -> None:
        async def back(call: Call) -> None:
            call.reply(200, call.body)

        async with serving({"/back": back}) as listener, client(listener) as peer:
            for coding in (b"Content-Length: %d\r\n\r\n" % size + body[:size],
                           b"Transfer-Encoding: chunked\r\n\r\n" + chunked(body[:size])):  # fmt: skip
                peer.send(b"POST /back HTTP/1.1\r\nHost: a\r\n" + coding)
                reply = await peer.reply()
                assert zlib.crc32(reply.body) == zlib.crc32(body[:size])

    run(main())


def chunked(body: bytes) -> bytes:
    pieces = [body[i : i + 70001] for i in range(0, len(body), 70001)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def test_a_body_in_one_piece_is_not_copied() -> None:
    held = Held()
    pipe = Pipe({"/": held})
    pipe.feed(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9000\r\n\r\n")
    body = bytes(9000)
    pipe.connection.data_received(body)
    assert held.calls[0].body is body


def test_a_body_in_tiny_pieces_costs_little_more_than_its_bytes() -> None:
    held = Held()
    pipe = Pipe({"/": held})
    pipe.feed(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 300000\r\n\r\n")
    pipe.feed(bytes(299_999), 3)
    assert len(pipe.connection._pieces) < 10
    pipe.feed(b"\0")
    assert held.calls[0].body == bytes(300_000)


def test_routes_are_asked_once_and_only_good_targets_are_remembered() -> None:
    dialect = Paths({"/echo": echo, "/bad": lambda call: call.reply(400)})
    listener = HttpListener("127.0.0.1", 0, [dialect], Limits())
    listener.scan()
    for _ in range(3):
        for path in (b"/echo", b"/bad", b"/nowhere"):
            pipe = Pipe({})
            pipe.listener = listener
            pipe.connection = pipe.protocol = Http1Connection(listener)
            pipe.connection.connection_made(pipe)
            pipe.feed(b"GET " + path + b" HTTP/1.1\r\nHost: a\r\n\r\n")
    assert dialect.asked.count(("GET", "/echo")) == 1
    assert dialect.asked.count(("GET", "/bad")) == 3
    assert list(listener.router._remembered) == [("GET", "/echo")]


def test_the_memory_of_routes_is_bounded() -> None:
    pipe = Pipe({"/echo": echo})
    for i in range(3000):
        pipe.feed(b"GET /echo?%d HTTP/1.1\r\nHost: a\r\n\r\n" % i)
    assert len(pipe.listener.router._remembered) == 1024
    assert len(pipe.replies()) == 3000


def test_the_first_dialect_that_knows_a_target_wins() -> None:
    first, second = (
        Paths({"/a": lambda c: c.reply(200, b"1")}),
        Paths({"/a": lambda c: c.reply(200, b"2"), "/b": echo}),
    )
    pipe = Pipe({})
    pipe.listener.router = type(pipe.listener.router)([first, second])
    pipe.feed(b"GET /a HTTP/1.1\r\nHost: a\r\n\r\nGET /b HTTP/1.1\r\nHost: a\r\n\r\n")
    assert [r.body for r in pipe.replies()] == [b"1", b"GET /b "]


def test_dates_follow_the_clock_once_a_second() -> None:
    heads = Pipe({}).listener.heads
    heads.tick(0.0)
    assert b"Date: Thu, 01 Jan 1970 00:00:00 GMT\r\n" in heads.ok_json
    before = heads.ok_json
    heads.tick(0.9)
    assert heads.ok_json is before
    heads.tick(1.0)
    assert b"00:00:01 GMT" in heads.find(404, b"text/plain", 1)


def test_ipv6_and_dual_stack() -> None:
    async def main() -> None:
        for address, target in (("::1", "::1"), ("::", "127.0.0.1"), ("", "::1"), ("", "127.0.0.1")):
            listener = HttpListener(address, 0, [Paths({"/echo": echo})], Limits())
            try:
                await listener.open()
            except OSError:
                pytest.skip("no IPv6 here")
            reader, writer = await asyncio.open_connection(target, listener.address[1])
            writer.write(GET)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            writer.close()
            await listener.close()

    run(main())


def test_replies_of_all_kinds_parse_back() -> None:
    pipe = exchange(b"".join(ANSWERS) * 3)
    assert len(read_replies(pipe.sent)) == 9


@pytest.mark.parametrize("size", [0, 1, 5, 60])
def test_heads_that_differ_in_their_length_only(size: int) -> None:
    held = Held()
    pipe = Pipe({"/held": held})
    lengths = [5, 5, 0, 12, 100, 3, 5]
    for length in lengths:
        head = b"POST /held HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\nX: 1\r\n\r\n" % length
        pipe.feed(head + b"z" * length, size)
        call = held.calls[-1]
        assert call.body == b"z" * length
        assert call.headers == [
            (b"host", b"a"), (b"content-length", b"%d" % length), (b"x", b"1")
        ]  # fmt: skip
        assert call.header(b"content-length") == b"%d" % length
        call.reply(200)
    assert len(held.calls) == len(lengths)
    assert len({id(call.head) for call in held.calls}) == 1


@pytest.mark.parametrize(
    ("digits", "status"),
    [
        *((b"05", 400), (b"+5", 400), (b" 5", 400), (b"", 400), (b"5 ", 400), (b"5,5", 400), (b"-0", 400)),
        *((b"99999999999999999999", 400), (b"999999999999", 413), (b"5\r\nContent-Length: 5", 400)),
        *((b"5\r\nTransfer-Encoding: chunked", 400), (b"5\0", 400), (b"\xb2", 400)),
    ],
)
def test_a_length_is_checked_when_only_it_differs(digits: bytes, status: int) -> None:
    pipe = exchange(POST)
    for _ in range(2):
        pipe.feed(POST)
    pipe.feed(POST.replace(b"Content-Length: 5", b"Content-Length: " + digits))
    assert [r.status for r in pipe.replies()] == [200, 200, 200, status]
