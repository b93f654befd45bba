"""Calls of tools that have to come, by the demo's model, whose own words are no calls: the grammar makes
them. By openai's client and by plain ones, in every form of calls."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from fastserve.backends.llm import grammars
from fastserve.demo import demo_repository
from fastserve.dialects.openai.call_parsers import HERMES, LLAMA3, CallFormat, CallParser
from fastserve.dialects.openai.responses import PLACES
from fastserve.dialects.openai.tools import (
    MOST_IMPLIED_BYTES,
    MOST_IMPLIED_OBJECTS,
    ToolFunction,
    ToolUse,
    can_hold,
    find_marks,
    read_tools,
    write_grammar,
)
from fastserve.serving.text.models import MOST_GRAMMAR_CHARACTERS
from fastserve.serving.text.tokenizer import FolderTokenizer
from tests.dialects.openai.test_structured import Served
from tests.late import Late
from tests.running import Running
from tests.text_rig import copy_small

openai, pydantic, huggingface_hub = Late("openai"), Late("pydantic"), Late("huggingface_hub")
FORMS = {
    "hermes": ("<tool_call>", "backend: text\ntext: {runtime: numpy}\n"),
    "llama3": ('<|python_tag|>"parameters"', "backend: text\ntext: {runtime: numpy}\n"),
    "mistral": ("", "backend: text\ntext: {runtime: numpy, tool_parser: mistral}\n"),
    "none": ("<tool_call>", "backend: text\ntext: {runtime: numpy, tool_parser: none}\n"),
}
TEMPLATE = """{{ bos_token }}{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}
{% for message in messages %}{{ message.content or '' }}
{% for call in message.tool_calls or [] %}
%s{{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}
{% endfor %}"""
LEAF: list[Any] = [
    {"type": "integer", "minimum": -9, "maximum": 99},
    {"type": "string", "maxLength": 8},
    {"type": "boolean"},
    {"enum": ["red", "green", 'a "b"']},
    {"type": "array", "items": {"type": "integer", "maximum": 9, "minimum": 0}, "maxItems": 3},
    {"$ref": "#/$defs/place"},
]
PLACE = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "maximum": 9, "minimum": 0},
        "name": {"type": "string", "maxLength": 4},
    },
    "required": ["x"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("demo")
    for name, (mark, config) in FORMS.items():
        model = copy_small(folder / "models" / name)
        (model / "model.yaml").write_text(config)
        (model / "1" / "chat_template.jinja").write_text(TEMPLATE.replace("%s", mark))
    with Running(folder / "models", folder / "log") as running:
        yield Served(int(running.http.rpartition(":")[2]))


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def tool(name: str, parameters: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def some_tools(rng: random.Random) -> dict[str, Any]:
    """Return one to four functions: the schemas of their arguments by their names."""
    found = {}
    for i in range(rng.randint(1, 4)):
        names = rng.sample(["a", "b", "city", "n_1"], rng.randint(0, 3))
        found[f"do_{i}"] = {
            "type": "object",
            "properties": {name: rng.choice(LEAF) for name in names},
            "required": rng.sample(names, rng.randint(0, len(names))),
            "$defs": {"place": PLACE},
        }
    return found


def check_calls(choice: Any, schemas: dict[str, Any], *, parallel: bool = False) -> list[Any]:
    """Check that an answer is calls alone, whose arguments belong to their schemas; return them. Of parallel
    ones, which this model goes on with, the last may be cut."""
    calls = choice["message"]["tool_calls"]
    if parallel and choice["finish_reason"] == "length":  # the beginning of a call without a name is content
        calls = calls[:-1]
    else:
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None), choice
    for call in calls:
        schema = {**schemas[call["function"]["name"]], "additionalProperties": False}
        jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
    return list(calls)


def put_together(chunks: Sequence[Any]) -> Any:
    """Return the choice of a stream."""
    calls: list[Any] = []
    for chunk in chunks:
        for part in chunk["delta"].get("tool_calls", []):
            if "id" in part:
                assert part["index"] == len(calls)
                calls.append(part)
            else:
                assert part["index"] == len(calls) - 1
                calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    content = "".join(chunk["delta"].get("content") or "" for chunk in chunks) or None
    return {
        "message": {"content": content, "tool_calls": calls},
        "finish_reason": chunks[-1]["finish_reason"],
    }


def ask(server: Served, *, stream: bool, **fields: Any) -> Any:
    """Return the choice of an answer, whole or put together."""
    if not stream:
        return server.chat(**fields)["choices"][0]
    reply = server.post("/v1/chat/completions", {"max_tokens": 300, "stream": True, **fields})
    assert reply.status == 200, reply
    events = reply.body.split(b"\n\n")[:-2]
    return put_together([json.loads(each.removeprefix(b"data: "))["choices"][0] for each in events])


def converse(server: Served, seed: int) -> int:
    """One conversation: calls that have to come, their results, a call by name, its result, and words.
    Return the number of calls."""
    rng = random.Random(seed)
    schemas, stream = some_tools(rng), rng.random() < 0.5
    fields: dict[str, Any] = {
        "model": rng.choice(["hermes", "llama3", "mistral"]),
        "tools": [tool(name, schema) for name, schema in schemas.items()],
        "temperature": rng.choice([0, 0.7, 1.2]),
        "seed": seed,
        "max_tokens": 800,
    }
    messages: list[Any] = [{"role": "user", "content": rng.choice(["hi", "go on", "Do it, please."])}]
    named = rng.choice(list(schemas))
    count = 0
    for choice in ("required", {"type": "function", "function": {"name": named}}):
        parallel = rng.random() < 0.3 and choice == "required"
        answer = ask(
            server,
            messages=messages,
            stream=stream,
            tool_choice=choice,
            parallel_tool_calls=parallel,
            **fields,
        )
        calls = check_calls(answer, schemas, parallel=parallel)
        assert len(calls) >= 1 if parallel else len(calls) == 1
        assert choice == "required" or calls[0]["function"]["name"] == named
        count += len(calls)
        messages = [*messages[-1:], {"role": "assistant", "content": None, "tool_calls": calls[:2]}]
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in calls[:2]]
    words = ask(server, messages=messages, stream=stream, tool_choice="none", **{**fields, "max_tokens": 8})
    assert words["finish_reason"] in ("length", "stop")
    return count


@pytest.mark.parametrize(
    "seeds", [range(12), pytest.param(range(12, 200), marks=pytest.mark.torture)], ids=len
)
def test_conversations(server: Served, seeds: range) -> None:
    """The arguments of every call belong to their schema: in 12 conversations, in 200 of the long run."""
    assert sum(converse(server, seed) for seed in seeds) >= 2 * len(seeds)


@pytest.mark.parametrize("clients", [4, 64])
def test_many_clients_at_a_time(server: Served, clients: int) -> None:
    """Half of them stream; all have one grammar, and answers of their own."""
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}},
        "required": ["name"],
    }
    fields = {"tools": [tool("greet", schema)], "tool_choice": "required", "parallel_tool_calls": False}

    def one(number: int) -> str:
        messages = [{"role": "user", "content": f"hello {number}"}]
        answer = ask(
            server,
            model="hermes",
            messages=messages,
            seed=number,
            stream=bool(number % 2),
            max_tokens=200,
            **fields,
        )
        (call,) = check_calls(answer, {"greet": schema})
        return str(call["function"]["arguments"])

    with ThreadPoolExecutor(clients) as pool:
        found = list(pool.map(one, range(clients)))
    assert len(set(found)) > clients // 4


def test_openais_parse(client: openai.OpenAI) -> None:
    """The client makes the tool of a class, with references in its schema, and the class of the arguments."""
    inner = pydantic.create_model("Place", x=(int, pydantic.Field(ge=0, le=9)), main=(bool, ...))
    outer = pydantic.create_model(
        "Visit", places=(list[inner], pydantic.Field(max_length=2)), first=(inner, ...)
    )
    for choice in ("required", {"type": "function", "function": {"name": "Visit"}}):
        found = client.chat.completions.parse(
            model="hermes",
            messages=[{"role": "user", "content": "hi"}],
            tools=[openai.pydantic_function_tool(outer)],
            tool_choice=choice,
            parallel_tool_calls=False,
            max_tokens=300,
        )
        (call,) = found.choices[0].message.tool_calls
        assert isinstance(call.function.parsed_arguments, outer)
    asked: Any = {"model": "hermes", "input": "hi", "max_output_tokens": 300}
    shown: Any = [openai.pydantic_function_tool(outer)]
    (called,) = client.responses.parse(
        **asked, tools=shown, tool_choice="required", parallel_tool_calls=False
    ).output
    assert isinstance(called.parsed_arguments, outer)
    assert isinstance(client.responses.parse(**asked, text_format=inner).output_parsed, inner)


def test_openais_stream(client: openai.OpenAI) -> None:
    short = pydantic.create_model("Short", name=(str, pydantic.Field(max_length=10)))
    with client.chat.completions.stream(
        model="mistral",
        messages=[{"role": "user", "content": "hi"}],
        tools=[openai.pydantic_function_tool(short)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=300,
    ) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        found = stream.get_final_completion().choices[0].message.tool_calls
    assert len(done) == len(found) == 1
    assert isinstance(found[0].function.parsed_arguments, short)


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_whose_call_has_to_come(client: openai.OpenAI, stream: bool) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}}}
    shown: Any = [{"type": "function", "name": name, "parameters": schema} for name in ("count", "other")]
    asked: Any = {"tools": shown, "parallel_tool_calls": False, "max_output_tokens": 100}
    for model, choice in (("hermes", "required"), ("mistral", {"type": "function", "name": "count"})):
        found: Any = client.responses.create(
            model=model, input="hi", tool_choice=choice, stream=stream, **asked
        )
        if stream:
            found = list(found)[-1].response
        (call,) = found.output
        assert (call.type, call.status, found.status) == ("function_call", "completed", "completed")
        assert choice == "required" or call.name == "count"
        jsonschema.validate(json.loads(call.arguments), schema)
        repeated = found.tool_choice if isinstance(choice, str) else found.tool_choice.to_dict()
        assert repeated == choice


def test_the_hubs_chat(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub names a function without a type, as TGI has it."""
    # A text model that another test has loaded here may have set HF_HUB_OFFLINE before the hub was imported.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}}}
    asked = {"model": "llama3", "tools": [tool("count", schema, description="Count")], "max_tokens": 100}
    messages = [{"role": "user", "content": "hi"}]
    with huggingface_hub.InferenceClient(base_url=server.url, timeout=60) as hub:
        named = huggingface_hub.ChatCompletionInputToolChoiceClass(function={"name": "count"})
        for choice in ("required", named):
            found = hub.chat_completion(messages, tool_choice=choice, **asked).choices[0]
            (call,) = found.message.tool_calls
            assert found.finish_reason == "tool_calls"
            jsonschema.validate(json.loads(call.function.arguments), schema)
        chunks = list(hub.chat_completion(messages, tool_choice="required", stream=True, **asked))
        parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or []]
        assert parts[0].function.name == "count"
        jsonschema.validate(json.loads("".join(part.function.arguments for part in parts)), schema)
    huggingface_hub.utils.close_session()


