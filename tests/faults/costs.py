"""Cost of a request to the server: CPU of the front process, the time its loop was blocked, peak memory.

    with costly_server(folder) as server:
        cost = Costs(server).of(lambda: ask_http(server, request))

The server has a model of each kind, every dialect on one port, and the administrative APIs enabled.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from fastserve._ext.http2_frames import frame
from fastserve.app.describe import describe_script
from fastserve.app.models_folder import write_models as write_configs
from fastserve.serving.dialect import ListenerPolicy
from tests.dialects.kserve import client_models
from tests.faults import shapes
from tests.faults.flooding import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    GREETING,
    HEADERS,
    PING,
    RESET,
    SETTINGS,
    UPDATE,
    grpc_block,
)
from tests.faults.probed import Probed
from tests.faults.rig import request_bytes
from tests.faults.test_amplification import CLASSIFIES
from tests.faults.test_counts import BACK
from tests.running import Running
from tests.slowness import slowness

LOOP_S, CPU_S = 0.05, 1.0
TIMES, BASE_BYTES = 10, 20 << 20
ANSWER_S = 20.0
ENDLESS = ("/grpc.health.v1.Health/Watch",)  # calls that go on until the client leaves
WIDE = (1 << 31) - 1 - 65535
TOKENS = """
class Model:
    def __init__(self, config): pass
    def generate(self, request):
        while True:
            yield 5
    def embed(self, requests):
        return [[0.0] * 4 for _ in requests]
    info = {"embeds": 4}
"""
PAIRS = """
import numpy as np

class Model:
    def __init__(self, config): pass
    def run(self, inputs):
        return {"score": np.zeros(len(inputs["text"]), np.float32)}
"""
SUMS = """
class Model:
    def __init__(self, config): pass
    def run(self, inputs):
        return {"y": inputs["x"].sum(axis=1)}
