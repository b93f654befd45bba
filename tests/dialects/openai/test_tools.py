"""Tools of chats and responses over scripted models: what the model is shown, the calls in its answer, whole
and streamed, by openai's client and by plain ones; and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fastserve.backends.llm.protocols import TextRequest
from fastserve.codec.generation import Info
from fastserve.dialects.openai.tools import MOST_KEPT, MOST_TOOL_BYTES, MOST_TOOLS, read_tools
from fastserve.settings import TextgenOptions
from tests.dialects.text_common.likely import Likely
from tests.dialects.text_common.serving import Local, Reply
from tests.late import Late
from tests.text_rig import Said, Scripted

openai, pydantic, text_generation = Late("openai"), Late("pydantic"), Late("text_generation")
CHAT = "/v1/chat/completions"
USER: list[Any] = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
OTHER = {"type": "function", "function": {"name": "stop"}}
TEMPLATE = """{% if tools %}tools{% for tool in tools %} {{ tool | tojson }}{% endfor %}{{ '\\n' }}{% endif %}
{% for message in messages %}
{{ message.role }}{{ ' ' ~ message.name if message.name }}:{{ message.content or '' }}{{ '\\n' }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>
{% endfor %}
{% endfor %}"""
SAID = ["Let ", "me see.", "\n", "<tool_", 'call>\n{"name": "get_', 'weather", "argum']
SAID += [
    'ents": {"city": "Par',
    'is"}}',
    "\n</tool",
    "_call>",
    '\n<tool_call>{"name": "stop"',
    "}</tool_call>",
]
PARIS = '{"city": "Paris"}'


def script(pieces: list[str]) -> list[Said]:
    return [*((100 + i, piece) for i, piece in enumerate(pieces)), (2, "")]


TAKES_TEXT = Info(vocab_size=1 << 20, tokenizer="", slots=64, max_tokens=20_000, max_new_tokens=10_000)


def models() -> dict[str, Scripted]:
    return {
        "m1": Likely(script(SAID), eos={2}, info=TAKES_TEXT),
        "talks": Scripted(script(["Hello", " world"]), eos={2}, info=TAKES_TEXT),
        "many": Scripted(
            script(['<tool_call>{"name": "stop"}</tool_call>\n'] * 100), eos={2}, info=TAKES_TEXT
        ),
        "endless": Scripted(
            script(['<tool_call>{"name": "stop", "arguments": ["', "x "])[:-1], info=TAKES_TEXT
        ),
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    folder = tmp_path_factory.mktemp("model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with Local(models(), TextgenOptions(), folder=folder) as opened:
        yield opened


@pytest.fixture
def client(server: Local) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(server: Local, model: str = "m1", **more: Any) -> Reply:
    return server.post(CHAT, {"model": model, "messages": USER, "tools": [WEATHER, OTHER], **more})


def choice_of(reply: Reply) -> Any:
    assert reply.status == 200, reply
    (choice,) = reply.json["choices"]
    return choice


def prompt_of(server: Local, **more: Any) -> str:
    assert ask(server, "talks", **more).status == 200
    request: TextRequest = server.models["talks"].seen[-1]  # type: ignore[attr-defined]
    return request.note.text


def refused(reply: Reply, param: str | None, words: str) -> None:
    error = reply.json["error"]
    assert (reply.status, error["param"]) == (400, param), reply
    assert words in error["message"], error


def test_calls_in_a_whole_answer(server: Local) -> None:
    choice = choice_of(ask(server))
    message = choice["message"]
    assert (message["content"], choice["finish_reason"]) == ("Let me see.", "tool_calls")
    first, second = message["tool_calls"]
    assert first["type"] == second["type"] == "function"
    assert re.fullmatch("call_[0-9a-f]{24}", first["id"])
    assert first["id"] != second["id"]
    assert first["function"] == {"name": "get_weather", "arguments": PARIS}
    assert second["function"] == {"name": "stop", "arguments": "{}"}


def test_calls_in_a_stream(client: openai.OpenAI) -> None:
    """As OpenAI sends them: the index with each part, id, type and name with the first of a call."""
    chunks = list(
        client.chat.completions.create(model="m1", messages=USER, tools=[WEATHER, OTHER], stream=True)
    )
    for chunk in chunks:
        pydantic.TypeAdapter(openai.types.chat.ChatCompletionChunk).validate_python(chunk.model_dump())
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "Let me see."
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "tool_calls"
    parts = [part for delta in deltas for part in delta.tool_calls or []]
    assert [(part.index, part.function.name, part.function.arguments) for part in parts] == [
        *((0, "get_weather", ""), (0, None, '{"city": "Par'), (0, None, 'is"}')),
        *((1, "stop", ""), (1, None, "{}")),
    ]
    assert [(part.id is None, part.type) for part in parts] == [
        *((False, "function"), (True, None), (True, None)),
        *((False, "function"), (True, None)),
    ]


def test_openais_helper_of_streams(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="m1", messages=USER, tools=[WEATHER, OTHER]) as stream:
        kinds = {event.type for event in stream}
        found = stream.get_final_completion().choices[0]
    assert {
        "tool_calls.function.arguments.delta",
        "tool_calls.function.arguments.done",
        "content.delta",
    } <= kinds
    assert (found.message.content, found.finish_reason) == ("Let me see.", "tool_calls")
    assert [call.function.arguments for call in found.message.tool_calls] == [PARIS, "{}"]


def test_openais_parse(client: openai.OpenAI) -> None:
    weather = pydantic.create_model("get_weather", city=(str, ...))
    found = client.chat.completions.parse(
        model="m1", messages=USER, tools=[openai.pydantic_function_tool(weather)], parallel_tool_calls=False
    )
    (call,) = found.choices[0].message.tool_calls
    assert call.function.parsed_arguments == weather(city="Paris")


def test_text_generations_client(tmp_path: Path) -> None:
    """It names no model."""
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    only = {"m1": Scripted(script(SAID), eos={2}, info=TAKES_TEXT)}
    with Local(only, TextgenOptions(), folder=tmp_path) as at:
        client = text_generation.Client(at.url, timeout=60)
        shown = [text_generation.types.Tool(**WEATHER)]
        (choice,) = client.chat(USER, tools=shown).choices
        assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
        assert choice.message.tool_calls[0]["function"] == {"name": "get_weather", "arguments": PARIS}
        assert client.chat(USER, tools=shown, tool_choice="none").choices[0].finish_reason == "stop"


def test_one_call_where_calls_are_not_parallel(server: Local) -> None:
    choice = choice_of(ask(server, parallel_tool_calls=False))
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]
    *events, done = ask(server, parallel_tool_calls=False, stream=True).body.split(b"\n\n")[:-1]
    assert done == b"data: [DONE]"
    chunks = [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events]
    assert {part["index"] for chunk in chunks for part in chunk["delta"].get("tool_calls", [])} == {0}
    assert chunks[-1]["finish_reason"] == "tool_calls"


def test_as_many_calls_as_the_model_writes(server: Local) -> None:
    calls = choice_of(ask(server, "many"))["message"]["tool_calls"]
    assert len({call["id"] for call in calls}) == len(calls) == 100


def test_an_answer_without_calls(server: Local) -> None:
    choice = choice_of(ask(server, "talks"))
    assert choice["message"] == {"role": "assistant", "content": "Hello world", "refusal": None}
    assert choice["finish_reason"] == "stop"


def test_an_answer_that_is_cut_within_a_call(server: Local) -> None:
    choice = choice_of(ask(server, max_tokens=7))
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["arguments"], choice["finish_reason"]) == ('{"city": "Par', "length")
    choice = choice_of(ask(server, max_tokens=5))
    assert choice["message"]["content"] == 'Let me see.\n<tool_call>\n{"name": "get_'
    choice = choice_of(ask(server, stop=["Par"]))
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["arguments"], choice["finish_reason"]) == ('{"city": "', "stop")


def test_scores_beside_calls(server: Local) -> None:
    """Every token has its score once, whole and streamed."""
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 1}
    whole = choice_of(ask(server, **asked))["logprobs"]["content"]
    events = ask(server, stream=True, **asked).body.split(b"\n\n")[:-2]
    chunks = [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events]
    streamed = [one for chunk in chunks if chunk["logprobs"] for one in chunk["logprobs"]["content"]]
    assert len(whole) == len(SAID) + 1
    assert streamed == whole


def test_several_choices(server: Local) -> None:
    reply = ask(server, n=3)
    ids = {call["id"] for choice in reply.json["choices"] for call in choice["message"]["tool_calls"]}
    assert len(ids) == 6


def test_a_call_that_never_ends(server: Local) -> None:
    """10,000 tokens of it end by max_tokens, and every one of them arrives."""
    events = ask(server, "endless", stream=True).body.split(b"\n\n")[:-2]
    chunks = [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events]
    parts = [part for chunk in chunks for part in chunk["delta"].get("tool_calls", [])]
    assert "".join(part["function"]["arguments"] for part in parts) == '["' + "x " * 9999
    assert chunks[-1]["finish_reason"] == "length"


# --- functions, which OpenAI had before tools

FUNCTIONS = [WEATHER["function"], OTHER["function"]]


def test_functions(client: openai.OpenAI, server: Local) -> None:
    asked: Any = {"model": "m1", "messages": USER, "functions": FUNCTIONS}
    choice = client.chat.completions.create(**asked).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Let me see.", "function_call")
    assert choice.message.function_call.model_dump() == {"name": "get_weather", "arguments": PARIS}
    assert choice.message.tool_calls is None
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    parts = [chunk.delta.function_call for chunk in chunks if chunk.delta.function_call]
    assert [(part.name, part.arguments) for part in parts] == [
        *(("get_weather", ""), (None, '{"city": "Par'), (None, 'is"}')),
    ]
    assert chunks[-1].finish_reason == "function_call"
    assert not [chunk for chunk in chunks if chunk.delta.tool_calls]
    none = client.chat.completions.create(**asked, function_call="none").choices[0]
    assert (none.finish_reason, none.message.function_call) == ("stop", None)


def test_functions_are_shown_as_tools(server: Local) -> None:
    def both(tools: dict[str, Any], functions: dict[str, Any]) -> None:
        shown = prompt_of(server, **tools)
        assert shown == prompt_of(server, tools=None, functions=FUNCTIONS, **functions)
        assert shown.startswith("tools")

    both({}, {"function_call": "auto"})
    called = {"name": "get_weather", "arguments": PARIS}
    past = [*USER, {"role": "assistant", "content": None, "function_call": called}]
    call = {"id": "call00001", "type": "function", "function": called}
    newer = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    newer.append({"role": "tool", "tool_call_id": "call00001", "content": "rain"})
    both(
        {"messages": newer},
        {"messages": [*past, {"role": "function", "name": "get_weather", "content": "rain"}]},
    )
    bad = [*USER, {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{"}}]
    refused(ask(server, messages=bad), "messages[1].function_call.arguments", "must be a JSON object")


# --- by /v1/responses

FLAT = [{"type": "function", "strict": False, **each["function"]} for each in (WEATHER, OTHER)]
FLAT[1]["parameters"] = None
EVENTS = [
    *("response.created", "response.in_progress"),
    *("response.output_item.added", "response.content_part.added"),
    *["response.output_text.delta"] * 2,
    *("response.output_text.done", "response.content_part.done", "response.output_item.done"),
    "response.output_item.added",
    *["response.function_call_arguments.delta"] * 2,
    *("response.function_call_arguments.done", "response.output_item.done"),
    *("response.output_item.added", "response.function_call_arguments.delta"),
    *("response.function_call_arguments.done", "response.output_item.done"),
    "response.completed",
]


def respond(client: openai.OpenAI, **more: Any) -> Any:
    return client.responses.create(**{"model": "m1", "input": "hi", "tools": FLAT, **more})


def said_in(response: Any) -> list[tuple[str, ...]]:
    """Its output items, by what matters: their type and status, and their text, or function and arguments."""
    return [
        (item.type, item.status, item.content[0].text)
        if item.type == "message"
        else (item.type, item.status, item.name, item.arguments)
        for item in response.output
    ]


ITEMS = [
    ("message", "completed", "Let me see."),
    ("function_call", "completed", "get_weather", PARIS),
    ("function_call", "completed", "stop", "{}"),
]


def test_a_response_with_calls(client: openai.OpenAI) -> None:
    found = respond(client, tool_choice="auto", parallel_tool_calls=True)
    pydantic.TypeAdapter(openai.types.responses.Response).validate_python(found.model_dump())
    assert (found.status, said_in(found)) == ("completed", ITEMS)
    ids = [item.call_id for item in found.output[1:]]
    assert len({*ids, *(item.id for item in found.output)}) == 5
    assert all(re.fullmatch("call_[0-9a-f]{24}", each) for each in ids)
    repeated = [tool.to_dict() for tool in found.tools]
    assert (repeated, found.tool_choice, found.parallel_tool_calls) == (FLAT, "auto", True)


def test_a_response_with_calls_in_typed_events(client: openai.OpenAI) -> None:
    events = list(respond(client, stream=True))
    assert [event.type for event in events] == EVENTS
    for event in events:
        pydantic.TypeAdapter(type(event)).validate_python(event.model_dump())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1].response
    assert said_in(last) == ITEMS
    ended = [event.item for event in events if event.type == "response.output_item.done"]
    assert ended == last.output
    parts = [event for event in events if event.type.startswith("response.function_call_arguments")]
    assert [(part.output_index, part.item_id) for part in parts] == [
        (i, last.output[i].id) for i in (1, 1, 1, 2, 2)
    ]
    begun = [event.item for event in events if event.type == "response.output_item.added"]
    assert [item.call_id for item in begun[1:]] == [item.call_id for item in last.output[1:]]
    assert {item.status for item in begun} == {"in_progress"}


def test_openais_helpers_of_responses(client: openai.OpenAI) -> None:
    with client.responses.stream(model="m1", input="hi", tools=FLAT) as stream:  # type: ignore[arg-type]
        assert [event.type for event in stream] == EVENTS
        assert said_in(stream.get_final_response()) == ITEMS
    weather = pydantic.create_model("get_weather", city=(str, ...))
    shown: Any = [openai.pydantic_function_tool(weather)]
    found = client.responses.parse(model="m1", input="hi", tools=shown)
    assert found.output[1].parsed_arguments == weather(city="Paris")


@pytest.mark.parametrize("stream", [False, True])
def test_responses_that_are_cut(client: openai.OpenAI, stream: bool) -> None:
    def end(**more: Any) -> Any:
        found = respond(client, stream=stream, **more)
        return list(found)[-1].response if stream else found

    found = end(max_output_tokens=7)
    cut = ("function_call", "incomplete", "get_weather", '{"city": "Par')
    assert (found.status, said_in(found)) == ("incomplete", [ITEMS[0], cut])
    found = end(parallel_tool_calls=False)
    assert (said_in(found), found.parallel_tool_calls) == (ITEMS[:2], False)
    found = end(tool_choice="none")
    assert [item.type for item in found.output] == ["message"]
    assert "<tool_call>" in found.output_text
    found = end(model="talks")
    assert said_in(found) == [("message", "completed", "Hello world")]
    assert [item.name for item in end(model="many").output] == ["stop"] * 100


@pytest.mark.parametrize("stream", [False, True])
def test_scores_of_a_response_with_calls(client: openai.OpenAI, stream: bool) -> None:
    """Those of the tokens that wrote the text."""
    found = respond(client, stream=stream, include=["message.output_text.logprobs"], top_logprobs=1)
    if stream:
        events = list(found)
        found = events[-1].response
        told = [event.logprobs for event in events if event.type == "response.output_text.delta"]
        assert [len(each) for each in told] == [1, 1]
    assert len(found.output[0].content[0].logprobs) == 2


def test_a_response_shows_what_a_chat_shows(client: openai.OpenAI, server: Local) -> None:
    """The output of a response may be sent back as it is."""
    first = respond(client)
    given: list[Any] = [
        {"role": "user", "content": "hi"},
        *first.output,
        {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "rain"},
        {
            "type": "function_call_output",
            "call_id": first.output[2].call_id,
            "output": [{"type": "input_text", "text": "ok"}],
        },
    ]
    respond(client, model="talks", input=given)
    request: TextRequest = server.models["talks"].seen[-1]  # type: ignore[attr-defined]
    calls = choice_of(ask(server))["message"]
    results = [{"role": "tool", "tool_call_id": call["id"]} for call in calls["tool_calls"]]
    results[0]["content"], results[1]["content"] = "rain", "ok"
    told = [
        {"type": "function", "function": {**each["function"], "strict": False}} for each in (WEATHER, OTHER)
    ]
    assert request.note.text == prompt_of(server, messages=[*USER, calls, *results], tools=told)


# --- what the model is shown


def test_the_template_gets_the_tools_as_they_are_sent(server: Local) -> None:
    """With a description and parameters, on which templates count."""
    odd = {"name": "f", "x": 1, "parameters": {"type": "object"}, "description": "d", "return": {}}
    shown = [{"type": "function", "function": odd}, WEATHER]
    expected = " ".join(json.dumps(each) for each in shown)
    assert prompt_of(server, tools=shown) == f"tools {expected}\nuser:hi\n"
    bare = {"name": "stop", "description": "", "parameters": {"type": "object", "properties": {}}}
    for given in (OTHER, tool("stop", description=None, parameters=None)):
        full = json.dumps({"type": "function", "function": bare})
        assert prompt_of(server, tools=[given]) == f"tools {full}\nuser:hi\n"


def test_tools_that_are_not_to_be_called_are_not_shown(server: Local) -> None:
    assert prompt_of(server, tool_choice="none") == prompt_of(server, tools=[]) == "user:hi\n"
    choice = choice_of(ask(server, tool_choice="none"))
    assert "<tool_call>" in choice["message"]["content"]
    assert (choice["finish_reason"], "tool_calls" in choice["message"]) == ("stop", False)


def test_calls_and_their_results_are_shown(server: Local) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": PARIS}}
    bare = {"id": "call_2", "function": {"name": "stop", "arguments": ""}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call, bare]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "rain"}]},
        {"role": "tool", "tool_call_id": "call_2", "name": "own", "content": "ok"},
    ]
    assert prompt_of(server, messages=messages, tools=None) == (
        "user:hi\nassistant:\n"
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>\n'
        '<tool_call>{"name": "stop", "arguments": {}}</tool_call>\ntool get_weather:rain\ntool own:ok\n'
    )


@pytest.mark.parametrize(
    ("call", "param", "words"),
    [
        ({"function": {"name": "f", "arguments": "{"}}, "[0].function.arguments", "must be a JSON object"),
        ({"function": {"name": "f", "arguments": "[1]"}}, "[0].function.arguments", "must be a JSON object"),
        ({"function": {"name": "f", "arguments": [1]}}, "[0].function.arguments", "must be a JSON object"),
        ({"function": {"arguments": "{}"}}, "[0]", "missing required field `name`"),
        ({"type": "custom", "function": {"name": "f"}}, "[0].type", "'custom' is not supported"),
    ],
)
def test_past_calls_that_are_none(server: Local, call: Any, param: str, words: str) -> None:
    messages = [*USER, {"role": "assistant", "tool_calls": [call]}]
    refused(ask(server, messages=messages), f"messages[1].tool_calls{param}", words)


def test_tools_are_read_once_for_all_requests_with_the_same() -> None:
    def read(name: str, choice: str = '"auto"') -> Any:
        tools = json.dumps([tool(name)]).encode()
        return read_tools(msgspec.Raw(tools), msgspec.Raw(choice.encode()), parallel=True)

    kept = read("f")
    assert read("f") is kept is not read("f", '"required"') is not read("f", '"f"')
    for number in range(MOST_KEPT):
        read(f"f{number}")
    assert read("f") is not kept


# --- what is refused


def tool(name: Any = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": "x"}, "tools", "expected array"),
        ({"tools": [7]}, "tools[0]", "expected object"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "is required"),
        ({"tools": [tool(None)]}, "tools[0].function.name", "expected str"),
        ({"tools": [tool("a b")]}, "tools[0].function.name", "must be 1 to 64 letters"),
        ({"tools": [tool("a" * 65)]}, "tools[0].function.name", "must be 1 to 64 letters"),
        ({"tools": [tool(), tool()]}, "tools[1].function.name", "'f' is the name of a tool before it"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters", "must be an object"),
        (
            {"tools": [tool(parameters={"type": "array"})]},
            "tools[0].function.parameters.type",
            "must be object",
        ),
        ({"tools": [{**tool(), "type": "custom"}]}, "tools[0].type", "'custom' is not supported"),
        ({"tools": [tool(f"f{i}") for i in range(MOST_TOOLS + 1)]}, "tools", f"at most {MOST_TOOLS}"),
        ({"tools": [tool(description="x" * MOST_TOOL_BYTES)]}, "tools", f"at most {MOST_TOOL_BYTES}"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "wants `tools`"),
        ({"tool_choice": "nobody"}, "tool_choice", "names 'nobody', which is none of `tools`"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "none of `tools`"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type", "'allowed_tools' is not supported"),
        ({"tool_choice": 7}, "tool_choice", "expected str | object"),
        ({"parallel_tool_calls": "x"}, "parallel_tool_calls", "expected bool"),
        ({"guided_regex": "a"}, "tools", "cannot be combined with a grammar other than a JSON schema"),
        ({"functions": [tool()["function"]]}, "functions", "cannot be combined with `tools`"),
        ({"function_call": {"name": "f"}}, "function_call", "wants `functions`"),
        ({"tools": None, "functions": [{}]}, "functions[0].name", "is required"),
        ({"tools": None, "functions": [{"name": "a b"}]}, "functions[0].name", "must be 1 to 64 letters"),
        (
            {"tools": None, "functions": [{"name": "f", "parameters": {"type": "array"}}]},
            "functions[0].parameters.type",
            "must be object",
        ),
        (
            {"tools": None, "functions": [{"name": "f"}], "function_call": {"name": "g"}},
            "function_call",
            "names 'g', which is none of `functions`",
        ),
        ({"tools": None, "functions": [{"name": "f"}], "function_call": 7}, "function_call", "expected str"),
    ],
)
def test_what_is_refused(server: Local, fields: Any, param: str, words: str) -> None:
    refused(ask(server, **fields), param, words)


def test_a_call_that_has_to_come_needs_grammars(server: Local) -> None:
    for choice in ("required", "stop", {"type": "function", "function": {"name": "stop"}}):
        reply = ask(server, tool_choice=choice)
        assert (reply.status, reply.json["error"]["code"]) == (400, "not_supported")
        assert "pip install llguidance" in reply.json["error"]["message"]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ messages[0].content }} tools <tool_call>", "has no place for tools"),
        (
            "{% for tool in tools or [] %}{{ tool }}{% endfor %}{{ messages }}",
            "calls in a form that is not known here",
        ),
    ],
)
def test_templates_that_do_not_do(tmp_path: Path, template: str, words: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(template)
    with Local(
        {"m1": Scripted(script(["a"]), eos={2}, info=TAKES_TEXT)}, TextgenOptions(), folder=tmp_path
    ) as at:
        refused(ask(at), "tools", words)
        assert ask(at, tools=None).status == 200
        assert ask(at, tool_choice="none").status == 200


def test_marks_that_are_special_tokens(tmp_path: Path) -> None:
    """They are left out of texts, and yet begin calls: in Mistral's form, with ids as its templates want."""
    scribe = Path(__file__).parents[3] / "fastserve/demo/scribe/1"
    known = json.loads((scribe / "tokenizer.json").read_text())
    special = known["added_tokens"][0]
    known["added_tokens"].append({**special, "id": 3072, "content": "[TOOL_CALLS]"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(known))
    shutil.copy(scribe / "tokenizer_config.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ tools }}{{ messages[0].content }}[TOOL_CALLS]")
    said: list[Said] = [(101, "So. "), (3072, None), (102, '[{"name": "f", "arguments": {}}]'), (0, None)]
    info = Info(vocab_size=4000, slots=64)
    with Local({"m1": Scripted(said, eos={0}, info=info)}, TextgenOptions(), folder=tmp_path) as at:
        for asked in ({}, {"stop": ["So. x"]}):
            message = choice_of(ask(at, tools=[tool()], **asked))["message"]
            (call,) = message["tool_calls"]
            assert (message["content"], call["function"]) == ("So.", {"name": "f", "arguments": "{}"})
            assert re.fullmatch("[A-Za-z0-9]{9}", call["id"])
        message = choice_of(ask(at, tools=None))["message"]
        assert message["content"] == 'So. [{"name": "f", "arguments": {}}]'