@pytest.mark.parametrize("model", ["hermes", "llama3", "mistral"])
@pytest.mark.parametrize("temperature", [0, 1.2])
def test_content_of_a_schema_or_calls(server: Served, model: str, temperature: float) -> None:
    """With auto, an answer is either."""
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}}}
    person = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}},
        "required": ["name"],
    }
    form = {"type": "json_schema", "json_schema": {"schema": {**person, "additionalProperties": False}}}
    seen = set()
    for seed in range(6):
        answer = server.chat(
            model=model,
            tools=[tool("count", schema)],
            response_format=form,
            temperature=temperature,
            seed=seed,
        )["choices"][0]
        seen.add(answer["finish_reason"])
        if answer["finish_reason"] == "tool_calls":
            check_calls(answer, {"count": schema})
        else:
            assert answer["finish_reason"] == "stop", answer
            jsonschema.validate(json.loads(answer["message"]["content"]), person)
    assert seen <= {"stop", "tool_calls"}


def judge(folder: Path, form: CallFormat, added: list[str]) -> Callable[[ToolUse, str], bool]:
    """Return whether a text belongs to the grammar of some tools with `auto`, over the demo's vocabulary and
    tokens added to it."""
    from llguidance import LLMatcher, LLTokenizer

    known = json.loads((demo_repository() / "scribe/1/tokenizer.json").read_text())
    one = known["added_tokens"][0]
    known["added_tokens"] += [
        {**one, "id": 3072 + i, "content": text, "special": False} for i, text in enumerate(added)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(known))
    tokenizer = FolderTokenizer(folder / "tokenizer.json", "m1")
    reader = LLTokenizer(json.dumps(known), n_vocab=3072 + len(added), eos_token=[0])

    def takes(use: ToolUse, text: str) -> bool:
        grammar = write_grammar(use, form, find_marks(form, tokenizer), None, True)
        assert grammar is not None
        matcher = LLMatcher(reader, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        good = all(matcher.try_consume_tokens([token]) for token in tokenizer.encode(text, special=False))
        return good and bool(matcher.is_accepting())

    return takes


GOOD, BAD = '{"name": "count", "arguments": {"n": 7}}', '{"name": "count", "arguments": {"n": "7"}}'


@pytest.mark.parametrize("has_token", [True, False])
def test_a_strict_tool_keeps_calls_to_its_schema(tmp_path: Path, has_token: bool) -> None:
    """Of any text with calls in it, those of a strict tool are held to its schema, others are not."""
    takes = judge(tmp_path, HERMES, ["<tool_call>", "</tool_call>", "<think>"] if has_token else [])
    parameters = msgspec.Raw(b'{\n "properties": {\n"n": {"type": "integer"} }, "required": ["n"]}')
    for strict in (True, False):
        others = [ToolFunction("other", strict=True)]
        use = ToolUse([], [ToolFunction("count", parameters, strict), *others])
        for begin in ("", "So.\n", "a < b <tool", "<think>hm</think>" if has_token else "<"):
            assert takes(use, begin)
            call = "<tool_call>\n%s\n</tool_call>"
            assert takes(use, begin + call % GOOD)
            assert takes(use, begin + call % GOOD + "\n" + call % GOOD)
            assert takes(use, begin + call % BAD) is not strict
            assert takes(use, begin + call % GOOD + "\n" + call % BAD) is not strict
            assert not takes(use, begin + call % GOOD.replace("count", "nobody"))


LLAMA_GOOD, LLAMA_BAD = (text.replace("arguments", "parameters") for text in (GOOD, BAD))
TEXTS = [
    *("", "So.", "{", "{ }", "a {", '{"n": 7}', '{"name": "Bob", "parameters": 7}', '{"type": "x", "y": 3}'),
    *('{"id": 7, "name": "nobody"}', '{"name": "nobody", "parameters": {}}', "{\n", '{"name":', "[7]"),
    *("<|python", "<|eom|> x", '{"name": "counts"}', '"name": "count"', 'x {"name": "count", "a": 7}'),
]
OTHER_CALLS = [
    '{"type": "function", "name": "count", "parameters": {"n": "7"}}',
    '{"id": "a\\"", "type": null, "name": "count"}',
    '{"parameters": {"n": "7"}, "name": "count"}',
    '{"name": "co\\u0075nt", "parameters": {}}',
    '{"n\\u0061me": "count", "parameters": {}}',
    '{"id": {}, "name": "count"}',
    '{"name":"count","parameters":{"n":"7"}}',
]


@pytest.mark.parametrize("has_token", [True, False])
def test_a_strict_tool_of_bare_calls(tmp_path: Path, has_token: bool) -> None:
    """A text that begins as a call of Llama 3's form is one of the grammar; every other text is free."""
    mark = "<|python_tag|>"
    takes = judge(tmp_path, LLAMA3, [mark] if has_token else [])
    parameters = msgspec.Raw(b'{"properties": {"n": {"type": "integer"}}, "required": ["n"]}')
    uses = {
        strict: ToolUse([], [ToolFunction("count", parameters, strict), ToolFunction("a.b", strict=True)])
        for strict in (True, False)
    }
    for text in TEXTS:
        assert takes(uses[True], text), text
        parser = CallParser(LLAMA3, uses[True].names)
        parser.feed(text)
        assert not parser.calls
    for text in OTHER_CALLS:
        assert not takes(uses[True], text), text
        parser = CallParser(LLAMA3, uses[True].names)
        parser.feed(text)
        assert parser.calls
    for strict, use in uses.items():
        for before in ("", "\n ", mark, f"So. {mark}\n"):
            assert takes(use, before + LLAMA_GOOD)
            assert takes(use, f"{before}{LLAMA_GOOD};{LLAMA_GOOD}")
            assert takes(use, f"{before}{LLAMA_GOOD}; {LLAMA_BAD}") is not strict
            assert takes(use, before + LLAMA_BAD) is not strict
            assert takes(use, before + '{"name": "a.b", "parameters": {}}')
            assert not takes(use, before + '{"name": "a.b", "parameters": {"n": 7}}')
        assert not takes(use, mark + LLAMA_GOOD.replace("count", "nobody"))
    one = ToolUse([], [ToolFunction("count", parameters, True)], parallel=False)
    assert takes(one, LLAMA_GOOD)
    assert not takes(one, f"{LLAMA_GOOD};{LLAMA_GOOD}")


@pytest.mark.parametrize("model", ["hermes", "llama3", "mistral"])
def test_words_beside_a_strict_tool(server: Served, model: str) -> None:
    """The worker takes the grammar, and the model, whose words are no calls, says what it says without."""
    given = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    said = [
        server.chat(model=model, tools=[tool("count", given, strict=strict)], temperature=0, max_tokens=9)
        for strict in (True, False)
    ]
    texts = [each["choices"][0]["message"]["content"] for each in said]
    assert texts[0] == texts[1] != ""


def test_without_a_strict_tool_auto_is_free() -> None:
    tokenizer = FolderTokenizer(demo_repository() / "scribe/1/tokenizer.json", "m1")
    free, strict = ToolUse([], [ToolFunction("f")]), ToolUse([], [ToolFunction("f", strict=True)])
    for use, form, can in ((free, HERMES, True), (strict, HERMES, False), (strict, LLAMA3, False)):
        assert write_grammar(use, form, find_marks(form, tokenizer), None, can) is None


COUNT = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
BIGGEST = {"type": "object", "properties": {"n": {"enum": ["x" * MOST_IMPLIED_BYTES]}}}
IMPLIED: list[tuple[Any, bool, bool]] = [  # strict, as it is sent (..., not at all), and as it is echoed
    ({"strict": ..., "parameters": COUNT}, True, True),
    ({"strict": None, "parameters": COUNT}, True, True),
    ({"strict": True, "parameters": COUNT}, True, True),
    ({"strict": False, "parameters": COUNT}, False, False),
    ({"strict": ..., "parameters": None}, True, True),
    ({"strict": ..., "parameters": {"properties": {"n": {"not": {"type": "string"}}}}}, False, False),
]


def test_a_response_says_which_tools_are_strict(client: openai.OpenAI) -> None:
    """Without `strict`, as many as a grammar can hold: a schema that it could not is no error then."""
    shown: Any = [
        {"type": "function", "name": f"f{i}", **{key: value for key, value in sent.items() if value != ...}}
        for i, (sent, _, _) in enumerate(IMPLIED)
    ]
    asked: Any = {"input": "hi", "max_output_tokens": 4}
    for model in ("hermes", "llama3"):
        found = client.responses.create(model=model, tools=shown, **asked)
        assert [each.strict for each in found.tools] == [echoed for _, _, echoed in IMPLIED]
    streamed = client.responses.create(model="mistral", tools=shown, stream=True, **asked)
    told = {
        tuple(each.strict for each in event.response.tools)
        for event in streamed
        if hasattr(event, "response")
    }
    assert told == {tuple(echoed for _, _, echoed in IMPLIED)}
    (stays_text,) = client.responses.create(model="none", tools=shown[:1], **asked).tools
    assert stays_text.strict is False
    big: Any = [{"type": "function", "name": "f", "parameters": BIGGEST}]
    assert client.responses.create(model="hermes", tools=big, **asked).tools[0].strict is False


@pytest.mark.parametrize(("sent", "held"), [(sent, held) for sent, held, _ in IMPLIED])
def test_a_tool_of_a_response_is_held_unless_it_says_otherwise(tmp_path: Path, sent: Any, held: bool) -> None:
    """Another tool is strict, so that there is a grammar; tools of a chat are free without `strict`."""
    takes = judge(tmp_path, HERMES, ["<tool_call>", "</tool_call>"])
    given = {key: value for key, value in sent.items() if value != ...}
    tools = [tool("count", given.pop("parameters"), **given), tool("other", COUNT, strict=True)]
    text = '<tool_call>\n{"name": "count", "arguments": {"n": "7", "m": 7}}\n</tool_call>'
    for places in ({"places": PLACES}, {}):
        use = read_tools(msgspec.Raw(json.dumps(tools).encode()), msgspec.UNSET, parallel=True, **places)
        assert use is not None
        assert takes(use, text) is not (held if places else given.get("strict") is True)


def of(**fields: Any) -> dict[str, Any]:
    """A schema with a property of these keywords that has to be there."""
    return {"type": "object", "properties": {"a": fields}, "required": ["a"], "$defs": {"p": PLACE}}


HELD: list[Any] = [
    {},
    {"type": "object", "description": "d", "additionalProperties": {"type": "integer"}},
    of(),
    of(type="string", format="date-time", minLength=0, maxLength=100),
    of(type=["integer", "null"], minimum=-(10**15), maximum=10**15, default=None),
    of(type="integer", exclusiveMinimum=0, maximum=1),
    of(type="number", exclusiveMinimum=0, exclusiveMaximum=1e-6),
    of(type="number", minimum=2.5, maximum=2.5),
    of(type="array", items={"$ref": "#/$defs/p"}, minItems=2, maxItems=2),
    of(anyOf=[{"$ref": "#/$defs/p", "title": "P"}, {"type": "null"}], default=None),
    of(type="string", enum=["a", "b"], title="A"),
    of(const=7),
    {"properties": {"p": {"type": "array", "items": {"$ref": "#/$defs/p"}}}, "$defs": {"p": PLACE}},
]
NOT_HELD: list[Any] = [
    {"properties": {}, "required": ["b"]},
    {"anyOf": [{"required": ["a"]}]},
    {"properties": []},
    {"$defs": []},
    {"$defs": {"x": {"$ref": "#/$defs/x"}}, "properties": {"a": {"$ref": "#/$defs/x"}}},
    of(type="string", format="colour"),
    of(type="string", pattern="(?=a)b"),
    of(type="string", minLength=2, maxLength=1),
    of(type="string", minLength=1.5),
    of(type="string", minimum=1),
    of(type="colour"),
    of(type=[]),
    of(type="integer", minimum=2, maximum=1),
    of(type="integer", minimum=1.5),
    of(type="integer", exclusiveMinimum=0, exclusiveMaximum=1),
    of(type="integer", minimum=10**30),
    of(type="number", minimum=1e-300),
    of(type="number", exclusiveMinimum=1, maximum=1),
    of(type="array", items=False),
    of(type="array", items={"not": {}}),
    of(type="array", uniqueItems=True),
    of(type="string", enum=[1]),
    of(enum=[]),
    of(enum=[{"a": 1}]),
    of(enum=["a"], const="b"),
    of(anyOf=[]),
    of(anyOf=[{"type": "string"}], type="integer"),
    of(**{"$ref": "#/$defs/nobody"}),
    of(**{"$ref": "#/$defs/p", "minProperties": 9}),
]


def test_schemas_that_are_held_without_saying_so(tmp_path: Path) -> None:
    """Only such as llguidance takes, alone and together."""
    takes = judge(tmp_path, HERMES, [])
    functions = [
        ToolFunction(f"f{i}", msgspec.Raw(json.dumps(each).encode()), True) for i, each in enumerate(HELD)
    ]
    for each, function in zip(HELD, functions, strict=True):
        assert can_hold({"type": "object", **each}), each
        assert takes(ToolUse([], [function]), "So."), each
    assert takes(ToolUse([], functions), "So.")
    assert not [each for each in NOT_HELD if can_hold({"type": "object", **each})]


def test_the_widest_tools_that_are_held_without_saying_so(tmp_path: Path) -> None:
    """Stay within the worker's limits while an answer is written."""
    numpy = pytest.importorskip("numpy")
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    file = demo_repository() / "scribe/1/tokenizer.json"
    tokenizer, reader = FolderTokenizer(file, "m1"), LLTokenizer(file.read_text())
    limits = LLParserLimits(
        max_items_in_row=grammars.MOST_ITEMS,
        step_max_items=grammars.MOST_STEP_ITEMS,
        max_lexer_states=grammars.MOST_STATES,
        max_grammar_size=grammars.MOST_SYMBOLS,
    )
    objects = [{"type": "object", "title": str(i)} for i in range(MOST_IMPLIED_OBJECTS - 3)]
    lists = [{"type": "array", "items": {"const": i}} for i in range(MOST_IMPLIED_OBJECTS // 2 - 2)]
    many = {f"p{i}": {"type": "string"} for i in range(MOST_IMPLIED_OBJECTS - 2)}
    mask = numpy.zeros(3072 // 32, numpy.int32)
    for properties, text in (
        ({"a": {"anyOf": objects}}, '"a": '),
        ({"a": {"anyOf": lists}}, '"a": ['),
        (many, '"p'),
    ):
        tools = [tool("f", {"properties": properties})]
        use = read_tools(msgspec.Raw(json.dumps(tools).encode()), msgspec.UNSET, parallel=True, places=PLACES)
        assert use is not None
        grammar = write_grammar(use, HERMES, (), None, True)
        matcher = LLMatcher(reader, grammar, log_level=0, limits=limits)
        said = '<tool_call>\n{"name": "f", "arguments": {' + text
        for token in tokenizer.encode(said, special=False):
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            assert matcher.consume_token(token), matcher.get_error()
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        assert not matcher.is_error(), matcher.get_error()
        tools[0]["function"]["parameters"]["properties"] = {"z": {"anyOf": [{}] * MOST_IMPLIED_OBJECTS}}
        wider = msgspec.Raw(json.dumps(tools).encode())
        use = read_tools(wider, msgspec.UNSET, parallel=True, places=PLACES)
        assert use is not None
        assert not use.functions[0].strict


@pytest.mark.parametrize("count", [1, 16, 128])
def test_a_grammar_for_tools_that_may_be_strict_is_short_enough(count: int) -> None:
    """However many tools share the bytes up to which they are strict without saying so."""
    room = MOST_IMPLIED_BYTES // count - 50
    names = [f"{i:_>{min(room, 64)}}" for i in range(count)]
    enum = {"n": {"enum": ["x" * (room - 110 - len(names[0]))]}} if room > 200 else {}
    tools = [tool(name, {"properties": enum}) if enum else {"function": {"name": name}} for name in names]
    text = json.dumps(tools, separators=(",", ":")).encode()
    assert MOST_IMPLIED_BYTES * 0.7 < len(text) <= MOST_IMPLIED_BYTES
    use = read_tools(msgspec.Raw(text), msgspec.UNSET, parallel=True, places=PLACES)
    assert use is not None
    for form in (HERMES, LLAMA3):
        written = write_grammar(use, form, (), None, True)
        assert written is not None
        assert len(written) < MOST_GRAMMAR_CHARACTERS * 0.75


def test_tools_whose_calls_stay_text(server: Served) -> None:
    schema = {"type": "object", "properties": {}}
    answer = server.chat(model="none", tools=[tool("f", schema)], max_tokens=4)["choices"][0]
    assert answer["message"]["content"]
    reply = server.post(
        "/v1/chat/completions",
        {"model": "none", "messages": [{"role": "user", "content": "hi"}], "tools": [tool("f", schema)],
         "tool_choice": "required"},
    )  # fmt: skip
    assert (reply.status, reply.json["error"]["param"]) == (400, "tool_choice")
    assert "`text.tool_parser` of model 'none' is none" in reply.json["error"]["message"]


def test_schemas_that_are_refused(server: Served) -> None:
    asked = {"model": "hermes", "messages": [{"role": "user", "content": "hi"}], "tool_choice": "required"}
    bad = [tool("f", {"type": "object", "properties": {"a": {"type": "nope"}}})]
    for streams in (False, True):
        reply = server.post("/v1/chat/completions", {**asked, "tools": bad, "stream": streams})
        assert reply.status == 400
        assert "the grammar of the tools cannot be used: " in reply.json["error"]["message"]
    good = [tool("f", {"type": "object", "properties": {}})]
    reply = server.post(
        "/v1/chat/completions", {**asked, "tools": good, "tool_choice": "auto", "guided_json": "{"}
    )
    assert reply.status == 400
    assert "the json schema cannot be used: " in reply.json["error"]["message"]
