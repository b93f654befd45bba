"""The short way of a request over HTTP/2 against plain Python: who goes it, who does not, what it writes.

The classes here are as small as their subclasses may be; the real ones are tested in tests/net/http2."""

from __future__ import annotations

import gc
import struct
import weakref
from time import monotonic_ns
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve._ext import http2_path as ext
from fastserve.net.grpc.metadata import NEVER_NS
from tests.oracles import http2_path as oracle

TIMED = {"received_ns", "deadline_ns"}
BURST, A_TURN, EARNED = 100, 10, 5
BLOCK, TRAILERS = b"block", b"end"
MOST_QUEUED = 1000
numbers = st.integers(0, (1 << 31) - 1)


class ClosableStream(ext.StreamFields):
    """A stream that is closed when it is said to be."""

    closed = False


class Path(ext.Http2Path):
    """A connection whose transport is itself: what is special is noted."""

    def __init__(self) -> None:
        terms = BURST, A_TURN, EARNED, "whole", "done", ext.StreamFields
        super().__init__(terms, 99, 2, MOST_QUEUED)
        self.client_window = 1 << 20
        self._transport = self
        self.sending = Sending(self, 1 << 20)
        self.noted: list[Any] = []
        self.written: list[bytes] = []
        self.charges = 0

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def _flush_soon(self) -> None:
        self.noted.append("soon")

    def _charge(self) -> None:
        self.charges += 1

    def _renew_window(self) -> None:
        self.noted.append(("renew", self._credit))

    def look_for_end(self) -> None:
        self.noted.append("end?")

    def _request_anew(self, number: int, block: bytes, body: bytes) -> None:
        self.noted.append("anew")

    def _refuse_length(self, number: int) -> None:
        self.noted.append("length")

    def _finish_stream(self, stream: ext.StreamFields) -> None:
        self.noted.append("sent_end")


class Sending(ext.SendingPath):
    def _reply_in_parts(self, stream: ext.StreamFields, block: bytes, body: bytes, trailers: bytes) -> None:
        self._connection.noted.append("parts")


class Calls(ext.CallsPath):
    def begin(self, call: ext.CallPath) -> bool:
        call.head.noted.append("begin")
        return bool(call.head.lets)


class Call(ext.CallPath):
    def run(self, request: Any) -> None:
        self.head.noted.append(("run", request))

    def fail(self, error: BaseException) -> None:
        self.head.noted.append(("fail", error))

    def listen(self) -> None:
        self.head.noted.append("listen")

    def feed(self, body: bytes) -> None:
        self.head.noted.append(body)

    def end_input(self) -> None:
        self.head.noted.append("end")

    def _reply_in_parts(self, message: Any) -> None:
        self.head.noted.append(("parts", message))

    def _end_settling(self, code: int) -> None:
        self.head.noted.append(("told", code))


class Head(ext.HeadPath):
    body_bytes = -1

    def __init__(self, start: Any = None, timeout_ns: int = -1) -> None:
        self.calls = Calls((BLOCK, TRAILERS, "closed", Call))
        self.calls.most_bytes, self.calls.plain_bytes = 100, 50
        self.calls.opening = SimpleNamespace(done=True)
        self.calls.deadlines = set()
        self.start, self.timeout_ns, self.ordinary = start, timeout_ns, timeout_ns < 0
        self.service, self.lets = self, True
        self.noted: list[Any] = []


def fields(made: Any) -> dict[str, Any]:
    """All of them but times."""
    names = set(getattr(oracle, type(made).__name__).__slots__)
    return {name: getattr(made, name) for name in names - TIMED}


def framed(message: bytes) -> bytes:
    return struct.pack(">BI", 0, len(message)) + message


@given(numbers, numbers)
def test_a_stream(number: int, window: int) -> None:
    connection, head, state = Path(), object(), object()
    connection.client_window = window
    made = [of.StreamFields(connection, number, head, state) for of in (ext, oracle)]
    assert fields(made[0]) == fields(made[1])
    made[0].window -= window + 10  # SETTINGS may take it below zero
    assert made[0].window == -10


@given(st.one_of(st.just(-1), st.integers(0, NEVER_NS)))
def test_a_call(timeout_ns: int) -> None:
    head, stream = Head(None, timeout_ns), ext.StreamFields(Path(), 1, None, None)
    before = monotonic_ns()
    made = [of.CallPath(head, stream) for of in (ext, oracle)]
    after = monotonic_ns()
    assert fields(made[0]) == fields(made[1])
    for call in made:
        assert before <= call.received_ns <= after
        assert call.deadline_ns == (call.received_ns + timeout_ns if timeout_ns >= 0 else 0)


