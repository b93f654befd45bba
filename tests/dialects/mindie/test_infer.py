"""POST /infer and /infer_token: what is refused and in which words, answers and events byte for byte."""

from __future__ import annotations

import base64
import contextlib
import re
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fastserve._ext.http2_frames import frame
from fastserve.codec.generation import Info
from tests.dialects.text_common.rigs import RIGS, SAMPLE_1
from tests.dialects.text_common.serving import Local, local, served
from tests.faults.flooding import END_HEADERS, HEADERS, Link, block
from tests.text_rig import Scripted

pytestmark = pytest.mark.waits

SAMPLE_TEXT = "am a French photographer based in Paris.\nI have been shooting since I was 15"
# The seed's first sample: its first and its last events, times aside.
FIRST = (
    'data: {"prefill_time":T,"decode_time":null,"token":{"id":626,"text":"am"}}\n\n'
    'data: {"prefill_time":null,"decode_time":T,"token":{"id":263,"text":" a"}}\n\n'
)
LAST = (
    'data: {"prefill_time":null,"decode_time":T,"token":{"id":29896,"text":"1"}}\n\n'
    'data: {"prefill_time":null,"decode_time":T,"generated_text":"am a French photographer based in Paris.\\n'
    'I have been shooting since I was 15","details":{"finish_reason":"length","generated_tokens":20,'
    '"seed":846930886},"token":{"id":29945,"text":null}}\n\n'
)
WHOLE = (
    'data: {"prefill_time":T,"decode_time":null,"token":{"id":5122,"text":":"}}\n\n'
    'data: {"prefill_time":null,"decode_time":T,"token":{"id":7552,"text":":)"}}\n\n'
    'data: {"prefill_time":null,"decode_time":T,"token":{"id":40,"text":":)I"}}\n\n'
    'data: {"prefill_time":null,"decode_time":T,"token":{"id":2776,"text":":)I\'m"}}\n\n'
    'data: {"prefill_time":null,"decode_time":T,"generated_text":":)I\'m ","details":null,'
    '"token":{"id":4102,"text":null}}\n\n'
)


@pytest.fixture(scope="module")
def seed1() -> Iterator[Local]:
    with local(Scripted(SAMPLE_1, info=Info(vocab_size=1 << 20, tokenizer="words", max_tokens=64))) as at:
        yield at


def timeless(body: bytes) -> str:
    """Times are floats, and T."""
    return re.sub(r'_time":\d+\.\d{2,}', '_time":T', body.decode())


