"""Triton's flags on a whole server: restricted APIs, forwarded headers, sizes, traces, logs."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import io
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import AsyncMock

import grpc.aio
import pytest

from fastserve.protos import load
from fastserve.request import InferRequest, InferResponse, Lent
from fastserve.server import Server
from fastserve.serving import traces
from fastserve.serving.traces import RequestTrace, TraceFile
from fastserve.settings import AdminOptions, Listener, Settings, TritonOptions
from fastserve.tensor import DTYPES, Tensor
from fastserve.util.logs import setup_logs
from fastserve.util.rate_limited_log import RateLimitedLog
from tests.dialects.kserve.models import EACH, SHOW_PARAMETERS, config, put, tensors
from tests.dialects.kserve.replay import exchange
from tests.server.rig import run, write_model

V2 = load("kserve_v2")
TEXT = tensors("input", IN="STRING [1]") + tensors("output", OUT="STRING [1]")
SAY = {"inputs": [{"name": "IN", "shape": [1], "datatype": "BYTES", "data": ["x"]}]}
TWO = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}


class Asked:
    """A server, and one request at a time."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.grpc = "{}:{}".format(*server.front.grpc[0].address)

    async def http(
        self, path: str, body: Any = None, method: str = "POST", **headers: str
    ) -> tuple[int, Any]:
        text = body if isinstance(body, str) else "" if body is None else json.dumps(body)
        given = {"method": method, "path": path, "headers": headers, "body": text}
        status, framed, reply = await exchange(self.server.front.http[0].address, given)
        if "transfer-encoding" in framed:
            reply = reply.split(b"\r\n")[1]  # the one chunk
        return status, json.loads(reply) if reply else None

    async def rpc(self, name: str, request: Any, *metadata: tuple[str, str]) -> Any:
        async with grpc.aio.insecure_channel(self.grpc) as channel:
            call = channel.unary_unary(
                f"/inference.GRPCInferenceService/{name}",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=getattr(V2, f"{name}Response").FromString,
            )
            return await call(request, metadata=metadata, timeout=60)


@contextlib.asynccontextmanager
async def serving(folder: Path, settings: Any = None, **options: Any) -> AsyncIterator[Asked]:
    """`settings` of the server, `options` of the dialect."""
    alone = (Listener("127.0.0.1:0", ("kserve_v2",)),)
    admin = AdminOptions(log_settings=True)
    changed = {"triton": TritonOptions(**options), "admin": admin, **(settings or {})}
    server = Server(Settings(repository=str(folder), http=alone, grpc=alone, **changed))
    await server.open()
    try:
        yield Asked(server)
    finally:
        await server.drain(5)


def test_restricted_apis(tmp_path: Path) -> None:
    write_model(tmp_path)

    async def work() -> None:
        rules = ("statistics,model-repository:admin-key=s:=ecret", "health:Probe=yes")
        async with serving(tmp_path, http_restricted_api=rules, grpc_restricted_protocol=rules) as asked:
            refused = {"error": "This API is restricted, expecting header 'admin-key'"}
            assert await asked.http("/v2/models/stats", method="GET") == (403, refused)
            assert await asked.http("/v2/models/stats") == (403, refused)  # before the verb is looked at
            wrong = {"Admin-Key": "s:=ecre"}
            assert await asked.http("/v2/repository/index", **wrong) == (403, refused)
            right = {"Admin-Key": "s:=ecret"}
            assert (await asked.http("/v2/repository/index", **right))[0] == 200
            assert (await asked.http("/v2/health/live", method="GET"))[0] == 403
            assert (await asked.http("/v2/models/twice/infer", TWO))[0] == 200
            for name in ("ModelStatistics", "RepositoryIndex"):
                request = getattr(V2, f"{name}Request")()
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await asked.rpc(name, request, ("triton-grpc-protocol-admin-key", "no"))
                text = "This protocol is restricted, expecting header 'triton-grpc-protocol-admin-key'"
                assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.UNAVAILABLE, text)
                await asked.rpc(name, request, ("triton-grpc-protocol-admin-key", "s:=ecret"))
            assert await asked.rpc("ServerMetadata", V2.ServerMetadataRequest())

    run(work())


