"""request_template against its oracle: requests that fit a template, and the same with something broken."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve._ext.request_template import RequestTemplate, RequestTemplates, find_placeholders
from fastserve.tensor import DTYPE_BY_KSERVE
from tests.effort import examples
from tests.ext.json_strategies import at_edge, broken, number_texts, spaces
from tests.oracles import infer_json
from tests.oracles import request_template as oracle

FLOAT32, FLOAT64 = DTYPE_BY_KSERVE["FP32"].code, DTYPE_BY_KSERVE["FP64"].code


@dataclass
class Sketch:
    """The common shape of one client's requests."""

    inputs: list[tuple[str, tuple[int, ...], str]]  # (datatype, row shape, place)
    space: str
    shape_first: bool
    has_id: bool
    id_last: bool

    def header(self, rows: int, identity: str, data: list[str]) -> str:
        parts = [self._input(number, rows, data[number]) for number in range(len(self.inputs))]
        space = self.space
        members = [f'"inputs"{space}:{space}[{("," + space).join(parts)}]', '"outputs":[{"name":"y"}]']
        if self.has_id:
            members.insert(len(members) if self.id_last else 0, f'"id":{space}{json.dumps(identity)}')
        return "{" + f"{space},{space}".join(members) + "}"

    def _input(self, number: int, rows: int, data: str) -> str:
        datatype, row_shape, place = self.inputs[number]
        nbytes = rows * oracle.row_bytes(datatype, row_shape)
        shape = ("," + self.space).join(str(axis) for axis in (rows, *row_shape))
        members = [f'"name":"x{number}"', f'"shape":[{shape}]', f'"datatype":"{datatype}"']
        if not self.shape_first:
            members.reverse()
        last = {
            "data": f'"data":{self.space}{data}',
            "blob": f'"parameters":{{"binary_data_size":{nbytes}}}',
            "outside": '"parameters":{"shared_memory_offset":0,"shared_memory_region":"r",'
            f'"shared_memory_byte_size":{nbytes}}}',
        }
        return "{" + f",{self.space}".join([*members, last[place]]) + "}"

    def template(self, header: bytes) -> RequestTemplate:
        """As the dialect makes one."""
        targets = [oracle.row_bytes(datatype, row_shape) for datatype, row_shape, _ in self.inputs]
        placeholders = []
        for kind, start, end, number in find_placeholders(header):
            unit = {"id": 0, "rows": 1, "size": targets[number]}.get(kind, prod(self.inputs[number][1]))
            code = DTYPE_BY_KSERVE[self.inputs[number][0]].code
            placeholders.append(("rows" if kind == "size" else kind, start, end, unit, max(number, 0), code))
        blobs = [(i, targets[i]) for i, (_, _, place) in enumerate(self.inputs) if place == "blob"]
        return RequestTemplate(header, placeholders, blobs, targets, 0)

    def take(self, templates: RequestTemplates, request: Any, header_bytes: int) -> Any:
        """(rows, id, values) as the oracle has them."""
        template = templates.find(request, header_bytes)
        if template is None:
            return None
        sizes = [template.rows * oracle.row_bytes(datatype, shape) for datatype, shape, _ in self.inputs]
        outs = [bytearray(size) for size in sizes]
        if not template.read_into(request, header_bytes, outs):
            return None
        places = [place for _, _, place in self.inputs]
        values = [None if place == "outside" else bytes(out) for place, out in zip(places, outs, strict=True)]
        return template.rows, template.id, values


@st.composite
def sketches(draw: st.DrawFn) -> Sketch:
    one = st.tuples(
        st.sampled_from([*infer_json.DTYPES]),
        st.lists(st.integers(1, 3), max_size=2).map(tuple),
        st.sampled_from(["data", "data", "blob", "outside"]),
    )
    inputs = draw(st.lists(one, min_size=1, max_size=3))
    has_data = any(place == "data" for _, _, place in inputs)
    id_last = draw(st.booleans()) and not has_data
    return Sketch(inputs, draw(spaces), draw(st.booleans()), draw(st.booleans()), id_last)


def leaves(datatype: str, good: bool) -> st.SearchStrategy[str]:
    if datatype == "BOOL":
        return st.sampled_from(["true", "false"])
    if datatype.startswith("F") and not good:
        return number_texts
    return st.integers(0, 300).map(str)


@st.composite
def requests(draw: st.DrawFn, sketch: Sketch, good: bool = False) -> tuple[str, bytes]:
    rows = draw(st.integers(1, 3))
    data, blobs = [], b""
    for datatype, row_shape, place in sketch.inputs:
        items = rows * prod(row_shape)
        if place == "blob":
            blobs += draw(st.binary(min_size=(n := rows * oracle.row_bytes(datatype, row_shape)), max_size=n))
        found = (
            draw(st.lists(leaves(datatype, good), min_size=items, max_size=items)) if place == "data" else []
        )
        text = ",".join(found)
        data.append(f"[[{text}]]" if draw(st.booleans()) else f"[ {text}]")
    return sketch.header(rows, draw(st.text(max_size=4)), data), blobs


