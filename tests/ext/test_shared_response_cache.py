"""The response cache that processes share: the oracle of the other, many processes, and deaths anywhere."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import select
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis.stateful import invariant, rule

from fastserve._ext.response_cache import (
    ENTRY_BYTES,
    Counts,
    Miss,
    SharedResponseCache,
    lay_out_shared,
    shared_bytes,
)
from tests.ext.test_response_cache import CAPACITY, Both, count_lookups
from tests.ext.test_torn_verbs import PAGE, died

HEAD = b"h" * 8
KILLS = 4


def make_memory(capacity: int) -> mmap.mmap:
    memory = mmap.mmap(-1, shared_bytes(capacity))
    lay_out_shared(memory, capacity, 7)
    return memory


class BothShared(Both):
    """Two objects on one table, as two processes have them, and a new one now and then."""

    def make(self) -> SharedResponseCache:
        self.memory = make_memory(CAPACITY)
        return SharedResponseCache(self.memory, CAPACITY)

    @rule()
    def join(self) -> None:
        running, self.others = self.ours, getattr(self, "others", [])
        if not running.waiting():  # what is under way is of one process
            self.ours = SharedResponseCache(self.memory, CAPACITY)

    @invariant()
    def whole(self) -> None:
        assert self.ours.audit() == 0


TestBothShared = BothShared.TestCase


def answer_of(number: int) -> tuple[bytes, ...]:
    """The outputs of request `number`: some are empty, some span many blocks."""
    one = number.to_bytes(4, "little")
    return tuple(one * (number % 700 * piece) for piece in range(number % 3 + 1))


def use(cache: SharedResponseCache, counts: Counts, number: int) -> bool:
    """Look a request up, and keep its answer when it is not there; whether it was a hit."""
    found = cache.find(HEAD, [number.to_bytes(4, "little") * (number % 50 + 1)], counts)
    if isinstance(found, Miss):
        outputs = answer_of(number)
        form = tuple((f"out{n}", 1, (len(data),)) for n, data in enumerate(outputs))
        found.keep(form, outputs, (("number", number),))
        found.close()
        return False
    assert found is not None
    assert found.memory == answer_of(number)
    assert found.parameters == (("number", number),)
    assert found.form == tuple((f"out{n}", 1, (len(data),)) for n, data in enumerate(found.memory))
    return True


def child_of(work: Callable[[], None]) -> tuple[int, int]:
    """Start a process; its id, and a pipe that is closed when it has ended, with a byte if all was well."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            work()
            os.write(theirs, b"k")
        finally:
            os._exit(0)
    os.close(theirs)
    return pid, ours


def test_hits_of_another_process_are_the_same_bytes() -> None:
    capacity = 1 << 20
    memory = make_memory(capacity)

    def keep_all() -> None:
        cache = SharedResponseCache(memory, capacity)
        assert not any(use(cache, count_lookups(), number) for number in range(60))

    pid, pipe = child_of(keep_all)
    assert os.read(pipe, 1) == b"k"
    os.waitpid(pid, 0)
    os.close(pipe)
    cache, counts = SharedResponseCache(memory, capacity), count_lookups()
    assert all(use(cache, counts, number) for number in range(60))
    assert (len(cache), cache.hits, cache.misses, counts.hits, counts.misses) == (60, 60, 60, 60, 0)


