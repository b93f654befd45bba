"""64 clients over TensorFlow Serving's REST, V2 and gRPC, a tenth of whose requests are traced and many of
which have little time, while workers and a front process are killed, and the exporter is killed and stopped.

No answer is wrong or another's, every span belongs to its request's tree, and memory does not grow.
`TORTURE_S` is how many seconds it takes.
"""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import multiprocessing
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import grpc.aio
import numpy as np
import pytest
import uvloop

from fastserve.protos import load
from fastserve.server.otlp_exporter import TITLE
from tests import proc
from tests.running import Running, until
from tests.server.observability.collector import Received, Span, grpc_collector
from tests.server.observability.test_traces import CALLING, CALLING_CONFIG, ENSEMBLE
from tests.server.rig import write_model
from tests.torture.test_front_kills import fronts_of
from tests.torture.test_key_storm import read_answer, workers_of

# `lingers`: grpcio keeps its poller's thread and pipe
pytestmark = [pytest.mark.torture, pytest.mark.lingers, pytest.mark.timeout(1200)]
SECONDS = float(os.environ.get("TORTURE_S", "60"))
REST, V2, RPC, FRONTS = 28, 16, 20, 3
RATIO, OWN_TRACE = 0.1, 0.1  # shares of requests: traced by the server's choice, and by the client's
TIMES = ("", "", "30", "1", "60ms", "3ms")
SHORT = ("60ms", "3ms", "1")  # that may be up before a busy machine has answered
ANSWER_S = 60.0
WORKER_KILL_S = 4.0
STOPPED_S = 3.0
GROWTH_BYTES = 24 << 20
MOST_IN_PART, LOST_S = 20, 5.0
"""Trees of which one process's spans were lost, and how near they end to what loses spans."""


@dataclass
class Report:
    """What the clients have sent and seen."""

    over_s: float
    own_trace: float = OWN_TRACE
    answers: Counter[str] = field(default_factory=Counter)
    late: int = 0
    lost: int = 0
    wrong: list[str] = field(default_factory=list)
    parents: dict[str, tuple[str, str]] = field(default_factory=dict)
    """The trace and span that a client named as the parent of a request, by its id."""
    losses_ns: list[int] = field(default_factory=list)
    """When what has spans was killed, or stopped and went on, as Unix time."""

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.over_s

    def headers(self, number: int) -> dict[str, str]:
        """What goes with a request beside its body."""
        found = {"x-request-id": f"r{number}"}
        if seconds := random.choice(TIMES):
            found["x-request-timeout"] = seconds
        if random.random() < self.own_trace:
            trace, parent = f"{random.getrandbits(128) | 1:032x}", f"{random.getrandbits(64) | 1:016x}"
            self.parents[f"r{number}"] = trace, parent
            found["traceparent"] = f"00-{trace}-{parent}-01"
        return found

    def take(self, who: str, number: int, values: list[float], factor: int) -> None:
        self.answers[who] += 1
        if values != [factor * value for value in row_of(number)]:
            self.wrong.append(f"{who} {number}: {values}")

    def refused(self, who: str, number: int, seconds: str, *, late: bool, told: str) -> None:
        if late and seconds in SHORT:
            self.late += 1
        else:
            self.wrong.append(f"{who} {number}, {seconds!r} s: {told}")


def row_of(number: int) -> list[float]:
    return [float(number % (1 << 20)), float(number % 1009)]


async def ask(address: tuple[str, int], model: str, report: Report, numbers: Iterator[int]) -> None:
    """One client of HTTP; `model` is "" for REST, else the model of V2. It comes again when its front was
    killed."""
    factor = 4 if model == "both" else 2
    while not report.over:
        try:
            reader, writer = await asyncio.open_connection(*address)
            with closing(writer):
                while not report.over:
                    number = next(numbers)
                    headers = report.headers(number)
                    writer.write(write_request(model, number, headers))
                    status, body = await asyncio.wait_for(read_answer(reader), ANSWER_S)
                    if status == 200:
                        told = json.loads(body)
                        values = told["outputs"][0]["data"] if model else told["predictions"][0]
                        report.take(model or "REST", number, values, factor)
                    else:
                        late, seconds = status == 504, headers.get("x-request-timeout", "")
                        report.refused(model or "REST", number, seconds, late=late, told=f"{status} {body!r}")
        except (ConnectionError, asyncio.IncompleteReadError):
            report.lost += 1


