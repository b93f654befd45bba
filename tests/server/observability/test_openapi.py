"""/openapi.json and /docs of running servers: every example is answered with 200, pasted as it stands."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastserve.demo import demo_repository
from fastserve.dialects.admin import openapi
from tests.app.apps import RunningApp, write_app
from tests.running import Running
from tests.server.rig import run, serving, write_model

APP = """
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass
class Document:
    title: str
    words: list[str]
    kind: Literal["poem", "prose"] = "poem"


@fastserve.model
def greet(name: str, times: int = 1) -> dict:
    return {"text": f"Hello {name}! " * min(times, 9)}


@fastserve.model(path="/v1/longest")
def longest(document: Document) -> Document:
    return document


@fastserve.model(example={"numbers": [1.0, 2.0]})
def pair(numbers: list[float]) -> float:
    first, second = numbers
    return first * second


@fastserve.model
def pixels(content) -> bytes:
    return b"abc"


@fastserve.model
def countdown(start: int) -> Iterator[dict]:
    for left in range(min(start, 9), 0, -1):
        yield {"left": left}


@fastserve.model(batch=8)
def scale(x: fastserve.Array["float32", 4]) -> fastserve.Array["float32", 4]:
    return x * 3


fastserve.serve()
"""


def get(address: str, path: str, accept: str = "*/*") -> tuple[int, dict[str, str], bytes]:
    return ask(address, "GET", path, None, {"Accept": accept})


def ask(
    address: str, method: str, path: str, body: bytes | None, headers: dict[str, str]
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        connection.request(method, path, body, headers)
        reply = connection.getresponse()
        return reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read()
    finally:
        connection.close()


def examples(found: Any) -> Iterator[tuple[str, str, bytes | None, dict[str, str], dict[str, Any]]]:
    """Yield every operation that can be sent as it stands."""
    for path, methods in found["paths"].items():
        for method, about in methods.items():
            headers = {one["name"]: one["example"] for one in about.get("parameters", ())}
            body = None
            if "requestBody" in about:
                ((media, content),) = about["requestBody"]["content"].items()
                if "example" not in content:
                    continue
                example = content["example"]
                body = json.dumps(example).encode() if "json" in media else example.encode("latin-1")
                headers["Content-Type"] = media
            yield method.upper(), path, body, headers, about


def send_examples(address: str) -> set[str]:
    """Send every example of a server, and return what was sent."""
    status, headers, text = get(address, "/openapi.json")
    assert (status, headers["content-type"]) == (200, "application/json")
    sent = set()
    for method, path, body, given, about in examples(json.loads(text)):
        status, headers, said = ask(address, method, path, body, given)
        assert status == 200, (method, path, body, said)
        content = about["responses"]["200"].get("content", {})
        media = headers.get("content-type", "").partition(";")[0]
        assert not said or not content or media in content or "*/*" in content, (path, media)
        sent.add(f"{method} {path}")
    return sent


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApp]:
    folder = tmp_path_factory.mktemp("app")
    with RunningApp(write_app(folder, APP), folder / "log") as running:
        yield running


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(demo_repository(), tmp_path_factory.mktemp("demo") / "log") as running:
        yield running


def test_every_example_of_an_app_is_answered(app: RunningApp) -> None:
    sent = send_examples(app.http)
    names = ("/greet", "/v1/longest", "/pair", "/pixels", "/countdown", "/scale")
    assert {f"POST {name}" for name in names} <= sent
    assert {"POST /v2/models/scale/infer", "POST /v1/models/greet:predict", "POST /api/infer/scale"} <= sent


def test_types_of_a_script_are_schemas(app: RunningApp) -> None:
    found = json.loads(get(app.http, "/openapi.json")[2])
    greet = found["paths"]["/greet"]["post"]["requestBody"]["content"]["application/json"]
    assert greet["example"] == {"name": "text", "times": 1}
    schemas = found["components"]["schemas"]
    assert schemas["greet.body"]["required"] == ["name"]
    longest = found["paths"]["/v1/longest"]["post"]
    reference = {"$ref": "#/components/schemas/longest.Document"}
    assert longest["requestBody"]["content"]["application/json"]["schema"] == reference
    assert longest["responses"]["200"]["content"]["application/json"]["schema"] == reference
    assert schemas["longest.Document"]["properties"]["kind"]["enum"] == ["poem", "prose"]
    names = [about["operationId"] for methods in found["paths"].values() for about in methods.values()]
    assert len(set(names)) == len(names)


def test_every_example_of_the_demo_is_answered(demo: Running) -> None:
    sent = send_examples(demo.http)
    assert {
        "POST /v1/models/digits:predict", "POST /v1/models/digits:classify",
        "POST /v1/models/half_plus_two:regress", "POST /v2/models/half_plus_two/infer",
        "POST /api/infer/digits", "POST /v1/completions", "POST /v1/chat/completions", "POST /generate",
        "POST /v1/messages", "POST /v1/responses",
        "POST /generate_stream", "POST /infer", "POST /tokenize", "POST /v2/models/scribe/generate",
        "GET /healthz/ready", "GET /healthz/startup", "GET /metrics",
    } <= sent  # fmt: skip


def test_the_root_leads_browsers_to_the_page(demo: Running) -> None:
    browser = "text/html,application/xhtml+xml,*/*;q=0.8"
    status, headers, _ = get(demo.http, "/", browser)
    assert (status, headers["location"]) == (303, "docs")
    assert get(demo.http, "/")[2] == b'{"status":"alive"}'
    assert ask(demo.http, "HEAD", "/", None, {})[0] == 200
    status, headers, page = get(demo.http, "/docs", browser)
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    for path in re.findall(rb'(?:href|src)="([^"]+)"', page):
        assert get(demo.http, "/" + path.decode())[0] == 200, path


def test_the_page_loads_nothing_from_other_servers() -> None:
    folder = Path(openapi.__file__).parent / "page"
    for file in folder.glob("docs.*"):
        assert not re.search(r"https?:|\burl\(|@import|[\"'(]//", file.read_text()), file.name


def test_other_verbs_are_refused(demo: Running) -> None:
    status, headers, _ = ask(demo.http, "POST", "/openapi.json", b"{}", {})
    assert (status, headers["allow"]) == (405, "GET, HEAD")


def test_where_docs_are_not_allowed_there_are_none(tmp_path: Path) -> None:
    write_model(tmp_path)

    async def main() -> None:
        async with serving(tmp_path, allow_docs=False) as served:
            for path in ("/docs", "/openapi.json", "/docs/docs.js"):
                assert (await (await served.client()).get(path))[0] == 404

    run(main())


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no Chromium is installed")
def test_a_browser_shows_the_operations(app: RunningApp, tmp_path: Path) -> None:
    command = [
        "chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}",
        "--virtual-time-budget=5000", "--enable-logging=stderr", "--dump-dom", f"http://{app.http}/",
    ]  # fmt: skip
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "<code>/greet</code>" in shown.stdout
    assert "Schema of the body" in shown.stdout
    assert "CONSOLE" not in shown.stderr, shown.stderr
