"""Text models as tensors: what Triton's clients of a vLLM backend send, over HTTP and gRPC."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from fastserve.protos import load
from tests.running import Running
from tests.text.serving import RIGS

MESSAGES = load("kserve_v2")
SEED = "am a French photographer based in Paris.\nI have been shooting since I was 15"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(RIGS / "llm-seed1", tmp_path_factory.mktemp("text") / "log", torch=True) as running:
        yield running


def post(served: Running, path: str, body: Any) -> tuple[int, bytes]:
    host, _, port = served.http.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    connection.request("POST", f"/v2/models/m1/{path}", json.dumps(body))
    reply = connection.getresponse()
    try:
        return reply.status, reply.read()
    finally:
        connection.close()


def events(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in data.splitlines() if line.startswith(b"data: ")]


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ({}, "hi" + SEED[:69]),
        ({"max_tokens": 20, "exclude_input_in_output": True}, SEED),
        ({"sampling_parameters": '{"max_tokens": 3}', "exclude_input_in_output": True}, SEED[:11]),
        ({"sampling_parameters": "", "max_tokens": 3, "exclude_input_in_output": True}, SEED[:69]),
        ({"parameters": {"max_tokens": "2", "stop": " a"}, "exclude_input_in_output": True}, "am"),
        ({"stream": False, "max_tokens": 1, "stop": "x", "unknown": 7}, "hiam"),
    ],
)
def test_generate(served: Running, more: dict[str, Any], found: str) -> None:
    status, data = post(served, "generate", {"text_input": "hi", **more})
    assert (status, json.loads(data).get("text_output")) == (200, found), data


def test_generate_stream(served: Running) -> None:
    status, data = post(
        served, "generate_stream", {"text_input": "hi", "stream": True, "max_tokens": 20, "id": "a"}
    )
    found = events(data)
    assert status == 200
    assert "".join(event["text_output"] for event in found) == SEED
    assert all(event["id"] == "a" and event["model_name"] == "m1" for event in found)
    whole = events(post(served, "generate_stream", {"text_input": "hi", "max_tokens": 20})[1])
    assert [event["text_output"] for event in whole] == ["hi" + SEED]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"text_input": ""}, "the prompt has 0 characters"),
        (
            {"text_input": "a", "max_tokens": 0},
            "parameters: max_tokens: given 0, allowed: a whole number from 1",
        ),
        ({"text_input": "a", "sampling_parameters": "["}, "sampling_parameters: no JSON object"),
        ({"text_input": "a", "sampling_parameters": '{"tempo": 1}'}, "tempo"),
        ({"text_input": "a", "sampling_parameters": '{"n": 2}'}, "n: given 2"),
        ({"text_input": "a", "temperature": -1}, "temperature: given -1"),
        (
            {"text_input": "a", "sampling_parameters": json.dumps({"stop_token_ids": [1] * 1025})},
            "sampling_parameters: stop_token_ids: given [1, 1, 1, ",
        ),
        (
            {"text_input": "a", "sampling_parameters": f"[{'1,' * 16384}1]"},
            "sampling_parameters: no JSON object: more than 16384 numbers, at byte 32769",
        ),
        (
            {"text_input": "a", "sampling_parameters": json.dumps({"k" * 2000: 1})},
            "sampling_parameters: no JSON object: a key of more than 1024 bytes, at byte 1",
        ),
        (
            {"text_input": "a", "sampling_parameters": json.dumps({"stop": "s" * (1 << 18)})},
            "input 'sampling_parameters' has 262156 bytes, allowed: at most 262144",
        ),
        (
            {"text_input": "a", "stream": True, "exclude_input_in_output": False},
            "`exclude_input_in_output` = False is not allowed",
        ),
        ({"text_input": ["a", "b"]}, "The schema can not convert input 'text_input'"),
        ({"stream": True}, "text_input"),
    ],
)
def test_faults(served: Running, body: dict[str, Any], words: str) -> None:
    status, data = post(served, "generate", body)
    assert status == 400
    assert words in json.loads(data)["error"]


def test_infer(served: Running) -> None:
    text = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["hi"]}
    status, data = post(served, "infer", {"inputs": [text], "parameters": {"max_tokens": 2}})
    assert status == 200
    (output,) = json.loads(data)["outputs"]
    assert output == {"name": "text_output", "datatype": "BYTES", "shape": [1], "data": ["hiam a"]}
    stream = {"name": "stream", "shape": [1], "datatype": "BOOL", "data": [True]}
    status, data = post(served, "infer", {"inputs": [text, stream]})
    assert status == 400
    assert "allowed: false for a request that has one response" in json.loads(data)["error"]


def message(stream: bool) -> Any:
    request = MESSAGES.ModelInferRequest(model_name="m1", id="1")
    for name, datatype, raw in (
        ("text_input", "BYTES", b"\x02\0\0\0hi"),
        ("stream", "BOOL", bytes([stream])),
        ("sampling_parameters", "BYTES", b'\x12\0\0\0{"max_tokens": 20}'),
    ):
        request.inputs.add(name=name, datatype=datatype, shape=[1])
        request.raw_input_contents.append(raw)
    return request


def test_grpc(served: Running) -> None:
    service = "/inference.GRPCInferenceService/"
    serialize = MESSAGES.ModelInferRequest.SerializeToString
    with grpc.insecure_channel(served.grpc) as channel:
        infer = channel.unary_unary(service + "ModelInfer", serialize, MESSAGES.ModelInferResponse.FromString)
        assert infer(message(False), timeout=60).raw_output_contents[0][4:].decode() == "hi" + SEED
        ask = channel.stream_stream(
            service + "ModelStreamInfer", serialize, MESSAGES.ModelStreamInferResponse.FromString
        )
        parts = [
            part.infer_response.raw_output_contents[0][4:].decode()
            for part in ask(iter([message(True)]), timeout=60)
        ]
        assert "".join(parts) == SEED
