"""Answers in parts, from real workers: complete, in order, bounded, ended by whoever ends first."""

from __future__ import annotations

import asyncio
import time

import pytest

from fastserve.engine.batch_queue import BatchQueue
from fastserve.errors import DeadlineError, Kind, ServeError
from fastserve.workers.replies import WINDOW_PARTS
from tests.backends.triton_rig import model, repeat, repeating, run, serving, until

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
    hear, looking = BatchQueue._on_bell, []

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

    monkeypatch.setattr(BatchQueue, "_on_bell", look_first)

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
