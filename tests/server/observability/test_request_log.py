"""The request log: its lines, what it leaves out, and that it never stands in the way of a reply."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import queue
import resource
import stat
import struct
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fastserve.engine.request_log import (
    MOST_BYTES,
    MOST_RECORDS,
    NAP_S,
    CopiedTensor,
    LogFile,
    Record,
    RequestLogs,
    RequestSampler,
    tensor_pieces,
    write_line,
)
from fastserve.metrics import Registry, names
from tests.server.processes.test_fronts import connect_to_each
from tests.server.rig import KILL, Served, run, serving, write_model
from tests.slowness import slowness

FIELDS = {"time", "id", "model", "version", "key", "status", "latency_us", "inputs", "outputs"}


def lines(folder: Path, name: str = "*") -> list[dict[str, Any]]:
    found = [path for path in folder.glob(f"{name}.jsonl*") if path.is_file()]
    return [json.loads(line) for path in found for line in path.read_text().splitlines()]


async def infer(at: Served, *values: float, id: str = "") -> tuple[int, bytes]:
    tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": list(values)}
    body = {**({"id": id} if id else {}), "inputs": [tensor]}
    return await (await at.client()).post("/v2/models/twice/infer", json.dumps(body).encode())


@pytest.mark.logs_errors
@pytest.mark.parametrize("cache", [False, True])
def test_lines_of_every_path(tmp_path: Path, cache: bool) -> None:
    logs = tmp_path / "logs"
    write_model(tmp_path / "models", cache=cache, request_log={"sample": 1.0})

    async def work() -> None:
        async with serving(tmp_path / "models", request_log_folder=str(logs)) as at:
            for number in range(4):  # the later ones would take the fast path
                assert (await infer(at, number, 0.5, id=f"r{number}"))[0] == 200
                assert await at.ask(number + 10.0) == (200, [2 * number + 20.0])
            assert (await at.ask(KILL))[0] == 503
        found = lines(logs)
        assert Counter(one["status"] for one in found) == {"OK": 8, "UNAVAILABLE": 1}
        assert all(set(one) == FIELDS for one in found)
        by_id = {one["id"]: one for one in found}
        one = by_id["r3"]
        assert (one["model"], one["version"], one["key"], one["status"]) == ("twice", 1, "", "OK")
        assert 0 < one["latency_us"] < 60e6
        assert one["time"].endswith("Z")
        tensor = {"dtype": "float32", "shape": [1, 2], "integers": [], "texts": [], "redacted": False}
        assert one["inputs"] == [{**tensor, "name": "x", "floats": [3.0, 0.5], "elements": 2}]
        assert one["outputs"] == [{**tensor, "name": "y", "floats": [6.0, 1.0], "elements": 2}]
        assert stat.S_IMODE((logs / "twice.jsonl").stat().st_mode) == 0o600
        assert stat.S_IMODE(logs.stat().st_mode) == 0o700

    run(work())


@pytest.mark.logs_errors
def test_a_share_is_drawn_and_values_are_redacted(tmp_path: Path) -> None:
    logs, share, asked = tmp_path / "logs", 0.2, 600
    write_model(tmp_path / "models", request_log={"sample": share, "redact": ["x"], "max_tensor_bytes": 4})

    async def work() -> None:
        async with serving(tmp_path / "models", request_log_folder=str(logs)) as at:
            client = await at.client()
            for number in range(asked):
                assert await client.predict(float(number)) == (200, [2.0 * number])
        found = lines(logs)
        assert 0.5 * share * asked < len(found) < 1.6 * share * asked, "120 of 600, 5 deviations of 10"
        for one in found:
            assert one["inputs"][0] | {"floats": [], "redacted": True} == one["inputs"][0]
            assert len(one["outputs"][0]["floats"]) == 1
            assert one["outputs"][0]["elements"] == 2

    run(work())


@pytest.mark.parametrize("asked", [4, 64])
def test_fronts_write_files_of_their_own(tmp_path: Path, asked: int) -> None:
    logs = tmp_path / "logs"
    write_model(tmp_path / "models", request_log={"sample": 1.0}, max_batch_size=64)

    async def work() -> None:
        async with serving(tmp_path / "models", request_log_folder=str(logs), frontends=3) as at:
            clients = list((await connect_to_each(at, 3)).values())

            async def ask(client: Any, first: int) -> None:
                for number in range(first, asked, 3):
                    assert await client.predict(float(number)) == (200, [2.0 * number])

            await asyncio.gather(*(ask(client, first) for first, client in enumerate(clients)))
        assert {path.name for path in logs.iterdir()} == {"twice.jsonl", "twice-1.jsonl", "twice-2.jsonl"}
        told = Counter(one["inputs"][0]["floats"][0] for one in lines(logs))
        assert told == Counter(float(number) for number in range(asked))

    run(work())


@pytest.mark.lingers  # records of the log have what their errors refer to
@pytest.mark.logs_errors
def test_a_log_that_cannot_be_written_delays_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "no folder"
    folder.write_text("")
    write_model(tmp_path / "models", request_log={"sample": 1.0})

    async def work() -> None:
        async with serving(tmp_path / "models", request_log_folder=str(folder)) as at:
            assert await at.ask(2.0) == (200, [4.0])
            counters = at.server.registry.counters(names.REQUEST_LOG)
            await at.until(lambda: counters.of("twice", "failed").value == 1)
            assert await at.ask(3.0) == (200, [6.0])
            await at.until(lambda: counters.of("twice", "failed").value == 2)

    run(work())


def record(file: LogFile, data: bytes | None = b"", status: str = "OK", dtype: str = "uint8") -> Record:
    tensor = CopiedTensor("x", dtype, (len(data or b""),), data)
    return Record(file, time.time_ns(), "", "", 1, status, 1000, [tensor], [], len(data or b"") + 200)


@pytest.mark.lingers
@pytest.mark.logs_errors
def test_files_are_bounded(tmp_path: Path) -> None:
    registry = Registry()
    path, most = tmp_path / "m.jsonl", 4096
    file = LogFile(path, most, "m", registry)
    for number in range(100):
        for _ in range(3):
            file.write(b"%03d %b\n" % (number, b"x" * 100))
    file.write(b"y" * 5000)  # larger than a file may be
    assert [one.name for one in sorted(tmp_path.iterdir())] == ["m.jsonl", "m.jsonl.1"]
    assert all(0 < one.stat().st_size <= most for one in tmp_path.iterdir())
    assert path.read_text().splitlines()[-1].startswith("099")
    assert (file.written.value, file.dropped.value) == (300, 1)
    path.unlink()  # by an operator
    file.write(b"new\n")
    assert path.read_text() == "new\n"
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    file.close()
    file.write(b"new\n")
    assert not (tmp_path / "elsewhere").exists(), "a link that somebody has put there is not followed"
    registry.close()


@pytest.mark.lingers
@pytest.mark.logs_errors
def test_half_a_line_is_not_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry()
    file = LogFile(tmp_path / "m.jsonl", 1 << 20, "m", registry)
    file.write(b"a" * 999 + b"\n")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, before[1]))
    try:
        file.write(b"b" * 999 + b"\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert file.failed.value == 1
    (told,) = caplog.records
    assert (told.getMessage(), told.exc_info) == ("m.jsonl cannot be written: no room is left", None)
    file.write(b"c" * 999 + b"\n")
    assert [set(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()] == [{"a"}, {"c"}]
    file.close()
    registry.close()


@pytest.mark.lingers
@pytest.mark.logs_errors
def test_a_queue_that_nobody_empties_drops(tmp_path: Path) -> None:
    registry, pipe = Registry(), tmp_path / "m.jsonl"
    os.mkfifo(pipe)  # opening it for writing waits for a reader: a disk that does not answer
    logs = RequestLogs(str(tmp_path), registry)
    file = LogFile(pipe, 1 << 20, "m", registry)
    began = time.monotonic()
    for _ in range(4 * MOST_RECORDS):
        logs.put(record(file))
    assert time.monotonic() - began < 30
    assert 2 * MOST_RECORDS <= file.dropped.value <= 3 * MOST_RECORDS
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    until = time.monotonic() + 60
    while file.written.value < 4 * MOST_RECORDS - file.dropped.value:
        assert time.monotonic() < until
        with contextlib.suppress(BlockingIOError):
            os.read(reader, 1 << 16)
        time.sleep(0.001)
    logs.close()
    file.close()
    os.close(reader)
    big = RequestLogs(str(tmp_path), registry)
    big._thread = object()  # type: ignore[assignment]  # none takes anything
    for _ in range(40):
        big.put(record(file, bytes(1 << 20)))
    assert big._put <= MOST_BYTES
    registry.close()


@pytest.mark.lingers
@pytest.mark.logs_errors
def test_half_a_line_of_a_killed_process_is_cut(tmp_path: Path) -> None:
    registry, path = Registry(), tmp_path / "m.jsonl"
    for left, kept in (
        (b'{"a": 1}\n{"b', b'{"a": 1}\n'),
        (b"x" * 200_000, b""),
        (b'{"a": 1}\n', b'{"a": 1}\n'),
    ):
        path.write_bytes(left)
        file = LogFile(path, 1 << 20, "m", registry)
        file.write(b"new\n")
        file.close()
        assert path.read_bytes() == kept + b"new\n"
    path.write_bytes(b"a\n" + b"x" * 200_000)
    LogFile(path, 1 << 20, "m", registry).write(b"new\n")
    assert path.read_bytes() == b"a\nnew\n"
    registry.close()


@pytest.mark.lingers
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int8", "uint64", "bytes"])
def test_the_largest_lines_hold_nobody(tmp_path: Path, dtype: str) -> None:
    """While a line of megabytes is made, the lock is given up every 10 ms of CPU; of a line that no file has
    room for, little is made."""
    registry = Registry()
    file = LogFile(tmp_path / "m.jsonl", 1 << 30, "m", registry)
    data = os.urandom(1 << 20) if dtype != "bytes" else struct.pack("<I", 1 << 20) + b"\xff" * (1 << 20)
    large = record(file, data, dtype=dtype)
    naps: list[float] = []
    sleep = time.sleep

    def nap(seconds: float) -> None:
        naps.append(time.thread_time())
        sleep(seconds)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("fastserve.engine.request_log.time.sleep", nap)
        line = write_line(large)
    assert len(json.loads(line)["inputs"]) == 1
    between_s = max(later - before for before, later in itertools.pairwise(naps))
    assert between_s < 0.01 * slowness()
    file.most = 1 << 16
    assert write_line(large) == b""


@pytest.mark.lingers
def test_the_thread_takes_a_part_of_a_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its work it sleeps for three times as long as that took."""
    registry, slept, sleep = Registry(), queue.SimpleQueue[float](), time.sleep
    monkeypatch.setattr("fastserve.engine.request_log.WRITE_EVERY_S", 0.0)
    logs = RequestLogs(str(tmp_path), registry)
    large = record(LogFile(tmp_path / "m.jsonl", 1 << 30, "m", registry), os.urandom(1 << 19))
    began_s = time.thread_time()
    write_line(large)
    took_s = time.thread_time() - began_s

    def nap(seconds: float) -> None:
        if seconds > NAP_S:
            slept.put(seconds)
        sleep(min(seconds, NAP_S))

    monkeypatch.setattr("fastserve.engine.request_log.time.sleep", nap)
    logs.put(large)
    assert slept.get(timeout=60) > took_s
    logs.close()
    registry.close()


