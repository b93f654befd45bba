"""A stand-in server: one model `double` (float32 any-length rows), one that is broken, in a thread."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

READY = {"ready": True, "reason": "", "models": {"double": {"ready": True}, "broken": {"ready": True}}}
INPUT = {"dtype": "DT_FLOAT", "tensor_shape": {"dim": [{"size": "-1"}, {"size": "3"}], "unknown_rank": False}}
SIGNATURES = {"serving_default": {"inputs": {"x": INPUT}, "outputs": {}, "method_name": "", "defaults": {}}}
STATUS = {"version": "1", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}


class Asked(BaseHTTPRequestHandler):
    """Doubles rows; keeps connections open as the real server does."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        if self.path == "/healthz/ready":
            self.answer(200, READY)
        elif self.path.endswith("/metadata"):
            self.answer(200, {"metadata": {"signature_def": {"signature_def": SIGNATURES}}})
        elif self.path in ("/v1/models/double", "/v1/models/broken"):
            self.answer(200, {"model_version_status": [STATUS]})
        else:
            self.answer(404, {"error": "Could not find any versions of model"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if "double" not in self.path:
            self.answer(500, {"error": "it broke"})
        elif self.headers["Content-Type"] == "application/octet-stream":
            values = struct.unpack(f"<{len(body) // 4}f", body)
            self.answer(200, {"predictions": [[2 * v for v in values]]})
        else:
            rows = json.loads(body)["instances"]
            self.answer(200, {"predictions": [[2 * v for v in row] for row in rows]})

    def answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


class StandIn(ThreadingHTTPServer):
    """Stopping waits for every connection's thread."""

    daemon_threads = False
    request_queue_size = 128


@contextmanager
def serving() -> Iterator[str]:
    """The stand-in's URL."""
    server = StandIn(("127.0.0.1", 0), Asked)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
