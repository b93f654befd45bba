"""Streams and answers of text over real workers, and what may become of them: clients that leave, time that
is up, full queues, workers that die, models that end, writing that fails. The client always hears of it,
and nothing stays taken.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fastserve.dialects.mindie import generation
from fastserve.metrics import names
from fastserve.settings import TextgenOptions
from tests.dialects.text_common.serving import Asking, Hosted, Reply
from tests.running import until

pytestmark = pytest.mark.waits

# What a model does, the prompt says: `go` says words for as long as they are wanted, `wait` says two and then
# none, `raise` says two and raises, `die` says two and ends its process, `silent` says nothing.
SOURCE = """
import os, pathlib, signal, time

FOLDER = pathlib.Path({folder!r})

class Model:
    info = {{"tokenizer": ""}}

    going = 0  # so many say words, whom others that wait do not slow down

    def __init__(self, config):
        pass

    def generate(self, request):
        word = request.text.split()[0]
        self.going += word == "go"
        try:
            if word != "silent":
                yield 5, "one "
                yield 6, "two "
            if word == "raise":
                raise ValueError("no words left")
            if word == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            while word in ("wait", "silent"):
                if not self.going:
                    time.sleep(0.001)
                yield None
            while True:
                yield 7, "more "
        finally:
            self.going -= word == "go"
            with open(FOLDER / "ended", "a") as ended:
                ended.write(word + "\\n")
