"""Mirrors of object stores: what is fetched, when, and what no fault of a store may do to what is served."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from urllib.request import urlopen

import pytest

from fastserve.errors import ConfigError
from fastserve.repository.storage import Mirror, open_mirror
from fastserve.repository.storage_sources import (
    StorageError,
    check_path,
    fault_sentence,
    is_uri,
    open_source,
    unpack,
)
from fastserve.settings import StorageOptions
from tests.repository.stores import (
    Bucket,
    Cloud,
    Files,
    open_azure,
    open_bucket,
    open_google_cloud,
    pack,
    tree,
)
from tests.running import Running, run_command, until

pytest.importorskip("obstore")
pytestmark = pytest.mark.lingers  # the threads of obstore

ASKED = b'{"instances": [[2.0]]}'
SOURCE = b"""
class Model:
    def __init__(self, config):
        pass

    def run(self, inputs):
        return {"y": inputs["x"] * 2}
"""
TENSOR = b"{dtype: float32, shape: [1]}"
SERVED = {
    "twice/1/model.py": SOURCE,
    "twice/model.yaml": b"backend: python\nmax_batch_size: 4\ninputs: {x: %s}\noutputs: {y: %s}"
    % (TENSOR, TENSOR),
}
MODEL = {"m/model.yaml": b"backend: python", "m/1/model.py": b"one"}


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    pytest.importorskip("moto")
    with open_bucket() as found:
        yield found


@pytest.fixture
def filled(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    for path, data in MODEL.items():
        bucket.put(path, data)
    yield bucket
    for path in ("m/model.yaml", "m/1/model.py", "m/2/model.py"):
        bucket.remove(path)


@pytest.fixture(scope="module", params=["gs", "az"])
def emulator(request: pytest.FixtureRequest) -> Iterator[Cloud]:
    with {"gs": open_google_cloud, "az": open_azure}[request.param]() as found:
        yield found


@pytest.fixture
def cloud(emulator: Cloud, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    for name, value in emulator.environment.items():
        monkeypatch.setenv(name, value)
    yield emulator
    emulator.files.answer = emulator.forward


@pytest.fixture
def files() -> Iterator[Files]:
    found = Files()
    yield found
    found.close()


def options(tmp_path: Path, **more: Any) -> StorageOptions:
    return StorageOptions(**{"cache": str(tmp_path / "cache"), "allow_http": True, "timeout_s": 2.0, **more})


def test_a_bucket_and_its_changes(filled: Bucket, tmp_path: Path) -> None:
    mirror = open_mirror(filled.uri, options(tmp_path))
    assert mirror.path.name == "served"
    assert tree(mirror.path) == MODEL
    first = (mirror.path / "m" / "1" / "model.py").resolve()
    was = first.stat()
    assert not mirror.sync()
    filled.put("m/2/model.py", b"two")
    assert mirror.sync()
    assert tree(mirror.path) == {**MODEL, "m/2/model.py": b"two"}
    now = (mirror.path / "m" / "1" / "model.py").stat()
    assert (now.st_ino, now.st_mtime_ns) == (was.st_ino, was.st_mtime_ns), (
        "what has not changed is not loaded again"
    )
    filled.put("m/1/model.py", b"new")  # as long as before
    filled.remove("m/2/model.py")
    assert mirror.sync()
    assert tree(mirror.path) == {**MODEL, "m/1/model.py": b"new"}
    assert first.read_bytes() == b"one", "a version that runs keeps its files"
    mirror.release({first.parent})
    mirror.sync()
    assert first.exists()
    mirror.release(set())
    mirror.sync()
    assert not first.exists()
    assert not list((mirror.folder / "incoming").iterdir())
    mirror.close()


def test_it_starts_without_the_store(filled: Bucket, tmp_path: Path) -> None:
    open_mirror(filled.uri, options(tmp_path)).close()
    os.kill(filled.process.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        mirror = open_mirror(filled.uri, options(tmp_path, timeout_s=1.0))
        assert time.monotonic() - began < 60
        assert tree(mirror.path) == MODEL
        assert mirror.trouble
        with pytest.raises(StorageError):
            mirror.sync()
        assert tree(mirror.path) == MODEL
        with pytest.raises(ConfigError):
            open_mirror(filled.uri, options(tmp_path / "other", timeout_s=1.0))
    finally:
        os.kill(filled.process.pid, signal.SIGCONT)
    assert not mirror.sync()
    assert not mirror.trouble
    mirror.close()


def test_servers_share_a_cache(filled: Bucket, tmp_path: Path) -> None:
    mirrors = [open_mirror(filled.uri, options(tmp_path)) for _ in range(2)]
    old = (mirrors[1].path / "m" / "1").resolve()
    filled.put("m/2/model.py", b"two")
    assert mirrors[0].sync()
    mirrors[0].release(set())
    mirrors[0].sync()
    assert old.exists(), "the other server has it"
    assert not mirrors[1].sync(), "it is fetched"
    mirrors[1].release(set())
    mirrors[1].sync()
    assert not old.exists()
    for mirror in mirrors:
        mirror.close()


KILLED = """
import sys
from fastserve.repository.storage import open_mirror
from fastserve.settings import StorageOptions
open_mirror(sys.argv[1], StorageOptions(cache=sys.argv[2], allow_http=True))
"""


def begin_slowly(files: Files, path: str, size: int) -> threading.Event:
    """Let the store send half of a file, and then nothing. Set once half is sent."""
    half = threading.Event()

    def answer(handler: Any) -> bool:
        if handler.command != "GET" or handler.path != path or handler.headers.get("Range"):
            return False
        handler.begin(size, files.files[path][1])
        handler.wfile.write(files.files[path][0][: size // 2])
        handler.wfile.flush()
        half.set()
        time.sleep(20)
        return True

    files.answer = answer
    return half


def test_half_a_download_is_never_served(files: Files, tmp_path: Path) -> None:
    data = pack({"m/1/model.py": os.urandom(1 << 20)})
    files.files["/a/models.tar.gz"] = data, "1"
    half = begin_slowly(files, "/a/models.tar.gz", len(data))
    uri, cache = f"{files.address}/a/models.tar.gz", tmp_path / "cache"
    process = subprocess.Popen([sys.executable, "-c", KILLED, uri, str(cache)])
    assert half.wait(60)
    process.kill()
    process.wait(30)
    source = open_source(uri, options(tmp_path))
    mirror = Mirror(uri, source, options(tmp_path))
    assert not mirror.adopt()
    assert not mirror.path.exists()
    with pytest.raises(StorageError):  # it stands still
        mirror.sync()
    assert not mirror.path.exists()
    files.answer = lambda handler: False
    assert mirror.sync()
    assert list(tree(mirror.path)) == ["m/1/model.py"]
    mirror.close()


@pytest.mark.parametrize("how", ["short", "long", "tag", "500", "closed", "empty", "swapped"])
def test_a_lying_store_changes_nothing(files: Files, tmp_path: Path, how: str) -> None:
    path = "/a/models.tar.gz"
    files.files[path] = pack(MODEL), "1"
    mirror = open_mirror(f"{files.address}{path}", options(tmp_path))
    assert tree(mirror.path) == MODEL
    new = pack({**MODEL, "m/2/model.py": os.urandom(1000)})
    files.files[path] = new, "2"

    def answer(handler: Any) -> bool:
        if how == "500":
            handler.send_error(500)
            return True
        if handler.command == "HEAD":
            return False
        if how == "closed":
            handler.connection.close()
        elif how == "tag":
            handler.begin(len(new), "3")
            handler.wfile.write(new)
        elif how == "short":
            handler.begin(len(new), "2")
            handler.wfile.write(new[:-10])
            handler.connection.close()
        elif how == "long":
            handler.begin(len(new) + 5, "2")
            handler.wfile.write(new + b"12345")
        elif how == "empty":
            handler.begin(0, "2")
        else:  # other bytes under the same tag and size
            handler.begin(len(new), "2")
            handler.wfile.write(new[:200] + bytes(len(new) - 200))
        return True

    files.answer = answer
    for _ in range(2):
        with pytest.raises(StorageError):
            mirror.sync()
        assert tree(mirror.path) == MODEL
    files.answer = lambda handler: False
    assert mirror.sync()
    assert set(tree(mirror.path)) == {*MODEL, "m/2/model.py"}
    mirror.close()


def test_an_archive_is_looked_at_by_its_head_alone(files: Files, tmp_path: Path) -> None:
    files.files["/models.tgz"] = pack(MODEL), "1"
    mirror = open_mirror(f"{files.address}/models.tgz", options(tmp_path))
    assert mirror.path.name == "models"
    files.asked.clear()
    assert not mirror.sync()
    assert files.asked == ["HEAD /models.tgz"]
    mirror.close()


def cut_off(cloud: Cloud, path: str) -> Callable[[Any], bool]:
    """The emulator's answers, but of one file half of what is asked for, each time."""

    def answer(handler: Any) -> bool:
        if handler.command != "GET" or path not in unquote(handler.path):
            return cloud.forward(handler)
        whole, handler.wfile = handler.wfile, io.BytesIO()
        cloud.forward(handler)
        head, _, body = handler.wfile.getvalue().partition(b"\r\n\r\n")
        handler.wfile = whole
        handler.wfile.write(head + b"\r\n\r\n" + body[: len(body) // 2])
        return True

    return answer


def refusal(status: int, code: str) -> Callable[[Any], bool]:
    """An answer as the APIs of the clouds document their errors."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>No.</Message></Error>".encode()

    def answer(handler: Any) -> bool:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)
        return True

    return answer


def test_a_cloud_and_its_faults(cloud: Cloud, tmp_path: Path) -> None:
    for path, data in MODEL.items():
        cloud.put(f"faults/{path}", data)
    uri, large = f"{cloud.uri}/faults", os.urandom(1 << 20)
    mirror = open_mirror(uri, options(tmp_path, timeout_s=20.0))
    assert tree(mirror.path) == MODEL
    assert not mirror.sync()
    cloud.put("faults/m/2/model.py", large)
    for answer, why in (
        (cut_off(cloud, "m/2/model.py"), "m/2/model.py cannot be read: "),
        (refusal(404, "NoSuchBucket"), "there is no such bucket (404 Not Found, NoSuchBucket)"),
        (refusal(403, "AccessDenied"), "give no right to it (403 Forbidden, AccessDenied)"),
        (refusal(503, "SlowDown"), "the store answers with an error (503 Service Unavailable, SlowDown)"),
    ):
        cloud.files.answer = answer
        with pytest.raises(StorageError) as fault:
            mirror.sync()
        assert why in str(fault.value)
        assert tree(mirror.path) == MODEL
    cloud.files.answer = cloud.forward
    assert mirror.sync()
    assert tree(mirror.path) == {**MODEL, "m/2/model.py": large}
    mirror.close()
    cloud.put("models.tar.gz", pack(MODEL))
    mirror = open_mirror(f"{cloud.uri}/models.tar.gz", options(tmp_path, timeout_s=20.0))
    assert tree(mirror.path) == MODEL
    assert not mirror.sync()
    mirror.close()


def test_a_cloud_is_served(cloud: Cloud, tmp_path: Path) -> None:
    for path, data in SERVED.items():
        cloud.put(f"live/{path}", data)
    stored = "--storage-cache", str(tmp_path / "cache"), "--storage-allow-http"
    with Running(
        f"{cloud.uri}/live", tmp_path / "log", *stored, "--storage-poll-s", "1", "--poll-s", "0.2"
    ) as server:

        def ask() -> object:
            with urlopen(f"http://{server.http}/v1/models/twice:predict", ASKED, timeout=60) as reply:
                return json.load(reply)["predictions"]

        def stale() -> bool:
            with urlopen(f"http://{server.http}/metrics", timeout=60) as reply:
                return b"\nfastserve_storage_stale 1" in reply.read()

        assert ask() == [[4.0]]
        cloud.files.answer = cut_off(cloud, "twice/2/model.py")
        cloud.put("live/twice/2/model.py", SOURCE.replace(b"* 2", b"* 3") + b"\n#" + b"." * 100_000)
        until(stale, "half a file is found out")
        assert ask() == [[4.0]]
        cloud.files.answer = cloud.forward
        until(lambda: ask() == [[6.0]], "the new version is served")
        assert not stale()
    cloud.files.answer = refusal(403, "AccessDenied")
    done = run_command("serve", f"{cloud.uri}/other", *stored)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"repository: {cloud.uri}/other: its files cannot be listed: the credentials" in done.stderr


@pytest.mark.parametrize("emulator", ["az"], indirect=True)
def test_a_cloud_that_refuses(cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = base64.b64encode(b"x" * 64).decode()
    for uri, variable, value, why in (
        ("az://nothing/a", "", "", "there is no such bucket (404 Not Found, ContainerNotFound)"),
        (f"{cloud.uri}/a.tar", "", "", "nothing is there (404 Not Found)"),
        (cloud.uri, "AZURE_STORAGE_ACCOUNT_KEY", wrong, "give no right to it (403 Forbidden, Auth"),
        (cloud.uri, "AZURE_STORAGE_ACCOUNT_KEY", "!", "Invalid Access Key"),
        (cloud.uri, "AZURE_STORAGE_ACCOUNT_NAME", "", "AZURE_STORAGE_ACCOUNT_NAME is not set"),
        (cloud.uri, "AZURE_STORAGE_ENDPOINT", "http://127.0.0.1:1/a", "http://127.0.0.1:1 refuses the conn"),
    ):
        with monkeypatch.context() as patch:
            if variable and not value:
                patch.delenv(variable)
            elif variable:
                patch.setenv(variable, value)
            with pytest.raises(ConfigError) as fault:
                open_mirror(uri, options(tmp_path, timeout_s=20.0))
        assert why in str(fault.value)
        assert "\n" not in str(fault.value)
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    monkeypatch.setenv("AZURE_MSI_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(
        ConfigError, match="no variable sets credentials, and the machine has none: http://127"
    ):
        open_mirror(cloud.uri, options(tmp_path, timeout_s=20.0))


def test_faults_as_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no server of tests can answer so: Google Cloud's metadata service, and a panic of the library."""
    host = "http://169.254.169.254"
    told = (
        f"Generic GCS error: Error performing token request: Error performing GET {host}/computeMetadata/v1/a"
    )
    insides = " in 2ms - HTTP error: error sending request\n\nDebug source:\nkind: TimedOut"
    why = "no variable sets credentials, and the machine has none"
    assert fault_sentence(Exception(told + insides)) == f"{why}: {host} does not answer in time"
    monkeypatch.setenv("GOOGLE_BASE_URL", "127.0.0.1:1")
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "test")
    with pytest.raises(ConfigError, match="an endpoint that a variable sets is no address"):
        open_mirror("gs://models/a", options(tmp_path, timeout_s=20.0))
    monkeypatch.setenv("GOOGLE_BASE_URL", "http://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"storage\.allow_http allows it"):
        open_mirror("gs://models/a", options(tmp_path, timeout_s=20.0, allow_http=False))


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.size = kind, link, size
    return made


@pytest.mark.parametrize(
    "made",
    [
        member("../out"),
        member("/etc/out"),
        member("a/../../out"),
        member("a//b"),
        member("a\\..\\b"),
        member("in", tarfile.SYMTYPE, "/etc/passwd"),
        member("in", tarfile.SYMTYPE, "m"),
        member("in", tarfile.LNKTYPE, "m/1/model.py"),
        member("in", tarfile.FIFOTYPE),
        member("in", tarfile.CHRTYPE),
        member("m/1/model.py"),
        member("m/1/model.py/in"),
        member("m/1"),
        member("/".join("d" * 40)),
        member("n" * 300),
    ],
    ids=lambda made: f"{made.name[:16]} {made.type.decode()} {made.linkname}",
)
def test_what_no_archive_may_hold(tmp_path: Path, made: tarfile.TarInfo) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "a.tar.gz").write_bytes(pack(MODEL, made))
    with pytest.raises(StorageError):
        unpack(tmp_path / "a.tar.gz", tmp_path / "in", 1 << 20)
    assert not (tmp_path / "out").exists()
    assert not any(one.is_symlink() for one in (tmp_path / "in").rglob("*"))


def test_bounds_of_archives(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    bomb = pack({"a": bytes(50 << 20)})
    assert len(bomb) < 1 << 20
    (tmp_path / "a.tar.gz").write_bytes(bomb)
    with pytest.raises(StorageError, match="max_bytes"):
        unpack(tmp_path / "a.tar.gz", tmp_path / "in", 1 << 20)
    header = member("a", tarfile.XHDTYPE, size=40 << 20)
    (tmp_path / "a.tar").write_bytes(header.tobuf() + bytes(41 << 20))
    with pytest.raises(StorageError, match="header"):
        unpack(tmp_path / "a.tar", tmp_path / "in", 1 << 30)
    for cut in (100, 600, 1100):
        whole = pack({"a": os.urandom(1000)}, mode="w")
        (tmp_path / "a.tar").write_bytes(whole[:cut])
        (tmp_path / "cut").mkdir(exist_ok=True)
        with pytest.raises(StorageError):
            unpack(tmp_path / "a.tar", tmp_path / "cut", 1 << 20)
        for one in (tmp_path / "cut").iterdir():
            one.unlink()


def test_a_repository_larger_than_its_bound(filled: Bucket, files: Files, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"storage\.max_bytes"):
        open_mirror(filled.uri, options(tmp_path, max_bytes=10))
    files.files["/a.tar.gz"] = pack({"a": bytes(1 << 20)}), "1"
    with pytest.raises(ConfigError, match=r"storage\.max_bytes"):
        open_mirror(f"{files.address}/a.tar.gz", options(tmp_path, max_bytes=10_000))


def test_a_model_of_the_hub(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", files.address)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    sent, elsewhere, cut = [], Files(), False

    def answer(handler: Any) -> bool:
        sent.append(handler.headers.get("Authorization"))
        if "/resolve/" not in handler.path:
            return False
        handler.send_response(302)
        handler.send_header("Location", elsewhere.address + handler.path)
        handler.send_header("Content-Length", "0")
        handler.end_headers()
        return True

    def answer_elsewhere(handler: Any) -> bool:
        assert "Authorization" not in handler.headers, "the token is the Hub's alone"
        data, tag = elsewhere.files[handler.path]
        handler.begin(len(data), tag)
        handler.wfile.write(data[: len(data) // 2] if cut else data)
        return True

    files.answer, elsewhere.answer = answer, answer_elsewhere

    def commit(sha: str, held: dict[str, bytes]) -> None:
        names = [{"rfilename": name} for name in (*held, ".gitattributes", "pytorch_model.bin")]
        described = json.dumps({"sha": sha, "siblings": names}).encode()
        files.files["/api/models/org/tiny/revision/main"] = described, sha
        for name, data in held.items():
            elsewhere.files[f"/org/tiny/resolve/{sha}/{name}"] = data, "x"

    held = {"config.json": b"{}", "model.safetensors": b"weights"}
    commit("c1", held)
    mirror = open_mirror("hf://org/tiny", options(tmp_path))
    assert (mirror.path.name, tree(mirror.path)) == ("tiny", held)
    assert not mirror.sync()
    commit("c2", {**held, "config.json": b"{ }"})
    cut = True
    with pytest.raises(StorageError, match=r"config\.json cannot be read"):
        mirror.sync()
    assert tree(mirror.path) == held
    cut = False
    assert mirror.sync()
    assert tree(mirror.path)["config.json"] == b"{ }"
    assert set(sent) == {"Bearer hf_secret"}
    mirror.close()
    elsewhere.close()


@pytest.mark.parametrize(
    "path", ["", "/a", "a/", "../a", "a/./b", "a\0b", "a\\b", "x/" * 40 + "x", "n" * 256]
)
def test_paths_that_lead_elsewhere(path: str) -> None:
    with pytest.raises(StorageError):
        check_path(path)


def test_addresses(tmp_path: Path) -> None:
    assert is_uri("s3://b/m")
    assert not is_uri("models/s3")
    for uri, told in {
        "ftp://h/a.tar.gz": "s3",
        "http://h/a.tar.gz": "storage.allow_http",
        "https://h/models": ".tar.gz",
        "https://u:secret@h/a.tar.gz": "without password",
        "https://h/a.tar.gz?sig=secret": "without password",
        "hf://a/b/c": "hf://ORG/MODEL",
    }.items():
        with pytest.raises(ConfigError) as fault:
            open_source(uri, StorageOptions(cache=str(tmp_path)))
        assert told in str(fault.value)
        assert "secret" not in str(fault.value)
