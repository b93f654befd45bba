"""`Client` and `AsyncClient` against a running server, over HTTP, over HTTP with JSON, and over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastserve import AsyncClient, Client
from fastserve.client.http import send_pieces
from fastserve.errors import Kind, ServeError
from tests.app.apps import ColdApp, write_app
from tests.certificates import issue, root_file
from tests.running import QUICK_DEMO, Running

APP = """
    import numpy as np
    from fastserve.errors import Kind, ServeError


    @fastserve.model
    def greet(name: str, times: int = 1) -> dict:
        return {"text": f"Hello {name}! " * times}


    @fastserve.model
    def whole(point: dict) -> dict:
        return point


    @fastserve.model(batch=64)
    def scale(x: fastserve.Array["float32", 4]) -> fastserve.Array["float32", 4]:
        return x * 3


    @fastserve.model(batch=8)
    def several(
        numbers: fastserve.Array["int64", -1], texts: fastserve.Array["str"]
    ) -> {"sums": fastserve.Array["int64"], "upper": fastserve.Array["str"]}:
        return {"sums": numbers.sum(axis=1), "upper": np.array([text.upper() for text in texts], object)}


    @fastserve.model(path="/of/its/own")
    def countdown(start: int):
        for left in range(start, 0, -1):
            yield {"left": left}
        if start == 3:
            raise ServeError(Kind.NOT_FOUND, "three is too many")


    @fastserve.model
    def turned(image: bytes):
        return fastserve.Response(image[::-1], "image/png")


    @fastserve.model
    def missing():
        raise ServeError(Kind.NOT_FOUND, "no such word")


    @fastserve.model(name="odd name/1")
    def odd() -> str:
        return "odd"


    fastserve.serve()
