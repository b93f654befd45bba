"""Faults of sequences in a whole server: clients that leave, time that passes, ids used twice.

The model holds a request of the number 0 until the test lets go, and answers with the sum of the numbers of a
sequence, once kept by itself under the sequence's id and once in a state that the server carries.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import grpc
import pytest

from fastserve.engine.counters import counts_of
from fastserve.engine.engine import find_scheduler
from fastserve.engine.schedulers.sequence import SequenceScheduler
from fastserve.errors import Kind, ServeError
from fastserve.protos import load
from fastserve.repository.version import Version
from fastserve.settings import Listener
from fastserve.workers.group import WorkerGroup
from tests import proc
from tests.server.rig import Served, run, serving
from tests.server.scheduling.test_sequences import CONFIG, SOURCE, say, write_seq

pytestmark = pytest.mark.waits

RELAYED = True
IDLE_S = 1.0  # what is said next may wait for a core
HOLDS = """
    def execute(self, requests):
        import pathlib, time
        folder = pathlib.Path(os.environ["SEQ_FOLDER"])
        for request in requests:
            take = lambda name: pb_utils.get_input_tensor_by_name(request, name).as_numpy().ravel()[0]
            number, ready = take("IN"), take("READY")
            if ready and number == 0:
                (folder / "held").touch()
                while not (folder / "go").exists():
                    time.sleep(0.001)
        return [self.one(request) for request in requests]
