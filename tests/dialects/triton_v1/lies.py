"""Headers and bodies that lie, and what is answered to them (spec 3.4)."""

from __future__ import annotations

import struct

COUNT, ONES = struct.pack("<16i", *range(16)), struct.pack("<16i", *[1] * 16)
ONE = struct.pack("<i", 1)
PAIR = 'batch_size: 1 input { name: "INPUT0" } input { name: "INPUT1" } output { name: "OUTPUT0" }'
ECHO = 'batch_size: 1 input { name: "IN" } output { name: "OUT" }'

BOTH = [COUNT, ONES]
STRINGS = "the bytes of input 'IN' are not the strings its shape needs for model M"


def pair(more: str) -> str:
    return PAIR.replace('"INPUT0"', f'"INPUT0" {more}')


def one(more: str) -> str:
    return ECHO.replace('"IN"', f'"IN" {more}')


def shape(given: str) -> str:
    return f"unexpected shape for input 'INPUT0' for model M. Expected [16], got {given}"


# (model, header, inputs, what is answered, where M is the model's name in quotes)
LIES = [
    ("simple", PAIR.replace("batch_size: 1 ", ""), BOTH, "inference request batch-size must be >= 1 for M"),
    ("simple", "", [], "inference request batch-size must be >= 1 for M"),
    ("simple", PAIR.replace("1 ", "9 ", 1), [], "inference request batch-size must be <= 8 for M"),
    ("simple", PAIR.replace("1 ", "4294967295 ", 1), [], "inference request batch-size must be <= 8 for M"),
    ("simple", "batch_size: 1", [], "expected 2 inputs but got 0 inputs for model M"),
    ("simple", PAIR.replace("INPUT1", "INPUT0"), BOTH, "input 'INPUT0' already exists in request"),
    ("simple", PAIR + ' output { name: "OUTPUT0" }', BOTH, "output 'OUTPUT0' already requested"),
    ("simple", PAIR.replace("INPUT1", "who"), BOTH, "unexpected inference input 'who' for model M"),
    ("simple", PAIR.replace("OUTPUT0", "who"), BOTH, "unexpected inference output 'who' for model M"),
    ("simple", pair("dims: 15"), BOTH, shape("[15]")),
    ("simple", pair("dims: 4 dims: 4"), BOTH, shape("[4,4]")),
    ("simple", pair("dims: -16"), BOTH, shape("[-16]")),
    ("simple", pair(f"dims: {2**60} dims: {2**60}"), BOTH, shape(f"[{2**60},{2**60}]")),
    ("free", one("dims: -1"), [ONE], "unexpected shape for input 'IN' for model M. Expected [-1], got [-1]"),
    (
        "free",
        ECHO,
        [ONE],
        "model supports variable-size for input 'IN', request must specify input shape for model M",
    ),
    (
        "simple",
        pair(f"batch_byte_size: {2**64 - 1}"),
        BOTH,
        "specific batch-byte-size for input 'INPUT0' does not match expected byte-size calculated from "
        "shape and datatype for model M",
    ),
    ("text", one("dims: 2 batch_byte_size: 4"), [ONE], STRINGS),
    ("text", one(f"dims: {2**61} batch_byte_size: 4"), [bytes(4)], STRINGS),
    ("text", one("dims: 1 batch_byte_size: 4"), [b"\xff\xff\xff\xff"], STRINGS),
]
# Where HTTP counts a body and gRPC looks at each entry.
BODIES = [
    (
        "simple",
        PAIR,
        [COUNT, ONES[:60]],
        "unexpected size for input 'INPUT1', expecting 4 bytes for model M",
        "unexpected size 60 for input 'INPUT1', expecting 64 for model M",
    ),
    (
        "simple",
        PAIR,
        [],
        "unexpected size for input 'INPUT0', expecting 64 bytes for model M",
        "expected tensor data for at least 0 inputs but got only 0 sets of data for model M",
    ),
    (
        "simple",
        PAIR,
        [COUNT, ONES + b"x"],
        "unexpected additional input data for model M",
        "unexpected size 65 for input 'INPUT1', expecting 64 for model M",
    ),
    (
        "free",
        one(f"dims: {2**61}"),
        [ONE],
        f"unexpected size for input 'IN', expecting {2**63 - 4} bytes for model M",
        f"unexpected size 4 for input 'IN', expecting {2**63} for model M",
    ),
]