@given(
    st.integers(1, 9), st.integers(-1, 7), st.integers(0, 9), st.integers(0, 3), st.integers(0, 2000),
    st.booleans(), st.sampled_from((-1, 0, 3)), st.binary(max_size=4),
)  # fmt: skip
def test_who_goes_the_short_way(
    number: int, last: int, stop: int, streams: int, queued: int, known: bool, told: int, body: bytes
) -> None:
    path, taken = Path(), []
    head = SimpleNamespace(body_bytes=told, service=SimpleNamespace(answer=lambda s, b: taken.append((s, b))))
    path.blocks = {BLOCK: head} if known else {}
    path.last, path._stop, path.sending.queued = last, stop, queued
    path.streams = {100 + other: object() for other in range(streams)}
    path.request(number, BLOCK, body)
    at = {"last": last, "stop": stop, "most": 2, "queued": queued, "most_queued": MOST_QUEUED}
    expected = oracle.goes_short(number, body, head if known else None, at, streams)
    assert path.noted == ([] if expected == "answer" else [expected])
    assert path.last == (last if expected == "anew" else number)
    assert (number in path.streams) == (expected == "answer") == bool(taken)
    for stream, given_body in taken:
        assert given_body is body
        assert fields(stream) == fields(oracle_stream(path, number, head))


def oracle_stream(path: Path, number: int, head: Any) -> oracle.StreamFields:
    return oracle.StreamFields(path, number, head, "whole")


@given(
    st.integers(0, 17000), st.sampled_from((0, 50, 17000)), st.sampled_from((0, 50, 17000)),
    st.booleans(), st.booleans(), st.booleans(),
)  # fmt: skip
def test_what_goes_at_once(
    size: int, window: int, connection: int, queued: bool, choked: bool, prefixed: bool
) -> None:
    path = Path()
    stream = ext.StreamFields(path, 1, None, "whole")
    path.streams = {1: stream}
    sending, stream.window, path.sending.window = path.sending, window, connection
    sending.queued, sending.choked, sending._prefix = int(queued), choked, b"p" if prefixed else b""
    sending.reply(stream, BLOCK, bytes(size), TRAILERS)
    blocks, waits = len(BLOCK) + len(TRAILERS), queued or choked or prefixed
    goes = oracle.fits(size, blocks, window, connection, waits=waits)
    assert path.noted == ([] if goes else ["parts"])
    assert len(path.written) == goes == (stream.state == "done")
    assert sending.window == connection - size * goes


@pytest.mark.parametrize("message", [b"", b"m", bytes(50)])
def test_an_answer_of_a_call(message: bytes) -> None:
    def start(taken: bytes, call: ext.CallPath) -> bool:
        asked.append(call)
        return taken == b"question"

    path, asked, head = Path(), list[ext.CallPath](), Head(start)
    path.blocks = {BLOCK: head}
    path.request(1, BLOCK, framed(b"question"))
    (call,) = asked
    assert head.calls.running == 1
    assert call.stream.context is call
    call.on_gone = print
    call.reply(message)
    assert path.written == [oracle.answer_frames(1, BLOCK, message, TRAILERS)]
    assert (call.over, call.on_gone, call.stream.context, call.sent_bytes) == (True, None, None, len(message))
    assert (path.streams, path._served, head.calls.running) == ({}, 1, 0)
    assert path.sending.window == (1 << 20) - 5 - len(message)
    call.reply(b"again")
    assert (len(path.written), head.noted, path.noted) == (1, [], [])


@pytest.mark.parametrize(
    ("message", "change"),
    [
        (bytes(51), {}),
        ([b"a", b"b"], {}),
        (b"a", {"coding": b"gzip"}),
        (b"a", {"trailing": (("a", "b"),)}),
    ],
)
def test_an_answer_that_is_special(message: Any, change: dict[str, Any]) -> None:
    head, path = Head(), Path()
    call = Call(head, ext.StreamFields(path, 1, head, "whole"))
    for name, value in change.items():
        setattr(call, name, value)
    call.reply(message)
    assert (head.noted, path.written, call.over) == ([("parts", message)], [], False)


def test_an_answer_that_finds_no_room() -> None:
    head, path = Head(), Path()
    call = Call(head, ext.StreamFields(path, 1, head, "whole"))
    path.sending.choked = True
    call.reply(b"a")
    assert (head.noted, path.written, call.over) == ([("parts", b"a")], [], False)


def test_an_answer_nobody_waits_for() -> None:
    head, path = Head(), Path()
    call = Call(head, ext.StreamFields(path, 1, head, "closed"))
    head.calls.running, head.calls.logged = 1, True
    call.reply(b"a")
    assert (head.noted, path.written, call.over, head.calls.running) == ([("told", 0)], [], True, 0)


