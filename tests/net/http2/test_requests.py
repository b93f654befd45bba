"""Requests and replies: every kind of body, split anywhere, with h2 as the judge of what comes back."""

from __future__ import annotations

import pytest
from hpack import Decoder
from hyperframe.frame import DataFrame, HeadersFrame, SettingsFrame, WindowUpdateFrame

from fastserve.net import Call
from fastserve.net.http2.connection import Http2Connection
from tests.net.http2.kit import GET, POST, Peer, Raw
from tests.net.kit import Clock, Held, Pipe, echo, limits, run, serving

LARGE = bytes(range(256)) * 2400  # 600 KB


def test_a_request_is_a_call_like_any_other() -> None:
    peer = Peer({"/echo": echo})
    answer = peer.ask(POST, b"body")
    assert (answer.status, answer.body, answer.ended) == (200, b"POST /echo body", True)
    assert answer.headers["content-type"] == "text/plain"
    assert answer.headers["content-length"] == "15"
    assert "date" in answer.headers
    assert not peer.connection.streams


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100, 16393])
def test_input_may_be_split_anywhere(size: int) -> None:
    peer = Peer({"/echo": echo})
    for body in (b"", b"small", bytes(20_000)):
        assert peer.ask(POST, body, size).body == b"POST /echo " + body


@pytest.mark.parametrize("told", [True, False])
def test_a_large_body_arrives_whole(told: bool) -> None:
    peer = Peer({"/echo": lambda call: call.reply(200, bytes(call.body))})
    headers = [*POST, ("content-length", str(len(LARGE)))] if told else POST
    number = peer.h2.get_next_available_stream_id()
    peer.h2.send_headers(number, headers)
    sent = 0
    while sent < len(LARGE):
        peer.flush()
        size = min(peer.h2.local_flow_control_window(number), 16384, len(LARGE) - sent)
        assert size, "the server stopped the client"
        peer.h2.send_data(number, LARGE[sent : sent + size], end_stream=sent + size == len(LARGE))
        sent += size
    peer.flush()
    assert peer.answers[number].body == LARGE


def test_many_streams_at_once_and_answers_in_any_order() -> None:
    held = Held()
    peer = Peer({"/echo": held})
    numbers = [peer.send(POST, b"%d" % i) for i in range(100)]
    peer.flush()
    assert [call.body for call in held.calls] == [b"%d" % i for i in range(100)]
    for call in reversed(held.calls):
        call.reply(200, call.body)
    peer.hear()
    assert [peer.answers[number].body for number in numbers] == [b"%d" % i for i in range(100)]


def test_a_repeated_block_is_not_decoded_again() -> None:
    heads = []
    peer = Peer({"/echo": lambda call: (heads.append(call.head), call.reply(200))[-1]})
    for _ in range(4):
        assert peer.ask(GET).status == 200
    assert len({id(head) for head in heads}) == 1
    intake = peer.connection
    assert len(intake.blocks) == 1  # the first block has filled the table, the others changed nothing
    peer.ask([*GET, ("x-new", "1")])
    assert not intake.blocks


def test_heads_are_shared_by_connections() -> None:
    pipe = Pipe({"/echo": echo})
    heads = set()
    for _ in range(3):
        peer = Peer({})
        peer.pipe.listener = pipe.listener
        peer.pipe.connection.listener = pipe.listener
        peer.ask(GET)
        heads.update(map(id, peer.connection.blocks.values()))
        peer.ask(GET)
        heads.update(map(id, peer.connection.blocks.values()))
    assert len(heads) == 1


@pytest.mark.parametrize("least", [0, 100, 65535])
def test_a_window_made_smaller_while_its_reply_waits_for_the_connections(least: int) -> None:
    """To below what was sent: nothing of the stream goes out before it is open again (RFC 9113 6.9.2)."""
    raw = Raw({"/echo": lambda call: call.reply(200, LARGE)}).greet()
    raw.feed(raw.headers(1, GET, "END_STREAM", "END_HEADERS") + opened(1, 20_000))
    body = sent_of(raw)  # all that the connection's window holds
    raw.feed(SettingsFrame(0, settings={SettingsFrame.INITIAL_WINDOW_SIZE: least}).serialize())
    raw.feed(opened(0, 1 << 20))
    left = least + 20_000 - len(body)
    body += sent_of(raw)
    assert len(body) == max(least + 20_000, 65535)
    raw.feed(opened(1, 1 - min(left, 0)))
    body += sent_of(raw)
    assert len(body) == max(least + 20_000, 65535) + 1
    raw.feed(opened(1, 1 << 20))
    assert body + sent_of(raw) == LARGE


