"""Text queues under workers that write over the memory they share: nobody gets another sequence's tokens.

Steps of a front (a queue of text), of an honest worker and of a mad one, in a random order. Each sequence
asks with a number of its own, gets tokens that count from it, none left out, and hears one end at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import random
import time

import pytest

from fastserve._ext.token_records import TokenSender, read_prompt
from fastserve.codec.generation import Finish, Record, TextNote
from fastserve.engine.batch_queue import QueueMetrics
from fastserve.engine.text_queue import TextQueue, TextRun
from fastserve.errors import Kind, ServeError
from fastserve.metrics.registry import Registry
from fastserve.workers.arena import Arena, Geometry
from tests.engine.rig import run
from tests.engine.scrawl import Scrawl

WINDOW, LONGEST_STEP_S = 4, 0.1
REFUSALS = (ServeError, ValueError, IndexError, OverflowError, LookupError)
NOTE = TextNote()


class Caller:
    """One sequence, as whoever asked for it hears of it."""

    def __init__(self, number: int) -> None:
        self.next, self.over = number, False
        self.unread = 0
        self.run: TextRun | None = None

    def __call__(self, records: list[Record]) -> None:
        assert not self.over, "records after the last one"
        for token, finish, _, _ in records:
            if token >= 0:
                assert token == self.next, "another sequence's token, or one left out"
                self.next += 1
            self.over = bool(finish)
        self.unread += len(records)


class House:
    """One arena, its front and its worker. No two sequences count from nearby numbers."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.arena = Arena.create(Geometry(4, 1, (), (), 24, 0, workers=1, fronts=1, window=WINDOW))
        self.registry = Registry()
        self.queue = TextQueue(self.arena, 0, {}, {}, QueueMetrics(self.registry, "m", 1, 0, 1))
        self.numbers = itertools.count(0, 10_000)
        self.callers: list[Caller] = []
        self.well = self.failed = 0
        self.worker = self.arena.ring(worker=0)
        self.spawn()
        self.scrawl = Scrawl(self.arena, rng)

    def spawn(self) -> None:
        self.sender = TokenSender(self.arena.memory, worker=0, window=WINDOW)
        self.running: dict[int, int] = {}

    def close(self) -> None:
        self.scrawl.close()
        self.queue.close()
        del self.queue, self.worker, self.sender
        self.arena.close()
        self.registry.close()

    def ask(self) -> None:
        number = next(self.numbers)
        caller = Caller(number)
        with contextlib.suppress(*REFUSALS):
            caller.run = self.queue.start([number], NOTE, caller)
            self.callers.append(caller)

    def hear(self) -> None:
        self.queue._on_doorbell()
        for caller in [one for one in self.callers if one.over]:
            self.callers.remove(caller)
            self.well += caller.next % 10_000 > 0
            self.failed += caller.next % 10_000 == 0

    def read(self) -> None:
        for caller in self.callers:
            if caller.run is not None and caller.unread:
                caller.run.taken(caller.unread)
                caller.unread = 0

    def leave(self) -> None:
        if self.callers and self.rng.random() < 0.2:
            caller = self.callers.pop(self.rng.randrange(len(self.callers)))
            assert caller.run is not None
            caller.run.cancel()

    def take(self) -> None:
        with contextlib.suppress(*REFUSALS):
            slot = self.worker.take()
            if slot < 0:
                return
            leases = self.worker.leases(slot)
            ids, _ = read_prompt(self.worker.slab(*leases[0][2:]))
            self.running[self.sender.admit(slot)] = ids[0]

    def say(self) -> None:
        for rid in list(self.running):
            with contextlib.suppress(*REFUSALS):
                if self.sender.room(rid):
                    last = self.rng.random() < 0.1
                    self.sender.token(rid, self.running[rid], Finish.EOS if last else Finish.NONE)
                    self.running[rid] += 1
                    if last:
                        del self.running[rid]
        for rid, why in self.sender.gone():
            self.sender.end(rid, Finish(why))
            del self.running[rid]

    def publish(self) -> None:
        for slot in self.sender.publish():
            self.worker.publish(slot)

    def bury(self) -> None:
        if self.rng.random() < 0.05:
            self.queue.ring.worker_died(0, 2, Kind.UNAVAILABLE.value, "gone")
            with contextlib.suppress(ValueError):  # a header that was written over lets nobody in
                self.spawn()

    def live(self, steps: int, scrawled: int) -> float:
        """Some steps in peace, then with a scrawl now and then; the longest step in seconds of CPU time."""
        longest = 0.0
        verbs = [self.ask, self.hear, self.hear, self.read, self.leave, self.take, self.take]
        verbs += [self.say, self.say, self.publish, self.publish, self.bury]
        for number in range(steps):
            began = time.thread_time()
            self.rng.choice(verbs)()
            longest = max(longest, time.thread_time() - began)
            if number > 40 and self.rng.random() < 0.3:
                self.scrawl.write(scrawled)
        return longest


def storm(seeds: range, steps: int, scrawled: int) -> tuple[int, int, int]:
    """Arena after arena; (sequences that had tokens, others that heard an end, words written)."""
    well = failed = written = 0
    for seed in seeds:

        async def work(seed: int = seed) -> None:
            nonlocal well, failed, written
            house = House(random.Random(seed))
            house.queue.open()
            gc.disable()  # a look at all that the suite has imported takes 0.3 s of one step
            try:
                assert house.live(steps, scrawled) < LONGEST_STEP_S
            except AssertionError as error:
                raise AssertionError(f"seed {seed}: {error}") from error
            finally:
                gc.enable()
                well, failed = well + house.well, failed + house.failed
                written += house.scrawl.written
                house.close()
                await asyncio.sleep(0)

        run(work())
    return well, failed, written


def test_in_peace_everybody_is_served():
    well, _, written = storm(range(10), 400, 0)
    assert well > 60
    assert written == 0


def test_nobody_gets_anothers_tokens():
    well, failed, written = storm(range(100, 180), 200, 1)
    assert written > 1500
    assert well > 60, "a front that answers nobody proves nothing"
    assert failed > 5, "scrawls that hurt nobody prove nothing"


@pytest.mark.torture
@pytest.mark.parametrize(("scrawled", "arenas"), [(1, 10_000), (40, 3_000)])
def test_nobody_gets_anothers_tokens_in_a_storm(scrawled, arenas):
    well, failed, written = storm(range(1000, 1000 + arenas), 200, scrawled)
    assert written > 300_000
    assert well > 600
    assert failed > 600