@pytest.mark.parametrize("code", [0, 13])
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("counts", [False, True])
def test_the_end_of_a_call_is_counted_or_told(code: int, waits: bool, counts: bool) -> None:
    """A good end that only has to be counted is not told: nobody waits, and there is no error to note."""
    head = Head()
    call = Call(head, ext.StreamFields(Path(), 1, head, "whole"))
    head.calls.logged, call.writable = True, object() if waits else None
    head.count = (lambda: head.noted.append("count")) if counts else None
    call.settle(code)
    assert head.noted == (["count"] if counts and not waits and not code else [("told", code)])
    head.calls.logged = False
    call.settle(code)
    assert len(head.noted) == 1 + waits


def test_a_call_goes_to_its_method() -> None:
    error = ValueError()

    def broken(message: bytes, call: ext.CallPath) -> bool:
        raise error

    for start, noted in (
        (lambda message, call: True, []),
        (lambda message, call: False, [("run", (b"m", False))]),
        (broken, [("fail", error)]),
        (None, [("run", (b"m", False))]),
    ):
        head = Head(start)
        head.answer(ext.StreamFields(Path(), 1, head, "whole"), framed(b"m"))
        assert head.noted == noted


@pytest.mark.parametrize("body", [b"", framed(b"m")[:-1], framed(b"m") * 2, b"\1" + framed(b"m")[1:]])
def test_bodies_that_are_not_one_message(body: bytes) -> None:
    head = Head(lambda message, call: True)
    head.answer(ext.StreamFields(Path(), 1, head, "whole"), body)
    assert head.noted == ["listen", body, "end"]


def test_calls_that_are_looked_at() -> None:
    for head in (Head(lambda message, call: True, 5), Head(lambda message, call: True)):
        head.calls.most_at_once = 1
        head.answer(ext.StreamFields(Path(), 1, head, "whole"), framed(b"m"))
        assert head.noted == ["begin"]
    head.lets = False
    head.start = None
    head.answer(ext.StreamFields(Path(), 1, head, "whole"), framed(b"m"))
    assert head.noted == ["begin", "begin"]  # and it is not run


def test_the_end_of_a_reply() -> None:
    path = Path()
    stream = ext.StreamFields(path, 1, None, "open")
    path._abuse_budget, path._leaving = BURST - 2 * EARNED, 1
    path.sent_end(stream)
    assert (path.noted, path._abuse_budget, path._served) == (["sent_end", "end?"], BURST - EARNED, 1)


def test_replies_of_many_streams_go_together() -> None:
    path = Path()
    streams = {number: ext.StreamFields(path, number, None, "whole") for number in (1, 3, 5)}
    path.streams = dict(streams)
    for stream in streams.values():
        path.sending.reply(stream, BLOCK, b"", b"")
    assert path.noted == ["soon"]
    assert path._out is not None
    assert (len(path._out), path.written, path.streams) == (3, [], {})


def test_fields_take_what_they_are_given() -> None:
    call = ext.CallPath(Head(), ext.StreamFields(Path(), 1, None, None))
    call.over, call.sent_bytes, call.trailing = True, 1 << 40, (("a", "b"),)
    assert (call.over, call.sent_bytes, call.trailing) == (True, 1 << 40, (("a", "b"),))
    with pytest.raises(AttributeError):
        call.unheard_of = 1  # type: ignore[attr-defined]


def test_a_circle_is_found_by_the_collector() -> None:
    head = Head()
    stream = ext.StreamFields(Path(), 1, head, None)
    stream.context = ext.CallPath(head, stream)
    gone = weakref.ref(head)
    del head, stream
    gc.collect()
    assert gone() is None


def test_bytes_held_are_charged_beyond_what_is_charged_already() -> None:
    path = Path()
    path._most_held, path._least_held = 100, 50
    one, other = (ClosableStream(path, number, None, "open") for number in (1, 3))
    assert path.hold(one, 60)
    assert path.hold(other, 40)
    assert path.charges == 0
    assert path.hold(other, 1)
    one.closed = True
    assert not path.hold(one, 1)
    assert (path.held, one.held, other.held, path.charges) == (102, 61, 41, 2)
    path.release_bytes(one, 50)
    path.release_bytes(other, 1000)
    assert (path.held, one.held, other.held, path.charges) == (11, 11, 0, 3)


def test_the_window_is_given_back_below_its_mark() -> None:
    path = Path()
    path._credit, path._low = 100, 50
    path.spend_window(50)
    path.spend_window(1)
    assert path.noted == [("renew", 49)]
