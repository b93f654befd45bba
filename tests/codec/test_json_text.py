"""The one reader of free JSON: what it refuses, in which words; nothing else decodes what clients send."""

from __future__ import annotations

import ast
import time
import tracemalloc
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

import fastserve
from fastserve.codec.json_text import Bounds, DocumentFault, FreeJSON, JSONProblem, check
from tests.effort import examples

PACKAGE = Path(fastserve.__file__).parent
ROOMS = ("dialects", "serving", "wire", "repository", "codec")
OTHERS_BYTES = {
    "codec/json_text.py": "the reader",
    "repository/storage.py": "the manifest of a mirror",
    "repository/storage_sources.py": "the Hub's description of a model, bounded",
    "repository/mlflow_model.py": "the signature of an MLmodel, a file of a model's folder",
    "serving/replication.py": "records that the owner's process has written",
    "serving/text/chat.py": "files of a model's folder",
    "serving/text/tokenizer.py": "a tokenizer's own state",
    "dialects/text_common/mindie_metrics.py": "rates that the owner's process has written",
    "dialects/openai/anthropic.py": "arguments that a model has written",
    "dialects/openai/call_parsers.py": "one text of a call that a model has written",
    "dialects/grps/json_messages.py": "one member as the text that it is, and no object",
    "dialects/grps/predict.py": "headers that a model's worker says",
}
"""Modules that decode JSON which no client has sent, or make nothing of it."""


class Small(msgspec.Struct):
    count: Annotated[int, Meta(ge=0)] = 0
    names: list[str] = []


@pytest.mark.parametrize(
    ("body", "problem", "words", "field"),
    [
        (b"[1,", JSONProblem.MALFORMED, "Invalid value. at byte 3", ""),
        (b"", JSONProblem.MALFORMED, "The document is empty. at byte 0", ""),
        (
            b"[" * 101 + b"]" * 101,
            JSONProblem.TOO_DEEP,
            "more than 100 objects and lists within each other, at byte 100",
            "",
        ),
        (
            b'{"x":[' + b"1," * 20000 + b"1]}",
            JSONProblem.TOO_LARGE,
            "more than 16384 numbers, at byte 32774",
            "x",
        ),
        (
            b'{"x":[' + b"[]," * 20000 + b"1]}",
            JSONProblem.TOO_LARGE,
            "more than 16384 values besides numbers, at byte 49152",
            "x",
        ),
        (b'{"count":-1}', JSONProblem.MISTYPED, "Expected `int` >= 0 - at `$.count`", ""),
        (b'{"names":["\xff"]}', JSONProblem.NOT_UTF8, "not UTF-8, at byte 11", ""),
        (b'{"unknown":"\xc3\xa9\xc3"}', JSONProblem.NOT_UTF8, "not UTF-8, at byte 14", ""),
    ],
)
def test_free_json_says_what_is_wrong_and_where(
    body: bytes, problem: JSONProblem, words: str, field: str
) -> None:
    with pytest.raises(DocumentFault) as caught:
        FreeJSON(Small).read(body)
    assert (caught.value.problem, caught.value.message, caught.value.field) == (problem, words, field)


@examples(100)
@given(st.recursive(st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5), lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner)))  # fmt: skip  # noqa: E501
def test_free_json_reads_what_is_within_bounds(value: Any) -> None:
    assert FreeJSON().read(msgspec.json.encode(value)) == value
    assert FreeJSON().read(msgspec.json.encode(value).decode()) == value


@pytest.mark.parametrize(
    "piece",
    [b"1,", b'"a",', b"[],", b"{},", b"[[1]],", b'{"a":1},', b"1e5,", b"null,"],
)
@pytest.mark.parametrize("key", [b"names", b"other"])
def test_free_json_refuses_ten_megabytes_of_anything_cheaply(piece: bytes, key: bytes) -> None:
    body = b'{"%b":[' % key + piece * (10_000_000 // len(piece)) + b"0]}"
    reader = FreeJSON(Small)
    started = time.process_time()
    with pytest.raises(DocumentFault):
        reader.read(body)
    assert time.process_time() - started < 1
    tracemalloc.start()
    try:
        with pytest.raises(DocumentFault):
            reader.read(body)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_free_json_refuses_keys_without_a_bound() -> None:
    many = b"{" + b",".join(b'"%d":1' % number for number in range(5000)) + b"}"
    for body, words in (
        (many, "more than 4096 keys in one object"),
        (b'{"%b":1}' % (b"k" * 2000), "a key of more than 1024 bytes"),
        (b"[" + b",".join([b'{"%b":1}' % (b"k" * 1000)] * 2000) + b"]", "more than 1048576 bytes of keys"),
        (b"[1%b]" % (b"0" * 2000), "a number of more than 1024 characters"),
    ):
        with pytest.raises(DocumentFault, match=words):
            check(body)


def test_free_json_has_bounds_of_its_own_and_of_a_call() -> None:
    reader = FreeJSON(Any, Bounds(numbers=1))
    with pytest.raises(DocumentFault):
        reader.read(b"[1,2]")
    assert reader.read(b"[1,2]", Bounds(numbers=2)) == [1, 2]


def test_free_json_undoes_escapes_of_large_documents_before_the_decoder_holds_the_gil() -> None:
    reader: FreeJSON[Any] = FreeJSON(Any)
    seen: list[int] = []
    decode = reader._decode
    reader._decode = lambda data: seen.append(bytes(data).count(b"\\")) or decode(data)
    body = b'{"x":"%b\\n\\"\\ud83d\\ude00\\u0001"}' % (b"\\u00e9" * 200_000)
    assert reader.read(body) == {"x": "é" * 200_000 + '\n"😀\x01'}
    assert seen == [3]


def test_free_json_bounds_the_escapes_of_large_documents() -> None:
    body = b'"%b"' % (b"\\n" * (1 << 20))
    assert len(FreeJSON(Any).read(body)) == 1 << 20
    with pytest.raises(DocumentFault, match="more than 1048576 escapes that UTF-8 cannot replace") as caught:
        FreeJSON(Any).read(body[:-1] + b'\\n"')
    assert caught.value.problem is JSONProblem.TOO_LARGE


def decodes(path: Path) -> list[int]:
    """The lines that decode JSON by themselves."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in (
            "json.loads",
            "json.load",
            "json.JSONDecoder",
            "msgspec.json.decode",
            "msgspec.json.Decoder",
        ):
            found.append(node.lineno)
        if isinstance(node, ast.ImportFrom) and node.module in ("json", "msgspec.json"):
            found.append(node.lineno)
    return found


def test_free_json_is_the_only_decoder_of_what_clients_send() -> None:
    modules = {
        path.relative_to(PACKAGE).as_posix(): path
        for room in ROOMS
        for path in (PACKAGE / room).rglob("*.py")
    }
    decoding = {name for name, path in modules.items() if decodes(path)}
    assert decoding == set(OTHERS_BYTES)
