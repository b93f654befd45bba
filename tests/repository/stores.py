"""Object stores of tests: moto's S3 in a process of its own, and an HTTP server that lies, fails, stalls."""

from __future__ import annotations

import http.server
import io
import os
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

obstore = pytest.importorskip("obstore")
S3Store = pytest.importorskip("obstore.store").S3Store

BUCKET = "models"
START_S = 60.0
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
