"""vLLM's /tokenize and /detokenize, on the demo's own tokenizer, and which of two APIs a body is for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fastserve.demo
from fastserve.codec.generation import Info
from fastserve.serving.text.models import MOST_PIECES
from fastserve.settings import TextgenOptions
from tests.dialects.text_common.serving import Local, Reply
from tests.text_rig import Scripted

DEMO = Path(fastserve.demo.__file__).parent / "scribe/1"
TEXT = "In the beginning — née 😀"
VOCAB = 3072


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    folder = tmp_path_factory.mktemp("model")
    (folder / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    info = Info(vocab_size=VOCAB, tokenizer="folder", slots=4)
    with Local({"m1": Scripted([(5, None)], info=info)}, TextgenOptions(), folder=folder) as opened:
        yield opened


def detokenize(server: Local, tokens: Any, **more: Any) -> Reply:
    return server.post("/detokenize", {"model": "m1", "tokens": tokens, **more})


def test_a_text_comes_back(server: Local) -> None:
    said = server.post("/tokenize", {"model": "m1", "prompt": TEXT, "add_special_tokens": False}).json
    assert said["count"] == len(said["tokens"]) > 5
    assert (said["max_model_len"], said["token_strs"]) == (2560, None)
    assert detokenize(server, said["tokens"]).json == {"prompt": TEXT}
    assert server.post("/detokenize", {"tokens": said["tokens"]}).json == {"prompt": TEXT}
    tgis = server.post("/tokenize", {"inputs": TEXT, "add_special_tokens": False}).json
    assert [piece["id"] for piece in tgis] == said["tokens"]


def test_special_tokens_are_text_too(server: Local) -> None:
    special = server.post("/tokenize", {"prompt": "a"}).json["tokens"]
    plain = server.post("/tokenize", {"prompt": "a", "add_special_tokens": False}).json["tokens"]
    assert len(special) > len(plain)
    assert len(detokenize(server, special).json["prompt"]) > 1
    assert detokenize(server, []).json == {"prompt": ""}


def test_the_tokens_of_a_conversation(server: Local) -> None:
    messages = [{"role": "user", "content": "Once"}, {"role": "user", "content": "more"}]
    said = server.post("/tokenize", {"messages": messages, "return_token_strs": True}).json
    assert "".join(said["token_strs"]) == detokenize(server, said["tokens"]).json["prompt"] == "Once more "
    assert server.post("/tokenize", {"prompt": ""}).json["tokens"] == []


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([VOCAB], f"is {VOCAB}, allowed: 0 to {VOCAB - 1}"),
        ([-1], "expected int >= 0"),
        ([1.5], "expected int"),
        ("5", "expected array"),
        ([1] * (MOST_PIECES + 1), f"has {MOST_PIECES + 1} tokens, allowed: 1 to {MOST_PIECES}"),
    ],
)
def test_tokens_that_are_none_are_refused(server: Local, tokens: Any, words: str) -> None:
    error = detokenize(server, tokens).json["error"]
    assert error["param"].startswith("tokens")
    assert words in error["message"]


def test_requests_that_neither_api_takes_are_refused(server: Local) -> None:
    assert server.post("/detokenize", {}).json["error"]["param"] == "tokens"
    assert server.post("/detokenize", {"tokens": [1], "model": 5}).json["error"]["param"] == "model"
    assert server.post("/tokenize", {}).json["error_type"] == "validation"
    assert server.post("/tokenize", {"prompt": 5}).json["error"]["param"] == "prompt"
    assert server.post("/tokenize", {"messages": []}).json["error"]["param"] == "messages"
    long = server.post("/tokenize", {"prompt": "the " * 70_000})
    assert (long.status, long.json["error"]["code"]) == (400, "context_length_exceeded")
