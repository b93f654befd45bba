"""Ends of a text request, in every API over every transport."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from fastserve.metrics import names
from fastserve.serving.text import TextStream
from fastserve.serving.text.models import TextModel
from tests.conformance.text.apis import APIS, FULL, INTERNAL, LATE, LOST, MODEL, TEXT, UNKNOWN, WORDS, Api
from tests.conformance.text.lines import Line
from tests.conformance.text.rig import SLOTS, WAITING, TextRig, open_text_rig

# Those of chats in another form of words are played over one transport.
WAYS = [(api, transport) for api in APIS for transport in (("h1",) if api.is_chat else ("h1", "h2"))]
WAYS += [(api, "grpc") for api in APIS if api.name == "v2-stream"]
EVERY_WAY = pytest.mark.parametrize(
    ("api", "transport"), WAYS, ids=[f"{api.name}-{transport}" for api, transport in WAYS]
)
# What costs a worker's start is played over one transport.
ONCE = pytest.mark.parametrize(
    ("api", "transport"),
    [(api, ("h1", "h2")[at // 2 % 2]) for at, api in enumerate(APIS)],
    ids=[api.name for api in APIS],
)
FIRST = b"one "
AGAIN_S = 0.02


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextRig]:
    with open_text_rig(tmp_path_factory.mktemp("text")) as opened:
        yield opened


def is_told(api: Api, transport: str, reply: Any, event: str, *, begun: bool = False) -> bool:
    """A stream of gRPC says all in its messages, and has Triton's words for a full queue."""
    if transport == "grpc" and event == FULL:
        return "Exceeds maximum queue size" in api.read(reply).error
    return api.is_told(reply, event, begun=begun or transport == "grpc")


@EVERY_WAY
def test_lives(rig: TextRig, api: Api, transport: str) -> None:
    """Answered; left before it runs, before its first token, after it; turned away; and what was counted."""

    async def work() -> None:
        before = rig.count(api)
        rig.stop()
        running = [await rig.send(api, transport, word) for word in ("hold", "silent")]
        if api.stream:
            await running[0].until(FIRST)
        await rig.until_held(SLOTS)
        waiting = [await rig.send(api, transport, "plain") for _ in range(WAITING)]
        await rig.until_held(SLOTS + WAITING)
        for _ in range(2):
            assert is_told(api, transport, await rig.ask(api, transport), FULL)
        waiting[0].leave()
        await rig.until_held(SLOTS + WAITING - 1)
        for line in running:
            line.leave()
        assert api.read(await waiting[1].rest()).text == TEXT
        rig.go()
        await rig.is_well(api, transport)
        held = await rig.send(api, transport, "hold")
        assert api.read(await held.rest()).text == TEXT
        await rig.settled()
        counted = rig.count(api) - before
        turned_away = counted.pop("queue_rows")
        refused = counted.pop("UNAVAILABLE")
        assert turned_away == refused >= 2
        counted.pop("CANCELLED", None)  # dialects differ in whether a request nobody waits for has a status
        assert counted == Counter({"OK": 3, api.finish: 3, "cancelled": 3}), counted

    rig.run(work())


@ONCE
@pytest.mark.logs_errors
def test_the_worker_is_lost(rig: TextRig, api: Api, transport: str) -> None:
    """A sequence that has begun is told; one that has not is answered by the next worker."""

    async def work() -> None:
        rig.stop()
        begun = await rig.send(api, transport, "hold")
        if api.stream:
            await begun.until(FIRST)
        await rig.until(lambda: _running(rig) == 1)
        waits = await rig.send(api, transport, "silent")
        await rig.until_held(2)
        rig.kill()
        assert is_told(api, transport, reply := await begun.rest(), LOST, begun=True), reply
        rig.go()
        assert api.read(await waits.rest()).text == TEXT
        await rig.is_well(api, transport)

    rig.run(work())


def _running(rig: TextRig) -> float:
    (levels,) = rig.server.registry.read(names.TEXT_RUNNING)
    return sum(level for (level,) in levels.values())


@pytest.mark.parametrize(("transport", "prompt"), [("h1", "hold"), ("h2", "silent")])
def test_time_is_up(rig: TextRig, transport: str, prompt: str) -> None:
    """Whether it runs or waits: every API at once, since each takes a second. More wait than may: the line is
    as long as the test is wide."""

    async def one(api: Api) -> None:
        while True:
            line = await rig.send(api, transport, prompt, timeout=1)
            reply = await line.rest()
            if not api.is_told(reply, FULL):
                assert api.is_told(reply, LATE, begun=FIRST.strip() in reply.body), (api.name, reply)
                return
            await asyncio.sleep(AGAIN_S)

    async def work() -> None:
        rig.stop()
        await asyncio.gather(*(one(api) for api in APIS if api.timed))

    rig.run(work())