"""
OPTIONS = (
    "--model-control", "explicit", "--load-model", "*", "--admin-log-settings",
    "--admin-reload-config", "--allow-client-shm",
)  # fmt: skip
CONFIG = """
tfserving: {monitoring: true}
grps: {customized_path: /customized}
admin: {traffic: true}
log: {level: error}
dialects: ["fastserve.app.json_api:SPEC"]
"""


class Cost(NamedTuple):
    """Of one request of `nbytes`."""

    nbytes: int
    loop_s: float
    cpu_s: float
    peak_bytes: int

    @property
    def excess(self) -> str:
        """Name the costs beyond the bounds, which are of a machine of usual speed; "" for none."""
        most_bytes = TIMES * self.nbytes + BASE_BYTES
        said = [
            f"holds the loop {1e3 * self.loop_s:.0f} ms" if _takes_too_long(self.loop_s, LOOP_S) else "",
            f"{self.cpu_s:.2f} s of CPU" if _takes_too_long(self.cpu_s, CPU_S) else "",
            f"{self.peak_bytes / 1e6:.0f} MB for {self.nbytes / 1e6:.1f}"
            if self.peak_bytes > most_bytes
            else "",
        ]
        return ", ".join(filter(None, said))


def _takes_too_long(took_s: float, most_s: float) -> bool:
    return took_s > most_s and took_s > most_s * slowness()


def write_models(folder: Path) -> Path:
    folder.mkdir()
    write_configs(describe_script(Path(__file__).with_name("app_models.py")), folder)
    side = {"dtype": "float32", "shape": [-1]}
    client_models.write_native(folder, "free", BACK, inputs={"x": side}, outputs={"y": side})
    whole = {"dtype": "int32", "shape": [-1]}
    client_models.write_native(folder, "integers", BACK, inputs={"x": whole}, outputs={"y": whole})
    texts = {"dtype": "bytes", "shape": [-1]}
    client_models.write_native(folder, "texts", BACK, inputs={"x": texts}, outputs={"y": texts})
    text = {"dtype": "bytes", "shape": []}
    pairs = {"inputs": {"text": text, "text_pair": text}, "max_batch_size": 32}
    score = {"dtype": "float32", "shape": []}
    client_models.write_native(folder, "pairs", PAIRS, outputs={"score": score}, **pairs)
    wide = {"dtype": "float64", "shape": [2]}
    logged = {"request_log": {"sample": 1.0, "max_tensor_bytes": 1 << 20}}
    sums = {"inputs": {"x": wide}, "outputs": {"y": {**wide, "shape": []}}}
    client_models.write_native(folder, "loose", SUMS, **sums, loose_inputs=True, max_batch_size=4096)
    for name, tensor, more in (
        ("logged", side, logged),
        ("logged_texts", texts, logged),
        ("cached", side, {"cache": True}),
        ("cached_texts", texts, {"cache": True}),
    ):
        client_models.write_native(folder, name, BACK, inputs={"x": tensor}, outputs={"y": tensor}, **more)
    classifies = {"serving_default": {"method": "classify"}}
    client_models.write_native(
        folder,
        "classes",
        CLASSIFIES,
        inputs={"x": side},
        outputs={"scores": side},
        signatures=classifies,
    )
    client_models.write_triton(
        folder, "chat", client_models.CHAT, client_models.TEXTS + client_models.DECOUPLED
    )
    client_models.write_triton(folder, "total", client_models.TOTAL, client_models.SEQUENCES)
    client_models.write_sums(folder)
    client_models.write_triton(folder, "double", "", client_models.ENSEMBLE)
    client_models.write_native(
        folder, "tokens", TOKENS, backend="text_python", text={"tokenizer": "folder", "max_tokens": 1024}
    )
    demo = Path(__file__).parents[2] / "fastserve" / "demo" / "scribe" / "1"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo / name, folder / "tokens" / "1" / name)
    return folder


@contextlib.contextmanager
def costly_server(folder: Path, config: str = "") -> Iterator[Probed]:
    models = write_models(folder / "models")
    (folder / "settings.yaml").write_text(CONFIG + config)
    listen = f"127.0.0.1:0={','.join(spoken())}"
    settings = ("--config", str(folder / "settings.yaml"), "--listen", listen)
    settings += ("--request-log-folder", str(folder / "request logs"))
    with Probed(models, folder / "log", *settings, *OPTIONS, http="off", grpc="off") as server:
        yield server


def spoken() -> list[str]:
    """Every dialect but those that are alone on their port."""
    return [spec.name for spec in shapes.SPECS if spec.listeners is not ListenerPolicy.EXCLUSIVE]


class Costs:
    """Of requests to one server, one after the other."""

    def __init__(self, server: Probed) -> None:
        self.server = server
        self._models = [entry["name"] for entry in self._index()]

    def load_models(self) -> None:
        """Load the models that were there at the start, where they are not ready."""
        ready = {entry["name"] for entry in self._index() if entry.get("state") == "READY"}
        for name in self._models:
            if name not in ready:
                status, text = self._post(f"/v2/repository/models/{name}/load", b"{}")
                assert status == 200, text

    def _index(self) -> list[dict[str, str]]:
        status, text = self._post("/v2/repository/index", b"{}")
        assert status == 200, text
        found: list[dict[str, str]] = json.loads(text)
        return found

    def _post(self, target: str, body: bytes) -> tuple[int, bytes]:
        link = http.client.HTTPConnection(self.server.http, timeout=ANSWER_S)
        try:
            link.request("POST", target, body)
            reply = link.getresponse()
            return reply.status, reply.read()
        finally:
            link.close()

    def of(self, nbytes: int, ask: Callable[[], object]) -> Cost:
        self.server.meter.reset()
        Path(f"/proc/{self.server.pid}/clear_refs").write_text("5")
        before_s, before = self._cpu_s(), self._memory("VmRSS")
        ask()
        return Cost(
            nbytes, self.server.meter.longest_s, self._cpu_s() - before_s, self._memory("VmHWM") - before
        )

    def _cpu_s(self) -> float:
        fields = Path(f"/proc/{self.server.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _memory(self, name: str) -> int:
        lines = Path(f"/proc/{self.server.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def ask_http(server: Running, request: shapes.Http) -> int:
    """The status; 0 where the server hung up."""
    return answer_of(server, request)[0]


def answer_of(server: Running, request: shapes.Http, within_s: float = ANSWER_S) -> tuple[int, str]:
    """The status, and what it says of another try; 0 where the server hung up."""
    host, _, port = server.http.rpartition(":")
    headers = {name.replace("-", "_"): value for name, value in request.headers}
    with socket.create_connection((host, int(port)), within_s) as link, contextlib.suppress(ConnectionError):
        with contextlib.suppress(ConnectionError):  # it may answer before it has all
            link.sendall(
                request_bytes(request.verb, request.target, request.body, Connection="close", **headers)
            )
        reply = http.client.HTTPResponse(link, method=request.verb)
        reply.begin()
        while reply.read(1 << 20):
            pass
        return reply.status, reply.getheader("Retry-After", "")
    return 0, ""


def ask_rpc(place: str, path: str, data: bytes, within_s: float = ANSWER_S) -> bool:
    """Send the bytes as the server opens its windows, and take what comes; whether it ended by trailers."""
    host, _, port = place.rpartition(":")
    with socket.create_connection((host, int(port)), within_s) as link:
        caller = Caller(link, within_s)
        caller.begin(path)
        return caller.pour(data)


class Caller:
    """One call on a connection of its own."""

    def __init__(self, link: socket.socket, within_s: float = ANSWER_S) -> None:
        self._link, self._came, self._within_s = link, bytearray(), within_s
        self._window, self._stream_window = 65535, 1 << 20
        self.ended = self.well = self._endless = False

    def begin(self, path: str) -> None:
        self._endless = path in ENDLESS
        wide = frame(SETTINGS, 0, 0, struct.pack(">HI", 4, WIDE)) + frame(
            UPDATE, 0, 0, struct.pack(">I", WIDE)
        )
        self._link.sendall(GREETING + wide + frame(HEADERS, END_HEADERS, 1, grpc_block(path)))

    def pour(self, data: bytes) -> bool:
        sent, view, end = 0, memoryview(data), time.monotonic() + self._within_s
        with contextlib.suppress(ConnectionError):
            while not self.ended and time.monotonic() < end:
                room = min(self._window, self._stream_window, 1 << 18, len(view) - sent)
                if room > 0 and sent < len(view):
                    self._link.sendall(framed(view[sent : sent + room], last=sent + room == len(view)))
                    self._window -= room
                    self._stream_window -= room
                    sent += room
                    self._link.setblocking(False)
                    with contextlib.suppress(BlockingIOError):
                        self._hear()
                    self._link.settimeout(self._within_s)
                else:
                    self._hear()
        return self.well

    def _hear(self) -> None:
        came = self._link.recv(1 << 18)
        self.ended = self.ended or not came
        self._came += came
        at = 0
        while at + 9 <= len(self._came):
            size = int.from_bytes(self._came[at : at + 3], "big")
            if at + 9 + size > len(self._came):
                break
            kind, flags = self._came[at + 3], self._came[at + 4]
            number = int.from_bytes(self._came[at + 5 : at + 9], "big")
            self._take(kind, flags, number, bytes(self._came[at + 9 : at + 9 + min(size, 8)]))
            at += 9 + size
        del self._came[:at]

    def _take(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == UPDATE and number:
            self._stream_window += int.from_bytes(payload[:4], "big")
        elif kind == UPDATE:
            self._window += int.from_bytes(payload[:4], "big")
        elif kind == PING and not flags & ACK:
            self._link.sendall(frame(PING, ACK, 0, payload))
        elif kind in (RESET, GOAWAY):
            self.ended = True
        elif (
            number == 1
            and kind in (HEADERS, DATA)
            and (flags & END_STREAM or (self._endless and kind == DATA))
        ):
            self.ended = self.well = True


def framed(data: memoryview, *, last: bool) -> bytes:
    """DATA frames of a piece."""
    pieces = [data[at : at + 16384] for at in range(0, len(data), 16384)]
    ends = [END_STREAM if last and index == len(pieces) - 1 else 0 for index in range(len(pieces))]
    return b"".join(frame(DATA, end, 1, bytes(piece)) for piece, end in zip(pieces, ends, strict=True))
