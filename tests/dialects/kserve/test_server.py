"""The dialect on a whole server: native models in worker processes, a real repository, real listeners."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import struct
from pathlib import Path
from typing import Any

from fastserve.server import Server
from fastserve.settings import AdminOptions, Listener, Settings
from tests.dialects.kserve.replay import exchange
from tests.server.rig import run, write_model

BODY = {"inputs": [{"name": "x", "shape": [2, 2], "datatype": "FP32", "data": [[1, 2], [3, 4.5]]}]}


class Served:
    """A server with one listener for this dialect alone and one that speaks all."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        listeners = (Listener("127.0.0.1:0", ("kserve_v2",)), Listener("127.0.0.1:0"))
        settings.setdefault("admin", AdminOptions(file_overrides=True, log_settings=True))
        self.server = Server(Settings(repository=str(folder), http=listeners, grpc=(), **settings))

    async def __aenter__(self) -> Served:
        await self.server.open()
        return self

    async def __aexit__(self, *fault: object) -> None:
        await self.server.drain(5)

    async def ask(
        self, method: str, path: str, body: object = b"", headers: Any = None, listener: int = 0
    ) -> tuple[int, dict[str, str], bytes]:
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {
            "method": method,
            "path": path,
            "headers": headers or {},
            "body": "b64:" + base64.b64encode(sent).decode(),
        }
        return await exchange(self.server.front.http[listener].address, given)


def test_infer_as_json(tmp_path: Path) -> None:
    write_model(tmp_path)

    async def work() -> None:
        async with Served(tmp_path) as served:
            status, _, body = await served.ask("POST", "/v2/models/twice/infer", {"id": "7", **BODY})
            output = {"name": "y", "datatype": "FP32", "shape": [2, 2], "data": [2.0, 4.0, 6.0, 9.0]}
            assert status == 200
            assert json.loads(body) == {
                "id": "7",
                "model_name": "twice",
                "model_version": "1",
                "outputs": [output],
            }
            many = {"inputs": [{"name": "x", "shape": [9, 2], "datatype": "FP32", "data": [1] * 18}]}
            status, _, body = await served.ask("POST", "/v2/models/twice/infer", many)
            assert json.loads(body)["outputs"][0]["data"] == [2.0] * 18  # in batches of four

    run(work())


def test_infer_as_bytes(tmp_path: Path) -> None:
    write_model(tmp_path)

    async def work() -> None:
        async with Served(tmp_path) as served:
            tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}
            header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
            headers = {"Inference-Header-Content-Length": str(len(header))}
            blob = struct.pack("<2f", 1.0, 2.0)
            path = "/v2/models/twice/infer"
            status, got, body = await served.ask("POST", path, header + blob, headers)
            at = int(got["inference-header-content-length"])
            assert (status, struct.unpack("<2f", body[at:])) == (200, (2.0, 4.0))
            status, got, body = await served.ask("POST", path, blob, {"Inference-Header-Content-Length": "0"})
            assert struct.unpack("<2f", body[int(got["inference-header-content-length"]) :]) == (2.0, 4.0)

    run(work())


def test_what_the_server_says_of_itself(tmp_path: Path) -> None:
    write_model(tmp_path)

    async def work() -> None:
        async with Served(tmp_path) as served:
            for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/twice/ready"):
                assert (await served.ask("GET", path))[0] == 200
            metadata = json.loads((await served.ask("GET", "/v2/models/twice"))[2])
            assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}]
            config = json.loads((await served.ask("GET", "/v2/models/twice/config"))[2])
            assert (config["max_batch_size"], config["input"][0]["data_type"]) == (4, "TYPE_FP32")
            index = json.loads((await served.ask("POST", "/v2/repository/index"))[2])
            assert index == [{"name": "twice", "version": "1", "state": "READY"}]
            assert (await served.ask("GET", "/metrics"))[0] == 404
            assert (await served.ask("GET", "/metrics", listener=1))[0] == 200
            assert (await served.ask("GET", "/v1/models/twice", listener=1))[0] == 200
            assert (await served.ask("GET", "/v2/models/twice", listener=1))[0] == 200

    run(work())


def test_statistics_follow_requests_and_start_anew(tmp_path: Path) -> None:
    write_model(tmp_path)

    async def work() -> None:
        async with Served(tmp_path, model_control="explicit", load_models=("twice",)) as served:

            async def stats() -> Any:
                return json.loads((await served.ask("GET", "/v2/models/twice/stats"))[2])["model_stats"][0]

            for _ in range(3):
                await served.ask("POST", "/v2/models/twice/infer", BODY)
            shown = await stats()
            assert (shown["inference_count"], shown["execution_count"]) == (6, 3)
            assert shown["inference_stats"]["success"]["count"] == 3
            assert shown["inference_stats"]["compute_infer"]["ns"] > 0
            assert shown["last_inference"] > 0
            assert (await served.ask("POST", "/v2/repository/models/twice/unload", {}))[0] == 200
            assert (await served.ask("GET", "/v2/models/twice/stats"))[0] == 400
            assert (await served.ask("POST", "/v2/repository/models/twice/load", {}))[0] == 200
            shown = await stats()
            assert (shown["inference_count"], shown["last_inference"]) == (0, 0)

    run(work())


