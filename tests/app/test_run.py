"""An app from outside: every kind of function, over its own API and the others, by `fastserve run`."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import requests
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from tests.app.apps import RunningApp, write_app
from tests.running import run_command

APP = """
    import asyncio
    import os
    import time
    from dataclasses import dataclass, field

    import msgspec
    import numpy as np
    import pydantic
    from fastserve.errors import Kind, ServeError


    @fastserve.model
    def greet(name: str, times: int = 1) -> dict:
        return {"text": f"Hello {name}! " * times}


    @fastserve.model(batch=64, max_queue_delay_us=500, instances=2)
    def scale(x: fastserve.Array["float32", 4]) -> fastserve.Array["float32", 4]:
        return x * 3


    @fastserve.model
    def mix(a: fastserve.Array["float32", -1], b: fastserve.Array["int64"]) -> {
        "sums": fastserve.Array["float32"], "twice": fastserve.Array["int64"]
    }:
        return {"sums": a.sum(axis=1), "twice": b * 2}


    @dataclass
    class Query:
        words: list[str]
        limit: int = 3
        tags: dict[str, int] = field(default_factory=dict)


    @fastserve.model(path="/v1/search")
    def search(query: Query) -> list[str]:
        return query.words[: query.limit]


    class Point(msgspec.Struct):
        x: float
        y: float


    class Person(pydantic.BaseModel):
        name: str
        age: int = pydantic.Field(ge=0)


    @fastserve.model
    def know(person: Person, at: Point | None = None):
        return {"person": person, "at": at, "far": np.float32(1.5), "row": np.arange(2)}


    @fastserve.model
    def echo(body):
        return body


    @fastserve.model
    def fails(how: str):
        if how == "kind":
            raise ServeError(Kind.PERMISSION_DENIED, "not for you")
        if how == "die":
            os._exit(3)
        if how == "json":
            return {"what": object()}
        raise ValueError("it broke in /home/someone/secret.py")


    @fastserve.model
    def picture():
        return fastserve.Response(b"GIF89a", "image/gif")


    @fastserve.model
    def weigh(image: bytes, more: list[fastserve.File] = [], name: str = ""):
        return {"bytes": len(image), "files": [file.filename for file in more], "name": name}


    @fastserve.model(batch=8, max_queue_delay_us=100_000)
    def lengths(texts: list[str]) -> list[dict]:
        if "bad" in texts:
            raise ValueError("a bad text")
        return [{"length": len(text), "batch": len(texts)} for text in texts]


    @fastserve.model
    class Doubling:
        def setup(self, device):
            self.by, self.device = 2, device

        def decode(self, value: int):
            return value + 1

        def predict(self, value):
            return value * self.by

        def encode(self, value):
            return {"value": value, "device": self.device}


    @fastserve.model
    class Adding:
        def setup(self, device):
            self.bias = 10

        def predict(self, x: fastserve.Array["float32", 2]) -> fastserve.Array["float32", 2]:
            return x + np.float32(self.bias)


    @fastserve.model
    def count(to: int, fail_at: int = -1):
        for number in range(to):
            if number == fail_at:
                raise ValueError("no further")
            yield {"n": number}


    @fastserve.model
    async def wait(ms: float):
        await asyncio.sleep(ms / 1000)
        return {"waited": ms}


    @fastserve.model
    async def ticks(to: int):
        for number in range(to):
            await asyncio.sleep(0)
            yield number


    @fastserve.model(run_timeout_ms=400)
    async def linger(how: str):
        yield how
        if how == "block":
            time.sleep(60)
        await asyncio.sleep(60 if how == "await" else 0)
        yield how


    @fastserve.model(run_timeout_ms=400)
    def stall(seconds: float):
        yield 1
        time.sleep(seconds)
        yield 2


    fastserve.serve()
    raise SystemExit("a worker runs what stands behind serve()")
