"""A front's end and the owner's end of a relay in one process, with a scheduler that the test holds."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fastserve.engine.counters import counts_of
from fastserve.engine.engine import SCHEDULER, Engine, Scheduler
from fastserve.engine.relay import client as relay_client
from fastserve.engine.relay import server as relay_server
from fastserve.engine.relay.channel import RelayChannel
from fastserve.engine.relay.client import RelayClient, RelayScheduler
from fastserve.engine.relay.server import RelayServer
from fastserve.errors import DeadlineError, Kind, ServeError
from fastserve.repository.catalog import Catalog
from fastserve.repository.model_config import parse_model_config
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.tensor import DTYPES, Tensor
from tests.engine.rig import run

PAGE = 4096
KEY = 7
TENSOR = {"dtype": "uint8", "shape": [-1]}
CONFIG = {"backend": "python", "inputs": {"x": TENSOR}, "outputs": {"y": TENSOR}, "max_batch_size": 4}


async def no_model(name: str) -> None:
    raise AssertionError(f"nobody wants {name}")


class HeldScheduler(Scheduler):
    """Answers with the input `times` times, once `gate` is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked: list[InferRequest] = []
        self.cancelled = self.released = 0
        self.times = 2
        self.borrows = False

    async def infer(self, engine: Engine, version: Version, request: InferRequest) -> InferResponse:
        self.asked.append(request)
        if self.borrows:
            assert request.borrowed is not None
            request.borrowed.begin()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if request.request_id == "fails":
            raise ServeError(Kind.UNAVAILABLE, "no")
        if request.request_id == "breaks":
            raise RuntimeError("secret")
        data = bytes(request.inputs["x"].data) * self.times
        return InferResponse({"y": Tensor(DTYPES["uint8"], (1, len(data)), data)}, self._release)

    def _release(self) -> None:
        self.released += 1


class Relay:
    """Both ends, and one version."""

    def __init__(self, pages: int, tickets: int) -> None:
        self.version = Version("m", 1, Path(), parse_model_config(CONFIG))
        self.held = HeldScheduler()
        SCHEDULER.put(self.version, self.held)
        self.owner = RelayChannel.create(pages * PAGE, tickets=tickets)
        message, fds = self.owner.describe()
        self.front = RelayChannel.join(message, [os.dup(fd) for fd in fds])
        self.engine = Engine(Catalog())
        self.relay_server = RelayServer(self.owner, self.engine, {KEY: self.version}.get, no_model)
        self.client = RelayClient(self.front)
        self.scheduler = RelayScheduler(self.client, KEY)
        self.relay_server.open()
        self.client.open()

    async def ask(
        self, data: bytes, id: str = "", deadline_ns: int = 0, scheduler: Scheduler | None = None
    ) -> bytes:
        request = InferRequest(
            {"x": Tensor(DTYPES["uint8"], (1, len(data)), data)}, request_id=id, deadline_ns=deadline_ns
        )
        response = await (scheduler or self.scheduler).infer(self.engine, self.version, request)
        try:
            return bytes(response.outputs["y"].data)
        finally:
            response.release()

    def asking(self, data: bytes, **more: object) -> asyncio.Task[bytes]:
        return asyncio.ensure_future(self.ask(data, **more))  # type: ignore[arg-type]

    @property
    def used(self) -> tuple[int, int, int]:
        return self.relay_server.running, self.front.requests.used(), self.front.replies.used()

    async def until(self, true: object) -> None:
        async with asyncio.timeout(60):
            while not true():  # type: ignore[operator]
                await asyncio.sleep(0.001)

    def close(self) -> None:
        self.relay_server.close()
        self.front.close()


@contextlib.asynccontextmanager
async def relaying(pages: int = 64, tickets: int = 64) -> AsyncIterator[Relay]:
    """A relay; nothing of its memory may be in use when the test is done."""
    relay = Relay(pages, tickets)
    try:
        yield relay
        relay.held.gate.set()
        await relay.until(lambda: relay.used == (0, 0, 0))
        await relay.scheduler.drain()
    finally:
        relay.close()


def test_many_requests_through_few_tickets() -> None:
    async def work() -> None:
        async with relaying(pages=512, tickets=4) as relay:
            sent = [b"%d" % n for n in range(300)]
            assert await asyncio.gather(*map(relay.ask, sent)) == [data * 2 for data in sent]
            assert relay.held.released == 300

    run(work())


def test_large_tensors_come_whole() -> None:
    data = os.urandom(10 << 20)

    async def work() -> None:
        async with relaying(pages=16_000) as relay:
            assert await relay.ask(data) == data * 2

    run(work())


def test_requests_wait_for_memory_in_their_order() -> None:
    async def work() -> None:
        async with relaying(pages=4) as relay:
            relay.held.gate.clear()
            relay.held.times = 1
            asking = [relay.asking(b"x" * size) for size in (3 * PAGE - 500, 2 * PAGE, 10)]
            await relay.until(lambda: relay.held.asked)
            assert len(relay.held.asked) == 1, "the small one does not overtake"
            asking[1].cancel()
            await relay.until(lambda: len(relay.held.asked) == 2)
            relay.held.gate.set()
            assert [len(await asking[n]) for n in (0, 2)] == [3 * PAGE - 500, 10]
            assert counts_of(relay.version).failures["CANCELED"].count == 1

    run(work())


def test_a_request_waits_for_memory_until_its_deadline() -> None:
    async def work() -> None:
        async with relaying(pages=1) as relay:
            relay.held.gate.clear()
            first = relay.asking(b"a")
            await relay.until(lambda: relay.held.asked)
            with pytest.raises(DeadlineError) as caught:
                await relay.ask(b"b", deadline_ns=time.monotonic_ns() + 1_000_000)
            assert caught.value.queued
            assert counts_of(relay.version).failures["REJECTED"].count == 1
            relay.held.gate.set()
            assert await first == b"aa"

    run(work())


