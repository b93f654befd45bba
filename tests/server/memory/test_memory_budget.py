"""Memory of a front process when clients make it hold much: a real server with a small budget.

Memory is RssAnon, what no other process shares: the rows of batches are the arena's matter.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from tests.faults.rig import Http, Memory, memory
from tests.memory_watch import MemoryWatch, own_bytes
from tests.running import Running, until
from tests.server.rig import write_model

MB = 1 << 20
BUDGET_MB = 64
TIGHT = (
    *("--limits-memory-bytes", str(BUDGET_MB * MB), "--limits-body-bytes", str(8 * MB)),
    *("--grpc-options-message-bytes", str(8 * MB), "--limits-inflated-bytes", str(8 * MB)),
    *("--http-max-input-size", str(8 * MB), "--allow-client-shm"),
)
BASE_MB = 40  # beside the budget: objects of connections, threads, what the allocator has not given back
ANY = {"dtype": "float32", "shape": [-1]}
SOURCE = """
import numpy as np

class Model:
    def __init__(self, config):
        pass

    def run(self, inputs):
        x = inputs["x"]
        return {"y": np.full((len(x), int(x[0, 0])), 1.2345678, np.float32) if x.shape[1] == 1 else x * 2}
"""
FIRST = """
import time

class Model:
    def __init__(self, config):
        pass

    def run(self, inputs):
        if inputs["x"].shape[1] > 100:
            time.sleep(0.1)  # others wait meanwhile, with what they brought
        return {"y": inputs["x"][:, :1]}
"""
SMALL = b'{"instances": [[1, 2]]}'
REGION_BYTES, FIRSTS = 12 * MB, "/v2/models/firsts/infer"
PREDICT, INFER = "/v1/models/sizes:predict", "/v2/models/sizes/infer"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Its model answers [[n]] with n numbers, and others with the double."""
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "sizes", inputs={"x": ANY}, outputs={"y": ANY}, max_batch_size=1)
    (folder / "sizes/1/model.py").write_text(SOURCE)
    write_model(
        folder, "firsts", inputs={"x": ANY}, outputs={"y": ANY}, max_batch_size=1, max_queue_bytes=2**30
    )
    (folder / "firsts/1/model.py").write_text(FIRST)
    with Running(folder, folder.parent / "log", *TIGHT) as running:
        for _ in range(20):
            assert ask(running, PREDICT, SMALL) == 200
        yield running


def own_mb(served: Running) -> float:
    return own_bytes(served.pid) / MB


def send(served: Running, path: str, body: bytes, *lines: str, window: int = 0) -> socket.socket:
    host, port = served.http.split(":")
    link = socket.socket()
    if window:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    link.settimeout(120)
    link.connect((host, int(port)))
    head = [f"POST {path} HTTP/1.1", "Host: a", f"Content-Length: {len(body)}", *lines, "", ""]
    link.sendall("\r\n".join(head).encode() + body)
    return link


def ask(served: Running, path: str, body: bytes, *lines: str) -> int:
    with send(served, path, body, *lines) as link:
        answer = link.recv(1 << 16)
        status = int(answer.split(b" ", 2)[1])
        assert status != 503 or b"\r\nRetry-After: 1\r\n" in answer
        return status


def watching(served: Running) -> MemoryWatch:
    return MemoryWatch(served.pid, lambda: ask(served, PREDICT, SMALL), 0.02)


