"""Requests as an OpenTelemetry collector sees them: spans, parents, links and what is lost, over every
protocol."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

import fastserve.demo
from fastserve.metrics import names
from fastserve.protos import load
from fastserve.server import trace_export
from fastserve.server.otlp_exporter import RUNNING_S, BatchMerger
from fastserve.server.span_records import BatchRecord
from fastserve.settings import Listener, OtelOptions, TritonOptions
from fastserve.util.spans import FAST
from tests.server.observability.collector import Received, Span, grpc_collector, http_collector
from tests.server.processes.test_fronts import connect_to_each
from tests.server.rig import HOLD, Served, release, run, seen, serving, write_model

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
V2, SERVICE = load("kserve_v2"), "inference.GRPCInferenceService"
UNSAMPLED = f"00-{TRACE}-{PARENT}-00"


@pytest.fixture
def collector() -> Iterator[Received]:
    with grpc_collector() as received:
        yield received


@asynccontextmanager
async def traced(
    folder: Path, collector: Received, ratio: float = 0.0, **changes: Any
) -> AsyncIterator[Served]:
    """A server whose traces the collector gets, with HTTP and gRPC on one port."""
    otel = OtelOptions(endpoint=collector.address, ratio=ratio, **changes.pop("otel", {}))
    one_port = {"http": (), "listen": (Listener("127.0.0.1:0"),)}
    async with serving(folder, otel=otel, **one_port, **changes) as served:
        yield served


async def post(served: Served, path: str, body: Any, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{served.port}", timeout=60) as client:
        return await client.post(path, content=json.dumps(body), headers=headers)


def below(spans: list[Span], parent: Span) -> dict[str, Span]:
    """The children of a span by their names, which are different."""
    found = [span for span in spans if span.parent == parent.id]
    assert len({span.name for span in found}) == len(found)
    return {span.name: span for span in found}


def check_stages(spans: list[Span], server: Span) -> Span:
    """A request's stages follow each other within its span; returns the span of its compute."""
    stages = below(spans, server)
    # On the fast path there is no wait for a place in a batch.
    order = [stages[name] for name in ("decode", "batch", "queue", "compute", "encode") if name in stages]
    assert stages.keys() - {"batch"} == {"decode", "queue", "compute", "encode"}
    assert {span.trace_id for span in order} == {server.trace_id}
    times = [server.start_ns, *(ns for span in order for ns in (span.start_ns, span.end_ns)), server.end_ns]
    assert times == sorted(times)
    return stages["compute"]


def test_a_request_is_a_tree_of_spans_below_its_clients(tmp_path: Path, collector: Received) -> None:
    write_model(tmp_path)

    async def work() -> None:
        async with traced(tmp_path, collector) as served:
            path, body = "/v1/models/twice:predict", {"instances": [[1.0, 2.0], [3.0, 4.0]]}
            assert (await post(served, path, body)).status_code == 200
            assert (await post(served, path, body, traceparent=UNSAMPLED)).status_code == 200
            headers = {"traceparent": TRACEPARENT, "tracestate": "a=b"}
            answer = await post(served, path, body, **headers)
            assert answer.json() == {"predictions": [[2.0, 4.0], [6.0, 8.0]]}
            spans = await asyncio.to_thread(collector.wait, lambda spans: len(spans) == 7)
        assert len(collector.spans) == 7  # nothing of the two that were not sampled
        (server,) = [span for span in spans if span.kind == 2]
        assert (server.trace_id, server.parent, server.state) == (TRACE, PARENT, "a=b")
        assert server.name == "POST /v1/models/{model}:predict"
        wanted = {
            "http.request.method": "POST",
            "url.path": path,
            "http.route": "/v1/models/{model}:predict",
            "http.response.status_code": 200,
            "fastserve.model": "twice",
            "fastserve.model.version": 1,
            "fastserve.rows": 2,
            "fastserve.request_id": TRACE,
        }
        assert wanted.items() <= server.attributes.items()
        assert server.resource["service.name"] == "fastserve"
        compute = check_stages(spans, server)
        (batch,) = [span for span in spans if span.name == "batch twice"]
        assert (batch.parent, batch.trace_id == TRACE) == ("", False)
        assert batch.links == [(compute.trace_id, compute.id)]
        assert compute.links == [(batch.trace_id, batch.id)]

    run(work())


