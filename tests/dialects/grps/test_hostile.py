"""Bytes nobody means well with: each gets an answer in grps's form, in bounded time and memory, and the next
request is served."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator

import pytest

from tests.dialects.grps import deployments
from tests.dialects.grps.rig import BYTES, GRPS, JSON, PREDICT, Deployed, deployed, settings_of

GOOD = GRPS.GrpsMessage(model="echo-1.0.0")
GOOD.gtensors.tensors.add(name="x", dtype="DT_FLOAT32", shape=[2], flat_float32=[1, 2])
GOOD.gtensors.tensors.add(name="y", dtype="DT_STRING", shape=[1], flat_string=["a"])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    with deployed(settings_of(deployments.write(tmp_path_factory.mktemp("hostile") / "d"))) as opened:
        yield opened


@pytest.fixture(autouse=True)
def alive(served: Deployed) -> Iterator[None]:
    yield
    assert served.predict({"str_data": "alive"}).json["str_data"] == "alive"
    assert served.call("Predict", str_data="alive").str_data == "alive"


def code_of(served: Deployed, data: bytes) -> int:
    return int(GRPS.GrpsMessage.FromString(served.send("Predict", data)).status.code)


def test_a_message_cut_at_every_byte(served: Deployed) -> None:
    data = GOOD.SerializeToString()
    codes = {code_of(served, data[:end]) for end in range(len(data) + 1)}
    assert codes <= {200, 400, 500}
    assert code_of(served, data) == 200


def test_messages_with_bytes_changed(served: Deployed) -> None:
    draw, data = random.Random(3), GOOD.SerializeToString()
    for _ in range(150):
        changed = bytearray(data)
        for _ in range(draw.randrange(1, 4)):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        assert code_of(served, bytes(changed)) in (200, 400, 500)


HOSTILE = {
    "length past the end": b"\x2a\xff\xff\xff\xff\x0f",
    "endless varint": b"\x08" + b"\xff" * 11,
    "ten million empty tensors": b"\x2a" + b"\x80\xda\xc4\x09" + b"\x0a\x00" * 10_000_000,
    "many tensors in small pieces": b"\x2a\x02\x0a\x00" * 5000,
    "many tensors in many pieces": (b"\x2a\xd0\x0f" + b"\x0a\x00" * 1000) * 1000,
    "packed floats that end in the middle": b"\x2a\x07\x0a\x05\x52\x03abc",
    "packed varints that end in the middle": b"\x2a\x05\x0a\x03\x3a\x01\xff",
    "a group": b"\x0b\x0c",
    "text that is no UTF-8": b"\x22\x02\xff\xfe",
    "many unknown fields": b"\x9a\x06\x00" * 5000,
}


@pytest.mark.parametrize("case", HOSTILE)
def test_messages_that_are_none(served: Deployed, case: str) -> None:
    began = time.monotonic()
    data = HOSTILE[case]
    assert code_of(served, data) == 400
    assert GRPS.GrpsMessage.FromString(served.send("Predict", data)).status.status == GRPS.Status.FAILURE
    assert time.monotonic() - began < 60


def test_a_oneof_nobody_knows(served: Deployed) -> None:
    """To an old server a new kind of data is no data; the echo has nothing to give back."""
    assert code_of(served, b"\x9a\x06\x01a") == 200
    assert (
        code_of(served, b"\x22\x01a\x1a\x01b") == 200
    )  # two of the oneof: the last one counts, as in protobuf


BODIES = {
    "depth": b'{"ndarray":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "depth of gmap": b'{"gmap":' + b'{"s_s":' * 200 + b"1" + b"}" * 201,
    "cut": b'{"gtensors":{"tensors":[{"flat_float32":[1,2',
    "array cut": b'{"gtensors":{"tensors":[{"flat_float32":[1,2',
    "commas": b'{"gtensors":{"tensors":[{"dtype":7,"shape":[2],"flat_float32":[1,,2]}]}}',
    "brackets": b'{"gtensors":{"tensors":[{"dtype":7,"shape":[2],"flat_float32":[1,2}]}]}}',
    "nul": b'\x00{"str_data":"a"}',
    "not UTF-8": b'{"str_data":"\xff\xfe"}',
    "half a surrogate": b'{"str_data":"\\ud800"}',
    "numbers only": b"[1,2,3]",
    "text only": b'"str_data"',
    "two members": b'{"str_data":"a","gmap":{}}',
    "base64 length": b'{"gmap":{"s_b":{"b":"aGVsb"}}}',
    "base64 letter": b'{"gmap":{"s_b":{"b":"aGV*bG8="}}}',
    "base64 padding": b'{"gmap":{"s_b":{"b":"aGVsbG8=="}}}',
    "base64 number": b'{"gmap":{"s_b":{"b":5}}}',
    "gmap of lists": b'{"gmap":{"s_s":["a"]}}',
    "int32 beyond": b'{"gmap":{"s_i32":{"a":2147483648}}}',
    "ragged": b'{"ndarray":[[1,2],[3,[4]]]}',
    "ndarray of text": b'{"ndarray":["1"]}',
    "ndarray of objects": b'{"ndarray":{"a":1}}',
    "model of numbers": b'{"model":5,"str_data":"a"}',
    "tensors of text": b'{"gtensors":{"tensors":"x"}}',
    "shape of text": b'{"gtensors":{"tensors":[{"shape":"2"}]}}',
    "many values": b'{"gtensors":{"tensors":[{"dtype":9,"flat_string":[' + b'"",' * 600_000 + b'""]}]}}',
    "half an array": b'{"str_data":"a"',
}


@pytest.mark.parametrize("case", BODIES)
def test_bodies_that_are_none(served: Deployed, case: str) -> None:
    for query in ("", "?return-ndarray=true"):
        reply = served.predict(BODIES[case], query)
        assert (reply.status, reply.code, reply.json["status"]["status"]) == (400, 400, "FAILURE"), reply
        assert "Traceback" not in reply.message
        assert len(reply.message) < 1000
    assert (
        json.loads(served.ask("POST", PREDICT + "?streaming=true", BODIES[case], JSON).body)["status"]["code"]
        == 400
    )


def test_bodies_of_noise(served: Deployed) -> None:
    draw = random.Random(5)
    text = b'{"gtensors":{"tensors":[{"name":"x","dtype":"DT_FLOAT32","shape":[2],"flat_float32":[1.5,2]}]}}'
    for _ in range(200):
        changed = bytearray(text)
        for _ in range(draw.randrange(1, 4)):
            changed[draw.randrange(len(changed))] = draw.choice(b'[]{},:"\\0a-eE. ')
        reply = served.predict(bytes(changed))
        assert reply.status in (200, 400), (bytes(changed), reply)


def test_odd_heads(served: Deployed) -> None:
    def post(headers: dict[str, str], body: bytes = b'{"str_data":"a"}') -> int:
        return served.ask("POST", PREDICT, body, headers).status

    assert post({"Content-Type": "APPLICATION/JSON; charset=latin-1"}) == 200
    assert post({"Content-Type": "application/json", "Content-Encoding": "gzip"}) == 400
    assert post({"Content-Type": "application/json", "Content-Encoding": "identity"}) == 200
    assert post({"Content-Type": "application/jsonp"}) == 400
    assert post(JSON, b"") == post(BYTES, b"") == 400
    for query in (
        "?model=%00",
        "?model=..%2F..%2Fetc",
        "?model=%ff",
        "?" + "model=&" * 1000 + "model=x",
        "?;;&&==",
    ):
        assert served.predict({"str_data": "a"}, query).status in (200, 500)
    assert served.predict({"str_data": "tag"}, "?model=echo-2.0.0&model=echo-1.0.0").json["str_data"] == "B"


def test_pages_of_other_sites_cannot_switch_it(served: Deployed) -> None:
    for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        reply = served.ask("GET", "/grps/v1/health/online", headers=headers)
        assert (reply.status, reply.json["status"]["status"]) == (403, "FAILURE")


def bounded(number: int, data: bytes) -> bytes:
    """A field of bytes."""
    size, length = len(data), b""
    while size > 127:
        length, size = length + bytes([size & 127 | 128]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + data


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (bounded(5, bounded(1, b"\x62\x00" * 270_000)), "tensor: more than 65536 fields"),
        (bounded(5, bounded(1, b"\x38\x01" * 270_000)), "tensor: more than 65536 fields"),
        (bounded(5, bounded(1, bounded(3, b"\x01" * 5000))), "shape: 5000 bytes"),
        (bounded(5, bounded(1, b"") * 1025), "gtensors: more than 1024 fields"),
        (bounded(7, b"\x1a\x00" * 20_000), "gmap: more than 16384 fields"),
        (bounded(7, bounded(5, b"\x15abcd" * 2000)), "entry: more than 1024 fields"),
        (bounded(1, b"\x12\x00" * 2000), "message: more than 1024 fields"),
        (bounded(5, bounded(1, bounded(3, b"\x01" * 4000) * 2)), "shape: 8000 bytes"),
        (bounded(7, bounded(5, b"\x15abcd" * 1000) * 100), "entry: more than 65536 fields"),
        (bounded(1, b"\x12\x00" * 1000) * 100, "message: more than 65536 fields"),
    ],
    ids=[
        "strings",
        "numbers not packed",
        "axes",
        "tensors",
        "entries",
        "fields of an entry",
        "status",
        "axes in pieces",
        "fields of many entries",
        "many statuses",
    ],
)
def test_messages_of_many_small_fields(served: Deployed, data: bytes, what: str) -> None:
    """The parser makes objects of all of them in one go, and nobody is served meanwhile."""
    status = GRPS.GrpsMessage.FromString(served.send("Predict", data)).status
    assert status.code == 400
    assert what in status.msg


def test_a_message_of_many_strings(served: Deployed) -> None:
    made = GRPS.GrpsMessage(model="echo-1.0.0")
    made.gtensors.tensors.add(name="y", dtype="DT_STRING", shape=[60_000], flat_string=["a"] * 60_000)
    answer = GRPS.GrpsMessage.FromString(served.send("Predict", made.SerializeToString()))
    assert answer.status.code == 200, answer.status.msg
