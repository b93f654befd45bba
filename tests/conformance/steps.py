"""The steps of a request's life, each of which can be made to fail.

    reserve    a place in the queue            read       views of the outputs
    fill       the inputs written into it      write      the reply made of them
    hold       client memory for outputs       release    the place given back
    submit     let it run

`installed` wraps each step's functions once, before any server knows them; `failing` says what they raise.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from fastserve.app import json_api
from fastserve.dialects.grps import predict as grps_predict
from fastserve.dialects.grps import rpcs as grps_rpcs
from fastserve.dialects.kserve import grpc_infer, http_infer
from fastserve.dialects.tfserving import grpc_predict, predict
from fastserve.dialects.triton_v1 import rpcs  # noqa: F401 -- its prepared requests are wrapped too
from fastserve.dialects.triton_v1.service import AnswerWriter
from fastserve.engine import arena_io
from fastserve.engine.batch_queue import BatchQueue
from fastserve.errors import Kind, ServeError
from fastserve.serving.prepared_requests import PreparedRequest

INSIDE = "a secret of the server's"
LIMIT = ServeError(Kind.RESOURCE_EXHAUSTED, "a limit of the test's")
FAULTS: dict[str, Callable[[], Exception]] = {
    "ServeError": lambda: ServeError(Kind.RESOURCE_EXHAUSTED, "a limit of the test's"),
    "OSError": lambda: OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
    "MemoryError": lambda: MemoryError(INSIDE),
    "RuntimeError": lambda: RuntimeError(INSIDE),
}
# Step -> what is wrapped. Of `release` the work is done first: rows that nobody gave back are outstanding.
STEPS: dict[str, list[tuple[Any, str]]] = {
    "reserve": [
        (arena_io.ColumnInputs, "reserve"),
        (arena_io.SlabInputs, "reserve"),
        (BatchQueue, "reserve"),
    ],
    "fill": [(arena_io.ArenaIO, "write_inputs")],
    "hold": [(os, "dup")],
    "take": [(os, "preadv"), (os, "pread")],
    "submit": [(BatchQueue, "submit")],
    "read": [(arena_io.ColumnOutputs, "read"), (arena_io.SlabOutputs, "read"), (arena_io.ArenaIO, "read")],
    "put": [(os, "pwrite")],
    "write": [
        (predict, "write_predict"),
        (json_api, "write_arrays"),
        (grpc_predict, "write_outputs"),
        (http_infer, "write_answer"),
        (grpc_infer, "write_message"),
        (AnswerWriter, "write"),
        (grps_predict, "read_answer"),
        (grps_rpcs, "read_answer"),
    ],
    "release": [(BatchQueue, "release")],
}
# The same on the fast path, in every dialect.
PREPARED = {"fill": {"fill"}, "write": {"write", "write_response"}}
OUTSIDE = ("hold", "take", "put")  # only of requests with client memory


@dataclass
class Armed:
    """The behaviour of a step at its next calls."""

    act: Callable[[], None] | None = None
    left: int = 0
    hits: int = 0

    def hit(self) -> None:
        if self.act is not None and self.left > 0:
            self.left -= 1
            self.hits += 1
            self.act()


ARMED = {step: Armed() for step in STEPS}


@contextlib.contextmanager
def at(step: str, act: Callable[[], None], times: int = 1 << 30) -> Iterator[Armed]:
    """Do `act` whenever the step is come to, before it; after it for a release."""
    armed = ARMED[step] = Armed(act, times)
    try:
        yield armed
    finally:
        ARMED[step] = Armed()


@contextlib.contextmanager
def failing(step: str, fault: str, times: int = 1 << 30) -> Iterator[Armed]:
    """The step raises."""

    def fail() -> None:
        raise FAULTS[fault]()

    with at(step, fail, times) as armed:
        yield armed


@contextlib.contextmanager
def installed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for step, places in STEPS.items():
            for owner, name in places:
                patch.setattr(owner, name, _wrap(step, getattr(owner, name)))
        for prepared in _all_below(PreparedRequest):
            for step, names in PREPARED.items():
                for name in names & _own(prepared):
                    patch.setattr(prepared, name, _wrap(step, getattr(prepared, name)))
        yield


def _all_below(kind: type) -> Iterator[type]:
    for below in kind.__subclasses__():
        yield below
        yield from _all_below(below)


def _own(kind: type) -> set[str]:
    """Names no other kind of prepared request gives it: written in it, or in a compiled base of its own."""
    bases = [base for base in kind.__bases__ if not issubclass(base, PreparedRequest)]
    return {name for each in (kind, *bases) for name in vars(each)}


def _wrap(step: str, real: Any) -> Any:
    async def awaited(*args: Any, **options: Any) -> Any:
        ARMED[step].hit()
        return await real(*args, **options)

    def before(*args: Any, **options: Any) -> Any:
        ARMED[step].hit()
        return real(*args, **options)

    def after(*args: Any, **options: Any) -> Any:
        found = real(*args, **options)
        ARMED[step].hit()
        return found

    return awaited if inspect.iscoroutinefunction(real) else after if step == "release" else before