def servers(spans: list[Span]) -> list[Span]:
    return [span for span in spans if span.kind == 2]


def test_http2_grpc_and_streams(tmp_path: Path, collector: Received) -> None:
    write_model(tmp_path)
    sent = V2.ModelInferRequest(model_name="twice", id="one")
    given = sent.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    given.contents.fp32_contents[:] = [1.0, 2.0]
    stray = V2.ModelInferRequest(model_name="nobody")

    async def over_http2(served: Served) -> None:
        async with httpx.AsyncClient(http1=False, http2=True, timeout=60) as client:
            url = f"http://127.0.0.1:{served.port}/v2/models/twice/versions/1/infer"
            body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}
            answer = await client.post(url, json=body, headers={"traceparent": TRACEPARENT})
            assert (answer.status_code, answer.http_version) == (200, "HTTP/2")

    async def over_grpc(served: Served) -> None:
        metadata = (("traceparent", TRACEPARENT), ("tracestate", "c=d"))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as channel:
            infer = channel.unary_unary(f"/{SERVICE}/ModelInfer", None, V2.ModelInferResponse.FromString)
            for _ in range(2):  # the second would take the fast path
                answer = await infer(sent.SerializeToString(), metadata=metadata, timeout=60)
                assert answer.id == "one"
            with pytest.raises(grpc.aio.AioRpcError):
                await infer(stray.SerializeToString(), metadata=metadata, timeout=60)
            stream = channel.stream_stream(
                f"/{SERVICE}/ModelStreamInfer", None, V2.ModelStreamInferResponse.FromString
            )
            answers = stream(iter([sent.SerializeToString()] * 2), metadata=metadata, timeout=60)
            assert [one.infer_response.id async for one in answers] == ["one", "one"]

    async def work() -> None:
        async with traced(tmp_path, collector) as served:
            await over_http2(served)
            await over_grpc(served)
            spans = await asyncio.to_thread(collector.wait, lambda found: len(servers(found)) == 5)
            spans = await asyncio.to_thread(
                collector.wait, lambda found: len([s for s in found if s.name == "batch twice"]) >= 4
            )
        assert {(one.trace_id, one.parent) for one in servers(spans)} == {(TRACE, PARENT)}
        by_name: dict[str, list[Span]] = {}
        for one in servers(spans):
            by_name.setdefault(one.name, []).append(one)
        (plain,) = by_name["POST /v2/models/{model}/versions/{version}/infer"]
        check_stages(spans, plain)
        first, second, failed = by_name[f"{SERVICE}/ModelInfer"]
        for one in (first, second):
            check_stages(spans, one)
            wanted = {
                **{"rpc.system": "grpc", "rpc.service": SERVICE, "rpc.method": "ModelInfer"},
                **{"rpc.grpc.status_code": 0, "fastserve.model": "twice"},
            }
            assert wanted.items() <= one.attributes.items()
            assert (one.state, one.failed) == ("c=d", False)
        assert (failed.attributes["rpc.grpc.status_code"], failed.failed) == (5, False)  # the client's fault
        (stream,) = by_name[f"{SERVICE}/ModelStreamInfer"]
        stages = [span.name for span in spans if span.parent == stream.id]
        assert sorted(stages) == sorted(["decode", "batch", "queue", "compute", "encode"] * 2)
        assert stream.attributes["fastserve.rows"] == 2

    run(work())


def test_a_batch_is_linked_to_its_requests_of_all_fronts(tmp_path: Path, collector: Received) -> None:
    write_model(tmp_path)

    async def work() -> None:
        async with traced(tmp_path, collector, ratio=1.0, frontends=2) as served:
            clients = await connect_to_each(served, 2)
            holding = served.asking(HOLD)
            await served.until(lambda: seen(tmp_path))
            for client in clients.values():
                client.send(1.0)  # type: ignore[attr-defined]
            queue = next(iter(served.server.host.hosted.values())).queue
            await served.until(lambda: queue.ring.queued() == 2)
            release(tmp_path)
            await holding
            for client in clients.values():
                assert await client.reply() == (200, [2.0])  # type: ignore[attr-defined]
            spans = await asyncio.to_thread(
                collector.wait, lambda found: len([s for s in found if s.name == "batch twice"]) == 2
            )
        computes = {(one.trace_id, one.id): one for one in spans if one.name == "compute"}
        assert len(computes) == len(servers(spans)) == len({one.trace_id for one in servers(spans)}) == 3
        alone, shared = sorted((s for s in spans if s.name == "batch twice"), key=lambda one: len(one.links))
        assert (len(alone.links), len(shared.links)) == (1, 2)
        assert {*alone.links, *shared.links} == computes.keys()
        for batch in (alone, shared):
            assert batch.attributes["fastserve.batch.traced_requests"] == len(batch.links)
            for link in batch.links:
                assert computes[link].links == [(batch.trace_id, batch.id)]
                assert (
                    batch.start_ns <= computes[link].start_ns <= computes[link].end_ns <= batch.end_ns + 10**6
                )

    run(work())