"""
PLAIN = "    def execute(self, requests):\n        return [self.one(request) for request in requests]\n"


def write_one_slot(
    folder: Path, monkeypatch: pytest.MonkeyPatch, slots: int = 1, idle_s: float = 100
) -> None:
    """A model with a worker of `slots` slots, which forgets sequences after `idle_s`."""
    monkeypatch.setenv("SEQ_FOLDER", str(folder))
    assert PLAIN in SOURCE
    config = CONFIG.replace("count: 2", "count: 1").replace("max_batch_size: 2", f"max_batch_size: {slots}")
    config = config.replace("idle_microseconds: 100000000", f"idle_microseconds: {int(idle_s * 1e6)}")
    (folder / "seq" / "1").mkdir(parents=True)
    (folder / "seq" / "config.pbtxt").write_text(config)
    (folder / "seq" / "1" / "model.py").write_text(SOURCE.replace(PLAIN, HOLDS.lstrip("\n")))


def version_of(at: Served) -> Version:
    version = at.server.catalog.available("seq")
    assert version is not None
    return version


def scheduler_of(at: Served) -> SequenceScheduler:
    scheduler = find_scheduler(version_of(at))
    assert isinstance(scheduler, SequenceScheduler)
    return scheduler


def test_the_backlog_moves_up_when_an_idle_sequence_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_one_slot(tmp_path, monkeypatch, idle_s=IDLE_S)

    async def work() -> None:
        async with serving(tmp_path) as at:
            loop = asyncio.get_running_loop()
            began = loop.time()  # before what its idle time is counted from
            assert (await say(at, 1, 4, sequence_start=True))[:2] == [4, 4]
            parked = [asyncio.ensure_future(say(at, id, id, sequence_start=True)) for id in (2, 3)]
            assert (await parked[0])[:2] == [2, 2]
            assert loop.time() - began > IDLE_S, "it waited for the reaper"
            with pytest.raises(ServeError, match=r"sequence 1 .* must specify the START flag"):
                await say(at, 1, 1)
            assert (await parked[1])[:2] == [3, 3], "and the next one for the next"

    run(work())


def test_nobody_is_forgotten_while_its_request_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    idle_s = 3.0  # long beside what passes between two requests here
    write_one_slot(tmp_path, monkeypatch, idle_s=idle_s)

    async def work() -> None:
        async with serving(tmp_path) as at:
            await say(at, 1, 7, sequence_start=True)
            held = asyncio.ensure_future(say(at, 1, 0))
            await at.until((tmp_path / "held").exists)
            loop = asyncio.get_running_loop()
            passed = loop.time() + 2 * idle_s
            await at.until(lambda: loop.time() > passed)
            (tmp_path / "go").touch()
            assert (await held)[:2] == [7, 7]
            assert (await say(at, 1, 1))[:2] == [8, 8], "its time begins anew with the answer"

    run(work())


def test_a_start_on_a_live_id_begins_again_in_its_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_one_slot(tmp_path, monkeypatch)

    async def work() -> None:
        async with serving(tmp_path) as at:
            await say(at, 1, 5, sequence_start=True)
            assert (await say(at, 1, 2, sequence_start=True))[:2] == [2, 2]
            assert (await say(at, 1, 1, sequence_end=True))[:2] == [3, 3]
            assert (await say(at, 1, 9, sequence_start=True, sequence_end=True))[:2] == [9, 9]

    run(work())


def test_rows_of_silent_slots_are_nobodys_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_one_slot(tmp_path, monkeypatch, slots=2)

    async def work() -> None:
        async with serving(tmp_path) as at:
            for id in (1, 2):
                await say(at, id, 5, sequence_start=True)
            version = at.server.catalog.available("seq")
            assert version is not None
            counts = counts_of(version)
            assert (counts.success.count, counts.inferences) == (2, 2)
            assert [(batch.rows, batch.runs) for batch in counts.batches] == [(1, 1), (2, 1)]

    run(work())


async def post(at: Served, number: int, **parameters: object) -> asyncio.StreamWriter:
    """A V2 request over a connection of its own, which nobody reads from."""
    tensor = {"name": "IN", "shape": [1, 1], "datatype": "INT32", "data": [number]}
    body = json.dumps({"inputs": [tensor], "parameters": parameters}).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", at.port)
    writer.write(b"POST /v2/models/seq/infer HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n" % len(body))
    writer.write(body)
    await writer.drain()
    return writer


def test_a_client_that_dies_frees_its_slot_and_nobody_gets_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request is in the worker when it dies; what that leaves behind is of a sequence that is over."""
    write_one_slot(tmp_path, monkeypatch)

    async def work() -> None:
        async with serving(tmp_path) as at:
            assert (await say(at, 1, 1000, sequence_start=True))[:2] == [1000, 1000]
            client = await post(at, 0, sequence_id=1)
            await at.until((tmp_path / "held").exists)
            waits = asyncio.ensure_future(say(at, 2, 1, sequence_start=True))
            await at.until(lambda: scheduler_of(at).sequences.outstanding == 2)
            client.transport.abort()
            await at.until(lambda: scheduler_of(at).sequences.outstanding == 1)
            with pytest.raises(ServeError, match=r"sequence 1 .* must specify the START flag"):
                await say(at, 1, 1)
            (tmp_path / "go").touch()
            assert (await waits)[:2] == [1, 1], "not the other client's 1000"
            assert (await say(at, 2, 1, sequence_end=True))[:2] == [2, 2]
            assert (await say(at, 1, 3, sequence_start=True, sequence_end=True))[:2] == [3, 3]
            version = at.server.catalog.available("seq")
            assert version is not None
            ends = counts_of(version).failures
            assert {name: took.count for name, took in ends.items() if took.count} == {
                "CANCELED": 1,
                "REJECTED": 1,
            }

    run(work())


def test_a_parked_client_that_dies_leaves_the_backlog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_one_slot(tmp_path, monkeypatch)

    async def work() -> None:
        async with serving(tmp_path) as at:
            await say(at, 1, 1, sequence_start=True)
            held = asyncio.ensure_future(say(at, 1, 0, sequence_end=True))
            await at.until((tmp_path / "held").exists)
            client = await post(at, 5, sequence_id=2, sequence_start=True)
            await at.until(lambda: scheduler_of(at).sequences.outstanding == 2)
            last = asyncio.ensure_future(say(at, 3, 6, sequence_start=True, sequence_end=True))
            await at.until(lambda: scheduler_of(at).sequences.outstanding == 3)
            client.transport.abort()
            await at.until(lambda: scheduler_of(at).sequences.outstanding == 2)
            (tmp_path / "go").touch()
            assert (await held)[:2] == [1, 1]
            assert (await last)[:2] == [6, 6]
            assert scheduler_of(at).sequences.outstanding == 0

    run(work())


