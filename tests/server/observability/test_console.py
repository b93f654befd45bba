"""The operator's page on a running server: its numbers are what was counted, and a browser shows them."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from fastserve.dialects.admin import console
from tests.certificates import issue
from tests.running import FREE, Running
from tests.server.rig import Served, run, serving, write_model

BROWSER_S = 60.0


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "INTERVAL_S", 0.05)


async def numbers(served: Served, query: str = "") -> Any:
    status, body = await (await served.client()).get(f"/console/numbers{query}")
    assert status == 200, body
    return json.loads(body)


async def numbers_once(served: Served, requests: int) -> Any:
    """As soon as the history has seen so many batches of one request, and an error."""
    while True:
        found = await numbers(served)
        bars = found["models"][0]["batches"]
        if found["causes"] and sum(bar["batches"] for bar in bars) >= requests:
            return found
        await asyncio.sleep(0.01)


def test_the_numbers_are_what_was_asked(tmp_path: Path) -> None:
    write_model(tmp_path)

    async def main() -> None:
        async with serving(tmp_path) as served:
            for number in (1.0, 2.0, 3.0):
                assert (await served.ask(number))[0] == 200
            assert (await served.ask(1.0, model="nobody"))[0] == 404
            found = await asyncio.wait_for(numbers_once(served, 3), 20)
            check_numbers(found)
            assert len((await numbers(served, f"?after={found['next_point'] - 1}"))["points"]["p50_ms"]) >= 1
            assert (await numbers(served, "?after=999999999999999"))["points"]["p50_ms"] == []

    run(main())


def check_numbers(found: Any) -> None:
    assert found["ready"] is True
    assert next(cause for cause in found["causes"] if cause["cause"] == "NOT_FOUND")["total"] == 1
    (model,) = found["models"]
    assert (model["model"], model["ready"]) == ("twice", True)
    (version,) = model["versions"]
    assert (version["state"], version["workers_alive"], version["workers_wanted"]) == ("AVAILABLE", 1, 1)
    assert model["now"]["p50_ms"] > 0
    assert {stage["stage"] for stage in model["stages"] if stage["p50_ms"]} >= {"queue", "compute"}
    assert found["connections"] >= 0
    assert found["certificate_expires"] is None
    assert found["devices"][0]["memory_total_bytes"] > found["devices"][0]["memory_used_bytes"] > 0


FAILS = """
class Model:
    def __init__(self, config):
        pass

    def run(self, inputs):
        raise RuntimeError("no such luck")
"""


async def failing(served: Served) -> Any:
    """The numbers of a model all of whose requests fail, once the history has seen it."""
    client = await served.client()
    body = json.dumps({"instances": [[1.0, 2.0]]}).encode()
    for number in range(7):
        head = f"POST /v1/models/twice:predict HTTP/1.1\r\nHost: a\r\nX-Request-Id: r-{number}\r\n"
        client.writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert (await client.reply())[0] == 500
    while True:
        (model,) = (await numbers(served))["models"]
        if model["now"]["errors_per_s"]:
            return model
        await asyncio.sleep(0.01)


@pytest.mark.logs_errors
def test_a_model_that_fails_tells_the_last_failures_with_their_ids(tmp_path: Path) -> None:
    """It was a green card that said ready."""
    (write_model(tmp_path, warmup="off") / "1" / "model.py").write_text(FAILS)

    async def main() -> None:
        async with serving(tmp_path) as served:
            model = await asyncio.wait_for(failing(served), 20)
            told = [(one["status"], one["request_id"]) for one in model["failures"]]
            assert told == [("INTERNAL", f"r-{number}") for number in (6, 5, 4, 3, 2)]
            assert "no such luck" in model["failures"][0]["message"]
            assert (await served.ask(1.0, model="nobody"))[0] == 404, "which is its client's fault"
            assert len((await numbers(served))["models"][0]["failures"]) == 5
            if shutil.which("chromium") is not None:
                page, said = await show(served.port, tmp_path / "profile")
                assert "<code>r-6</code>" in page
                assert "CONSOLE" not in said, said

    run(main(), BROWSER_S + 20)


@pytest.mark.parametrize("query", ["?after=-1", "?after=1e3", "?after=", "?after=" + "9" * 16, "?after=%31"])
def test_a_number_that_is_none_is_refused(tmp_path: Path, query: str) -> None:
    write_model(tmp_path)

    async def main() -> None:
        async with serving(tmp_path) as served:
            status, body = await (await served.client()).get(f"/console/numbers{query}")
            assert status == 400
            assert b"after: " in body

    run(main())


def test_where_metrics_are_not_shown_the_page_is_not(tmp_path: Path) -> None:
    write_model(tmp_path)

    async def main() -> None:
        async with serving(tmp_path, allow_metrics=False) as served:
            for path in ("/console", "/console/numbers", "/console/console.js"):
                assert (await (await served.client()).get(path))[0] == 404

    run(main())


@pytest.mark.skipif(
    shutil.which("chromium") is None, reason="no chromium: the page was not shown by a browser"
)
def test_a_browser_shows_it_within_its_policy(tmp_path: Path) -> None:
    write_model(tmp_path)

    async def main() -> None:
        async with serving(tmp_path) as served:
            for number in (1.0, 2.0, 3.0):
                assert (await served.ask(number))[0] == 200
            page, said = await show(served.port, tmp_path / "profile")
            assert 'id="model-twice"' in page
            assert '<span id="state" class="pill good" role="status">ready</span>' in page
            assert "1 of 1 workers" in page
            assert '<path class="a" d="M' in page
            assert "CONSOLE" not in said, said  # neither an error of the script nor a breach of the policy

    run(main(), BROWSER_S + 20)


@pytest.mark.skipif(
    shutil.which("chromium") is None, reason="no chromium: the page was not shown by a browser"
)
def test_a_listener_of_grps_shows_it_at_its_root(tmp_path: Path) -> None:
    write_model(tmp_path / "models")
    with Running(tmp_path / "models", tmp_path / "log", http=f"{FREE}=grps") as server:
        page, said = asyncio.run(show(int(server.http.rpartition(":")[2]), tmp_path / "profile", "/"))
    assert "qps" in page
    assert "CONSOLE" not in said, said  # a frame that is refused says so


@pytest.mark.skipif(
    shutil.which("chromium") is None, reason="no chromium: the page was not shown by a browser"
)
def test_a_browser_shows_shared_workers_and_when_the_certificate_ends(tmp_path: Path) -> None:
    write_model(tmp_path, shared_worker="both")
    write_model(tmp_path, "alone")
    tls = issue(tmp_path)

    async def main() -> None:
        async with serving(tmp_path, tls=tls) as served:
            page, said = await show(served.port, tmp_path / "profile", scheme="https")
            assert page.count(" in shared worker ") == 1
            assert '<span class="dim"> in shared worker both</span>' in page
            assert re.search(r"<dt>certificate</dt><dd>ends in \d+ ", page), page[:2000]
            assert "CONSOLE" not in said, said

    run(main(), BROWSER_S + 20)


async def show(port: int, profile: Path, path: str = "/console", scheme: str = "http") -> tuple[str, str]:
    """The page as a browser has it after some seconds of its own time, and what its console said."""
    browser = await asyncio.create_subprocess_exec(
        "chromium", "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
        "--virtual-time-budget=5000", "--enable-logging=stderr", "--dump-dom",
        "--ignore-certificate-errors", f"{scheme}://127.0.0.1:{port}{path}",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    page, said = await asyncio.wait_for(browser.communicate(), BROWSER_S)
    return page.decode(), said.decode("utf-8", "replace")
