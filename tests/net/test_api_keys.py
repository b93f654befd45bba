"""API keys on the wire: what a stranger may try with heads, connections, bodies and time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.net.access_control import Opening, Scope
from fastserve.net.api_keys import LACKS_SCOPE, WANTED, ApiKeyGate, Compartment, KeyTerms, keyed
from fastserve.net.callback_guard import SUBJECT
from fastserve.net.grpc import GrpcListener, Method
from fastserve.net.http1.large_bodies import BULK_BYTES
from fastserve.net.key_usage import KeyUsage
from fastserve.net.request import RequestHead
from fastserve.net.router import Route, Router, Yields
from fastserve.serving.dialect import DialectSpec, HttpRoute, NoOptions
from fastserve.settings import GrpcOptions
from fastserve.settings.key_file import KeyEntry, changing, make_key
from tests.net.grpc.peer import Peer as GrpcPeer
from tests.net.grpc.peer import frame
from tests.net.http2.kit import POST, Peer
from tests.net.kit import Clock, Paths, Pipe, echo, run

NOW = 1_000_000.0
HEAD = b"POST /echo HTTP/1.1\r\nHost: a\r\n%bContent-Length: %d\r\n\r\n"


class Keys:
    """A file of keys, and the gate that reads it. `a` and `b` may infer, `m` may read metadata."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "keys.yaml"
        self.clock = Clock()
        self.clock.now = NOW
        self.text: dict[str, bytes] = {}
        for name, scopes in (("a", ("infer",)), ("b", ("infer",)), ("m", ("metadata",))):
            self.add(name, *scopes)
        self.gate = ApiKeyGate(self.path, clock=self.clock)
        self.gate.load()

    def add(self, name: str, *scopes: Any, expires: str = "", subject: str = "") -> None:
        with changing(self.path) as entries:
            if subject:
                entries.append(KeyEntry(name, scopes, subject=subject, expires=expires))
                return
            text, entry = make_key(name, scopes, expires)
            self.text[name] = text.encode()
            entries.append(entry)

    def revoke(self, name: str) -> None:
        with changing(self.path) as entries:
            entries[:] = [entry for entry in entries if entry.name != name]
        self.gate.renew()

    def bearer(self, name: str) -> bytes:
        return b"Authorization: Bearer %b\r\n" % self.text[name]

    def pipe(self, subject: str = "", **options: Any) -> Pipe:
        pipe = Pipe({"/echo": echo}, gate=self.gate, **options)
        pipe._extra[SUBJECT] = subject
        return pipe

    def ask(self, *lines: bytes, subject: str = "") -> bytes:
        """What a request with these header lines is answered."""
        pipe = self.pipe(subject)
        pipe.feed(HEAD % (b"".join(lines), 2) + b"hi")
        (reply,) = pipe.replies()
        return reply.body


def test_a_change_of_the_file_is_a_change_of_its_keys_alone(tmp_path: Path) -> None:
    """Each key that is made anew costs the loop 30 us, and its holder's limits are found again."""
    made: list[str] = []

    def make_usage(entry: KeyEntry, known: KeyUsage | None) -> KeyUsage:
        made.append(entry.name)
        return known or KeyUsage(entry.name)

    path = tmp_path / "keys.yaml"
    with changing(path) as entries:
        entries.extend(make_key(f"k{number}", ("infer",))[1] for number in range(4))
        entries.append(KeyEntry("cert", ("infer",), subject="CN=cert"))
    gate = ApiKeyGate(path, make_usage=make_usage)
    gate.load()
    assert made == ["k0", "k1", "k2", "k3", "cert"]
    usage = gate.find_usage("k1")
    made.clear()
    with changing(path) as entries:
        entries[1] = make_key("k1", ("infer",), requests_per_second=5.0)[1]
        del entries[3]
    assert gate.renew()
    assert made == ["k1"]
    assert gate.count == 4
    assert gate.find_usage("k1") is usage
    assert gate.find_usage("k3") is None
    head = RequestHead(b"")
    head.client = "CN=cert"
    assert gate.identify(head) is not None


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


IN = b"POST /echo hi"
NO, LITTLE = WANTED.encode(), LACKS_SCOPE.format("infer").encode()


def test_a_key_is_read_from_each_of_its_headers(keys: Keys) -> None:
    text = keys.text["a"]
    for line in (
        b"Authorization: Bearer %b\r\n", b"authorization: bearer %b\r\n", b"AUTHORIZATION: BEARER  %b \r\n",
        b"x-api-key: %b\r\n", b"X-Api-Key: %b \t\r\n", b"api-key: %b\r\n",
    ):  # fmt: skip
        assert keys.ask(line % text) == IN, line
    assert keys.ask(keys.bearer("m")) == LITTLE