def write_request(model: str, number: int, headers: dict[str, str]) -> bytes:
    row = row_of(number)
    if model:
        path = f"/v2/models/{model}/infer"
        body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": row}]})
    else:
        path, body = "/v1/models/twice:predict", json.dumps({"instances": [row]})
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n{lines}\r\n{body}".encode()


async def call(address: str, report: Report, numbers: Iterator[int]) -> None:
    """One client of V2 over gRPC."""
    kserve, codes = load("kserve_v2"), grpc.StatusCode
    while not report.over:
        async with grpc.aio.insecure_channel(
            address, options=(("grpc.use_local_subchannel_pool", 1),)
        ) as channel:
            method = channel.unary_unary(
                "/inference.GRPCInferenceService/ModelInfer",
                request_serializer=kserve.ModelInferRequest.SerializeToString,
                response_deserializer=kserve.ModelInferResponse.FromString,
            )
            while not report.over:
                number = next(numbers)
                headers = report.headers(number)
                request = kserve.ModelInferRequest(model_name="twice")
                request.inputs.add(name="x", datatype="FP32", shape=[1, 2])
                request.raw_input_contents.append(np.array(row_of(number), np.float32).tobytes())
                try:
                    reply = await method(request, metadata=tuple(headers.items()), timeout=ANSWER_S)
                except grpc.aio.AioRpcError as error:
                    waited = "exceeded" in str(error.details())  # of a deadline in the queue
                    if error.code() is codes.UNAVAILABLE and not waited:
                        report.lost += 1  # its front was killed
                        break
                    late = error.code() in (codes.DEADLINE_EXCEEDED, codes.UNAVAILABLE)
                    seconds, told = headers.get("x-request-timeout", ""), f"{error.code()} {error.details()}"
                    report.refused("gRPC", number, seconds, late=late, told=told)
                else:
                    values = np.frombuffer(reply.raw_output_contents[0], np.float32).tolist()
                    report.take("gRPC", number, values, 2)


def exporter_of(served: Running) -> int:
    """The exporter's process; 0 between two of them."""
    for pid in served.workers:
        with suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() == f"fs:{TITLE}":
                return pid
    return 0


async def disturb(served: Running, report: Report) -> Counter[str]:
    """Kill workers all the time, one front, and the exporter, which is stopped for a while, too."""
    done: Counter[str] = Counter()
    began_s = time.monotonic()
    plan = [(0.3, "exporter killed"), (0.45, "exporter stopped"), (0.65, "front killed")]
    while not report.over:
        await asyncio.sleep(min(WORKER_KILL_S, SECONDS / 12))  # the pace of the bar
        part = (time.monotonic() - began_s) / SECONDS
        if part > 0.9:
            continue
        if plan and part > plan[0][0]:
            _, kind = plan.pop(0)
            pid = exporter_of(served) if kind.startswith("exporter") else random.choice(fronts_of(served))
            assert pid, kind
            report.losses_ns.append(time.time_ns())
            if kind.endswith("killed"):
                os.kill(pid, signal.SIGKILL)
            else:
                proc.stop(pid)
                await asyncio.sleep(min(STOPPED_S, SECONDS / 10))
                os.kill(pid, signal.SIGCONT)
                report.losses_ns.append(time.time_ns())
            done[kind] += 1
        found = workers_of(served) - set(fronts_of(served))
        if found:
            with suppress(ProcessLookupError):
                os.kill(random.choice(sorted(found)), signal.SIGKILL)
                done["worker killed"] += 1
    return done


def memory_of(pid: int) -> int:
    """Bytes of a process that are its own, or 0 once it has ended."""
    with suppress(OSError):
        told = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return sum(int(line.split()[1]) << 10 for line in told.splitlines() if line.startswith("Private_"))
    return 0


async def watch_memory(served: Running, report: Report) -> dict[str, list[int]]:
    """The memory of the fronts and the exporter, when all has warmed up and at the end. Who was killed
    meanwhile counts from when its successor has warmed up."""
    found: dict[str, list[int]] = {}
    while not report.over:
        await asyncio.sleep(SECONDS / 24)
        named = {"owner": served.pid, **{f"front {pid}": pid for pid in fronts_of(served)}}
        if exporter := exporter_of(served):
            named[f"exporter {exporter}"] = exporter
        for name, pid in named.items():
            found.setdefault(name, []).append(memory_of(pid))
    return {name: [size for size in sizes if size] for name, sizes in found.items()}


