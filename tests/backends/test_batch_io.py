"""Ragged inputs, batch inputs and batch outputs: the arithmetic, an ONNX model, and a whole server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto

from fastserve.backends import create
from fastserve.backends.batch_io import BatchIO
from fastserve.engine.counters import counts_of
from fastserve.errors import ConfigError, ServeError
from fastserve.repository.model_config import config_json
from fastserve.repository.triton_config.reading import parse_triton_text, to_model_config
from fastserve.request import InferRequest
from fastserve.settings.model_options import MadeInput, Options, Scatter
from fastserve.tensor import DTYPES, Tensor
from tests.backends.frameworks.test_onnx_triton import load
from tests.backends.models import FLOAT, helper, save, value
from tests.server.rig import run, serving

KINDS = (
    "BATCH_ELEMENT_COUNT",
    "BATCH_ACCUMULATED_ELEMENT_COUNT",
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO",
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE",
    "BATCH_ITEM_SHAPE",
    "BATCH_ITEM_SHAPE_FLATTEN",
)
Shape = tuple[int, int, int]


def plain(kind: str, shapes: list[Shape]) -> list[Any]:
    """Return the contents of a batch input, written down from its definition."""
    found: list[Any] = [0] if kind.endswith("WITH_ZERO") else []
    for rows, *item in shapes:
        count = rows * item[0] * item[1]
        if kind == "BATCH_ELEMENT_COUNT":
            found.append(count)
        elif "ACCUMULATED" in kind:
            found.append((found[-1] if found else 0) + count)
        elif kind == "BATCH_ITEM_SHAPE":
            found += [item] * rows
        elif kind == "BATCH_ITEM_SHAPE_FLATTEN":
            found += item * rows
    if kind == "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE":
        return [0] * max(rows * a * b for rows, a, b in shapes)
    return found


@given(
    st.sampled_from(KINDS),
    st.sampled_from(["int32", "float32"]),
    st.lists(st.tuples(*[st.integers(1, 4)] * 3), min_size=1, max_size=5),
)
def test_every_kind_is_its_definition(kind: str, dtype: str, shapes: list[Shape]) -> None:
    made = MadeInput(kind=kind.removeprefix("BATCH_").lower(), names=["t", "u"], dtype=dtype, source="x")  # type: ignore[arg-type]
    io = BatchIO(Options(ragged_inputs=["x"], made_inputs=[made]))
    requests = [{"x": np.full(shape, number, np.float32)} for number, shape in enumerate(shapes)]
    feed = io.join(requests)
    assert feed["t"].dtype == np.dtype(dtype)
    assert feed["t"].tolist() == feed["u"].tolist() == plain(kind, shapes)
    assert feed["x"].tolist() == [n for n, shape in enumerate(shapes) for _ in range(int(np.prod(shape)))]
    assert io.names == {"t", "u"}


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5)), min_size=1, max_size=5))
def test_scattering_undoes_joining(shapes: list[tuple[int, int]]) -> None:
    io = BatchIO(Options(ragged_inputs=["x"], scattered_outputs={"y": Scatter(source="x", dims=[-1, -1])}))
    requests = [{"x": np.random.default_rng(1).random(shape)} for shape in shapes]
    rows = np.arange(sum(shape[0] for shape in shapes)).reshape(-1, 1)
    parts = io.split({"y": io.join(requests)["x"], "n": rows}, requests)
    for request, part in zip(requests, parts, strict=True):
        np.testing.assert_array_equal(part["y"], request["x"])
    assert np.concatenate([part["n"] for part in parts]).tolist() == rows.tolist()
    with pytest.raises(ServeError, match="its requests need more"):
        io.split({"y": np.zeros(1), "n": rows[:0]}, requests)


TENSORS = """
input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }
output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "n" data_type: TYPE_FP32 dims: [ 1 ] }
batch_input { kind: BATCH_ELEMENT_COUNT target_name: "count" data_type: TYPE_FP32 source_input: "x" }
batch_output { target_name: "y" source_input: "x" }
"""


def ragged(folder: Path, *, shape: tuple[int | str, ...] = ("all",)) -> Path:
    """y = 2 x, element by element; n = how many elements each request has, [requests, 1]."""
    return save(
        folder,
        [
            helper.make_node("Add", ["x", "x"], ["y"]),
            helper.make_node("Unsqueeze", ["count", "one"], ["n"]),
        ],
        [value("x", FLOAT, shape), value("count", FLOAT, ["requests"])],
        [value("y", FLOAT, ["all"]), value("n", FLOAT, ["requests", 1])],
        helper.make_tensor("one", TensorProto.INT64, [1], [1]),
    )


def test_a_model_gets_requests_of_any_length_in_one_run(tmp_path: Path) -> None:
    backend = load(ragged(tmp_path), TENSORS)
    assert list(backend.inputs) == ["x"]
    first, second = (np.arange(n, dtype=np.float32).reshape(1, n) for n in (2, 5))
    one, two = backend.run_requests([{"x": first}, {"x": second}])
    np.testing.assert_array_equal(one["y"], 2 * first)
    np.testing.assert_array_equal(two["y"], 2 * second)
    assert (one["n"].tolist(), two["n"].tolist()) == ([[2.0]], [[5.0]])
    assert backend.run({"x": first})["n"].tolist() == [[2.0]]


def test_a_model_that_wants_axes_is_not_ragged(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"allow_ragged_batch wants a model that takes it with shape \[-1\]"
    ):
        load(ragged(tmp_path, shape=("n", 3)), TENSORS)


def test_an_optional_input_is_an_initializer(tmp_path: Path) -> None:
    folder = save(
        tmp_path,
        [helper.make_node("Mul", ["x", "by"], ["y"])],
        [value("x", FLOAT, [2]), value("by", FLOAT, [2])],
        [value("y", FLOAT, [2])],
        helper.make_tensor("by", FLOAT, [2], [10.0, 10.0]),
    )
    text = """
        max_batch_size: 0
        input { name: "x" data_type: TYPE_FP32 dims: [ 2 ] }
        input { name: "by" data_type: TYPE_FP32 dims: [ 2 ] optional: true }
        output { name: "y" data_type: TYPE_FP32 dims: [ 2 ] }
    """
    config = to_model_config(parse_triton_text('backend: "onnxruntime"' + text, "net"))
    backend = create(config_json(config), folder, 0)
    backend.load()
    x = np.array([1, 2], np.float32)
    assert backend.run({"x": x})["y"].tolist() == [10, 20]
    assert backend.run({"x": x, "by": x})["y"].tolist() == [1, 4]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('batch_input { target_name: "t" data_type: TYPE_INT32 }', r"batch_input\[0\]\.source_input"),
        (
            'batch_input { target_name: "t" data_type: TYPE_INT64 source_input: "x" }',
            r"batch_input\[0\]\.data_type: given .*TYPE_INT64.*allowed: TYPE_INT32 or TYPE_FP32",
        ),
        ('batch_input { data_type: TYPE_INT32 source_input: "x" }', r"batch_input\[0\]\.target_name"),
        ('batch_output { target_name: "z" source_input: "x" }', r"batch_output\.target_name: given .*z"),
    ],
)
def test_what_contradicts_itself_is_told(text: str, fault: str) -> None:
    tensors = 'input { name: "x" dims: [ 1 ] data_type: TYPE_FP32 } output { name: "y" dims: [ 1 ] }'
    with pytest.raises(ConfigError, match=fault):
        parse_triton_text('backend: "onnxruntime" max_batch_size: 4 ' + tensors + text, "net")


def test_clients_of_different_lengths_share_a_run(tmp_path: Path) -> None:
    ragged(tmp_path)
    config = 'backend: "onnxruntime" max_batch_size: 4 instance_group { count: 1 } '
    config += "dynamic_batching { max_queue_delay_microseconds: 60000000 preferred_batch_size: 4 } "
    (tmp_path / "net" / "config.pbtxt").write_text(config + TENSORS)

    async def work() -> None:
        async with serving(tmp_path) as at:
            version = at.server.catalog.available("net")
            assert version is not None

            async def ask(count: int) -> tuple[list[float], list[float]]:
                data = np.arange(count, dtype=np.float32).tobytes()
                request = InferRequest({"x": Tensor(DTYPES["float32"], (1, count), data)})
                response = await at.server.front.engine.infer(version, request)
                found = [np.frombuffer(response.outputs[name].data, np.float32).tolist() for name in "yn"]
                response.release()
                return found[0], found[1]

            answers = await asyncio.gather(*(ask(count) for count in (1, 3, 2, 7)))
            assert answers == [([2.0 * i for i in range(n)], [float(n)]) for n in (1, 3, 2, 7)]
            assert [(b.rows, b.runs) for b in counts_of(version).batches] == [(4, 1)]

    run(work())
