"""Both paths of infer: the same requests through the fast one and the general one, the same bytes back.

A request with `Content-Encoding: identity` means the same and takes the general path.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fastserve.dialects.kserve.http_infer import HttpTemplates
from fastserve.server import Server
from fastserve.serving import request_templates
from fastserve.settings import Listener, Settings
from tests.dialects.kserve.client_models import write_native, write_sums, write_triton
from tests.server.rig import HOLD, run, seen, write_model

TURN = """
class Model:
    def __init__(self, config): pass
    def run(self, inputs):
        return {"OUT": -inputs["IN"], "HALF": inputs["IN"].astype("float16")}
"""
SAID = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        if value.flat[0] == 13:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("unlucky"))
        words = [request.request_id(), request.parameters(), request.timeout(), request.flags()]
        said = np.array([[json.dumps(words).encode()]] * len(value), object)
        made = {"OUT": value * 2, "SAID": said}
        wanted = request.requested_output_names()
        return pb_utils.InferenceResponse([pb_utils.Tensor(n, made[n]) for n in made if n in wanted])
"""
ODD = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        names = [["OUT", "OUT"], [], ["OTHER", "OUT"], ["OUT"]][int(value.flat[0])]
        return pb_utils.InferenceResponse([pb_utils.Tensor(n, value + i) for i, n in enumerate(names)])
