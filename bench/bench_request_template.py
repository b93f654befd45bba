"""V2 requests that are as one before, against reading them anew: a small one of two inputs, and an image."""

import json

import numpy as np
import pytest

from fastserve._ext.infer_json import read_infer
from fastserve._ext.request_template import RequestTemplate, RequestTemplates, find_placeholders

SIZES = {"small": 16, "image": 150_528}


def body_of(items: int) -> bytes:
    data = np.random.default_rng(0).random(items, np.float32).tolist()
    one = {"shape": [1, items], "datatype": "FP32", "data": data}
    return json.dumps({"id": "7", "inputs": [{"name": "a", **one}, {"name": "b", **one}]}).encode()


def hot(body: bytes, templates: RequestTemplates, outs: list[np.ndarray]) -> None:
    template = templates.find(body, len(body))
    assert template is not None
    assert template.read_into(body, len(body), outs)


def anew(body: bytes, templates: RequestTemplates, outs: list[np.ndarray]) -> None:
    for out, given in zip(outs, read_infer(body).inputs, strict=True):
        out[:] = np.frombuffer(given.data, np.float32)


@pytest.mark.parametrize("read", [hot, anew])
@pytest.mark.parametrize("name", SIZES)
def test_read(benchmark, name: str, read) -> None:  # type: ignore[no-untyped-def]
    body, items, templates = body_of(SIZES[name]), SIZES[name], RequestTemplates(1)
    units = {"id": 0, "rows": 1, "data": items}
    placeholders = [
        (kind, start, end, units[kind], max(i, 0), 12) for kind, start, end, i in find_placeholders(body)
    ]
    templates.add(RequestTemplate(body, placeholders, [], [4 * items] * 2, 0))
    outs = [np.zeros(items, np.float32) for _ in range(2)]
    benchmark.group = f"v2 two inputs, {name}"
    benchmark(read, body, templates, outs)
    np.testing.assert_array_equal(outs[1], np.array(json.loads(body)["inputs"][1]["data"], np.float32))
