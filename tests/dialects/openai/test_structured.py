"""Structured answers of the demo's model, by openai's and huggingface_hub's clients, and by plain ones."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from fastserve.serving.text.models import MOST_GRAMMAR_CHARACTERS
from tests.dialects.text_common.serving import Asking
from tests.late import Late
from tests.running import Running
from tests.text_rig import copy_small

openai, pydantic, huggingface_hub = Late("openai"), Late("pydantic"), Late("huggingface_hub")
text_generation = Late("text_generation")
USER: Any = [{"role": "user", "content": "hi"}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Served(Asking):
    """The demo's text model behind a server of its own."""

    def __init__(self, port: int) -> None:
        self.port = port

    def chat(self, **fields: Any) -> Any:
        """The reply to a chat, which is 200."""
        reply = self.post(
            "/v1/chat/completions", {"model": "scribe", "messages": USER, "max_tokens": 300, **fields}
        )
        assert reply.status == 200, reply
        return reply.json

    def text(self, **fields: Any) -> str:
        (choice,) = self.chat(**fields)["choices"]
        assert choice["finish_reason"] == "stop"
        return str(choice["message"]["content"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("demo")
    copy_small(folder / "models" / "scribe")
    with Running(folder / "models", folder / "log") as running:
        yield Served(int(running.http.rpartition(":")[2]))


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def is_person(text: str) -> bool:
    found = json.loads(text)
    return set(found) == {"name", "age"} and len(found["name"]) <= 12 and found["age"] <= 150


def test_openais_parse(client: openai.OpenAI) -> None:
    """The client makes the schema of a class, and the class of the answer."""

    class Person(pydantic.BaseModel):  # type: ignore[misc, name-defined]
        name: str
        is_tall: bool

    name = pydantic.Field(max_length=10)
    short = pydantic.create_model("Short", name=(str, name), is_tall=(bool, ...))
    found = client.chat.completions.parse(
        model="scribe", messages=USER, response_format=short, max_tokens=300, seed=1
    )
    parsed = found.choices[0].message.parsed
    assert isinstance(parsed, short)
    assert Person.model_validate(parsed.model_dump())


def test_in_pieces(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    chunks = list(
        client.chat.completions.create(
            model="scribe", messages=USER, stream=True, max_tokens=300, response_format=form
        )
    )
    assert len(chunks) > 4
    assert is_person("".join(chunk.choices[0].delta.content or "" for chunk in chunks))


@pytest.mark.parametrize("temperature", [0, 1.2])
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": PERSON}}},
        {"response_format": {"type": "json_object", "schema": PERSON}},
        {"response_format": {"type": "json", "value": PERSON}},
        {"response_format": {"type": "json_schema", "value": {"name": "x", "schema": PERSON}}},
        {"guided_json": PERSON},
        {"guided_json": json.dumps(PERSON)},
        {"structured_outputs": {"json": PERSON}},
    ],
    ids=str,
)
def test_a_schema(server: Served, fields: Any, temperature: float) -> None:
    assert is_person(server.text(temperature=temperature, **fields))


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[ab]{3}/"}, "[ab]{3}/"),
        ({"response_format": {"type": "regex", "value": "x[0-9]"}}, "x[0-9]"),
        ({"structured_outputs": {"regex": "é{2}"}}, "é{2}"),
        ({"guided_choice": ["left", "right"]}, "left|right"),
        ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
        ({"guided_grammar": 'root ::= "a" | "b" root'}, "b*a"),
        ({"structured_outputs": {"grammar": 'start: "a" "b"~2'}}, "abb"),
        ({"structured_outputs": {"json_object": True}, "stop": ["{"]}, ""),
    ],
    ids=str,
)
def test_other_grammars(server: Served, fields: Any, pattern: str) -> None:
    assert re.fullmatch(pattern, server.text(temperature=1, **fields))


def test_several_choices(server: Served) -> None:
    found = server.chat(n=4, temperature=1.5, guided_regex="[a-z]{8}")["choices"]
    texts = [each["message"]["content"] for each in found]
    assert all(re.fullmatch("[a-z]{8}", text) for text in texts)
    assert len(set(texts)) > 1


def test_completions_and_vllm(server: Served) -> None:
    asked = {"prompt": "hi", "max_tokens": 50, "guided_choice": ["left", "right"]}
    reply = server.post("/v1/completions", {"model": "scribe", **asked}).json
    assert reply["choices"][0]["text"] in ("left", "right")