"""
WAYS = ("http", "json", "grpc")


@dataclass
class Point:
    """A body of one function."""

    x: int
    y: list[float]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("client")
    with ColdApp(write_app(folder, APP.replace("odd name/1", "odd-name.1")), folder / "log") as running:
        yield running


def options_of(server: Running, way: str) -> dict[str, Any]:
    if way == "grpc":
        return {"url": f"grpc://{server.grpc}"}
    return {"url": f"http://{server.http}", "binary": way == "http"}


@pytest.fixture(params=WAYS)
def client(server: Running, request: pytest.FixtureRequest) -> Iterator[Client]:
    with Client(**options_of(server, request.param)) as made:
        yield made


def refusal(call: Callable[[], Any]) -> tuple[Kind, str]:
    with pytest.raises(ServeError) as caught:
        call()
    return caught.value.kind, caught.value.message


def test_functions_of_json_take_keywords_or_a_whole_body(client: Client) -> None:
    assert client.greet(name="Ann", times=2) == {"text": "Hello Ann! Hello Ann! "}
    assert client.greet({"name": "Bo"}) == {"text": "Hello Bo! "}
    assert client.whole(Point(1, [0.5])) == {"x": 1, "y": [0.5]}
    assert client.whole(x=np.arange(3), y=np.float32(0.5)) == {"x": [0, 1, 2], "y": 0.5}
    assert client.model("odd-name.1")() == "odd"
    with pytest.raises(TypeError, match="by name"):
        client.greet("Ann", 2)


def test_arrays_are_numpy_in_and_out(client: Client) -> None:
    rows = np.arange(8, dtype=np.float32).reshape(2, 4)
    found = client.scale(rows)
    assert found.dtype == np.float32
    assert found.tolist() == (rows * 3).tolist()
    found += 1  # the caller's own
    assert client.scale([1, 2, 3, 4]).tolist() == [3, 6, 9, 12]  # a row without the axis of rows
    assert client.scale(x=rows.astype(np.float64)[:, ::-1]).tolist() == (rows[:, ::-1] * 3).tolist()
    assert client.model("scale", 1)(rows).shape == (2, 4)


def test_several_outputs_are_a_dict_and_strings_are_bytes(client: Client) -> None:
    found = client.several([[1, 2], [3, 4]], ["a", "h\u00e9"])
    assert found["sums"].tolist() == [3, 7]
    assert found["upper"].tolist() == [b"A", "h\u00e9".encode().upper()]
    assert client.several(numbers=[1, 2, 3], texts="a") == {"sums": 6, "upper": b"A"}


def test_streams_come_part_by_part_and_calls_collect_them(client: Client) -> None:
    assert list(client.countdown.stream(start=2)) == [{"left": 2}, {"left": 1}]
    assert client.countdown(start=2) == [{"left": 2}, {"left": 1}]
    parts, failing = [], client.countdown.stream(start=3)
    with pytest.raises(ServeError, match="three is too many"):
        parts.extend(failing)
    left_early = client.countdown.stream(start=1000)
    assert next(left_early) == {"left": 1000}
    left_early.close()
    assert client.greet(name="Ann")["text"] == "Hello Ann! "


def test_bytes_of_a_media_type_come_as_bytes(server: Running) -> None:
    for way in ("http", "grpc"):
        with Client(**options_of(server, way)) as client:
            assert client.turned(image=b"\x00\xffabc") == b"cba\xff\x00"


def test_errors_have_their_kind_and_text(client: Client) -> None:
    assert refusal(lambda: client.greet(nam="Ann"))[0] is Kind.INVALID_ARGUMENT
    kind, text = refusal(lambda: client.missing())
    assert (kind, "no such word" in text) == (Kind.NOT_FOUND, True)
    assert refusal(lambda: client.nobody(1))[0] is Kind.NOT_FOUND
    kind, text = refusal(lambda: client.scale([1.0]))
    assert kind is Kind.INVALID_ARGUMENT
    assert "'x'" in text
    for wrong in (["a"], [1j], object()):
        with pytest.raises(TypeError, match="x: given"):
            client.scale(wrong)
    with pytest.raises(TypeError, match="numbers: given float64"):
        client.several([1.5], "a")
    with pytest.raises(TypeError, match="has the inputs x"):
        client.scale([1], y=1)
    assert refusal(lambda: list(client.countdown.stream(start="x")))[1].startswith("the body does not fit")


def test_a_client_says_what_the_server_has(client: Client) -> None:
    assert client.ready()
    assert client.models() == [
        "countdown", "greet", "missing", "odd-name.1", "scale", "several", "turned", "whole",
    ]  # fmt: skip
    described = client.scale.describe()
    assert [(one.name, one.datatype, one.shape) for one in described.inputs] == [("x", "FP32", (-1, 4))]


def test_threads_share_a_client(client: Client) -> None:
    def ask(number: int) -> list[float]:
        found: list[float] = client.scale([number] * 4).tolist()
        return found

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(64))) == [[3.0 * number] * 4 for number in range(64)]


@pytest.mark.parametrize("way", WAYS)
def test_the_awaited_client_does_the_same(server: Running, way: str) -> None:
    async def ask() -> None:
        async with AsyncClient(**options_of(server, way)) as client:
            assert await client.ready()
            assert "scale" in await client.models()
            assert await client.greet(name="Ann") == {"text": "Hello Ann! "}
            found = await asyncio.gather(*(client.scale([number] * 4) for number in range(32)))
            assert [one.tolist() for one in found] == [[3.0 * number] * 4 for number in range(32)]
            assert [part async for part in client.countdown.stream(start=2)] == [{"left": 2}, {"left": 1}]
            assert await client.countdown(start=1) == [{"left": 1}]
            assert (await client.scale.describe()).outputs[0].shape == (-1, 4)
            with pytest.raises(ServeError) as caught:
                await client.missing()
            assert caught.value.kind is Kind.NOT_FOUND
            calls = [asyncio.ensure_future(client.greet(name="Ann")) for _ in range(8)]
            calls[0].cancel()
            rest = await asyncio.gather(*calls, return_exceptions=True)
            assert rest[1:] == [{"text": "Hello Ann! "}] * 7

    asyncio.run(ask())


def test_a_certificate_is_held_against_its_authority(tmp_path: Path) -> None:
    mine, root = issue(tmp_path), root_file(tmp_path)
    flags = (*QUICK_DEMO, "--tls-cert", mine.cert, "--tls-key", mine.key)
    with Running(Path("demo"), tmp_path / "log", *flags) as running:
        for url in (f"https://{running.http}", f"grpcs://{running.grpc}"):
            with Client(url, cacert=str(root)) as client:
                assert client.half_plus_two([1, 2, 5]).tolist() == [2.5, 3, 4.5]

        async def ask() -> list[float]:
            async with AsyncClient(f"https://{running.http}", cacert=str(root)) as client:
                found: list[float] = (await client.half_plus_two([1, 2, 5])).tolist()
                return found

        assert asyncio.run(ask()) == [2.5, 3, 4.5]
        with Client(f"https://{running.http}") as client:
            kind, text = refusal(lambda: client.half_plus_two([1]))
            assert (kind, "certificate" in text) == (Kind.UNAVAILABLE, True)


def test_headers_go_with_every_call(tmp_path: Path) -> None:
    flags = (
        *QUICK_DEMO, "--http-restricted-api", "inference:word=secret",
        "--grpc-restricted-protocol", "inference:word=secret",
    )  # fmt: skip
    with Running(Path("demo"), tmp_path / "log", *flags) as running:
        ways = ((f"http://{running.http}", "word"), (f"grpc://{running.grpc}", "triton-grpc-protocol-word"))
        for url, header in ways:
            with Client(url) as stranger, Client(url, headers={header: "secret"}) as client:
                refusal(lambda client=stranger: client.half_plus_two([1]))
                assert client.half_plus_two([2]).tolist() == [3]


def test_a_model_that_changed_is_described_anew(tmp_path: Path) -> None:
    first = write_app(tmp_path, 'import numpy\n@fastserve.model\ndef f(x: fastserve.Array["float32", 2]) -> '
                      'fastserve.Array["float32", 2]:\n    return x\n\nfastserve.serve()\n')  # fmt: skip
    with ColdApp(first, tmp_path / "log") as running, Client(f"http://{running.http}") as client:
        assert client.f([1, 2]).tolist() == [1, 2]
        known = client._known["f", ""]
        refusal(lambda: client.f([1, 2, 3]))
        assert ("f", "") not in client._known
        assert client.f([1, 2]).tolist() == [1, 2]
        assert client._known["f", ""] == known


@contextlib.contextmanager
def answering(*answers: bytes) -> Iterator[str]:
    """A server that takes a request on each connection, sends an answer, and closes the connection."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for answer in answers:
            with listening.accept()[0] as one:
                text = b""
                while b"\r\n\r\n" not in text:
                    text += one.recv(65536)
                one.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        thread.join()
        listening.close()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def test_a_connection_that_the_server_closed_is_replaced() -> None:
    answer = HEAD + b"Content-Length: 2\r\n\r\n[]"
    with answering(answer, answer) as url, Client(url) as client:
        assert client.models() == []
        (kept,) = client._transport._idle
        kept.settimeout(30)
        assert kept.recv(1, socket.MSG_PEEK) == b""  # its end has come
        assert client.models() == []


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (HEAD + b"Content-Length: 20\r\n\r\n{", Kind.UNAVAILABLE),
        (b"", Kind.UNAVAILABLE),
        (b"SSH-2.0\r\n", Kind.INTERNAL),
        (HEAD + b"Content-Length: 1\r\n\r\n{", Kind.INTERNAL),
        (b"HTTP/1.1 503 No\r\nRetry-After: 2\r\nContent-Length: 0\r\n\r\n", Kind.UNAVAILABLE),
    ],
)
def test_a_broken_answer_is_an_error(answer: bytes, kind: Kind) -> None:
    with answering(answer) as url, Client(url) as client:
        assert refusal(client.models)[0] is kind

    async def ask(url: str) -> None:
        async with AsyncClient(url) as client:
            await client.models()

    with answering(answer) as url, pytest.raises(ServeError) as caught:
        asyncio.run(ask(url))
    assert caught.value.kind is kind
    if b"Retry-After" in answer:
        assert caught.value.retry_after_s == 2


