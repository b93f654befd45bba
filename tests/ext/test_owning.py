"""Writers of tensors measure first and write then: another process that changes the memory in between, as a
broken worker may, gets neither past the end of a reply nor a reply that is none.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest

from fastserve._ext.infer_reply import write_items
from fastserve._ext.json_writer import RowWriter, write_classifications, write_predictions
from fastserve._ext.tensor_proto import write_predict_response
from fastserve.protos import load
from fastserve.tensor import DTYPES

COUNT = 4096
STRINGS = (b"\4\0\0\0" + b"aaaa") * COUNT
BYTES, INT64 = DTYPES["bytes"].code, DTYPES["int64"].code
CHANGES = """
import mmap, sys
memory = mmap.mmap(int(sys.argv[1]), 0)
forms = [bytes.fromhex(form) * int(sys.argv[2]) for form in sys.argv[3:]]
print("began", flush=True)
while True:
    for form in forms:
        memory[:] = form
"""


@contextmanager
def changing(*forms: bytes) -> Iterator[memoryview]:
    """Memory that another process gives these forms, one after the other, all the time."""
    fd = os.memfd_create("changing")
    os.truncate(fd, len(forms[0]))
    memory = mmap.mmap(fd, 0)
    memory[:] = forms[0]
    asked = [sys.executable, "-c", CHANGES, str(fd), str(COUNT), *(form[:8].hex() for form in forms)]
    with subprocess.Popen(asked, pass_fds=(fd,), stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            with memoryview(memory) as view:
                yield view
        finally:
            process.kill()
            os.close(fd)
    memory.close()


def in_predictions(memory: memoryview) -> Any:
    return json.loads(write_predictions([("y", BYTES, (COUNT,), memory)]))["predictions"]


def in_rows(writer: RowWriter, memory: memoryview) -> Any:
    return json.loads(writer.write(memory, COUNT))["predictions"]


def in_classes(memory: memoryview) -> Any:
    found = json.loads(write_classifications(1, COUNT, memory, None))["results"][0]
    return [label for label, _ in found]


def in_items(memory: memoryview) -> Any:
    return json.loads(b"[%b]" % write_items(BYTES, COUNT, memory))


def in_message(memory: memoryview) -> Any:
    data = write_predict_response([("y", BYTES, (COUNT,))], [memory], b"")
    made = load("tfserving").PredictResponse.FromString(data)
    return [text.decode() for text in made.outputs["y"].string_val]


@pytest.mark.parametrize(
    "write",
    [in_predictions, partial(in_rows, RowWriter("y", BYTES, ())), in_classes, in_items, in_message],
    ids=["predictions", "rows", "classes", "items", "message"],
)
def test_strings(write: Any) -> None:
    """Lengths that turn into letters are lengths beyond everything."""
    with changing(STRINGS, b"a" * len(STRINGS)) as memory:
        for _ in range(500):
            with suppress(ValueError):  # what was looked at is no string
                found = write(memory)
                assert len(b"".join(text.encode() for text in found)) <= len(STRINGS)


def test_varints() -> None:
    """The largest numbers take ten times the room of 0."""
    with changing(bytes(8 * COUNT), b"\xff" * 8 * COUNT) as memory:
        for _ in range(100):
            data = write_predict_response([("y", INT64, (COUNT,))], [memory], b"")
            made = load("tfserving").PredictResponse.FromString(data)
            assert len(made.outputs["y"].int64_val) == COUNT
