"""The short way of plain tokens into replies: every API takes it, and says the same by the general one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastserve.codec.generation import Info, Record
from fastserve.serving.text import TextStream
from fastserve.settings import TextgenOptions
from tests.dialects.text_common.serving import Local
from tests.text_rig import Scripted

FOLDER = Path("fastserve/demo/scribe/1")
INFO = Info(vocab_size=3072, slots=8, max_tokens=1024, max_prompt_tokens=512, max_new_tokens=500)
SCRIPT = [(300 + 7 * i % 2500, None) for i in range(400)]  # among them bytes that are no characters
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "m1", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"model": "m1", "prompt": "hi", "n": 2},
    "/generate": {"prompt": "hi"},
    "/generate_stream": {"inputs": "hi"},
    "/infer": {"inputs": "hi", "stream": True},
    "/v2/models/m1/generate_stream": {"id": "x", "text_input": "hi"},
}
NEW = 60


@pytest.fixture(scope="module")
def at() -> Iterator[Local]:
    model = Scripted(SCRIPT, info=INFO)
    with Local({"m1": model}, TextgenOptions(tgi_flavor="tgi"), folder=FOLDER) as running:
        yield running


def ask(at: Local, path: str, **more: Any) -> str:
    """A whole stream, without what no two requests share."""
    body = {**ASKED[path], **more}
    if "inputs" in body or "text_input" in body:
        body["parameters"] = {"max_new_tokens": NEW, **more.get("parameters", {})}
    else:
        body |= {"max_tokens": NEW, "stream": True}
    reply = at.post(path, body)
    assert reply.status == 200, reply
    return re.sub(r'"(id|created|seed)":("[^"]*"|\d+)', "", reply.body.decode())


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[Record]:
    """Records that took the general way."""
    found: list[Record] = []
    general = TextStream.on_tokens

    def listen(stream: TextStream, records: list[Record]) -> None:
        found.extend(records)
        general(stream, records)

    monkeypatch.setattr(TextStream, "on_tokens", listen)
    return found


@pytest.mark.parametrize("path", ASKED)
def test_every_api_takes_it_and_says_the_same(
    at: Local, path: str, heard: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    flowed = ask(at, path)
    assert 0 < len(heard) < NEW / 4, "the last of each sequence, and no more than a few besides"
    heard.clear()
    monkeypatch.setattr(TextStream, "pass_through", lambda *_: None)
    general = ask(at, path)
    assert len(heard) >= NEW
    # Two sequences of a request may be heard in another order.
    assert sorted(flowed.split("\n\n")) == sorted(general.split("\n\n"))


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/completions", {"stop": ["nowhere in it"]}),
        ("/generate_stream", {"parameters": {"top_n_tokens": 2}}),
        ("/v2/models/m1/generate_stream", {"parameters": {"details": True}}),
    ],
)
def test_what_says_more_of_a_token_does_not(
    at: Local, path: str, more: dict[str, Any], heard: list[Record]
) -> None:
    ask(at, path, **more)
    assert len(heard) >= NEW
