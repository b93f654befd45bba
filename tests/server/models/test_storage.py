"""A server whose repository lies in an object store: versions appear and vanish, and the store may stall."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.request import urlopen

import msgspec
import pytest

pytest.importorskip("obstore")
pytest.importorskip("moto")

from fastserve.cli.predictive import kserve_settings, mlserver_settings
from fastserve.cli.serve import FetchedPlaces
from fastserve.repository.storage import open_mirror
from fastserve.server import Server
from fastserve.settings import Listener, Settings, StorageOptions
from tests.repository.stores import Bucket, Files, open_bucket, pack
from tests.running import Running
from tests.server.rig import Served, run, write_model

pytestmark = pytest.mark.lingers  # the threads of obstore


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    with open_bucket() as found:
        for name, value in found.environment.items():
            monkeypatch.setenv(name, value)
        yield found


@asynccontextmanager
async def serving_uri(uri: str, tmp_path: Path) -> AsyncIterator[Served]:
    """A server as `fastserve serve URI` starts it."""
    storage = StorageOptions(cache=str(tmp_path / "cache"), poll_s=1.0, timeout_s=1.0, allow_http=True)
    settings = Settings(
        storage=storage, poll_s=0.2, http=(Listener("127.0.0.1:0"),), grpc=(), drain_delay_s=0
    )
    mirror = await asyncio.to_thread(open_mirror, uri, storage)
    server = Server(msgspec.structs.replace(settings, repository=str(mirror.path)), mirror=mirror)
    await server.open()
    served = Served(server)
    try:
        yield served
    finally:
        served.close()
        await server.drain(5)
        mirror.close()


async def figure(at: Served, name: str) -> float:
    _, page = await (await at.client()).get("/metrics")
    return next(float(line.split()[-1]) for line in page.decode().splitlines() if line.startswith(name))


async def eventually(at: Served, name: str, value: float) -> None:
    async with asyncio.timeout(60):
        while await figure(at, name) != value:
            await asyncio.sleep(0.05)


@pytest.mark.logs_errors
def test_versions_come_and_go_with_the_bucket(bucket: Bucket, tmp_path: Path) -> None:
    local = tmp_path / "local"
    write_model(local)
    bucket.put_folder(local)

    async def work() -> None:
        async with serving_uri(bucket.uri, tmp_path) as at:
            assert await at.ask(2.0) == (200, [4.0])
            model = at.server.catalog.models["twice"]
            bucket.put("twice/2/model.py", (local / "twice" / "1" / "model.py").read_bytes())
            await at.until(lambda: [v.number for v in model.available()] == [2])
            assert await at.ask(3.0) == (200, [6.0])
            os.kill(bucket.process.pid, signal.SIGSTOP)
            await eventually(at, "fastserve_storage_stale", 1)
            assert await at.ask(5.0) == (200, [10.0]), "what is there stays served"
            assert "cannot be listed" in at.server._storage._mirror.trouble
            os.kill(bucket.process.pid, signal.SIGCONT)
            await eventually(at, "fastserve_storage_stale", 0)
            bucket.remove("twice/2/model.py")
            await at.until(lambda: [v.number for v in model.available()] == [1])
            assert await at.ask(7.0) == (200, [14.0])
            assert await figure(at, 'fastserve_storage_looks_total{result="failed"}') > 0
            os.kill(bucket.process.pid, signal.SIGSTOP)
        os.kill(bucket.process.pid, signal.SIGKILL)
        async with serving_uri(bucket.uri, tmp_path) as at:  # without the store
            assert await at.ask(8.0) == (200, [16.0])
            await eventually(at, "fastserve_storage_stale", 1)

    run(work())


@pytest.mark.logs_errors
def test_an_archive_that_changes_and_fails(tmp_path: Path) -> None:
    local = tmp_path / "local"
    write_model(local)
    held = {str(file.relative_to(local)): file.read_bytes() for file in local.rglob("*") if file.is_file()}
    files = Files()
    files.files["/models.tar.gz"] = pack(held), "1"

    async def work() -> None:
        async with serving_uri(f"{files.address}/models.tar.gz", tmp_path) as at:
            assert await at.ask(2.0) == (200, [4.0])
            source = held["twice/1/model.py"].replace(b"x * 2", b"x * 3")
            files.files["/models.tar.gz"] = b"no archive at all", "2"
            await eventually(at, "fastserve_storage_stale", 1)
            assert await at.ask(2.0) == (200, [4.0])
            files.files["/models.tar.gz"] = pack({**held, "twice/1/model.py": source}), "3"
            async with asyncio.timeout(60):
                while await at.ask(2.0) != (200, [6.0]):
                    await asyncio.sleep(0.05)

    try:
        run(work())
    finally:
        files.close()


def test_commands_take_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx = (Path(__file__).parents[3] / "examples/onnx/digits/1/model.onnx").read_bytes()
    files = Files()
    files.files["/digits.tar.gz"] = pack({"model.onnx": onnx}), "1"
    uri = f"{files.address}/digits.tar.gz"
    options = StorageOptions(cache=str(tmp_path / "cache"), allow_http=True)
    fetched = FetchedPlaces(Settings(storage=options))
    try:
        with (
            Running(
                uri, tmp_path / "log", "--storage-cache", str(tmp_path / "other"), "--storage-allow-http"
            ) as server,
            urlopen(f"http://{server.http}/v1/models/digits", timeout=60) as reply,
        ):
            assert b"AVAILABLE" in reply.read()
        monkeypatch.setattr("fastserve.cli.serve.setup_logs", lambda *given, **more: None)
        settings = kserve_settings([f"--model_dir={uri}", "--framework=onnx"], {}, fetched)
        assert [(one.name, one.file) for one in settings.models] == [("model", "model.onnx")]
        said = {"MLSERVER_MODEL_IMPLEMENTATION": "mlserver_onnx.OnnxModel", "MLSERVER_MODEL_URI": uri}
        assert mlserver_settings("", said, fetched).models[0].file == "model.onnx"
        written = {"implementation": "mlserver_onnx.OnnxModel", "parameters": {"uri": uri}}
        (tmp_path / "model-settings.json").write_text(json.dumps(written))
        assert mlserver_settings(str(tmp_path), {}, fetched).models[0].file == "model.onnx"
        assert fetched.mirror is not None
        fetched.mirror.close()
    finally:
        files.close()


def check(uri: str, tmp_path: Path, *options: str) -> tuple[int, str]:
    """What `fastserve check URI` says; its copy is gone afterwards, and no server's cache is touched."""
    cache, places = tmp_path / "cache", tmp_path / "places"
    for folder in (cache, places):
        folder.mkdir(exist_ok=True)
    storage = "--storage-allow-http", "--storage-cache", str(cache)
    command = [sys.executable, "-m", "fastserve.cli", "check", uri, *storage, *options]
    done = subprocess.run(
        command,
        env={**os.environ, "TMPDIR": str(places)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert list(cache.iterdir()) == []
    assert [one for one in places.iterdir() if one.name.startswith("fastserve-check-")] == []
    return done.returncode, done.stdout + done.stderr


def test_a_check_reads_a_bucket_and_leaves_nothing(bucket: Bucket, tmp_path: Path) -> None:
    local = tmp_path / "local"
    write_model(local)
    bucket.put_folder(local)
    status, said = check(bucket.uri, tmp_path)
    assert (status, "twice: version 1" in said) == (0, True), said
    assert f"repository: {bucket.uri}  (flag)" in said
    assert "1 model(s) were loaded, 0 with problems" in said
    status, said = check(f"{bucket.uri}/twice", tmp_path, "--name", "double", "--no-load")
    assert (status, "double: version 1" in said) == (0, True), said
    bucket.put("twice/1/model.py", b"def broken(:")
    status, said = check(bucket.uri, tmp_path)
    assert (status, "SyntaxError: invalid syntax (model.py, line 1)" in said) == (1, True), said
    status, said = check(bucket.uri, tmp_path, "--storage-max-bytes", "10")
    assert (status, "storage.max_bytes allows 10" in said) == (1, True), said
    status, said = check(f"{bucket.uri}/nothing", tmp_path)
    assert (status, "no file is below the address" in said) == (1, True), said