def test_a_request_larger_than_the_memory_is_refused() -> None:
    async def work() -> None:
        async with relaying(pages=2) as relay:
            with pytest.raises(ServeError, match="allowed: up to 8192") as caught:
                await relay.ask(bytes(3 * PAGE))
            assert caught.value.kind is Kind.RESOURCE_EXHAUSTED
            with pytest.raises(ServeError, match="no room for 12") as caught:
                await relay.ask(bytes(PAGE + 2000))
            assert caught.value.kind is Kind.RESOURCE_EXHAUSTED
            assert relay.held.released == 1

    run(work())


def test_replies_that_nobody_reads_fail_after_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_server, "ROOM_LIMIT_S", 0.01)

    async def work() -> None:
        async with relaying(pages=3) as relay:
            request = InferRequest({"x": Tensor(DTYPES["uint8"], (1, 3500), bytes(3500))})
            unread = await relay.scheduler.infer(relay.engine, relay.version, request)
            with pytest.raises(ServeError, match="no room for 7"):
                await relay.ask(bytes(3500))
            assert relay.held.released == 2, "what the reply lay in is free"
            unread.release()
            assert await relay.ask(bytes(3500)) == bytes(7000)

    run(work())


def test_a_reply_waits_until_others_are_read() -> None:
    async def work() -> None:
        async with relaying(pages=3) as relay:
            request = InferRequest({"x": Tensor(DTYPES["uint8"], (1, 3500), bytes(3500))})
            unread = await relay.scheduler.infer(relay.engine, relay.version, request)
            asking = relay.asking(bytes(3500))
            await relay.until(lambda: len(relay.held.asked) == 2)
            unread.release()
            assert await asking == bytes(7000)

    run(work())


@pytest.mark.logs_errors
@pytest.mark.parametrize(("id", "text"), [("fails", "no"), ("breaks", "the request failed")])
def test_errors_come_back(id: str, text: str, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with relaying() as relay:
            with pytest.raises(ServeError) as caught:
                await relay.ask(b"a", id=id)
            assert caught.value.message == text
            with pytest.raises(ServeError, match="unloaded"):
                await relay.ask(b"a", scheduler=RelayScheduler(relay.client, KEY + 1))

    run(work())
    assert len(caplog.records) == (id == "breaks")
    caplog.clear()


def test_a_client_that_leaves_cancels_its_request() -> None:
    async def work() -> None:
        async with relaying() as relay:
            relay.held.gate.clear()
            before = relay.asking(b"a")
            await asyncio.sleep(0)
            before.cancel()  # perhaps before the owner has begun
            later = relay.asking(b"b")
            await relay.until(lambda: any(bytes(r.inputs["x"].data) == b"b" for r in relay.held.asked))
            later.cancel()
            await relay.until(lambda: relay.used == (0, 0, 0))
            assert relay.held.cancelled == len(relay.held.asked)

    run(work())


def test_memory_that_a_batch_still_reads_is_not_given_away() -> None:
    async def work() -> None:
        async with relaying(pages=1) as relay:
            relay.held.gate.clear()
            relay.held.borrows = True
            asking = relay.asking(b"a")
            await relay.until(lambda: relay.held.asked)
            asking.cancel()
            await relay.until(lambda: relay.held.cancelled)
            for _ in range(20):
                await asyncio.sleep(0)
            assert relay.used == (1, 1, 0)
            request = relay.held.asked[0]
            assert bytes(request.inputs["x"].data) == b"a"
            assert request.borrowed is not None
            request.borrowed.end()
            relay.held.borrows = False
            relay.held.gate.set()
            assert await relay.ask(b"b") == b"bb"
            relay.held.borrows = True
            with pytest.raises(ServeError):
                await relay.ask(b"c", id="fails")
            assert relay.used == (1, 1, 0), "nor that of one which failed"
            relay.held.asked[-1].borrowed.end()  # type: ignore[union-attr]

    run(work())


def test_an_owner_that_answers_too_late_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_client, "OWNER_GRACE_S", 0.01)

    async def work() -> None:
        async with relaying() as relay:
            relay.held.gate.clear()  # and it knows no deadline
            with pytest.raises(DeadlineError):
                await relay.ask(b"a", deadline_ns=time.monotonic_ns() + 1_000_000)
            await relay.until(lambda: relay.held.cancelled == 1)

    run(work())


def test_the_end_of_a_front_cancels_what_it_had_asked() -> None:
    async def work() -> None:
        relay = Relay(64, 64)
        relay.held.gate.clear()
        asking = [relay.asking(b"a"), relay.asking(b"b")]
        await relay.until(lambda: len(relay.held.asked) == 2)
        relay.relay_server.close()
        await relay.until(lambda: relay.held.cancelled == 2)
        for one in asking:
            one.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        relay.front.close()
        assert [bytes(one.inputs["x"].data) for one in relay.held.asked] == [b"", b""], "its memory is gone"

    run(work())


def test_idle_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastserve.engine.relay.channel.TRIM_S", 0.01)

    def blocks(relay: Relay) -> int:
        return os.fstat(relay.owner.memory_fd).st_blocks * 512

    async def work() -> None:
        async with relaying(pages=16_000) as relay:
            await relay.ask(bytes(8 << 20))
            assert blocks(relay) > 8 << 20
            await relay.until(lambda: blocks(relay) < 1 << 20)

    run(work())