def test_models_are_loaded_only_where_clients_may(tmp_path: Path) -> None:
    write_model(tmp_path)

    async def work() -> None:
        async with Served(tmp_path, model_control="none") as served:
            for verb in ("load", "unload"):
                status, _, body = await served.ask("POST", f"/v2/repository/models/twice/{verb}", {})
                assert (status, json.loads(body)) == (
                    503,
                    {"error": "explicit model load / unload is not allowed if polling is enabled"},
                )

    run(work())


def test_explicit_loads(tmp_path: Path) -> None:
    write_model(tmp_path)

    async def work() -> None:
        async with Served(tmp_path, model_control="explicit") as served:
            assert json.loads((await served.ask("POST", "/v2/repository/index"))[2]) == [{"name": "twice"}]
            assert (await served.ask("POST", "/v2/repository/models/twice/load", {}))[0] == 200
            assert (await served.ask("POST", "/v2/models/twice/infer", BODY))[0] == 200
            status, _, body = await served.ask("POST", "/v2/repository/models/nope/load", {})
            assert (status, json.loads(body)["error"]) == (
                500,
                "failed to load 'nope', failed to poll from model repository",
            )
            assert (await served.ask("POST", "/v2/repository/models/twice/unload", {}))[0] == 200
            status, _, body = await served.ask("POST", "/v2/models/twice/infer", BODY)
            assert json.loads(body)["error"].endswith("'twice' has no available versions")

    run(work())


def test_client_memory_is_off_until_allowed(tmp_path: Path) -> None:
    write_model(tmp_path)

    async def work() -> None:
        for allowed, wanted in ((False, 501), (True, 500)):
            async with Served(tmp_path, allow_client_shm=allowed) as served:
                path = "/v2/systemsharedmemory/region/r/register"
                status, _, _ = await served.ask("POST", path, {"key": "/no_such_memory", "byte_size": 8})
                assert status == wanted

    run(work(), 90)


def test_a_client_that_leaves(tmp_path: Path) -> None:
    write_model(tmp_path)

    async def work() -> None:
        async with Served(tmp_path) as served:
            _, writer = await asyncio.open_connection(*served.server.front.http[0].address)
            body = json.dumps(BODY).encode()
            head = f"POST /v2/models/twice/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            writer.close()
            await writer.wait_closed()
            assert (await served.ask("POST", "/v2/models/twice/infer", BODY))[0] == 200

    run(work())


def test_both_doors_say_the_same(tmp_path: Path) -> None:
    """Space after the data closes the fast path to nothing; `parameters` do, and faults as well."""
    write_model(tmp_path)

    async def work() -> None:
        async with Served(tmp_path) as served:
            path = "/v2/models/twice/infer"
            fast = await served.ask("POST", path, {"id": 'a"b', **BODY})
            general = await served.ask("POST", path, {"id": 'a"b', **BODY, "parameters": {}})
            assert (fast[0], fast[2]) == (general[0], general[2])
            short = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1]}]}
            status, _, body = await served.ask("POST", path, short)
            assert (status, json.loads(body)["error"]) == (
                500,
                "Unable to parse 'data': Shape does not match true shape of 'data' field",
            )
            status, _, body = await served.ask("POST", f"/v2/models/twice/versions/{'9' * 5000}/infer", BODY)
            assert (status, b"details: stol" in body) == (400, True)
            status, _, body = await served.ask("POST", path, BODY, {"Accept-Encoding": "gzip"})
            assert json.loads(gzip.decompress(body)) == json.loads((await served.ask("POST", path, BODY))[2])

    run(work())


CONFIG = {
    "backend": "python",
    "max_batch_size": 4,
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [2]}],
    "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [2]}],
}


def test_files_of_a_load_stay_inside(tmp_path: Path) -> None:
    write_model(tmp_path)

    async def work() -> None:
        async with Served(tmp_path, model_control="explicit") as served:
            for name in ("../out.py", "/tmp/out.py", "1/../../out.py", ""):
                given = {"config": json.dumps(CONFIG), f"file:{name}": base64.b64encode(b"x").decode()}
                path = "/v2/repository/models/new/load"
                status, _, body = await served.ask("POST", path, {"parameters": given})
                assert (status, b"failed to poll" in body) == (500, True)

    run(work())


def test_tritons_own_metrics(tmp_path: Path) -> None:
    write_model(tmp_path)

    async def work() -> None:
        async with Served(tmp_path) as served:
            await served.ask("POST", "/v2/models/twice/infer", BODY)
            page = (await served.ask("GET", "/metrics", listener=1))[2].decode()
            labels = 'model="twice",version="1"'
            assert f"nv_inference_request_success{{{labels}}} 1\n" in page
            assert f"nv_inference_count{{{labels}}} 2\n" in page

    run(work())