def same(got: Any, want: Any) -> bool:
    return repr(got) == repr(want)


@examples(150)
@given(st.data())
def test_what_fits_is_taken(data: st.DataObject) -> None:
    sketch = data.draw(sketches())
    templates = RequestTemplates(4)
    first = data.draw(requests(sketch, good=True))[0].encode()
    placeholders = find_placeholders(first)
    templates.add(sketch.template(first))
    header, blobs = data.draw(requests(sketch))
    request, size = header.encode() + blobs, len(header.encode())
    try:
        want = oracle.take(first, placeholders, sketch.inputs, request, size)
    except infer_json.Fault:  # numbers that are none
        want = None
    with at_edge(request) as view:
        got = sketch.take(templates, view, size)
        whole = templates.find(view, size)
    assert same(got, want)
    cut = data.draw(st.integers(0, len(blobs)))  # all but the end of its blobs is enough to find it
    with at_edge(request[: len(request) - cut]) as beginning:
        assert templates.find(beginning, size, len(request)) is whole
        assert templates.find(beginning, size, len(request) + 1) is None


@examples(200)
@given(st.data())
def test_what_is_taken_is_right(data: st.DataObject) -> None:
    sketch = data.draw(sketches())
    templates = RequestTemplates(4)
    first = data.draw(requests(sketch, good=True))[0].encode()
    templates.add(sketch.template(first))
    header, blobs = data.draw(requests(sketch))
    damaged = data.draw(broken(st.just(header)))
    size = len(damaged) + data.draw(st.sampled_from([0, 0, 0, 1, -1]))
    with at_edge(damaged + blobs) as view:
        got = sketch.take(templates, view, size)
    if got is not None:
        assert same(got, oracle.take(first, find_placeholders(first), sketch.inputs, damaged + blobs, size))


def test_holes_are_found() -> None:
    header = (
        b'{"inputs":[{"shape":[ 2,1],"data":[1,2],"x":{}},{"shape":[0],"parameters":{"a":1}}],"id" : "7"}'
    )
    found = find_placeholders(header)
    assert [(kind, header[start:end], number) for kind, start, end, number in found] == [
        ("rows", b"2", 0),
        ("data", b"[1,2]", 0),
        ("id", b'"7"', -1),
    ]
    twice = b'{"id":"7","id":"8","inputs":[{"data":[1],"data":[2]}]}'
    assert [twice[start:end] for _, start, end, _ in find_placeholders(twice)] == [b'"7"', b"[1]"]
    for header in (b"", b"{", b"[]", b'{"id":7}', b'{"inputs":[1]}', b'{"inputs":5}'):
        assert find_placeholders(header) == []


HEADER = b'{"inputs":[{"shape":[1],"data":[1]}]}'
ROWS, DATA = (kind[1:3] for kind in find_placeholders(HEADER))