def test_ids_of_clients_are_bounded(tmp_path: Path) -> None:
    logs, id = tmp_path / "logs", "i" * 1_000_000
    write_model(tmp_path / "models", request_log={"sample": 1.0})

    async def work() -> None:
        async with serving(tmp_path / "models", request_log_folder=str(logs)) as at:
            status, told = await infer(at, 1, 2, id=id)
            assert (status, json.loads(told)["id"]) == (200, id)
        (line,) = lines(logs)
        assert line["id"] == id[:256]

    run(work())


def test_values_of_every_type() -> None:
    def read(dtype: str, data: bytes, *shape: int) -> tuple[list[Any], list[Any], list[Any]]:
        found = json.loads(b"".join(tensor_pieces(CopiedTensor("t", dtype, shape, data))))
        assert (found["name"], found["shape"], found["redacted"]) == ("t", list(shape), False)
        return found["floats"], found["integers"], found["texts"]

    assert read("bool", b"\1\0", 2) == ([], [1, 0], [])
    assert read("int8", b"\xff", 1) == ([], [-1], [])
    assert read("int64", struct.pack("<q", -(1 << 63)), 1) == ([], [-(1 << 63)], [])
    assert read("uint64", struct.pack("<q", 7), 1) == ([], [7], [])
    assert read("uint64", b"\xff" * 8, 1) == ([], [], [str((1 << 64) - 1)])
    assert read("float16", struct.pack("<e", 1.5) + b"\0", 2) == ([1.5], [], [])
    assert read("bfloat16", b"\xc0\x3f", 1) == ([1.5], [], [])
    assert read("float32", struct.pack("<fff", float("nan"), float("inf"), 2), 3) == (
        [None, None, 2.0],
        [],
        [],
    )
    assert read("float64", struct.pack("<d", 0.1) + b"cut", 2) == ([0.1], [], [])
    assert read("complex64", bytes(8), 1) == ([], [], [])
    packed = b"\2\0\0\0ab\1\0\0\0\xff\xff\0\0\0cut"
    assert read("bytes", packed, 3) == ([], [], ["ab", "\\xff"])
    texts = ["é" * (number % 3 * 900) + '"' * (number % 2) for number in range(1000)]
    packed = b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in texts)
    assert read("bytes", packed, 1000) == ([], [], texts)
    assert read("bytes", packed[:-1], 500) == ([], [], texts[:500])
    assert read("bytes", packed + b"\0" * 4, 1001) == ([], [], [*texts, ""])


def test_the_share_of_draws() -> None:
    sampler = RequestSampler(0.25)
    drawn = sum(sampler.draw() for _ in range(4000))
    assert 850 < drawn < 1150
    assert sum(sampler.take() for _ in range(64)) == 64, (
        "those that the fast path has left, as many as are kept"
    )
    assert not RequestSampler(0.0).take()