@pytest.mark.parametrize("seed", [0, *(pytest.param(more, marks=pytest.mark.torture) for more in (1, 2))])
def test_processes_that_are_killed_while_they_use_it(seed: int) -> None:
    """Every hit of every process is its request's answer, whoever died where."""
    capacity = 64 * ENTRY_BYTES + 40_000
    memory, random_ = make_memory(capacity), random.Random(seed)
    enough = mmap.mmap(-1, 1)  # were killed: a slow machine takes long to fork

    def hammer() -> None:
        cache, counts, own = (
            SharedResponseCache(memory, capacity),
            count_lookups(),
            random.Random(os.getpid()),
        )
        while True:
            use(cache, counts, int(own.paretovariate(0.6)) % 400)

    def check() -> None:
        cache, counts, own = SharedResponseCache(memory, capacity), count_lookups(), random.Random(1)
        hits = uses = 0
        while uses < 20_000 or not enough[0]:
            hits, uses = hits + use(cache, counts, own.randrange(80)), uses + 1
        assert hits > 500
        assert cache.used <= capacity

    checking, pipe = child_of(check)
    victims = [child_of(hammer) for _ in range(2)]
    kills = 0
    while not select.select([pipe], [], [], random_.random() * 0.01)[0]:
        at = random_.randrange(2)
        pid, end = victims[at]
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(end)
        victims[at], kills = child_of(hammer), kills + 1
        enough[0] = kills >= KILLS
    enough.close()
    try:
        assert os.read(pipe, 1) == b"k", "a hit that was not its request's answer"
    finally:
        for pid, end in [*victims, (checking, pipe)]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(end)
    cache = SharedResponseCache(memory, capacity)
    assert cache.audit() == 0
    assert kills >= KILLS
    cache.forget(HEAD)
    assert (len(cache), cache.used) == (0, 0)


def test_a_death_at_a_store_into_any_page() -> None:
    """A process dies at its first store into a page, mostly with the table taken; the next one goes on."""
    capacity, deaths = 64 * ENTRY_BYTES + 20_000, 0
    memory = make_memory(capacity)
    cache, counts = SharedResponseCache(memory, capacity), count_lookups()
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    def protect_and_use(page: int) -> None:
        address, read_only = ctypes.c_void_p(base + page * PAGE), 1
        assert ctypes.CDLL(None).mprotect(address, ctypes.c_size_t(PAGE), read_only) == 0
        mine = SharedResponseCache(memory, capacity)
        for number in range(150):
            use(mine, count_lookups(), number)

    pages = len(memory) // PAGE
    for page in range(pages):
        for number in range(100, 200):
            use(cache, counts, number)
        deaths += died(lambda page=page: protect_and_use(page))
        assert not use(cache, counts, 1000 + page)
        assert use(cache, counts, 1000 + page)
        assert cache.audit() == 0
    assert pages > 12
    assert deaths > pages // 2
    assert deaths // 2 < cache.resets <= deaths


def stopped_with_the_table(memory: mmap.mmap, capacity: int) -> int:
    """A process that is stopped at a moment when it has the table."""
    for _ in range(2000):

        def hammer() -> None:
            cache, number = SharedResponseCache(memory, capacity), 0
            while True:
                use(cache, count_lookups(), number)
                number += 1

        pid, pipe = child_of(hammer)
        os.close(pipe)
        time.sleep(0.02)  # any moment will do: the test looks whether this one does
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        try:
            SharedResponseCache(memory, capacity).audit()
        except TimeoutError:
            return pid
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    raise AssertionError("it never had the table")


def test_a_process_that_is_stopped_with_the_table_holds_nobody_up() -> None:
    capacity = 1 << 20
    memory = make_memory(capacity)
    pid = stopped_with_the_table(memory, capacity)
    cache, counts = SharedResponseCache(memory, capacity), count_lookups()
    began = time.monotonic()
    assert not use(cache, counts, 5), "as if it were not there"
    assert not use(cache, counts, 5)
    assert time.monotonic() - began < 30
    assert (counts.hits, counts.misses) == (0, 2)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert not use(cache, counts, 5)
    assert use(cache, counts, 5), "its end has given the table back"
    assert cache.resets == 1
    assert cache.audit() == 0


def test_memory_that_is_no_table() -> None:
    capacity = 1000
    with pytest.raises(ValueError, match="not a table"):
        SharedResponseCache(mmap.mmap(-1, shared_bytes(capacity)), capacity)
    with pytest.raises(ValueError, match="size"):
        SharedResponseCache(make_memory(capacity), 100_000)
    for wrong in (0, 1 << 41):
        with pytest.raises(ValueError, match="1 byte to 1 TB"):
            shared_bytes(wrong)


def test_an_entry_larger_than_everything_is_not_kept() -> None:
    cache, counts = SharedResponseCache(make_memory(2000), 2000), count_lookups()
    miss: Any = cache.find(HEAD, [b"x"], counts)
    miss.keep("form", [bytes(2000)])
    miss.close()
    assert (len(cache), cache.used, cache.evictions) == (0, 0, 0)