def opened(number: int, by: int) -> bytes:
    return bytes(WindowUpdateFrame(number, window_increment=by).serialize())


def sent_of(raw: Raw) -> bytes:
    """Return the bytes of a reply's body that have come since the last time."""
    return b"".join(one.data for one in raw.frames() if isinstance(one, DataFrame))


def test_head_and_bodiless_replies() -> None:
    peer = Peer({"/echo": echo, "/none": lambda call: call.reply(204)})
    answer = peer.ask([(":method", "HEAD"), *GET[1:]])
    assert (answer.headers["content-length"], answer.body, answer.ended) == ("11", b"", True)
    answer = peer.ask([*GET[:3], (":path", "/none")])
    assert (answer.status, "content-length" in answer.headers, answer.ended) == (204, False, True)


def test_headers_of_replies_are_lower_case_and_checked() -> None:
    def endpoint(call: Call) -> None:
        with pytest.raises(ValueError, match="must not be sent"):
            call.reply(200, b"", headers=((b"X-Bad", b"a\r\nb"),))
        call.reply(200, b"", headers=((b"X-Good", b" yes "),), close=True)

    answer = Peer({"/echo": endpoint}).ask(GET)
    assert answer.headers["x-good"] == "yes"
    assert "connection" not in answer.headers


def test_authority_is_the_host() -> None:
    peer = Peer({"/echo": lambda call: call.reply(200, call.header(b"host"))})
    assert peer.ask(GET).body == b"a"


@pytest.mark.parametrize(
    ("scheme", "status"),
    [("http", 200), ("https", 200), ("HTTPS", 200), ("ftp", 400), ("file", 400), ("*", 400)],
)
def test_a_scheme_that_is_not_spoken_here_is_refused(scheme: str, status: int) -> None:
    raw = Raw({"/echo": echo}).greet()
    fields = [(name, scheme if name == ":scheme" else value) for name, value in GET]
    raw.feed(raw.headers(1, fields, "END_STREAM", "END_HEADERS"))
    head = next(one for one in raw.frames() if isinstance(one, HeadersFrame))
    assert dict(Decoder().decode(head.data))[":status"] == str(status)


@pytest.mark.parametrize(
    ("written", "status"),
    [
        ([(":authority", "")], 400),
        ([], 400),
        ([(":authority", ""), ("host", "")], 400),
        ([("host", "")], 400),
        ([("host", "a")], 200),
        ([(":authority", "a"), ("host", "a")], 200),
    ],
)
def test_a_place_is_named_and_is_not_empty(written: list[tuple[str, str]], status: int) -> None:
    """RFC 9113 8.3.1; h2 would not send it."""
    raw = Raw({"/echo": echo}).greet()
    pseudo = [field for field in [*GET[:2], GET[3], *written] if field[0].startswith(":")]
    raw.feed(
        raw.headers(
            1, [*pseudo, *(field for field in written if field[0] == "host")], "END_STREAM", "END_HEADERS"
        )
    )
    head = next(one for one in raw.frames() if isinstance(one, HeadersFrame))
    assert dict(Decoder().decode(head.data))[":status"] == str(status)
    if status == 400:
        raw.feed(raw.headers(3, GET, "END_STREAM", "END_HEADERS"))
        assert any(isinstance(one, HeadersFrame) for one in raw.frames())  # it costs its stream alone


def test_cut_cookies_are_joined() -> None:
    peer = Peer({"/echo": lambda call: call.reply(200, call.header(b"cookie"))})
    assert peer.ask([*GET, ("cookie", "a=1"), ("cookie", "b=2")]).body == b"a=1; b=2"


