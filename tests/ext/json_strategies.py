"""JSON texts to try readers with: good ones, and good ones with something broken."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import strategies as st

PAGE = 4096
PROT_NONE, PROT_READ_WRITE, MAP_PRIVATE_ANONYMOUS = 0, 3, 0x22

digits = st.text("0123456789", min_size=1, max_size=25)
number_texts = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.floats(width=32, allow_nan=False, allow_infinity=False).map(repr),
    st.integers(-(2**65), 2**65).map(str),
    st.tuples(
        st.sampled_from(["", "-"]),
        st.one_of(st.just("0"), st.integers(1, 10**24).map(str)),
        st.one_of(st.just(""), digits.map(lambda d: "." + d)),
        st.one_of(
            st.just(""),
            st.tuples(st.sampled_from(["e", "E", "e+", "e-"]), st.integers(0, 400)).map(
                lambda p: f"{p[0]}{p[1]}"
            ),
        ),
    ).map("".join),
    st.sampled_from(
        [
            "NaN",
            "-NaN",
            "Inf",
            "-Inf",
            "Infinity",
            "-Infinity",
            "-0",
            "-0.0",
            "1e400",
            "1.",
            "01",
            "+1",
            "-",
            "1e",
            "Nan",
            "Infx",
        ]
    ),
)
string_texts = st.one_of(
    st.text(max_size=12).map(json.dumps),
    st.text('abc"\\/u0d8cDE9 \x01\n', max_size=12).map(lambda s: f'"{s}"'),
)
spaces = st.sampled_from(["", "", "", " ", "\n", "\t ", "         "])


def listed(children: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    items = st.lists(st.tuples(spaces, children, spaces).map("".join), max_size=4)
    return items.map(lambda found: "[" + ",".join(found) + "]")


def named(children: st.SearchStrategy[str], names: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    members = st.lists(
        st.tuples(names, spaces, st.just(":"), spaces, children, spaces).map("".join), max_size=3
    )
    return members.map(lambda found: "{" + ",".join(found) + "}")


NAMES = st.one_of(
    st.sampled_from(['"x"', '"y"', '"b64"', '"instances"', '"inputs"', '"signature_name"', r'"\u0078"']),
    string_texts,
)
values = st.recursive(
    st.one_of(
        number_texts, string_texts, st.sampled_from(["true", "false", "null", "tru", '{"b64": "aGk="}'])
    ),
    lambda children: st.one_of(listed(children), named(children, NAMES)),
    max_leaves=12,
)


@st.composite
def broken(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> bytes:
    """One of `texts`, in half of the cases cut or with a byte changed."""
    body = draw(texts).encode("utf-8", "surrogatepass")
    damage = draw(st.sampled_from(["none", "none", "cut", "change", "tail"]))
    at = draw(st.integers(0, max(0, len(body) - 1)))
    if damage == "cut":
        return body[:at]
    if damage == "change":
        return body[:at] + bytes([draw(st.sampled_from(b'[]{},:"\\0 1.e-\x00\x7fN\xff'))]) + body[at + 1 :]
    return body + b" ]x" if damage == "tail" else body


@contextmanager
def at_edge(body: bytes) -> Iterator[memoryview]:
    """`body` right before a page that nobody may read: one byte too far ends the process."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    pages = (len(body) + PAGE - 1) // PAGE * PAGE
    start = libc.mmap(
        None, ctypes.c_size_t(pages + PAGE), PROT_READ_WRITE, MAP_PRIVATE_ANONYMOUS, -1, ctypes.c_long(0)
    )
    libc.mprotect(ctypes.c_void_p(start + pages), ctypes.c_size_t(PAGE), PROT_NONE)
    ctypes.memmove(start + pages - len(body), body, len(body))
    try:
        yield memoryview((ctypes.c_char * len(body)).from_address(start + pages - len(body))).cast("B")
    finally:
        libc.munmap(ctypes.c_void_p(start), ctypes.c_size_t(pages + PAGE))