@pytest.mark.parametrize(
    ("placeholders", "blobs", "targets", "rows", "said"),
    [
        ([("data", *DATA, 1, 0, FLOAT32)], [], [4], 0, "rows must be known"),
        ([], [], [4], 0, "how many rows"),
        ([("data", *DATA, 1, 0, FLOAT32), ("rows", *ROWS, 1, 0, 0)], [], [4], 1, "order"),
        ([("data", *DATA, 1, 1, FLOAT32)], [], [4], 1, "no tensor 1"),
        ([("data", *DATA, 2, 0, FLOAT32)], [], [4], 1, "no tensor 0 of 2 x 4"),
        ([("data", *DATA, 0, 0, FLOAT32)], [], [4], 1, "a row has"),
        ([("data", *DATA, 1, 0, DTYPE_BY_KSERVE["FP16"].code)], [], [2], 1, "dtype code"),
        ([("data", *DATA, 1, 0, 99)], [], [2], 1, "dtype code 99"),
        ([("data", *DATA, 1, 0, FLOAT32), ("id", 34, 35, 0, 0, 0)], [], [4], 1, "id must be known"),
        ([], [(0, 8)], [4], 1, "no tensor 0 of 8"),
        ([], [], [4] * 65, 1, "at most 64"),
        ([], [], [1 << 40], 1, "a row has"),
        ([("rows", 5, 99, 1, 0, 0)], [], [4], 0, "order"),
    ],
)
def test_templates_that_cannot_be(placeholders: Any, blobs: Any, targets: Any, rows: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RequestTemplate(HEADER, placeholders, blobs, targets, rows)


@given(st.lists(number_texts, min_size=1, max_size=40))
def test_doubles_that_were_sent_as_float32(texts: list[str]) -> None:
    """Each is what a template of float32 has for the same text, in a double."""
    rows, body = len(texts), b'{"inputs":[{"shape":[%d],"data":[%b]}]}'
    request = body % (rows, ",".join(texts).encode())
    narrow, wide = bytearray(4 * rows), bytearray(8 * rows)
    taken = []
    for code, out, rounded in ((FLOAT32, narrow, ()), (FLOAT64, wide, (0,))):
        templates = RequestTemplates(1)
        placeholders = [("rows", *ROWS, 1, 0, 0), ("data", *DATA, 1, 0, code)]
        templates.add(RequestTemplate(HEADER, placeholders, [], [len(out) // rows], 0, rounded=rounded))
        found = templates.find(request, len(request))
        taken.append(found is not None and found.read_into(request, len(request), [out]))
    assert taken[0] == taken[1]
    if all(taken):
        with np.errstate(over="ignore"):
            assert np.frombuffer(narrow, "<f4").astype("<f8").tobytes() == bytes(wide)


def test_float64_alone_is_rounded() -> None:
    with pytest.raises(ValueError, match="float64 alone is rounded"):
        RequestTemplate(HEADER, [("data", *DATA, 1, 0, FLOAT32)], [], [4], 1, rounded=(0,))


def test_memory_must_fit() -> None:
    templates = RequestTemplates(2)
    template = RequestTemplate(HEADER, [("data", *DATA, 1, 0, FLOAT32)], [], [4], 1)
    templates.add(template)
    with pytest.raises(ValueError, match="that was found"):
        template.read_into(HEADER, len(HEADER), [bytearray(4)])
    assert templates.find(HEADER, len(HEADER)) is template
    out = bytearray(4)
    before = sys.getrefcount(out)
    assert template.read_into(HEADER, len(HEADER), [out])
    for outs in ([bytearray(8)], [out, out], [], [bytes(4)]):
        with pytest.raises((ValueError, BufferError)):
            template.read_into(HEADER, len(HEADER), outs)
    assert sys.getrefcount(out) == before
    assert not template.read_into(HEADER + b"x", len(HEADER), [out])
    assert templates.find(HEADER, len(HEADER) + 1) is None
    assert templates.find(HEADER, -1) is None
    with pytest.raises(ValueError, match="made once"):
        template.__init__(HEADER, [], [], [4], 1)  # type: ignore[misc]


def test_the_last_used_are_kept() -> None:
    def header(name: int) -> bytes:
        return b'{"inputs":[{"name":"%d","data":[1]}]}' % name

    def template(name: int) -> RequestTemplate:
        _, start, end, _ = find_placeholders(header(name))[0]
        return RequestTemplate(header(name), [("data", start, end, 1, 0, FLOAT32)], [], [4], 1, str(name))

    def found(name: int) -> str | None:
        got = templates.find(header(name), len(header(name)))
        return None if got is None else got.id

    templates = RequestTemplates(3)
    for name in range(4):
        templates.add(template(name))
    assert [found(name) for name in range(4)] == [None, "1", "2", "3"]
    assert found(1) == "1"
    templates.add(template(5))
    assert [found(name) for name in (1, 2, 3, 5)] == ["1", None, "3", "5"]
    templates.add(template(6))
    assert (templates.unused(), len(templates)) == (1, 3)
    templates.forget_unused()
    assert (templates.unused(), len(templates), found(6)) == (0, 2, None)


def test_claimed_rows_must_fit_the_text() -> None:
    templates = RequestTemplates(1)
    templates.add(
        RequestTemplate(HEADER, [("rows", *ROWS, 1, 0, 0), ("data", *DATA, 1, 0, FLOAT32)], [], [4], 0)
    )
    for rows in (b"20", b"16777216", b"9" * 30, b"0", b"01", b"-1", b"1.0", b"1e0"):
        request = HEADER.replace(b"[1],", b"[%b]," % rows)
        assert templates.find(request, len(request)) is None
    two = b'{"inputs":[{"shape":[2],"data":[1,2.5]}]}'
    got, out = templates.find(two, len(two)), bytearray(8)
    assert got is not None
    assert got.read_into(two, len(two), [out])


def test_long_requests_are_quick() -> None:
    items = 200_000
    header = b'{"inputs":[{"shape":[1],"data":[%b]}]}' % b",".join([b"1.2345678"] * items)
    _, start, end, _ = find_placeholders(header)[1]
    templates = RequestTemplates(1)
    templates.add(RequestTemplate(header, [("data", start, end, items, 0, FLOAT32)], [], [4 * items], 1))
    nested = header.replace(b"[1.2", b"[" * 400_000 + b"1.2")
    began = time.thread_time()
    for request in (header, nested, header.replace(b"[1.2345678,", b"["), header[:-3]):
        template = templates.find(request, len(request))
        taken = template is not None and template.read_into(request, len(request), [bytearray(4 * items)])
        assert taken == (request is header)
    assert time.thread_time() - began < 1
