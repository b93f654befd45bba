"""Sizes, shapes and lengths that are not so: each is refused by name, and the next request is answered."""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any

import pytest

from tests.faults.rig import CLOSED, Grpc, Http, ints, leaks, message, mixed, pair, tensor
from tests.running import Running

INFER = "/v2/models/sums/infer"
TYPES = "/v2/models/types/infer"
ROW = ints(*range(16))
MB = 1 << 20


def is_well(http: Http) -> None:
    """Ask on this connection, or on a new one where it was closed: it is answered as ever."""
    answer = http.post(INFER, pair())
    assert (answer.status, answer.json()["outputs"][0]["data"]) == (200, [1] * 16)


def blobs(*sizes: int) -> dict[str, Any]:
    return {"inputs": [tensor(f"INPUT{n}", [1, 16], binary_data_size=s) for n, s in enumerate(sizes)]}


@pytest.mark.parametrize(
    ("sizes", "sent", "words"),
    [
        ((64, 64), 127, "unexpected size for input 'INPUT1', expecting 1 additional bytes"),
        ((64, 64), 0, "unexpected size for input 'INPUT0', expecting 64 additional bytes"),
        ((64, 64), 129, "unexpected additional input data"),
        ((64, 2**64 - 1), 128, "expecting 18446744073709551551 additional bytes"),
        ((64, 2**63), 128, "additional bytes"),
        ((2**64 - 64, 64), 128, "additional bytes"),
        ((60, 68), 128, "input byte size mismatch for input"),
        ((0, 128), 128, "input byte size mismatch"),
        ((64, 2**64), 128, "non-unsigned-integer"),
        ((64, -1), 128, "non-unsigned-integer"),
        ((64, "64"), 128, "non-unsigned-integer"),
    ],
)
@pytest.mark.parametrize("model", ["sums", "simple"])
def test_binary_sizes(served: Running, http: Http, model: str, sizes: Any, sent: int, words: str) -> None:
    body, length = mixed(blobs(*sizes), bytes(sent))
    path = f"/v2/models/{model}/infer"
    answer = http.ask("POST", path, body, Inference_Header_Content_Length=str(length))
    assert answer.status in (400, 500)
    assert words in answer.error
    assert not leaks(served, answer)
    is_well(http)


@pytest.mark.parametrize(
    "length",
    ["-1", "-0", "99999", "18446744073709551616", "9" * 5000, "0x10", "1e2", "", "abc", "64,64", "\u0661"],
)
def test_header_lengths(served: Running, http: Http, length: str) -> None:
    body, _ = mixed(blobs(64, 64), ROW, ROW)
    answer = http.ask("POST", INFER, body, Inference_Header_Content_Length=length)
    assert answer.status in (400, 500)
    assert not leaks(served, answer)
    is_well(http)


def test_header_lengths_inside_the_json(http: Http) -> None:
    """Every place the JSON could be cut at, and some beyond it."""
    body, length = mixed(blobs(64, 64), ROW, ROW)
    for cut in (*range(1, length), *range(length + 1, len(body))):
        answer = http.ask("POST", INFER, body, Inference_Header_Content_Length=str(cut))
        assert answer.status in (400, 500), cut
    answer = http.ask("POST", INFER, body, Inference_Header_Content_Length=str(length))
    assert answer.status == 200


SHAPES = [
    [2**4, 2**60 + 2], [2**32, 2**32], [2**63, 2], [2**64 - 1], [-1, 16], [1, -16], [-(2**63), 1], [0, 16],
    [1.5, 16], ["1", 16], [True, 16], [], [1, 16, 1], [16], [2**64, 1], [[1, 16]], [1] * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: str(shape)[:24])