@ONCE
def test_a_version_is_loaded_anew_and_unloaded_under_streams(rig: TextRig, api: Api, transport: str) -> None:
    """A sequence that runs or waits is answered by the version that was asked."""

    async def work() -> None:
        rig.stop()
        asked = [await rig.send(api, transport, word) for word in ("hold", "silent", "plain")]
        await rig.until_held(3)
        rig.write(MODEL, f"\n# {random.random()}\n")
        was = rig.server.catalog.available(MODEL)
        loading = asyncio.ensure_future(rig.server.repository.load(MODEL))
        await rig.until(lambda: rig.server.catalog.available(MODEL) is not was)
        rig.go()
        for line in asked:
            assert api.read(await line.rest()).text == TEXT
        await loading
        rig.stop()
        last = await rig.send(api, transport, "hold")
        await rig.until_held(1)
        unloading = asyncio.ensure_future(rig.server.repository.unload(MODEL, composing=False))
        await rig.until(lambda: rig.server.catalog.available(MODEL) is None)
        assert is_told(api, transport, reply := await rig.ask(api, transport), UNKNOWN), reply
        rig.go()
        assert api.read(await last.rest()).text == TEXT
        await unloading
        await rig.server.repository.load(MODEL)
        await rig.is_well(api, transport)

    rig.run(work())


@EVERY_WAY
def test_clients_that_leave_at_any_byte(rig: TextRig, api: Api, transport: str) -> None:
    """Beside one that stays."""
    dice = random.Random(api.name + transport)

    async def leave(line: Line) -> None:
        if api.stream:
            wanted = dice.choice([0, 1, 300, 3000])
            while len(line.body) < wanted and not line.ended:
                await line._more()
        line.leave()

    async def work() -> None:
        rig.stop()
        staying = await rig.send(api, transport, "hold")
        await rig.until_held(1)
        for _ in range(12):
            line = await rig.send(
                api, transport, "for ever" if api.stream else dice.choice(["silent", "plain"])
            )
            await asyncio.wait_for(leave(line), 60)
        rig.go()
        assert api.read(await staying.rest()).text == TEXT
        await rig.is_well(api, transport)

    rig.run(work())


@EVERY_WAY
@pytest.mark.logs_errors
@pytest.mark.parametrize("step", ["_read", "_start", "_take_in", "_cut"])
def test_an_exception_at_each_step(
    rig: TextRig, monkeypatch: pytest.MonkeyPatch, api: Api, transport: str, step: str
) -> None:
    """While the prompt is read, the sequence started, a token taken in, its text cut: told, not how."""

    def fail(*_args: object, **_named: object) -> Any:
        raise RuntimeError("a secret of the server's")

    async def work() -> None:
        rig.go()
        with monkeypatch.context() as patch:
            patch.setattr(TextModel if step in ("_read", "_start") else TextStream, step, fail)
            reply = await rig.ask(api, transport)
        begun = FIRST.strip() in reply.body or (api.early and step in ("_take_in", "_cut"))
        assert is_told(api, transport, reply, INTERNAL, begun=begun), reply
        assert b"secret" not in reply.body
        await rig.is_well(api, transport)

    rig.run(work())


@pytest.mark.torture
@pytest.mark.parametrize("transport", ["h1", "h2"])
def test_a_thousand_clients_that_leave_at_random_bytes(rig: TextRig, transport: str) -> None:
    """Of streams of every API, and some that read to the end: what came is whole objects, cut anywhere."""
    dice = random.Random(transport)
    streams = [api for api in APIS if api.stream]

    async def one(turn: asyncio.Semaphore) -> None:
        api = dice.choice(streams)
        async with turn:
            prompt = dice.choice(["for ever", "for ever", "plain"])
            line = await rig.send(api, transport, prompt)
            wanted = 1 << 30 if prompt == "plain" else dice.randrange(2000)
            while len(line.body) < wanted and not line.ended:
                await asyncio.wait_for(line._more(), 60)
            if line.ended:
                said = api.read(await line.rest())
                good = said.text in (TEXT, "more " * said.text.count("more "))
                assert WORDS[FULL] in said.error or (good and not said.error), (api.name, said)
            line.leave()

    async def work() -> None:
        rig.go()
        turn = asyncio.Semaphore(10)
        await asyncio.gather(*(one(turn) for _ in range(1000)))
        await rig.settled()
        await rig.is_well(streams[0], transport)

    rig.run(work())