"""
ODD_CONFIG = """max_batch_size: 4
input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }
"""
SAID_CONFIG = """max_batch_size: 4
input { name: "IN" data_type: TYPE_FP32 dims: [ 4 ] reshape { shape: [ 2, 2 ] } }
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 4 ] reshape { shape: [ 2, 2 ] } },
         { name: "SAID" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
# name -> (inputs, items of a row, datatype, outputs, most rows)
MODELS: dict[str, tuple[list[str], int, str, list[str], int]] = {
    "sums": (["INPUT0", "INPUT1"], 16, "INT32", ["OUTPUT0", "OUTPUT1"], 8),
    "simple": (["INPUT0", "INPUT1"], 16, "INT32", ["OUTPUT0", "OUTPUT1"], 8),
    "turn": (["IN"], 3, "FP32", ["OUT", "HALF"], 4),
    "said": (["IN"], 4, "FP32", ["OUT", "SAID"], 4),
}
REGION_BYTES = 4 * mmap.PAGESIZE


def write_models(folder: Path) -> Path:
    write_sums(folder)
    sides = {"IN": ("inputs", "float32"), "OUT": ("outputs", "float32"), "HALF": ("outputs", "float16")}
    config: dict[str, Any] = {"inputs": {}, "outputs": {}}
    for name, (side, dtype) in sides.items():
        config[side][name] = {"dtype": dtype, "shape": [-1]}
    write_native(folder, "turn", TURN, max_batch_size=4, **config)
    write_triton(folder, "said", SAID, SAID_CONFIG)
    write_triton(folder, "odd", ODD, ODD_CONFIG)
    return folder


class Maker:
    """Requests for one model, most of them good."""

    def __init__(self, model: str, seed: int) -> None:
        self.inputs, self.items, self.datatype, self.outputs, self.most = MODELS[model]
        self.random = random.Random(seed)

    def request(self) -> tuple[bytes, int | None]:
        """The body, and the length of its JSON where something follows."""
        pick = self.random
        rows = pick.choice([1, 1, 1, 2, 3, self.most, self.most + 1, 0])
        body: dict[str, Any] = {"inputs": []}
        blobs = b""
        for number, name in enumerate(self.inputs):
            part, blob = self._input(number, name, rows)
            body["inputs"].append(part)
            blobs += blob
        self._ask(body)
        if pick.random() < 0.3:
            body["parameters"] = body.get("parameters", {}) | {"mood": pick.choice(["good", 3, True])}
        identity = {"id": pick.choice(["7", "", "é\n", "a" * 40])} if pick.random() < 0.5 else {}
        body = identity | body if pick.random() < 0.7 else body | identity
        header = json.dumps(body, indent=pick.choice([None, None, 1])).encode()
        if pick.random() < 0.05:
            header = header[:-1]
        if pick.random() < 0.05:
            blobs = blobs[:-1] if blobs else b"\0"
        return header + blobs, len(header) if blobs or pick.random() < 0.1 else None

    def _input(self, number: int, name: str, rows: int) -> tuple[dict[str, Any], bytes]:
        pick = self.random
        count = rows * self.items
        values: list[Any] = [pick.choice([0, 1, -7, 300, 13]) for _ in range(count)]
        part: dict[str, Any] = {
            "name": name if pick.random() > 0.02 else "other",
            "shape": [rows, self.items if pick.random() > 0.02 else 5],
            "datatype": self.datatype,
        }
        form = pick.choice(["json", "json", "binary", "shared"])
        if form == "json":
            if pick.random() < 0.05 and values:
                values[-1] = pick.choice(["x", None, 1.5, 2**40])
            if pick.random() < 0.05:
                values.append(1)
            part["data"] = values if pick.random() < 0.5 else [values]
            return part, b""
        if form == "binary":
            blob = struct.pack(f"<{count}{'i' if self.datatype == 'INT32' else 'f'}", *values)
            part["parameters"] = {"binary_data_size": len(blob) + (pick.random() < 0.03)}
            return part, blob
        part["parameters"] = {
            "shared_memory_region": "in" if pick.random() > 0.05 else "none",
            "shared_memory_offset": 4 * number,
            "shared_memory_byte_size": 4 * count + (pick.random() < 0.03),
        }
        return part, b""

    def _ask(self, body: dict[str, Any]) -> None:
        pick = self.random
        if pick.random() < 0.3:
            body["parameters"] = {"binary_data_output": pick.random() < 0.7}
        if pick.random() < 0.5:
            return
        asked = pick.sample(self.outputs, pick.randint(1, len(self.outputs)))
        body["outputs"] = [{"name": name} for name in asked]
        for number, part in enumerate(body["outputs"]):
            form = pick.choice(["", "binary", "json", "shared", "small", "classes"])
            part["parameters"] = {
                "": {},
                "binary": {"binary_data": True},
                "json": {"binary_data": False},
                "shared": {
                    "shared_memory_region": "out",
                    "shared_memory_offset": 1024 * number,
                    "shared_memory_byte_size": 1024,
                },
                "small": {"shared_memory_region": "out", "shared_memory_byte_size": 4},
                "classes": {"classification": 2},
            }[form]


class Client:
    """One connection, kept."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def post(self, path: str, body: bytes, length: int | None, *lines: str) -> tuple[str, bytes]:
        head = [f"POST {path} HTTP/1.1", "Host: a", f"Content-Length: {len(body)}", *lines]
        if length is not None:
            head.append(f"Inference-Header-Content-Length: {length}")
        self.writer.write("\r\n".join([*head, "", ""]).encode() + body)
        got = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        kept = [line for line in got.split("\r\n") if not line.startswith(("Date:", "X-Request-Id:"))]
        size = next(int(line.split(":")[1]) for line in kept if line.lower().startswith("content-length:"))
        return "\r\n".join(kept), await self.reader.readexactly(size)


@contextmanager
def shared(name: str) -> Iterator[memoryview]:
    path = f"/dev/shm/{name}"
    with open(path, "wb") as file:
        file.write(bytes(range(256)) * (REGION_BYTES // 256))
    try:
        with (
            open(path, "r+b") as file,
            mmap.mmap(file.fileno(), REGION_BYTES) as memory,
            memoryview(memory) as view,
        ):
            yield view
    finally:
        os.unlink(path)


class Served:
    """A server of one of the folder's models, or all, and its client."""

    def __init__(self, folder: Path, model: str = "*", **more: Any) -> None:
        options = {"model_control": "explicit", "load_models": (model,), "allow_client_shm": True, **more}
        self.server = Server(
            Settings(repository=str(folder), http=(Listener("127.0.0.1:0"),), grpc=(), **options)
        )

    async def __aenter__(self) -> Served:
        await self.server.open()
        self.client = Client(*await asyncio.open_connection(*self.server.front.http[0].address))
        return self

    async def __aexit__(self, *fault: object) -> None:
        self.client.writer.close()
        await self.client.writer.wait_closed()
        await self.server.drain(5)

    async def register(self, region: str, key: str) -> None:
        body = {"key": key, "offset": 0, "byte_size": REGION_BYTES}
        path = f"/v2/systemsharedmemory/region/{region}/register"
        head, _ = await self.client.post(path, json.dumps(body).encode(), None)
        assert " 200 " in head


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record whether the fast paths took each request."""
    said: list[bool] = []
    start = HttpTemplates.start

    def noting(self: HttpTemplates, call: Any, header_bytes: int) -> bool:
        said.append(start(self, call, header_bytes))
        return said[-1]

    monkeypatch.setattr(HttpTemplates, "start", noting)
    return said


@pytest.mark.parametrize("model", MODELS)
def test_both_paths_answer_alike(
    model: str, tmp_path: Path, taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_templates, "MOST_UNUSED", 1000)  # every one is learned
    maker, path = Maker(model, seed=7), f"/v2/models/{model}/infer"
    keys = [f"fastserve-paths-{os.getpid()}-{side}" for side in ("in", "out")]

    async def work() -> None:
        with shared(keys[0]), shared(keys[1]) as out:
            async with Served(write_models(tmp_path), model) as served:
                await served.register("in", keys[0])
                await served.register("out", keys[1])
                good = 0
                for _ in range(250):
                    body, length = maker.request()
                    answers = []
                    for lines in (["Content-Encoding: identity"], [], []):
                        out[:] = bytes(REGION_BYTES)
                        answer = await served.client.post(path, body, length, *lines)
                        answers.append((*answer, bytes(out)))
                    assert answers[1] == answers[0], body
                    assert answers[2] == answers[0], body
                    good += " 200 " in answers[0][0]
                assert good > 50
                assert sum(taken) > 0.4 * good

    run(work())


def test_raw_bodies(tmp_path: Path, taken: list[bool]) -> None:
    async def work() -> None:
        async with Served(write_models(tmp_path), "turn") as served:
            for values in ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0]):
                body = struct.pack(f"<{len(values)}f", *values)
                path = "/v2/models/turn/infer"
                general = await served.client.post(path, body, 0, "Content-Encoding: identity")
                for _ in range(2):
                    assert await served.client.post(path, body, 0) == general
            assert taken == [False, True, True, True, False, True]

    run(work())


def test_odd_answers(tmp_path: Path, taken: list[bool]) -> None:
    """Outputs twice, none at all, one that nobody declared."""

    async def work() -> None:
        async with Served(write_models(tmp_path), "odd") as served:
            tensor = {"name": "IN", "shape": [1, 1], "datatype": "FP32"}
            for value in (3, 0, 1, 2, 3):
                body = json.dumps({"inputs": [tensor | {"data": [value]}]}).encode()
                path = "/v2/models/odd/infer"
                general = await served.client.post(path, body, None, "Content-Encoding: identity")
                for _ in range(2):
                    assert await served.client.post(path, body, None) == general
            assert taken == [False] + [True] * 9

    run(work())


def test_packed_replies(tmp_path: Path, taken: list[bool]) -> None:
    async def work() -> None:
        async with Served(write_models(tmp_path), "sums") as served:
            tensor = {"shape": [1, 16], "datatype": "INT32", "data": list(range(16))}
            body = {"inputs": [{"name": name, **tensor} for name in ("INPUT1", "INPUT0")]}
            for binary in (False, True):
                body["parameters"] = {"binary_data_output": binary}
                sent, path = json.dumps(body).encode(), "/v2/models/sums/infer"
                lines = ["Accept-Encoding: gzip, deflate"]
                general = await served.client.post(path, sent, None, "Content-Encoding: identity", *lines)
                assert "Content-Encoding: gzip" in general[0]
                for _ in range(2):
                    assert await served.client.post(path, sent, None, *lines) == general
            assert taken == [False, True, False, True]

    run(work())


def test_rows_come_and_go_in_one_frame(tmp_path: Path, taken: list[bool]) -> None:
    async def work() -> None:
        async with Served(write_models(tmp_path), "simple") as served:
            for rows in (2, 1, 4, 8, 3):
                tensor = {"shape": [rows, 16], "datatype": "INT32", "data": list(range(16 * rows))}
                body = {"inputs": [{"name": name, **tensor} for name in ("INPUT1", "INPUT0")]}
                _, reply = await served.client.post(
                    "/v2/models/simple/infer", json.dumps(body).encode(), None
                )
                data = [output["data"] for output in json.loads(reply)["outputs"]]
                assert data == [[2 * n for n in range(16 * rows)], [0] * 16 * rows]
            assert taken == [False, True, True, True, True]

    run(work())


def test_ever_new_requests_leave_the_known_ones_alone(tmp_path: Path, taken: list[bool]) -> None:
    tensor = {"name": "IN", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}

    async def work() -> None:
        async with Served(write_models(tmp_path), "said") as served:
            for number in range(150):
                for parameters in ({}, {"number": number}):
                    body = json.dumps({"inputs": [tensor], "parameters": parameters}).encode()
                    head, _ = await served.client.post("/v2/models/said/infer", body, None)
                    assert " 200 " in head
            assert taken[::2] == [False] + [True] * 149
            assert not any(taken[1::2])

    run(work())


def test_regions_that_shrink_or_go(tmp_path: Path, taken: list[bool]) -> None:
    """A request that fits its frame, but not its memory any more, gets the general path's error."""
    key = f"fastserve-paths-{os.getpid()}-shrinking"
    tensor = {
        "name": "IN",
        "shape": [1, 3],
        "datatype": "FP32",
        "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 12},
    }
    body = json.dumps({"inputs": [tensor], "outputs": [{"name": "OUT"}]}).encode()

    async def work() -> None:
        with shared(key):
            async with Served(write_models(tmp_path), "turn") as served:
                await served.register("r", key)
                ask = served.client.post
                path = "/v2/models/turn/infer"
                good = await ask(path, body, None)
                assert await ask(path, body, None) == good
                os.truncate(f"/dev/shm/{key}", 5)
                for _ in range(2):
                    _, said = await ask(path, body, None)
                    assert b"Invalid offset + byte size" in said
                os.truncate(f"/dev/shm/{key}", REGION_BYTES)
                assert b'"data":[' in (await ask(path, body, None))[1]
                await ask("/v2/systemsharedmemory/region/r/unregister", b"", None)
                _, said = await ask(path, body, None)
                assert b"Unable to find shared memory region" in said
                assert taken == [False, True, False, False, True, False]

    run(work())


def test_a_client_that_leaves_holds_nothing(tmp_path: Path, taken: list[bool]) -> None:
    """Its place is free again, and so is what its output's region was held with."""
    key = f"fastserve-paths-{os.getpid()}-left"
    tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32"}
    room = {"shared_memory_region": "r", "shared_memory_byte_size": 8}

    def body(value: float) -> bytes:
        outputs = [{"name": "y", "parameters": room}]
        return json.dumps({"inputs": [tensor | {"data": [value, 1]}], "outputs": outputs}).encode()

    async def work() -> None:
        write_model(tmp_path)
        with shared(key) as memory:
            async with Served(tmp_path) as served:
                await served.register("r", key)
                path = "/v2/models/twice/infer"
                for _ in range(2):
                    await served.client.post(path, body(5), None)
                assert struct.unpack("<2f", memory[:8]) == (10, 2)
                before = os.listdir("/proc/self/fd")
                leaver = Client(*await asyncio.open_connection(*served.server.front.http[0].address))
                asking = asyncio.create_task(leaver.post(path, body(HOLD), None))
                await until(lambda: seen(tmp_path)[-1:] == [[HOLD]])
                leaver.writer.close()
                with pytest.raises(asyncio.IncompleteReadError):
                    await asking
                await until(lambda: os.listdir("/proc/self/fd") == before)
                (tmp_path / "go").touch()
                ring = next(iter(served.server.host.hosted.values())).queue.ring
                await until(lambda: ring.outstanding() == 0)
                assert struct.unpack("<2f", memory[:8]) == (10, 2)
            assert taken == [False, True, True]

    run(work())


async def until(true: Callable[[], object]) -> None:
    """Let the loop turn until something is so; `run` has the limit."""
    while not true():
        await asyncio.sleep(0.002)
