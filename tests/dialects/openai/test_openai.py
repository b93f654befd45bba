"""OpenAI's paths by their bytes: fields, bounds, what is refused by name, broken bodies, many models."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from fastserve.codec.generation import Info
from fastserve.dialects.openai import completions
from fastserve.settings import TextgenOptions
from tests.dialects.text_common.likely import Likely
from tests.dialects.text_common.rigs import HELLO, RIGS
from tests.dialects.text_common.serving import Local, Reply, served
from tests.text_rig import Scripted

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
USER: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Local]:
    with Local({"m1": Likely(HELLO, eos={2})}, TextgenOptions()) as server:
        yield server


def chat(server: Local, **more: Any) -> Reply:
    return server.post(CHAT, {"model": "m1", "messages": USER, **more})


def completion(server: Local, **more: Any) -> Reply:
    return server.post(COMPLETIONS, {"model": "m1", "prompt": "hi", **more})


def refused(reply: Reply, param: str | None, words: str) -> None:
    error = reply.json["error"]
    assert (reply.status, error["param"], error["type"]) == (400, param, "invalid_request_error"), reply
    assert words in error["message"]


BOTH: list[tuple[str, Any, str]] = [
    ("temperature", -0.1, "expected float >= 0"),
    ("temperature", 2.1, "at most 2.0"),
    ("temperature", "hot", "expected float"),
    ("top_p", 1.1, "expected float <= 1"),
    ("top_k", -2, "expected int >= -1"),
    ("max_tokens", 0, "expected int >= 1"),
    ("max_tokens", 1.5, "expected int"),
    ("n", 0, "expected int >= 1"),
    ("n", 129, "expected int <= 128"),
    ("presence_penalty", 2.5, "expected float <= 2"),
    ("frequency_penalty", -2.5, "expected float >= -2"),
    ("repetition_penalty", 0, "expected float > 0"),
    ("seed", 1 << 64, "expected int"),
    ("stop", ["a", "b", "c", "d", "e"], "has 5 strings, allowed: at most 4"),
    ("stop", "", "length >= 1"),
    ("stop", 5, "expected str | array"),
    ("stop_token_ids", [-1], "expected int >= 0"),
    ("priority", 6, "expected int <= 5"),
    ("timeout", 0, "expected int >= 1"),
    ("stream", "yes", "expected bool"),
    ("stream_options", {"include_usage": True}, "wants `stream`"),
    ("logit_bias", {"5": 101}, "expected float <= 100"),
    ("logit_bias", {"five": 1}, "expected int"),
    ("logit_bias", {"-5": 1}, "expected int >= 0"),
    ("logit_bias", {str(1 << 20): 1}, "names token 1048576, allowed: 0 to 1048575"),
    ("logit_bias", {str(token): 1 for token in range(1025)}, "length <= 1024"),
    ("min_p", 1.1, "expected float <= 1"),
    ("min_tokens", -1, "expected int >= 0"),
    ("guided_json", [1], "must be an object, a JSON schema"),
    ("guided_json", "[1]", "must be an object, a JSON schema"),
    ("guided_choice", [], "length >= 1"),
    ("guided_choice", [""], "length >= 1"),
    ("guided_regex", "", "length >= 1"),
    ("guided_grammar", 5, "expected str"),
    ("structured_outputs", {"choice": "a"}, "expected array"),
    ("bad_words", ["x"], "is not supported"),
    ("allowed_token_ids", [5], "is not supported"),
    ("truncate_prompt_tokens", 5, "is not supported"),
    ("prompt_logprobs", 21, "expected int <= 20"),
    ("prompt_logprobs", True, "expected int"),
    ("response_format", {"type": "structural_tag"}, "'structural_tag' is not supported"),
    ("response_format", {"type": "json_schema"}, "is required"),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}, "is required"),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": 5}}, "must be an object"),
    ("response_format", {"type": "json"}, "is required"),
    ("response_format", {"type": "regex", "value": 7}, "must be a regular expression"),
    ("response_format", "json", "expected object"),
    ("use_beam_search", True, "is not supported"),
    ("model", 7, "expected str"),
]


@pytest.mark.parametrize(("key", "value", "words"), BOTH, ids=lambda value: str(value)[:20])
def test_fields_of_both(server: Local, key: str, value: Any, words: str) -> None:
    for reply in (chat(server, **{key: value}), completion(server, **{key: value})):
        param = reply.json["error"]["param"]
        refused(reply, param, words)
        assert param is not None
        assert re.split(r"[.\[]", param)[0] == key


def test_what_goes_together(server: Local) -> None:
    refused(chat(server, n=2, temperature=0), "n", "must be 1 when `temperature` is 0")
    refused(completion(server, best_of=2, temperature=0), "best_of", "must be 1 when `temperature` is 0")
    refused(completion(server, n=3, best_of=2), "best_of", "at least `n` (3), got 2")
    refused(completion(server, best_of=2, stream=True), "best_of", "must be `n` (1) in a stream, got 2")
    refused(chat(server, top_logprobs=1), "top_logprobs", "wants `logprobs`")
    refused(chat(server, logprobs=True, top_logprobs=21), "top_logprobs", "<= 20")
    refused(completion(server, logprobs=6), "logprobs", "<= 5")
    refused(completion(server, min_tokens=17), "min_tokens", "at most `max_tokens` (16), got 17")
    refused(completion(server, prompt_logprobs=0, stream=True), "prompt_logprobs", "in a stream")
    long = {"prompt": "hi " * 1500, "prompt_logprobs": 20, "n": 3}
    refused(completion(server, **long), "prompt_logprobs", "asks for 94500 log probabilities in one reply")
    refused(completion(server, suffix="x"), "suffix", "model 'm1' has no infill tokens, as <|fim_prefix|>")
    refused(completion(server, suffix="x", echo=True), "suffix", "cannot be combined with `echo`")
    refused(completion(server, suffix="x", prompt=[1, 2]), "suffix", "wants a `prompt` of text")
    refused(completion(server, prompt=["a"] * 9, n=30), "prompt", "would start 270 sequences")


def test_what_asks_for_nothing_is_no_fault(server: Local) -> None:
    nothing = {
        "logit_bias": {},
        "min_p": 0,
        "min_tokens": 0,
        "use_beam_search": False,
        "guided_json": None,
        "unknown": [1],
    }
    assert chat(server, tools=[], functions=None, response_format={"type": "text"}, **nothing).status == 200
    assert chat(server, tools=[{"type": "function"}], tool_choice="none").status == 200
    assert completion(server, suffix="", **nothing).status == 200


def test_one_grammar_an_answer(server: Local) -> None:
    both = {"guided_regex": "a", "structured_outputs": {"choice": ["a"]}}
    words = "cannot be combined with `guided_regex`"
    refused(chat(server, **both), "structured_outputs.choice", words)
    refused(
        chat(server, structured_outputs={"regex": "a", "json": {}}), "structured_outputs.regex", "combined"
    )


def test_a_model_without_grammars_says_so(server: Local) -> None:
    for asked in ({"guided_regex": "a"}, {"response_format": {"type": "json_object"}}):
        reply = chat(server, **asked)
        assert (reply.status, reply.json["error"]["code"]) == (400, "not_supported")
        assert "pip install llguidance" in reply.json["error"]["message"]


def test_answers_are_text(server: Local) -> None:
    refused(completion(server, tools=[{"type": "function"}]), "tools", "is not supported")
    for key in ("chat_template", "documents"):
        refused(chat(server, **{key: ["x"]}), key, "is not supported")
    refused(chat(server, continue_final_message=True), "continue_final_message", "is not supported")
    vllm = server.post("/generate", {"prompt": "hi", "response_format": {"type": "xml"}})
    assert (vllm.status, "`response_format.type` 'xml' is not supported" in vllm.json["error"]) == (422, True)
    refused(chat(server, modalities=["text", "audio"]), "modalities", "'audio'")
    refused(chat(server, audio={"voice": "x"}), "audio", "is not supported")


MESSAGES: list[tuple[Any, str, str]] = [
    ([], "messages", "length >= 1"),
    ("hi", "messages", "expected array"),
    ([{"content": "hi"}], "messages[0].role", "is required"),
    ([{"role": "pope", "content": "hi"}], "messages[0].role", "invalid enum value"),
    ([{"role": "user"}], "messages[0].content", "is required"),
    ([*USER, {"role": "user", "content": 5}], "messages[1].content", "expected str | array"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", "is required"),
    ([{"role": "user", "content": [{"type": "file"}]}], "messages[0].content[0].type", "'file'"),
]


@pytest.mark.parametrize(("messages", "param", "words"), MESSAGES, ids=lambda value: str(value)[:30])
def test_messages(server: Local, messages: Any, param: str, words: str) -> None:
    refused(server.post(CHAT, {"model": "m1", "messages": messages}), param, words)


def test_contents_in_parts(server: Local) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two three"}]
    reply = server.post(CHAT, {"model": "m1", "messages": [{"role": "user", "content": parts}]})
    assert reply.json["usage"]["prompt_tokens"] == 4  # the template says `user` too
    image = [*parts, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]
    reply = server.post(CHAT, {"model": "m1", "messages": [{"role": "user", "content": image}]})
    refused(reply, "messages[0].content[2].image_url", "takes text only")


def test_variables_of_a_template(server: Local) -> None:
    assert chat(server, chat_template_kwargs={"enable_thinking": False}).status == 200
    for key in ("messages", "self", "tools", "documents"):
        reply = chat(server, chat_template_kwargs={key: []})
        refused(reply, f"chat_template_kwargs.{key}", "cannot be set")
    reply = chat(server, chat_template_kwargs={"add_generation_prompt": 1})
    refused(reply, "chat_template_kwargs.add_generation_prompt", "must be a boolean")


@pytest.mark.parametrize(
    ("prompt", "param", "words"),
    [
        ([], "prompt", "must not be empty"),
        ([[]], "prompt[0]", "must not be empty"),
        ([1, -1], "prompt[1]", "must be a token"),
        ([1, "a"], "prompt[1]", "must be a token"),
        ([1, True], "prompt[1]", "must be a token"),
        ([True], "prompt[0]", "must be"),
        (["a", 5], "prompt[1]", "must be a string or a list of tokens"),
        ([[1, 1 << 40]], "prompt[0][1]", "must be a token"),
        ({"a": 1}, "prompt", "expected str | array"),
        (["a"] * 257, "prompt", "at most 256"),
        ([1 << 20], "prompt", "allowed: 0 to 1048575"),
        ("", "prompt", "allowed: 1 to"),
        (["a", ""], "prompt[1]", "allowed: 1 to"),
        ([[1], [2, 1 << 20]], "prompt[1]", "allowed: 0 to 1048575"),
    ],
)
def test_prompts(server: Local, prompt: Any, param: str | None, words: str) -> None:
    refused(completion(server, prompt=prompt), param, words)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not valid JSON"),
        (b"[]", "expected object, got array"),
        (b'{"model":"m1"', "not valid JSON"),
        (b'{"model":"\xff"}', "not valid UTF-8"),
        (b'{"model":NaN}', "not valid JSON"),
        (b'{"x":' + b'{"y":' * 50_000, "nested too deeply"),
        (
            b'{"model":"m1","messages":[{"role":"user","tool_calls":[{"a":' + b"[" * 50_000,
            "nested too deeply",
        ),
        (b'{"model":"m1"}', "is required"),
    ],
)
def test_bodies_that_are_none(server: Local, body: bytes, words: str) -> None:
    for path in (CHAT, COMPLETIONS):
        error = server.post(path, body).json["error"]
        assert words in error["message"]


def test_a_model_has_to_be_named(server: Local) -> None:
    refused(server.post(COMPLETIONS, {"prompt": "a"}), "model", "`model` is required")
    with Local({"m1": Scripted(HELLO, eos={2})}, TextgenOptions(any_model=True)) as any_model:
        for name in ("tgi", "dummy", None):
            assert any_model.post(CHAT, {"model": name, "messages": USER}).json["model"] == "m1"


WRITER = partial(Scripted, HELLO, eos={2})
MAKER = partial(Scripted, HELLO, info=Info(embeds=2, writes=False, tokenizer="words"))


def test_a_name_that_nobody_has_means_the_only_model() -> None:
    with Local({"m1": WRITER(), "v1": MAKER()}, TextgenOptions()) as one:
        for name in ("tgi", "dummy", "gpt-4o"):  # huggingface_hub's, text-generation's and litellm's
            assert one.post(CHAT, {"model": name, "messages": USER}).json["model"] == "m1"
            assert one.post(COMPLETIONS, {"model": name, "prompt": "a"}).json["model"] == "m1"
        assert "makes vectors" in one.post(CHAT, {"model": "v1", "messages": USER}).json["error"]["message"]
        refused(one.post(COMPLETIONS, {"model": "", "prompt": "a"}), "model", "`model` is required")
        one.engine.catalog.model("m2")  # another model, which is not ready
        assert one.post(CHAT, {"model": "m2", "messages": USER}).status == 404


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (["m1", "m2"], TextgenOptions()),
        (["m1"], TextgenOptions(any_model=False)),
        (["m1"], TextgenOptions(openai_flavor="mindie")),
    ],
    ids=["several", "off", "mindie"],
)
def test_a_name_that_nobody_has_is_404_otherwise(names: list[str], options: TextgenOptions) -> None:
    with Local({name: WRITER() for name in names}, options) as at:
        for path, rest in (
            (CHAT, {"messages": USER}),
            (COMPLETIONS, {"prompt": "a"}),
            (EMBEDDINGS, {"input": "a"}),
        ):
            assert at.post(path, {"model": "tgi", **rest}).status == 404


def test_bodies_that_were_changed_somewhere_crash_nothing(server: Local) -> None:
    """A body with a changed byte is answered or refused."""
    whole = {
        "model": "m1", "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "n": 2,
        "logprobs": True, "top_logprobs": 1, "stop": ["zz"], "stream": False, "seed": 5, "max_tokens": 3,
        "chat_template_kwargs": {"a": [1]}, "prompt": "hi", "inputs": "hi", "parameters": {"details": True},
    }  # fmt: skip
    good = json.dumps(whole).encode()
    chance = random.Random(20261122)
    seen = set()
    for turn in range(600):
        body = bytearray(good)
        for _ in range(chance.choice((1, 1, 2, 8))):
            place = chance.randrange(len(body))
            body[place : place + chance.choice((0, 1, 1, 3))] = chance.choice(
                (
                    b"",
                    b"\0",
                    b"\xff",
                    b"{",
                    b"]",
                    b'"',
                    b"9",
                    b"-",
                    b"null",
                    b"\\u",
                    bytes([chance.randrange(256)]),
                )
            )
        path = (CHAT, "/generate", "/", "/generate_stream", "/tokenize")[turn % 5]
        seen.add(server.post(path, bytes(body)).status)
    assert {200, 400, 422} <= seen <= {200, 400, 404, 422}


def test_sixty_four_models(server: Local) -> None:
    names = [f"m{i}" for i in range(60)] + ["a b", "é/ü", "x:y@1", "<&>\"'"]
    with Local({name: Scripted(HELLO, eos={2}) for name in names}, TextgenOptions()) as many:
        told = many.ask("GET", "/v1/models").json
        assert sorted(each["id"] for each in told["data"]) == sorted(names)
        assert {each["object"] for each in told["data"]} == {"model"}
        for name in names:
            assert many.post(CHAT, {"model": name, "messages": USER}).json["model"] == name
        no_name = many.post("/generate", {"inputs": "hi"})
        assert no_name.status == 404


def test_curl_reads_the_stream(server: Local) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("there is no curl")
    body = json.dumps({"model": "m1", "messages": USER, "stream": True})
    json_type = "Content-Type: application/json"
    asked = [curl, "-sN", "--max-time", "20", server.url + CHAT, "-H", json_type, "-d", body]
    found = subprocess.run(asked, capture_output=True, check=True).stdout
    events = found.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    texts = [json.loads(event[6:])["choices"][0]["delta"].get("content") or "" for event in events[:-2]]
    assert "".join(texts) == "Hello world"


def test_a_part_of_a_character_has_its_bytes_in_a_chat() -> None:
    likely = completions.TokenLogprob("�", b"\xf0\x9f", -0.5)
    answer = completions.ChatWriter("m1", 1, completions.AnswerForm(scored=True))
    written = answer.piece(0, "", [completions.ScoredToken(likely, [likely])])
    choice = json.loads(written.removeprefix(b"data: "))["choices"][0]
    token = {"token": "�", "logprob": -0.5, "bytes": [0xF0, 0x9F]}
    assert choice["logprobs"]["content"] == [{**token, "top_logprobs": [token]}]


def test_pieces_with_the_text_so_far() -> None:
    """MindIE's fullTextEnabled."""
    with Local({"m1": Likely(HELLO, eos={2})}, TextgenOptions(full_text=True)) as at:
        for more in ({}, {"logprobs": True}):
            pieces = pieces_of(chat(at, stream=True, n=2, **more))
            for index in (0, 1):
                own = [piece for piece in pieces if piece["choices"][0]["index"] == index]
                said = ""
                for piece in own:
                    said += piece["choices"][0]["delta"].get("content", "")
                    assert piece["full_text"] == said
                assert said == "Hello world"
                assert own[0]["full_text"] == ""
                assert own[-1]["choices"][0]["finish_reason"] == "stop"
            assert list(pieces[0])[-3:] == ["system_fingerprint", "full_text", "choices"]
        *pieces, last = pieces_of(
            completion(at, stream=True, echo=True, stream_options={"include_usage": True})
        )
        assert [piece["full_text"] for piece in pieces] == ["hi", "hiHello", "hiHello world", "hiHello world"]
        assert (last["choices"], "full_text" in last) == ([], False)
        assert "full_text" not in chat(at).json