"""


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApp]:
    folder = tmp_path_factory.mktemp("app")
    with RunningApp(write_app(folder, APP), folder / "log") as server:
        yield server


def test_a_function_of_json(app: RunningApp) -> None:
    assert app.post("/greet", {"name": "Ann"}) == (200, "application/json", b'{"text":"Hello Ann! "}')
    assert app.ask("/greet", {"name": "Ann", "times": 2}) == {"text": "Hello Ann! Hello Ann! "}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b'{"name": 5}', "`$.name`"),
        (b'{"nam": "Ann"}', "`nam`"),
        (b"{}", "`name`"),
        (b'{"name": "Ann", "times": 1.5}', "`$.times`"),
        (b'{"name": "Ann", "times": "2"}', "`$.times`"),
        (b"[1]", "Expected `object`"),
        (b'{"name"', "truncated"),
        (b"\xff", "malformed"),
        (b'{"name": ' + b"[" * 5000, "does not fit"),
    ],
)
def test_an_error_names_the_field(app: RunningApp, body: bytes, named: str) -> None:
    status, said = app.refusal("/greet", raw=body)
    assert (status, named in said) == (400, True), said


def test_arrays_by_rows_and_by_row(app: RunningApp) -> None:
    assert app.ask("/scale", {"x": [1, 2, 3, 4]}) == [3, 6, 9, 12]
    assert app.ask("/scale", {"x": [[1, 2, 3, 4], [0, 0, 0, 1]]}) == [[3, 6, 9, 12], [0, 0, 0, 3]]
    assert app.ask("/mix", {"a": [1, 2], "b": 4}) == {"sums": 3, "twice": 8}
    assert app.ask("/mix", {"a": [[1], [2]], "b": [4, 5]}) == {"sums": [1, 2], "twice": [8, 10]}


@pytest.mark.parametrize(
    "body",
    [
        b'{"x": [1, 2, 3, 4]}}',
        b'{"x": [1, 2, 3, 4]}, "y": 1',
        b'{"x": [1, 2, 3, 4]} {"x": [1, 2, 3, 4]}',
        b'{"x": [1, 2, 3, 4], "x": [1, 2, 3, 4]}',
        b'{"x": [1, 2, 3, 4]',
        b'{"x": [1, 2, 3, 4],}',
    ],
)
def test_a_body_is_one_object_and_nothing_more(app: RunningApp, body: bytes) -> None:
    assert app.refusal("/scale", raw=body)[0] == 400
    assert app.post("/scale", raw=b' { "x" : [1, 2, 3, 4] } \n')[2] == b"[3.0, 6.0, 9.0, 12.0]"


def test_both_paths_answer_alike(app: RunningApp) -> None:
    """A member `x` written with an escape is not for the fast path."""
    rows = np.random.default_rng(1).standard_normal((5, 4)).astype(np.float32)
    for text in (json.dumps(rows.tolist()), json.dumps(rows[0].tolist()), json.dumps(rows[:1].tolist())):
        fast, slow = (
            app.post("/scale", raw=form % text.encode()) for form in (b'{"x":%b}', b'{"\\u0078":%b}')
        )
        assert fast == slow
        assert fast[0] == 200
        np.testing.assert_allclose(json.loads(fast[2]), np.array(json.loads(text), np.float32) * 3, rtol=1e-6)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"x": [1, 2, 3]}, "'x'"),
        ({"y": [1, 2, 3, 4]}, "y: the model has no such input"),
        ({"x": [1, 2, "a", 4]}, "x: allowed: an array of float32"),
        ({"x": [[1, 2, 3, 4], [1]]}, "x: its lists differ in length"),
        ({}, "x: missing"),
        ([1, 2], "x"),
    ],
)
def test_an_error_names_the_array(app: RunningApp, body: object, said: str) -> None:
    status, text = app.refusal("/scale", body)
    assert (status, said in text) == (400, True), text


def test_rows_of_many_callers_share_calls(app: RunningApp) -> None:
    answers: list[object] = []
    threads = [
        threading.Thread(target=lambda n=n: answers.append((n, app.ask("/lengths", "a" * n))))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(said["length"] == n for n, said in answers)  # type: ignore[index,misc]
    assert max(said["batch"] for _, said in answers) > 1  # type: ignore[index,misc]
    assert app.refusal("/lengths", 5)[0] == 400
    assert app.refusal("/lengths", "bad") == (500, "ValueError: a bad text")


def test_types_with_fields(app: RunningApp) -> None:
    assert app.ask("/v1/search", {"words": list("abcd"), "limit": 2}) == ["a", "b"]
    assert "`$.words[0]`" in app.refusal("/v1/search", {"words": [1]})[1]
    person = {"name": "Ann", "age": 3}
    told = {"person": person, "at": {"x": 1.0, "y": 2.0}, "far": 1.5, "row": [0, 1]}
    assert app.ask("/know", {"person": person, "at": {"x": 1, "y": 2}}) == told
    status, said = app.refusal("/know", {"person": {"name": "Ann", "age": -1}})
    assert status == 400
    assert "age" in said


def test_a_body_without_a_type(app: RunningApp) -> None:
    for body in ([1, {"a": None}], "text", 5, {"body": 1}):
        assert app.ask("/echo", body) == body
    large = {"numbers": list(range(200_000))}
    assert app.ask("/echo", large) == large


def test_answers_that_are_not_json(app: RunningApp) -> None:
    assert app.post("/picture", {}) == (200, "image/gif", b"GIF89a")


def test_what_fails(app: RunningApp) -> None:
    assert app.refusal("/fails", {"how": "kind"}) == (403, "not for you")
    assert app.refusal("/fails", {"how": "other"}) == (500, "ValueError: it broke in secret.py")
    status, said = app.refusal("/fails", {"how": "json"})
    assert (status, "object" in said) == (500, True)
    assert app.refusal("/fails", {"how": "die"})[0] == 503
    assert app.refusal("/fails", {"how": "kind"})[0] == 403  # another worker has come
    assert app.refusal("/nobody", {})[0] == 404
    assert requests.get(f"http://{app.http}/greet", timeout=60).status_code == 405


def test_bodies_beyond_the_limit(app: RunningApp) -> None:
    host, _, port = app.http.partition(":")
    peer = http.client.HTTPConnection(host, int(port), timeout=60)
    peer.putrequest("POST", "/greet")
    peer.putheader("Content-Length", str(1 << 40))
    peer.endheaders()
    assert peer.getresponse().status == 413
    peer.close()


def test_files_in_forms_and_bodies(app: RunningApp) -> None:
    url = f"http://{app.http}/weigh"
    with requests.Session() as session:
        files = [("image", ("a.png", bytes(3_000_000))), ("more", ("b.txt", b"1")), ("more", ("c.txt", b""))]
        reply = session.post(url, files=files, data={"name": "Ann"})
        assert reply.json() == {"bytes": 3_000_000, "files": ["b.txt", "c.txt"], "name": "Ann"}
        reply = session.post(url, data=bytes(5), headers={"Content-Type": "image/png"})
        assert reply.json()["bytes"] == 5
        assert session.post(url, json={"image": "AAAA"}).json()["bytes"] == 3
        reply = session.post(url, files={"name": b"\xff", "image": b""})
        assert (reply.status_code, reply.json()["error"].partition(":")[0]) == (400, "name")


def test_classes(app: RunningApp) -> None:
    assert app.ask("/Doubling", {"value": 4}) == {"value": 10, "device": "cpu"}
    assert app.ask("/Adding", {"x": [1, 2]}) == [11, 12]


def test_generators_as_lines_and_as_events(app: RunningApp) -> None:
    lines = b'{"n":0}\n{"n":1}\n'
    assert app.post("/count", {"to": 2}) == (200, "application/jsonl", lines)
    assert app.post("/ticks", {"to": 2}) == (200, "application/jsonl", b"0\n1\n")
    assert app.post("/count", {"to": 0}) == (200, "application/jsonl", b"")
    status, kind, said = app.post("/count", {"to": 2}, accept="text/event-stream")
    assert (status, kind) == (200, "text/event-stream; charset=utf-8")
    assert said == b'data: {"n":0}\n\ndata: {"n":1}\n\n'


def test_generators_that_fail(app: RunningApp) -> None:
    assert app.refusal("/count", {"to": "x"})[0] == 400
    assert app.refusal("/count", {"to": 5, "fail_at": 0}) == (500, "ValueError: no further")
    said = app.post("/count", {"to": 5, "fail_at": 1})[2]
    assert said == b'{"n":0}\n{"error":"ValueError: no further"}\n'
    said = app.post("/count", {"to": 5, "fail_at": 1}, accept="text/event-stream")[2]
    assert said == b'data: {"n":0}\n\nevent: error\ndata: {"error":"ValueError: no further"}\n\n'


def test_async_functions_run_beside_one_another(app: RunningApp) -> None:
    with requests.Session() as session:
        reply = session.post(f"http://{app.http}/wait", json={"ms": 1})
        assert (reply.status_code, reply.json()) == (200, {"waited": 1.0})
    threads = [threading.Thread(target=app.ask, args=("/wait", {"ms": 1500})) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)  # one after the other they take thirty seconds
    assert not any(thread.is_alive() for thread in threads)


def last_line(answer: tuple[int, str, bytes]) -> object:
    """Return the last line of JSON of an answer in parts."""
    return json.loads(answer[2].splitlines()[-1])


def test_a_generator_that_has_begun_is_bound_by_run_timeout_ms(app: RunningApp) -> None:
    late = {"error": "the model took longer than run_timeout_ms 400"}
    assert last_line(app.post("/linger", {"how": "await"})) == late
    for path, body in (("/linger", {"how": "block"}), ("/stall", {"seconds": 60})):
        said = last_line(app.post(path, body))
        assert "was ended: a batch ran longer than run_timeout_ms 400" in str(said)
    assert last_line(app.post("/linger", {"how": ""})) == ""  # another worker has come
    assert last_line(app.post("/stall", {"seconds": 0.05})) == 2


def test_compressed_bodies(app: RunningApp) -> None:
    asked = {"data": gzip.compress(b'{"name": "Ann"}'), "headers": {"Content-Encoding": "gzip"}}
    with requests.Session() as session:
        reply = session.post(f"http://{app.http}/greet", **asked)  # type: ignore[arg-type]
        assert reply.json() == {"text": "Hello Ann! "}
        reply = session.post(f"http://{app.http}/greet", data=b"x", headers={"Content-Encoding": "br"})
        assert reply.status_code == 400


@pytest.mark.lingers  # grpcio keeps descriptors
def test_the_other_apis_answer_too(app: RunningApp) -> None:
    rows = np.array([[1, 2, 3, 4]], np.float32)
    with triton_http.InferenceServerClient(app.http) as client:
        given = triton_http.InferInput("x", [1, 4], "FP32")
        given.set_data_from_numpy(rows)
        assert client.infer("scale", [given]).as_numpy("output").tolist() == [[3, 6, 9, 12]]
        body = triton_http.InferInput("body", [1], "BYTES")
        body.set_data_from_numpy(np.array([b'{"name": "Ann"}'], object))
        (said,) = client.infer("greet", [body]).as_numpy("body")
        assert json.loads(said) == {"text": "Hello Ann! "}
    with triton_grpc.InferenceServerClient(app.grpc) as rpc:
        given = triton_grpc.InferInput("x", [1, 4], "FP32")
        given.set_data_from_numpy(rows)
        assert rpc.infer("scale", [given]).as_numpy("output").tolist() == [[3, 6, 9, 12]]
    reply = app.ask("/v1/models/scale:predict", {"instances": rows.tolist()})
    assert reply == {"predictions": [[3, 6, 9, 12]]}


def test_the_script_itself_serves_with_several_fronts(tmp_path: Path) -> None:
    text = """
        @fastserve.model
        def greet(name: str):
            return f"Hello {name}"

        if __name__ == "__main__":
            fastserve.serve(http="127.0.0.1:0", grpc="off", drain_delay_s=0)
            print("after")
    """
    command = [sys.executable, str(write_app(tmp_path, text))]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    # A keyword goes before a variable, whose address nobody could have.
    environment |= {"FASTSERVE_FRONTENDS": "2", "FASTSERVE_HTTP": "192.0.2.1:1"}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment)
    assert process.stdout is not None
    with process.stdout:
        address = process.stdout.readline().decode().split("http://")[1].split()[0]
        for _ in range(8):  # each on a connection of its own
            reply = requests.post(f"http://{address}/greet", json={"name": "Ann"}, timeout=60)
            assert (reply.status_code, reply.json()) == (200, "Hello Ann")
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == b"after\n"
    assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "declares no model"),
        ("raise ValueError('oh')", "could not be run"),
        ("import nothing_of_that_name", "could not be run"),
        ("@fastserve.model\ndef f(x, *y): ...", "could not be run"),
        ("@fastserve.model(bacth=3)\ndef f(x): ...", "bacth"),
    ],
)
def test_a_script_that_cannot_be_served_says_so(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "app.py"
    file.write_text(f"import fastserve\n{text}\n")
    done = run_command("run", str(file), "--http", "127.0.0.1:0", "--grpc", "off")
    assert done.returncode == 1
    assert said in done.stderr
