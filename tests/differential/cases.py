"""Requests to both servers: models of many kinds, right and wrong requests. No server here."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

PACK = {"INT32": "i", "FP32": "f"}


@dataclass(frozen=True)
class Input:
    """One input, as both transports can say it."""

    name: str
    datatype: str
    shape: list[int]
    data: list[Any]

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "datatype": self.datatype, "shape": self.shape, "data": self.data}

    def as_bytes(self) -> bytes:
        if self.datatype == "BYTES":
            encoded = [text.encode() for text in self.data]
            return b"".join(struct.pack("<I", len(text)) + text for text in encoded)
        return struct.pack(f"<{len(self.data)}{PACK[self.datatype]}", *self.data)


@dataclass(frozen=True)
class Case:
    """One inference request. `outputs` are the wanted ones; `differs` says why the words of the two do."""

    name: str
    model: str
    inputs: tuple[Input, ...]
    outputs: tuple[str, ...] = ()
    id: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    differs: str = ""


def ints(*numbers: int, name: str = "IN", rows: int = 0) -> Input:
    shape = [rows, len(numbers) // rows] if rows else [len(numbers)]
    return Input(name, "INT32", shape, list(numbers))


def floats(*numbers: float, name: str = "IN", rows: int = 1) -> Input:
    return Input(name, "FP32", [rows, len(numbers) // rows], list(numbers))


def texts(*words: str, rows: int = 0) -> Input:
    return Input("IN", "BYTES", [rows, len(words) // rows] if rows else [len(words)], list(words))


def pair(rows: int) -> tuple[Input, Input]:
    numbers = [float(n) for n in range(4 * rows)]
    return floats(*numbers, name="INPUT0", rows=rows), floats(
        *[n / 2 for n in numbers], name="INPUT1", rows=rows
    )


OUR_WORDS = "the words are this server's"
FAILURES = ("fine", "deep", "chained", "own", "error", "cancelled", "invalid", "sender")
# A second answer of a model that is not decoupled is left out: it damages the heap of 2.51.
MISUSES = ("lines", "few", "words", "no_list", "complex")
CASES = (
    *(Case(f"add_sub of {rows} rows", "add_sub", pair(rows)) for rows in (1, 3, 8)),
    Case("too many rows", "add_sub", pair(9)),
    Case("one output", "add_sub", pair(1), outputs=("OUTPUT1",), id="an id"),
    Case("an output that is not there", "add_sub", pair(1), outputs=("OUTPUT7",)),
    Case("an input is missing", "add_sub", pair(1)[:1]),
    Case("texts", "texts", (texts("", "a", "grüße", "x" * 5000),)),
    Case("no texts", "texts", (Input("IN", "BYTES", [0], []),)),
    Case("a coroutine", "coroutine", (ints(1, 2, 3),)),
    Case("several files", "files", (ints(1, 2, 3),)),
    Case("an ensemble", "pipeline", (ints(1, 2, 3),)),
    Case("in place", "in_place", (floats(0, 51, 255),)),
    Case("logs", "logs", (texts("a line", "another\nline %s"),)),
    Case("a call", "calls", (ints(0, 4, 5),)),
    Case("a call to nobody", "calls", (ints(1, 4),)),
    Case("a call for an output that is not there", "calls", (ints(2, 4),)),
    Case("a call to a model that raises", "calls", (ints(3),)),
    Case("a call to a model that answers with an error", "calls", (ints(4),)),
    Case("a call to a decoupled model", "calls", (ints(5, 7, 8, 9),)),
    Case("completed by the model", "completes_little", (ints(5, 6, rows=2),)),
    Case(
        "completed by the model, optional input",
        "completes_little",
        (ints(5, rows=1), ints(2, name="MORE", rows=1)),
    ),
    Case("completed by the model, too many rows", "completes_little", (ints(1, 2, 3, 4, 5, rows=5),)),
    Case("metrics", "counts", (ints(3, 20),)),
    Case(
        "what a request says", "tells", (texts("x"),), id="the id", parameters={"a": 1, "b": "x", "c": True}
    ),
    Case("what a request says of outputs", "tells", (texts("x"),), outputs=("OUT",)),
    *(Case(f"fails: {word}", "fails", (texts(word, rows=1),)) for word in FAILURES),
    *(Case(f"fails: {word}", "fails", (texts(word, rows=1),), differs=OUR_WORDS) for word in MISUSES),
    *(
        Case(f"fails: {word}", "fails", (texts(word, rows=1),))
        for word in ("unknown_output", "wrong_type", "nothing")
    ),
    Case("decoupled without a stream", "repeat", (ints(1),)),
    Case("a model that did not load", "quits", (ints(1),)),
    Case("a model that is not there", "nowhere", (ints(1),)),
)
# What 2.51 does wrong, and this server right: an error among the parts of a call is not seen, a version that
# is not there ends the calling process, and a coroutine that walks through parts waits for ever.
OURS_ALONE = (
    (Case("a call to a decoupled model, with an error", "calls", (ints(5, 7, -1, 9),)), 500),
    (Case("a call to a version that is not there", "calls", (ints(6, 7),)), 500),
    (Case("a call in a coroutine", "asks_repeat", (ints(7, 8, 9),)), 200),
)
STREAMS = (
    Case("one response", "repeat", (ints(5),)),
    Case("three responses", "repeat", (ints(5, 6, 7),)),
    Case("no response", "repeat", (ints(),)),
    Case("an error among them", "repeat", (ints(5, -1, 7),)),
    Case("from a thread", "squares", (ints(4),)),
    Case("none from a thread", "squares", (ints(0),)),
    Case("raises", "squares", (ints(-1),)),
    Case("not decoupled", "coroutine", (ints(1, 2),)),
    Case("not decoupled, fails", "fails", (texts("deep", rows=1),)),
)
SHOWN = ("add_sub", "completes", "completes_little", "repeat", "pipeline", "sums", "counts", "fails")