"""
LIMITS = {"max_sequences": 2, "max_waiting": 2, "max_new_tokens": 100_000, "max_tokens": 1 << 20}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def write_model(folder: Path, **fields: Any) -> None:
    place = folder / "m1" / "1"
    place.mkdir(parents=True, exist_ok=True)
    (place / "model.py").write_text(SOURCE.format(folder=str(folder)))
    config = {
        "backend": "text_python",
        "text": LIMITS,
        "restart_backoff_s": 0.05,
        "restart_backoff_max_s": 0.05,
        **fields,
    }
    (folder / "m1" / "model.yaml").write_text(json.dumps(config))


def serve(folder: Path, *, repository: Any = None, **options: Any) -> Hosted:
    settings = {"model_control": "explicit", "load_models": ("*",), **(repository or {})}
    return Hosted(folder, TextgenOptions(**options), **settings)


@pytest.fixture(scope="module")
def at(folder: Path) -> Iterator[Hosted]:
    write_model(folder)
    with serve(folder) as hosted:
        yield hosted


class Client:
    """A raw client, that reads as little as it likes."""

    def __init__(self, at: Asking) -> None:
        self.socket = socket.create_connection(("127.0.0.1", at.port), timeout=60)

    def send(self, word: str, *, stream: bool = True, **parameters: Any) -> None:
        body = json.dumps({"inputs": word, "stream": stream, "parameters": parameters}).encode()
        head = b"POST /infer HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n" % len(body)
        self.socket.sendall(head + body)

    def read_until(self, mark: bytes) -> bytes:
        got = b""
        while mark not in got:
            data = self.socket.recv(65536)
            assert data, got
            got += data
        return got

    def leave(self) -> None:
        self.socket.close()


def ended(folder: Path) -> int:
    path = folder / "ended"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.parametrize(
    "moment",
    [
        lambda client: None,
        lambda client: client.read_until(b'"one "'),
        lambda client: client.read_until(b'"two "'),
    ],
    ids=["at once", "after the first token", "later"],
)
@pytest.mark.parametrize("word", ["go", "wait"])
def test_a_client_that_leaves_ends_its_sequence(
    at: Hosted, folder: Path, word: str, moment: Callable[[Client], object]
) -> None:
    before = ended(folder)
    client = Client(at)
    client.send(word, max_new_tokens=100_000)
    moment(client)
    client.leave()
    at.settle()
    until(lambda: ended(folder) >= before, "what began has ended")
    assert at.infer("go", max_new_tokens=2).json == {"generated_text": "one two "}


def test_a_client_that_waits_for_the_whole_and_leaves(at: Hosted, folder: Path) -> None:
    before = ended(folder)
    client = Client(at)
    client.send("wait", stream=False)
    until(lambda: not at.deployed.is_clean(), "it runs")
    client.leave()
    at.settle()
    until(lambda: ended(folder) >= before, "it has ended")


def test_a_hundred_that_leave_at_any_token(at: Hosted) -> None:
    def one(index: int) -> None:
        client = Client(at)
        client.send("go", max_new_tokens=100_000)
        left = index * 37
        while left > 0:
            data = client.socket.recv(4096)
            if not data:
                break  # turned away: the queue is full
            left -= len(data)
        client.leave()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(100)))
    at.settle()
    assert at.infer("go", max_new_tokens=3).json == {"generated_text": "one two more "}


def test_a_client_that_does_not_read_holds_up_nobody(at: Hosted) -> None:
    client = Client(at)
    client.send("go", max_new_tokens=100_000)
    for _ in range(3):
        assert at.infer("go", max_new_tokens=50).status == 200
    client.leave()


WORDS = {
    "timeout": "Engine callback timeout: client timeout",
    "token_timeout_s": "Engine callback timeout: server tokenTimeout",
    "e2e_timeout_s": "Engine callback timeout: server e2eTimeout",
}


@pytest.mark.parametrize("limit", list(WORDS))
@pytest.mark.parametrize("style", ["event", "raw"])
def test_whose_time_is_up_is_told(folder: Path, limit: str, style: str) -> None:
    write_model(folder)
    parameters = {"timeout": 1} if limit == "timeout" else {}
    options = {} if limit == "timeout" else {limit: 0.2}
    with serve(folder, stream_errors=style, **options) as at:
        reply = at.infer("wait", **parameters)
        assert (reply.status, reply.json) == (
            500,
            {"error": WORDS[limit], "error_type": "Incomplete Generation"},
        )
        for word in ("wait", "silent"):
            reply = at.infer(word, stream=True, **parameters)
            assert (reply.status, reply.headers["content-type"]) == (200, "text/event-stream")
            body = reply.body.decode()
            if style == "raw":
                assert body.endswith(WORDS[limit])
            else:
                told = json.loads(body.split("data: ")[-1])
                assert told == {"error": WORDS[limit], "error_type": "Incomplete Generation"}


def test_a_full_queue(at: Hosted) -> None:
    clients = [Client(at) for _ in range(4)]
    for client in clients:
        client.send("wait")
    until(lambda: held(at) == 4, "two run and two wait")
    for stream in (False, True):
        reply = at.infer("go", stream=stream)
        assert (reply.status, reply.json["error_type"]) == (503, "Service Unavailable")
        assert "the queue of this model is full" in reply.json["error"]
        assert int(reply.headers["retry-after"]) >= 1
    for client in clients:
        client.leave()
    at.settle()
    assert at.infer("go", max_new_tokens=1).status == 200


def held(at: Hosted) -> int:
    return sum(one.queue.ring.outstanding() for one in at.server.host.hosted.values())


@pytest.mark.logs_errors
def test_a_model_that_raises_fails_its_own_request(at: Hosted) -> None:
    reply = at.infer("raise")
    assert (reply.status, reply.json["error_type"]) == (500, "Incomplete Generation")
    assert reply.json["error"].startswith("Failed to get engine response: ")
    check_broken_off(at.infer("raise", stream=True), 500)


def check_broken_off(reply: Reply, status: int) -> None:
    """The tokens there were, and an event that says what happened; never half an answer that looks whole."""
    assert reply.status == 200
    *tokens, last = reply.events
    assert [event["token"]["text"] for event in tokens] == ["one ", "two "][: len(tokens)]
    types = {500: "Incomplete Generation", 503: "Service Unavailable"}
    assert list(last) == ["error", "error_type"]
    assert last["error_type"] == types[status]
    assert last["error"].startswith("Failed to get engine response: ")


@pytest.mark.logs_errors
def test_a_worker_that_dies(folder: Path) -> None:
    write_model(folder)
    with serve(folder) as at:
        check_broken_off(at.infer("die", stream=True), 503)
        until(lambda: at.infer("go", max_new_tokens=1).status == 200, "there is another worker")
        reply = at.infer("die")
        assert (reply.status, reply.json["error_type"]) == (503, "Service Unavailable")
        until(lambda: at.infer("go", max_new_tokens=1).status == 200, "there is another worker")
        with ThreadPoolExecutor(2) as pool:
            stream = wait_for(at, pool)
            for hosted in at.server.host.hosted.values():
                for pid in hosted.group.pids:
                    os.kill(pid, signal.SIGKILL)
            check_broken_off(stream.result(), 503)
    with serve(folder, stream_errors="raw") as at:
        assert at.infer("die", stream=True).body.decode().endswith("Failed to get engine response")


def wait_for(at: Hosted, pool: ThreadPoolExecutor) -> Future[Reply]:
    """A stream that says two tokens and goes on waiting. One whose first has not come would be given to the
    next worker instead."""
    found = pool.submit(at.infer, "wait", stream=True)
    until(lambda: running(at) == 1, "it runs")
    return found


def running(at: Hosted) -> float:
    """Sequences that have had a token."""
    (levels,) = at.server.registry.read(names.TEXT_RUNNING)
    return sum(level for (level,) in levels.values())


def test_a_model_that_is_unloaded_under_a_stream(folder: Path) -> None:
    write_model(folder)
    with serve(folder) as at, ThreadPoolExecutor(2) as pool:
        client = Client(at)
        client.send("wait")
        client.read_until(b'"two "')
        stream = pool.submit(at.infer, "go", stream=True, max_new_tokens=20_000)
        until(lambda: held(at) == 2, "it runs")
        unloading = pool.submit(at.run, at.server.repository.unload("m1", composing=False))
        until(lambda: at.server.catalog.available("m1") is None, "it is being unloaded")
        assert at.infer("go").status == 404  # asked before, it would wait behind the others
        assert stream.result().events[-1]["generated_text"].count("more") == 19_998
        assert not unloading.done()
        client.leave()
        unloading.result(60)


@pytest.mark.logs_errors
@pytest.mark.parametrize("step", ["details_of", "write_answer", "write_tokens", "write_last", "fault_of"])
@pytest.mark.parametrize("stream", [True, False])
def test_an_exception_at_each_step_of_writing(
    at: Hosted, monkeypatch: pytest.MonkeyPatch, step: str, stream: bool
) -> None:
    def fail(*args: object) -> bytes:
        raise RuntimeError("a secret of the server's")

    place: Any = generation.InferCall if step in ("write_tokens", "write_last") else generation
    place = generation if step == "fault_of" else place
    monkeypatch.setattr(place, step, fail)
    if (step in ("write_tokens", "write_last")) > stream or (step == "write_answer") > (not stream):
        return
    reply = at.infer("go", stream=stream, max_new_tokens=5, details=True)
    assert b"secret" not in reply.body
    if stream:
        assert reply.events[-1] == {"error": "Internal error", "error_type": "Incomplete Generation"}
    else:
        assert (reply.status, reply.json["error"]) == (500, "Internal error")
    monkeypatch.undo()
    assert at.infer("go", max_new_tokens=1).json == {"generated_text": "one "}


def test_comments_keep_a_silent_stream_alive(folder: Path) -> None:
    write_model(folder)
    with serve(folder, keepalive_s=0.05) as at:
        body = at.infer("wait", stream=True, timeout=1).body
        assert body.count(b": keep-alive\n\n") >= 3
        events = [part for part in body.split(b"\n\n") if part.startswith(b"data: ")]
        assert len(events) == 3
        whole = at.infer("go", stream=True, max_new_tokens=200)
        assert whole.body.replace(b": keep-alive\n\n", b"").count(b"\n\n") == 200


def test_a_drain_waits_for_streams(folder: Path) -> None:
    write_model(folder)
    at = serve(folder)
    with ThreadPoolExecutor(1) as pool:
        with at:
            stream = pool.submit(at.infer, "go", stream=True, max_new_tokens=5000)
            until(lambda: held(at) == 1, "it runs")
        assert stream.result().events[-1]["generated_text"].count("more") == 4998
