"""Answers in parts, from real workers: complete, in order, bounded, ended by whoever ends first."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

from fastserve.engine.batch_queue import BatchQueue
from fastserve.engine.schedulers import decoupled as stream_module
from fastserve.engine.schedulers.decoupled import BACKLOG_LOOK_S, Backlog
from fastserve.errors import DeadlineError, Kind, Reason, ServeError
from fastserve.workers.arena import WINDOW_PARTS
from tests.backends.triton_api.rig import Served, model, repeat, repeating, run, serving, until

pytestmark = pytest.mark.waits

FAILED = "Failed to process the request(s) for model 'repeat_0', message: ValueError: kaboom"


@pytest.mark.parametrize(
    ("numbers", "found"),
    [
        ([], []),
        ([7], [7]),
        ([1, 2, 3], [1, 2, 3]),
        ([1, -1, 2], [1, "a bad value", 2]),
        ([-5, 4, 5], [4, 5]),
        ([-6], list(range(1000))),
        ([1, -2, 2], [1, FAILED]),
    ],
)
def test_every_part_in_order(tmp_path, numbers, found):
    async def work() -> None:
        async with serving(tmp_path, repeating()) as at:
            heard = await at.listen("repeat", numbers)
            assert [
                part.partition("\n\nAt:")[0] if isinstance(part, str) else part for part in heard
            ] == found

    run(work())


def test_many_at_once_and_more_than_one_instance(tmp_path):
    async def work() -> None:
        async with serving(tmp_path, repeating(), instances=2) as at:
            wanted = [[n, n + 1, -5 if n % 3 else n, n + 2] for n in range(60)]
            found = await asyncio.gather(*(at.listen("repeat", numbers) for numbers in wanted))
            assert found == [[n for n in numbers if n >= 0] for numbers in wanted]

    run(work())


def test_a_batch_whose_requests_end_apart(tmp_path):
    async def work() -> None:
        batching = repeating() | {
            "max_batch_size": 4,
            "input": [{"name": "IN", "data_type": "TYPE_INT32", "dims": []}],
        }
        async with serving(tmp_path, batching, max_queue_delay_us=50_000) as at:
            wanted = [[1], [-5, 1, 2], [3], []]
            found = await asyncio.gather(*(at.listen("repeat", numbers) for numbers in wanted if numbers))
            assert found == [[1], [1, 2], [3]]

    run(work())


def test_a_look_at_every_place_takes_no_part_away(tmp_path, monkeypatch):
    """Others leave, and the front looks whose batches are done: of one the parts may not have been heard."""
    hear, looking = BatchQueue._on_doorbell, []

    def look_first(queue: BatchQueue) -> None:
        if looking:
            hear(queue)
            return
        end = time.monotonic() + 0.1
        while time.monotonic() < end and not any(
            waiting and queue.ring.is_done(slot, queue.seqs[slot])
            for slot, waiting in enumerate(queue.by_slot)
        ):
            time.sleep(0.001)
        looking.append(True)
        queue._rescan()
        looking.clear()
        hear(queue)

    monkeypatch.setattr(BatchQueue, "_on_doorbell", look_first)

    async def work() -> None:
        async with serving(tmp_path, repeating()) as at:
            for numbers in ([1, 2, 3], [4], [-5, 6]):
                assert await at.listen("repeat", numbers) == [n for n in numbers if n > 0]

    run(work())


def test_the_only_response(tmp_path):
    async def work() -> None:
        async with serving(tmp_path, repeating()) as at:
            assert (await at.ask("repeat", {"IN": repeat([5]).inputs["IN"]}))["OUT"].tolist() == [5]
            for numbers, text in (([], "got 0"), ([1, 2, 3], "got 3"), ([-1], "a bad value")):
                with pytest.raises(ServeError, match=text):
                    await at.ask("repeat", {"IN": repeat(numbers).inputs["IN"]})

    run(work())


def test_a_model_that_is_not_decoupled_streams_its_one_response(tmp_path):
    async def work() -> None:
        async with serving(tmp_path, model("echo")) as at:
            found = [r async for r in at.engine.stream(at.version("echo"), repeat([1, 2]))]
            assert [bytes(r.outputs["OUT"].data) for r in found] == [b"\1\0\0\0\2\0\0\0"]
            assert found[0].final
            found[0].release()

    run(work())


def test_a_caller_who_leaves_cancels(tmp_path):
    """The model waits until it sees that; the next request is answered, so it did."""

    async def work() -> None:
        async with serving(tmp_path, repeating()) as at:
            stream = at.engine.stream(at.version("repeat"), repeat([1, 2, -3]))
            async for response in stream:
                response.release()
                break
            await stream.aclose()
            assert await at.listen("repeat", [9]) == [9]
            waiting = asyncio.ensure_future(at.listen("repeat", [-3]))
            await until(lambda: at.queue("repeat").ring.describe(0)[0] == "running")
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            assert await at.listen("repeat", [8]) == [8]

    run(work())


def test_a_deadline_ends_it(tmp_path):
    async def work() -> None:
        import time

        async with serving(tmp_path, repeating()) as at:
            with pytest.raises(DeadlineError):
                await at.listen("repeat", [1, -3], deadline_ns=time.monotonic_ns() + 100_000_000)
            assert await at.listen("repeat", [8]) == [8]

    run(work())


def test_a_slow_reader_holds_its_model_back(tmp_path):
    async def work() -> None:
        async with serving(tmp_path, repeating()) as at:
            stream = at.engine.stream(at.version("repeat"), repeat([-5, -6]))
            first = await anext(stream)
            pages = at.queue("repeat").ring.slab_pages_used
            await until(lambda: pages() >= WINDOW_PARTS)
            await asyncio.sleep(0.1)  # what would come without back-pressure would come now
            assert pages() <= WINDOW_PARTS + 3
            found = [first, *[response async for response in stream]]
            assert len(found) == 1000
            for response in found:
                response.release()

    run(work())


@pytest.mark.parametrize("numbers", [[-6], [-7]])
def test_a_slow_reader_gives_its_model_up_to_who_waits(tmp_path, numbers):
    """It is behind by so many parts, or by all the memory there is, where others are refused instead."""

    async def work() -> None:
        async with serving(tmp_path, repeating(), max_queue_bytes=8 << 20) as at:
            stream = at.engine.stream(at.version("repeat"), repeat(numbers))
            (await anext(stream)).release()
            pages = at.queue("repeat").ring.slab_pages_used
            await until(lambda: pages() >= (WINDOW_PARTS if numbers == [-6] else 15 << 8))
            assert await patiently(at) == [5]
            await until(lambda: pages() == 0)  # what it had not read is gone
            with pytest.raises(ServeError, match="is read too slowly") as caught:
                await anext(stream)
            assert caught.value.kind is Kind.RESOURCE_EXHAUSTED

    run(work())


async def patiently(at: Served) -> list[int]:
    """Asks until there is room."""
    while True:
        try:
            return await at.listen("repeat", [5])
        except ServeError as error:
            if error.reason is not Reason.QUEUE_FULL:
                raise
            await asyncio.sleep(0.001)


def test_a_slow_reader_takes_no_answer_of_its_batch_along(tmp_path):
    async def work() -> None:
        batching = repeating() | {
            "max_batch_size": 3,
            "input": [{"name": "IN", "data_type": "TYPE_INT32", "dims": []}],
        }
        async with serving(tmp_path, batching, max_queue_delay_us=200_000) as at:
            slow = at.engine.stream(at.version("repeat"), repeat([-6]))
            first = asyncio.ensure_future(anext(slow))
            others = [asyncio.ensure_future(at.listen("repeat", [-6])) for _ in range(2)]
            (await first).release()
            assert await at.listen("repeat", [5]) == [5]
            assert await asyncio.gather(*others) == [list(range(1000))] * 2
            with pytest.raises(ServeError, match="is read too slowly"):
                await anext(slow)

    run(work())


def test_a_slow_reader_keeps_a_model_that_nobody_waits_for(tmp_path, monkeypatch):
    looks = []

    class Watched(Backlog):
        def _is_behind(self) -> bool:
            looks.append(super()._is_behind())
            return looks[-1]

    monkeypatch.setattr(stream_module, "Backlog", Watched)
    monkeypatch.setattr(stream_module, "STALL_LIMIT_S", 0.05)
    monkeypatch.setattr(stream_module, "BACKLOG_LOOK_S", 0.01)

    async def work() -> None:
        async with serving(tmp_path, repeating(), instances=2) as at:
            stream = at.engine.stream(at.version("repeat"), repeat([-6]))
            found = [await anext(stream)]
            await until(lambda: sum(looks) > 20)
            assert await at.listen("repeat", [5]) == [5]  # by the other instance
            found += [response async for response in stream]
            assert len(found) == 1000
            for response in found:
                response.release()

    run(work())


class Shelf:
    """The part of a queue that a backlog sees."""

    turned_away = 0
    arena = SimpleNamespace(geometry=SimpleNamespace(slab_pages=1000))
    room = SimpleNamespace(anyone=False)

    def __init__(self, *, pending: int = 1, ran_ns: int = 0, pages: int = 0) -> None:
        self.ring = SimpleNamespace(
            pending=lambda: pending,
            times_ns=lambda slot: (0, 0, 0, ran_ns, 0),
            slab_pages_used=lambda: pages,
        )


@pytest.mark.parametrize(
    ("queue", "unread", "taken", "nbytes", "slow_s"),
    [
        (Shelf(), WINDOW_PARTS, 1, 100, 2),
        (Shelf(), WINDOW_PARTS - 1, 1, 100, None),  # its model has not come to stand
        (Shelf(), WINDOW_PARTS, WINDOW_PARTS, 100, None),
        (Shelf(), WINDOW_PARTS, 2, 20_000, 5),
        (Shelf(), WINDOW_PARTS, 2, 33_000, None),
        (Shelf(pending=0), WINDOW_PARTS, 1, 100, None),
        (Shelf(ran_ns=1), WINDOW_PARTS, 1, 100, None),  # its instance runs others
        (Shelf(pages=900), 2, 1, 100, 2),
    ],
)
def test_a_backlog_counts_time_that_others_wait(queue, unread, taken, nbytes, slow_s, monkeypatch):
    """Looks four times a second, between which the reader takes so many parts of so many bytes."""
    now = [1]
    monkeypatch.setattr(stream_module, "time", SimpleNamespace(monotonic_ns=lambda: now[0]))

    async def work() -> float | None:
        slow: list[float] = []
        backlog = Backlog(queue, 0, lambda: unread)

        def told() -> None:
            slow.append((now[0] - 1) / 1e9)

        backlog.came(nbytes, told)
        while not slow and now[0] < 60e9:
            for _ in range(taken):
                backlog.taken(nbytes)
            now[0] += int(BACKLOG_LOOK_S * 1e9)
            backlog.close()
            backlog._look(told)
        backlog.close()
        return slow[0] if slow else None

    found = asyncio.run(work())
    assert (found is None) == (slow_s is None)
    assert found is None or 0 < found - slow_s <= 2 * BACKLOG_LOOK_S


def test_a_worker_that_dies_ends_every_stream_with_an_error(tmp_path):
    async def work() -> None:
        async with serving(tmp_path, repeating()) as at:
            streams = [at.engine.stream(at.version("repeat"), repeat([1, -5, -3])) for _ in range(5)]
            for stream in streams:
                (await anext(stream)).release()
            dying = asyncio.ensure_future(at.listen("repeat", [1, -4]))
            for stream in streams:
                with pytest.raises(ServeError, match="died") as caught:
                    await anext(stream)
                assert caught.value.kind is Kind.UNAVAILABLE
            with pytest.raises(ServeError, match="died"):
                await dying
            assert await at.listen("repeat", [3]) == [3]

    run(work())


def test_two_instances_and_one_dies_nothing_is_run_twice(tmp_path):
    async def work() -> None:
        async with serving(tmp_path, repeating(), instances=2) as at:
            with pytest.raises(ServeError, match="died"):
                await at.listen("repeat", [1, -4])
            assert await at.listen("repeat", [3]) == [3]

    run(work())


def test_unloading_waits_for_streams_and_closing_ends_them(tmp_path):
    async def work() -> None:
        async with serving(tmp_path, repeating()) as at:
            version = at.version("repeat")
            stream = at.engine.stream(version, repeat([-6]))
            (await anext(stream)).release()
            unloading = asyncio.ensure_future(at.host.unload(version))
            count = 1
            async for response in stream:
                response.release()
                count += 1
            assert count == 1000
            await unloading
            at.catalog.models.clear()
            at.leaks = lambda name: (0, 0, 0, 0)

    run(work())
