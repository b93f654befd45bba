"""Log settings that a client changes through one front process hold in all of them."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.processes.test_fronts import connect_to_each
from tests.server.rig import run, serving, write_model

FRONTS = 3


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """Give this process's loggers back the levels that they had."""
    package = logging.getLogger("fastserve")
    level = package.level
    yield
    package.setLevel(level)


async def ask(client: Any, changes: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
    if changes is None:
        status, body = await client.get("/v2/logging")
    else:
        status, body = await client.post("/v2/logging", json.dumps(changes).encode())
    return status, json.loads(body)


def test_log_settings_hold_in_every_front(tmp_path: Path) -> None:
    write_model(tmp_path)

    async def work() -> None:
        async with serving(tmp_path, frontends=FRONTS) as served:
            clients = await connect_to_each(served, FRONTS)
            for level, asked in enumerate(clients.values(), 1):
                status, shown = await ask(asked, {"log_verbose_level": level, "log_warning": level % 2 == 0})
                assert (status, shown["log_verbose_level"]) == (200, level)
                for client in clients.values():
                    assert await ask(client) == (200, shown)
                status, body = await ask(asked, {"log_format": "x", "log_verbose_level": 9})
                assert (status, body) == (503, {"error": "invalid argument for --log_format, got: x"})
                assert [(await ask(client))[1] for client in clients.values()] == [shown] * FRONTS

    run(work())


@pytest.mark.logs_errors
def test_a_replaced_front_has_the_log_settings_of_the_others(tmp_path: Path) -> None:
    write_model(tmp_path)

    async def work() -> None:
        async with serving(tmp_path, frontends=FRONTS) as served:
            client = (await connect_to_each(served, FRONTS))[1]
            status, shown = await ask(client, {"log_verbose_level": 3, "log_info": False})
            assert status == 200
            link = served.links[0]
            victim = link.pid
            os.kill(victim, signal.SIGKILL)
            await served.until(lambda: link.pid not in (0, victim) and link._listening)
            for one in (await connect_to_each(served, FRONTS)).values():
                assert await ask(one) == (200, shown)

    run(work())
