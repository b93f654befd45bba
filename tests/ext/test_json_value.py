"""json_value against its oracle and the vectors: values, reasons, offsets and the debug layout."""

from __future__ import annotations

import gc
import json
import math
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve._ext.json_value import MOST_CONTAINERS, JSONSyntaxError, Members, debug_text, parse
from tests.effort import examples
from tests.ext.json_strategies import at_edge, broken, number_texts, values
from tests.oracles import json_value as oracle

VECTORS = Path(__file__).parents[1] / "vectors" / "tfserving.jsonl"
PARSE = "JSON Parse error: "
LONG_NUMBER = r"-?[1-9][0-9]{16,40}(\.[0-9]{1,30})?(e-?[0-9]{1,2})?"
CASES = [
    case
    for case in map(json.loads, VECTORS.read_text().splitlines())
    if case["kind"].startswith("parse_") and "body" in case["input"]
]


def plain(value: Any) -> Any:
    """Like the oracle's values, and comparable: NaN equals itself, 1 differs from 1.0 and True."""
    if isinstance(value, Members):
        return "object", [(name, plain(inner)) for name, inner in value.pairs]
    if isinstance(value, tuple):
        return "object", [(name, plain(inner)) for name, inner in value[1]]
    if isinstance(value, list):
        return [plain(item) for item in value]
    return type(value).__name__, repr(value)


MORE_FOLLOWS = ("pp-doc-00", "pp-doc-01", "cr-27")  # TensorFlow Serving stops behind the first value
SECOND_VALUE = "The document root must not be followed by other values."


def outcome(read: Any, body: Any) -> Any:
    try:
        return plain(read(body))
    except (JSONSyntaxError, oracle.Refused) as error:
        return error.reason, error.offset


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_vectors(case: dict[str, Any]) -> None:
    body, error = case["input"]["body"].encode(), case["expected"].get("error", "")
    if body == b"" or "deep-nesting" in case["id"]:
        return  # the dialect words the first; the second is deeper than this server takes
    if error.startswith(PARSE):
        with pytest.raises(JSONSyntaxError) as caught:
            parse(body)
        assert error == PARSE + str(caught.value)
        return
    if case["id"] in MORE_FOLLOWS:
        with pytest.raises(JSONSyntaxError, match=SECOND_VALUE):
            parse(body, alone=True)
    value = parse(body)
    whole = "JSON Value: " + debug_text(value) + " "
    assert not error.startswith(whole[:14]) or error.startswith(whole) or "64" in error or "Type:" in error


@pytest.mark.parametrize("rest", [b"\0", b" \0x", b"\n\0{"])
def test_a_nul_behind_the_value_ends_the_text(rest: bytes) -> None:
    assert parse(b"[1]" + rest, alone=True) == oracle.parse(b"[1]" + rest, alone=True) == [1]


@examples(150)
@given(broken(values), st.booleans())
def test_agrees_with_oracle(body: bytes, alone: bool) -> None:
    mine, plainly = partial(parse, alone=alone), partial(oracle.parse, alone=alone)
    assert outcome(mine, body) == outcome(plainly, body)


@examples(150)
@given(number_texts)
def test_numbers(text: str) -> None:
    assert outcome(parse, text.encode()) == outcome(oracle.parse, text.encode())


@examples(400)
@given(
    st.one_of(
        number_texts, st.from_regex(r"-?[1-9][0-9]{16,40}(\.[0-9]{1,30})?(e-?[0-9]{1,2})?", fullmatch=True)
    )
)
def test_numbers_are_shown_as_tensorflow_serving_reads_them(text: str) -> None:
    """In messages alone: the value is the nearest double."""
    try:
        exact, shown = parse(text.encode()), parse(text.encode(), as_shown=True)
    except JSONSyntaxError:
        return
    if isinstance(exact, int) or not math.isfinite(exact):
        assert plain(shown) == plain(exact)
        return
    assert (type(exact), float(shown)) == (float, exact)
    expected = oracle.normal_precision(text)
    assert debug_text(shown) == debug_text(expected if math.isfinite(expected) else exact)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("18446744073709551616", "18446744073709552000.0"),
        ("-9223372036854775809", "-9223372036854776000.0"),
        ("123456789012345678901234567890", "1.2345678901234566e29"),
        ("-123456789012345678901234567890", "-1.2345678901234566e29"),
        ("12345678901234567890123.45", "1.2345678901234568e22"),
        ("1e-320", "1e-320"),
        ("1e-400", "0.0"),
        ("NaN", ""),
        ("18446744073709551615", "18446744073709551615"),
    ],
)
def test_numbers_shown(text: str, shown: str) -> None:
    assert debug_text(parse(text.encode(), as_shown=True)) == shown


@examples(100)
@given(broken(values))
def test_stays_inside(body: bytes) -> None:
    with at_edge(body) as view:
        assert outcome(parse, view) == outcome(parse, body)


