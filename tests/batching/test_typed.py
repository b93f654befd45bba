"""Classes that no file holds: of `python -c`, of a prompt, of a notebook. Real interpreters, real workers."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

CLASSES = """
import asyncio, math
import numpy as np
from functools import lru_cache
from fastserve import BatchedService, VectorTransformer

FACTOR = {"by": 3}


@lru_cache
def scaled(v):
    return float(np.float64(math.sqrt(v))) * FACTOR["by"]


class Base(VectorTransformer):
    def preprocess(self, x):
        return x


class Roots(Base):
    def __init__(self, add=0):
        self.add = add

    def transform(self, x):
        return [scaled(v) + self.add for v in x]


service = BatchedService(8, 0.01)
"""
USE = """
service.start(Roots, {"add": 1})
print(asyncio.run(service.do_many([1, 4])), asyncio.run(service.do_one(9)))
service.stop()
"""
ANSWER = "[4.0, 7.0] 10.0"


def python(*words, stdin=None):
    return subprocess.run(
        [sys.executable, *words], input=stdin, capture_output=True, text=True, timeout=120, check=False
    )


def test_classes_of_a_command_line_reach_the_worker():
    done = python("-c", CLASSES + USE)
    assert done.stdout.strip() == ANSWER, done.stderr


@pytest.mark.parametrize(
    ("before", "instead", "words"),
    [
        ("service = ", "lock = __import__('threading').Lock()\nservice = ", "Roots uses lock, a lock"),
        ("service = ", f"lock = {'x' * 40000!r}\nservice = ", "at most 32768 travel"),
    ],
)
def test_classes_of_a_command_line_that_cannot_travel_say_why(before, instead, words):
    text = (CLASSES + USE).replace(before, instead).replace("+ self.add for", "+ bool(lock) for")
    done = python("-c", text)
    assert words in done.stderr
    assert done.stderr.strip().endswith("put the class in a file and import it from there")
    assert done.stdout == ""


def test_classes_typed_into_a_prompt_travel_or_are_told_to_be_put_in_a_file():
    """Before Python 3.13 a prompt keeps no source."""
    done = python("-i", "-q", stdin=CLASSES.replace("\n    def", "\n    def") + USE)
    told = "TypeError: Roots was typed into a prompt that keeps no source, so that no worker can get it; "
    assert ANSWER in done.stdout or told + "put the class in a file" in done.stderr, done.stderr
    piped = python("-", stdin=CLASSES + USE)
    assert told + "put the class in a file" in piped.stderr


def test_classes_typed_after_a_script_are_not_looked_for_in_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("from fastserve import BatchedService, VectorTransformer\n")
    typed = (
        "class A(VectorTransformer):\n    def transform(self, x): return x\n\nBatchedService(1).start(A)\n"
    )
    done = python("-i", str(script), stdin=typed)
    assert "Done" in done.stdout or "A was typed into a prompt that keeps no source" in done.stderr


NOTEBOOK = """
import ast, asyncio, json, linecache, sys, types

async def cells(texts):
    for number, text in enumerate(texts):
        name = f"/tmp/ipykernel_1/{number}.py"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        code = compile(text, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        found = types.FunctionType(code, vars(sys.modules["__main__"]))()
        if found is not None:
            await found

asyncio.run(cells(json.loads(sys.argv[1])))
"""


def test_classes_of_a_notebook_reach_the_worker():
    """Cells as IPython runs them: one source each, in `__main__`, within a loop that runs."""
    parts = CLASSES.split("\n\n\n")
    use = """
        service.start(Roots)
        print(await service.do_many([1, 4]))
        await service.stop()
    """
    again = """
        class Roots(Base):
            def transform(self, x):
                return [Plain(Pair(v, scaled(v)).second).value for v in x]
    """
    pair = """
        from typing import NamedTuple
        class Pair(NamedTuple):
            first: int
            second: float

        from dataclasses import dataclass
        @dataclass
        class Plain:
            value: float
    """
    texts = [*parts, use, *(textwrap.dedent(one) for one in (pair, again)), use]
    done = python("-c", NOTEBOOK, json.dumps([textwrap.dedent(text) for text in texts]))
    assert done.stdout.split("\n")[:2] == ["[3.0, 6.0]", "[3.0, 6.0]"], done.stderr