def test_an_unknown_path_costs_its_stream_alone() -> None:
    peer = Peer({"/echo": echo})
    assert peer.ask([*GET[:3], (":path", "/nowhere")]).status == 404
    assert peer.ask(GET).status == 200


def test_a_failing_endpoint_is_a_500(caplog: pytest.LogCaptureFixture) -> None:
    def endpoint(call: Call) -> None:
        raise ZeroDivisionError

    peer = Peer({"/echo": endpoint})
    assert peer.ask(GET).status == 500
    assert "the endpoint failed" in caplog.text


def test_100_continue() -> None:
    peer = Peer({"/echo": echo})
    number = peer.send([*POST, ("expect", "100-continue")], end=False)
    peer.flush()
    assert peer.answers[number].informed == [100]
    peer.h2.send_data(number, b"now", end_stream=True)
    peer.flush()
    assert peer.answers[number].body == b"POST /echo now"


def test_trailers_are_checked_and_dropped() -> None:
    peer = Peer({"/echo": echo})
    number = peer.send(POST, b"body", end=False)
    peer.h2.send_headers(number, [("x-sum", "1")], end_stream=True)
    peer.flush()
    assert peer.answers[number].body == b"POST /echo body"


def test_a_coroutine_endpoint_streams_its_reply() -> None:
    async def endpoint(call: Call) -> None:
        stream = call.stream(200, b"text/plain")
        for _ in range(50):
            await stream.write(bytes(10_000))
        await stream.close()

    async def main() -> None:
        from httpx import AsyncClient

        async with serving({"/many": endpoint}) as listener:
            base = "http://{}:{}".format(*listener.address)
            async with AsyncClient(http1=False, http2=True, base_url=base, trust_env=False) as client:
                reply = await client.get("/many")
            assert (reply.http_version, reply.status_code) == ("HTTP/2", 200)
            assert reply.content == bytes(500_000)

    run(main())


def test_the_preface_may_come_byte_by_byte() -> None:
    peer = Peer({"/echo": echo})
    peer.flush(1)
    assert isinstance(peer.pipe.protocol, Http2Connection)
    assert peer.connection in peer.pipe.listener.connections
    assert len(peer.pipe.listener.connections) == 1


def test_a_client_that_leaves_frees_its_calls() -> None:
    held = Held()
    peer = Peer({"/echo": held})
    peer.send(GET)
    number = peer.send(GET)
    peer.flush()
    peer.h2.reset_stream(number, 8)
    peer.flush()
    assert held.left == [held.calls[1]]
    peer.pipe.close()
    assert held.left == [held.calls[1], held.calls[0]]
    assert not peer.pipe.listener.connections


def test_only_http2() -> None:
    async def main() -> None:
        async with serving({"/echo": echo}, only_http2=True, clock=Clock()) as listener:
            from httpx import AsyncClient, RemoteProtocolError

            base = "http://{}:{}".format(*listener.address)
            async with AsyncClient(http1=False, http2=True, base_url=base, trust_env=False) as client:
                assert (await client.get("/echo")).content == b"GET /echo "
            async with AsyncClient(base_url=base, trust_env=False) as client:
                with pytest.raises(RemoteProtocolError):
                    await client.get("/echo")

    run(main())


def test_limits_are_those_of_http_1() -> None:
    peer = Peer({"/echo": echo}, limits(target_bytes=20, header_count=3, body_bytes=10, header_bytes=2000))
    assert peer.ask([*GET[:3], (":path", "/" * 21)]).status == 414
    assert peer.ask([*GET, *((f"x{i}", "1") for i in range(4))]).status == 431
    assert peer.ask([*GET, ("x", "1" * 2000)]).status == 431
    assert peer.ask([*POST, ("content-length", "11")], b"12345678901").status == 413
    assert peer.ask(POST, b"12345678901").status == 413
    assert peer.ask([(":method", "PURGE"), *GET[1:]]).status == 501
    assert peer.ask(POST, b"1234567890").status == 200
    assert set(peer.pipe.listener.refusals) == {
        "target_bytes", "header_count", "header_bytes", "body_bytes", "method"
    }  # fmt: skip