def pieces_of(reply: Reply) -> list[Any]:
    *lines, done, end = reply.body.decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_a_prompt_too_long_where_errors_are_mindies() -> None:
    told = (
        "Failed to enqueue inferRequest. This model's maximum input ids length cannot be greater than 8,"
        "the input ids length is 9"
    )
    with served(RIGS["llm-limits"].engine(), openai_flavor="mindie") as at:
        for path, more in (
            (COMPLETIONS, {"model": "m1"}), ("/generate", {}), ("/generate", {"stream": True}),
        ):  # fmt: skip
            reply = at.post(path, {"prompt": "a b c d e f g h i", **more})
            assert (reply.status, list(reply.json.values())) == (424, [told, "Generation Error"])
            empty = at.post(path, {"prompt": " ", **more})
            assert empty.json["error"] == "Inputs token length must be in (0, 1048576], but got 0"
            assert empty.status == 422


def test_a_request_that_names_no_model_where_errors_are_mindies() -> None:
    bodies = {COMPLETIONS: {"prompt": "a"}, CHAT: {"messages": [{"role": "user", "content": "a"}]}}
    with served(RIGS["llm-eos"].engine(), openai_flavor="mindie") as at:
        for path, body in bodies.items():
            for named in ({}, {"model": ""}, {"model": None}):
                reply = at.post(path, body | named)
                told = {"error": "Not found model.", "error_type": "Input Validation Error"}
                assert (reply.status, reply.json) == (422, told)


