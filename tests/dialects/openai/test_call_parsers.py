"""Parsers of calls of tools, against a plain reader of whole texts, over any cuts of the text."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve.dialects.openai.call_parsers import (
    FORMATS,
    HERMES,
    LLAMA3,
    MISTRAL,
    AnswerPart,
    CallFormat,
    CallParser,
    detect_format,
)
from tests.effort import examples

Answer = tuple[str, list[tuple[str, str]], bool]
"""The content, the name and arguments of each call, and whether the last one is whole."""


def parse(form: CallFormat, pieces: Iterable[str]) -> Answer:
    """Feed pieces, and put what comes out together."""
    parser = CallParser(form, {"f", "g"})
    content, calls = "", list[list[str]]()
    for part in [*[part for piece in pieces for part in parser.feed(piece)], *parser.end()]:
        if part.call < 0:
            content += part.text
        elif part.name:
            assert (part.call, part.text) == (len(calls), "")
            calls.append([part.name, ""])
        else:
            assert part.call == len(calls) - 1
            assert part.text
            calls[-1][1] += part.text
    assert parser.calls == len(calls)
    return content, [(name, arguments) for name, arguments in calls], parser.complete


def cut(text: str, places: Iterable[int]) -> list[str]:
    bounds = sorted({0, len(text), *[place % (len(text) + 1) for place in places]})
    return [text[begin:end] for begin, end in pairwise(bounds)]


# --- a plain reader: the whole text at once, with json's own decoder


def plain_call(found: Any, key: str) -> tuple[str, str] | None:
    good = isinstance(found, dict) and isinstance(found.get("name"), str) and found["name"]
    return (found["name"], found.get(key, {})) if good else None


def read_plainly(form: CallFormat, text: str) -> Answer:
    """Read a well-formed answer by a regular expression for each form, and json."""
    decoder = json.JSONDecoder()
    segments, calls, at = [""], list[tuple[str, str]](), 0
    begin = re.escape(form.begin) + r"\s*" + re.escape(form.open) + r"\s*"
    while at < len(text):
        bare = form.bare and not text[:at].strip() and re.compile(r"\s*(?=\{)").match(text, at)
        found = bare or re.compile(begin).match(text, at)
        if not found:
            segments[-1] += text[at]
            at += 1
            continue
        at, more = found.end(), True
        while more:
            value, end = decoder.raw_decode(text, at)
            call = plain_call(value, form.key)
            assert call is not None
            (arguments,) = re.findall(rf'"{form.key}"\s*:\s*(.*)\}}', text[at:end], re.DOTALL)
            calls.append((call[0], arguments.rstrip()))
            wanted = rf"\s*{re.escape(form.more)}\s*" if form.more else rf"\s*{re.escape(form.close)}"
            rest = re.compile(wanted).match(text, end)
            more, at = bool(form.more and rest), rest.end() if rest else end
        if form.more and form.close:
            at = re.compile(r"\s*" + re.escape(form.close)).match(text, at).end()  # type: ignore[union-attr]
        segments.append("")
    if not calls:
        return segments[0], [], True
    return "".join(each.rstrip() for each in segments), calls, True


WORDS = st.text(st.characters(exclude_characters="<[{\\", exclude_categories=["Cs"]), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
SPACES = st.text(" \n\t", max_size=3)


@st.composite
def calls(draw: Callable[..., Any], form: CallFormat) -> str:
    """One object of a call."""
    arguments = json.dumps(
        draw(st.dictionaries(st.text(), VALUES, max_size=3)),
        ensure_ascii=draw(st.booleans()),
        indent=draw(st.none() | st.just(1)),
    )
    space = draw(SPACES)
    items = [
        f'"name":{space}"{draw(st.sampled_from(["f", "g"]))}"',
        f'"{form.key}"{space}:{space}{arguments}',
    ]
    if draw(st.booleans()):
        items.insert(0, '"type": "function"')
    return "{" + space + f",{draw(SPACES)}".join(items) + space + "}"


@st.composite
def answers(draw: Callable[..., Any], form: CallFormat) -> str:
    """An answer with any number of calls, and words around them."""
    one, space = calls(form), draw(SPACES)
    if form is HERMES:
        count = draw(st.integers(0, 3))
        blocks = [f"{draw(WORDS)}<tool_call>{space}{draw(one)}{space}</tool_call>" for _ in range(count)]
        return "".join(blocks) + str(draw(WORDS))
    objects = draw(st.lists(one, min_size=1, max_size=3))
    if form is MISTRAL:
        listed = f"{space},{space}".join(objects)
        return f"{draw(WORDS)}[TOOL_CALLS]{space}[{listed}{space}]{draw(WORDS)}"
    begin = draw(st.sampled_from(["", "<|python_tag|>", "well<|python_tag|>"]))
    return begin + space + f"{space};{space}".join(objects) + space


@examples(300)
@given(st.data())
def test_any_cuts_of_a_good_answer(data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(list(FORMATS.values())))
    text = data.draw(answers(form))
    places = data.draw(st.lists(st.integers(0, 1 << 20), max_size=30))
    expected = read_plainly(form, text)
    assert parse(form, cut(text, places)) == expected
    assert parse(form, text) == expected  # a character at a time


SHARDS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "<tool_",
        "</tool",
        "[",
        "]",
        "{",
        "}",
    ),
    *('"name"', ":", '"f"', '"arguments"', '"parameters"', ",", ";", "null", "1", '"', "\\", "\n", " ", "x"),
    *('{"name": "f", "arguments": {"a": "}"}}', '{"name": "g", "parameters": "{}"}', '{"name": "f"}'),
]


@examples(400)
@given(st.sampled_from(list(FORMATS.values())), st.lists(st.sampled_from(SHARDS), max_size=16), st.data())
def test_any_cuts_of_any_text(form: CallFormat, shards: list[str], data: st.DataObject) -> None:
    """What a text comes to does not depend on its cuts, and a text without calls is content as it is."""
    text = "".join(shards)
    whole = parse(form, [text])
    assert parse(form, text) == whole
    assert parse(form, cut(text, data.draw(st.lists(st.integers(0, 1 << 20), max_size=12)))) == whole
    if not whole[1]:
        assert whole == (text, [], True)


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (HERMES, "", ("", [], True)),
        (HERMES, " \n", (" \n", [], True)),
        (HERMES, "a < b", ("a < b", [], True)),
        (HERMES, "I see.\n<tool_", ("I see.\n<tool_", [], True)),
        (HERMES, '<tool_call>{"name": "f"}</tool_call>', ("", [("f", "{}")], True)),
        (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}', ("", [("f", '{"a": 1}')], True)),
        (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', ("", [("f", "{}")], True)),
        (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', ("", [("f", '{"a": 1}')], True)),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "<b', ("", [("f", '{"a": "<b')], False)),
        (HERMES, '<tool_call>{"name": "f", "arguments": [1</tool_call>x', ("x", [("f", "[1")], False)),
        (HERMES, '<tool_call>{"name":"f"}<tool_call>{"name":"g"}', ("", [("f", "{}"), ("g", "{}")], True)),
        (HERMES, '<tool_call>{"name": "f"}</tool_call>\nDone.\n', ("\nDone.", [("f", "{}")], True)),
        (HERMES, "<tool_call>f(1)</tool_call>", ("<tool_call>f(1)</tool_call>", [], True)),
        (HERMES, '<tool_call>{"name": 1}', ('<tool_call>{"name": 1}', [], True)),
        (HERMES, '<tool_call>{"name": "f", "x": [1], "arguments": {}}', ("", [("f", "{}")], True)),
        (LLAMA3, '{"name": "f", "parameters": {"a": 1}}', ("", [("f", '{"a": 1}')], True)),
        (LLAMA3, ' {"name": "f", "parameters": {}}; {"name": "g"}', ("", [("f", "{}"), ("g", "{}")], True)),
        (LLAMA3, '{"name": "Bob", "age": 3}', ('{"name": "Bob", "age": 3}', [], True)),
        (LLAMA3, '{"answer": 42}', ('{"answer": 42}', [], True)),
        (LLAMA3, '<|python_tag|>{"name": "h", "parameters": {}}', ("", [("h", "{}")], True)),
        (LLAMA3, '<|python_tag|>print(1)', ("<|python_tag|>print(1)", [], True)),
        (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "]"}}]', ("", [("f", '{"a": "]"}')], True)),
        (MISTRAL, '[TOOL_CALLS]f{"a": 1}', ('[TOOL_CALLS]f{"a": 1}', [], True)),
        (MISTRAL, "[TOOL_CALLS] [", ("[TOOL_CALLS] [", [], True)),
        (MISTRAL, '[TOOL_CALLS] [{"name": "f", "argum', ("", [("f", "")], False)),
    ],
)  # fmt: skip
def test_an_answer(form: CallFormat, text: str, expected: Answer) -> None:
    assert parse(form, text) == parse(form, [text]) == expected


def test_parts_come_as_early_as_they_can() -> None:
    parser = CallParser(HERMES)
    assert parser.feed("So.\n") == [AnswerPart("So.")]
    assert parser.feed('<tool_call>\n{"name": "f", "argum') == [AnswerPart("", 0, "f")]
    assert parser.feed('ents": {"a"') == [AnswerPart('{"a"', 0)]
    assert parser.feed(": 1}") == [AnswerPart(": 1}", 0)]
    assert not parser.complete
    assert parser.feed("}\n</tool_call>") == []
    assert parser.complete
    assert parser.end() == []


ENDLESS = {
    "arguments": (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "', "xyz "),
    "brackets": (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": ', "[{["),
    "no name": (LLAMA3, '{"parameters": "', "xyz\\n"),
    "text": (HERMES, "", "a <tool"),
    "marks": (HERMES, "", "<tool_call>"),
    "space": (HERMES, "a", "\n\n\n\n"),
    "calls": (HERMES, "", '<tool_call>{"name": "f"}</tool_call>'),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_the_cost_of_a_long_answer_is_linear(kind: str) -> None:
    """An answer that is never closed, of 16 times as many tokens as another: whole, and token by token."""
    form, begin, token = ENDLESS[kind]
    few = 60 if kind == "calls" else 625

    def cost(tokens: int, *, whole: bool) -> float:
        pieces = [begin + token * tokens] if whole else [begin, *[token] * tokens]
        parser, began = CallParser(form, {"f"}), time.process_time()
        for piece in pieces:
            parser.feed(piece)
        parser.end()
        return time.process_time() - began

    for whole in (False, True):
        small = min(cost(few, whole=whole) for _ in range(3))
        large = min(cost(16 * few, whole=whole) for _ in range(2))
        assert large < 16 * 4 * max(small, 0.001), (small, large)  # 256 times as much, were it quadratic


def test_forms_by_their_templates() -> None:
    for template, form in (
        ("<tool_call>\n{{ tool_call | tojson }}\n</tool_call>", HERMES),
        ("{{ '[TOOL_CALLS] [' }}", MISTRAL),
        ("{{ '<|python_tag|>' }}{{ '\"parameters\": ' }}", LLAMA3),
        ("Environment: ipython {{ '\"parameters\": ' }}", LLAMA3),
        ("Environment: ipython [f(a=1)]", None),
        ("<tool_call><function=f></tool_call>", None),
        ("<tool_call>f<arg_key>a</arg_key>", None),
        ("[TOOL_CALLS]f[ARGS]{}", None),
        ("{{ tools }}", None),
    ):
        assert detect_format(template) is form


def test_ids() -> None:
    assert re.fullmatch("[A-Za-z0-9]{9}", MISTRAL.make_id())
    assert re.fullmatch("call_[0-9a-f]{24}", HERMES.make_id())
    assert len({HERMES.make_id() for _ in range(100)}) == 100
