"""Costs of a body of megabytes, of every shape and on every route that takes text: it is refused or skipped
in little time and memory. A model of 1,023 tokens with a tokenizer serves, in the process of the test."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

from fastserve.codec.generation import Info
from fastserve.settings import TextgenOptions
from tests.dialects.text_common.rigs import HELLO
from tests.dialects.text_common.serving import Local, Reply
from tests.proc import resident
from tests.text_rig import Scripted

SCRIBE = Path(__file__).parents[3] / "fastserve/demo/scribe/1"
SIZE = 2_000_000
SIZES = pytest.mark.parametrize("size", [SIZE, pytest.param(4 * SIZE, marks=pytest.mark.torture)])
MOST_CPU_S = 1
ROUTES: dict[str, bytes] = {
    "/v1/completions": b'{"model":"m1","max_tokens":1,"prompt":%b}',
    "/v1/chat/completions": b'{"model":"m1","max_tokens":1,"messages":[{"role":"user","content":%b}]}',
    "/v1/embeddings": b'{"model":"m1","input":%b}',
    "/infer": b'{"inputs":%b,"parameters":{"max_new_tokens":1}}',
    "/infer_token": b'{"input_id":%b,"parameters":{"max_new_tokens":1}}',
    "/v1/tokenizer": b'{"inputs":%b}',
    "/generate": b'{"inputs":%b,"parameters":{"max_new_tokens":1}}',
    "/generate_stream": b'{"inputs":%b}',
    "/": b'{"inputs":%b}',
    "/tokenize": b'{"inputs":%b}',
    "/v2/models/m1/generate": b'{"text_input":%b}',
    "/v2/models/m1/infer": b'{"inputs":[{"name":"a","shape":[1,2],"datatype":"UINT32","data":%b}]}',
}


def filled(piece: bytes, size: int) -> bytes:
    return b"[" + piece * (size // len(piece)) + b"1]"


@lru_cache(maxsize=4)
def shapes(size: int) -> dict[str, bytes]:
    """Values of about so many bytes."""
    return {
        "text": b'"' + b"So it goes. " * (size // 12) + b'"',
        "spaces": b'"' + b" " * size + b'"',
        "odd text": json.dumps("\u4e2d\U0001f600" * (size // 18)).encode(),
        "numbers": filled(b"17,", size),
        "floats": filled(b"1.5,", size),
        "strings": filled(b'"a",', size),
        "lists": filled(b"[7],", size),
        "empty lists": filled(b"[],", size),
        "objects": filled(b"{},", size),
        "parts": filled(b'{"type":"text","text":"a"},', size),
        "keys": b"{" + b",".join(b'"%d":1' % number for number in range(size // 12)) + b"}",
        "long key": b'{"' + b"k" * size + b'":1}',
        "deep": b"[" * (size // 2) + b"]" * (size // 2),
        "long number": b"1" * size,
    }


BESIDE = (
    *(
        "logit_bias",
        "chat_template_kwargs",
        "tool_choice",
        "tools",
        "stop",
        "stop_token_ids",
        "response_format",
    ),
    *("unknown", "parameters", "stream_options", "metadata"),
)


class Watch(threading.Thread):
    """How long the loop of a server is held at most."""

    def __init__(self, at: Local) -> None:
        super().__init__(daemon=True)
        self.at, self.longest, self._over = at, 0.0, threading.Event()

    def run(self) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            self.at.run(_nothing())
            self.longest = max(self.longest, time.monotonic() - began)
            time.sleep(0.001)

    def stop(self) -> float:
        self._over.set()
        self.join()
        return self.longest


async def _nothing() -> None:
    """A turn of the loop."""


@pytest.fixture(scope="module")
def at() -> Iterator[Local]:
    info = Info(vocab_size=1 << 20, max_tokens=1024, max_prompt_tokens=1023, embeds=2)
    with Local({"m1": Scripted(HELLO, eos={2}, info=info)}, TextgenOptions(), folder=SCRIBE) as opened:
        opened.infer("a")  # the tokenizer is there
        yield opened


def cost(at: Local, path: str, body: bytes) -> tuple[Reply, float, int]:
    """Its reply, the CPU it took, and by how much the process is larger at the end."""
    before, began = resident(), time.process_time()
    reply = at.post(path, body)
    return reply, time.process_time() - began, resident() - before


@SIZES
@pytest.mark.parametrize("shape", shapes(100))
@pytest.mark.parametrize("path", ROUTES)
def test_body_costs_of_prompts(at: Local, path: str, shape: str, size: int) -> None:
    body = ROUTES[path] % shapes(size)[shape]
    reply, cpu_s, grown = cost(at, path, body)
    assert 400 <= reply.status < 500, reply
    assert len(reply.body) < 20000
    assert cpu_s < MOST_CPU_S
    assert grown < 10 * len(body) + (20 << 20)


@SIZES
@pytest.mark.parametrize("key", BESIDE)
def test_body_costs_of_what_stands_beside_the_prompt(at: Local, key: str, size: int) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/infer", "/generate"):
        good = ROUTES[path] % (b"[1]" if path == "/infer_token" else b'"a"')
        for name, value in shapes(size // 2).items():
            body = good[:-1] + b',"%b":%b}' % (key.encode(), value)
            reply, cpu_s, grown = cost(at, path, body)
            assert reply.status in (200, 400, 413, 422), (path, name, reply)
            assert cpu_s < MOST_CPU_S, (path, name)
            assert grown < 10 * len(body) + (20 << 20), (path, name)


def test_body_costs_hold_the_loop_shortly(at: Local) -> None:
    watch = Watch(at)
    watch.start()
    for path, form in ROUTES.items():
        for value in shapes(SIZE // 2).values():
            at.post(path, form % value)
    longest = watch.stop()
    assert longest < 1  # 0.05 s, with bodies four times as large, on a machine that does nothing else


def test_body_costs_of_texts_that_are_tokenized(at: Local) -> None:
    """The longest text that may be, and one character more."""
    most = at.run(_characters(at))
    for path in ("/v1/completions", "/infer", "/v1/tokenizer", "/generate", "/tokenize"):
        reply, cpu_s, grown = cost(at, path, ROUTES[path] % json.dumps("\u4e2d" * most).encode())
        assert (reply.status >= 400, cpu_s < 1, grown < 40 << 20) == (True, True, True), (path, cpu_s, grown)
        assert "tokens" in reply.body.decode() or "length" in reply.body.decode()


async def _characters(at: Local) -> int:
    return at.dialect._service.texts.find("m1").most_characters


def test_body_costs_leave_what_may_be_cut(at: Local) -> None:
    """A text that is cut to its last tokens may be longer than the model takes."""
    text = "So it goes. " * 20_000
    whole = at.post("/generate", {"inputs": text, "parameters": {"max_new_tokens": 1}})
    assert whole.status == 422
    cut = at.post("/generate", {"inputs": text, "parameters": {"max_new_tokens": 1, "truncate": 9}})
    assert cut.status == 200
    assert cut.headers["x-prompt-tokens"] == "9"
    few = at.post("/generate", {"inputs": text[-1200:], "parameters": {"max_new_tokens": 1, "truncate": 9}})
    assert few.headers["x-prompt-tokens"] == "9"