def test_what_is_no_key(keys: Keys) -> None:
    text = keys.text["a"]
    ident = text[:16]
    for lines in (
        b"", b"Authorization: %b\r\n" % text, b"Authorization: Basic %b\r\n" % text,
        b"Authorization: Bearer\r\n", b"Authorization: Bearer \r\n", b"x-api-key:\r\n",
        b"x-api-key: %b\r\n" % text[:-1], b"x-api-key: %bA\r\n" % text, b"x-api-key: %b\r\n" % text.upper(),
        b"x-api-key: %b%b\r\n" % (ident, b"A" * 43), b"x-api-key: fs_%b_%b\r\n" % (b"0" * 12, b"A" * 43),
        b"x-api-key: %b,%b\r\n" % (text, text), b"x-api-key: \xff%b\r\n" % text,
        b"Cookie: api-key=%b\r\n" % text, b"x_api_key: %b\r\n" % text,
        b"Proxy-Authorization: Bearer %b\r\n" % text,
    ):  # fmt: skip
        assert keys.ask(lines) == NO, lines


def test_two_different_keys_are_none(keys: Keys) -> None:
    """Whoever reads the first one, and whoever reads the last, would see two clients."""
    a, b, wrong = keys.text["a"], keys.text["b"], make_key("w", ("infer",))[0].encode()
    for one, other in ((a, b), (a, wrong), (wrong, a), (a, b"")):
        for names in ((b"x-api-key", b"api-key"), (b"x-api-key", b"x-api-key"), (b"api-key", b"x-api-key")):
            assert keys.ask(b"%b: %b\r\n%b: %b\r\n" % (names[0], one, names[1], other)) == NO
        assert keys.ask(b"Authorization: Bearer %b\r\nx-api-key: %b\r\n" % (one, other)) == NO
    assert keys.ask(keys.bearer("a"), b"x-api-key: %b\r\n" % a) == IN
    assert keys.ask(b"Authorization: Basic eDp5\r\n", b"x-api-key: %b\r\n" % a) == IN


def test_a_key_is_not_read_from_the_target(keys: Keys) -> None:
    pipe = keys.pipe()
    for query in (b"?api-key=%b", b"?key=%b", b"?access_token=%b"):
        pipe.feed(b"GET /echo%b HTTP/1.1\r\nHost: a\r\n\r\n" % (query % keys.text["a"]))
    assert [reply.body for reply in pipe.replies()] == [NO] * 3


def test_a_connection_has_no_rights_of_its_own(keys: Keys) -> None:
    """Keep-alive: the first request has a key, the second none, one with another length, another key, and
    all of it again, so that every cached head has its turn."""
    pipe = keys.pipe()
    with_key, without, weak = (HEAD % (line, 2) + b"hi" for line in (keys.bearer("a"), b"", keys.bearer("m")))
    longer = HEAD % (b"", 3) + b"hi!"
    for sent in (with_key, without, with_key, with_key, longer, weak, with_key + without + weak, without):
        pipe.feed(sent)
    got = [reply.body for reply in pipe.replies()]
    assert got == [IN, NO, IN, IN, NO, LITTLE, IN, NO, LITTLE, NO]


def test_a_cached_route_is_not_open(keys: Keys) -> None:
    """The router remembers targets that were answered 200."""
    router, head = keys.pipe().listener.router, RequestHead(b"")
    head.method, head.target = "POST", "/echo"
    router.route(head)
    router.remember(head)
    pipe = keys.pipe()
    pipe.feed(HEAD % (keys.bearer("a"), 2) + b"hi")
    pipe.feed(HEAD % (b"", 2) + b"hi")
    assert [reply.body for reply in pipe.replies()] == [IN, NO]


def test_what_is_not_there_is_401_first(keys: Keys) -> None:
    pipe = keys.pipe()
    for line in (b"", keys.bearer("m")):
        pipe.feed(b"GET /nowhere HTTP/1.1\r\nHost: a\r\n%b\r\n" % line)
    got = [(reply.status, reply.headers.get("www-authenticate")) for reply in pipe.replies()]
    assert got == [(401, 'Bearer realm="fastserve"'), (404, None)]