def test_a_grammar_comes_by_openais_and_tgis_paths() -> None:
    """MindIE's own have no key for one, and ignore it."""
    info = Info(vocab_size=1 << 20, tokenizer="words", max_tokens=64, grammars=True)
    wanted = {"type": "object", "title": "x"}
    form = {"type": "json_schema", "json_schema": {"schema": wanted}}
    grammar = {"type": "json", "value": wanted}
    chat = {"model": "m1", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    mine = {"response_format": form, "grammar": grammar, "max_new_tokens": 3}
    with served(Scripted(SAMPLE_1, info=info), openai_flavor="mindie", tgi_flavor="mindie") as at:
        for path, body, schema in (
            ("/v1/chat/completions", {**chat, "response_format": form}, wanted),
            (
                "/v1/chat/completions",
                {**chat, "response_format": {"type": "json_object"}},
                {"type": "object"},
            ),
            (
                "/generate",
                {"inputs": "hi", "parameters": {"grammar": grammar, "max_new_tokens": 3}},
                wanted,
            ),
            ("/infer", {"inputs": "hi", "parameters": mine, **mine}, None),
            ("/v2/models/m1/generate", {"text_input": "hi", "parameters": mine, **mine}, None),
        ):
            reply = at.post(path, body)
            assert reply.status == 200, (path, reply)
            found = at.models["m1"].seen[-1].note.sampling.grammar  # type: ignore[attr-defined]
            assert (found and msgspec.json.decode(found.text)) == schema, path


def test_the_seeds_samples_byte_for_byte(seed1: Local) -> None:
    reply = seed1.infer("My name is Olivier and I", stream=True, seed=846930886, details=True)
    text = timeless(reply.body)
    assert text.startswith(FIRST)
    assert text.endswith(LAST)
    assert text.count("data: ") == 20
    whole = seed1.infer("My name is Olivier and I", stream=False, seed=846930886, details=True)
    assert whole.body == (
        b'{"generated_text":"am a French photographer based in Paris.\\nI have been shooting since I was 15",'
        b'"details":{"finish_reason":"length","generated_tokens":20,"seed":846930886}}'
    )
    with served(RIGS["llm-seed2"].engine(), full_text=True) as at:
        assert timeless(at.infer(stream=True, max_new_tokens=5).body) == WHOLE


def test_a_sequence_that_ends_by_itself(seed1: Local) -> None:
    with served(RIGS["llm-eos"].engine()) as at:
        reply = at.infer(details=True, seed=1)
        assert reply.json == {
            "generated_text": "Hello world",
            "details": {"finish_reason": "eos_token", "generated_tokens": 3, "seed": 1},
        }
        *_, last = at.infer(stream=True).events
        assert (last["generated_text"], last["token"], last["details"]) == (
            "Hello world",
            {"id": 2, "text": None},
            None,
        )


def test_what_later_versions_add() -> None:
    options = {"token_id_style": "list", "generated_token_ids": True}
    with served(RIGS["llm-eos"].engine(), **options) as at:
        reply = at.infer(details=True, seed=3)
        assert list(reply.json["details"].items()) == [
            ("finish_reason", "eos_token"),
            ("generated_tokens", 3),
            ("generated_token_ids", [100, 101, 2]),
            ("seed", 3),
        ]
        assert [event["token"]["id"] for event in at.infer(stream=True).events] == [[100], [101], [2]]


def test_control_characters_are_left_out_and_utf8_is_raw() -> None:
    with served(Scripted([(1, 'a\x00\x1f\t"'), (2, "\n中\\\x7f")])) as at:
        reply = at.infer(max_new_tokens=2)
        assert reply.body == '{"generated_text":"a\\t\\"\\n中\\\\\x7f"}'.encode()
        assert b'"text":"a\\t\\""' in at.infer(stream=True, max_new_tokens=2).body


# What is sent besides `inputs` -> the words of the refusal.
BOUNDS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 0.0}, "Parameter temperature must be in (0.0,3.40282e+38], got 0."),
    ({"temperature": -0.5}, "Parameter temperature must be in (0.0,3.40282e+38], got -0.5."),
    ({"temperature": 3.5e38}, "Parameter temperature must be in (0.0,3.40282e+38], got 3.5e+38."),
    ({"temperature": 10**400}, "Parameter temperature must be in (0.0,3.40282e+38], got inf."),
    ({"temperature": True}, "temperature must be float type."),
    ({"top_k": 0}, "Parameter top_k must be in -1 || (0,2147483647], got 0"),
    ({"top_k": -2}, "Parameter top_k must be in -1 || (0,2147483647], got -2"),
    ({"top_k": 2**31}, "Parameter top_k must be in -1 || (0,2147483647], got 2147483648"),
    ({"top_k": 2**64}, "top_k must be integer type."),
    ({"top_k": 5.0}, "top_k must be integer type."),
    ({"top_k": False}, "top_k must be integer type."),
    ({"top_p": 1.0}, "Parameter top_p must be in (0.0,1.0], got 1."),
    ({"top_p": 1}, "Parameter top_p must be in (0.0,1.0], got 1."),
    ({"top_p": "0.5"}, "top_p must be float type."),
    ({"typical_p": 1.01}, "Parameter typical_p must be in (0.0,1.0], got 1.01."),
    ({"do_sample": "true"}, "do_sample must be boolean type."),
    ({"seed": 2**64}, "seed must be unsigned type."),
    ({"seed": 1.0}, "seed must be unsigned type."),
    ({"repetition_penalty": 0}, "Parameter 'repetition_penalty' must be in (0.0, 3.40282e+38], got 0."),
    ({"watermark": 0}, "watermark must be boolean type."),
    ({"priority": 6}, "Parameter priority must be in [1,5], got 6."),
    ({"priority": 1.0}, "priority must be unsigned type."),
    ({"max_new_tokens": 0}, "Parameter max_new_tokens must be in (0,2147483647], got 0."),
    ({"max_new_tokens": 2**31}, "Parameter max_new_tokens must be in (0,2147483647], got 2147483648."),
    ({"timeout": 0}, "Parameter timeout must be strictly positive and small than 3600 seconds, got 0."),
    ({"timeout": 3601}, "Parameter timeout must be strictly positive and small than 3600 seconds, got 3601."),
    ({"timeout": -1}, "timeout must be unsigned type."),
    ({"details": 1}, "details must be boolean type."),
]


