"""Text models under clients that leave, workers that die, slow readers and unloads: all is given back."""

from __future__ import annotations

import asyncio
import os
import random
import signal

import pytest

from fastserve.codec.generation import Finish
from fastserve.errors import ServeError
from tests.text.serving import Heard, Served, run, serving, until

COUNTING = """
import itertools

class Model:
    info = {"tokenizer": ""}
    open = 0

    def __init__(self, config):
        pass

    def generate(self, request):
        Model.open += 1
        try:
            if request.ids[0] < 0:
                for token in iter(lambda: Model.open - 1, None):
                    yield token
            yield from itertools.count(request.ids[0])
        finally:
            Model.open -= 1
"""
LONG = {"max_new_tokens": 1 << 20, "max_tokens": 1 << 21}


def whole(heard: Heard, first: int) -> bool:
    return heard.ids == list(range(first, first + len(heard.ids)))


async def leave_at(heard: Heard, count: int) -> None:
    await heard.until(count)
    assert heard.run is not None
    heard.run.cancel()
    assert await heard.end() is Finish.CANCELLED


def test_a_thousand_clients_leave_at_random_tokens(tmp_path):
    rng = random.Random(11)

    async def work() -> None:
        async with serving(tmp_path) as at:
            version = await at.load_code(COUNTING, text={"max_sequences": 32, **LONG})
            staying: list[Heard] = []
            leaving: list[asyncio.Task[None]] = []
            for n in range(1000):
                heard = at.ask(version, [1000 * n], max_new_tokens=1 << 20 if n % 10 else 60)
                if n % 10:
                    leaving.append(asyncio.ensure_future(leave_at(heard, rng.choice([0, 1, 2, 5, 30]))))
                else:
                    staying.append(heard)
                if n % 50 == 0:
                    await asyncio.sleep(0)
            await asyncio.gather(*leaving)
            assert {await heard.end() for heard in staying} == {Finish.LENGTH}
            assert all(whole(heard, 10_000 * n) and len(heard.ids) == 60 for n, heard in enumerate(staying))
            await until(lambda: not any(at.left(version)))
            told = at.ask(version, [-1], max_new_tokens=1)
            await told.end()
            assert told.ids == [0], "the model's own generators were closed"

    run(work())


IN_TURN = """
import itertools

class Model:
    info = {"tokenizer": ""}
    turns = itertools.count()  # of this engine

    def __init__(self, config):
        pass

    def generate(self, request):
        yield from self.turns
"""


def test_priorities_order_what_waits_before_several_engines(tmp_path):
    """Two engines of one sequence each are busy; of those who wait the urgent go first, then by arrival."""

    async def work() -> None:
        async with serving(tmp_path) as at:
            limits = {"max_sequences": 1, "reader_tokens": 4, **LONG}
            version = await at.load_code(IN_TURN, instances=2, text=limits)
            busy = [at.ask(version, [1], reads=False, max_new_tokens=1 << 20) for _ in range(2)]
            await asyncio.gather(*(heard.until(1) for heard in busy))
            waiting = [at.ask(version, [1], max_new_tokens=1, priority=one) for one in (5, 3, 5, 1, 3, 1)]
            leaver = busy[0].run
            assert leaver is not None
            leaver.cancel()  # its engine runs all of them
            await asyncio.gather(*(heard.end() for heard in waiting))
            assert sorted(range(6), key=lambda number: waiting[number].ids) == [3, 5, 1, 4, 0, 2]
            for heard in busy:
                assert heard.run is not None
                heard.run.cancel()

    run(work())


async def kill(at: Served, version, worker: int = 0) -> None:
    os.kill(at.pids(version)[worker], signal.SIGKILL)


@pytest.mark.logs_errors
def test_a_worker_killed_under_load(tmp_path):
    """A sequence with a token is told at once; one without gets all of them from the next worker."""

    async def work() -> None:
        async with serving(tmp_path) as at:
            version = await at.load_code(COUNTING, text={"max_sequences": 8, "reader_tokens": 50, **LONG})
            begun = [at.ask(version, [1000 * n], reads=False, max_new_tokens=1 << 20) for n in range(8)]
            await asyncio.gather(*(heard.until(50) for heard in begun))
            waiting = [at.ask(version, [1000 * n], max_new_tokens=20) for n in range(40)]
            ring = at.queue(version).ring
            states = [ring.describe(slot)[0] for slot in range(48)]
            while states.count("running") < 48:  # its engine has all of them
                await asyncio.sleep(0.002)
                states = [ring.describe(slot)[0] for slot in range(48)]
            await kill(at, version)
            assert {await heard.end() for heard in begun} == {Finish.FAILED}
            assert {heard.error for heard in begun} == {"the worker process died while it ran this request"}
            assert all(whole(heard, 1000 * n) for n, heard in enumerate(begun))
            assert {await heard.end() for heard in waiting} == {Finish.LENGTH}
            assert all(whole(heard, 1000 * n) and len(heard.ids) == 20 for n, heard in enumerate(waiting))

    run(work())


