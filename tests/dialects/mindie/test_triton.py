"""MindIE's Triton endpoints: text, tokens, and requests that are stopped by their ids."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.dialects.text_common.rigs import RIGS, SAMPLE_1
from tests.dialects.text_common.serving import Local, local, served
from tests.running import until
from tests.text_rig import Scripted

GENERATE, STREAM = "/v2/models/m1/generate", "/v2/models/m1/generate_stream"
INFER, STOP = "/v2/models/m1/infer", "/v2/models/m1/stopInfer"
TOKENS = {"name": "input0", "shape": [1, 3], "datatype": "UINT32", "data": [1, 2, 3]}


@pytest.fixture(scope="module")
def eos() -> Iterator[Local]:
    with local(RIGS["llm-eos"].engine()) as at:
        yield at


def test_text_byte_for_byte(eos: Local) -> None:
    head = b'{"id":"a-1","model_name":"m1","model_version":null,"text_output":"Hello world"'
    assert eos.post(GENERATE, {"id": "a-1", "text_input": "hi"}).body == head + b"}"
    reply = eos.post(GENERATE, {"id": "a-1", "text_input": "hi", "parameters": {"details": True}})
    assert reply.body == head + (
        b',"details":{"finish_reason":"eos_token","generated_tokens":3,"first_token_cost":null,'
        b'"decode_cost":null,"batch_size":[1,1,1],"queue_wait_time":[0,0,0]}}'
    )


def test_a_stream_of_increments_byte_for_byte(eos: Local) -> None:
    head = 'data:{"id":"x","model_name":"m1","model_version":null,"text_output":'
    reply = eos.post(STREAM, {"id": "x", "text_input": "hi"})
    assert reply.body.decode() == "".join(f'{head}"{text}"}}\n\n' for text in ("Hello", " world", ""))
    reply = eos.post(STREAM, {"id": "x", "text_input": "hi", "parameters": {"details": True}})
    costs = '"first_token_cost":null,"decode_cost":null,"batch_size":1,"queue_wait_time":0}'
    assert re.sub(r"\d\.\d{3}", "T", reply.body.decode()) == (
        f'{head}"Hello","details":{{"generated_tokens":1,{costs},"prefill_time":T,"decode_time":null}}\n\n'
        f'{head}" world","details":{{"generated_tokens":2,{costs},"prefill_time":null,"decode_time":T}}\n\n'
        f'{head}"","details":{{"finish_reason":"eos_token","generated_tokens":3,{costs},'
        '"prefill_time":null,"decode_time":T}\n\n'
    )


def test_the_last_token_has_its_text() -> None:
    with served(Scripted(SAMPLE_1)) as at:
        events = at.post(STREAM, {"text_input": "hi", "parameters": {"max_new_tokens": 2}}).events
        assert [event["text_output"] for event in events] == ["am", " a"]
        assert len({event["id"] for event in events}) == 1  # one that was made here


def test_tokens_byte_for_byte(eos: Local) -> None:
    reply = eos.post(INFER, {"id": "t", "inputs": [TOKENS], "outputs": [{"name": "out"}]})
    assert reply.body == (
        b'{"id":"t","outputs":[{"name":"out","shape":[1,3],"datatype":"UINT32","data":[100,101,2]}]}'
    )
    flat = {**TOKENS, "shape": [3], "parameters": {"max_new_tokens": 1}}
    (output,) = eos.post(INFER, {"inputs": [flat]}).json["outputs"]
    assert output == {"name": "output0", "shape": [1, 1], "datatype": "UINT32", "data": [100]}
    nested = {**TOKENS, "data": [[1, 2, 3]]}
    assert eos.post(INFER, {"inputs": [nested]}).status == 200


def test_bounds_that_are_wider_here(eos: Local) -> None:
    parameters = {"top_k": 0, "top_p": 1.0, "batch_size": 5, "perf_stat": False}
    assert eos.post(GENERATE, {"text_input": "hi", "parameters": parameters}).status == 200


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        (GENERATE, {}, "The text_input not found."),
        (GENERATE, [], "The text_input not found."),
        (GENERATE, {"text_input": 5}, "text_input must be string type."),
        (GENERATE, {"text_input": ""}, "but the length of inputs is 0"),
        (GENERATE, {"text_input": "a", "id": 5}, "id must be string type."),
        (GENERATE, {"text_input": "a", "id": "a b"}, "Parameter id must match"),
        (GENERATE, {"text_input": "a", "id": "a" * 257}, "Parameter id must match"),
        (GENERATE, {"text_input": "a", "parameters": {"top_p": 1.1}}, "in (0.0,1.0], got 1.1."),
        (STREAM, {"text_input": "a", "parameters": {"perf_stat": 1}}, "perf_stat must be boolean type."),
        (INFER, {}, "Inputs count must be 1."),
        (INFER, {"inputs": [TOKENS] * 2}, "Inputs count must be 1."),
        (INFER, {"inputs": [5]}, "inputs must be object type."),
        (INFER, {"inputs": [{**TOKENS, "name": ""}]}, "Inputs name must be non-empty string."),
        (INFER, {"inputs": [{**TOKENS, "datatype": "INT32"}]}, "Inputs datatype must be UINT32."),
        (INFER, {"inputs": [{**TOKENS, "shape": [1, 1, 3]}]}, "Inputs shape must be [n] or [1,n]."),
        (INFER, {"inputs": [{**TOKENS, "shape": [2, 3]}]}, "Inputs shape must be [n] or [1,n]."),
        (INFER, {"inputs": [{**TOKENS, "shape": [4]}]}, "length must be equal to shape 4, but got 3."),
        (INFER, {"inputs": [{**TOKENS, "data": [1, 2, -3]}]}, "integers in [0, 1048576]"),
        (INFER, {"inputs": [{**TOKENS, "data": 1}]}, "Inputs data must be an array."),
        (INFER, {"inputs": [TOKENS], "outputs": [{"name": ""}]}, "Outputs name must be non-empty string."),
        (INFER, {"inputs": [TOKENS], "outputs": []}, "Outputs count must be 1."),
        (STOP, {}, "The id must be non-empty string."),
        (STOP, {"id": 5}, "The id must be non-empty string."),
        (STOP, b"{", "Failed to parse request context to json"),
    ],
)
def test_what_is_refused(eos: Local, path: str, body: Any, told: str) -> None:
    reply = eos.post(path, body)
    assert (reply.status, reply.json["error_type"]) == (422, "Input Validation Error")
    assert told in reply.json["error"]


def test_who_is_not_there(eos: Local) -> None:
    for path in (GENERATE, STREAM, INFER, STOP):
        reply = eos.post(path.replace("m1", "m2"), {})
        assert (reply.status, reply.json["error"]) == (404, "Model m2 not found.")
    reply = eos.post(STOP, {"id": "nobody"})
    assert (reply.status, reply.json["error"]) == (404, "RequestId is nobody not found.")


def test_a_request_is_stopped_by_its_id() -> None:
    engine = Scripted([(1, "a "), (2, "b ")])
    with served(engine, pause_s=0.01) as at, ThreadPoolExecutor(2) as pool:
        body = {"text_input": "hi", "parameters": {"max_new_tokens": 2000, "details": True}}
        stream = pool.submit(at.post, STREAM, {"id": "one", **body})
        whole = pool.submit(at.post, GENERATE, {"id": "two", **body})
        until(lambda: len(engine.seen) == 2 and engine.stepped > 6, "both run")
        twice = at.post(GENERATE, {"id": "one", **body})
        assert (twice.status, twice.json["error"]) == (400, "Duplicate request id")
        for name in ("one", "two"):
            reply = at.post(STOP, {"id": name})
            assert (reply.status, reply.body) == (200, b'{"id":"%b"}' % name.encode())
        assert stream.result().events[-1]["details"]["finish_reason"] == "stop_sequence"
        assert whole.result().json["details"]["finish_reason"] == "stop_sequence"
        assert whole.result().json["text_output"].startswith("a b b ")
        assert at.post(STOP, {"id": "one"}).status == 404
