"""Questions of a front process to the owner of the models: each is answered, whatever comes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from fastserve.errors import Kind, ServeError
from fastserve.server.front_messages import OwnerModelControl, RemoteModelControl


class Broken:
    """A repository where nothing goes as it should."""

    def __init__(self, fault: Exception) -> None:
        self._fault = fault

    async def names(self) -> list[str]:
        raise self._fault

    async def load(self, name: str, override: object) -> None:
        raise self._fault


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        (ServeError(Kind.NOT_FOUND, "no such model"), Kind.NOT_FOUND, "no such model"),
        (OSError("/a/path: too many open files"), Kind.INTERNAL, "Internal error"),
        (KeyError("x"), Kind.INTERNAL, "Internal error"),
    ],
)
def test_who_asked_hears_of_every_fault(fault: Exception, kind: Kind, text: str) -> None:
    async def work() -> None:
        owner = OwnerModelControl(Broken(fault))  # type: ignore[arg-type]
        tasks = []

        async def answer(asked: Mapping[str, Any]) -> None:
            front.hear(await owner.answer(asked))

        front = RemoteModelControl(True, lambda asked: tasks.append(asyncio.ensure_future(answer(asked))))
        for question in (front.names(), front.load("m", None)):
            with pytest.raises(ServeError) as told:
                await asyncio.wait_for(question, 60)
            assert (told.value.kind, told.value.message) == (kind, text)
        await asyncio.gather(*tasks)

    asyncio.run(work())
