"""Every library's model, served: 10,000 rows over each API are what the library answers, to the last bit."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fastserve import Client
from tests.backends.tabular.trained import TRAINED, Trained, save
from tests.running import Running

pytestmark = pytest.mark.lingers  # grpcio keeps its poller's thread and pipe
ROWS = 10_000
V2 = {"f4": "FP32", "f8": "FP64", "i8": "INT64"}


@pytest.fixture(scope="module", params=TRAINED)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Running, str, Trained]]:
    root = tmp_path_factory.mktemp("tabular")
    trained = save(root / "models", request.param, ROWS)
    with Running(root / "models", root / "log") as server:
        yield server, request.param, trained


def post(server: Running, path: str, body: object) -> Any:
    request = urllib.request.Request(f"http://{server.http}{path}", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply)


def plain(array: Any) -> Any:
    """Return an array as JSON has it."""
    return [value.decode() for value in array] if array.dtype == object else array.tolist()


def check(found: Any, wanted: Any) -> None:
    """Equal to the last bit; texts are bytes or str, as the API has them."""
    if wanted.dtype == object:
        assert [
            v if isinstance(v, bytes) else v.encode() for v in np.asarray(found, object)
        ] == wanted.tolist()
    else:
        np.testing.assert_array_equal(np.asarray(found, wanted.dtype), wanted)


def test_predict_over_rest(served: tuple[Running, str, Trained]) -> None:
    server, name, trained = served
    inputs = {column: plain(array) for column, array in trained.inputs.items()}
    found = post(
        server, f"/v1/models/{name}:predict", {"inputs": inputs if len(inputs) > 1 else inputs["input"]}
    )
    outputs = found["outputs"]
    if len(trained.outputs) == 1:
        outputs = {next(iter(trained.outputs)): outputs}
    assert set(outputs) == set(trained.outputs)
    for output, wanted in trained.outputs.items():
        check(outputs[output], wanted)


def test_v2_as_json(served: tuple[Running, str, Trained]) -> None:
    server, name, trained = served
    tensors = [
        {
            "name": column,
            "shape": list(array.shape),
            "datatype": "BYTES" if array.dtype == object else V2[array.dtype.str[1:]],
            "data": plain(array),
        }
        for column, array in trained.inputs.items()
    ]
    found = post(server, f"/v2/models/{name}/infer", {"inputs": tensors})
    for output in found["outputs"]:
        wanted = trained.outputs[output["name"]]
        check(np.asarray(output["data"]).reshape(output["shape"]), wanted)
    assert {output["name"] for output in found["outputs"]} == set(trained.outputs)


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_v2_raw(served: tuple[Running, str, Trained], transport: str) -> None:
    server, name, trained = served
    with Client(f"{transport}://{getattr(server, transport)}") as client:
        found = getattr(client, name)(**trained.inputs)
        if len(trained.outputs) == 1:
            found = {next(iter(trained.outputs)): found}
        for output, wanted in trained.outputs.items():
            check(found[output], wanted)


def test_one_row_at_a_time(served: tuple[Running, str, Trained]) -> None:
    """Rows of different callers are one batch, and each gets its own."""
    server, name, trained = served
    with Client(f"http://{server.http}") as client:
        for row in range(20):
            one = {column: array[row : row + 1] for column, array in trained.inputs.items()}
            found = getattr(client, name)(**one)
            first, wanted = next(iter(trained.outputs.items()))
            check(found[first] if isinstance(found, dict) else found, wanted[row : row + 1])