def test_mindies_models_and_the_end_of_its_chats() -> None:
    with served(RIGS["llm-eos"].engine(), openai_flavor="mindie") as at:
        one = at.ask("GET", "/v1/models/m1").json
        assert (list(one), one["owned_by"]) == (["id", "object", "created", "owned_by"], "MindIE Server")
        (listed,) = at.ask("GET", "/v1/models").json["data"]
        assert listed == {**one, "root": "m1", "parent": "null", "max_model_len": listed["max_model_len"]}
        *before, last = pieces_of(chat(at, stream=True))
        assert last["choices"][0]["finish_reason"] == "stop"
        assert last["usage"] == chat(at).json["usage"]
        assert not any("usage" in piece for piece in before)
        several = [piece for piece in pieces_of(chat(at, stream=True, n=3)) if "usage" in piece]
        assert [piece["usage"]["completion_tokens"] for piece in several] == [9]
        assert not any("usage" in piece for piece in pieces_of(completion(at, stream=True)))
        asked = pieces_of(chat(at, stream=True, stream_options={"include_usage": True}))
        assert [piece["usage"] is not None for piece in asked[-2:]] == [False, True]
        assert asked[-1]["choices"] == []


def test_openais_models_and_the_end_of_its_chats(server: Local) -> None:
    one = server.ask("GET", "/v1/models/m1").json
    assert (one["owned_by"], one["parent"], one["root"]) == ("fastserve", None, "m1")
    assert not any("usage" in piece for piece in pieces_of(chat(server, stream=True)))
