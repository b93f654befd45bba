"""/v1/responses by the openai package, unmodified: shapes by its own types, typed events, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fastserve.codec.generation import Info
from fastserve.settings import TextgenOptions
from tests.dialects.openai.test_openai_client import strictly
from tests.dialects.text_common.likely import FIRST, Likely
from tests.dialects.text_common.rigs import HELLO
from tests.dialects.text_common.serving import Local, Reply
from tests.late import Late
from tests.text_rig import Scripted

openai = Late("openai")
PATH = "/v1/responses"
WRITES = Info(vocab_size=1 << 20, tokenizer="words", slots=64)
EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


@pytest.fixture(scope="module")
def server() -> Iterator[Local]:
    models = {"m1": Likely(HELLO, eos={2}), "breaks": Scripted([(7, "x")], fail_after=2, info=WRITES)}
    with Local(models, TextgenOptions()) as server:
        yield server


@pytest.fixture
def client(server: Local) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(server: Local, **more: Any) -> Reply:
    return server.post(PATH, {"model": "m1", "input": "hi", **more})


def refused(reply: Reply, param: str, words: str) -> None:
    error = reply.json["error"]
    assert (reply.status, error["param"], error["type"]) == (400, param, "invalid_request_error"), reply
    assert words in error["message"]


def test_a_response(client: openai.OpenAI) -> None:
    found = client.responses.create(model="m1", input="hi", metadata={"who": "me"}, temperature=0.5)
    strictly(openai.types.responses.Response, found)
    assert (found.status, found.output_text, found.store) == ("completed", "Hello world", False)
    assert found.id.startswith("resp_")
    assert (found.metadata, found.temperature, found.top_p) == ({"who": "me"}, 0.5, 1.0)
    assert (found.usage.input_tokens, found.usage.output_tokens, found.usage.total_tokens) == (2, 3, 5)


def test_a_response_is_a_chat(client: openai.OpenAI, server: Local) -> None:
    engine: Any = server.models["m1"]
    items: Any = [
        {"role": "user", "content": "one"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "two"}]},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
    ]
    client.responses.create(
        model="m1", instructions="Be brief.", input=items, max_output_tokens=7, temperature=0.5, top_p=0.25,
        extra_body={"seed": 3, "priority": 2},
    )  # fmt: skip
    by_responses = engine.seen[-1]
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "a\nb"},
    ]
    client.chat.completions.create(
        model="m1", messages=messages, max_tokens=7, temperature=0.5, top_p=0.25, seed=3,
        extra_body={"priority": 2},
    )  # fmt: skip
    by_chat = engine.seen[-1]
    assert by_responses.ids == by_chat.ids
    assert by_responses.note.sampling == by_chat.note.sampling
    assert by_responses.note.priority == 2


def test_a_response_in_typed_events(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="m1", input="hi", stream=True))
    assert [event.type for event in events] == EVENTS
    assert [event.sequence_number for event in events] == list(range(len(EVENTS)))
    for event in events:
        strictly(type(event), event)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert deltas == ["Hello", " world"]
    last = events[-1].response
    assert (last.output_text, last.status, last.usage.output_tokens) == ("Hello world", "completed", 3)
    assert {events[0].response.id, last.id} == {last.id}
    assert events[2].item.id == events[4].item_id == last.output[0].id


def test_the_clients_helper_puts_the_events_together(client: openai.OpenAI) -> None:
    with client.responses.stream(model="m1", input="hi") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds == EVENTS
    assert final.output_text == "Hello world"


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_is_cut_off_is_incomplete(client: openai.OpenAI, stream: bool) -> None:
    found = client.responses.create(model="m1", input="hi", max_output_tokens=1, stream=stream)
    if stream:
        *_, last = found
        assert last.type == "response.incomplete"
        found = last.response
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (found.output_text, found.output[0].status) == ("Hello", "incomplete")


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_response(client: openai.OpenAI, stream: bool) -> None:
    found = client.responses.create(
        model="m1", input="hi", include=["message.output_text.logprobs"], top_logprobs=2, stream=stream
    )
    if stream:
        *_, last = found
        found = last.response
    strictly(openai.types.responses.Response, found)
    scored = found.output[0].content[0].logprobs
    assert [one.logprob for one in scored] == [FIRST, 2 * FIRST, 3 * FIRST]
    assert all(len(one.top_logprobs) == 2 for one in scored)


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored here"),
        ({"conversation": "conv_1"}, "conversation", "nothing is stored here"),
        ({"store": True}, "store", "send the whole conversation in `input`"),
        ({"background": True}, "background", "is not supported"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search' is not supported: function is"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0].type", "'custom' is not supported"),
        ({"tools": [{"name": "a b"}]}, "tools[0].name", "must be 1 to 64 letters"),
        ({"tools": [{"name": "f", "parameters": []}]}, "tools[0].parameters", "must be an object"),
        ({"tools": [{"name": "f"}]}, "tools", "has no place for tools"),
        ({"tools": [{}] * 5000}, "tools", "has 5000 items, allowed: at most 128"),  # before they are written
        ({"tool_choice": "required"}, "tool_choice", "wants `tools`"),
        (
            {"tools": [{"name": "f"}], "tool_choice": {"type": "web_search_preview"}},
            "tool_choice.type",
            "'web_search_preview' is not supported",
        ),
        ({"truncation": "auto"}, "truncation", "is not supported"),
        ({"prompt": {"id": "p"}}, "prompt", "is not supported"),
        ({"include": ["reasoning.encrypted_content"]}, "include[0]", "'reasoning.encrypted_content' is not"),
        ({"input": []}, "input", "length >= 1"),
        ({"input": 5}, "input", "expected str | array"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input[0].type", "'reasoning' is not supported"),
        ({"input": [{"type": "function_call", "call_id": "x"}]}, "input[0].name", "is required"),
        (
            {"input": [{"type": "function_call", "name": "f", "arguments": "{"}]},
            "input[0].arguments",
            "must be a JSON object",
        ),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id", "is required"),
        ({"input": [{"type": "function_call_output", "call_id": "x"}]}, "input[0].output", "is required"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "must be system"),
        ({"input": [{"role": "user"}]}, "input[0].content", "is required"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            "input[0].content[0].type",
            "'input_file' is not supported",
        ),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type", "'grammar' is not supported"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "is required"),
        ({"temperature": 2.5}, "temperature", "expected float <= 2"),
        ({"max_output_tokens": 0}, "max_output_tokens", "expected int >= 1"),
        ({"top_logprobs": 21}, "top_logprobs", "expected int <= 20"),
        ({"input": "a " * 3000}, "input", "the prompt has 3001 tokens"),
    ],
)
def test_keys_of_a_response_that_are_refused(server: Local, more: Any, param: str, words: str) -> None:
    for stream in (False, True):
        refused(ask(server, stream=stream, **more), param, words)


def test_keys_of_a_response_may_ask_for_nothing(server: Local) -> None:
    nothing = {
        "store": False, "background": False, "tools": [], "tool_choice": "auto", "truncation": "disabled",
        "previous_response_id": None, "text": {"format": {"type": "text"}}, "user": "x", "max_tool_calls": 3,
        "stream_options": {"include_obfuscation": True}, "reasoning": {"effort": "low", "summary": "auto"},
    }  # fmt: skip
    assert ask(server, **nothing).status == 200


def test_images_of_a_response_are_refused_clearly(server: Local) -> None:
    part = {"type": "input_image", "image_url": "data:image/png;base64,aGk="}
    reply = ask(server, input=[{"role": "user", "content": [part]}])
    assert reply.status == 400
    assert "takes text only, not images" in reply.json["error"]["message"]


def test_a_response_that_fails_midway_raises(client: openai.OpenAI, server: Local) -> None:
    stream = client.responses.create(model="breaks", input="hi", stream=True)
    with pytest.raises(openai.APIError, match="the engine failed"):
        for _ in stream:
            pass
    with pytest.raises(openai.InternalServerError, match="the engine failed"):
        client.responses.create(model="breaks", input="hi")
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.responses.create(model="nobody", input="hi")