def check_trees(spans: list[Span], parents: dict[str, tuple[str, str]], losses_ns: list[int]) -> Counter[str]:
    """Every span is in its request's tree, and in no other's; returns how many of each kind. The process that
    a request came to and the one that runs it send spans of their own, so a loss may leave a tree in part."""
    found: Counter[str] = Counter()
    by_id = {span.id: span for span in spans}
    assert len(by_id) == len(spans), "a span id that two spans have"
    batches = {span.id: span for span in spans if span.name.startswith("batch ") and not span.parent}
    trees: dict[str, list[Span]] = {}
    for span in spans:
        if span.id not in batches:
            trees.setdefault(span.trace_id, []).append(span)
    assert not {batch.trace_id for batch in batches.values()} & trees.keys()
    for trace_id, tree in trees.items():
        roots = [span for span in tree if span.kind == 2]
        assert len(roots) <= 1, f"{len(roots)} requests in trace {trace_id}"
        for span in tree:
            above = by_id.get(span.parent)
            if above is not None:
                assert above.trace_id == trace_id, f"{span.name} below a span of another trace"
            found["orphans"] += above is None and span.kind != 2
        if not roots:
            found["without their request"] += 1  # it was lost with a front or an exporter
            continue
        (root,) = roots
        ids = {span.id for span in tree}
        stray = [span.name for span in tree if span is not root and span.parent not in ids]
        if stray:
            ended_ns = max(span.end_ns for span in tree)
            near = any(abs(ended_ns - lost_ns) < LOST_S * 1e9 for lost_ns in losses_ns)
            assert near, f"{stray} in trace {trace_id} of {sorted(span.name for span in tree)}"
            found["in part"] += 1
        named = parents.get(str(root.attributes["fastserve.request_id"]))
        assert (root.parent == "") if named is None else ((trace_id, root.parent) == named)
        found["requests of clients' traces" if named else "requests chosen"] += 1
        found["calls"] += sum(span.name.startswith("call ") for span in tree)
        found["steps"] += sum(
            span.attributes.get("fastserve.model") == "both" for span in tree if span.name == "run"
        )
    for batch in batches.values():
        for trace_id, span_id in batch.links:
            compute = by_id.get(span_id)
            if compute is not None:
                assert (compute.trace_id, compute.links) == (trace_id, [(batch.trace_id, batch.id)])
                found["links"] += 1
    return found


def write_models(folder: Path) -> None:
    write_model(folder, instances=2, max_batch_size=32)
    before, middle, after = ENSEMBLE.partition('model_name: "twice"')  # the second step calls a model
    ensemble = before + middle + after.replace("twice", "caller")
    for name, config in (("both", ensemble), ("caller", CALLING_CONFIG % 1000)):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config.replace("count: 1", "count: 2"))
    (folder / "caller" / "1" / "model.py").write_text(CALLING)


def test_traces_and_deadlines_under_load(tmp_path: Path) -> None:
    write_models(tmp_path / "models")
    with grpc_collector() as collector:
        otel = ("--otel", collector.address, "--otel-ratio", str(RATIO))
        with Running(tmp_path / "models", tmp_path / "log", "--frontends", str(FRONTS), *otel) as served:
            until(lambda: len(fronts_of(served)) == FRONTS - 1, "every front is there")
            done, report, memory = uvloop.run(load_all(served))
            until(lambda: len(fronts_of(served)) == FRONTS - 1, "every front is back")
        check(done, report, memory, collector)


async def load_all(served: Running) -> tuple[Counter[str], Report, dict[str, list[int]]]:
    host, _, port = served.http.rpartition(":")
    address, numbers, report = (host, int(port)), itertools.count(1), Report(time.monotonic() + SECONDS)
    clients = [ask(address, "", report, numbers) for _ in range(REST)]
    clients += [ask(address, ("both", "caller")[at % 2], report, numbers) for at in range(V2)]
    clients += [call(served.grpc, report, numbers) for _ in range(RPC)]
    done, memory, *_ = await asyncio.gather(disturb(served, report), watch_memory(served, report), *clients)
    return done, report, memory


