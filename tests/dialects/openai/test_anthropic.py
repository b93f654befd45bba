"""/v1/messages by the anthropic package, unmodified: shapes by its own types, errors by its classes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fastserve.codec.generation import Info
from fastserve.dialects.openai.anthropic import write_error
from fastserve.dialects.text_common.endpoint_parts import BodyTooLarge
from fastserve.settings import TextgenOptions
from fastserve.settings.key_file import changing, make_key
from tests.dialects.openai import test_tools
from tests.dialects.openai.test_openai_client import strictly
from tests.dialects.text_common.rigs import HELLO
from tests.dialects.text_common.serving import RIG_FOLDERS, Hosted, Local, Reply
from tests.late import Late
from tests.text_rig import Scripted

anthropic = Late("anthropic")
PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER: list[Any] = [{"role": "user", "content": "hi"}]
SMALL = Info(vocab_size=1 << 20, tokenizer="words", max_prompt_tokens=8, max_tokens=16, max_new_tokens=6)
EVENTS = [
    "message_start",
    "content_block_start",
    "content_block_delta",
    "content_block_delta",
    "content_block_stop",
    "message_delta",
    "message_stop",
]


@pytest.fixture(scope="module")
def server() -> Iterator[Local]:
    models = {
        "m1": Scripted(HELLO, eos={2}),
        "small": Scripted([(7, "x")], info=SMALL),
        "breaks": Scripted([(7, "x")], fail_after=2),
    }
    with Local(models, TextgenOptions()) as server:
        yield server


@pytest.fixture
def client(server: Local) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def ask(server: Local, **more: Any) -> Reply:
    return server.post(PATH, {"model": "m1", "max_tokens": 9, "messages": USER, **more})


def refused(reply: Reply, words: str, status: int = 400, kind: str = "invalid_request_error") -> None:
    said = reply.json
    assert (reply.status, said["type"], said["error"]["type"]) == (status, "error", kind), reply
    assert words in said["error"]["message"]


def test_a_message(client: anthropic.Anthropic) -> None:
    found = client.messages.create(model="m1", max_tokens=9, messages=USER)
    strictly(anthropic.types.Message, found)
    assert (found.type, found.role, found.model) == ("message", "assistant", "m1")
    assert [block.text for block in found.content] == ["Hello world"]
    assert (found.stop_reason, found.stop_sequence) == ("end_turn", None)
    assert (found.usage.input_tokens, found.usage.output_tokens) == (2, 3)


def test_a_message_is_a_chat(client: anthropic.Anthropic, server: Local) -> None:
    engine: Any = server.models["m1"]
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    settings = {"max_tokens": 7, "temperature": 0.5, "top_p": 0.25, "top_k": 3}
    for given in (system, "Be brief."):
        client.messages.create(
            model="m1",
            system=given,
            messages=messages,
            extra_body=settings,
            max_tokens=7,
            stop_sequences=["x"],
        )
        by_messages = engine.seen[-1]
        said = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "a\nb"},
            *messages[1:],
        ]
        assert (
            server.post("/v1/chat/completions", {"model": "m1", "messages": said, **settings}).status == 200
        )
        by_chat = engine.seen[-1]
        assert by_messages.ids == by_chat.ids
        seedless = [
            msgspec.structs.replace(one.note.sampling, seed=0) for one in (by_messages, by_chat)
        ]  # the server has chosen the seeds
        assert seedless[0] == seedless[1]


@pytest.mark.parametrize(
    ("more", "text", "reason", "stop"),
    [
        ({"max_tokens": 1}, "Hello", "max_tokens", None),
        ({"max_tokens": 9, "stop_sequences": ["lo w", "q"]}, "Hel", "stop_sequence", "lo w"),
        ({"max_tokens": 9}, "Hello world", "end_turn", None),
    ],
)
def test_what_ends_a_message(
    client: anthropic.Anthropic, more: Any, text: str, reason: str, stop: str | None
) -> None:
    whole = client.messages.create(model="m1", messages=USER, **more)
    assert (whole.content[0].text, whole.stop_reason, whole.stop_sequence) == (text, reason, stop)
    with client.messages.stream(model="m1", messages=USER, **more) as stream:
        assert "".join(stream.text_stream) == text
        final = stream.get_final_message()
    assert (final.content[0].text, final.stop_reason, final.stop_sequence) == (text, reason, stop)
    assert final.usage == whole.usage


def test_a_message_in_events(client: anthropic.Anthropic, server: Local) -> None:
    events = list(client.messages.create(model="m1", max_tokens=9, messages=USER, stream=True))
    assert [event.type for event in events] == EVENTS
    for event in events:
        strictly(type(event), event)
    assert [event.delta.text for event in events[2:4]] == ["Hello", " world"]
    assert events[0].message.usage.input_tokens == 2
    assert (events[5].delta.stop_reason, events[5].usage.output_tokens) == ("end_turn", 3)
    raw = ask(server, stream=True).body.decode()
    assert [line[7:] for line in raw.split("\n") if line.startswith("event: ")] == EVENTS


def test_tokens_are_counted(client: anthropic.Anthropic) -> None:
    found = client.messages.count_tokens(model="m1", messages=USER, system="Be brief.")
    strictly(anthropic.types.MessageTokensCount, found)
    assert found.input_tokens == 5
    assert client.messages.create(
        model="m1", max_tokens=1, messages=USER, system="Be brief."
    ).usage.input_tokens == 5  # fmt: skip


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"max_tokens": None}, "`max_tokens`: expected int"),
        ({"max_tokens": 0}, "`max_tokens`: expected int >= 1"),
        ({"temperature": 1.5}, "`temperature`: expected float <= 1"),
        ({"messages": []}, "`messages`: expected array of length >= 1"),
        ({"messages": [{"role": "system", "content": "x"}]}, "`messages[0].role`: invalid enum"),
        ({"messages": [*USER, {"role": "assistant", "content": "x"}]}, "`messages[1].role` must be user"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "`messages[0].content[0].tool_use_id` is required",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "`messages[0].content[0].text` is required",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "`messages[0].content[0].source` is required",
        ),
        ({"system": [{"type": "image", "source": {"type": "url", "url": "x"}}]}, "`system` must be texts"),
        ({"tools": [{"name": "x"}]}, "`tools`"),  # whose template has no place for them
        ({"tools": [{"type": "bash_20250124", "name": "x"}]}, "`tools[0].type` 'bash_20250124' is not"),
        ({"tools": [{"input_schema": {}}]}, "`tools[0].name` is required"),
        ({"tool_choice": {"type": "any"}}, "`tool_choice` wants `tools`"),
        ({"tools": [{"name": "x"}], "tool_choice": {"type": "tool", "name": "y"}}, "names 'y'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "name": "x"}]}]},
            "`messages[0].content[0].type` 'tool_use' is not supported",
        ),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "`thinking` is not supported"),
        ({"container": "c"}, "`container` is not supported"),
        ({"stop_sequences": ["a", "b", "c", "d", "e"]}, "`stop_sequences` has 5 strings, allowed: at most 4"),
        ({"output_config": {"format": {"type": "x"}}}, "`output_config.format.type` 'x' is not supported"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "`output_config.format.schema` is required"),
        ({"model": "small", "messages": [{"role": "user", "content": "a " * 30}]}, "has 31 tokens"),
        (
            {"messages": [{"role": "user", "content": [
                {"type": "image", "source": {"type": "base64", "data": "aGk="}}]}]},
            "takes text only, not images",
        ),
    ],
)  # fmt: skip
def test_messages_that_are_refused(server: Local, more: Any, words: str) -> None:
    for stream in (False, True):
        refused(ask(server, stream=stream, **more), words)


def test_keys_of_a_message_may_ask_for_nothing(server: Local) -> None:
    nothing = {
        "tools": [], "tool_choice": {"type": "auto"}, "thinking": {"type": "disabled"}, "metadata": {},
        "service_tier": "auto", "stop_sequences": [], "output_config": {"effort": "low"}, "container": None,
    }  # fmt: skip
    assert ask(server, **nothing).status == 200
    refused(server.post(COUNT, {"model": "m1", "messages": USER, "tools": [{"name": "x"}]}), "`tools`")
    refused(server.post(COUNT, b"{"), "not valid JSON")


def test_errors_become_anthropics_classes(client: anthropic.Anthropic, server: Local) -> None:
    with pytest.raises(anthropic.BadRequestError, match="must be user"):
        client.messages.create(model="m1", max_tokens=9, messages=[{"role": "assistant", "content": "x"}])
    with pytest.raises(anthropic.NotFoundError, match="'nobody' does not exist"):
        client.messages.create(model="nobody", max_tokens=9, messages=USER)
    with pytest.raises(anthropic.InternalServerError, match="the engine failed"):
        client.messages.create(model="breaks", max_tokens=9, messages=USER)
    with pytest.raises(anthropic.APIStatusError, match="the engine failed"):
        list(client.messages.create(model="breaks", max_tokens=9, messages=USER, stream=True))
    said = json.loads(write_error(BodyTooLarge(8)))["error"]
    assert (said["type"], said["message"]) == (
        "request_too_large",
        "Request body too large. Maximum allowed size is 8MB.",
    )


def test_keys_of_anthropics_client(tmp_path: Path) -> None:
    """Its header is x-api-key. A key of another scope is none."""
    shutil.copytree(RIG_FOLDERS / "llm-eos", tmp_path, dirs_exist_ok=True)
    (tmp_path / "m1/1/chat_template.jinja").write_text("{{ messages[0].content }}")
    given = {}
    with changing(tmp_path / "keys.yaml") as entries:
        for scope in ("infer", "metadata"):
            given[scope], entry = make_key(scope, (scope,))
            entries.append(entry)

    def ask(server: Hosted, key: str) -> str:
        with anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0) as client:
            found = client.messages.create(model="m1", max_tokens=9, messages=USER)
        return str(found.content[0].text)

    with Hosted(tmp_path, TextgenOptions(), keys=str(tmp_path / "keys.yaml")) as server:
        assert ask(server, given["infer"]) == "Hello world"
        with pytest.raises(anthropic.AuthenticationError, match="a valid API key is required"):
            ask(server, "none")
        with pytest.raises(anthropic.PermissionDeniedError, match="'type': 'permission_error'"):
            ask(server, given["metadata"])


WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather of a place",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
OTHER: dict[str, Any] = {"name": "stop", "input_schema": {"type": "object"}}
PARIS = {"city": "Paris"}


@pytest.fixture(scope="module")
def tooled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    """The models of tests of a chat's tools."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "chat_template.jinja").write_text(test_tools.TEMPLATE)
    with Local(test_tools.models(), TextgenOptions(), folder=folder) as opened:
        yield opened


