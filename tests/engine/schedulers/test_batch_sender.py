"""Batches that are formed in this process: where their inputs are written, and in whose rows."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from fastserve.engine.arena_io import ArenaIO
from fastserve.engine.batch_queue import BatchQueue
from fastserve.engine.schedulers.batch_sender import BatchMember, MemberAnswer, SealedQueue
from fastserve.errors import ServeError
from fastserve.request import InferRequest
from fastserve.tensor import DTYPES, Tensor
from fastserve.util.offload import OFFLOAD_BYTES
from tests.engine.rig import Desk, desk, run
from tests.turns import Turns

LARGE = OFFLOAD_BYTES // 4  # floats


def config(floats: int) -> dict[str, Any]:
    wide, one = {"dtype": "float32", "shape": [floats]}, {"dtype": "float32", "shape": [1]}
    return {"inputs": {"x": wide}, "outputs": {"y": one}, "max_batch_size": 4, "sealed": True}


class Watched:
    """A form that remembers which thread has written what, and waits or fails where it is told to."""

    def __init__(self, queue: BatchQueue) -> None:
        self.io = ArenaIO(queue)
        self.written: dict[float, int] = {}
        self.waits: dict[float, threading.Event] = {}
        self.fails: set[float] = set()

    def write_inputs(
        self,
        lease: int,
        rows: int,
        inputs: Mapping[str, Tensor],
        request: InferRequest | None = None,
    ) -> Any:
        value = float(np.frombuffer(inputs["x"].data, np.float32)[0])
        self.written[value] = threading.get_ident()
        if value in self.waits:
            assert self.waits[value].wait(60)
        if value in self.fails:
            raise RuntimeError("this one cannot be written")
        return self.io.write_inputs(lease, rows, inputs, request)

    def read(self, lease: int, rows: int) -> Any:
        return self.io.read(lease, rows)


class Sent:
    """A sender over the queue of a desk, and what came of each member by its value."""

    def __init__(self, at: Desk) -> None:
        self.sender, self.form = SealedQueue(at.queue), Watched(at.queue)
        self.sender._io = self.form
        self.came: dict[float, float | ServeError] = {}
        self.members: dict[float, BatchMember] = {}
        self.finished = 0

    def send(self, floats: int, *values: float) -> None:
        self.members |= {value: self._member(value, floats) for value in values}
        self.sender.send([self.members[value] for value in values], self._finish)

    def _member(self, value: float, floats: int) -> BatchMember:
        data = np.full((1, floats), value, np.float32)
        inputs = {"x": Tensor(DTYPES["float32"], data.shape, data.tobytes())}

        def done(answer: MemberAnswer | None, error: ServeError | None) -> None:
            assert value not in self.came
            if answer is None:
                assert error is not None
                self.came[value] = error
                return
            self.came[value] = float(np.frombuffer(answer.outputs["y"].data, np.float32)[0])
            answer.release()

        return BatchMember(InferRequest(inputs), inputs, 1, done)

    def _finish(self) -> None:
        self.finished += 1

    async def until_finished(self, batches: int) -> None:
        while self.finished < batches:
            await asyncio.sleep(0)


async def sum_up(at: Desk, worker: int, floats: int) -> list[float]:
    """Answer the next batch with the first number of each row; these."""
    ring = at.workers[worker]
    slot = await at.take(worker)
    rows = ring.batch_rows(slot)
    begin, to = (ring.column_span(slot, 0, output)[0] for output in (False, True))
    firsts = np.frombuffer(at.arena.memory, np.float32, rows * floats, begin).reshape(rows, floats)[:, 0]
    np.frombuffer(at.arena.memory, np.float32, rows, to)[:] = firsts
    found = firsts.tolist()
    ring.publish(slot)
    return found


@pytest.mark.parametrize("floats", [1, LARGE])
def test_what_is_large_is_written_apart_from_the_loop(floats: int) -> None:
    async def work() -> None:
        async with desk(**config(floats)) as at:
            sent = Sent(at)
            sent.send(floats, 1.0, 2.0)
            assert await sum_up(at, 0, floats) == [1.0, 2.0]
            await sent.until_finished(1)
            assert sent.came == {1.0: 1.0, 2.0: 2.0}
            here = threading.get_ident()
            assert [thread == here for thread in sent.form.written.values()] == [floats == 1] * 2

    run(work())


def test_no_other_batch_comes_between_the_rows_of_one_that_is_being_written() -> None:
    async def work() -> None:
        async with desk(**config(LARGE)) as at:
            sent = Sent(at)
            sent.form.waits[1.0] = threading.Event()
            sent.send(LARGE, 1.0, 2.0)
            while 1.0 not in sent.form.written:
                await asyncio.sleep(0.001)
            sent.send(LARGE, 3.0, 4.0)
            sent.form.waits[1.0].set()
            batches = [await sum_up(at, 0, LARGE), await sum_up(at, 1, LARGE)]
            assert sorted(batches) == [[1.0, 2.0], [3.0, 4.0]]
            await sent.until_finished(2)
            assert sent.came == {value: value for value in (1.0, 2.0, 3.0, 4.0)}

    run(work())


@pytest.mark.parametrize("floats", [1, LARGE])
def test_one_that_cannot_be_written_fails_alone(floats: int, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with desk(**config(floats)) as at:
            sent = Sent(at)
            sent.form.fails = {1.0}
            sent.send(floats, 1.0, 2.0)
            assert (await sum_up(at, 0, floats))[1] == 2.0, "in the row where it was to be"
            await sent.until_finished(1)
            assert isinstance(sent.came[1.0], ServeError)
            assert sent.came[2.0] == 2.0

    run(work())
    assert "could not be written" in caplog.text
    caplog.clear()  # the traceback holds the queue


def test_one_that_leaves_while_it_is_written() -> None:
    async def work() -> None:
        async with desk(**config(LARGE)) as at:
            sent = Sent(at)
            sent.form.waits[1.0] = threading.Event()
            sent.send(LARGE, 1.0, 2.0)
            while 1.0 not in sent.form.written:
                await asyncio.sleep(0.001)
            sent.members[1.0].cancel()
            sent.form.waits[1.0].set()
            assert (await sum_up(at, 0, LARGE))[1] == 2.0
            await sent.until_finished(1)
            assert sent.came == {2.0: 2.0}

    run(work())


def test_the_loop_goes_on_while_much_is_written() -> None:
    """128 MB, whose copy with its new pages takes more than 60 ms of a thread."""
    floats = 32 << 20

    async def work() -> None:
        async with desk(**{**config(floats), "max_batch_size": 1, "max_queue_rows": 2}) as at:
            longest_s = [await longest_turn(at, floats)]
            while longest_s[-1] >= 0.05:  # one by itself may be a neighbour's, who empties the caches
                assert len(longest_s) < 10, longest_s
                longest_s.append(await longest_turn(at, floats))

    run(work())


async def longest_turn(at: Desk, floats: int) -> float:
    """Of the loop, while a batch of one row is written and answered."""
    sent = Sent(at)
    member = sent._member(5.0, floats)
    turns = Turns()
    sent.sender.send([member], sent._finish)
    assert await sum_up(at, 0, floats) == [5.0]
    turns.close()
    found = turns.longest_s()
    await sent.until_finished(1)
    assert sent.came == {5.0: 5.0}
    return found