def check(done: Counter[str], report: Report, memory: dict[str, list[int]], collector: Received) -> None:
    answered = report.answers.total()
    print(f"{dict(done)}; answers {dict(report.answers)}, {report.late} late, {report.lost} connections lost")
    print({name: [size >> 10 for size in (sizes[0], sizes[-1])] for name, sizes in memory.items() if sizes})
    assert not report.wrong, (len(report.wrong), report.wrong[:5])
    assert set(report.answers) == {"REST", "both", "caller", "gRPC"}
    assert report.late > 0
    assert report.lost > 0
    assert {"exporter killed", "exporter stopped", "front killed", "worker killed"} == set(done)
    found = check_trees(list(collector.spans), report.parents, report.losses_ns)
    print(f"{len(collector.spans)} spans: {dict(found)}")
    chosen = found["requests chosen"] / (answered * (1 - OWN_TRACE) * RATIO)
    assert 0.3 < chosen < 1.2
    assert found["in part"] <= MOST_IN_PART
    assert min(found["requests of clients' traces"], found["calls"], found["steps"], found["links"]) > 0
    for name, sizes in memory.items():
        warm = sizes[len(sizes) // 3 :]
        if len(warm) > 3:
            assert warm[-1] - warm[0] < GROWTH_BYTES, (name, sizes)


def collect(told: Connection) -> None:
    """Be a collector in a process of its own, which keeps nothing."""
    with grpc_collector() as collector:
        told.send(collector.address)
        while True:
            time.sleep(1.0)
            collector.spans.clear()
            collector.headers.clear()


@pytest.mark.parametrize("ratio", [0.01, 1.0])
def test_a_collector_that_is_stopped_and_killed(tmp_path: Path, ratio: float) -> None:
    """Requests do not notice, spans without room are lost and counted, and memory stays: of the exporter too,
    whose queue is full then."""
    write_model(tmp_path / "models", instances=2, max_batch_size=32)
    spawn = multiprocessing.get_context("spawn")
    heard, told = spawn.Pipe(duplex=False)
    collector = spawn.Process(target=collect, args=(told,), daemon=True)
    collector.start()
    try:
        otel = ("--otel", heard.recv(), "--otel-ratio", str(ratio))
        with Running(tmp_path / "models", tmp_path / "log", "--frontends", str(FRONTS), *otel) as served:
            until(lambda: len(fronts_of(served)) == FRONTS - 1, "every front is there")
            report, memory = uvloop.run(load_beside(served, collector))
            page = read_metrics(served)
            assert b"Traceback" not in served.log.read_bytes()
    finally:
        collector.kill()
        collector.join()
        heard.close()
        told.close()
    lost = sum(int(count) for count in re.findall(rb"^fastserve_trace_spans_lost_total\S* (\d+)", page, re.M))
    print(f"{report.answers.total()} answers, {report.late} late, {lost} spans lost")
    for name, sizes in memory.items():
        print(f"{name}: {sizes[0] >> 10} KB, at most {max(sizes) >> 10}, {sizes[-1] >> 10} at the end")
    assert not report.wrong, (len(report.wrong), report.wrong[:5])
    assert not report.lost
    if ratio == 1.0:
        assert lost > 0
    for name, sizes in memory.items():
        warm = sizes[len(sizes) // 4 :]
        if len(warm) > 3:
            assert max(warm) - warm[0] < GROWTH_BYTES, (name, sizes)


async def load_beside(served: Running, collector: BaseProcess) -> tuple[Report, dict[str, list[int]]]:
    """64 clients, while the collector is stopped for a third of the time and killed near the end."""
    host, _, port = served.http.rpartition(":")
    report, numbers = Report(time.monotonic() + SECONDS, own_trace=0.0), itertools.count(1)

    async def disturb_collector() -> None:
        assert collector.pid is not None
        for wait, number in ((0.25, signal.SIGSTOP), (0.35, signal.SIGCONT), (0.15, signal.SIGKILL)):
            await asyncio.sleep(wait * SECONDS)  # the pace of the bar
            os.kill(collector.pid, number)

    clients = [ask((host, int(port)), "", report, numbers) for _ in range(64)]
    _, memory, *_ = await asyncio.gather(disturb_collector(), watch_memory(served, report), *clients)
    return report, memory


def read_metrics(served: Running) -> bytes:
    link = http.client.HTTPConnection(served.http, timeout=60)
    try:
        link.request("GET", "/metrics")
        return link.getresponse().read()
    finally:
        link.close()
