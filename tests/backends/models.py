"""Small ONNX models made here, and where they go."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onnx import TensorProto, checker, helper, save_model

FLOAT, INT64, STRING = TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING


def save(
    folder: Path, nodes: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], *constants: Any
) -> Path:
    """Writes NAME/1/model.onnx; the version's folder."""
    version_dir = folder / "net" / "1"
    version_dir.mkdir(parents=True)
    graph = helper.make_graph(list(nodes), "net", list(inputs), list(outputs), list(constants))
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    checker.check_model(model)
    save_model(model, str(version_dir / "model.onnx"))
    return version_dir


def value(name: str, kind: int, shape: Sequence[int | str] | None) -> Any:
    """A graph input or output; a str in the shape is a symbolic axis."""
    return helper.make_tensor_value_info(name, kind, shape)


def affine(folder: Path, batch: int | str = "n") -> Path:
    """y = 2 x + 1, float32 [batch, 3]; z = its sum over the row, [batch]."""
    return save(
        folder,
        [
            helper.make_node("Mul", ["x", "two"], ["t"]),
            helper.make_node("Add", ["t", "one"], ["y"]),
            helper.make_node("ReduceSum", ["y", "axis"], ["z"], keepdims=0),
        ],
        [value("x", FLOAT, [batch, 3])],
        [value("y", FLOAT, [batch, 3]), value("z", FLOAT, [batch])],
        helper.make_tensor("two", FLOAT, [], [2.0]),
        helper.make_tensor("one", FLOAT, [], [1.0]),
        helper.make_tensor("axis", INT64, [1], [1]),
    )


def strings(folder: Path) -> Path:
    """A string goes through as it came."""
    return save(
        folder,
        [helper.make_node("Identity", ["s"], ["t"])],
        [value("s", STRING, ["n", 2])],
        [value("t", STRING, ["n", 2])],
    )