@pytest.mark.parametrize("model", ["sums", "simple", "types", "kinds"])
def test_shapes(served: Running, http: Http, model: str, shape: Any) -> None:
    """As JSON, and as bytes."""
    if model in ("types", "kinds") and shape == [16]:
        return  # what they take
    path = f"/v2/models/{model}/infer"
    first = "INPUT0" if model in ("sums", "simple") else "IN_INT32"
    rest = [tensor("INPUT1", [1, 16], [0] * 16)] if first == "INPUT0" else []
    answer = http.post(path, {"inputs": [tensor(first, shape, [0] * 16), *rest]})
    assert answer.status in (400, 500)
    assert not leaks(served, answer)
    body, length = mixed({"inputs": [tensor(first, shape, binary_data_size=64), *rest]}, ROW)
    answer = http.ask("POST", path, body, Inference_Header_Content_Length=str(length))
    assert answer.status in (400, 500)
    is_well(http)


@pytest.mark.parametrize("shape", [s for s in SHAPES if all(type(n) is int and abs(n) < 2**63 for n in s)])
@pytest.mark.parametrize("model", ["sums", "simple", "types"])
def test_shapes_over_grpc(served: Running, http: Http, grpc: Grpc, model: str, shape: list[int]) -> None:
    if model == "types" and shape == [16]:
        return
    first = "INPUT0" if model != "types" else "IN_INT32"
    rest = [("INPUT1", "INT32", [1, 16], ROW)] if model != "types" else []
    answer = grpc.infer(message(model, (first, "INT32", shape, ROW), *rest))
    assert answer.status in (3, 13), answer.error
    assert not leaks(served, answer)
    is_well(http)


@pytest.mark.parametrize(
    "packed",
    [
        struct.pack("<I", 2**32 - 1), struct.pack("<I", 2**32 - 1) + b"abc", struct.pack("<I", 2**31) * 2,
        b"\1\0\0", struct.pack("<I", 4) + b"abc", struct.pack("<I", 0) * 3, b"",
        struct.pack("<II", 0, 2**32 - 4),
    ],
    ids=lambda packed: packed.hex() or "empty",
)  # fmt: skip
@pytest.mark.parametrize("model", ["types", "kinds"])
def test_lengths_of_strings(served: Running, http: Http, grpc: Grpc, model: str, packed: bytes) -> None:
    given = {"inputs": [tensor("IN_BYTES", [2], datatype="BYTES", binary_data_size=len(packed))]}
    body, length = mixed(given, packed)
    path = f"/v2/models/{model}/infer"
    answer = http.ask("POST", path, body, Inference_Header_Content_Length=str(length))
    assert answer.status == 400
    assert not leaks(served, answer)
    assert grpc.infer(message(model, ("IN_BYTES", "BYTES", [2], packed))).status == 3
    is_well(http)


@pytest.mark.parametrize(
    ("datatype", "size"), [("FP16", 3), ("BF16", 5), ("BOOL", 0), ("FP64", 12), ("INT64", 17)]
)
def test_odd_sizes(http: Http, grpc: Grpc, datatype: str, size: int) -> None:
    given = tensor(f"IN_{datatype}", [2], datatype=datatype, binary_data_size=size)
    body, length = mixed({"inputs": [given]}, bytes(size))
    answer = http.ask("POST", TYPES, body, Inference_Header_Content_Length=str(length))
    assert (answer.status, "input byte size mismatch" in answer.error) == (400, True)
    assert grpc.infer(message("types", (f"IN_{datatype}", datatype, [2], bytes(size)))).status == 3


MANY = 100_000


@pytest.mark.parametrize("same", [True, False])
def test_very_many_tensors(served: Running, http: Http, grpc: Grpc, same: bool) -> None:
    """Inputs and outputs, with one name or with many."""
    names = ["INPUT0" if same else f"X{n}" for n in range(MANY)]
    for given in (
        {"inputs": [tensor(name, [1], [1]) for name in names]},
        pair(outputs=[{"name": name} for name in (["OUTPUT9"] * MANY if same else names)]),
    ):
        answer = http.post(INFER, given)
        assert answer.status in (400, 500)
        assert len(answer.body) < 1000
    made = message("sums")
    for name in names:
        made.inputs.add(name=name, datatype="INT32", shape=[1])
        made.raw_input_contents.append(b"\0\0\0\0")
    assert grpc.infer(made).status in (3, 13)
    is_well(http)


