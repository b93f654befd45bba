"""The operator's page on a running server: its numbers are what was counted, and Chromium shows them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from fastserve.dialects.admin import console
from fastserve.dialects.admin import numbers as numbers_module
from fastserve.dialects.admin.console import NEAR
from fastserve.settings.key_file import changing, make_key
from tests import chromium
from tests.certificates import issue
from tests.chromium import Chromium
from tests.running import FREE, Running
from tests.server.rig import Served, run, serving, write_model

BROWSER_S = 100.0
LOOKS = "performance.getEntriesByType('resource').filter((e) => e.name.includes('/console/rows')).length"
in_chromium = pytest.mark.skipif(
    chromium.FOUND is None, reason="no chromium: the page was not shown by a browser"
)


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (console, numbers_module):
        monkeypatch.setattr(module, "INTERVAL_S", 0.05)


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
            found = await asyncio.wait_for(numbers_once(served, 3), 60)
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
            model = await asyncio.wait_for(failing(served), 60)
            told = [(one["status"], one["request_id"]) for one in model["failures"]]
            assert told == [("INTERNAL", f"r-{number}") for number in (6, 5, 4, 3, 2, 1, 0)]
            assert "no such luck" in model["failures"][0]["message"]
            assert (await served.ask(1.0, model="nobody"))[0] == 404, "which is its client's fault"
            (model,) = (await numbers(served))["models"]
            assert len(model["failures"]) == 7
            (row,) = (await rows(served))["models"]
            assert (row["trouble"], row["why"]) == ("bad", "most requests fail")
            assert row["last"]["request_id"] == "r-6"

    run(main())


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


async def rows(served: Served) -> Any:
    status, body = await (await served.client()).get("/console/rows")
    assert status == 200, body
    return json.loads(body)


def test_details_are_of_one_model_and_its_example_is_answered(tmp_path: Path) -> None:
    write_model(tmp_path, instances=2)

    async def main() -> None:
        async with serving(tmp_path) as served:
            client = await served.client()
            while True:  # the memory of workers is looked at twice a second
                status, body = await client.get("/console/model?name=twice&after=0")
                assert status == 200, body
                found = json.loads(body)
                (version,) = found["versions"]
                if all(worker["memory_bytes"] for worker in version["workers"]):
                    break
                await asyncio.sleep(0.05)
            assert [worker["device"] for worker in version["workers"]] == ["cpu", "cpu"]
            assert all(1e6 < worker["memory_bytes"] < 1e9 for worker in version["workers"])
            assert found["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 2], "optional": False}]
            paths = [example["path"] for example in found["examples"]]
            assert paths[0] == "/v2/models/twice/infer"
            assert "/v1/models/twice:predict" in paths
            for example in found["examples"]:
                status, answer = await client.post(example["path"], json.dumps(example["body"]).encode())
                assert status == 200, (example, answer)
            for query in ("?name=nobody", "", "?name=%FF", "?name=" + "a" * 5000):
                assert (await client.get(f"/console/model{query}"))[0] == 404
            assert (await client.get("/console/model?name=twice&after=x"))[0] == 400
            seen = found["next_point"]
            for target in ("model?name=twice&", "rows?"):
                for query, first in (("after=0", 0), ("after=0&history=other", max(seen - NEAR, 0))):
                    told = json.loads((await client.get(f"/console/{target}{query}"))[1])
                    assert first <= told["first_point"] <= max(told["next_point"] - NEAR, 0) or not first
                own = f"after={told['next_point']}&history={told['history']}"
                assert json.loads((await client.get(f"/console/{target}{own}"))[1])["first_point"] >= seen

    run(main())


@asynccontextmanager
async def shown(served: Served, profile: Path, **size: int) -> AsyncIterator[Chromium]:
    """The page, once it has models; afterwards nothing may have been said on its console."""
    async with Chromium(profile, **size) as browser:
        address = f"http://127.0.0.1:{served.port}"
        await browser.open(f"{address}/console")
        await browser.until("document.querySelectorAll('.model').length")
        yield browser
        assert browser.said == []
        assert {url for url in browser.requests if not url.startswith(address)} == set()


HOSTILE = "<img src=x onerror=console.log(1)>"


@in_chromium
@pytest.mark.logs_errors
def test_a_browser_shows_models_by_traffic_with_what_failed(tmp_path: Path) -> None:
    (write_model(tmp_path, "broken", warmup="off") / "1" / "model.py").write_text(
        FAILS.replace("no such luck", HOSTILE)
    )
    for name in ("quiet", "twice"):
        write_model(tmp_path, name)

    async def main() -> None:
        async with serving(tmp_path) as served:
            served.server.catalog.model(HOSTILE)
            seen = asyncio.Event()
            asking = asyncio.ensure_future(ask_until(seen, served))
            async with shown(served, tmp_path / "profile") as page:
                await see_rows(page)
                await follow_another_process(page)
                await see_details(page)
                await use_keys(page)
            seen.set()
            await asking

    run(main(), BROWSER_S)


async def ask_until(seen: asyncio.Event, served: Served) -> None:
    """Send two requests that are answered and one that fails, again and again: what is shown is of a quarter
    of a second."""
    client, body = await served.client(), json.dumps({"instances": [[1.0, 2.0]]}).encode()
    while not seen.is_set():
        for model, status in (("twice", 200), ("broken", 500), ("twice", 200)):
            assert (await client.post(f"/v1/models/{model}:predict", body))[0] == status
        await asyncio.sleep(0.02)


async def see_rows(page: Chromium) -> None:
    names = "[...document.querySelectorAll('.model .name b')].map((one) => one.textContent)"
    assert await page.until(f"{names}.length === 4 && {names}") == ["twice", "broken", HOSTILE, "quiet"]
    assert await page.value("document.querySelector('#state').className") == "pill good"
    broken = "document.getElementById('model-broken')"
    await page.until(
        f"{broken}.matches('.bad') && {broken}.querySelector('.said').textContent.includes('INTERNAL')"
    )
    assert HOSTILE in await page.value(f"{broken}.querySelector('.said').textContent")
    assert await page.value("document.querySelectorAll('img').length") == 0
    assert await page.value("document.querySelector('#trouble b').textContent") == "1"
    assert "M" in await page.value("document.querySelector('#model-twice path.line').getAttribute('d')")
    assert await page.value("document.querySelector('#model-twice .latency').title.startsWith('half of the')")


async def follow_another_process(page: Chromium) -> None:
    """Points of a history that numbers them otherwise follow those there are."""
    begin = "const points = new Points(); points.add({a: [1, 2, 3]}, 0, 3);"
    for fresh, told, wanted in (
        (1, [2, 3, 4], [1, 2, 3, 4]),
        (0, [2, 3], [1, 2, 3]),
        (3, [4, 5, 6], [1, 2, 3, 4, 5, 6]),
    ):
        change = (
            f"points.renumber(70, {len(told)}, {fresh}); points.add({{a: {told}}}, 70, {70 + len(told)});"
        )
        assert await page.value(f"(() => {{ {begin} {change} return points.last('a', 9) }})()") == wanted


async def see_details(page: Chromium) -> None:
    await page.value("document.querySelector('#model-broken .row').click()")
    await page.until("document.querySelector('#model-broken .failures code')")
    assert HOSTILE in await page.value("document.querySelector('#model-broken .failures tbody').textContent")
    await page.value("document.querySelector('#model-twice .row').click()")
    twice = "document.querySelector('#model-twice .details')"
    await page.until(f"{twice}?.querySelector('textarea')")
    assert "1 of 1 workers" in await page.value(f"{twice}.textContent")
    body = json.dumps({"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [3, 4]}]})
    await page.value(f"{twice}.querySelector('textarea').value = '{body}'")
    await page.value(
        f"[...{twice}.querySelectorAll('button')].find((one) => one.textContent === 'send').click()"
    )
    answer = await page.until(
        f"{twice}.querySelector('pre').textContent.startsWith('200') && {twice}.textContent"
    )
    assert "[6" in answer
    assert "8" in answer


async def use_keys(page: Chromium) -> None:
    seen = "[...document.querySelectorAll('.model:not([hidden])')].map((one) => one.id.slice(6))"
    await page.press("Escape")
    assert await page.value("document.querySelectorAll('.details').length") == 0
    await page.press("t")
    assert await page.value(seen) == ["broken"]
    await page.press("t")
    await page.press("/")
    for key in "QUI":
        await page.press(key)
    assert await page.value(seen) == ["quiet"]
    await page.press("Enter")
    await page.press("Enter")
    await page.until("document.querySelector('#model-quiet .details .versions table')")
    assert await page.value("location.hash") == "#quiet"
    await page.press("w")
    assert await page.value("document.querySelector('#minutes-2').getAttribute('aria-pressed')") == "true"
    await page.press("d")
    assert await page.value("document.documentElement.dataset.theme") == "light"
    await page.press("?")
    assert await page.value("document.querySelector('#help-box').open")
    await page.press("Escape")
    await page.resize(390, 844)
    assert await page.value("document.documentElement.scrollWidth <= innerWidth")


@in_chromium
def test_a_browser_loads_and_unloads_and_says_when_the_server_is_gone(tmp_path: Path) -> None:
    write_model(tmp_path, "other")
    write_model(tmp_path)

    async def main() -> None:
        async with Chromium(tmp_path / "profile") as page:
            async with serving(tmp_path, load_models=("twice",)) as served:
                await page.open(f"http://127.0.0.1:{served.port}/console#twice")
                await page.until("document.querySelector('#model-twice .request .buttons')")
                press = "document.querySelector('#repository').click()"
                await page.value(press)
                row = "(one) => one.textContent.startsWith('other')"
                find = f"[...document.querySelectorAll('#repository-list tr')].find({row})"
                await page.until(find)
                await page.value(f"{find}.querySelector('button').click()")
                await page.until("document.querySelector('#model-other')")
                await page.value("document.querySelector('#repository-box').close()")
                button = "(one) => one.textContent.startsWith('unload')"
                unload = f"[...document.querySelectorAll('#model-twice button')].find({button})"
                await page.value(f"{unload}.click()")
                assert served.server.catalog.available("twice") is not None, "it was not asked twice"
                await page.value(f"{unload}.click()")
                await page.until("document.querySelector('#model-twice').matches('.off')")
                assert served.server.catalog.available("twice") is None
                assert page.said == []
            await page.until(
                "document.body.matches('.stale') && document.querySelector('#stale').textContent"
            )

    run(main(), BROWSER_S)


@in_chromium
def test_a_listener_of_grps_shows_it_at_its_root(tmp_path: Path) -> None:
    write_model(tmp_path / "models")

    async def main(address: str) -> None:
        async with Chromium(tmp_path / "profile") as page:
            await page.open(f"{address}/")
            assert "qps" in await page.value("document.documentElement.outerHTML")
            assert page.said == []  # a frame that is refused says so

    with Running(tmp_path / "models", tmp_path / "log", http=f"{FREE}=grps") as server:
        asyncio.run(main(f"http://127.0.0.1:{server.http.rpartition(':')[2]}"))


@in_chromium
def test_a_browser_shows_shared_workers_and_when_the_certificate_ends(tmp_path: Path) -> None:
    write_model(tmp_path, shared_worker="both")
    tls = issue(tmp_path)

    async def main() -> None:
        async with serving(tmp_path, tls=tls) as served, Chromium(tmp_path / "profile") as page:
            await page.open(f"https://127.0.0.1:{served.port}/console#twice")
            await page.until(
                "document.querySelector('#model-twice')?.textContent.includes('in shared worker both')"
            )
            await page.until("/certificateends in \\d+ /.test(document.querySelector('#server').textContent)")
            assert page.said == []

    run(main(), BROWSER_S)


@in_chromium
def test_a_browser_shows_it_to_who_has_a_key(tmp_path: Path) -> None:
    """The page asks for a key, refuses wrong ones, and then loads and refreshes with it; nothing keeps it."""
    write_model(tmp_path / "models")
    given: dict[str, str] = {"wrong": make_key("gone", ("metrics",))[0]}
    with changing(tmp_path / "keys.yaml") as entries:
        for name, scopes in (("few", ("infer",)), ("all", ("metrics", "metadata", "infer"))):
            given[name], entry = make_key(name, scopes)
            entries.append(entry)

    async def log_in(page: Chromium, name: str) -> None:
        field = "document.querySelector('#key')"
        await page.value(f"{field}.value = {json.dumps(given[name])}, {field}.form.requestSubmit()")

    async def main() -> None:
        async with serving(tmp_path / "models", keys=str(tmp_path / "keys.yaml")) as served:
            client = await served.client()
            assert (await client.get("/console"))[0] == 401
            async with Chromium(tmp_path / "profile") as page:
                for path, there in (
                    ("/console", f"document.querySelector('#model-twice') && {LOOKS} >= 2"),
                    (
                        "/docs",
                        "/[0-9]+ operations/.test(document.body.textContent)",
                    ),
                ):
                    await page.open(f"http://127.0.0.1:{served.port}{path}")
                    state = "document.querySelector('#state').textContent"
                    for name, told in (("wrong", "not valid"), ("few", "does not allow")):
                        await log_in(page, name)
                        await page.until(f"{state}.includes({told!r})")
                    await log_in(page, "all")
                    await page.until(there)
                    assert given["all"] not in await page.value(
                        "document.cookie + JSON.stringify(localStorage) + JSON.stringify(sessionStorage)"
                        " + location.href + document.documentElement.outerHTML"
                    )
                await page.open(f"http://127.0.0.1:{served.port}/console")
                assert await page.value("document.title") == "fastserve: API key", "a new load asks again"
                refused = [text for text in page.said if "401" not in text and "403" not in text]
                assert refused == []

    run(main(), BROWSER_S)