@pytest.mark.parametrize(
    "text",
    [
        "9007199254740993",
        "9007199254740993.0",
        "2.2250738585072011e-308",
        "4.9406564584124654e-324",
        "2.47e-324",
        "2.4703282292062327e-324",
        "2.4703282292062328e-324",
        "1.7976931348623157e308",
        "1.7976931348623158e308",
        "1.7976931348623159e308",
        "0." + "0" * 400 + "1e401",
        "1" + "0" * 400 + "e-400",
        "1e-99999999999999999999",
        "0e99999999999999999999",
        "8.5" + "0" * 800 + "1",
        "9007199254740992.99999999999999999999999999999999999999",
        "9007199254740993" + ".0" * 1 + "0" * 30 + "1",
        "1" * 19,
        "1" * 20,
        "1" * 21,
        "18446744073709551616",
    ],
)
def test_hard_numbers(text: str) -> None:
    assert outcome(parse, text.encode()) == outcome(oracle.parse, text.encode())
    if "." in text or "e" in text:
        assert outcome(parse, b"-" + text.encode()) == outcome(oracle.parse, b"-" + text.encode())


@pytest.mark.parametrize("text", [b"1" * 10**6, b"0." + b"3" * 10**6, b"1e" + b"0" * 10**6 + b"1"])
def test_million_digits_are_linear(text: bytes) -> None:
    start = time.thread_time()
    outcome(parse, text)
    assert time.thread_time() - start < 0.5


def test_depth() -> None:
    assert parse(b"[" * 100 + b"]" * 100)
    assert parse(b"[[[]]]", max_depth=3) == [[[]]]
    for body in (b"[" * 101 + b"]" * 101, b"[" * 500_000, b'{"a":' * 500_000):
        with pytest.raises(JSONSyntaxError) as caught:
            parse(body)
        assert caught.value.reason == "Nesting too deep."


def test_members() -> None:
    value = parse(b'{"a": 1, "b": [2.0], "a": null}')
    assert isinstance(value, Members)
    assert value.pairs == [(b"a", 1), (b"b", [2.0]), (b"a", None)] == list(value)
    assert value.get(b"a") == 1
    assert value.get(b"c") is None
    assert b"b" in value
    assert b"c" not in value
    assert len(value) == 3
    assert value == Members(value.pairs) != Members()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e30, "1e30"),
        (1.5e-7, "1.5e-7"),
        (0.00000123, "0.00000123"),
        (1.2345678901234569e23, "1.2345678901234569e23"),
        (-0.0, "-0.0"),
        (1e21, "1e21"),
        (1e20, "100000000000000000000.0"),
        (123.456, "123.456"),
        (5e-324, "5e-324"),
        (math.nan, ""),
        (-math.inf, ""),
        (True, "true"),
        (None, "null"),
        (-(2**63), "-9223372036854775808"),
        (b'\x01\x1f"\\/\xc3\xa9\x7f', '"\\u0001\\u001F\\"\\\\/\u00e9\x7f"'),
        (b"\xff", '"\ufffd"'),
        ([], "[]"),
        (Members(), "{}"),
    ],
)
def test_debug_text(value: Any, text: str) -> None:
    assert debug_text(value) == text


def test_debug_text_stops() -> None:
    assert debug_text([b"x" * 1000, 1]) == '["' + "x" * 1000 + '"'
    assert len(debug_text(list(range(1000)))) == 257


@pytest.mark.parametrize("value", [b"[]", b"{}", b"[1]"])
def test_containers_are_bounded_however_many_values_there_may_be(value: bytes) -> None:
    """They are freed in one go."""
    parse(b"[%b]" % b",".join([value] * (MOST_CONTAINERS - 1)))
    with pytest.raises(JSONSyntaxError, match="Too many values"):
        parse(b"[%b]" % b",".join([value] * MOST_CONTAINERS))
    parse(b"[%b]" % b",".join([b"1"] * 2 * MOST_CONTAINERS))


def test_the_collector_looks_at_nothing_of_a_document() -> None:
    root = parse(b'[{"a": [1], "b": {}}, []]')
    assert isinstance(root, list)
    inner = root[0]
    assert isinstance(inner, Members)
    tracked = [root, inner, inner.pairs, *inner.pairs, *inner, inner.get(b"a"), inner.get(b"b"), root[1]]
    assert not any(map(gc.is_tracked, tracked))
    (name, value), _ = inner.pairs
    assert (name, value) == (b"a", [1])


@pytest.mark.parametrize(
    "body",
    [b"[%b1]" % (b"1," * 3_000_000), b'"%b"' % (rb"\u00e9" * 8_000_000)],
    ids=["numbers", "escapes"],
)
def test_others_run_while_a_thread_reads_a_large_document(body: bytes) -> None:
    """A pause that is too short wakes who waits for the GIL, and gives it to nobody."""
    over: list[bool] = []
    reader = threading.Thread(target=lambda: over.append(bool(parse(body))))
    reader.start()
    turns = 0
    while not over:
        time.sleep(0.0005)
        turns += 1
    reader.join()
    assert over == [True]
    assert turns > 10  # of 90, in 70 ms; 2 without pauses
