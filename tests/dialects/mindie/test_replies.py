"""Events of several tokens at once, and of endings that have no token of their own."""

from __future__ import annotations

import json

import pytest

from fastserve._ext.text_tokens import Token
from fastserve.codec.generation import Finish
from fastserve.dialects.mindie.generation import FINISH_REASON, EventWriter, details_of
from fastserve.dialects.openai.completions import AnswerEncoder, ChatWriter, CompletionWriter
from fastserve.dialects.openai.vllm import VllmWriter
from fastserve.serving.text import Ending
from fastserve.settings import TextgenOptions

THREE = [Token(5, "a", 0, 1500), Token(6, "b", 1, 2500), Token(7, "c", 2, 3500, finish=Finish.LENGTH)]
WHOLE = Ending(Finish.LENGTH, "abc", [5, 6, 7])


def payloads(data: bytes) -> list[dict[str, object]]:
    return [json.loads(part.removeprefix("data: ")) for part in data.decode().split("\n\n")[:-1]]


def test_tokens_that_come_together() -> None:
    writer = EventWriter(TextgenOptions())
    assert payloads(writer.tokens(list(THREE))) == [
        {"prefill_time": 1.5, "decode_time": None, "token": {"id": 5, "text": "a"}},
        {"prefill_time": None, "decode_time": 2.5, "token": {"id": 6, "text": "b"}},
    ]
    (last,) = payloads(writer.last(WHOLE, THREE[2], b""))
    assert last == {
        "prefill_time": None,
        "decode_time": 3.5,
        "generated_text": "abc",
        "details": None,
        "token": {"id": 7, "text": None},
    }


@pytest.mark.parametrize("style", ["scalar", "list"])
def test_an_ending_without_a_token_has_the_id_before(style: str) -> None:
    writer = EventWriter(TextgenOptions(token_id_style=style))  # type: ignore[arg-type]
    writer.tokens(THREE[:2])
    (last,) = payloads(writer.last(Ending(Finish.EOS, "ab", [5, 6]), None, b""))
    assert last["token"] == {"id": 6 if style == "scalar" else [6], "text": None}
    assert (last["prefill_time"], last["decode_time"]) == (None, 0.0)
    (only,) = payloads(EventWriter(TextgenOptions()).last(Ending(Finish.EOS, "", []), None, b"{}"))
    assert (only["prefill_time"], only["decode_time"], only["details"]) == (0.0, None, {})


def test_the_whole_text_so_far() -> None:
    writer = EventWriter(TextgenOptions(full_text=True))
    tokens = [Token(5, "a", 0, 1500), Token(6, "b", 1, 2500)]
    texts = [event["token"] for event in payloads(writer.tokens(tokens))]
    assert texts == [{"id": 5, "text": "a"}, {"id": 6, "text": "ab"}]


def test_how_each_ending_is_called() -> None:
    assert {finish.name: reason for finish, reason in FINISH_REASON.items()} == {
        "EOS": "eos_token",
        "STOP": "eos_token",
        "LENGTH": "length",
        "CANCELLED": "stop_sequence",
        "TIMEOUT": "stop_sequence",
        "FAILED": "stop_sequence",
    }
    assert json.loads(details_of(WHOLE, 2**64 - 1, TextgenOptions())) == {
        "finish_reason": "length",
        "generated_tokens": 3,
        "seed": 2**64 - 1,
    }


@pytest.mark.parametrize("answer", [ChatWriter("m", 1), CompletionWriter("m", 1), VllmWriter("m", 1)])
def test_a_token_without_text_is_no_piece(answer: AnswerEncoder) -> None:
    """Half a character is none, by whatever way it comes."""
    frames = answer.frames(0)
    assert frames is not None
    assert frames.write([Token(7, "", 0, 0)]) == b""
    assert frames.write([Token(7, "", 0, 0), Token(8, "a", 1, 0)]) == answer.piece(0, "a")
