"""Forms and files: multipart/form-data, base64 in JSON, and a file as the body."""

from __future__ import annotations

import base64
import contextlib
import inspect
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import urllib3
from hypothesis import given
from hypothesis import strategies as st

from fastserve import File
from fastserve.backends.script.json_body import BodyReader
from fastserve.backends.script.multipart import MOST_PARTS, read_parts
from fastserve.errors import Kind, ServeError
from tests.effort import examples

FORM = "multipart/form-data; boundary=X"
PNG = b"\x89PNG\r\n\x1a\n\0--X"


def part(content: bytes, disposition: bytes, *headers: bytes) -> bytes:
    head = b"\r\n".join((b"Content-Disposition: form-data; " + disposition, *headers))
    return b"--X\r\n%b\r\n\r\n%b\r\n" % (head, content)


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--X--\r\n"


def call(function: Callable[..., Any], body: bytes, content_type: str = FORM) -> Any:
    reader = BodyReader(inspect.signature(function, eval_str=True), "f")
    positional, named = reader.read(body, content_type)
    return function(*positional, **named)


def refusal(function: Callable[..., Any], body: bytes, content_type: str = FORM) -> str:
    with pytest.raises(ServeError) as caught:
        call(function, body, content_type)
    assert caught.value.kind is Kind.INVALID_ARGUMENT
    return caught.value.message


def look(image: bytes, top: int = 1, exact: bool = False) -> Any:
    return image, top, exact


def keep(files: list[File], note: str = "") -> Any:
    return [(file.filename, file.media_type, file.content) for file in files], note


@dataclass
class Query:
    text: str
    limit: int = 3


def search(query: Query) -> Any:
    return query


def mixed(query: Query, image: File | None = None) -> Any:
    return query, image and image.content


def free(body: Any) -> Any:
    return body


texts = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\r\n\0"), max_size=20)


@examples(100)
@given(st.lists(st.tuples(texts.filter(bool), texts, st.binary(max_size=200)), min_size=1, max_size=5))
def test_what_a_client_encodes_is_read(parts: list[tuple[str, str, bytes]]) -> None:
    fields = [(name.replace("\\", ""), (file.replace("\\", ""), data)) for name, file, data in parts]
    fields = [(name or "n", value) for name, value in fields]
    body, content_type = urllib3.encode_multipart_formdata(fields)
    wanted: dict[str, list[tuple[str, bytes]]] = {}
    for name, (file, data) in fields:
        wanted.setdefault(name, []).append((file, data))
    found = read_parts(body, content_type)
    plain = {name: [(one.filename, one.content) for one in several] for name, several in found.items()}
    assert plain == wanted


def test_fields_have_the_types_of_the_parameters() -> None:
    body = form(
        part(PNG, b'name="image"; filename="a.png"'), part(b"5", b"name=top"), part(b"true", b"name=exact")
    )
    assert call(look, body) == (PNG, 5, True)
    files = [
        part(b"1", b'name="files"; filename="a \\"b\\".txt"', b"Content-Type: text/plain"),
        part(b"", b"name=files"),
    ]
    assert call(keep, form(*files)) == ([('a "b".txt', "text/plain", b"1"), ("", "", b"")], "")
    assert call(search, form(part(b"h\xc3\xa9", b"name=text"), part(b"7", b"name=limit"))) == Query(
        "h\u00e9", 7
    )
    told = part(b'{"text": "a"}', b"name=query", b"Content-Type: application/json")
    assert call(mixed, form(told, part(PNG, b"name=image"))) == (Query("a"), PNG)
    assert call(free, form(part(b"1", b"name=a"), part(b"2", b"name=a"))) == {"a": ["1", "2"]}


def test_files_in_json_and_as_the_body() -> None:
    text = base64.b64encode(PNG)
    assert call(look, b'{"image": "%b"}' % text, "application/json") == (PNG, 1, False)
    sent = call(keep, b'{"files": ["data:image/png;base64,%b"]}' % text, "")
    assert sent == ([("", "image/png", PNG)], "")
    assert call(look, PNG, "image/png") == (PNG, 1, False)
    assert "image" in refusal(look, b'{"image": "%%%"}', "application/json")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (form(part(b"x", b"name=image"), part(b"five", b"name=top")), "`$.top`"),
        (form(part(b"5", b"name=top")), "`image`"),
        (form(part(b"x", b"name=image"), part(b"y", b"name=image")), "image: given 2 times, allowed: once"),
        (form(part(b"x", b"name=image"), part(b"y", b"name=other")), "`other`"),
        (form(part(b"x", b"name=image"), part(b"\xff", b"name=top")), "top: the part is no text in UTF-8"),
        (form(part(b"x", b"filename=a")), "part 1: needs a header Content-Disposition"),
        (form(part(b"x" * 9, b"name=image", b"A: " + b"b" * 9000)), "part 1: its headers do not end"),
        (part(b"x", b"name=image"), "ends before its last boundary"),
        (b"--Y--", "no part"),
        (b"", "no part"),
        (b"--Xtra\r\n", "only begins with its boundary"),
        (form(*[part(b"", b"name=files")] * (MOST_PARTS + 1)), f"more than {MOST_PARTS} parts"),
    ],
)
def test_an_error_names_the_part(body: bytes, said: str) -> None:
    assert said in refusal(look, body)


@pytest.mark.parametrize("content_type", ["multipart/form-data", "multipart/form-data; boundary=" + "x" * 71])
def test_a_form_needs_a_boundary(content_type: str) -> None:
    assert "boundary" in refusal(look, form(), content_type)


@pytest.mark.parametrize(
    "body",
    [
        form(part(bytes(10_000_000), b"name=image")),
        b"--X" * 3_000_000,
        b"\r\n--" * 2_000_000,
        form(*[part(b"", b"name=a")] * 100_000),
    ],
    ids=["one part", "boundaries", "beginnings", "parts"],
)
def test_a_large_body_costs_its_copies(body: bytes) -> None:
    tracemalloc.start()
    try:
        with contextlib.suppress(ServeError):
            call(look, body)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(body)
    finally:
        tracemalloc.stop()
