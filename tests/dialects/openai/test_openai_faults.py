"""The streams of OpenAI, TGI, vLLM and Triton over real workers, and what may become of them: the client
always hears, by the class its library has for it, and nothing stays taken.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dialects.text_common.serving import Hosted, Reply
from tests.dialects.text_common.test_faults import Client, held, serve, write_model
from tests.late import Late
from tests.running import until

pytestmark = pytest.mark.waits

openai = Late("openai")
TRITON = "/v2/models/m1/generate_stream"
PATHS = ("/v1/completions", "/v1/chat/completions", "/generate_stream", "/generate", TRITON)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models")
    write_model(place)
    (place / "m1/1/chat_template.jinja").write_text("{{ messages[0].content }}")
    return place


@pytest.fixture(scope="module")
def at(folder: Path) -> Iterator[Hosted]:
    with serve(folder) as at:
        yield at


@pytest.fixture
def client(at: Hosted) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{at.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(
    at: Hosted, path: str, prompt: str, *, stream: bool = True, most: int = 100_000, **more: Any
) -> Reply:
    return at.post(path, body_of(path, prompt, stream, most, **more))


def body_of(path: str, prompt: str, stream: bool, most: int, **more: Any) -> dict[str, Any]:
    if path == "/generate_stream":
        return {"inputs": prompt, "parameters": {"max_new_tokens": most, **more}}
    if path == TRITON:
        return {"text_input": prompt, "parameters": {"max_new_tokens": most, **more}}
    what = {"messages": [{"role": "user", "content": prompt}]} if "chat" in path else {"prompt": prompt}
    return {"model": "m1", **what, "stream": stream, "max_tokens": most, **more}


def last_of(reply: Reply) -> Any:
    """The last event or object of a stream."""
    pieces = [piece for piece in reply.body.replace(b"\0", b"\n\n").split(b"\n\n") if piece]
    return json.loads(pieces[-1].removeprefix(b"data:"))


def works(at: Hosted) -> bool:
    return at.infer("go", max_new_tokens=1).status == 200


@pytest.mark.logs_errors
@pytest.mark.parametrize("path", PATHS)
def test_a_worker_that_dies_midway_is_told_in_the_stream(at: Hosted, path: str) -> None:
    reply = ask(at, path, "die")
    assert reply.status == 200
    assert b"one " in reply.body
    assert b"[DONE]" not in reply.body
    assert last_of(reply)["error"]
    until(lambda: works(at), "there is another worker")


@pytest.mark.logs_errors
def test_libraries_raise_when_a_worker_dies(at: Hosted, client: openai.OpenAI) -> None:
    stream = client.completions.create(model="m1", prompt="die", stream=True, max_tokens=9)
    assert next(stream).choices[0].text == "one "
    with pytest.raises(openai.APIError, match="worker"):
        list(stream)
    until(lambda: works(at), "there is another worker")
    with pytest.raises(openai.InternalServerError) as died:
        client.completions.create(model="m1", prompt="die", max_tokens=9)
    assert died.value.status_code == 503
    until(lambda: works(at), "there is another worker")


@pytest.mark.parametrize("path", PATHS)
def test_a_model_that_raises(at: Hosted, path: str) -> None:
    assert "no words left" in json.dumps(last_of(ask(at, path, "raise"))["error"])


@pytest.mark.parametrize("path", PATHS)
def test_time_that_is_up(at: Hosted, path: str) -> None:
    error = json.dumps(last_of(ask(at, path, "wait", timeout=1))["error"])
    assert "time" in error
    silent = ask(at, path, "silent", timeout=1)
    if path == TRITON:  # a stream of MindIE's is 200 from its beginning
        assert (silent.status, "time" in last_of(silent)["error"]) == (200, True)
    else:
        assert silent.status in (500, 504), "nothing was sent before it: a status, no event"


@pytest.mark.parametrize("path", PATHS)
def test_clients_that_leave_at_any_token(at: Hosted, path: str) -> None:
    for count in range(12):
        client = Client(at)
        body = json.dumps(body_of(path, "go", True, 100_000)).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: t\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        client.socket.sendall(head + body)
        if count:
            client.read_until(b"one " if count == 1 else b"more ")
        client.leave()
    at.settle()


def test_a_full_queue(at: Hosted) -> None:
    """Two run, two wait; for another there is no room."""
    holding = [Client(at) for _ in range(4)]
    for each in holding:
        each.send("wait")
    until(lambda: held(at) == 4, "two run and two wait")
    refused = ask(at, "/v1/completions", "go", most=1)
    assert (refused.status, refused.json["error"]["type"]) == (503, "server_error")
    assert int(refused.headers["retry-after"]) >= 1
    overloaded = ask(at, "/generate_stream", "go", most=1)
    assert (overloaded.status, overloaded.json["error_type"]) == (429, "overloaded")
    for each in holding:
        each.leave()
    at.settle()
    assert ask(at, "/v1/completions", "go", most=1).status == 200