def at_once(count: int, work: Callable[[], int]) -> Counter[int]:
    found: Counter[int] = Counter()
    threads = [threading.Thread(target=lambda: found.update([work()])) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def packed(path: str) -> bytes:
    """A request of 7 MB of JSON in 48 KB, as whoever means harm sends it."""
    numbers = b"1.0000," * MB
    if path == PREDICT:
        inner = b'{"instances":[[' + numbers + b"1]]}"
    else:
        shape = json.dumps({"name": "x", "datatype": "FP32", "shape": [1, MB + 1]}).encode()
        inner = b'{"inputs":[' + shape[:-1] + b',"data":[' + numbers + b"1]}]}"
    body = gzip.compress(inner)
    return body + gzip.compress(b"") * ((48_000 - len(body)) // 20)


@pytest.mark.parametrize("path", [PREDICT, INFER])
def test_bodies_that_inflate_stay_within_the_budget(served: Running, path: str) -> None:
    """32 of them would be 224 MB of text and 128 of numbers."""
    base, body = own_mb(served), packed(path)
    with watching(served) as watch:
        statuses = at_once(32, lambda: ask(served, path, body, "Content-Encoding: gzip"))
    assert set(statuses) <= {200, 503}, statuses
    assert statuses[200] > 0
    assert watch.peak_bytes / MB - base < BUDGET_MB + BASE_MB
    assert set(watch.small) == {200}
    until(lambda: own_mb(served) < base + BASE_MB, "its memory comes back", 10.0)


def test_bodies_of_slow_clients_stay_within_the_budget(served: Running) -> None:
    """40 clients send 4 MB of 6, and go no further: those that are read do not, and the others wait."""
    base = own_mb(served)
    links = []
    with watching(served) as watch:
        for _ in range(40):
            link = send(served, PREDICT, b"", f"X-Longer: {'x' * 10}")
            assert link.recv(1 << 16)
            link.setblocking(False)
            head = f"POST {PREDICT} HTTP/1.1\r\nHost: a\r\nContent-Length: {6 * MB}\r\n\r\n".encode()
            with contextlib.suppress(BlockingIOError):
                link.send(head + bytes(4 * MB))
            links.append(link)
        time.sleep(1.0)
        assert watch.small[200]
    assert watch.peak_bytes / MB - base < BUDGET_MB + BASE_MB
    for link in links:
        link.close()
    until(lambda: own_mb(served) < base + BASE_MB, "its memory comes back", 10.0)
    assert ask(served, PREDICT, b'{"instances": [[%b1]]}' % (b"1," * MB)) == 200


def test_replies_that_nobody_reads_come_back(served: Running) -> None:
    """40 of 5 MB: none is refused, and new large bodies wait for them."""
    base = own_mb(served)
    links = [send(served, PREDICT, b'{"instances": [[500000]]}', window=4096) for _ in range(40)]
    until(lambda: own_mb(served) > base + 2 * BUDGET_MB, "the replies are there")
    assert ask(served, PREDICT, SMALL) == 200
    for link in links:
        link.close()
    until(lambda: own_mb(served) < base + BASE_MB, "its memory comes back", 10.0)


def test_bodies_of_clients_that_leave_come_back(served: Running) -> None:
    """6 MB of JSON each; they were kept until a search for garbage."""
    base = own_mb(served)
    body = b'{"instances": [[%b1]]}' % (b"1.25," * 1_200_000)
    for _ in range(4):
        links = [send(served, PREDICT, body) for _ in range(5)]
        for link in links:
            link.close()
    until(lambda: own_mb(served) < base + BASE_MB, "its memory comes back", 10.0)
    assert ask(served, PREDICT, SMALL) == 200


def in_region(region: Memory, given: int) -> bytes:
    """A request for nearly all of it; no two of one length, so that none is like another before."""
    nbytes = REGION_BYTES - 4 * given
    placed = {"name": "x", "datatype": "FP32", "shape": [1, nbytes // 4]}
    return json.dumps({"inputs": [{**placed, "parameters": region.place(0, nbytes)}]}).encode()


def test_what_lies_in_client_memory_is_on_the_budget(served: Running) -> None:
    """40 requests of a kilobyte, each for 12 MB of a file."""
    base, given = own_mb(served), itertools.count()
    with Http(served) as http, memory(http, REGION_BYTES) as region, watching(served) as watch:
        statuses = at_once(40, lambda: ask(served, FIRSTS, in_region(region, next(given))))
    assert set(statuses) <= {200, 503}, statuses
    assert statuses[200] > 0
    assert watch.peak_bytes / MB - base < BUDGET_MB + BASE_MB
    until(lambda: own_mb(served) < base + BASE_MB, "its memory comes back", 10.0)


def test_metrics_show_the_budget(served: Running) -> None:
    def used() -> int:
        with socket.create_connection(served.http.split(":")) as link:  # type: ignore[arg-type]
            link.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            page = b"".join(iter(lambda: link.recv(1 << 16), b"")).decode()
        assert f'fastserve_memory_bytes{{state="limit"}} {BUDGET_MB * MB}' in page
        assert re.search(r"^fastserve_memory_refused_total [1-9]", page, re.M)
        found = re.search(r'^fastserve_memory_bytes{state="used"} (\d+)', page, re.M)
        assert found
        return int(found[1])

    until(lambda: used() <= MB, "nothing is held any more")
