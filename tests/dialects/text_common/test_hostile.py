"""Bodies that nobody means well: each is read or refused in words, in time, and the next one is served."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fastserve.codec.generation import Info
from fastserve.dialects.mindie.generation import read_text, read_tokens
from fastserve.dialects.text_common.endpoint_parts import read_json
from fastserve.dialects.text_common.mindie import MindieRequest, make_rules, read_infer
from fastserve.errors import Kind, ServeError
from fastserve.serving.text.models import MOST_STOP_CHARACTERS
from fastserve.settings import TextgenOptions
from tests.dialects.text_common.rigs import RIGS
from tests.dialects.text_common.serving import Local, local
from tests.proc import resident
from tests.text_rig import Scripted

OPTIONS = TextgenOptions()
RULES = make_rules(OPTIONS)
GOOD: dict[str, Any] = {
    "id": "a1",
    "inputs": "My name is Olivier and I",
    "text_input": "hé",
    "stream": False,
    "parameters": {
        "temperature": 0.5, "top_k": 10, "top_p": 0.95, "max_new_tokens": 20, "do_sample": True, "seed": None,
        "repetition_penalty": 1.03, "details": True, "typical_p": 0.5, "watermark": False, "priority": 5,
        "timeout": 10, "batch_size": 1, "perf_stat": False,
    },
}  # fmt: skip
TOKENS = {"inputs": [{"name": "i", "shape": [1, 3], "datatype": "UINT32", "data": [1, 2, 3]}]}
ITEMS = {"inputs": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]}
READERS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "infer": (GOOD, lambda body: read_infer(body, RULES, OPTIONS)),
    "items": ({**GOOD, **ITEMS}, lambda body: read_infer(body, RULES, OPTIONS)),
    "input_id": ({"input_id": [1, 2], "parameters": {}}, lambda body: read_infer(body, RULES, OPTIONS)),
    "text": (GOOD, lambda body: read_text(body, OPTIONS, stream=True)),
    "tokens": ({**GOOD, **TOKENS}, lambda body: read_tokens(body, OPTIONS)),
}
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 1.5, -0.0, 1e308, -1e308, 5e-324, 2**31, 2**63, 2**64, -(2**63) - 1, 10**500,
    "", "x", "\x00", "\ud800".encode("utf-8", "surrogatepass").decode("utf-8", "replace"), [], {}, [[]], [{}],
    {"url": None}, {"type": 1}, [None] * 3, [1, "a"], {"text": []},
]  # fmt: skip


WELL = (Kind.INVALID_ARGUMENT, True)


def outcome(read: Callable[[Any], Any], body: bytes) -> str:
    """Return the request or the words for its client that a body comes to; anything but a request or words
    for its client is a fault of the reader's."""
    try:
        found = read(read_json(body, OPTIONS.json_depth))
    except ServeError as fault:
        return "refused" if (fault.kind, fault.message.isprintable()) == WELL else fault.message
    assert isinstance(found, MindieRequest)
    return "read"


@pytest.mark.parametrize("name", READERS)
def test_ten_thousand_bodies_with_bytes_changed(name: str) -> None:
    draw, (document, read) = random.Random(5), READERS[name]
    good = json.dumps(document, ensure_ascii=False).encode()
    assert outcome(read, good) == "read"
    found = set()
    for _ in range(2000):
        changed = bytearray(good)
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(changed))
            changed[at : at + draw.randrange(3)] = draw.randbytes(draw.randrange(3))
        found.add(outcome(read, bytes(changed)))
    assert found == {"read", "refused"}


@pytest.mark.parametrize("name", READERS)
def test_every_value_of_a_body_replaced_by_every_odd_one(name: str) -> None:
    document, read = READERS[name]
    for path in places(document):
        for odd in ODD:
            body = json.dumps(replaced(document, path, odd)).encode()
            assert outcome(read, body) in ("read", "refused"), body


