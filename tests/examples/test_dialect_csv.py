"""The example of docs/writing-a-dialect.md, served from outside the package: both paths, errors, its end."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path
from random import Random
from typing import Any

import pytest

from fastserve.serving.fast_path import FastPath
from tests.dialects.kserve.client_models import write_sums
from tests.running import Running
from tests.server.rig import HOLD, KILL, Served, run, serving, write_model

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLE = ROOT / "examples" / "dialect_csv"
README = (ROOT / "README.md").read_text()
SPEC = "csv_rows:SPEC"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLE))


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record whether the fast path took each request."""
    said: list[bool] = []
    start = FastPath.start

    def noting(self: FastPath, *request: Any) -> bool:
        said.append(start(self, *request))
        return said[-1]

    monkeypatch.setattr(FastPath, "start", noting)
    return said


async def post(served: Served, body: bytes, model: str = "twice") -> tuple[int, bytes]:
    client = await served.client()
    return await client.post(f"/csv/{model}", body)


def test_both_paths_answer_alike(tmp_path: Path, taken: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path)
    random = Random(7)

    async def work() -> None:
        async with serving(tmp_path, dialects=(SPEC,)) as served:
            client = await served.client()
            for rows in (1, 4, 2, 3, 1):
                given = [(random.uniform(0, 9), random.uniform(-1, 1) * 10**n) for n in range(rows)]
                body = "".join(f"{a},{b}\n" for a, b in given).encode()
                status, fast = await client.post("/csv/twice", body)
                assert (status, client.headers["content-type"]) == (200, "text/csv")
                with monkeypatch.context() as patch:
                    patch.setattr(FastPath, "start", lambda *_: False)
                    assert await client.post("/csv/twice", body) == (200, fast)
                said = [[float(number) for number in line.split(b",")] for line in fast.splitlines()]
                assert said == [pytest.approx([2 * a, 2 * b], rel=1e-6) for a, b in given]
            assert taken == [True] * 5

    run(work())


def test_more_rows_than_a_batch_and_none(tmp_path: Path, taken: list[bool]) -> None:
    write_model(tmp_path)

    async def work() -> None:
        async with serving(tmp_path, dialects=(SPEC,)) as served:
            body = "".join(f"{n},0.5\n" for n in range(11)).encode()
            expected = "".join(f"{2 * n},1\n" for n in range(11)).encode()
            assert await post(served, body) == (200, expected)
            assert await post(served, b"") == (200, b"")
            assert taken == []

    run(work())


def test_what_is_wrong_is_told_in_its_own_words(tmp_path: Path) -> None:
    write_model(tmp_path)
    write_sums(tmp_path)

    async def work() -> None:
        async with serving(tmp_path, dialects=(SPEC,)) as served:
            asked = {
                b"1,2\n3\n": b"line 2: given 1 numbers, allowed: 2",
                b"1,2\n\n3,4\n": b"line 2: given 1 numbers, allowed: 2",
                b"1,2\n3,4\n5,x\n": b"line 3: given what is no float32",
                b"\xff,\x00\n": b"line 1: given what is no float32",
            }
            for body, text in asked.items():
                for _ in range(2):  # the second one finds the version's path open
                    assert await post(served, body) == (400, b"error,400,%b\n" % text)
            status, said = await post(served, b"1,2\n", "sums")
            assert (status, b"does not make rows of numbers" in said) == (400, True)
            assert await post(served, b"1,2\n", "nobody") == (404, b"error,404,there is no model 'nobody'\n")
            client = await served.client()
            assert (await client.get("/csv/nobody"))[0] == 404
            assert (await client.get("/csv/"))[0] == 404  # nobody's, so said by another dialect
            metrics = (await client.get("/metrics"))[1].decode()
            counted = re.findall(r'fastserve_requests_total{(.*dialect="csv_rows".*)} (\d+)', metrics)
            assert sorted(n for labels, n in counted if "INVALID_ARGUMENT" in labels) == ["1", "8"]

    run(work())


def test_a_model_that_dies_and_a_client_that_leaves(tmp_path: Path, taken: list[bool]) -> None:
    write_model(tmp_path, "twice", isolate_failures=False)

    async def work() -> None:
        async with serving(tmp_path, dialects=(SPEC,)) as served:
            status, said = await post(served, b"%f,0\n" % KILL)
            assert (status, said[:10]) == (503, b"error,503,")
            leaver = await served.client()
            body = b"%f,0\n" % HOLD
            leaver.writer.write(
                b"POST /csv/twice HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n" % len(body) + body
            )
            hosted = next(iter(served.server.host.hosted.values()))
            await served.until(lambda: hosted.queue.waiting == 1)
            leaver.close()
            await served.until(lambda: hosted.queue.waiting == 0)
            (tmp_path / "go").touch()
            assert await post(served, b"2,1\n") == (200, b"4,2\n")
            assert taken == [True] * 3

    run(work())


def test_a_version_that_is_unloaded_is_let_go_of(tmp_path: Path, taken: list[bool]) -> None:
    write_model(tmp_path)

    async def work() -> None:
        async with serving(tmp_path, dialects=(SPEC,)) as served:
            client = await served.client()
            assert await client.post("/csv/twice", b"2,1\n") == (200, b"4,2\n")
            await served.server.repository.unload("twice")
            status, _ = await client.post("/csv/twice", b"2,1\n")
            assert status == 404
            await served.server.repository.load("twice")
            assert await client.post("/csv/twice", b"2,1\n") == (200, b"4,2\n")
            assert taken == [True, True]

    run(work())


def test_from_outside_the_package(tmp_path: Path) -> None:
    blocks = dict(re.findall(r"```(yaml|python)\n# models/scale/(?:.*)\n((?:.*\n)*?)```", README))
    version = tmp_path / "models" / "scale" / "1"
    version.mkdir(parents=True)
    (version.parent / "model.yaml").write_text(blocks["yaml"])
    (version / "model.py").write_text(blocks["python"])
    with Running(tmp_path / "models", tmp_path / "log", "--dialect", SPEC) as server:
        url = f"http://{server.http}/csv/scale"
        with urllib.request.urlopen(url, data=b"1,2,3,4\n5,6,7,8\n", timeout=60) as reply:
            assert reply.read() == b"3,6,9,12\n15,18,21,24\n"
        with urllib.request.urlopen(url, timeout=60) as reply:
            assert reply.read() == b"version,1\ninput,x,float32,4\noutput,y,float32,4\n"


def test_the_example_is_short_and_whole_on_its_page() -> None:
    source = (EXAMPLE / "csv_rows.py").read_text()
    page = (ROOT / "docs" / "writing-a-dialect.md").read_text()
    lines = len([line for line in source.splitlines() if line.strip()])
    assert lines < 150
    assert f"{lines} lines" in " ".join(page.split())
    walk, _ = page.split("\n## RPCs, and streams of requests\n")  # what follows is of other dialects
    for block in re.findall(r"```python\n(.*?)```", walk, re.DOTALL):
        for line in filter(str.strip, block.splitlines()):
            assert line.strip() in source or line.strip() == "...", line