@pytest.mark.parametrize(("parameters", "told"), BOUNDS, ids=lambda given: str(given)[:40])
def test_bounds(seed1: Local, parameters: dict[str, Any], told: str) -> None:
    for stream in (None, True):  # a refusal is plain JSON for a stream as well
        reply = seed1.infer(stream=stream, **parameters)
        assert (reply.status, reply.headers["content-type"]) == (422, "application/json")
        assert reply.headers["connection"] == "close"
        assert list(reply.json.items()) == [("error", told), ("error_type", "Input Validation Error")]


def test_the_first_that_is_wrong_is_told(seed1: Local) -> None:
    order = [
        "temperature", "top_k", "top_p", "typical_p", "do_sample", "seed", "repetition_penalty", "watermark",
        "priority", "max_new_tokens", "timeout", "details",
    ]  # fmt: skip
    wrong: dict[str, Any] = {name: [] for name in reversed(order)}
    while order:
        reply = seed1.post("/infer", {"stream": 3, "parameters": wrong, "inputs": "a"})
        assert reply.json["error"].startswith(f"{order[0]} must be ")
        del wrong[order.pop(0)]
    reply = seed1.post("/infer", {"stream": 3, "parameters": wrong, "inputs": "a"})
    assert reply.json["error"] == "stream must be boolean type."
    reply = seed1.post("/infer", {"stream": 3, "parameters": 3, "inputs": ""})
    assert "length in (0, 4194304], but the length of inputs is 0" in reply.json["error"]


def test_null_is_absent_and_what_nobody_knows_is_ignored(seed1: Local) -> None:
    nothing = dict.fromkeys(name for parameters, _ in BOUNDS for name in parameters)
    body = {"inputs": "a", "stream": None, "parameters": {**nothing, "n": 5}, "model": "nobody's"}
    assert seed1.post("/infer", body).json == {"generated_text": SAMPLE_TEXT}
    assert seed1.post("/infer", {"inputs": "a", "parameters": None}).json == {"generated_text": SAMPLE_TEXT}


def test_bounds_that_hold(seed1: Local) -> None:
    most = {"temperature": 3.4e38, "top_k": 2**31 - 1, "top_p": 0.999, "typical_p": 1, "seed": 2**64 - 1}
    more = {"priority": 1, "max_new_tokens": 2**31 - 1, "timeout": 3600, "repetition_penalty": 1e-6}
    reply = seed1.infer(details=True, watermark=True, **most, **more)
    assert reply.json["details"] == {"finish_reason": "length", "generated_tokens": 63, "seed": 2**64 - 1}
    assert seed1.infer(details=True, seed=0).json["details"]["seed"] == 0


def test_the_newer_bounds_of_a_seed() -> None:
    with served(RIGS["llm-eos"].engine(), seed_bits=63) as at:
        assert at.infer(seed=2**63 - 1, details=True).json["details"]["seed"] == 2**63 - 1
        told = "Parameter seed must be in [0, 9223372036854775807), got 9223372036854775808."
        assert at.infer(seed=2**63).json["error"] == told


def test_a_seed_that_is_chosen_here_may_be_sent_again(seed1: Local) -> None:
    seeds = [seed1.infer(details=True).json["details"]["seed"] for _ in range(5)]
    assert len(set(seeds)) == 5
    assert all(0 <= seed < 2**53 for seed in seeds)


def test_what_a_request_becomes() -> None:
    engine = RIGS["llm-eos"].engine()
    with served(engine) as at:
        at.infer(temperature=0.5, top_k=7, top_p=0.9, repetition_penalty=1.5, priority=2, typical_p=0.5)
        note = engine.seen[-1].note
        sampling = note.sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 7, 0.9)
        assert (sampling.repetition_penalty, sampling.typical_p, note.priority) == (1.5, 1.0, 2)
        for parameters, sampled in (
            ({}, False),
            ({"seed": 5}, False),
            ({"top_k": -1}, False),
            ({"top_k": 5}, True),
            ({"temperature": 1}, True),
            ({"top_p": 0.5}, True),
            ({"typical_p": 0.5, "repetition_penalty": 2}, False),
            ({"temperature": 1, "do_sample": False}, False),
            ({"do_sample": True}, True),
        ):
            at.infer(**parameters)
            assert engine.seen[-1].note.sampling.do_sample is sampled, parameters


