"""How long a connection of plain HTTP/2 lives: age and grace, by the clock of the listener."""

from __future__ import annotations

from hyperframe.frame import GoAwayFrame, PingFrame

from fastserve.net.http2.settings import ANSWER_S, PATIENCE_S, SPREAD, Lifetimes
from tests.net.http2.kit import GET, Raw
from tests.net.kit import Held, echo, limits

END, HEADS = "END_STREAM", "END_HEADERS"
QUIET = limits(idle_timeout_s=1e6)
OLD = Lifetimes(max_age_s=100.0)
YOUNGEST, OLDEST = 100.0 * (1 - SPREAD), 100.0 * (1 + SPREAD)


def goaways(raw: Raw) -> list[tuple[int, int]]:
    return [(one.last_stream_id, one.error_code) for one in raw.frames() if isinstance(one, GoAwayFrame)]


def pong(raw: Raw) -> None:
    raw.feed(PingFrame(0, opaque_data=b"draining", flags=["ACK"]).serialize())


def test_an_old_connection_ends_in_two_steps() -> None:
    raw = Raw({"/echo": echo}, QUIET, lifetimes=OLD).greet()
    raw.pipe.scan(0.0)
    raw.pipe.scan(YOUNGEST - 0.1)
    assert goaways(raw) == []
    raw.pipe.scan(OLDEST)
    assert goaways(raw) == [(2**31 - 1, 0)]
    raw.feed(raw.headers(1, GET, END, HEADS))  # it was on its way
    pong(raw)
    assert goaways(raw) == [(1, 0)]
    assert raw.pipe.ended


def test_requests_under_way_are_finished() -> None:
    held = Held()
    raw = Raw({"/echo": held}, QUIET, lifetimes=OLD).greet()
    raw.feed(raw.headers(1, GET, END, HEADS))
    raw.pipe.scan(0.0)
    raw.pipe.scan(OLDEST)
    assert goaways(raw) == [], "it waits a little for a moment without streams"
    raw.pipe.scan(OLDEST + PATIENCE_S)
    assert goaways(raw) == [(2**31 - 1, 0)]
    pong(raw)
    raw.pipe.scan(OLDEST + 1000.0)
    assert not raw.pipe.ended
    held.calls[0].reply(200, b"late")
    assert raw.pipe.ended
    assert not held.left


def test_after_the_grace_they_are_cut_off() -> None:
    held = Held()
    raw = Raw({"/echo": held}, QUIET, lifetimes=OLD._replace(max_age_grace_s=50.0)).greet()
    raw.feed(raw.headers(1, GET, END, HEADS))
    raw.pipe.scan(0.0)
    raw.pipe.scan(OLDEST)
    assert not held.left
    raw.pipe.scan(OLDEST + 50.0)
    assert held.left
    assert raw.pipe.closed
    assert raw.pipe.listener.refusals["max_connection_age_grace_s"] == 1


def test_a_client_that_never_says_that_it_has_heard() -> None:
    raw = Raw({"/echo": echo}, QUIET, lifetimes=OLD).greet()
    raw.pipe.scan(0.0)
    raw.pipe.scan(OLDEST)
    assert goaways(raw) == [(2**31 - 1, 0)]
    raw.pipe.scan(OLDEST + PATIENCE_S + ANSWER_S + 1.0)
    assert goaways(raw) == [(0, 0)]
    assert raw.pipe.ended


def test_connections_that_began_together_do_not_end_together() -> None:
    ages = set()
    for _ in range(20):
        raw = Raw({"/echo": echo}, QUIET, lifetimes=OLD).greet()
        raw.pipe.scan(0.0)
        ages.add(next(now for now in range(80, 120) if (raw.pipe.scan(float(now)), goaways(raw))[1]))
    assert len(ages) > 3
    assert min(ages) >= int(YOUNGEST)
    assert max(ages) <= OLDEST + 1