@pytest.mark.logs_errors
def test_a_batch_has_one_span_whenever_its_requests_were_left() -> None:
    """One request's time was up seconds before the batch ended for the others."""
    merger, ids = BatchMerger(), ("a" * 32, "b" * 16)
    left = BatchRecord(*ids, "m", 1, (10, 20, 30, 0, 0), 2, ("c" * 32, "d" * 16), None)
    ended = left._replace(times_ns=(10, 20, 30, 40, 50), rows=3, link=("e" * 32, "f" * 16))
    merger.add(left, 0.0)
    assert merger.due(RUNNING_S - 1) == []
    merger.add(ended, 60.0)
    merger.add(left._replace(link=("e" * 32, "1" * 16)), 60.5)
    assert merger.due(61.4) == []
    (span,) = merger.due(61.6)
    assert (span.span_id, span.start_ns, span.end_ns) == (ids[1], 10, 50)
    assert span.links == [left.link, ended.link, ("e" * 32, "1" * 16)]
    assert span.attributes["fastserve.batch.traced_rows"] == 7
    assert merger.due(math.inf) == []
    merger.add(left, 70.0)  # of one that nobody waited for to its end
    assert merger.due(70.0 + RUNNING_S - 1) == []
    assert [one.end_ns for one in merger.due(71.0 + RUNNING_S)] == [30]


def test_errors_of_the_server_are_errors_of_the_span(tmp_path: Path, collector: Received) -> None:
    model = write_model(tmp_path)
    (model / "1" / "model.py").write_text(FAILING)

    async def work() -> None:
        async with traced(tmp_path, collector, ratio=1.0) as served:
            path = "/v1/models/twice:predict"
            assert (await post(served, path, {"instances": [[1.0, 2.0]]})).status_code == 500
            assert (await post(served, path, {"instances": [["a", 2.0]]})).status_code == 400
            assert (await post(served, "/v1/models/nobody:predict", {"instances": [1.0]})).status_code == 404
            spans = await asyncio.to_thread(collector.wait, lambda found: len(servers(found)) == 3)
        failed, wrong, unknown = sorted(servers(spans), key=lambda one: one.start_ns)
        assert (failed.failed, failed.attributes["error.type"]) == (True, "500")
        assert "no such luck" in failed.words
        assert below(spans, failed)["compute"].failed
        assert [one.failed for one in (wrong, unknown)] == [False, False]
        assert [one.attributes["http.response.status_code"] for one in (wrong, unknown)] == [400, 404]
        assert unknown.name == "POST"  # no name of a model that nobody has

    run(work())


FAILING = """
class Model:
    def __init__(self, config):
        pass

    def run(self, inputs):
        if inputs["x"].any():
            raise RuntimeError("no such luck")
        return {"y": inputs["x"]}
"""


def test_otlp_over_http_with_headers_and_a_name(tmp_path: Path) -> None:
    write_model(tmp_path)

    async def work(collector: Received) -> None:
        otel = {"protocol": "http/protobuf", "headers": ("X-Team=a=b",), "service_name": "ranking"}
        async with traced(tmp_path, collector, ratio=1.0, otel=otel) as served:
            assert (await served.ask(1.0))[0] == 200
            spans = await asyncio.to_thread(collector.wait, lambda found: len(found) == 7)
        assert {span.resource["service.name"] for span in spans} == {"ranking"}
        assert {(one["x-team"], one[":path"]) for one in collector.headers} == {("a=b", "/v1/traces")}

    with http_collector() as collector:
        run(work(collector))


