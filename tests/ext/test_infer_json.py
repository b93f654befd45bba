"""infer_json against its oracle and captured requests, and bodies meant to break it."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve._ext.infer_json import InferCode, InferFault, read_infer
from fastserve.tensor import DTYPE_BY_KSERVE, KSERVE_NAME
from tests.effort import examples
from tests.ext.json_strategies import (
    at_edge,
    broken,
    listed,
    named,
    number_texts,
    spaces,
    string_texts,
    values,
)
from tests.oracles import infer_json as oracle

VECTORS = Path(__file__).parents[1] / "vectors" / "triton_v2_infer.jsonl"
CASES = [json.loads(line) for line in VECTORS.read_text().splitlines()]
# What only a model or the dialect can tell, or what is about the blobs behind the JSON.
PARSING = tuple(f"Unable to parse '{member}" for member in ("id", "inputs", "data", "datatype", "shape"))
OURS = (*PARSING, "failed to parse", "receiving", "Input must")


def ours(body: Any) -> Any:
    try:
        got = read_infer(body)
    except InferFault as fault:
        return fault.text
    inputs = [(i.name, i.datatype, i.shape, i.parameters, i.data) for i in got.inputs]
    return got.id, got.parameters, inputs, [(o.name, o.parameters) for o in got.outputs]


def theirs(body: bytes) -> Any:
    try:
        return oracle.read(body)
    except oracle.Fault as fault:
        return fault.args[0]


def same(got: Any, want: Any) -> bool:
    return repr(got) == repr(want)  # NaN parameters are equal to themselves, 1 and 1.0 and True are not


def requests() -> list[Any]:
    plain = [c for c in CASES if not c["request"]["headers"] and c["request"]["body"].startswith("{")]
    return [(c["request"]["body"].encode(), c["expect"], c["id"]) for c in plain]


@pytest.mark.parametrize("case", requests(), ids=lambda case: case[2])
def test_captured(case: Any) -> None:
    body, expect, _ = case
    got = ours(body)
    assert same(got, theirs(body))
    error = expect.get("body", {}).get("error", "")
    if error.startswith(OURS):
        assert got == error
        with pytest.raises(InferFault) as caught:
            read_infer(body)
        assert caught.value.is_callers == (expect["status"] == 400)
    elif expect["status"] == 200:
        assert [one[0] for one in got[2]] == [one["name"] for one in json.loads(body)["inputs"]]


DATATYPES = st.sampled_from([*DTYPE_BY_KSERVE, "FP32", "INT32", "UINT8", "fp32"])
leaves = st.one_of(
    number_texts,
    st.integers(-300, 300).map(str),
    st.sampled_from(["true", "false", '"a"', '""', '"\\u00e9"', "2147483648", "-129", "null", "NaN", "1.5"]),
)
small = st.integers(-300, 300).map(str)
bools = st.sampled_from(["true", "false"])


def nested(one: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.recursive(listed(one), lambda inner: listed(st.one_of(one, inner)), max_leaves=6)


data_texts = st.one_of(
    nested(number_texts), nested(small), nested(bools), nested(string_texts), listed(leaves), values
)
shape_texts = st.one_of(
    st.lists(st.integers(0, 4), max_size=2).map(str), st.integers(0, 5).map(lambda n: f"[{n}]"), values
)
parameter_texts = st.one_of(
    named(
        st.one_of(number_texts, string_texts, st.sampled_from(["true", "null", "[1]", "{}"])),
        st.sampled_from(['"a"', '"binary_data_size"', '"shared_memory_region"', r'"\u0061"']),
    ),
    values,
)


@st.composite
def tensors(draw: st.DrawFn) -> str:
    """An input, or nearly one: members in any order, some missing, some twice."""
    datatype = draw(DATATYPES)
    members = {
        "name": draw(st.sampled_from(['"x"', '"y"', '"x"', "5"])),
        "datatype": f'"{datatype}"',
        "shape": draw(shape_texts),
        "data": draw(data_texts),
        "parameters": draw(parameter_texts),
        "other": draw(values),
    }
    keys = draw(st.permutations(["name", "datatype", "shape", "data"]))
    keys += draw(st.lists(st.sampled_from([*members]), max_size=2))
    space = draw(spaces)
    return "{" + f",{space}".join(f'"{key}"{space}:{space}{members[key]}' for key in keys) + "}"


@st.composite
def fitting(draw: st.DrawFn) -> str:
    """An input whose data has as many leaves as its shape says, all of its datatype."""
    datatype = draw(st.sampled_from([*oracle.DTYPES, "BYTES"]))
    signed, unsigned = st.integers(-(2**63), 2**64).map(str), st.integers(0, 2**64 - 1).map(str)
    leaf = {"B": bools, "F": number_texts, "I": signed, "U": unsigned}
    one = string_texts if datatype == "BYTES" else leaf[datatype[0]]
    found = draw(st.lists(one, max_size=70))
    text = ",".join(found)
    return f'{{"name":"x","datatype":"{datatype}","shape":[{len(found)}],"data":[{text}]}}'


parts = st.one_of(tensors(), tensors(), fitting(), values)
bodies = st.lists(
    st.one_of(
        st.lists(parts, max_size=3).map(lambda found: f'"inputs":[{",".join(found)}]'),
        st.lists(parts, max_size=2).map(lambda found: f'"outputs":[{",".join(found)}]'),
        st.one_of(string_texts, values).map(lambda text: f'"id":{text}'),
        parameter_texts.map(lambda text: f'"parameters":{text}'),
        values.map(lambda text: f'"inputs":{text}'),
        values.map(lambda text: f'"strange": {text}'),
    ),
    max_size=4,
).map(lambda members: "{" + ", ".join(members) + "}")


@examples(400)
@given(broken(st.one_of(bodies, bodies, fitting().map(lambda one: f'{{"inputs":[{one}]}}'), values)))
def test_agrees_with_oracle(body: bytes) -> None:
    assert same(ours(body), theirs(body))


@examples(100)
@given(broken(bodies))
def test_stays_inside(body: bytes) -> None:
    with at_edge(body) as view:
        assert same(ours(view), ours(body))


FORMS = [
    '{"inputs":[{"name":"x","shape":%s,"datatype":"%s","data":%s}]}',
    '{"id":"a\\n\u00e9" ,"inputs":[{"name":"x","shape":%s,"datatype":"%s","data":%s}]}',
    ' { "inputs" : [ { "shape" : %s , "datatype" : "%s", "name" :"x", "data" : %s } ] } ',
    '{"inputs":[{"name":"x","shape":%s,"datatype":"%s","data":%s}],"id":"7"}',
    '{"inputs":[{"name":"x","shape":%s,"datatype":"%s","data":%s},{}]}',
    '{"inputs":[{"name":"z","shape":%s,"datatype":"%s","data":%s}]}',
]


@pytest.mark.parametrize("datatype", ["INT8", "INT16", "INT32", "UINT8", "UINT16", "UINT32"])
def test_integers_wrap(datatype: str) -> None:
    numbers = [0, 1, 127, 128, 255, 256, 32768, 65535, 65536, 2**31, 2**32, 2**32 + 5, 2**63 - 1] * 40
    numbers += [-1, -129, -(2**31) - 1, -(2**63)] if datatype.startswith("I") else [2**64 - 1]
    got = ours((FORMS[0] % ([len(numbers)], datatype, numbers)).encode())
    want = np.array([n % 2**64 for n in numbers], "u8").astype(KSERVE_DTYPE[datatype]).tobytes()
    assert got[2][0][4] == want


KSERVE_DTYPE = {kserve: dtype for dtype, kserve in KSERVE_NAME.items()}


NESTINGS = ["1,[2", "1,[2]]]", "1, f[2]", "1, -[2]", "1,1e[2]", "1,2[3]", "[1],]", "1,,2", "[,1]"]


@pytest.mark.parametrize("text", NESTINGS)
@pytest.mark.parametrize("datatype", ["INT32", "UINT8", "FP32", "BOOL", "BYTES"])
def test_broken_nesting(text: str, datatype: str) -> None:
    for body in (FORMS[0] % ("[2]", datatype, f"[{text}]"), FORMS[0] % ("[2]", datatype, f"[{text}")):
        assert same(ours(body.encode()), theirs(body.encode()))


def test_blobs_behind_the_json() -> None:
    body = b'{"inputs":[{"name":"x","datatype":"INT32","shape":[1],"parameters":{"binary_data_size":4}}]}'
    assert ours(body + b"\0\1\2\3")[2][0][3:] == ({"binary_data_size": 4}, None)
    assert "followed by other values. at 94" in ours(body + b"  \1\2\3")


def test_every_cut_is_refused() -> None:
    body = b'{"id":"a\\u00e9","inputs":[{"name":"x","shape":[2],"datatype":"FP32","data":[[1.5],-2e3]}]}'
    assert isinstance(ours(body), tuple)
    for length in range(len(body)):
        with at_edge(body[:length]) as view:
            assert ours(view).startswith("failed to parse the request JSON buffer: ")


@pytest.mark.parametrize(
    "head", [b"[", b'{"a":', b'{"inputs":', b'{"inputs":[{"datatype":"FP32","data":', b'{"id":']
)
def test_depth(head: bytes) -> None:
    for body in (head + b"[" * 500_000, head + b'{"a":' * 500_000, head + b"[" * 104):
        start = time.thread_time()
        assert "Nesting too deep." in ours(body)
        assert time.thread_time() - start < 0.1
    for levels, good in ((100, True), (101, False)):
        deep = FORMS[0] % ("[1]", "FP32", "[" * levels + "1" + "]" * levels)
        assert isinstance(ours(deep.encode()), tuple) == good


@pytest.mark.parametrize("part", ["{}", "1", '{"data":[]}'])
@pytest.mark.parametrize("member", ["inputs", "outputs"])
def test_many_inputs(member: str, part: str) -> None:
    start = time.thread_time()
    body = f'{{"inputs":[],"{member}":[' + f"{part}," * 1_000_000 + part + "]}"
    assert member == "inputs" or "Too many inputs or outputs." in ours(body.encode())
    assert "Too many inputs or outputs." in ours(body.replace('"inputs":[],', "").encode())
    assert time.thread_time() - start < 2


def test_faults_say_where() -> None:
    body = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[2],"data":[1,"a"]}]}'
    with pytest.raises(InferFault) as caught:
        read_infer(body)
    fault = caught.value
    assert (fault.code, fault.member, fault.input, fault.offset) == (InferCode.NOT_NUMBER, "data", "x", 63)
    assert not fault.is_callers


def test_bytes_are_packed_as_they_come() -> None:
    data = b'["\xff\xfe",["\\ud83d\\ude00"]]'
    body = b'{"inputs":[{"name":"\xff","datatype":"BYTES","shape":[9],"data":' + data + b"}]}"
    got = read_infer(body).inputs[0]
    face = "\N{GRINNING FACE}".encode()
    assert got.data == struct.pack("<I", 2) + b"\xff\xfe" + struct.pack("<I", 4) + face
    assert (got.leaves, got.data_present, got.name) == (2, True, "\udcff")


def test_memory_is_bounded() -> None:
    script = (
        "import resource; from fastserve._ext.infer_json import read_infer\n"
        'head = b\'{"inputs":[{"name":"x","datatype":"FP64","shape":[8000001],"data":[\'\n'
        "body = head + b'1,' * 8_000_000 + b'1]}]}'\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "got = read_infer(body)\n"
        "grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before\n"
        "assert grown * 1024 < 10 * len(body), grown"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
