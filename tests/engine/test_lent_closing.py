"""Whoever waits until workers have let go of a client's memory: hears of it, and leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from fastserve.engine import lent_closing
from fastserve.engine.lent_closing import LentClosing

FIRST, SECOND = (1, 0, 0), (1, 0, 1)
HANDLE = bytes(64)


@pytest.mark.parametrize(
    "ends",
    [
        lambda closing: (closing.closed(FIRST, HANDLE), closing.closed(SECOND, HANDLE)),
        lambda closing: (closing.gone(FIRST), closing.closed(SECOND, HANDLE)),
        lambda closing: closing.version_gone(1),
    ],
    ids=["said", "dead", "unloaded"],
)
def test_all_have_let_go(ends: Callable[[LentClosing], object]) -> None:
    async def run() -> None:
        closing = LentClosing()
        waiting = asyncio.ensure_future(closing.all_closed([FIRST, SECOND], HANDLE))
        await asyncio.sleep(0)
        closing.closed(FIRST, b"another")
        closing.version_gone(2)
        await asyncio.sleep(0)
        assert not waiting.done()
        ends(closing)
        await asyncio.wait_for(waiting, 4)
        assert closing._waited == {}

    asyncio.run(run())


def test_one_that_hangs_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lent_closing, "LIMIT_S", 0.05)

    async def run() -> None:
        closing = LentClosing()
        waiting = asyncio.ensure_future(closing.all_closed([FIRST, SECOND], HANDLE))
        await asyncio.sleep(0)
        closing.closed(SECOND, HANDLE)
        await waiting
        assert closing._waited == {}
        closing.closed(FIRST, HANDLE)  # nobody waits for it any more
        again = asyncio.ensure_future(closing.all_closed([FIRST], HANDLE))
        await asyncio.sleep(0)
        closing.closed(FIRST, HANDLE)
        await again

    asyncio.run(run())
    assert "1 workers still have a client's GPU memory open" in caplog.text
