"""Inputs that are nearly right: kept ones, changed a little by the rules of their kind.

    for data in mutations(read_corpus("json"), random.Random(1), 1000): ...

Plain and seeded: the compiled modules have no coverage counters that a guided fuzzer could follow. Structure
comes from the corpora, which are written by hand for every branch of a parser, and from pieces of each kind
that are put in. Inputs whose outcome nobody had seen are kept (`python -m tests.fuzz.parsers SECONDS`).
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

CORPORA = Path(__file__).parent / "corpora"
MOST_BYTES = 65_536  # of a mutated input
GROWN = 64  # of so many inputs one is made large
FRAME = b"|frame|"
"""Between the frames of a message, in inputs that have several."""

PIECES: dict[str, tuple[bytes, ...]] = {
    "json": (
        b"[", b"]", b"{", b"}", b'"', b":", b",", b"\\", b"\\u00e9", b"\\ud800", b"\\", b"null", b"true",
        b"NaN", b"-Infinity", b"-", b"0", b"1e400", b"1e-400", b"0.1", b"18446744073709551616", b'""',
        b"[]", b"{}", b"[[[[[[[[", b"\xff", b"\x00", b"\xed\xa0\x80", b"\xf0\x9f\x98\x80", b" ", b"\n",
        b'"shape"', b'"data"', b'"b64"', b'"datatype"', b'"parameters"', b'"binary_data_size"',
        b'"name":"x",', b'"inputs":[', b'"instances":', b'"stop":',
    ),
    "proto": (
        b"\x00", b"\x7f", b"\x80", b"\xff", b"\xff\xff\xff\xff\x0f",
        b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f", b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x80\x80\x80\x80\x80\x80\x80\x80\x80\x02", b"\n\x00", b"\x12\x02\n\x00", b"*\x00", b":\x00",
        b"\x0b", b"\x0c", b"\x13\x14", b"\x08\x01", b"\r\x00\x00\x00\x00",
        b"\t\x00\x00\x00\x00\x00\x00\x00\x00", b'"\x04\x00\x00\x80\x7f', b"\x80\x80\x80\x80\x10",
    ),
    "frames": (
        b"\x00\x00\x00", b"\x00@\x00", b"\xff\xff\xff", b"\x00", b"\x01", b"\x03", b"\x04", b"\x05",
        b"\x08", b"\t", b"%", b"\x00\x00\x00\x01", b"\x7f\xff\xff\xff", b"\x80\x00\x00\x00", b"\x82",
        b"\x86", b"\xbe", b"\xff\x80\x80\x80\x80\x10", b"?\xe1\xff\x03", b"@\x01a\x01b", b"\x10\x81\xff",
        b" ",
    ),
    "remote": (
        FRAME, b"FSRW\x03\x00", b"FSRW\x02\x00", b"\t\x00", b"\n\x00", b"\x01\x00\x00\x00",
        b"\xff\xff\xff\xff", b"\x01\x00\x00\x00\x00\x00\x00\x00", b"\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x00\x00\x01\x00", bytes(8), b"{", b"}", b"[", b'"', b"null", b'"name":', b'"key":',
        b"-1", b"1e400",
    ),
    "text": (
        b"\xc3\xa9", b"\xf0\x9f\x98\x80", b"\xff", b"stop", b"\n", b"</s>", b"st", b"op", b"\x00",
    ),
}  # fmt: skip


def read_corpus(kind: str) -> list[bytes]:
    """The kept inputs of a kind: a bytes literal a line."""
    lines = (CORPORA / f"{kind}.txt").read_text().splitlines()
    return [ast.literal_eval(line) for line in lines if line and not line.startswith("#")]


def keep(kind: str, inputs: Iterable[bytes]) -> None:
    with (CORPORA / f"{kind}.txt").open("a") as file:
        file.writelines(f"{data!r}\n" for data in inputs)


def mutations(corpus: list[bytes], pieces: str, rng: random.Random, count: int) -> Iterator[bytes]:
    for number in range(count):
        data = bytearray(rng.choice(corpus))
        for _ in range(rng.choice((1, 1, 2, 3, 6))):
            _change(data, corpus, PIECES[pieces], rng)
        if number % GROWN == 0:
            _grow(data, rng)
        yield bytes(data[:MOST_BYTES])


def _change(data: bytearray, corpus: list[bytes], pieces: tuple[bytes, ...], rng: random.Random) -> None:
    at = rng.randrange(len(data) + 1)
    end = min(len(data), at + rng.choice((0, 1, 1, 2, 4, 9, 40)))
    match rng.randrange(8):
        case 0 if at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        case 1:
            del data[at:end]
        case 2:
            data[at:at] = data[at:end] * rng.choice((1, 2, 17))
        case 3:
            other = rng.choice(corpus)
            first = rng.randrange(len(other) + 1)
            data[at:end] = other[first : first + rng.randrange(60)]
        case 4:
            del data[at:]
        case 5 if at < len(data):
            data[at] = rng.randrange(256)
        case _:
            data[at:end] = rng.choice(pieces)


def _grow(data: bytearray, rng: random.Random) -> None:
    """One place of it many times over: what is slow or greedy by length shows."""
    at = rng.randrange(len(data) + 1)
    piece = data[at : at + rng.choice((1, 2, 3, 5, 12))] or b"["
    data[at:at] = piece * (rng.choice((4096, MOST_BYTES)) // len(piece))