# A whole body -> the words of the refusal.
INPUTS: list[tuple[Any, str]] = [
    ({"inputs": 5}, "The type of inputs is abnormal"),
    ({"inputs": True}, "The type of inputs is abnormal"),
    ({"inputs": ["a"]}, "The type of inputs is abnormal"),
    ({"inputs": [{"text": "a"}]}, "The type of inputs is abnormal"),
    ({"inputs": [{"type": "text"}]}, "Request param text must be string"),
    ({"inputs": [{"type": "text", "text": ""}]}, "length in (0, 4194304], but the length of inputs is 0"),
    ({"inputs": [{"type": "image_url"}]}, "Request param image_url null"),
    ({"inputs": [{"type": "image_url", "image_url": {}}]}, "Request param image_url null"),
    ({"inputs": [{"type": "image_url", "image_url": 5}]}, "Request param image_url must be string"),
    ({"inputs": [{"type": "video_url", "video_url": None}]}, "Request param video_url null"),
    ({"inputs": [{"type": "audio_url", "audio_url": "x"}]}, "Request param audio_url is not supported"),
    (
        {"inputs": [{"type": "image_url", "image_url": "x"}] * 2},
        "The number of multimodal url should be no more than 1",
    ),
    ({"inputs": None, "input_id": None}, "Input conflict."),
    ({"input_id": None}, "Input_id should not be empty"),
    ({"input_id": []}, "Inputs token length must be in (0, 1048576], but got 0"),
    ({"input_id": [1] * 1048577}, "Inputs token length must be in (0, 1048576], but got 1048577"),
    ({"input_id": [1, True]}, "Parameter input_id must be integer"),
    ({"input_id": [2**64]}, "Parameter input_id must be integer"),
    ({"input_id": [-1]}, "Data element in param input_id is invalid"),
    ({"inputs": "  "}, "Inputs token length must be in (0, 1048576], but got 0"),
    ([], "Not found inputs."),
    ("text", "Not found inputs."),
]


@pytest.mark.parametrize(("body", "told"), INPUTS, ids=lambda given: str(given)[:50])
def test_inputs(seed1: Local, body: Any, told: str) -> None:
    for path in ("/infer", "/infer_token"):
        reply = seed1.post(path, body)
        assert reply.status == 422
        assert told in reply.json["error"]


def test_tokens_as_the_prompt() -> None:
    engine = RIGS["llm-eos"].engine()
    with served(engine) as at:
        for path in ("/infer", "/infer_token"):
            assert at.post(path, {"input_id": [5, 6, 1048575]}).json == {"generated_text": "Hello world"}
            assert engine.seen[-1].ids == [5, 6, 1048575]
        reply = at.post("/infer_token", {"input_id": [1048576]})  # the model has no such token
        assert (reply.status, reply.json["error"]) == (422, "Data element in param input_id is invalid")


def test_lengths_are_utf16_units() -> None:
    with served(RIGS["llm-eos"].engine(), input_chars=4) as at:
        for inputs, units in (("中中中中", 0), ("😀😀", 0), ("😀😀a", 5), ("abcde", 5)):
            reply = at.infer(inputs)
            assert reply.status == (422 if units else 200)
            if units:
                assert reply.json["error"].endswith(f"(0, 4], but the length of inputs is {units}")


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"\xff", b'{"inputs": "\xff"}', b'{"inputs": "\\ud800"}', b"NaN", b'{"inputs": 1e400}',
        b"[" * 100_000, b'{"inputs":' * 11 + b"1" + b"}" * 11, b"[" * 11 + b"]" * 11, b'{"inputs": "a"}x',
    ],
    ids=lambda body: repr(body[:20]),
)  # fmt: skip
def test_bodies_that_are_none(seed1: Local, body: bytes) -> None:
    reply = seed1.post("/infer", body)
    assert (reply.status, reply.json) == (
        422,
        {"error": "Failed to parse request context to json", "error_type": "Input Validation Error"},
    )


