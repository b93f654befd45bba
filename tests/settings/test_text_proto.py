"""The text-proto reader against protobuf's own parser."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from google.protobuf import text_format
from hypothesis import assume, given
from hypothesis import strategies as st

from fastserve.errors import ConfigError
from fastserve.settings.tensorflow import BATCHING_PARAMETERS, MODEL_SERVER_CONFIG
from fastserve.settings.text_proto import MAX_DEPTH, TextField, parse_text
from tests.effort import examples
from tests.oracles import text_proto as oracle

SCHEMA = {
    "flag": TextField("bool"),
    "ratio": TextField("double"),
    "small": TextField("int32"),
    "size": TextField("uint32"),
    "big": TextField("int64", repeated=True),
    "name": TextField("string"),
    "color": TextField("enum", names={"NONE": 0, "RED": 1, "BLUE": 5}),
    "labels": TextField(
        "message", entries=True, fields={"key": TextField("string"), "value": TextField("int64")}
    ),
    "child": TextField(
        "message",
        repeated=True,
        fields={"word": TextField("string", repeated=True), "one": TextField("int32", oneof="pick")}
        | {"other": TextField("bool", oneof="pick")},
    ),
}
ROOT = oracle.message_class(SCHEMA)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
CHILD = st.fixed_dictionaries(
    {}, optional={"word": st.lists(TEXT, max_size=3), "one": st.integers(-(2**31), 2**31 - 1)}
)
TREES = st.fixed_dictionaries(
    {},
    optional={
        "flag": st.booleans(),
        "ratio": st.floats(allow_nan=False),
        "small": st.integers(-(2**31), 2**31 - 1),
        "size": st.integers(0, 2**32 - 1),
        "big": st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4),
        "name": TEXT,
        "color": st.sampled_from([0, 1, 5]),
        "labels": st.dictionaries(TEXT, st.integers(-(2**63), 2**63 - 1), max_size=3),
        "child": st.lists(CHILD, max_size=3),
    },
)
WORDS = "word one other key value RED true f inf nan - : { } < > [ ] , ; @ 1a 0 1 5 007 0x1F 1.5 .5 1e3 1f"
PIECES = st.sampled_from(
    [*SCHEMA, *WORDS.split(), " ", "\n", "# c\n", '"a"', "'b'", r'"\n\x41\101\u00e9"', '"', "\\"]
)


def build(tree: dict[str, Any]) -> Any:
    message = ROOT()
    for name, value in tree.items():
        if name == "child":
            for child in value:
                message.child.add(**child)
        elif name == "labels":
            message.labels.update(value)
        elif isinstance(value, list):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    return message


def with_zeros_left_out(tree: dict[str, Any]) -> dict[str, Any]:
    """As proto3 sees it: a scalar of zero is not set."""
    kept = {}
    for name, value in tree.items():
        if name == "child":
            value = [with_zeros_left_out(child) for child in value]
        is_zero = not value and not (isinstance(value, float) and math.copysign(1, value) < 0)
        in_oneof = name in ("one", "other")
        if not is_zero or in_oneof:
            kept[name] = value
    return kept


@given(TREES, st.booleans(), st.booleans(), st.booleans())
def test_reads_what_protobuf_prints(tree: dict[str, Any], short: bool, line: bool, utf8: bool) -> None:
    message = build(tree)
    text = text_format.MessageToString(
        message, use_short_repeated_primitives=short, as_one_line=line, as_utf8=utf8
    )
    assert parse_text(text, SCHEMA, "t") == oracle.plain(message)


def ordered(tree: Any) -> str:
    """Text that is equal for equal trees, NaN and -0.0 included."""
    if isinstance(tree, dict):
        return f"{{{', '.join(f'{key!r}: {ordered(tree[key])}' for key in sorted(tree))}}}"
    return f"[{', '.join(map(ordered, tree))}]" if isinstance(tree, list) else repr(tree)


def edited(tree: dict[str, Any], at: list[tuple[int, str]], cut: int) -> str:
    """The text of a tree with pieces put in or characters left out."""
    text = text_format.MessageToString(build(tree), as_one_line=True)
    for where, piece in at:
        where %= len(text) + 1
        text = text[:where] + piece + text[where + cut :]
    return text


EDITS = st.lists(st.tuples(st.integers(0, 10_000), PIECES | st.just("")), min_size=1, max_size=3)


@examples(400)
@given(st.lists(PIECES, max_size=14).map("".join) | st.builds(edited, TREES, EDITS, st.integers(0, 2)))
def test_accepts_nothing_that_protobuf_refuses_and_reads_the_same(text: str) -> None:
    assume(
        not re.search(r"-[\s#]", text)
    )  # the format's definition allows a space there, the oracle does not
    try:
        found = parse_text(text, SCHEMA, "t")
    except ConfigError:
        return
    assert ordered(with_zeros_left_out(found)) == ordered(oracle.parse(text, ROOT))


@given(st.text(max_size=40) | st.binary(max_size=40).map(lambda data: data.decode("latin-1")))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse_text(text, SCHEMA, "t")
    except ConfigError as fault:
        assert str(fault).startswith("t: line ")  # noqa: PT017


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nope: 1", "line 1, column 1: unknown field 'nope', allowed: flag, ratio, small"),
        (
            "\n  small: 1.5",
            "line 2, column 10: small: given 1.5, allowed: a whole number from -2147483648 to",
        ),
        ("size: -1", "size: given -1, allowed: a whole number from 0 to 4294967295"),
        ("flag: yes", "flag: given yes, allowed: true or false"),
        ("color: GREEN", "color: given GREEN, allowed: NONE or RED or BLUE"),
        ("name: abc", "name: given abc, allowed: text in quotes"),
        ('name: "abc', "unexpected '\"'"),
        ('name: "\\xff"', "name: not UTF-8 text"),
        ("flag true", "':' is due after flag"),
        ("small: 1 small: 2", "small is given more than once"),
        ("child { one: 1 other: true }", "other and one exclude each other"),
        ("child { one: 1", "the text ends where '}' is due"),
        ("child: 1", "'{' is due, since child is a message"),
        ("big: [1 2]", "',' or ']' is due"),
        ("[a.b]: 1", "unknown field '['"),
    ],
)
def test_faults_say_where_and_what(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as fault:
        parse_text(text, SCHEMA, "t")
    assert message in str(fault.value)


def test_depth_is_bounded() -> None:
    looped: dict[str, TextField] = {}
    looped["inner"] = TextField("message", fields=looped)
    assert parse_text("inner {" * MAX_DEPTH + "}" * MAX_DEPTH, looped, "t")
    with pytest.raises(ConfigError, match=f"more than {MAX_DEPTH} messages"):
        parse_text("inner {" * 100_000, looped, "t")


def test_the_schemas_are_proper_messages() -> None:
    for schema in (MODEL_SERVER_CONFIG, BATCHING_PARAMETERS):
        assert oracle.parse("", oracle.message_class(schema)) == {}