def places(value: Any) -> list[tuple[Any, ...]]:
    """The paths of all values within."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [(), *((key, *path) for key, one in inner for path in places(one))]


def replaced(value: Any, path: tuple[Any, ...], odd: Any) -> Any:
    if not path:
        return odd
    copied = value.copy()
    copied[path[0]] = replaced(value[path[0]], path[1:], odd)
    return copied


def is_deeper(value: Any, most: int) -> bool:
    try:
        read_json(json.dumps(value).encode(), most)
    except ServeError:
        return True
    return False


def test_depth_is_that_of_the_deepest() -> None:
    for depth in range(6):
        value: Any = 1
        for i in range(depth):
            value = [0, value] if i % 2 else {"a": value, "b": 2}
        assert [is_deeper(value, most) for most in range(6)] == [most < depth for most in range(6)]


@pytest.fixture(scope="module")
def at() -> Iterator[Local]:
    with local(RIGS["llm-limits"].engine()) as opened:
        yield opened


HOSTILE: dict[str, bytes] = {
    "a million lists": b'{"inputs": "a", "x": [' + b"[]," * 1_000_000 + b"1]}",
    "a million keys": b'{"inputs": "a", ' + b",".join(b'"%d": 1' % i for i in range(300_000)) + b"}",
    "deep": b'{"inputs":' * 500_000,
    "deep and closed": b"[" * 900 + b"]" * 900,
    "a number of a million digits": b'{"inputs": "a", "parameters": {"temperature": '
    + b"1" * 1_000_000
    + b"}}",
    "empty": b"",
    "zeros": b"\0" * 1000,
    "a lone surrogate": b'{"inputs": "\\udfff"}',
    "no UTF-8": b'{"inputs": "\xc3\x28"}',
    "a text of 4 MB": b'{"inputs": "' + b"a " * (2 << 20) + b'"}',
    "a text of 4 MB of none": b'{"inputs": "' + b" " * (4 << 20) + b'"}',
    "a million tokens": b'{"input_id": [' + b"7," * 1_048_575 + b"7]}",
    "ids that are none": b'{"input_id": [' + b"true," * 100_000 + b"7]}",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_bodies_that_cost_nobody_else(at: Local, case: str) -> None:
    began = time.process_time()  # the server runs in this process
    for path in ("/infer", "/infer_token", "/v2/models/m1/generate", "/v2/models/m1/infer", "/v1/tokenizer"):
        reply = at.post(path, HOSTILE[case])
        assert reply.status in (200, 422, 424), (path, reply)
        assert reply.status == 200 or list(reply.json) == ["error", "error_type"]
    assert time.process_time() - began < 30
    assert at.infer("a").json == {"generated_text": "xxxxxx"}


CHAT = b'{"model": "m1", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2, %b}'
# Keys that are read later, as they stand, or never.
LEFT = [
    b'"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"title": "\xa2"}}}',
    b'"guided_json": {"title": "\xa2"}',
    b'"structured_outputs": {"json": {"title": "\xa2"}}',
    b'"tools": [{"type": "function", "function": {"name": "f", "description": "\xa2"}}]',
    b'"tool_choice": "\xa2"',
    b'"functions": "\xa2"',
    b'"unknown": ["\xa2"]',
]


@pytest.mark.parametrize("left", LEFT)
def test_bodies_that_are_not_utf8_in_what_is_read_later(at: Local, left: bytes) -> None:
    reply = at.post("/v1/chat/completions", CHAT % left)
    assert (reply.status, reply.json["error"]["message"]) == (400, "The request body is not valid UTF-8.")


def test_a_grammar_of_tgi_that_is_not_utf8(at: Local) -> None:
    body = b'{"inputs": "a", "parameters": {"grammar": {"type": "json", "value": {"title": "\xa2"}}}}'
    assert at.post("/generate", body).status == 422


def test_stop_strings_are_made_ready_once_for_all_candidates() -> None:
    stops = [f"{i:02d}" + "\u2603" * (MOST_STOP_CHARACTERS - 2) for i in range(4)]
    asked = {"model": "m1", "prompt": "a", "n": 128, "max_tokens": 2, "temperature": 1, "stop": stops}
    with local(Scripted([(7, "x")], info=Info(vocab_size=1 << 20, tokenizer="words", slots=128))) as at:
        assert at.post("/v1/completions", {**asked, "stop": ["no"]}).status == 200  # what is made once is
        began, before = time.process_time(), resident()
        reply = at.post("/v1/completions", asked)
        taken_s, grown = time.process_time() - began, resident() - before  # the server runs in this process
    assert [choice["text"] for choice in reply.json["choices"]] == ["xx"] * 128
    assert taken_s < 0.5  # 0.01 s; 1.4 s and 590 MB when each had the beginnings of all of them
    assert grown < 20 << 20


def test_model_names_that_are_none(at: Local) -> None:
    for name in ("%2e%2e", "a%00b", "..", "x" * 2000, "m1/versions/1", "m1%20"):
        assert at.post(f"/v2/models/{name}/generate", {"text_input": "a"}).status == 404
