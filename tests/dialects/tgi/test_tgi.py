"""TGI's paths by their bytes: validations and their words, headers, framing, MindIE's likeness."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from fastserve.codec.generation import Info
from fastserve.settings import TextgenOptions
from tests.dialects.text_common.likely import Likely
from tests.dialects.text_common.rigs import HELLO, RIGS
from tests.dialects.text_common.serving import Local, served

SMALL = Info(vocab_size=1 << 20, tokenizer="words", max_prompt_tokens=8, max_tokens=16, max_new_tokens=12)


def serving(**options: Any) -> Local:
    return Local({"m1": Likely(HELLO, eos={2}, info=SMALL)}, TextgenOptions(**options))


@pytest.fixture(scope="module")
def server() -> Iterator[Local]:
    with serving() as server:
        yield server


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 0}, "`temperature` must be strictly positive"),
    ({"temperature": -1.5}, "`temperature` must be strictly positive"),
    ({"repetition_penalty": 0}, "`repetition_penalty` must be strictly positive"),
    ({"frequency_penalty": 2.5}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ({"top_p": 1.0}, "`top_p` must be > 0.0 and < 1.0"),
    ({"top_p": 0}, "`top_p` must be > 0.0 and < 1.0"),
    ({"typical_p": 1}, "`typical_p` must be > 0.0 and < 1.0"),
    ({"top_k": 0}, "`top_k` must be strictly positive"),
    ({"top_k": 1 << 31}, "`top_k` must be <= 2147483647. Given: 2147483648"),
    ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
    ({"max_new_tokens": 13}, "`max_new_tokens` must be <= 12. Given: 13"),
    ({"truncate": 0}, "`truncate` must be strictly positive. Given: 0"),
    ({"truncate": 9}, "`truncate` must be strictly positive and less than 9. Given: 9"),
    ({"seed": -1}, "`seed` must be >= 0 and <= 18446744073709551615. Given: -1"),
    ({"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
    ({"best_of": 0}, "`best_of` must be > 0 and <= 4. Given: 0"),
    ({"best_of": 5}, "`best_of` must be > 0 and <= 4. Given: 5"),
    ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
    ({"best_of": 2, "do_sample": True, "seed": 1}, "`seed` must not be set when `best_of` > 1"),
    ({"stop": ["a"] * 5}, "`stop` supports up to 4 stop sequences. Given: 5"),
    ({"stop": [""]}, "`stop` sequences cannot be empty"),
    ({"grammar": {"type": "json"}}, "`grammar.value` is required"),
    ({"grammar": {"type": "json", "value": [1]}}, "`grammar.value` must be an object, a JSON schema"),
    ({"grammar": {"type": "regex", "value": {}}}, "`grammar.value` must be a regular expression, a string"),
    ({"grammar": {"type": "xml", "value": ""}}, "`grammar.type` must be json, json_schema or regex"),
    ({"grammar": "a+"}, "`grammar` must be an object with `type` and `value`"),
    ({"priority": 6}, "`priority` must be >= 1 and <= 5"),
    ({"timeout": 0}, "`timeout` must be > 0 and <= 3600"),
    ({"temperature": "hot"}, "`parameters.temperature`: expected float | null, got str"),
    ({"top_k": 1.5}, "`parameters.top_k`: expected int | null, got float"),
    ({"stop": "a"}, "`parameters.stop`: expected array | null, got str"),
    ({"do_sample": 1}, "`parameters.do_sample`: expected bool | null, got int"),
]


@pytest.mark.parametrize(("parameters", "words"), WRONG, ids=lambda value: str(value)[:40])
def test_what_is_wrong_is_told_in_the_originals_words(
    server: Local, parameters: dict[str, Any], words: str
) -> None:
    for path in ("/generate", "/", "/generate_stream"):
        reply = server.post(path, {"inputs": "hi", "parameters": parameters})
        wanted = {"error": f"Input validation error: {words}", "error_type": "validation"}
        assert (reply.status, reply.json) == (422, wanted), path


def test_what_does_not_go_with_a_stream(server: Local) -> None:
    for path, more in (("/generate_stream", {}), ("/", {"stream": True})):
        asked = {"inputs": "hi", **more}
        both = server.post(path, {**asked, "parameters": {"best_of": 2, "do_sample": True}})
        assert both.json["error"].endswith("`best_of` != 1 is not supported when streaming tokens")
        prefill = server.post(path, {**asked, "parameters": {"decoder_input_details": True}})
        assert "`decoder_input_details` == true is not supported" in prefill.json["error"]


def test_prompts_too_long(server: Local) -> None:
    words = "a b c d e f g h i"
    long = server.post("/generate", {"inputs": words})
    assert long.json["error"].endswith("`inputs` must have less than 9 tokens. Given: 9")
    both = server.post("/generate", {"inputs": "a b c d e", "parameters": {"max_new_tokens": 12}})
    told = (
        "`inputs` tokens + `max_new_tokens` must be <= 16. Given: 5 `inputs` tokens and 12 `max_new_tokens`"
    )
    assert both.json["error"].endswith(told)
    cut = server.post("/generate", {"inputs": words, "parameters": {"truncate": 3, "details": True}})
    assert cut.headers["x-prompt-tokens"] == "3"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "expected object, got array"),
        (b"null", "expected object, got null"),
        (b'{"inputs":"\xff"}', "not valid UTF-8"),
        (b'{"inputs":"\\ud800"}', "not valid JSON"),
        (b'{"inputs":"a","parameters":{"temperature":1e999}}', "number out of range"),
        (b'{"inputs":"a","parameters":{"grammar":' + b"[" * 100_000, "nested too deeply"),
        (b'{"inputs":"a","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"parameters":{}}', "`inputs` is required"),
        (b'{"inputs":7}', "`inputs`: expected str, got int"),
        (b'{"inputs":"a","parameters":[]}', "`parameters`: expected object | null, got array"),
    ],
)
def test_bodies_that_are_none(server: Local, body: bytes, words: str) -> None:
    reply = server.post("/generate_stream", body)
    assert reply.status == 422
    assert words in reply.json["error"]
    assert reply.json["error_type"] == "validation"


def test_headers_and_framing(server: Local) -> None:
    whole = server.post("/generate", {"inputs": "one two", "parameters": {"details": True}})
    names = {
        "x-compute-type", "x-compute-time", "x-compute-characters", "x-total-time", "x-validation-time",
        "x-queue-time", "x-inference-time", "x-time-per-token", "x-prompt-tokens", "x-generated-tokens",
    }  # fmt: skip
    assert names <= set(whole.headers)
    told = [
        whole.headers[f"x-{name}"] for name in ("prompt-tokens", "generated-tokens", "compute-characters")
    ]
    assert told == ["2", "3", "7"]
    stream = server.post("/generate_stream", {"inputs": "hi"})
    assert stream.headers["content-type"] == "text/event-stream"
    assert stream.headers["x-accel-buffering"] == "no"
    assert stream.headers["x-compute-type"] == "cpu"
    assert stream.body == (
        b'data:{"index":1,"token":{"id":100,"text":"Hello","logprob":-0.25,"special":false},'
        b'"generated_text":null,"details":null}\n\n'
        b'data:{"index":2,"token":{"id":101,"text":" world","logprob":-0.5,"special":false},'
        b'"generated_text":null,"details":null}\n\n'
        b'data:{"index":3,"token":{"id":2,"text":"","logprob":-0.75,"special":true},'
        b'"generated_text":"Hello world","details":null}\n\n'
    )


def test_mindies_likeness() -> None:
    with serving(tgi_flavor="mindie", token_id_style="list") as server:
        stream = server.post("/generate_stream", {"inputs": "hi", "parameters": {"details": True, "seed": 7}})
        *_, last = stream.events
        assert stream.body.startswith(
            b'data: {"token":{"id":[100],"text":"Hello","logprob":null,"special":null},'
            b'"generated_text":null,"details":null}\n\n'
        )
        assert list(last) == ["token", "generated_text", "details"]
        assert list(last["details"]) == ["prompt_tokens", "finish_reason", "generated_tokens", "seed"]
        assert last["details"]["seed"] == 7  # as it was sent, though nothing is sampled
        (whole,) = server.post("/", {"inputs": "hi", "parameters": {"details": True}}).json
        assert list(whole) == ["details", "generated_text"]
        assert list(whole["details"]) == [
            "prompt_tokens", "finish_reason", "generated_tokens", "prefill", "seed", "tokens",
        ]  # fmt: skip
        assert whole["details"]["tokens"][0] == {"id": 100, "logprob": None, "special": None, "text": None}
        assert 0 <= whole["details"]["seed"] < 1 << 53  # chosen here: every client can send it again
        wrong = server.post("/generate", {"inputs": ""})
        assert (wrong.status, wrong.json["error_type"]) == (422, "Input Validation Error")


# What is sent -> the words of the refusal: those of /infer, for what it has too.
MINDIE: list[tuple[Any, int, str]] = [
    (b"{", 422, "Failed to parse request context to json"),
    ({"inputs": 5}, 422, "The type of inputs is abnormal"),
    ({"inputs": ["a"]}, 422, "The type of inputs is abnormal"),
    ({"inputs": None}, 422, "Inputs must not be null"),
    ({"inputs": ""}, 422, "Inputs must be necessary and data type must be string and length in (0, 4194304], "
     "but the length of inputs is 0"),
    ({"inputs": " "}, 422, "Inputs token length must be in (0, 1048576], but got 0"),
    ({"inputs": "a b c d e f g h i"}, 424, "Failed to enqueue inferRequest. This model's maximum input ids "
     "length cannot be greater than 8,the input ids length is 9"),
    ({"parameters": 3}, 422, "parameters must be object type."),
    ({"parameters": {"temperature": 0, "stop": 3}}, 422,
     "Parameter temperature must be in (0.0,3.40282e+38], got 0."),
    ({"parameters": {"top_p": 1.0}}, 422, "Parameter top_p must be in (0.0,1.0], got 1."),
    ({"parameters": {"top_k": 0}}, 422, "Parameter top_k must be in -1 || (0,2147483647], got 0"),
    ({"parameters": {"max_new_tokens": 1.0}}, 422, "max_new_tokens must be integer type."),
    ({"parameters": {"seed": -1}}, 422, "seed must be unsigned type."),
    ({"parameters": {"stop": "a"}}, 422, "stop must be array type."),
    ({"parameters": {"truncate": 0}}, 422,
     "Input validation error: `truncate` must be strictly positive. Given: 0"),
    ({"parameters": {"adapter_id": 1}}, 422, "adapter_id must be string type."),
    ({"parameters": {"best_of": 2}}, 422, "Input validation error: `best_of` must be > 0 and <= 1. Given: 2"),
    ({"parameters": {"frequency_penalty": "a"}}, 422,
     "`parameters.frequency_penalty`: expected float | null, got str"),
    ({"stream": 3}, 422, "stream must be boolean type."),
]  # fmt: skip


def test_mindies_bounds_are_those_of_infer() -> None:
    with served(RIGS["llm-limits"].engine(), tgi_flavor="mindie") as at:
        for body, status, told in MINDIE:
            sent = {"inputs": "a", **body} if isinstance(body, dict) else body
            for path in ("/", "/generate", "/generate_stream"):
                reply = at.post(path, sent)
                assert (reply.status, reply.json["error"]) == (status, told), (path, body)
                assert reply.headers["connection"] == "close"
        whole = at.post("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 50, "typical_p": 1}})
        assert whole.json == {"generated_text": "xxxxxx"}  # cut to what the model may say
        kept = {"details": True, "truncate": 3, "max_new_tokens": 1, "top_k": -1, "seed": 0, "stop": None}
        told = at.post("/generate", {"inputs": "a b c d e f g h i", "parameters": kept}).json["details"]
        assert (told["prompt_tokens"], told["generated_tokens"]) == (3, 1)
    engine = RIGS["llm-eos"].engine()
    with served(engine, tgi_flavor="mindie") as at:
        said = {"temperature": 0.5, "top_k": 7, "typical_p": 0.5, "frequency_penalty": 1, "priority": 2}
        at.post("/generate", {"inputs": "a", "parameters": said})
        note = engine.seen[-1].note
        sampling = note.sampling
        assert (sampling.do_sample, sampling.temperature, sampling.top_k) == (True, 0.5, 7)
        assert (sampling.typical_p, sampling.frequency_penalty, note.priority) == (1.0, 1.0, 2)
        assert sampling.max_new_tokens == 20


def test_tokenize(server: Local) -> None:
    reply = server.post("/tokenize", {"inputs": "ab c"})
    assert [(each["text"], each["start"], each["stop"]) for each in reply.json] == [("ab", 0, 2), ("c", 3, 4)]
    assert server.post("/tokenize", {"inputs": ""}).status == 422
    assert server.post("/tokenize", {}).json["error"].endswith("`inputs` is required")


def test_probes(server: Local) -> None:
    readiness = server.engine.context.readiness
    for path, body in (("/ping", b""), ("/", b'{"status":"alive"}'), ("/health", b"")):  # / is KServe's too
        assert (server.ask("GET", path).status, server.ask("GET", path).body) == (200, body)
    readiness.ready = False
    try:
        reply = server.ask("GET", "/ping")
        assert (reply.status, reply.json) == (503, {"error": "unhealthy", "error_type": "healthcheck"})
    finally:
        readiness.ready = True


def test_generate_is_vllms_where_there_is_a_prompt(server: Local) -> None:
    asked = {"prompt": "hi", "max_tokens": 3}
    assert server.post("/generate", asked).json == {"text": ["hiHello world"]}
    assert server.post("/generate", {**asked, "n": 2}).json == {"text": ["hiHello world"] * 2}
    stream = server.post("/generate", {**asked, "stream": True})
    *pieces, end = stream.body.split(b"\0")
    assert end == b""
    assert "".join(json.loads(piece)["text"][0] for piece in pieces) == "Hello world"
    neither = server.post("/generate", {"text": "hi"})
    assert (neither.status, "neither `prompt`" in neither.json["error"]["message"]) == (422, True)
    wrong = server.post("/generate", {"prompt": "hi", "temperature": -1})
    assert (wrong.status, wrong.json["error_type"]) == (422, "Input Validation Error")
    assert wrong.json["error"].startswith("`temperature`: expected float >= 0")
    assert server.post("/generate", {**asked, "model": "nobody"}).status == 200  # the only one there is
    assert "use_beam_search" in server.post("/generate", {**asked, "use_beam_search": True}).json["error"]
