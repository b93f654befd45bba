"""Everything the wire must turn away, however the network splits it (hardening list H1, H2, H3, H7)."""

from __future__ import annotations

import pytest

from fastserve.settings import Limits
from tests.net.kit import Pipe, Reply, client, echo, limits, run, serving

HOST = b"Host: a\r\n"
TAIL = b"GET /echo HTTP/1.1\r\nHost: smuggled\r\n\r\n"


def post(*lines: bytes, body: bytes = b"") -> bytes:
    return b"\r\n".join([b"POST /echo HTTP/1.1", b"Host: a", *lines, b"", body])


LENGTHS = [
    *(b"+1", b"-1", b"0x1", b"1_0", b" 1", b"\t1", b"1 ", b"010", b"00", b"", b"1,1", b"1, 1", b"1;1", b"a"),
    *(b"1.0", b"1e1", b"9223372036854775808", b"18446744073709551617", b"\xb9"),
]
CODINGS = [
    *(b"xchunked", b"chunked, identity", b"identity, chunked", b",chunked", b"chunked,", b"chunked, chunked"),
    *(b"chunked;q=1", b"identity", b"gzip, chunked", b"gzip", b"\x0bchunked", b"chunked\x0b", b" chunked"),
    *(b"\tchunked", b"chunked ", b'"chunked"', b"", b"chun ked", b"cow"),
]
CHUNKED = b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
CODING = b"Transfer-Encoding: chunked"
HEADS = {
    "length and coding": post(b"Content-Length: 3", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
    "coding and length": post(b"Transfer-Encoding: chunked", b"Content-Length: 3", body=b"0\r\n\r\n"),
    "two lengths": post(b"Content-Length: 1", b"Content-Length: 2", body=b"ab"),
    "two equal lengths": post(b"Content-Length: 1", b"Content-Length: 1", body=b"a"),
    "two codings": post(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
    "coding then identity": post(CODING, b"Transfer-Encoding: identity", body=b"0\r\n\r\n"),
    "coding in HTTP/1.0": b"POST /echo HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "space before colon": post(b"Content-Length : 1", body=b"a"),
    "tab before colon": post(b"Transfer-Encoding\t: chunked", body=b"0\r\n\r\n"),
    "folded": post(b"X: a", b" b"),
    "folded length": post(b"Content-Length:", b" 1", body=b"a"),
    "folded coding": post(b"Transfer-Encoding:", b"\tchunked", body=b"0\r\n\r\n"),
    "empty name": post(b": a"),
    "no colon": post(b"Content-Length"),
    "NUL in name": post(b"Content-Length\0: 1"),
    "NUL in value": post(b"X: a\0b"),
    "control in value": post(b"X: a\x01b"),
    "delete in value": post(b"X: a\x7fb"),
    "bare CR in value": post(b"X: a\rTransfer-Encoding: chunked"),
    "bare LF in value": post(b"X: a\nTransfer-Encoding: chunked"),
    "bare LF line ends": b"GET /echo HTTP/1.1\nHost: a\n\n",
    "bare LF at the end": b"GET /echo HTTP/1.1\r\nHost: a\n\r\n",
    "bare CR line ends": b"GET /echo HTTP/1.1\rHost: a\r\r\n\r\n",
    "name with bracket": post(b"X[: a"),
    "name not ASCII": post(b"X\xff: a"),
    "space before the first header": b"GET /echo HTTP/1.1\r\n Host: a\r\n\r\n",
    "HTTP/0.9": b"GET /echo\r\n\r\n",
    "HTTP/1.32": b"GET /echo HTTP/1.32\r\n" + HOST + b"\r\n",
    "HTTP/9.9": b"GET /echo HTTP/9.9\r\n" + HOST + b"\r\n",
    "HTTP/2 preface after a line": b"\r\nPRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/1": b"GET /echo HTTP/1\r\n" + HOST + b"\r\n",
    "http/1.1": b"GET /echo http/1.1\r\n" + HOST + b"\r\n",
    "ICE/1.0": b"GET /echo ICE/1.0\r\n" + HOST + b"\r\n",
    "version with sign": b"GET /echo HTTP/+1.1\r\n" + HOST + b"\r\n",
    "two spaces": b"GET  /echo HTTP/1.1\r\n" + HOST + b"\r\n",
    "two spaces after target": b"GET /echo  HTTP/1.1\r\n" + HOST + b"\r\n",
    "space after version": b"GET /echo HTTP/1.1 \r\n" + HOST + b"\r\n",
    "tab in request line": b"GET\t/echo HTTP/1.1\r\n" + HOST + b"\r\n",
    "no host": b"GET /echo HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /echo HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "host with space": b"GET /echo HTTP/1.1\r\nHost: a b\r\n\r\n",
    "host with slash": b"GET /echo HTTP/1.1\r\nHost: a/b\r\n\r\n",
    "host with user": b"GET /echo HTTP/1.1\r\nHost: a@b\r\n\r\n",
    "relative target": b"GET echo HTTP/1.1\r\n" + HOST + b"\r\n",
    "star target": b"GET * HTTP/1.1\r\n" + HOST + b"\r\n",
    "empty target": b"GET  HTTP/1.1\r\n" + HOST + b"\r\n",
    "other scheme": b"GET ftp://a/echo HTTP/1.1\r\n" + HOST + b"\r\n",
    "NUL in target": b"GET /echo\0 HTTP/1.1\r\n" + HOST + b"\r\n",
    "control in target": b"GET /echo\x01 HTTP/1.1\r\n" + HOST + b"\r\n",
    "not ASCII in target": b"GET /echo\xc0\xaf HTTP/1.1\r\n" + HOST + b"\r\n",
    "space in target": b"GET /echo /x HTTP/1.1\r\n" + HOST + b"\r\n",
    "bad method": b"G\x01T /echo HTTP/1.1\r\n" + HOST + b"\r\n",
    "method with bracket": b"G(T /echo HTTP/1.1\r\n" + HOST + b"\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "two empty lines first": b"\r\n\r\nGET /echo HTTP/1.1\r\nHost: a\r\n\r\n",
    "space first": b" GET /echo HTTP/1.1\r\nHost: a\r\n\r\n",
}  # fmt: skip
HEADS |= {f"length {value!r}": post(b"Content-Length: " + value, body=b"a") for value in LENGTHS}
HEADS |= {
    f"coding {value!r}": post(b"Transfer-Encoding: " + value, body=b"1\r\na\r\n0\r\n\r\n")
    for value in CODINGS
}

BODIES = {
    "size with sign": b"+1\r\na\r\n0\r\n\r\n",
    "size with prefix": b"0x1\r\na\r\n0\r\n\r\n",
    "size with underscore": b"1_0\r\na\r\n0\r\n\r\n",
    "size with space": b" 1\r\na\r\n0\r\n\r\n",
    "size and space": b"1 \r\na\r\n0\r\n\r\n",
    "size and tab extension": b"1\t;a\r\na\r\n0\r\n\r\n",
    "no size": b"\r\na\r\n0\r\n\r\n",
    "size of 17 digits": b"00000000000000001\r\na\r\n0\r\n\r\n",
    "huge size": b"ffffffffffffffff\r\na\r\n0\r\n\r\n",
    "size line with LF": b"1\na\r\n0\r\n\r\n",
    "size line with CR": b"1\ra\r\n0\r\n\r\n",
    "data ends with LF": b"1\r\na\n0\r\n\r\n",
    "data too long": b"1\r\nab\r\n0\r\n\r\n",
    "data too short": b"2\r\na\r\n0\r\n\r\n",
    "extension with LF": b"1;a\nb\r\na\r\n0\r\n\r\n",
    "extension with CR": b"1;a\rb\r\na\r\n0\r\n\r\n",
    "extension with NUL": b"1;\0\r\na\r\n0\r\n\r\n",
    "trailer folded": b"0\r\nX: a\r\n b\r\n\r\n",
    "trailer with LF": b"0\r\nX: a\n\r\n",
    "trailer with CR": b"0\r\nX: a\rb\r\n\r\n",
    "trailer without colon": b"0\r\nX\r\n\r\n",
    "trailer with space before colon": b"0\r\nX : a\r\n\r\n",
    "end with LF": b"0\r\n\n",
}
AUTHORITIES = [
    *(b":80", b"a:b", b"a:-1", b"a:65536", b"a:080000", b"a:80:80", b"u@a", b"u:p@a", b"@a", b"%", b"%zz"),
    *(b"[", b"[]", b"[::1", b"::1", b"[::1]a", b"[::1]:b", b"[a.example]", b"a[0]", b"[v1.]", b"a%2"),
]
ABSOLUTE = [b"http://%b%b" % (a, path) for a in (b"", *AUTHORITIES) for path in (b"/echo", b"")]
HEADS |= {
    f"target {target!r}": b"GET " + target + b" HTTP/1.1\r\n" + HOST + b"\r\n"
    for target in (*ABSOLUTE, b"http://?x", b"HTTPS:///echo", b"http:/echo", b"http:echo", b"a:80")
}
HEADS |= {f"host {host!r}": b"GET /echo HTTP/1.1\r\nHost: " + host + b"\r\n\r\n" for host in AUTHORITIES}
CASES = HEADS | {
    f"chunk: {name}": post(b"Transfer-Encoding: chunked", body=body) for name, body in BODIES.items()
}


def check_refused(pipe: Pipe, status: tuple[int, ...] = (400,)) -> Reply:
    """One refusal that closes, and nothing after it."""
    (reply,) = pipe.replies()
    assert reply.status in status, reply.body
    assert reply.closes
    assert pipe.ended
    assert sum(pipe.listener.refusals.values()) == 1
    return reply


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [0, 1, 2, 3, 7])
def test_smuggling(name: str, size: int) -> None:
    begun = []

    def endpoint(call: object) -> None:
        begun.append(call)

    pipe = Pipe({"/echo": endpoint})
    pipe.feed(CASES[name] + TAIL, size)
    assert begun == []
    statuses = (413,) if "huge" in name else (400,)
    if name == "length b'9223372036854775808'":
        statuses = (413,)
    check_refused(pipe, statuses)


@pytest.mark.parametrize("name", CASES)
def test_smuggling_behind_a_good_call(name: str) -> None:
    good = b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi"
    pipe = Pipe({"/echo": echo})
    pipe.feed(good + good + CASES[name] + TAIL)
    first, second, last = pipe.replies()
    assert (first.status, second.status) == (200, 200)
    assert last.status in (400, 413)
    assert last.closes


def test_every_case_over_a_socket() -> None:
    async def main() -> None:
        async with serving({"/echo": echo}) as listener:
            for case in CASES.values():
                async with client(listener) as peer:
                    peer.send(case + TAIL)
                    reply = await peer.reply()
                    assert reply.status in (400, 413)
                    assert await peer.rest() == b""

    run(main())


UNKNOWN = [b"FOO", b"TRACE", b"CONNECT", b"get", b"PROPFIND", b"SOURCE", b"M-SEARCH", b"GETX"]


@pytest.mark.parametrize("method", UNKNOWN)
@pytest.mark.parametrize("size", [0, 1])
def test_unknown_methods(method: bytes, size: int) -> None:
    pipe = Pipe({"/echo": echo})
    pipe.feed(method + b" /echo HTTP/1.1\r\nHost: a\r\n\r\n", size)
    reply = check_refused(pipe, (501,))
    assert reply.headers["content-type"] == "application/json"
    assert reply.body == b'{"error":"the method %b is not implemented"}' % method


SMALL = limits(header_bytes=512, header_count=8, target_bytes=64, body_bytes=100, body_chunks=5)
OVER = {
    "target": (b"GET /echo?" + b"a" * 59 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 414, "target_bytes"),
    "endless target": (b"GET /echo?" + b"a" * 5000, 414, "target_bytes"),
    "header block": (b"GET /echo HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 600 + b"\r\n\r\n", 431, "header_bytes"),
    "endless header": (b"GET /echo HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 5000, 431, "header_bytes"),
    "header count": (b"GET /echo HTTP/1.1\r\nHost: a\r\n" + b"X: a\r\n" * 8 + b"\r\n", 431, "header_count"),
    "body": (post(b"Content-Length: 101", body=b"a" * 101), 413, "body_bytes"),
    "expected body": (post(b"Content-Length: 101", b"Expect: 100-continue"), 413, "body_bytes"),
    "chunk": (CHUNKED + b"65\r\n" + b"a" * 101, 413, "body_bytes"),
    "chunks": (CHUNKED + b"20\r\n" + b"a" * 32 + b"\r\n45\r\n" + b"a" * 69, 413, "body_bytes"),
    "chunk count": (CHUNKED + b"1\r\na\r\n" * 6 + b"0\r\n\r\n", 413, "body_chunks"),
    "extension": (CHUNKED + b"1;" + b"a" * 600 + b"\r\na\r\n0\r\n\r\n", 431, "header_bytes"),
    "extensions": (CHUNKED + (b"1;" + b"a" * 200 + b"\r\na\r\n") * 3, 431, "header_bytes"),
    "endless extension": (CHUNKED + b"1;" + b"a" * 5000, 431, "header_bytes"),
    "trailer block": (CHUNKED + b"0\r\nX: " + b"a" * 600 + b"\r\n\r\n", 431, "header_bytes"),
    "trailers": (CHUNKED + b"0\r\n" + b"X: 1\r\n" * 9 + b"\r\n", 431, "header_count"),
}


@pytest.mark.parametrize("name", OVER)
@pytest.mark.parametrize("size", [0, 1, 2, 13, 100, 511, 512, 513])
def test_limits_hold_for_every_split(name: str, size: int) -> None:
    data, status, setting = OVER[name]
    pipe = Pipe({"/echo": lambda call: pytest.fail("reached")}, SMALL)
    pipe.feed(data, size)
    reply = check_refused(pipe, (status,))
    assert f"limits.{setting}" in reply.body.decode()
    assert str(getattr(SMALL, setting)) in reply.body.decode()
    assert reply.headers["content-type"] == "application/json"


WITHIN = {
    "target": b"GET /echo?" + b"a" * 58 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    "header count": b"GET /echo HTTP/1.1\r\nHost: a\r\n" + b"X: a\r\n" * 7 + b"\r\n",
    "body": post(b"Content-Length: 100", body=b"a" * 100),
    "chunks": CHUNKED + b"14\r\naaaaaaaaaaaaaaaaaaaa\r\n" * 5 + b"0\r\n" + b"X: 1\r\n" * 8 + b"\r\n",
    "extension": CHUNKED + b"1;" + b"a" * 400 + b"\r\na\r\n0\r\n\r\n",
}
WITHIN["header block"] = b"GET /echo HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 476 + b"\r\n\r\n"


@pytest.mark.parametrize("name", WITHIN)
@pytest.mark.parametrize("size", [0, 1, 2, 13, 100, 511])
def test_what_is_just_within_the_limits_passes(name: str, size: int) -> None:
    pipe = Pipe({"/echo": echo}, SMALL)
    pipe.feed(WITHIN[name] * 2, size)
    assert [reply.status for reply in pipe.replies()] == [200, 200]


def test_a_head_of_exactly_the_limit_is_512_bytes() -> None:
    assert len(WITHIN["header block"]) == 512


def test_a_refused_body_is_not_waited_for() -> None:
    pipe = Pipe({"/echo": echo}, SMALL)
    pipe.feed(post(b"Content-Length: 1000000"))
    check_refused(pipe, (413,))
    pipe.feed(b"a" * 10000)
    assert len(pipe.replies()) == 1


@pytest.mark.parametrize("value", [b"200-ok", b"100-continue, x", b"1"])
def test_other_expectations(value: bytes) -> None:
    pipe = Pipe({"/echo": echo})
    pipe.feed(post(b"Expect: " + value, b"Content-Length: 1", body=b"a"))
    check_refused(pipe, (417,))


def test_default_limits_are_those_of_the_hardening_list() -> None:
    usual = Limits()
    assert (usual.header_bytes, usual.header_count, usual.target_bytes) == (65536, 100, 8192)
    assert (usual.body_chunks, usual.pipelined_calls) == (65536, 16)


def test_a_million_one_byte_chunks_stop_at_the_limit() -> None:
    pipe = Pipe({"/echo": echo})
    pipe.feed(CHUNKED + b"1\r\na\r\n" * 70000, 65536)
    reply = check_refused(pipe, (413,))
    assert b"limits.body_chunks" in reply.body


def test_a_header_count_of_thousands_is_cheap_to_refuse() -> None:
    pipe = Pipe({"/echo": echo})
    pipe.feed(b"GET /echo HTTP/1.1\r\nHost: a\r\n" + b"a:\r\n" * 16000 + b"\r\n")
    check_refused(pipe, (431,))