def test_what_is_known_is_as_restricted_as_what_is_new(tmp_path: Path) -> None:
    """A request like one that was answered takes the fast path, which must lead around nothing."""
    write_model(tmp_path)
    request = V2.ModelInferRequest(model_name="twice", raw_input_contents=[bytes(8)])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 2])

    async def work() -> None:
        async with serving(tmp_path, grpc_restricted_protocol=("inference:key=secret",)) as asked:
            for _ in range(3):
                await asked.rpc("ModelInfer", request, ("triton-grpc-protocol-key", "secret"))
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await asked.rpc("ModelInfer", request)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    run(work())


def test_headers_become_parameters(tmp_path: Path) -> None:
    put(tmp_path, "params", config(0, TEXT), EACH + SHOW_PARAMETERS)

    async def work() -> None:
        patterns = {
            "http_header_forward_pattern": "^x-|^timeout$",
            "grpc_header_forward_pattern": "^x-|^triton_",
        }
        async with serving(tmp_path, **patterns) as asked:
            path = "/v2/models/params/infer"
            status, reply = await asked.http(path, SAY, **{"X-User": "Ann", "other-X-User": "no"})
            seen = json.loads(reply["outputs"][0]["data"][0])
            assert (status, seen["params"]) == (200, {"X-User": "Ann"})
            status, reply = await asked.http(path, SAY, timeout="1")
            text = "Header 'timeout' is reserved for Triton usage and cannot be forwarded."
            assert (status, reply["error"]) == (400, text)
            status, reply = await asked.http("/v2/models/params/generate", {"IN": "x"}, **{"x-a": "b"})
            assert (status, json.loads(reply["OUT"])["params"]) == (200, {"x-a": "b"})

            request = V2.ModelInferRequest(model_name="params")
            request.inputs.add(name="IN", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"x")
            for _ in range(3):  # a request seen before goes the same way
                reply = await asked.rpc("ModelInfer", request, ("x-user", "Bob"), ("y", "no"))
                assert json.loads(reply.raw_output_contents[0][4:])["params"] == {"x-user": "Bob"}
            with pytest.raises(grpc.aio.AioRpcError, match="Header 'triton_a' is reserved"):
                await asked.rpc("ModelInfer", request, ("triton_a", "1"))

    run(work())


def test_input_sizes(tmp_path: Path) -> None:
    write_model(tmp_path)
    numbers = json.dumps({"inputs": [{"name": "x", "shape": [15, 2], "datatype": "FP32", "data": [0] * 30}]})

    async def work() -> None:
        async with serving(tmp_path, http_max_input_size=119) as asked:
            path = "/v2/models/twice/infer"
            hint = "Use --http-max-input-size to increase the limit."
            status, reply = await asked.http(path, numbers)
            size = len(numbers)
            text = f"request JSON size of {size} bytes exceeds the maximum allowed input size of 119 bytes."
            assert (status, reply["error"]) == (400, f"{text} {hint}")
            status, reply = await asked.http(path, "x" * 120, **{"Inference-Header-Content-Length": "0"})
            text = (
                "Raw input has a byte_size (120 bytes) that exceeds the maximum allowed value of 119 bytes."
            )
            assert (status, reply["error"]) == (400, f"{text} {hint}")
            assert (await asked.http("/v2/models/twice/generate", numbers))[0] == 400
            assert (await asked.http(path, TWO))[0] == 200

    run(work())


def test_sizes_of_what_json_says(tmp_path: Path) -> None:
    write_model(tmp_path)
    dense = '{"inputs":[{"name":"x","shape":[70,2],"datatype":"FP32","data":[' + "0," * 139 + "0]}]}"
    packed = "b64:" + base64.b64encode(gzip.compress(dense.encode())).decode()

    async def work() -> None:
        async with serving(tmp_path, http_max_input_size=400) as asked:
            path = "/v2/models/twice/infer"
            assert len(dense) < 400
            status, reply = await asked.http(path, dense)
            text = "JSON input 'x' has a byte_size (560 bytes) that exceeds the maximum allowed value of 400"
            assert (status, reply["error"].startswith(text)) == (400, True)
        async with serving(tmp_path, http_max_input_size=300) as asked:
            status, reply = await asked.http(path, packed, **{"Content-Encoding": "gzip"})
            text = "Decompressed data size exceeds the maximum allowed value of 300 bytes."
            assert (status, reply["error"].startswith(text)) == (400, True)

    run(work())


MOMENTS = [
    "HTTP_RECV_START", "HTTP_RECV_END", "REQUEST_START", "QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END",
    "COMPUTE_OUTPUT_START", "COMPUTE_END", "INFER_RESPONSE_COMPLETE", "REQUEST_END", "HTTP_SEND_START",
    "HTTP_SEND_END",
]  # fmt: skip


