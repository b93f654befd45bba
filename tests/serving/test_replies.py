"""Answers to a question: at once, later, or not at all; and whose client leaves meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from fastserve.errors import ServeError, invalid
from fastserve.net.request import Call
from fastserve.serving.dialect import show_answer


class Asked:
    """A call, and how it was answered."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.on_gone: Callable[[], object] | None = lambda: self.told.append("cancelled")

    def ask(self, question: Callable[[], Any]) -> Any:
        return show_answer(cast("Call", self), question, self._show, self._refuse)

    def _show(self, call: Call, shown: Any) -> None:
        self.told.append(shown)

    def _refuse(self, call: Call, fault: ServeError) -> None:
        self.told.append(fault.message)


def fail() -> Any:
    raise invalid("no")


async def later(ask: Callable[[], Any]) -> Any:
    await asyncio.sleep(0)
    return ask()


def test_what_is_there_is_shown_at_once() -> None:
    for question, told in ((lambda: {"a": 1}, {"a": 1}), (lambda: None, None), (fail, "no")):
        asked = Asked()
        assert asked.ask(question) is None
        assert asked.told == [told]


def test_what_takes_its_time_is_shown_when_it_is_there() -> None:
    for question, told in ((lambda: {"a": 1}, {"a": 1}), (lambda: None, None), (fail, "no")):
        asked = Asked()
        asyncio.run(asked.ask(lambda question=question: later(question)))
        assert asked.told == [told]


def test_it_goes_on_when_its_client_leaves() -> None:
    async def leave() -> None:
        asked = Asked()
        task = asyncio.ensure_future(asked.ask(lambda: later(lambda: "done")))
        await asyncio.sleep(0)
        assert asked.on_gone is None  # what the wire calls then
        await task
        assert asked.told == ["done"]

    asyncio.run(leave())
