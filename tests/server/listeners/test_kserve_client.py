"""Health replies as KServe's client (kserve 0.21, InferenceRESTClient) reads them: texts in the body besides
the status. The original servers send no such bodies, nor do the commands that replace them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastserve.settings import Listener
from fastserve.settings.tensorflow import tensorflow_overrides as tensorflow_settings
from fastserve.settings.tritonserver import triton_overrides as triton_settings
from tests.server.rig import Served, run, serving, write_model


async def get(served: Served, target: str, accept: str = "*/*") -> tuple[int, Any]:
    """As httpx sends it, unless told otherwise. JSON is read."""
    client = await served.client()
    client.writer.write(f"GET {target} HTTP/1.1\r\nHost: t\r\nAccept: {accept}\r\n\r\n".encode())
    status, body = await client.page()
    return status, json.loads(body) if body.startswith(b"{") else body.decode()


def test_health_has_the_words_that_the_client_reads(tmp_path: Path) -> None:
    write_model(tmp_path)

    async def work() -> None:
        async with serving(tmp_path, allow_docs=False) as served:  # /docs is where / leads browsers otherwise
            assert await get(served, "/v2/health/ready") == (200, {"ready": True})
            assert await get(served, "/v2/health/live") == (200, {"live": True})
            for accept in ("*/*", "application/json"):
                assert await get(served, "/", accept) == (200, {"status": "alive"})
            status, line = await get(served, "/", "text/html,application/xhtml+xml,*/*;q=0.8")
            assert (status, line.count("\n")) == (200, 1)
            assert "is alive" in line
            assert (await get(served, "/ping"))[1] == ""

            status, told = await get(served, "/v1/models/twice")
            assert (status, told["ready"], len(told["model_version_status"])) == (200, True, 1)
            await served.server.repository.unload("twice")
            status, told = await get(served, "/v1/models/twice")
            assert (status, told["ready"]) == (200, False)

    run(work())


@pytest.mark.parametrize("dialect", ["kserve_v2", "triton_v1", "tfserving", "textgen"])
def test_health_has_its_words_where_one_dialect_is_spoken(tmp_path: Path, dialect: str) -> None:
    write_model(tmp_path)

    async def work() -> None:
        listeners = (Listener("127.0.0.1:0", (dialect,)),)
        async with serving(tmp_path, http=listeners, allow_docs=False) as served:
            status, told = await get(served, "/")
            assert (status, told) == (200, {"status": "alive"})
            assert "is alive" in (await get(served, "/", "text/html"))[1]
            client = await served.client()
            client.writer.write(b"DELETE / HTTP/1.1\r\nHost: t\r\n\r\n")
            assert (await client.page())[0] in (400, 404, 405)

    run(work())


def test_health_says_that_a_server_is_not_ready(tmp_path: Path) -> None:
    write_model(tmp_path)
    write_model(tmp_path, "broken", backend="nope")

    async def work() -> None:
        async with serving(tmp_path, keep_going=True) as served:
            assert await get(served, "/v2/health/ready") == (400, {"ready": False})
            assert await get(served, "/v2/health/live") == (200, {"live": True})
            assert await get(served, "/") == (200, {"status": "alive"})  # that it answers at all

    run(work())


def test_health_is_as_the_originals_have_it_where_it_is_told_to(tmp_path: Path) -> None:
    write_model(tmp_path)

    async def work() -> None:
        async with serving(tmp_path, kserve_replies=False) as served:
            for target in ("/v2/health/ready", "/v2/health/live", "/"):
                assert await get(served, target) == (200, "")
            assert [*(await get(served, "/v1/models/twice"))[1]] == ["model_version_status"]

    run(work())


def test_commands_that_stand_in_for_others_keep_their_replies() -> None:
    assert triton_settings({"model-repository": ["m"]})["kserve_replies"] is False
    flags, _ = tensorflow_settings({"model_base_path": "/m", "model_name": "m", "port": 1})
    assert flags["kserve_replies"] is False