def traced(path: Path) -> dict[int, dict[str, Any]]:
    """Read each request of a trace file: its name and when what happened."""
    found: dict[int, dict[str, Any]] = {}
    for entry in json.loads(path.read_text()):
        one = found.setdefault(entry["id"], {"times": {}, "tensors": []})
        one.update({key: entry[key] for key in ("model_name", "model_version", "request_id") if key in entry})
        one["times"].update({stamp["name"]: stamp["ns"] for stamp in entry.get("timestamps", ())})
        one["tensors"] += [(entry["activity"], entry["tensor"])] if "activity" in entry else []
    return found


async def written(path: Path) -> dict[int, dict[str, Any]]:
    """Wait for a whole trace file, which the server's first process writes, and read it."""
    while not (path.exists() and path.read_text().endswith("]")):
        await asyncio.sleep(0.005)
    return traced(path)


def test_a_full_disk_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A trace that cannot be written is a line a minute at most, which counts those held back."""
    now = [0.0]
    monkeypatch.setattr(traces, "_limited_log", RateLimitedLog(traces.log, lambda: now[0]))
    appended, numbered = TraceFile("/dev/full"), TraceFile(str(tmp_path / "no folder" / "trace"))
    for _ in range(5):
        appended.append([b"{}"])
    now[0] = 61.0
    appended.append([b"{}"])
    numbered.write_numbered([b"{}"])
    appended.close()
    lost = "traces are lost: No space left on device"
    assert [one.getMessage() for one in caplog.records] == [lost, f"{lost} (4 more since)"]


@pytest.mark.parametrize("frontends", [1, 3])
def test_traces(tmp_path: Path, frontends: int) -> None:
    """Each request has a connection of its own, and so another front process than the one before."""
    write_model(tmp_path / "models")
    file = tmp_path / "trace"

    async def work() -> None:
        flags = (f"triton,file={file}", "rate=2", "triton,log-frequency=2")
        many = {"frontends": frontends}
        async with serving(tmp_path / "models", many, trace_config=flags) as asked:
            setting, infer = "/v2/trace/setting", "/v2/models/twice/infer"
            status, shown = await asked.http(setting, {"trace_level": ["TIMESTAMPS"]})
            assert (status, shown["trace_level"], shown["trace_file"]) == (200, ["TIMESTAMPS"], str(file))
            for number in range(6):
                assert (await asked.http(infer, {"id": str(number), **TWO}))[0] == 200
            first = await written(tmp_path / "trace.0")
            # The third is kept until there is a fourth, or the end.
            assert [one["request_id"] for one in first.values()] == ["1", "3"]
            times = first[1]["times"]
            assert (first[1]["model_name"], first[1]["model_version"]) == ("twice", 1)
            assert list(times) == MOMENTS
            assert list(times.values()) == sorted(times.values())

            change = {"trace_rate": "1", "trace_count": "1", "trace_level": ["TENSORS"], "log_frequency": "0"}
            assert (await asked.http("/v2/models/twice/trace/setting", change))[0] == 200
            for _ in range(3):
                assert (await asked.http(infer, TWO))[0] == 200
            assert asked.server.front.dialects["kserve_v2"].traces.on  # for the other models
            (one,) = (await written(tmp_path / "trace.1")).values()
            given = {"name": "x", "data": "1.0,2.0", "shape": "1,2", "dtype": "FP32"}
            assert one["tensors"] == [
                ("TENSOR_QUEUE_INPUT", given),
                ("TENSOR_BACKEND_OUTPUT", {**given, "name": "y", "data": "2.0,4.0"}),
            ]
            reset = dict.fromkeys(change)
            assert (await asked.http("/v2/models/twice/trace/setting", reset))[1]["trace_rate"] == "2"
            assert (await asked.http(setting, {"log_frequency": "0", "trace_rate": "1"}))[0] == 200
            request = V2.ModelInferRequest(model_name="twice", id="rpc")
            request.inputs.add(name="x", datatype="FP32", shape=[1, 2]).contents.fp32_contents.extend([1, 2])
            for _ in range(2):
                await asked.rpc("ModelInfer", request)
            assert (await asked.http(setting, {"trace_level": ["OFF"]}))[0] == 200
            assert not asked.server.front.dialects["kserve_v2"].traces.on
            assert (await asked.http(infer, TWO))[0] == 200

        assert [one["request_id"] for one in traced(file).values()] == ["rpc", "rpc"]
        assert [one["request_id"] for one in traced(tmp_path / "trace.2").values()] == ["5"]
        assert not (tmp_path / "trace.3").exists()

    run(work())


@pytest.fixture
def log_text() -> Any:
    root, access = logging.getLogger(), logging.getLogger("fastserve.access")
    handlers, levels = list(root.handlers), (root.level, access.level)
    text = io.StringIO()
    setup_logs(stream=text)
    yield text
    root.handlers[:] = handlers
    for logger, level in zip((root, access), levels, strict=True):
        logger.setLevel(level)  # an assignment would leave what loggers remember of it


def test_log_settings_change_the_log(tmp_path: Path, log_text: io.StringIO) -> None:
    write_model(tmp_path)
    log = logging.getLogger("fastserve.some")

    def written() -> list[str]:
        log_text.seek(0)
        log_text.truncate()
        for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
            log.log(level, "line")
        return log_text.getvalue().splitlines()

    async def work() -> None:
        async with serving(tmp_path) as asked:
            assert [line.split()[1] for line in written()] == ["INFO", "WARNING", "ERROR"]
            status, shown = await asked.http("/v2/logging", {"log_warning": False, "log_verbose_level": 1})
            assert (status, shown["log_info"], shown["log_warning"]) == (200, True, False)
            assert [line.split()[1] for line in written()] == ["DEBUG", "INFO", "ERROR"]
            await asked.http(
                "/v2/logging", {"log_info": False, "log_verbose_level": 0, "log_format": "ISO8601"}
            )
            (line,) = written()
            stamp, letter, _, place, text = line.split(" ")
            assert (len(stamp), letter, place.split(":")[0], text) == (20, "E", "fastserve.some", "line")
            request = V2.LogSettingsRequest()
            request.settings["log_error"].bool_param = False
            await asked.rpc("LogSettings", request)
            assert written() == []
            everything = {"log_info": True, "log_warning": True, "log_error": True, "log_format": "default"}
            await asked.http("/v2/logging", everything)
            assert [line.split()[1] for line in written()] == ["INFO", "WARNING", "ERROR"]

    run(work())


def test_levels_of_the_log_as_the_original_keeps_them(tmp_path: Path, log_text: io.StringIO) -> None:
    """The low 32 bits, none below zero; one over HTTP that no message can hold is no trouble to gRPC."""
    write_model(tmp_path)

    async def work() -> None:
        async with serving(tmp_path) as asked:
            given = {
                2**31 - 1: 2**31 - 1,
                2**31: 0,
                2**32: 0,
                2**32 + 1: 1,
                5 * 10**9: 705032704,
                2**64 - 1: 0,
            }
            for level, kept in given.items():
                shown = await asked.http("/v2/logging", {"log_verbose_level": level})
                assert shown[1]["log_verbose_level"] == kept
                told = await asked.rpc("LogSettings", V2.LogSettingsRequest())
                assert told.settings["log_verbose_level"].uint32_param == kept
            request = V2.LogSettingsRequest()
            request.settings["log_verbose_level"].uint32_param = 2**31
            told = await asked.rpc("LogSettings", request)
            assert told.settings["log_verbose_level"].uint32_param == 0

    run(work())


def test_a_trace_shows_no_tensor_whose_bytes_were_never_here() -> None:
    """Inputs and outputs that stay in device memory: their place holds whatever was there before."""

    class Scope:
        stamps, tensors = False, True
        kept: ClassVar[list[bytes]] = []

        def keep(self, entries: list[bytes]) -> None:
            self.kept.extend(entries)

    made = {name: Tensor(DTYPES["uint8"], (1, 1), b"\7") for name in ("there", "lent", "placed")}
    lent, version = Lent(bytes(64), 0, 0, 1), SimpleNamespace(model="m", number=1)
    request = InferRequest(dict(made), lent={"lent": lent}, placed={"placed": lent})
    one = RequestTrace(1, Scope(), AsyncMock())
    one.begin(version, request)
    one.answered(request, InferResponse({name: made[name] for name in ("there", "placed")}))
    one.end()
    shown = [told["tensor"]["name"] for told in map(json.loads, Scope.kept) if "tensor" in told]
    assert shown == ["there", "placed", "there"]