def test_a_body_may_be_ten_deep(seed1: Local) -> None:
    deep = b"[" * 9 + b"]" * 9
    assert seed1.post("/infer", b'{"inputs": "a", "more": ' + deep + b"}").status == 200
    assert seed1.post("/infer", b'{"inputs": "a", "more": [' + deep + b"]}").status == 422


def test_a_body_that_is_too_large() -> None:
    with served(RIGS["llm-eos"].engine(), request_mb=1) as at:
        reply = at.infer("a" * (1 << 20))
        assert (reply.status, reply.headers["connection"]) == (413, "close")
        assert reply.body == b'{"message":"Request body too large. Maximum allowed size is 1MB."}'
        assert at.infer("a" * ((1 << 20) - 100)).status == 200


TOO_LARGE = b'{"message":"Request body too large. Maximum allowed size is 1MB."}'
SIZED_PATHS = ("/infer", "/generate", "/v1/chat/completions", "/v1/tokenizer", "/v2/models/m1/generate")


@pytest.mark.parametrize("path", SIZED_PATHS)
def test_a_body_that_is_too_large_is_refused_before_it_is_read(path: str) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 2000000\r\nExpect: 100-continue\r\n\r\n"
    with served(RIGS["llm-eos"].engine(), request_mb=1) as at:
        with socket.create_connection(("127.0.0.1", at.port), 30) as link:
            link.sendall(head.encode())
            came = b"".join(iter(partial(link.recv, 1 << 16), b""))
        assert came.startswith(b"HTTP/1.1 413 ")
        assert b"Request body too large" in came or b"maximum allowed size" in came.lower()
        at.dialect._service.readiness.ready = False  # how long a prompt may be is not known yet
        with socket.create_connection(("127.0.0.1", at.port), 30) as link:
            link.sendall(head.encode())
            assert link.recv(1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"


def test_a_body_that_is_too_large_is_refused_over_http2_before_it_is_read() -> None:
    with served(RIGS["llm-eos"].engine(), request_mb=1) as at, Link(f"127.0.0.1:{at.port}") as link:
        link.send(frame(HEADERS, END_HEADERS, 1, block("/infer", "POST", ("content-length", "2000000"))))
        link.hear(TOO_LARGE, 1)
        assert TOO_LARGE in link.came


def test_a_body_that_is_too_large_is_refused_without_a_length() -> None:
    with served(RIGS["llm-eos"].engine(), request_mb=1) as at, contextlib.closing(at.connect()) as client:
        client.request("POST", "/infer", iter([b" " * (1 << 19)] * 3), encode_chunked=True)
        reply = client.getresponse()
        assert (reply.status, reply.read()) == (413, TOO_LARGE)


def test_a_prompt_that_the_model_does_not_take() -> None:
    told = (
        "Failed to enqueue inferRequest. This model's maximum input ids length cannot be greater than 8,"
        "the input ids length is 9"
    )
    with served(RIGS["llm-limits"].engine()) as at:
        for stream in (False, True):
            reply = at.infer("a b c d e f g h i", stream=stream)
            assert (reply.status, reply.json) == (424, {"error": told, "error_type": "Generation Error"})
        assert at.infer("a b c d e f g h").json == {"generated_text": "xxxxxx"}
    engine = RIGS["llm-limits"].engine()
    with served(engine, truncate=True) as at:
        assert at.infer("a b c d e f g h i").status == 200
        assert len(engine.seen[-1].ids) == 8


def test_the_prompt_of_a_list_are_its_texts() -> None:
    engine = RIGS["llm-eos"].engine()
    with served(engine) as at:
        items = [{"type": "text", "text": "one two "}, {"type": "text", "text": "three"}]
        assert at.infer(items).json == {"generated_text": "Hello world"}
        assert len(engine.seen[-1].ids) == 3


def test_which_model_answers() -> None:
    hello, sample = RIGS["llm-eos"].engine(), RIGS["llm-seed1"].engine()
    from fastserve.settings import TextgenOptions

    with Local({"a": hello, "b": sample}, TextgenOptions(default_model="b"), 0.0) as at:
        assert at.infer().json == {"generated_text": SAMPLE_TEXT}
    with Local({"a": hello, "b": sample}, TextgenOptions(), 0.0) as at:
        assert (at.infer().status, at.infer().json["error_type"]) == (404, "NotFoundError")
    with Local({}, TextgenOptions(default_model="c"), 0.0) as at:
        assert (at.infer().status, at.infer().json["error"]) == (404, "Model c not found.")


JPEG, PNG = b"\xff\xd8\xff\xe0 a picture" * 9, b"\x89PNG\r\n\x1a\n another" * 9


def picture(value: Any) -> list[Any]:
    return [{"type": "text", "text": "what is"}, {"type": "image_url", "image_url": value}]


def test_images_of_a_model_that_sees(tmp_path: Path) -> None:
    """The forms of the spec, in a folder that may be read; what they are, the model is told."""
    (tmp_path / "cat.jpg").write_bytes(JPEG)
    (tmp_path / "cat.txt").write_bytes(JPEG)
    engine = RIGS["llm-eos"].engine()
    engine.info = msgspec.structs.replace(engine.info, vision=True)
    with served(engine, image_root=str(tmp_path)) as at:
        encoded = base64.b64encode(JPEG).decode()
        for value in (
            "cat.jpg",
            f"{tmp_path}/cat.jpg",
            f"file://{tmp_path}/cat.jpg",
            encoded,
            f"data:image/jpeg;base64,{encoded}",
            {"url": "cat.jpg"},
        ):
            assert at.infer(picture(value)).json == {"generated_text": "Hello world"}
            assert engine.seen[-1].note.images == [JPEG]
        assert at.infer(picture("data:image/png;base64," + base64.b64encode(PNG).decode())).status == 200
        for value, told in (
            ("dog.jpg", "image 1: "),
            ("../cat.jpg", "image 1: "),
            ("cat.txt", "image 1: a file's name ends with"),
            ("http://127.0.0.1:1/a.jpg", "image 1: URLs are not fetched here (image_urls)"),
            ("ftp://a/b.jpg", "image 1: allowed: a path"),
            ("data:image/jpeg;base64,AAAA", "image 1: neither a JPEG nor a PNG"),
            ("data:image/jpeg;base64,?", "image 1: not base64"),
        ):
            reply = at.infer(picture(value))
            assert (reply.status, reply.json["error_type"]) == (422, "Input Validation Error")
            assert reply.json["error"].startswith(told), reply
    with served(engine, image_urls=True) as at:
        reply = at.infer(picture("http://127.0.0.1:1/a.jpg"))
        assert reply.status == 422
        assert "is not a public one" in reply.json["error"]
        assert "files are not read here (image_root)" in at.infer(picture("cat.jpg")).json["error"]


def test_images_of_a_model_that_does_not_see(seed1: Local) -> None:
    reply = seed1.infer(picture("/xxxx/test.png"))
    assert (reply.status, reply.json["error"]) == (422, "model 'm1' takes text only, not images")


def test_more_images_than_one() -> None:
    engine = RIGS["llm-eos"].engine()
    engine.info = msgspec.structs.replace(engine.info, vision=True)
    with served(engine, max_images=2) as at:
        image = {"type": "image_url", "image_url": base64.b64encode(PNG).decode()}
        assert at.infer([{"type": "text", "text": "a"}, image, image]).status == 200
        assert engine.seen[-1].note.images == [PNG, PNG]
        assert at.infer([{"type": "text", "text": "a"}, *[image] * 3]).status == 422


@pytest.mark.parametrize("stream", [True, False])
def test_the_time_between_tokens_begins_anew_with_each(stream: bool) -> None:
    with served(RIGS["llm-seed1"].engine(), pause_s=0.4, token_timeout_s=5.0) as at:
        reply = at.infer(stream=stream, max_new_tokens=15)
        assert reply.status == 200
        assert b'"generated_text"' in reply.body


def test_the_engine_knows_the_deadline() -> None:
    engine = RIGS["llm-eos"].engine()
    with served(engine, e2e_timeout_s=100) as at:
        for timeout_s, most_s in ((10, 10), (3600, 100)):
            before_ns = time.monotonic_ns()
            at.infer(timeout=timeout_s)
            left_s = (engine.seen[-1].note.deadline_ns - before_ns) / 1e9
            assert most_s <= left_s < most_s + 60