@pytest.mark.logs_errors
def test_an_exporter_that_is_killed_is_started_again(tmp_path: Path, collector: Received) -> None:
    write_model(tmp_path)

    async def work() -> None:
        async with traced(tmp_path, collector, ratio=1.0) as served:
            export = served.server.front.traces
            assert export is not None
            assert (await served.ask(1.0))[0] == 200
            await asyncio.to_thread(collector.wait, lambda found: len(servers(found)) == 1)
            killed = export.pid
            os.kill(killed, signal.SIGKILL)
            for _ in range(4):
                assert (await served.ask(1.0))[0] == 200
            await served.until(lambda: export.pid not in (0, killed))
            # Those of the time without an exporter waited in the socket, which outlives it.
            await asyncio.to_thread(collector.wait, lambda found: len(servers(found)) == 5)

    run(work())


@pytest.mark.logs_errors
def test_requests_do_not_wait_for_a_stopped_exporter(
    tmp_path: Path, collector: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_export, "SOCKET_BYTES", 16 << 10)  # a megabyte takes ten thousand requests
    write_model(tmp_path)

    async def work() -> None:
        async with traced(tmp_path, collector, ratio=1.0) as served:
            export = served.server.front.traces
            assert export is not None
            client = await served.client()
            os.kill(export.pid, signal.SIGSTOP)
            try:
                while not lost(served, "busy"):
                    assert await client.predict(1.0) == (200, [2.0])
            finally:
                os.kill(export.pid, signal.SIGCONT)
            before = len(collector.spans)
            await asyncio.to_thread(collector.wait, lambda found: len(found) > before)
            _, page = await client.get("/metrics")
            assert b'fastserve_trace_spans_lost_total{cause="busy"}' in page

    run(work())


@pytest.mark.logs_errors
def test_requests_do_not_wait_for_a_stopped_collector(tmp_path: Path, collector: Received) -> None:
    write_model(tmp_path)

    async def work() -> None:
        collector.hold.clear()
        async with traced(tmp_path, collector, ratio=1.0, otel={"queue_spans": 16}) as served:
            client = await served.client()
            while not lost(served, "full"):
                assert await client.predict(1.0) == (200, [2.0])
            collector.hold.set()
            await asyncio.to_thread(collector.wait, lambda found: len(servers(found)) > 1)
            collector.refuse = True
            while not lost(served, "export"):
                assert await client.predict(1.0) == (200, [2.0])

    run(work())


def lost(served: Served, cause: str) -> float:
    """Spans lost for a cause, as the metrics page counts them."""
    (found,) = served.server.registry.read(names.TRACE_SPANS_LOST)
    return sum(found.get((cause,), ()))


TELLING = """
from fastserve import batch_traces
import numpy as np

class Model:
    def __init__(self, config):
        self.told = []

    def run(self, inputs):
        y = np.zeros_like(inputs["x"])
        for traced in batch_traces():
            for row in traced.rows:
                y[row] = int(traced.traceparent[36:52], 16) % 2**20, len(traced.tracestate)
        return {"y": y}
"""


def test_a_plain_model_is_given_the_contexts_of_its_rows(tmp_path: Path, collector: Received) -> None:
    model = write_model(tmp_path)
    (model / "1" / "model.py").write_text(TELLING)

    async def work() -> None:
        async with traced(tmp_path, collector) as served:
            path, body = "/v1/models/twice:predict", {"instances": [[1.0, 2.0], [3.0, 4.0]]}
            told = []
            for _ in range(3):  # on the general path, then on the fast one
                answer = await post(served, path, body, traceparent=TRACEPARENT, tracestate="a=b")
                told.append(answer.json()["predictions"])
            assert (await post(served, path, body)).json() == {"predictions": [[0.0, 0.0]] * 2}
            spans = await asyncio.to_thread(
                collector.wait, lambda found: len([s for s in found if s.name == "compute"]) == 3
            )
        computes = sorted((one for one in spans if one.name == "compute"), key=lambda one: one.start_ns)
        assert told == [[[int(one.id, 16) % 2**20, 3]] * 2 for one in computes]

    run(work())


TRITON = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            context = request.trace().get_context() or "none"
            told = pb_utils.Tensor("OUT", np.array([[context]], object))
            answers.append(pb_utils.InferenceResponse([told]))
        return answers