def test_a_crash_in_a_batch_of_two_ends_both_and_their_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_one_slot(tmp_path, monkeypatch, slots=2)

    async def work() -> None:
        async with serving(tmp_path) as at:
            for id in (1, 2):
                await say(at, id, 100 * id, sequence_start=True)
            asking = [asyncio.ensure_future(say(at, id, number)) for id, number in ((1, -1), (2, 1))]
            found = await asyncio.gather(*asking, return_exceptions=True)
            assert isinstance(found[0], ServeError)
            version = at.server.catalog.available("seq")
            assert version is not None
            await at.until(lambda: at.server.host.alive(version) == 1)
            for id in (1, 2):
                with pytest.raises(ServeError, match="the sequence's state with it"):
                    await say(at, id, 1)
            assert (await say(at, 2, 4, sequence_start=True))[:2] == [4, 4]

    run(work())


def test_instances_are_stopped_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may hang for as long as a worker is given to stop; many must not take the sum of it."""
    write_seq(tmp_path)
    asked: list[WorkerGroup] = []
    stop_one = WorkerGroup.stop

    async def stop(group: WorkerGroup, grace_s: float) -> None:
        asked.append(group)
        until = time.monotonic() + 60
        while len(asked) < 2:
            assert time.monotonic() < until, "one is waited for before the other is asked"
            await asyncio.sleep(0.002)
        await stop_one(group, grace_s)

    async def work() -> None:
        async with serving(tmp_path) as at:
            await say(at, 1, 1, sequence_start=True)
            monkeypatch.setattr(WorkerGroup, "stop", stop)
            await at.server.repository.unload("seq")
            assert not any(group.pids[0] for group in asked)

    run(work())


OLDEST = "oldest { max_candidate_sequences: 4 }"


@pytest.mark.logs_errors
@pytest.mark.parametrize("strategy", ["direct { }", OLDEST], ids=["direct", "oldest"])
def test_what_a_dead_worker_had_not_taken_runs_on_no_other(tmp_path: Path, strategy: str) -> None:
    write_seq(tmp_path)
    config = CONFIG.replace("direct { }", strategy).replace("count: 2", "count: 1")
    (tmp_path / "seq" / "config.pbtxt").write_text(config)

    async def work() -> None:
        async with serving(tmp_path) as at:
            for id in (1, 2):
                assert (await say(at, id, 5, sequence_start=True))[:2] == [5, 5]
            first = at.pids[0]
            proc.stop(first)  # what is sent now it will not take
            ring = next(iter(at.server.host.hosted.values())).queue.ring
            late = [asyncio.ensure_future(say(at, id, 1)) for id in (1, 2, 1, 2)]
            late.append(asyncio.ensure_future(say(at, 3, 7, sequence_start=True, sequence_end=True)))
            await at.until(lambda: ring.pending() and scheduler_of(at).pending())
            os.kill(first, signal.SIGKILL)
            ends = await asyncio.gather(*late, return_exceptions=True)
            for end in ends[:4]:
                assert isinstance(end, ServeError), end
                assert (end.kind, "worker process that held this sequence died" in end.message) == (
                    Kind.UNAVAILABLE,
                    True,
                )
            for id in (1, 2):
                with pytest.raises(ServeError, match=rf"held sequence {id} of model 'seq' is gone"):
                    await say(at, id, 1)
            assert (await say(at, 1, 2, sequence_start=True))[:2] == [2, 2]
            assert (await say(at, 1, 3, sequence_end=True))[:2] == [5, 5]
            assert at.pids[0] != first

    run(work())


@pytest.mark.logs_errors
def test_new_sequences_begin_where_a_worker_is(tmp_path: Path) -> None:
    write_seq(tmp_path)

    async def work() -> None:
        async with serving(tmp_path) as at:
            dead, alive = at.pids
            begun = {(await say(at, id, 1, sequence_start=True))[2]: id for id in (1, 2)}
            os.kill(dead, signal.SIGKILL)
            await at.until(lambda: at.pids[0] != dead)
            assert (await say(at, 3, 4, sequence_start=True)) == [4, 4, alive], "not where nobody is yet"
            assert (await say(at, begun[alive], 1))[:2] == [2, 2]
            await at.until(lambda: at.server.host.alive(version_of(at)) == 2)
            began_at = (await say(at, 4, 6, sequence_start=True))[2]
            assert began_at == at.pids[0], "and there again once there is one"

    run(work())


def ask_over_grpc(address: str, id: int) -> grpc.RpcError:
    """How the request of a sequence fails over gRPC."""
    messages = load("kserve_v2")
    tensor = {"name": "IN", "datatype": "INT32", "shape": [1, 1], "contents": {"int_contents": [1]}}
    request = messages.ModelInferRequest(model_name="seq", inputs=[tensor])
    request.parameters["sequence_id"].int64_param = id
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.RpcError) as caught:
            call(request.SerializeToString(), timeout=30)
    return caught.value


@pytest.mark.logs_errors
@pytest.mark.parametrize("strategy", ["direct { }", OLDEST], ids=["direct", "oldest"])
def test_an_idle_sequence_whose_worker_died_is_told_so_over_every_transport(
    tmp_path: Path, strategy: str
) -> None:
    """It was 400, as of one whose client forgot to begin it."""
    write_seq(tmp_path)
    config = CONFIG.replace("direct { }", strategy).replace("count: 2", "count: 1")
    (tmp_path / "seq" / "config.pbtxt").write_text(config)
    here = (Listener("127.0.0.1:0"),)

    async def work() -> None:
        async with serving(tmp_path, http=(), listen=here) as at:
            assert (await say(at, 1, 5, sequence_start=True))[:2] == [5, 5]
            first = at.pids[0]
            os.kill(first, signal.SIGKILL)
            await at.until(lambda: at.server.host.alive(version_of(at)) == 1 and at.pids[0] != first)
            client = await at.client()
            tensor = {"name": "IN", "shape": [1, 1], "datatype": "INT32", "data": [1]}
            body = json.dumps({"inputs": [tensor], "parameters": {"sequence_id": 1}}).encode()
            status, told = await client.post("/v2/models/seq/infer", body)
            assert (status, client.headers["retry-after"]) == (503, "1")
            assert "the sequence's state with it" in json.loads(told)["error"]
            head = b'id: 7 correlation_id: 1 batch_size: 1 input { name: "IN" } output { name: "OUT" }'
            client.writer.write(
                b"POST /api/infer/seq HTTP/1.1\r\nHost: t\r\nNV-InferRequest: %b\r\n"
                b"Content-Length: 4\r\n\r\n\1\0\0\0" % head
            )
            status, _ = await client.page()
            assert (status, client.headers["retry-after"]) == (400, "1"), "as every error there"
            assert "code: UNAVAILABLE" in client.headers["nv-status"]
            assert "the sequence's state with it" in client.headers["nv-status"]
            fault = await asyncio.to_thread(ask_over_grpc, f"127.0.0.1:{at.port}", 1)
            assert fault.code() is grpc.StatusCode.UNAVAILABLE
            assert "the sequence's state with it" in fault.details()
            trailers = dict(fault.trailing_metadata())
            assert trailers["grpc-retry-pushback-ms"] == "1000"
            assert b"google.rpc.RetryInfo" in trailers["grpc-status-details-bin"]
            assert (await say(at, 1, 2, sequence_start=True))[:2] == [2, 2]
            assert (await say(at, 1, 3, sequence_end=True))[:2] == [5, 5]

    run(work())
