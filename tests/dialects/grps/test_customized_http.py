"""A predict path of the deployment's own: its code reads the HTTP request, and writes the reply or fails."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dialects.grps import deployments
from tests.dialects.grps.rig import JSON, Deployed, Reply, deployed, settings_of
from tests.running import until

CUSTOM = {"path": "/custom", "customized_body": True}


def serve(tmp_path_factory: pytest.TempPathFactory, *, with_flask: bool) -> Iterator[Deployed]:
    folder = deployments.write(tmp_path_factory.mktemp("custom") / "d", custom=CUSTOM)
    if not with_flask:
        (folder / "src" / "flask.py").write_text("raise ImportError('not here')\n")
    with deployed(settings_of(folder)) as opened:
        yield opened


@pytest.fixture(scope="module", params=["flask's", "our own"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    """Whichever request object there is, projects find the members they use."""
    if request.param == "flask's":
        pytest.importorskip("flask")
    yield from serve(tmp_path_factory, with_flask=request.param == "flask's")


@pytest.fixture(scope="module")
def flask_served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    pytest.importorskip("flask")
    yield from serve(tmp_path_factory, with_flask=True)


def post(served: Deployed, body: str, query: str = "", kind: str = "text/plain") -> Reply:
    return served.ask("POST", "/custom" + query, body.encode(), {"Content-Type": kind})


def test_the_model_reads_and_writes(served: Deployed) -> None:
    reply = post(served, "hello")
    assert (reply.status, reply.body, reply.headers["content-type"]) == (
        200,
        b"hello",
        "application/octet-stream",
    )
    assert post(served, "tag").body == b"A"
    reply = post(served, "tag", "?model=echo-2.0.0")
    assert (reply.body, reply.headers["content-type"]) == (b"B", "text/plain; charset=utf-8")
    reply = post(served, "tuple")
    assert (reply.status, reply.body, reply.headers["content-type"]) == (201, b"made", "text/css")
    assert reply.headers["x-own"] == "yes"
    assert post(served, '{"x": 5}', "?json=1", "application/json").body == b"5"
    assert served.ask("GET", "/custom").body == b""


def test_code_that_fails(served: Deployed) -> None:
    assert (post(served, "nothing").status, post(served, "nothing").body) == (200, b"")
    reply = post(served, "raise")
    assert (reply.status, reply.body, reply.headers["content-type"]) == (
        500,
        b"RuntimeError: boom",
        "text/plain",
    )
    assert post(served, "err").body == b"mymsg"
    assert post(served, "nonsense").body.startswith(b"ValueError: http_response should be str, bytes")
    assert post(served, "x", "?model=nope-1").body == b"Model nope-1 not found."
    reply = post(served, "smuggle")
    assert reply.status == 500
    assert "set-cookie" not in reply.headers
    assert post(served, "hello").status == 200


def test_a_response_of_flasks(flask_served: Deployed) -> None:
    reply = post(flask_served, "response")
    assert (reply.status, reply.body, reply.headers["x-own"]) == (404, b"not found here", "yes")
    assert reply.headers["content-type"] == "text/css; charset=utf-8"
    client = flask_served.connect()
    client.request("POST", "/custom", b"response")
    answer = client.getresponse()
    assert answer.read() == b"not found here"
    cookies = [value for name, value in answer.getheaders() if name.lower() == "set-cookie"]
    assert cookies == ["a=1; Path=/", "b=2; Path=/"]
    client.close()
    reply = post(flask_served, "streamed")
    assert (reply.status, reply.body, reply.headers["content-type"]) == (200, b"ab", "text/x-parts")


def test_members_of_a_request(served: Deployed) -> None:
    headers = {"Content-Type": "text/x-own; charset=x", "X-OWN": "a b"}
    reply = served.ask("POST", "/custom?q=1&q=%C3%A4", b"members", headers)
    told = ("POST", "/custom", ["1", "\u00e4"], "a b", "text/x-own", 7, False)
    assert reply.body.decode() == repr(told)
    reply = post(served, "x=1&y=%20&x=2", "", "application/x-www-form-urlencoded")
    assert reply.body == repr({"x": "1", "y": " "}).encode()


NONSENSE = ["object()", "None", "5", "('x',)", "('x', 'y', {})", "('x', 99999, {})", "('x', -1, {})"]
NONSENSE += ["('x', True, {})", "('x', 200, {1: 2})", "('x', 200, {'a': None})", "('x', 200, ['a'])"]
NONSENSE += ["(5, 200, {})", "('x', 200, {'': 'b'})", "('x', 100, {})", "('\\ud800', 200, {})"]
NONSENSE += ["('x', 204, {'Transfer-Encoding': 'chunked'})"]


@pytest.mark.parametrize("odd", NONSENSE)
def test_responses_that_are_none(served: Deployed, odd: str) -> None:
    """An error in words, or what HTTP makes of it; and the connection is as good as before."""
    client = served.connect()
    for query in ("", "?streaming=true"):
        client.request("POST", "/custom" + query, f"odd:{odd}".encode(), {"Content-Type": "text/plain"})
        reply = client.getresponse()
        body = reply.read()
        assert b"Traceback" not in body
        assert reply.status in (200, 204, 500), (odd, reply.status, body)
        assert body or reply.status != 500
        client.request("POST", "/custom", b"hello", {"Content-Type": "text/plain"})
        assert client.getresponse().read() == b"hello"
    client.close()


def test_who_leaves_a_stream_of_the_deployments_own(served: Deployed, tmp_path: Path) -> None:
    seen = tmp_path / "gone"
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as client:
        body = f"gone:{seen}".encode()
        head = f"POST /custom?streaming=true HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        told = b""
        while b"begun;" not in told:
            told += client.recv(4096)
    until(seen.exists, "the model saw it leave")
    served.settle()
    assert post(served, "hello").body == b"hello"


def test_streams_are_bare(served: Deployed) -> None:
    reply = post(served, "s", "?streaming=true")
    assert (reply.body, reply.headers["transfer-encoding"]) == (b"s-0;s-1;s-2;", "chunked")
    assert post(served, "serr", "?streaming=true").body == b"serr-0;serr-1;serr-2;ValueError: midstream"


def test_the_built_in_path_is_there_too(served: Deployed) -> None:
    assert served.predict({"str_data": "x"}).json["str_data"] == "x"
    assert served.ask("PUT", "/custom", b"x").status == 405


def test_code_that_hangs_holds_nobody_else(served: Deployed) -> None:
    from concurrent.futures import ThreadPoolExecutor

    client = served.connect()
    client.request("POST", "/grps/v1/infer/predict", b'{"str_data":"hold:/nowhere/at/all"}', JSON)
    with ThreadPoolExecutor(4) as pool:
        assert {reply.body for reply in pool.map(lambda _: post(served, "hello"), range(20))} == {b"hello"}
    client.close()  # if_disconnected ends it
    served.settle()


def test_code_of_its_own_that_hangs_holds_nobody_else(served: Deployed, tmp_path: Path) -> None:
    """Nor does the flag that goes away meanwhile; who has the patience gets its answer."""
    from concurrent.futures import ThreadPoolExecutor

    go, leaver = tmp_path / "go", served.connect()
    leaver.request("POST", "/custom", b"hold:/nowhere/at/all")
    with ThreadPoolExecutor(4) as pool:
        held = pool.submit(post, served, f"hold:{go}")
        assert served.ask("GET", "/grps/v1/health/offline").status == 200
        assert {reply.body for reply in pool.map(lambda _: post(served, "hello"), range(20))} == {b"hello"}
        assert not held.done()
        go.touch()
        assert held.result().body == f"hold:{go}".encode()
    leaver.close()
    served.settle()


def test_a_time_limit(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = deployments.write(tmp_path_factory.mktemp("limit") / "d")
    with deployed(settings_of(folder, timeout_ms=100)) as served:
        reply = served.predict({"str_data": "hold:/nowhere/at/all"})
        assert (reply.status, reply.code) == (504, 504)
        assert served.call("Predict", str_data="hold:/nowhere/at/all").status.code == 504
        assert served.predict({"str_data": "x"}).status == 200
