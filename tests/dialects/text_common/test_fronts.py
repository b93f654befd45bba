"""Several front processes, and HTTP/2: the same answers, and requests that are stopped from any of them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.dialects.mindie.test_infer import LAST, timeless
from tests.dialects.text_common.serving import Asking, Reply, hosted
from tests.running import until

STREAM, STOP = "/v2/models/m1/generate_stream", "/v2/models/m1/stopInfer"


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asking]:
    with hosted("llm-seed1", tmp_path_factory.mktemp("rig"), frontends=3) as served:
        yield served


def test_every_front_gives_the_same_answer(at: Asking) -> None:
    bodies = {timeless(at.infer(stream=True, seed=846930886, details=True).body) for _ in range(12)}
    assert len(bodies) == 1
    assert bodies.pop().endswith(LAST)


def test_a_request_is_stopped_from_any_front(tmp_path: Path) -> None:
    with hosted("llm-slow", tmp_path, frontends=3) as at, ThreadPoolExecutor(8) as pool:
        replies: dict[str, Future[Reply]] = {}
        for number in range(6):
            name = f"request-{number}"
            replies[name] = pool.submit(at.post, STREAM, {"id": name, "text_input": "hi"})
        until(lambda: held(at) == 6, "one runs and five wait")
        for name in replies:
            assert at.post(STOP, {"id": name}).status == 200, name
        assert {reply.result().status for reply in replies.values()} == {200}
        assert at.post(STOP, {"id": "request-0"}).status == 404


def held(at: Asking) -> int:
    server = at.server  # type: ignore[attr-defined]
    return sum(one.queue.ring.outstanding() for one in server.host.hosted.values())


def test_events_over_http2(at: Asking) -> None:
    command = ["curl", "-sN", "--http2-prior-knowledge", "-m", "20", f"http://127.0.0.1:{at.port}/infer"]
    body = '{"inputs": "hi", "stream": true, "parameters": {"seed": 846930886, "details": true}}'
    done = subprocess.run([*command, "-d", body], capture_output=True, timeout=120, check=True)
    assert timeless(done.stdout).endswith(LAST)
    assert done.stdout.count(b"data: ") == 20


def test_beside_the_other_apis(tmp_path: Path) -> None:
    """On a listener of everything, what two APIs have is the other one's, and the rest is there."""
    with hosted("llm-limits", tmp_path, dialects=()) as at:
        assert at.infer("a").json == {"generated_text": "xxxxxx"}
        assert at.post("/v1/tokenizer", {"inputs": "a b"}).json["token_number"] == 2
        assert at.ask("GET", "/v1/config").json["modelName"] == "m1"
        assert at.ask("GET", "/v2/models/m1/getSlotCount").status == 200
        assert at.post(STOP, {"id": "x"}).json["error_type"] == "NotFoundError"
        assert at.ask("GET", "/v2").json["name"] != "MindIE Server"  # V2's
        generated = at.post("/v2/models/m1/generate", {"text_input": "a"}).json
        assert (generated["text_output"], "model_version" in generated) == ("axxxxxx", True)  # as vLLM there
        assert at.ask("GET", "/health").body == b""
        assert b"fastserve_ready" in at.ask("GET", "/metrics").body
        status = at.ask("GET", "/v1/models/m1").json  # TensorFlow Serving's, with OpenAI's keys
        assert "model_version_status" in status
        assert status["id"] == "m1"
        assert at.post("/v1/models/m1:predict", {"instances": [1]}).status in (400, 501)
