"""Keys of OpenAI's requests: what would change an answer is heeded or refused by name; docs say which."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fastserve.dialects.openai.anthropic import MessagesRequest
from fastserve.dialects.openai.requests import (
    IGNORED,
    NEUTRAL,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    refused_keys,
)
from fastserve.dialects.openai.responses import ResponsesRequest
from fastserve.dialects.openai.scoring import ClassifyRequest, RerankRequest, ScoreRequest
from fastserve.settings import TextgenOptions
from tests.dialects.text_common.rigs import HELLO
from tests.dialects.text_common.serving import Local, Reply
from tests.late import Late
from tests.text_rig import Scripted

chat_keys = Late("openai.types.chat.completion_create_params")
completion_keys = Late("openai.types.completion_create_params")
embedding_keys = Late("openai.types.embedding_create_params")
response_keys = Late("openai.types.responses.response_create_params")
message_keys = Late("anthropic.types.message_create_params")
PAGE = Path(__file__).parents[3] / "docs/dialects/textgen.md"
TEMPLATE = """{% for message in messages %}{{ message.content }} {% endfor %}
{%- if add_generation_prompt %}go on {% endif %}
{%- if reasoning_effort %}try {{ reasoning_effort }}{% endif %}"""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m1", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"model": "m1", "max_tokens": 2, "prompt": "hi"},
}
KINDS: dict[str, type[msgspec.Struct]] = {
    CHAT: ChatRequest,
    COMPLETIONS: CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/rerank": RerankRequest,
    "/v1/score": ScoreRequest,
    "/v1/classify": ClassifyRequest,
}
REFUSED = [(path, key) for path in ASKED for key in refused_keys(KINDS[path])]


def taken_keys(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Return the keys of a body that are used, and `user`, which has no effect."""
    others = (*refused_keys(kind), *IGNORED)
    return tuple(each.name for each in msgspec.structs.fields(kind) if each.name not in others)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    folder = tmp_path_factory.mktemp("model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with Local({"m1": Scripted(HELLO, eos={2})}, TextgenOptions(), folder=folder) as opened:
        yield opened


def ask(server: Local, path: str, **more: Any) -> Reply:
    return server.post(path, {**ASKED[path], **more})


@pytest.mark.parametrize(("path", "key"), REFUSED)
def test_openai_keys_that_cannot_be_heeded_are_refused_by_name(server: Local, path: str, key: str) -> None:
    for value in ({"x": 1}, ["x"], "x", 7.5, "x" * 1000):
        error = ask(server, path, **{key: value}).json["error"]
        assert (error["param"], error["message"]) == (key, f"`{key}` is not supported")
    for nothing in (None, False, 0, 0.0, "", [], {}):
        asks = nothing is not None and b"true" in NEUTRAL.get(key, ())
        assert ask(server, path, **{key: nothing}).status == (400 if asks else 200), nothing


def test_openai_keys_may_ask_for_what_is_done_anyway(server: Local) -> None:
    for path in ASKED:
        for key, values in NEUTRAL.items():
            for value in values:
                body = b'{"%b":%b,"model":"m1","prompt":"hi","messages":[{"role":"user","content":"hi"}]}'
                if key not in taken_keys(KINDS[path]):
                    assert server.post(path, body % (key.encode(), value)).status == 200, (key, value)


@pytest.mark.parametrize("key", IGNORED)
def test_openai_keys_that_are_ignored_change_nothing(server: Local, key: str) -> None:
    for path in ASKED:
        plain = ask(server, path).json
        said = ask(server, path, **{key: "x"}).json
        assert (said["choices"], said["usage"]) == (plain["choices"], plain["usage"])


def prompt_tokens(reply: Reply) -> int:
    found: int = reply.json["usage"]["prompt_tokens"]
    return found


def test_openai_add_generation_prompt_is_heeded(server: Local) -> None:
    assert (
        prompt_tokens(ask(server, CHAT)) == prompt_tokens(ask(server, CHAT, add_generation_prompt=True)) == 3
    )
    assert prompt_tokens(ask(server, CHAT, add_generation_prompt=False)) == 1
    both = {"add_generation_prompt": False, "chat_template_kwargs": {"add_generation_prompt": True}}
    assert prompt_tokens(ask(server, CHAT, **both)) == 3  # vLLM's order
    assert prompt_tokens(ask(server, CHAT, reasoning_effort="low")) == 5
    assert ask(server, CHAT, add_generation_prompt="no").status == 400


def test_openai_keys_of_its_client_are_all_known() -> None:
    for path, base in (
        (CHAT, chat_keys.CompletionCreateParamsBase),
        (COMPLETIONS, completion_keys.CompletionCreateParamsBase),
        ("/v1/embeddings", embedding_keys.EmbeddingCreateParams),
        ("/v1/responses", response_keys.ResponseCreateParamsBase),
        ("/v1/messages", message_keys.MessageCreateParamsBase),
    ):
        kind = KINDS[path]
        assert set(base.__annotations__) <= {*taken_keys(kind), *refused_keys(kind), *IGNORED}, path


def test_openai_keys_in_the_docs_are_those_of_the_code() -> None:
    table = re.search(r"<!-- keys: openai -->\n(.*?)<!-- end -->", PAGE.read_text(), re.DOTALL)
    assert table is not None
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[1].splitlines()[2:]]
    found = {(where.strip("`"), what): set(re.findall(r"`(\w+)`", keys)) for where, what, keys in rows}
    wanted = {(path, "taken"): set(taken_keys(kind)) for path, kind in KINDS.items()}
    wanted |= {(path, "refused"): set(refused_keys(kind)) for path, kind in KINDS.items()}
    wanted[("all of them", "ignored")] = set(IGNORED)
    assert found == wanted
