"""Waits until workers have let go of a client's memory: each ends, and leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from fastserve.engine import device_memory
from fastserve.engine.device_memory import RegionClosings

FIRST, SECOND = (1, 0, 0), (1, 0, 1)
TAKEN, ANOTHER = 1, 2


@pytest.mark.parametrize(
    "ends",
    [
        lambda closing: (closing.closed(FIRST, TAKEN), closing.closed(SECOND, TAKEN)),
        lambda closing: (closing.gone(FIRST), closing.closed(SECOND, TAKEN)),
        lambda closing: closing.version_gone(1),
    ],
    ids=["said", "dead", "unloaded"],
)
def test_all_have_let_go(ends: Callable[[RegionClosings], object]) -> None:
    async def run() -> None:
        closing = RegionClosings()
        waiting = asyncio.ensure_future(closing.all_closed([FIRST, SECOND], TAKEN))
        await asyncio.sleep(0)
        closing.closed(FIRST, ANOTHER)
        closing.version_gone(2)
        await asyncio.sleep(0)
        assert not waiting.done()
        ends(closing)
        await asyncio.wait_for(waiting, 60)
        assert closing._waited == {}

    asyncio.run(run())


def test_one_that_hangs_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device_memory, "CLOSE_LIMIT_S", 0.05)

    async def run() -> None:
        closing = RegionClosings()
        waiting = asyncio.ensure_future(closing.all_closed([FIRST, SECOND], TAKEN))
        await asyncio.sleep(0)
        closing.closed(SECOND, TAKEN)
        await waiting
        assert closing._waited == {}
        closing.closed(FIRST, TAKEN)  # nobody waits for it any more
        again = asyncio.ensure_future(closing.all_closed([FIRST], TAKEN))
        await asyncio.sleep(0)
        closing.closed(FIRST, TAKEN)
        await again

    asyncio.run(run())
    assert "1 workers still have a client's GPU memory open" in caplog.text


# --- every order of three closings, two workers' replies to them, and their ends --------------------------

OTHER = (2, 0, 0)  # of another version
CLOSINGS = {"a": (FIRST, OTHER), "b": (FIRST,), "c": (FIRST, OTHER)}
# What happens in this order among itself, in any with the rest. A worker answers in the order it was asked.
STRANDS = {
    "asked": ("begin a", "begin b", "begin c"),
    "first": ("says a", "says b", "says c"),
    "other": ("says a", "says c"),
    "other dies": ("says a", "dies"),
    "other is unloaded": ("leaves",),
}


def orders(*strands: str) -> Iterator[tuple[tuple[str, str], ...]]:
    """All orders of the steps of these strands in which nobody answers what was not asked."""

    def go_on(
        left: tuple[int, ...], so_far: tuple[tuple[str, str], ...]
    ) -> Iterator[tuple[tuple[str, str], ...]]:
        if not any(left):
            yield so_far
        for number, strand in enumerate(strands):
            if not left[number]:
                continue
            step = STRANDS[strand][-left[number]]
            if step.startswith("says") and ("asked", f"begin {step[-1]}") not in so_far:
                continue
            fewer = tuple(n - (i == number) for i, n in enumerate(left))
            yield from go_on(fewer, (*so_far, (strand, step)))

    return go_on(tuple(len(STRANDS[strand]) for strand in strands), ())


class Story:
    """One order, told to the closings; and who of them must have ended, by a reckoning of its own."""

    def __init__(self) -> None:
        self.closing = RegionClosings()
        self.numbers: dict[str, int] = {}
        self.waiting: dict[str, asyncio.Future[None]] = {}
        self.open: dict[str, set[tuple[int, int, int]]] = {}
        self.gone: set[tuple[int, int, int]] = set()

    def tell(self, strand: str, step: str) -> None:
        verb, _, name = step.partition(" ")
        if verb == "begin":
            self.open[name] = set(CLOSINGS[name]) - self.gone  # who is dead hears nothing, and is not asked
            self.numbers[name] = self.closing.begin()
            wait = self.closing.all_closed(list(self.open[name]), self.numbers[name])
            self.waiting[name] = asyncio.ensure_future(wait)
            return
        who = FIRST if strand == "first" else OTHER
        if verb == "says":
            self.open[name].discard(who)
            self.closing.closed(who, self.numbers[name])
            return
        self.gone.add(who)
        for still in self.open.values():
            still.discard(who)
        self.closing.version_gone(who[0]) if verb == "leaves" else self.closing.gone(who)

    def check(self) -> None:
        for name, task in self.waiting.items():
            assert task.done() == (not self.open[name]), name
        assert {key for key, future in self.closing._waited.items() if not future.done()} == {
            (who, self.numbers[name]) for name, still in self.open.items() for who in still
        }


@pytest.mark.parametrize("other", ["other", "other dies", "other is unloaded"])
def test_every_order_of_closings_and_replies(other: str) -> None:
    """No reply is taken for that of another closing of the same memory, none waits for a reply that came."""

    async def tell(order: tuple[tuple[str, str], ...]) -> None:
        story = Story()
        for strand, step in order:
            story.tell(strand, step)
            for _ in range(3):  # wait -> all_closed -> its task: turns of the loop, and no time
                await asyncio.sleep(0)
            story.check()
        assert not story.closing._waited
        await asyncio.gather(*story.waiting.values())

    async def run() -> int:
        count = 0
        for order in orders("asked", "first", other):
            await tell(order)
            count += 1
        return count

    assert asyncio.run(run()) >= 30