@pytest.mark.logs_errors
def test_workers_killed_again_and_again(tmp_path):
    """Every sequence hears one end, and tokens before it are right."""

    async def work() -> None:
        async with serving(tmp_path) as at:
            version = await at.load_code(COUNTING, instances=2, text={"max_sequences": 8, **LONG})
            ends: list[Finish] = []
            stop = asyncio.Event()

            async def client(number: int) -> None:
                while not stop.is_set():
                    try:
                        heard = at.ask(version, [1000 * number], max_new_tokens=200)
                    except ServeError:
                        await asyncio.sleep(0.01)
                        continue
                    ends.append(await heard.end())
                    assert whole(heard, 1000 * number)

            clients = [asyncio.ensure_future(client(n)) for n in range(24)]
            for turn in range(4):
                await asyncio.sleep(0.2)
                await until(lambda: all(at.pids(version)), 30)
                await kill(at, version, turn % 2)
            well = ends.count(Finish.LENGTH)
            await until(lambda: ends.count(Finish.LENGTH) > well + 24, 30)
            stop.set()
            await asyncio.gather(*clients)
            assert set(ends) <= {Finish.LENGTH, Finish.FAILED}

    run(work())


@pytest.mark.logs_errors
def test_a_model_whose_start_kills_it_fails_who_waits(tmp_path):
    """A prompt is not given to worker after worker."""
    dying = COUNTING.replace("try:", "import os; os._exit(3)\n        try:")

    async def work() -> None:
        async with serving(tmp_path) as at:
            version = await at.load_code(dying)
            heard = at.ask(version, [1])
            assert await heard.end() is Finish.FAILED
            assert heard.error == "the worker process died while it ran this request"

    run(work())


def test_slow_readers_beside_fast_ones(tmp_path):
    async def work() -> None:
        async with serving(tmp_path) as at:
            version = await at.load_code(COUNTING, text={"max_sequences": 64, "reader_tokens": 16, **LONG})
            slow = [at.ask(version, [n], reads=False, max_new_tokens=400) for n in range(24)]
            fast = [at.ask(version, [n], max_new_tokens=400) for n in range(24)]
            assert {await heard.end() for heard in fast} == {Finish.LENGTH}
            assert {len(heard.records) for heard in slow} == {16}
            rng = random.Random(3)

            async def read(heard: Heard) -> None:
                read = 0
                while not heard.ended.is_set():
                    await asyncio.sleep(0)
                    some = rng.randint(0, len(heard.records) - read)
                    read += some
                    assert len(heard.records) - read <= 16
                    assert heard.run is not None
                    heard.run.taken(some)

            await asyncio.gather(*(read(heard) for heard in slow))
            assert all(heard.ids == list(range(n, n + 400)) for n, heard in enumerate(slow))

    run(work())


def test_an_unload_under_load(tmp_path):
    async def work() -> None:
        async with serving(tmp_path) as at:
            version = await at.load_code(COUNTING, text={"max_sequences": 16, **LONG})
            asked = [at.ask(version, [1000 * n], max_new_tokens=150) for n in range(100)]
            unloading = asyncio.ensure_future(at.unload(version))
            await asyncio.sleep(0)
            await unloading
            with pytest.raises(ServeError, match="is not available"):
                at.ask(version, [1], max_new_tokens=1)
            assert all(len(heard.ids) == 150 and whole(heard, 1000 * n) for n, heard in enumerate(asked))

    run(work())


@pytest.mark.logs_errors
def test_an_engine_that_raises_ends_its_worker_and_not_the_version(tmp_path):
    broken = """
class Model:
    info = {"tokenizer": ""}

    def __init__(self, config):
        self.asked = []

    def submit(self, request):
        self.asked.append(request)

    def cancel(self, rid, why):
        pass

    def step(self, out):
        request = self.asked.pop()
        if request.ids[0] < 0:
            raise RuntimeError("out of order")
        out.token(request.rid, request.ids[0], 2)
        return True

    def pending(self):
        return len(self.asked)
"""

    async def work() -> None:
        async with serving(tmp_path) as at:
            version = await at.load_code(broken)
            heard = at.ask(version, [-1])
            assert await heard.end() is Finish.FAILED
            assert heard.error.startswith("the worker process died")
            again = at.ask(version, [5])
            assert (await again.end(), again.ids) == (Finish.LENGTH, [5])

    run(work())


HANGING = """
import time

class Model:
    info = {"tokenizer": ""}

    def __init__(self, config):
        pass

    def generate(self, request):
        for token in range(request.sampling.max_new_tokens):
            if request.ids[0] == token:
                time.sleep(60)
            time.sleep(0.01)
            yield token
"""


@pytest.mark.logs_errors
def test_a_step_that_hangs_ends_its_worker(tmp_path):
    """run_timeout_ms is a step's: sequences may run longer, and stand still longer."""

    async def work() -> None:
        async with serving(tmp_path) as at:
            version = await at.load_code(HANGING, run_timeout_ms=2000, text={"reader_tokens": 8})
            slow = at.ask(version, [-1], reads=False, max_new_tokens=20)
            long = at.ask(version, [-1], max_new_tokens=120)
            assert await long.end() is Finish.LENGTH
            assert len(slow.records) == 8
            assert slow.run is not None
            await asyncio.sleep(2.5)  # nobody can go on, for longer than the timeout
            slow.run.taken(8)
            await slow.until(16)
            slow.run.taken(8)
            assert await slow.end() is Finish.LENGTH
            hanging = at.ask(version, [5], max_new_tokens=20)
            assert await hanging.end() is Finish.FAILED
            assert "a batch ran longer than run_timeout_ms 2000" in hanging.error
            assert hanging.ids == [0, 1, 2, 3, 4]
            assert await at.ask(version, [-1], max_new_tokens=3).end() is Finish.LENGTH

    run(work())
