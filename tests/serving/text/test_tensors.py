"""Requests of tensors for text models: what their settings cost to read, whatever they are."""

from __future__ import annotations

import json
import struct
import time

import pytest

from fastserve.errors import Kind, ServeError
from fastserve.request import InferRequest
from fastserve.serving.text.tensors import make_ask
from fastserve.tensor import DTYPES, Tensor


def text(data: bytes) -> Tensor:
    return Tensor(DTYPES["bytes"], (1,), struct.pack("<I", len(data)) + data)


def request(settings: bytes, prompt: bytes = b"a") -> InferRequest:
    return InferRequest({"text_input": text(prompt), "sampling_parameters": text(settings)})


@pytest.mark.parametrize(
    "settings",
    [
        json.dumps({"stop_token_ids": [17] * 500_000}).encode(),
        json.dumps({"stop_token_ids": [17] * 16_000}).encode(),
        b'{"%b":1}' % (b"k" * 40_000_000),
        b'{"%b":1}' % (b"k" * 1000),
        json.dumps({"stop": ["s"] * 300_000}).encode(),
        json.dumps({"logit_bias": dict.fromkeys(map(str, range(15_000)), 1)}).encode(),
        b'{"max_tokens":1%b}' % (b"0" * 10_000_000),
        b"[" * 5_000_000,
        b"{%b}" % b",".join(b'"%d":1' % number for number in range(4000)),
    ],
    ids=["ids", "fewer-ids", "key", "shorter-key", "stops", "biases", "number", "depth", "keys"],
)
def test_tensors_settings_of_any_size_are_refused_cheaply(settings: bytes) -> None:
    asked = request(settings)
    started = time.process_time()
    with pytest.raises(ServeError) as caught:
        make_ask(asked)
    assert time.process_time() - started < 1
    assert caught.value.kind is Kind.INVALID_ARGUMENT
    assert "sampling_parameters" in caught.value.message
    assert len(caught.value.message) < 1024


def test_tensors_settings_are_read() -> None:
    ask = make_ask(request(b'{"stop_token_ids": [1, 2], "max_tokens": 3, "stop": "x"}', b"hi"))
    assert (ask.prompt, ask.sampling.stop_ids, ask.sampling.max_new_tokens) == ("hi", [1, 2], 3)
    sampling = make_ask(
        request(b'{"logit_bias": {"5": -100, "7": 0.5}, "min_p": 0.25, "min_tokens": 2}')
    ).sampling
    assert (sampling.logit_bias, sampling.min_p, sampling.min_new_tokens) == ({5: -100, 7: 0.5}, 0.25, 2)
    for odd in (b'{"logit_bias": {"5": 101}}', b'{"min_p": 2}', b'{"min_tokens": -1}'):
        with pytest.raises(ServeError, match="sampling_parameters"):
            make_ask(request(odd))


def test_tensors_prompts_longer_than_any_text_are_refused_before_they_are_decoded() -> None:
    with pytest.raises(ServeError, match=r"input 'text_input' has 16777217 bytes, allowed: at most 16777216"):
        make_ask(request(b"", b"a" * (16 << 20) + b"a"))