"""
TRITON_CONFIG = """
name: "triton"
backend: "python"
max_batch_size: 4
input [{ name: "IN", data_type: TYPE_INT32, dims: [1] }]
output [{ name: "OUT", data_type: TYPE_STRING, dims: [1] }]
"""


def test_tritons_python_api_has_the_context_of_each_request(tmp_path: Path, collector: Received) -> None:
    folder = tmp_path / "triton" / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(TRITON)
    (tmp_path / "triton" / "config.pbtxt").write_text(TRITON_CONFIG)

    async def work() -> None:
        async with traced(tmp_path, collector) as served:
            path = "/v2/models/triton/infer"
            body = {"inputs": [{"name": "IN", "datatype": "INT32", "shape": [1, 1], "data": [1]}]}
            told = []
            for headers in (
                {"traceparent": TRACEPARENT, "tracestate": "a=b"},
                {"traceparent": TRACEPARENT},
                {},
            ):
                answer = await post(served, path, body, **headers)
                told.append(answer.json()["outputs"][0]["data"][0])
            spans = await asyncio.to_thread(
                collector.wait, lambda found: len([s for s in found if s.name == "compute"]) == 2
            )
        first, second = sorted((one for one in spans if one.name == "compute"), key=lambda one: one.start_ns)
        assert json.loads(told[0]) == {"traceparent": f"00-{TRACE}-{first.id}-01", "tracestate": "a=b"}
        assert json.loads(told[1]) == {"traceparent": f"00-{TRACE}-{second.id}-01"}
        assert told[2] == "none"

    run(work())


def test_text_has_a_span_for_each_sequence(tmp_path: Path, collector: Received) -> None:
    async def work() -> None:
        demo = Path(fastserve.demo.__file__).parent
        shutil.copytree(demo / "scribe", tmp_path / "scribe")
        async with traced(tmp_path, collector, ratio=1.0) as served:
            body = {"model": "scribe", "prompt": "Once", "max_tokens": 5, "stream": True}
            answer = await post(served, "/v1/completions", body)
            assert answer.status_code == 200
            spans = await asyncio.to_thread(collector.wait, lambda found: len(servers(found)) == 1)
        (server,) = servers(spans)
        (sequence,) = [one for one in spans if one.name == "generate"]
        assert server.name == "POST /v1/completions"
        wanted = {"gen_ai.request.model": "scribe", "gen_ai.usage.output_tokens": 5}
        for one in (server, sequence):
            assert wanted.items() <= one.attributes.items()
            assert one.attributes["gen_ai.usage.input_tokens"] > 0
        assert (sequence.parent, sequence.events) == (server.id, ["first token"])

    run(work())


def test_the_trace_mode_opentelemetry_of_triton(tmp_path: Path) -> None:
    write_model(tmp_path)

    async def work(collector: Received) -> None:
        url = f"http://{collector.address}/v1/traces"
        given = (
            *("mode=opentelemetry", "level=TIMESTAMPS", "rate=1", f"opentelemetry,url={url}"),
            *("opentelemetry,resource=service.name=triton", "opentelemetry,resource=zone=a"),
        )
        async with serving(tmp_path, triton=TritonOptions(trace_config=given)) as served:
            assert (await served.ask(1.0))[0] == 200
            spans = await asyncio.to_thread(collector.wait, lambda found: len(found) == 7)
            assert {"service.name": "triton", "zone": "a"}.items() <= spans[0].resource.items()
            client = await served.client()
            _, shown = await client.get("/v2/trace/setting")
            assert json.loads(shown)["trace_mode"] == "opentelemetry"
            status, body = await client.post("/v2/trace/setting", b'{"trace_rate": "7"}')
            assert (status, b"opentelemetry" in body) == (501, True)

    with http_collector() as collector:
        run(work(collector))


ENSEMBLE = """
platform: "ensemble"
max_batch_size: 4
input [{ name: "x", data_type: TYPE_FP32, dims: [2] }]
output [{ name: "y", data_type: TYPE_FP32, dims: [2] }]
ensemble_scheduling { step [
  { model_name: "twice", model_version: -1,
    input_map { key: "x", value: "x" }, output_map { key: "y", value: "m" } },
  { model_name: "twice", model_version: -1,
    input_map { key: "x", value: "m" }, output_map { key: "y", value: "y" } }
] }
"""


def test_steps_of_an_ensemble_are_traced_whichever_front_was_asked(
    tmp_path: Path, collector: Received
) -> None:
    write_model(tmp_path)
    (tmp_path / "both" / "1").mkdir(parents=True)
    (tmp_path / "both" / "config.pbtxt").write_text(ENSEMBLE)
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}

    async def work() -> None:
        async with traced(tmp_path, collector, ratio=1.0, frontends=2) as served:
            for client in (await connect_to_each(served, 2)).values():
                status, answer = await client.post("/v2/models/both/infer", json.dumps(body).encode())  # type: ignore[attr-defined]
                assert (status, json.loads(answer)["outputs"][0]["data"]) == (200, [4.0, 8.0])
            spans = await asyncio.to_thread(collector.wait, lambda found: len(servers(found)) == 2)
            spans = await asyncio.to_thread(
                collector.wait, lambda found: len([s for s in found if s.name == "batch twice"]) == 4
            )
        relayed = 0
        for server in servers(spans):
            assert set(below(spans, server)) == {"decode", "run", "encode"}
            whole = below(spans, server)["run"]
            inner = [one for one in spans if one.parent == whole.id]
            if len(inner) == 1:  # the owner's, below that of the other front
                relayed, whole = relayed + 1, inner[0]
            assert {whole.attributes["fastserve.model"], server.attributes["fastserve.model"]} == {"both"}
            steps = [one for one in spans if one.parent == whole.id]
            assert [one.name for one in steps] == ["run", "run"]
            for step in steps:
                stages = below(spans, step)
                assert set(stages) == {"batch", "queue", "compute"}
                for one in (step, *stages.values()):
                    assert (one.attributes["fastserve.model"], one.trace_id) == ("twice", server.trace_id)
                    assert whole.start_ns <= one.start_ns <= one.end_ns <= whole.end_ns
        assert relayed == 1

    run(work())


CALLING = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = request.inputs()[0].as_numpy()
            for model in ("twice", "nobody"):
                sent = {"inputs": [pb_utils.Tensor("x", x)], "requested_output_names": ["y"]}
                told = request.trace() if len(requests) > 1 else None
                call = pb_utils.InferenceRequest(**sent, model_name=model, trace=told)
                answer = call.exec()
                if not answer.has_error():
                    found = pb_utils.Tensor("y", answer.output_tensors()[0].as_numpy())
            answers.append(pb_utils.InferenceResponse([found]))
        return answers
"""
CALLING_CONFIG = """
name: "caller"
backend: "python"
max_batch_size: 4
input [{ name: "x", data_type: TYPE_FP32, dims: [2] }]
output [{ name: "y", data_type: TYPE_FP32, dims: [2] }]
dynamic_batching { max_queue_delay_microseconds: %d }
instance_group [{ count: 1 }]
"""