def test_a_server_that_does_not_answer_is_told_within_the_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with Client(url, timeout_s=0.05) as client:
            assert refusal(client.models)[0] is Kind.DEADLINE_EXCEEDED

        async def ask() -> None:
            async with AsyncClient(url, timeout_s=0.05) as client:
                await client.models()

        with pytest.raises(ServeError, match=r"did not answer within 0.05 s"):
            asyncio.run(ask())
    with Client(url) as client:
        assert not client.ready()
        assert "Connection refused" in refusal(client.models)[1]


@pytest.mark.parametrize(
    ("url", "options"),
    [("ftp://a", {}), ("127.0.0.1:8000", {}), ("http://a/path", {}), ("http://a", {"timeout_s": 0})],
)
def test_what_cannot_be_asked_is_refused(url: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"allowed|more than 0"):
        Client(url, **options)
    client = Client("http://127.0.0.1:1", headers={"a": "b\r\nc: d"})
    with pytest.raises(ValueError, match="header 'a'"):
        client.models()


@pytest.mark.parametrize(
    "pieces", [[b"head"], [b"head", b"", memoryview(bytes(range(256)) * 2000)], [b"x"] * 3000]
)
def test_pieces_arrive_whole_however_slowly_they_are_read(pieces: list[bytes | memoryview]) -> None:
    """More of them than one system call takes, and a piece that is larger than the socket's buffer."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    wanted, found = b"".join(pieces), bytearray()

    def read() -> None:
        theirs.settimeout(60)
        while len(found) < len(wanted):
            found.extend(theirs.recv(1000))

    with ours, theirs:
        reader = threading.Thread(target=read)
        reader.start()
        send_pieces(ours, pieces, time.monotonic() + 60)
        reader.join(60)
    assert bytes(found) == wanted


def test_pieces_that_nobody_reads_end_in_time() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(TimeoutError):
        send_pieces(ours, [bytes(1 << 22)], time.monotonic() + 0.05)
