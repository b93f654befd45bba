"""Transformers for the library's tests. A module of its own: workers import them by name."""

from __future__ import annotations

import math
import os
import signal
import time

import numpy as np

from fastserve import VectorTransformer


class Sleepy(VectorTransformer):
    """The model of the text: batches are cheap."""

    def transform(self, x):
        time.sleep(0.001 * math.log(len(x) + 1))
        return [v * v for v in x]


class Echo(VectorTransformer):
    """Each element with the size of its batch and the process that ran it."""

    def transform(self, x):
        return [(v, len(x), os.getpid()) for v in x]


class Steps(VectorTransformer):
    """Shows that all three steps run, with constructor arguments."""

    def __init__(self, factor, offset=0):
        self.factor, self.offset = factor, offset

    def preprocess(self, x):
        return [v + self.offset for v in x]

    def transform(self, x):
        return [v * self.factor for v in x]

    def postprocess(self, pre, trans):
        return list(zip(pre, trans, strict=True))


class Picky(VectorTransformer):
    """Raises, dies, answers an error, answers what cannot travel or the wrong number of results."""

    def transform(self, x):
        if "raise" in x:
            raise ValueError("no such luck")
        if "die" in x:
            os.kill(os.getpid(), signal.SIGKILL)
        if "short" in x:
            return x[:-1]
        return [ValueError("bad element") if v == "bad" else object() if v == "stuck" else v for v in x]


class Doomed(VectorTransformer):
    """Dies when asked to, and does not start again while its file is there."""

    def __init__(self, path):
        self.path = path
        if os.path.exists(path):
            raise ValueError("the disk is on fire")

    def transform(self, x):
        if "die" in x:
            with open(self.path, "w"):
                os.kill(os.getpid(), signal.SIGKILL)
        return x


class Rows(VectorTransformer):
    """Sees one array; answers its sums as rows."""

    def transform(self, x):
        assert isinstance(x, np.ndarray)
        assert not x.flags.writeable
        return x.sum(axis=1, keepdims=True, dtype=np.float32)


class RowObjects(VectorTransformer):
    """Rows in, plain objects out."""

    def transform(self, x):
        return [{"sum": float(row.sum())} for row in x]


class Whole(VectorTransformer):
    """For services with hooks: gets whatever preprocess made."""

    def transform(self, x):
        return {"n": len(x["items"]), "items": [v * 2 for v in x["items"]]}


class Broken(VectorTransformer):
    """Never comes up."""

    def __init__(self):
        raise RuntimeError("no weights here")

    def transform(self, x):
        return x


class Gate(VectorTransformer):
    """Waits for a byte on a pipe before each batch, so that a test decides when it runs."""

    def __init__(self, path):
        self.pipe = open(path, "rb", buffering=0)  # noqa: SIM115

    def transform(self, x):
        self.pipe.read(1)
        return [(v, len(x)) for v in x]