@pytest.mark.parametrize("together", [1, 2])
def test_calls_to_other_models_are_spans_below_the_callers(
    tmp_path: Path, collector: Received, together: int
) -> None:
    """A model that runs one request need not say for which it calls; one that runs several does."""
    write_model(tmp_path)
    (tmp_path / "caller" / "1").mkdir(parents=True)
    (tmp_path / "caller" / "1" / "model.py").write_text(CALLING)
    config = CALLING_CONFIG % (0 if together == 1 else 3_000_000)
    config = config.replace("max_batch_size: 4", f"max_batch_size: {together}")
    (tmp_path / "caller" / "config.pbtxt").write_text(config)
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}

    async def work() -> None:
        async with traced(tmp_path, collector, frontends=2) as served:
            asked = [  # the last is not traced
                post(served, "/v2/models/caller/infer", body, traceparent=given)
                for given in (TRACEPARENT, UNSAMPLED)[:together]
            ]
            for answer in await asyncio.gather(*asked):
                assert answer.json()["outputs"][0]["data"] == [2.0, 4.0]
            spans = await asyncio.to_thread(
                collector.wait,
                lambda found: len(servers(found)) == 1 and sum(s.name.startswith("call") for s in found) == 2,
            )
        (server,) = servers(spans)
        compute = check_stages(spans, server)
        calls = below(spans, compute)
        assert set(calls) == {"call twice", "call nobody"}
        call, lost = calls["call twice"], calls["call nobody"]
        assert set(below(spans, call)) == {"batch", "queue", "compute"}
        for one in (call, lost, *below(spans, call).values()):
            assert one.trace_id == TRACE
            assert compute.start_ns <= one.start_ns <= one.end_ns <= compute.end_ns
        assert (call.attributes["fastserve.model"], call.attributes["fastserve.rows"]) == ("twice", 1)
        assert lost.attributes["error.type"] == "NOT_FOUND"
        assert (call.failed, lost.failed, below(spans, lost)) == (False, False, {})

    run(work())