@pytest.fixture
def caller(tooled: Local) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=tooled.url, api_key="none", max_retries=0) as client:
        yield client


def blocks_of(message: Any) -> list[Any]:
    return [
        (one.type, one.text) if one.type == "text" else (one.type, one.name, one.input)
        for one in message.content
    ]


def test_calls_of_tools_are_blocks(caller: anthropic.Anthropic) -> None:
    asked: Any = {"model": "m1", "max_tokens": 99, "messages": USER, "tools": [WEATHER, OTHER]}
    whole = caller.messages.create(**asked)
    strictly(anthropic.types.Message, whole)
    expected = [("text", "Let me see."), ("tool_use", "get_weather", PARIS), ("tool_use", "stop", {})]
    assert (blocks_of(whole), whole.stop_reason) == (expected, "tool_use")
    with caller.messages.stream(**asked) as stream:
        events = [event for event in stream if event.type in EVENTS]
        final = stream.get_final_message()
    assert (blocks_of(final), final.stop_reason, final.usage) == (expected, "tool_use", whole.usage)
    begun = [event.index for event in events if event.type == "content_block_start"]
    ended = [event.index for event in events if event.type == "content_block_stop"]
    assert begun == ended == [0, 1, 2]
    alone = caller.messages.create(**asked, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert blocks_of(alone) == expected[:2]


def test_an_answer_without_calls_has_its_text(caller: anthropic.Anthropic) -> None:
    asked: Any = {"model": "talks", "max_tokens": 99, "messages": USER, "tools": [WEATHER]}
    whole = caller.messages.create(**asked)
    with caller.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == "Hello world"
        final = stream.get_final_message()
    assert blocks_of(whole) == blocks_of(final) == [("text", "Hello world")]
    assert whole.stop_reason == final.stop_reason == "end_turn"
    none = caller.messages.create(**asked, tool_choice={"type": "none"})
    assert blocks_of(none) == [("text", "Hello world")]


def test_a_call_that_is_cut_off_has_no_input(caller: anthropic.Anthropic) -> None:
    found = caller.messages.create(model="endless", max_tokens=9, messages=USER, tools=[OTHER])
    assert found.stop_reason == "max_tokens"
    assert blocks_of(found) == [("tool_use", "stop", {})]


def test_results_of_tools_are_messages(tooled: Local, caller: anthropic.Anthropic) -> None:
    """The prompt is that of a chat with the same calls and results."""
    call = {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": PARIS}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "rain"}]}
    messages: list[Any] = [
        *USER,
        {"role": "assistant", "content": [{"type": "text", "text": "So."}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
    ]
    caller.messages.create(model="talks", max_tokens=9, messages=messages, tools=[WEATHER])
    engine: Any = tooled.models["talks"]
    by_messages = engine.seen[-1].note.text
    function = {"name": "get_weather", "arguments": json.dumps(PARIS)}
    chat = [
        *USER,
        {
            "role": "assistant",
            "content": "So.",
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "call_1"},
        {"role": "user", "content": "and?"},
    ]
    parameters = {key: WEATHER[key] for key in ("name", "description")} | {
        "parameters": WEATHER["input_schema"]
    }
    tools = [{"type": "function", "function": parameters}]
    body = {"model": "talks", "max_tokens": 9, "messages": chat, "tools": tools}
    assert tooled.post("/v1/chat/completions", body).status == 200
    by_chat = engine.seen[-1].note.text
    assert by_messages.splitlines()[1:] == by_chat.splitlines()[1:]
    shown = [json.loads(text.splitlines()[0].removeprefix("tools ")) for text in (by_messages, by_chat)]
    assert shown[0] == shown[1]
    assert "tool get_weather:rain" in by_messages
    only: list[Any] = [*messages[:2], {"role": "user", "content": [result]}]
    caller.messages.create(model="talks", max_tokens=9, messages=only, tools=[WEATHER])
    assert engine.seen[-1].note.text.rstrip().endswith("tool get_weather:rain")
    with pytest.raises(anthropic.BadRequestError, match="'image' is not supported"):
        caller.messages.create(model="talks", max_tokens=9, messages=[
            *messages[:2],
            {"role": "user", "content": [{**result, "content": [{"type": "image"}]}]},
        ])  # fmt: skip