def test_tgis_grammar(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    # A text model that another test has loaded here may have set HF_HUB_OFFLINE before the hub was imported.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with huggingface_hub.InferenceClient(base_url=server.url, timeout=60) as hub:
        found = hub.text_generation("hi", grammar={"type": "json", "value": PERSON}, max_new_tokens=300)
        assert is_person(found)
        found = hub.text_generation("hi", grammar={"type": "regex", "value": "a{3}b"}, max_new_tokens=30)
        assert found == "aaab"
        pieces = hub.text_generation(
            "hi", grammar={"type": "regex", "value": "[0-9]{9}"}, max_new_tokens=30, stream=True
        )
        assert re.fullmatch("[0-9]{9}", "".join(pieces).removesuffix("<|endoftext|>"))
    huggingface_hub.utils.close_session()
    grammar = text_generation.types.Grammar(type="regex", value="a{3}b")
    client = text_generation.Client(server.url, timeout=60)
    assert client.generate("hi", grammar=grammar, max_new_tokens=30).generated_text == "aaab"


def test_responses_and_messages(server: Served) -> None:
    response = server.post(
        "/v1/responses",
        {
            "model": "scribe",
            "input": "Who?",
            "text": {"format": {"type": "json_schema", "name": "x", "schema": PERSON}},
        },
    ).json
    assert is_person(response["output"][0]["content"][0]["text"])
    assert response["text"]["format"]["schema"] == PERSON
    config = {"format": {"type": "json_schema", "schema": PERSON}}
    message = server.post(
        "/v1/messages", {"model": "scribe", "max_tokens": 300, "messages": USER, "output_config": config}
    ).json
    assert is_person(message["content"][0]["text"])


def test_biases_and_least_tokens_beside_a_grammar(server: Served) -> None:
    """A mask comes before a bias; a grammar ends its answers itself."""
    letters = {
        name: server.post("/tokenize", {"prompt": name, "add_special_tokens": False}).json for name in "ab"
    }
    (a,), (b,) = (letters[name]["tokens"] for name in "ab")
    asked = {"guided_regex": "[ab]{4}", "temperature": 0}
    assert server.text(**asked, logit_bias={str(a): 100}) == "aaaa"
    assert server.text(**asked, logit_bias={str(a): -100, str(b): 100}) == "bbbb"
    body = {"model": "scribe", "messages": USER, "min_tokens": 1, **asked}
    error = server.post("/v1/chat/completions", body).json["error"]
    assert (error["param"], error["code"]) == ("min_tokens", None)
    assert "cannot be combined with a grammar" in error["message"]


def test_logprobs_of_a_long_prompt(server: Served) -> None:
    """As many as a reply may have, of a worker; the prompt's own tokens are those of echo."""
    text = "In the beginning God created the heaven and the earth. " * 60
    body = {"model": "scribe", "prompt": text, "max_tokens": 1, "prompt_logprobs": 20, "temperature": 0}
    (choice,) = server.post("/v1/completions", body).json["choices"]
    found = choice["prompt_logprobs"]
    echoed = server.post(
        "/v1/completions", {**body, "prompt_logprobs": None, "echo": True, "logprobs": 0}
    ).json
    own = echoed["choices"][0]["logprobs"]["token_logprobs"][: len(found)]
    assert found[0] is own[0] is None
    for told, expected in zip(found[1:], own[1:], strict=True):
        first = next(iter(told.values()))
        assert first["logprob"] == expected
        assert len(told) in (20, 21)
        assert [one["rank"] for one in told.values() if one is not first][:2] in ([1, 2], [1, 3], [2, 3])
    assert len(found) > 500


def test_a_grammar_that_the_worker_refuses(server: Served) -> None:
    """It is the client's fault, of a stream too, of which nothing was sent."""
    asked = {"model": "scribe", "messages": USER, "guided_json": {"type": "nope"}}
    for streams in (False, True):
        reply = server.post("/v1/chat/completions", {**asked, "stream": streams})
        assert reply.status == 400
        assert "the json schema cannot be used: Invalid type: nope" in reply.json["error"]["message"]
    parameters = {"grammar": {"type": "regex", "value": "(("}}
    reply = server.post("/generate", {"inputs": "hi", "parameters": parameters})
    assert (reply.status, reply.json["error_type"]) == (422, "validation")
    assert "unclosed group" in reply.json["error"]


def test_a_grammar_that_is_too_long(server: Served) -> None:
    asked = {"model": "scribe", "messages": USER, "guided_regex": "a" * (MOST_GRAMMAR_CHARACTERS + 1)}
    reply = server.post("/v1/chat/completions", asked)
    assert reply.status == 400
    assert f"allowed: at most {MOST_GRAMMAR_CHARACTERS}" in reply.json["error"]["message"]


def test_hostile_grammars_hold_nobody(server: Served) -> None:
    """Each ends within seconds, refused or answered, and the server still answers at once."""
    deep: Any = {"type": "null"}
    for _ in range(400):
        deep = {"anyOf": [deep, {"type": "array", "items": deep}]} if len(json.dumps(deep)) < 20_000 else deep
    for fields in (
        {"guided_regex": "(a|aa)" * 3000 + "{1000}"},
        {"guided_regex": "((((a{100}){100}){100}){100})"},
        {"guided_regex": "[^a]{10000}" * 50},
        {"guided_json": {"type": "array", "items": {"enum": [f"{n}" * 5 for n in range(6000)]}}},
        {"guided_json": deep},
        {"guided_grammar": "start: " + " | ".join(f'"{n}" start' for n in range(4000))},
    ):
        asked = {"model": "scribe", "messages": USER, "max_tokens": 3, **fields}
        reply = server.post("/v1/chat/completions", asked)
        assert reply.status in (200, 400, 429), (str(fields)[:80], reply)
        assert server.text(guided_choice=["a"]) == "a"