@pytest.mark.parametrize("size", [100, BULK_BYTES + 1, 100 << 20])
def test_a_body_without_a_key_is_not_read(keys: Keys, size: int) -> None:
    """It is refused by its head, is never asked for, and no memory is taken for it."""
    pipe = keys.pipe()
    pipe.feed(HEAD % (b"Expect: 100-continue\r\n", size))
    (reply,) = pipe.replies()
    assert (reply.body, reply.closes) == (NO, True)
    assert pipe.ended
    assert pipe.listener.refusals["api_key"] == 1
    pipe = keys.pipe()
    pipe.feed(b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
    assert [reply.body for reply in pipe.replies()] == [NO]


def test_trailers_are_no_key(keys: Keys) -> None:
    pipe = keys.pipe()
    pipe.feed(
        b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"2\r\nhi\r\n0\r\nx-api-key: %b\r\n\r\n" % keys.text["a"]
    )
    assert [reply.body for reply in pipe.replies()] == [NO]
    peer = Peer({"/echo": echo}, gate=keys.gate)
    headers = [*POST, ("trailer", "x-api-key")]
    number = peer.send(headers, b"hi", end=False)
    peer.h2.send_headers(number, [("x-api-key", keys.text["a"].decode())], end_stream=True)
    peer.flush()
    assert peer.answers[number].body == NO


def test_streams_of_one_connection_do_not_share_a_key(keys: Keys) -> None:
    """A proxy's users: the same connection, the same header table, the same cached heads."""
    peer = Peer({"/echo": echo}, gate=keys.gate)
    with_key = [*POST, ("authorization", "Bearer " + keys.text["a"].decode())]
    weak = [*POST, ("authorization", "Bearer " + keys.text["m"].decode())]
    for _ in range(3):
        assert peer.ask(with_key, b"hi").body == IN
        assert peer.ask(POST, b"hi").body == NO
        assert peer.ask(weak, b"hi").body == LITTLE
        assert peer.ask([*with_key, ("x-api-key", keys.text["b"].decode())], b"hi").body == NO
    other = Peer({"/echo": echo}, gate=keys.gate)
    assert other.ask(POST, b"hi").body == NO


def test_http2_bodies_without_a_key_are_not_read(keys: Keys) -> None:
    peer = Peer({"/echo": echo}, gate=keys.gate)
    number = peer.send([*POST, ("content-length", str(50 << 20)), ("expect", "100-continue")], end=False)
    peer.flush()
    answer = peer.answers[number]
    assert (answer.status, answer.body, answer.informed) == (503, NO, [])  # 503 is how `Paths` refuses
    assert peer.ask([*POST, ("x-api-key", keys.text["a"].decode())], b"hi").body == IN


def test_a_head_is_looked_at_again_after_each_change(keys: Keys) -> None:
    """A key is revoked while its connection lives: the next request is refused. One that is new is let in by
    the same file."""
    pipe = keys.pipe()
    a, b = (HEAD % (keys.bearer(name), 2) + b"hi" for name in ("a", "b"))
    pipe.feed(a)
    pipe.feed(b)
    keys.revoke("a")
    pipe.feed(a)
    pipe.feed(b)
    assert [reply.body for reply in pipe.replies()] == [IN, IN, NO, IN]
    peer = Peer({"/echo": echo}, gate=keys.gate)
    with_key = [*POST, ("x-api-key", keys.text["b"].decode())]
    assert peer.ask(with_key, b"hi").body == IN
    keys.revoke("b")
    assert peer.ask(with_key, b"hi").body == NO


def test_a_key_expires_while_its_connection_lives(keys: Keys) -> None:
    keys.add("short", "infer", expires="1970-01-12T13:47:00Z")  # 1,000,020
    keys.gate.renew()
    assert keys.gate.seconds_to_expiry() == 20
    pipe = keys.pipe()
    sent = HEAD % (keys.bearer("short"), 2) + b"hi"
    pipe.feed(sent)
    keys.clock.now += 20
    assert not keys.gate.renew()  # the file has not changed
    assert keys.gate.seconds_to_expiry() == float("inf")
    pipe.feed(sent)
    assert [reply.body for reply in pipe.replies()] == [IN, NO]
    assert keys.gate.count == 3


def test_a_body_on_its_way_when_its_key_is_revoked(keys: Keys) -> None:
    pipe = keys.pipe()
    whole = HEAD % (keys.bearer("a"), 2 * BULK_BYTES) + bytes(2 * BULK_BYTES)
    pipe.feed(whole[:BULK_BYTES])
    keys.revoke("a")
    pipe.feed(whole[BULK_BYTES:])
    assert [reply.body for reply in pipe.replies()] == [NO]


def test_a_broken_file_keeps_the_keys(keys: Keys) -> None:
    good = keys.path.read_bytes()
    for bad in (
        b"", b"keys", b"keys: [", b"keys:\n- name: x\n", b"keys: []\nrates: 1\n", b"\xff", b"nobody: []",
        good.replace(b"infer", b"everything"), good.replace(b'"b"', b'"a"'), good + good,
    ):  # fmt: skip
        keys.path.write_bytes(bad)
        with pytest.raises(ConfigError) as fault:
            keys.gate.renew()
        assert keys.gate.stale
        assert not any(part in str(fault.value) for part in good.decode().split('"') if len(part) > 40)
        assert keys.ask(keys.bearer("a")) == IN
    keys.path.unlink()
    with pytest.raises(ConfigError):
        keys.gate.renew()
    assert keys.ask(keys.bearer("a")) == IN
    keys.path.write_bytes(good)
    assert keys.gate.renew()
    assert not keys.gate.stale
    assert not keys.gate.renew()


def test_a_file_that_is_replaced_with_an_old_date_is_read(keys: Keys) -> None:
    was = keys.path.stat()
    beside = keys.path.with_name("new")
    beside.write_text("keys: []\n" + "#" * (was.st_size - 9))
    os.utime(beside, ns=(was.st_atime_ns, was.st_mtime_ns))
    beside.replace(keys.path)
    assert keys.gate.renew()
    assert keys.ask(keys.bearer("a")) == NO


def test_a_key_in_place_of_its_hash_is_not_shown(keys: Keys) -> None:
    keys.path.write_text(
        f'keys:\n- {{name: x, scopes: [infer], id: "{"0" * 12}", hash: {keys.text["a"].decode()}}}\n'
    )
    with pytest.raises(ConfigError) as fault:
        keys.gate.renew()
    assert keys.text["a"].decode() not in str(fault.value)


def test_a_certificate_is_a_key(keys: Keys) -> None:
    keys.add("ops", "infer", subject="CN=ops,O=acme")
    keys.gate.renew()
    assert keys.ask(subject="CN=ops,O=acme") == IN
    assert keys.ask(subject="CN=ops") == NO
    assert keys.ask() == NO
    wrong = b"x-api-key: %b\r\n" % make_key("w", ("infer",))[0].encode()
    assert keys.ask(wrong, subject="CN=ops,O=acme") == NO  # what is said goes before what is known
    assert keys.ask(keys.bearer("m"), subject="CN=ops,O=acme") == LITTLE


def test_http2_heads_of_other_certificates_are_not_shared(keys: Keys) -> None:
    """Equal headers on two connections of a listener: heads are cached for both."""
    keys.add("ops", "infer", subject="CN=ops")
    keys.gate.renew()
    known = Peer({"/echo": echo}, gate=keys.gate)
    known.pipe._extra[SUBJECT] = "CN=ops"
    assert known.ask(POST, b"hi").body == IN
    stranger = Peer({"/echo": echo}, gate=keys.gate)
    stranger.pipe.listener.http2._heads = shared = known.pipe.listener.http2._heads
    assert len(shared) == 1
    assert stranger.ask(POST, b"hi").body == NO
    assert known.ask(POST, b"hi").body == IN


def test_health_is_open_or_asks(keys: Keys) -> None:
    head = RequestHead(b"")
    assert keys.gate.admit(head, Scope.HEALTH) is None
    keys.gate.opens_health = False
    with pytest.raises(ServeError) as caught:
        keys.gate.admit(head, Scope.HEALTH)
    assert caught.value.kind is Kind.UNAUTHENTICATED


def test_a_call_waits_for_the_start_behind_its_key(keys: Keys) -> None:
    """Without a key nobody learns that the server is starting."""
    opening = Opening(done=False)
    pipe = keys.pipe(opening=opening)
    a, nobody = HEAD % (keys.bearer("a"), 2) + b"hi", HEAD % (b"", 2) + b"hi"
    pipe.feed(a)
    pipe.feed(nobody)
    opening.finish()
    pipe.feed(a)
    pipe.feed(nobody)
    got = [reply.body for reply in pipe.replies()]
    assert got == [b"The server is starting: its models are loading", NO, IN, NO]


def no_part(compartment: Compartment, head: RequestHead) -> Any:
    raise AssertionError("no key is for some models")


class Taking:
    """An endpoint that reads large bodies itself."""

    taken = 0

    def __call__(self, call: Any) -> None:
        raise AssertionError("not asked")

    def take(self, call: Any, body: Any) -> bool:
        self.taken += 1
        return True


def test_bodies_are_not_taken_without_a_key(keys: Keys) -> None:
    endpoint, refused = Taking(), []
    terms = KeyTerms(keys.gate, Opening(), Scope.INFER, lambda call, fault: refused.append(fault), no_part)
    behind: Any = keyed(terms, endpoint)
    head = RequestHead(b"")
    call: Any = type("Call", (), {"head": head})()
    assert not behind.take(call, None)
    assert behind(call) is None
    assert [fault.kind for fault in refused] == [Kind.UNAUTHENTICATED]
    head.headers = [(b"x-api-key", keys.text["a"])]
    assert behind.take(call, None)
    keys.revoke("a")
    assert not behind.take(call, None)
    assert endpoint.taken == 1
    plain = keyed(terms, echo)
    assert not hasattr(plain, "take")


# ---- gRPC

PATH = "/t.T/Call"


async def forward(requests: AsyncIterator[bytes], rpc: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


async def answer(request: bytes, rpc: Any) -> bytes:
    return request


METHODS = (
    Method(PATH, bytes, answer, bytes, scope=Scope.INFER),
    Method("/t.T/Stream", bytes, forward, bytes, takes_stream=True, gives_stream=True, scope=Scope.INFER),
)
UNAUTHENTICATED = Kind.UNAUTHENTICATED.value


def test_calls_of_one_connection_and_a_key_that_is_revoked(keys: Keys) -> None:
    async def work() -> None:
        listener = GrpcListener("127.0.0.1", 0, METHODS, GrpcOptions(), gate=keys.gate)
        await listener.open()
        peer = GrpcPeer(*await asyncio.open_connection(*listener.address))
        with_key = ("authorization", "Bearer " + keys.text["a"].decode())
        for _ in range(3):
            assert (await peer.ask(PATH, frame(b"hi"), with_key)).messages == [b"hi"]
            refused = await peer.ask(PATH, frame(b"hi"))
            assert refused.status[0] == UNAUTHENTICATED
            assert not refused.data
        stream = peer.begin("/t.T/Stream", with_key)
        peer.send(stream, frame(b"one"))
        await peer.read(lambda: peer.answers[stream].messages)
        # Without a key a call costs its head: what it sends afterwards is not waited for.
        silent = peer.begin(PATH)
        assert (await peer.finish(silent)).status[0] == UNAUTHENTICATED
        keys.revoke("a")
        ended = await peer.finish(stream)  # the client has ended nothing
        assert ended.status[0] == UNAUTHENTICATED
        assert (await peer.ask(PATH, frame(b"hi"), with_key)).status[0] == UNAUTHENTICATED
        await peer.close()
        await listener.close()
        assert not keys.gate._followers  # a listener that is closed is forgotten

    run(work())


def test_a_stream_outlives_the_change_of_other_keys(keys: Keys) -> None:
    async def work() -> None:
        listener = GrpcListener("127.0.0.1", 0, METHODS, GrpcOptions(), gate=keys.gate)
        await listener.open()
        peer = GrpcPeer(*await asyncio.open_connection(*listener.address))
        stream = peer.begin("/t.T/Stream", ("x-api-key", keys.text["a"].decode()))
        peer.send(stream, frame(b"one"))
        await peer.read(lambda: peer.answers[stream].messages)
        keys.revoke("b")
        peer.send(stream, frame(b"two"), ends=True)
        assert (await peer.finish(stream)).messages == [b"one", b"two"]
        await peer.close()
        await listener.close()

    run(work())


# ---- a route without a scope does not build


def test_a_route_without_a_scope_does_not_build() -> None:
    nothing: Any = None
    for scopes in ({}, {"GET": nothing}, {"GET": "infer"}):
        with pytest.raises(TypeError, match="/x: a route needs a Scope"):
            HttpRoute("x", "/x", scopes)
    with pytest.raises(TypeError, match=r"/a\.B/C: an RPC needs a Scope, given None"):
        Method("/a.B/C", bytes, answer, bytes, scope=nothing)
    with pytest.raises(TypeError):
        Method("/a.B/C", bytes, answer, bytes)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"/a\.B/C: an RPC needs a Scope"):
        DialectSpec(name="x", options=NoOptions, build=nothing, rpcs={"/a.B/C": nothing})


def test_a_dialect_that_gives_a_route_without_a_scope_is_not_served() -> None:
    class Careless(Paths):
        def route(self, method: str, target: str) -> Route | None:
            nothing: Any = None
            return Route(echo, nothing, Yields.NEVER)

        def refuse(self, call: Any, fault: ServeError) -> None: ...

    with pytest.raises(TypeError, match="GET /x: a route needs a Scope, given None"):
        Router([Careless({})]).find("GET", "/x")