GROUPED = """
from fastserve import batch_traces
import numpy as np

class Model:
    def __init__(self, config):
        pass

    def run(self, inputs):
        x = inputs["x"]
        y = np.zeros((len(x), 1), np.float32)
        for traced in batch_traces():
            y[traced.rows.start : traced.rows.stop] = x.shape[1]
        return {"y": y}
"""


def test_rows_of_a_traced_request_are_those_of_its_run(tmp_path: Path, collector: Received) -> None:
    """A batch of several shapes is run shape by shape."""
    model = write_model(tmp_path)
    (model / "1" / "model.py").write_text(GROUPED)
    config = (
        "backend: python\nmax_batch_size: 3\nmax_queue_delay_us: 5000000\n"
        "inputs: {x: {dtype: float32, shape: [-1]}}\noutputs: {y: {dtype: float32, shape: [1]}}\n"
    )
    (model / "model.yaml").write_text(config)

    async def work() -> None:
        async with traced(tmp_path, collector) as served:
            asked = [
                post(served, "/v1/models/twice:predict", {"instances": [x]}, traceparent=given)
                for x, given in (([1.0], UNSAMPLED), ([1.0, 2.0], UNSAMPLED), ([3.0, 4.0], TRACEPARENT))
            ]
            found = [answer.json()["predictions"] for answer in await asyncio.gather(*asked)]
            assert found == [[[0.0]], [[0.0]], [[2.0]]]

    run(work())


def test_what_is_left_goes_out_when_the_server_stops(tmp_path: Path, collector: Received) -> None:
    write_model(tmp_path)

    async def work() -> None:
        async with traced(tmp_path, collector, ratio=1.0) as served:
            assert (await served.ask(1.0))[0] == 200
        assert len(collector.spans) == 7  # the batch's too, which waits for other requests

    run(work())


def test_a_client_that_leaves_ends_its_span(tmp_path: Path, collector: Received) -> None:
    write_model(tmp_path)

    async def work() -> None:
        async with traced(tmp_path, collector, ratio=1.0) as served:
            for number in range(3):  # on the fast path, whose spans are in FAST
                client = await served.client()
                client.send(HOLD)
                await served.until(lambda wanted=number + 1: len(seen(tmp_path)) == wanted)
                assert len(FAST) == 1
                client.close()
                await served.until(lambda: not FAST)
                release(tmp_path)
                await served.until(served.is_clean)
                (tmp_path / "go").unlink()
            spans = await asyncio.to_thread(collector.wait, lambda found: len(servers(found)) == 3)
        assert {one.attributes["http.response.status_code"] for one in servers(spans)} == {499}
        assert {one.failed for one in servers(spans)} == {False}

    run(work())


def test_a_share_is_traced_on_every_path_over_every_protocol(tmp_path: Path, collector: Received) -> None:
    write_model(tmp_path)
    sent = V2.ModelInferRequest(model_name="twice", raw_input_contents=[bytes(8)])
    sent.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    requests = 400

    async def work() -> None:
        async with traced(tmp_path, collector, ratio=0.25) as served:
            client = await served.client()
            for _ in range(requests):
                assert await client.predict(1.0) == (200, [2.0])
            async with grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as channel:
                infer = channel.unary_unary(f"/{SERVICE}/ModelInfer")
                for _ in range(requests):
                    await infer(sent.SerializeToString(), timeout=60)
        found = [one.name for one in servers(collector.spans)]
        for name in ("POST /v1/models/{model}:predict", f"{SERVICE}/ModelInfer"):
            assert 50 < found.count(name) < 150  # six standard deviations of 100
        assert not FAST

    run(work())
