"""X-Request-Timeout, every way: a request whose time is up is told so, and never reaches the model."""

from __future__ import annotations

from typing import Any

import pytest

from fastserve.errors import Kind
from tests.conformance.rig import Rig, is_right
from tests.conformance.rpc_ways import RpcWay
from tests.conformance.ways import Answer, V1Http, Way

HEADER = "x-request-timeout"
SHORT, LONG = "40ms", "50"


def told(way: Way, kind: Kind, http: int) -> Any:
    """What a client is told whose request has no time, or one that nobody can read."""
    if isinstance(way, RpcWay):
        return f"the stream ended: {kind.name}" if way.streams else kind.value
    return way.status(kind) if isinstance(way, V1Http) else http


def is_late(way: Way, answer: Answer) -> bool:
    v1 = isinstance(way, V1Http)
    wanted = "UNAVAILABLE" if v1 else told(way, Kind.DEADLINE_EXCEEDED, 504)
    return bool(answer.status == wanted)


def test_who_waits_too_long_is_told_and_never_runs(rig: Rig, way: Way, form: str, path: str) -> None:
    model = f"{form}-{path}"

    async def work() -> None:
        await rig.learn(way, model, 2)
        rig.forget_seen(model)
        held, value = rig.fresh_hold(), rig.fresh()
        with rig.holding(model):
            running = await way.open(rig)
            running.send(way.build(model, [held]))
            await rig.until_running(model, held)
            waits = await way.open(rig)
            waits.send(way.within(way.build(model, [value], slot=1), HEADER, SHORT))
            answer = await waits.reply()
            assert is_late(way, answer), answer
        assert is_right(await running.reply(), way, [held])
        rows = [rig.fresh()]
        assert is_right(await way.ask(rig, way.build(model, rows, slot=1)), way, rows)
        assert value not in [one for batch in rig.seen(model) for one in batch]

    rig.run(work())


def test_who_runs_too_long_is_told(rig: Rig, way: Way, form: str, path: str) -> None:
    model = f"{form}-{path}"

    async def work() -> None:
        await rig.learn(way, model, 2)
        held = rig.fresh_hold()
        with rig.holding(model):
            line = await way.open(rig)
            line.send(way.within(way.build(model, [held]), HEADER, "0.15"))
            answer = await line.reply()
            assert is_late(way, answer), answer
            if held in [one for batch in rig.seen(model) for one in batch]:
                await rig.until_told(model, held)
            if not isinstance(way, RpcWay):
                assert "0.15 s" in answer.text or way.name.startswith("v1"), answer
        rows = [rig.fresh()]
        line = await way.open(rig)
        line.send(way.within(way.build(model, rows, slot=1), HEADER, LONG))
        assert is_right(await line.reply(), way, rows)

    rig.run(work())


@pytest.mark.parametrize(
    ("name", "time", "kind", "http"),
    [
        (HEADER, "0", Kind.DEADLINE_EXCEEDED, 504),
        (HEADER, "-1", Kind.INVALID_ARGUMENT, 400),
        (HEADER, "1.5 m", Kind.INVALID_ARGUMENT, 400),
        (HEADER, "nan", Kind.INVALID_ARGUMENT, 400),
        ("x-envoy-expected-rq-timeout-ms", "12.5", Kind.INVALID_ARGUMENT, 400),
    ],
)
def test_no_time_and_no_number(rig: Rig, way: Way, name: str, time: str, kind: Kind, http: int) -> None:
    async def work() -> None:
        rig.forget_seen("columns-fast")
        value = rig.fresh()
        answer = await way.ask(rig, way.within(way.build("columns-fast", [value]), name, time))
        if (
            isinstance(way, RpcWay) and way.streams
        ):  # grpcio writes to the stream that has ended, and tells that
            assert str(answer.status).startswith("the stream ended"), answer
        elif kind is Kind.DEADLINE_EXCEEDED:
            assert is_late(way, answer), answer
        else:
            assert answer.status == told(way, kind, http), answer
            assert isinstance(way, V1Http) or f"{time!r}" in answer.text, answer
        assert rig.seen("columns-fast") == []

    if way.asks("columns"):
        rig.run(work())