def test_the_same_output_many_times(http: Http) -> None:
    answer = http.post(INFER, pair(outputs=[{"name": "OUTPUT1"}] * 1000))
    assert [output["name"] for output in answer.json()["outputs"]] == ["OUTPUT1"]


def test_the_same_input_twice(http: Http, grpc: Grpc) -> None:
    one = tensor("INPUT0", [1, 16], [1] * 16)
    answer = http.post(INFER, pair(one, one))
    assert (answer.status, "input 'INPUT0' already exists in request" in answer.error) == (400, True)
    told = grpc.infer(message("sums", *[("INPUT0", "INT32", [1, 16], ROW)] * 2))
    assert (told.status, "already exists" in told.error) == (3, True)


# --- how a body comes ------------------------------------------------------------------------------


def chunked(pieces: list[bytes]) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def head(path: str, *lines: str) -> bytes:
    return "\r\n".join((f"POST {path} HTTP/1.1", "Host: t", *lines, "", "")).encode()


def test_a_body_in_single_bytes(http: Http) -> None:
    body, length = mixed(blobs(64, 64), ROW, ROW)
    sent = head(INFER, "Transfer-Encoding: chunked", f"Inference-Header-Content-Length: {length}")
    http.send(sent + chunked([body[n : n + 1] for n in range(len(body))]))
    assert http.read().status == 200


def test_more_chunks_than_allowed(served: Running, http: Http) -> None:
    before = served.rss_bytes
    http.send((head(INFER, "Transfer-Encoding: chunked"), chunked([b" "] * 70_000)))
    assert http.read().status in (400, 413, CLOSED)
    assert served.rss_bytes - before < 8 * MB
    is_well(http)


@pytest.mark.parametrize(
    "size", ["-1", "fffffffffffffffff", "8000000000000000", "1;" + "x" * 70_000, "g", ""]
)
def test_sizes_of_chunks(http: Http, size: str) -> None:
    http.send(head(INFER, "Transfer-Encoding: chunked") + f"{size}\r\nabc\r\n0\r\n\r\n".encode())
    assert http.read().status in (400, 413, 431, CLOSED)
    is_well(http)


def bomb(coding: str, size: int) -> bytes:
    """After a full flush the packer starts anew, so that one packed piece can be repeated."""
    packer = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS | (16 if coding == "gzip" else 0))
    first, again = (packer.compress(b" " * MB) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    return first + again * (size // MB - 1)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_bombs(served: Running, http: Http, coding: str) -> None:
    """Refused, and no memory kept."""
    packed = bomb(coding, 100 * MB)
    assert len(packed) < MB // 8
    http.ask("POST", INFER, packed, Content_Encoding=coding)
    before = served.rss_bytes
    for _ in range(5):
        answer = http.ask("POST", INFER, packed, Content_Encoding=coding)
        assert (answer.status, "limits.inflate_ratio" in answer.error) == (400, True)
    assert served.rss_bytes - before < 4 * MB
    is_well(http)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_broken_compression(served: Running, http: Http, coding: str) -> None:
    """Cut at every place, with a byte turned, with something after it, and not compressed at all."""
    body = json.dumps(pair()).encode()
    packer = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS | (16 if coding == "gzip" else 0))
    packed = packer.compress(body) + packer.flush()
    assert http.ask("POST", INFER, packed, Content_Encoding=coding).status == 200
    turned = bytearray(packed)
    turned[len(packed) // 2] ^= 0x55
    broken = [packed[:cut] for cut in range(1, len(packed), 3)] + [bytes(turned), body]
    for sent in broken:
        answer = http.ask("POST", INFER, sent, Content_Encoding=coding)
        assert answer.status in (400, 500), sent
        assert not leaks(served, answer)
    assert http.ask("POST", INFER, packed, Content_Encoding="br").status == 501
    is_well(http)
