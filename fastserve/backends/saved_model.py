"""What a SavedModel says of itself: its signatures, their tensors, and which of them are the same.

Read from saved_model.pb alone; nothing of it is run. Needs TensorFlow, whose messages these are.

    graph = read_graph(folder)              the MetaGraphDef with the tag "serve"
    found = read_signatures(graph)          serving_default first, the others by name

A tensor belongs to the graph, not to a signature: two signatures that name one tensor share it. Keras writes
one function under two names (`serve`, `serving_default`), each with placeholders of its own: those are one
signature that is called two names, since their functions are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.tensor import DTYPES, TensorSpec

FILES = ("saved_model.pb", "saved_model.pbtxt")
TAGS = ("serve",)
DEFAULT = "serving_default"
_OWN = "__saved_model_"  # TensorFlow's own: what initialises and trains
_METHODS = {
    "tensorflow/serving/classify": "classify",
    "tensorflow/serving/regress": "regress",
}
_DTYPES = {
    "DT_BOOL": "bool",
    "DT_UINT8": "uint8",
    "DT_UINT16": "uint16",
    "DT_UINT32": "uint32",
    "DT_UINT64": "uint64",
    "DT_INT8": "int8",
    "DT_INT16": "int16",
    "DT_INT32": "int32",
    "DT_INT64": "int64",
    "DT_HALF": "float16",
    "DT_BFLOAT16": "bfloat16",
    "DT_FLOAT": "float32",
    "DT_DOUBLE": "float64",
    "DT_COMPLEX64": "complex64",
    "DT_COMPLEX128": "complex128",
    "DT_STRING": "bytes",
}
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")


@dataclass(frozen=True, slots=True)
class GraphTensor:
    """A tensor of the graph; its spec has the whole shape."""

    place: str
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class SavedSignature:
    """One signature as the file has it, tensors by the names clients use, in alphabetical order. `body` is
    equal for signatures that compute the same, None where that cannot be seen. `fault` says why it cannot be
    served."""

    name: str
    method: str
    inputs: dict[str, GraphTensor]
    outputs: dict[str, GraphTensor]
    body: bytes | None = None
    fault: str = ""


def read_graph(folder: Path) -> Any:
    """The graph to serve. Raises ConfigError for a file that is no SavedModel or has no such graph."""
    saved = _read_file(folder)
    graphs = {tuple(sorted(graph.meta_info_def.tags)): graph for graph in saved.meta_graphs}
    if TAGS not in graphs:
        there = " or ".join(", ".join(tags) or "no tag" for tags in sorted(graphs)) or "no graph at all"
        raise ConfigError(f"the SavedModel has no graph with the tag {TAGS[0]} alone; it has: {there}")
    return graphs[TAGS]


def _read_file(folder: Path) -> Any:
    from google.protobuf import text_format
    from google.protobuf.message import DecodeError
    from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

    path = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if path is None:
        raise ConfigError(f"the version's folder has no file {' or '.join(FILES)}")
    try:
        data = path.read_bytes()
        if path.suffix == ".pb":
            return SavedModel.FromString(data)
        return text_format.Parse(data.decode(), SavedModel())
    except (DecodeError, text_format.ParseError, UnicodeDecodeError) as fault:
        text = f"{path.name} is no SavedModel, or is not whole: {fault}"
        raise ServeError(Kind.FAILED_PRECONDITION, text) from fault


def read_signatures(graph: Any) -> list[SavedSignature]:
    """Those a client may name. Raises ConfigError when there are none."""
    found = [
        _read_signature(name, graph.signature_def[name], graph)
        for name in sorted(graph.signature_def, key=lambda name: (name != DEFAULT, name))
        if not name.startswith(_OWN)
    ]
    if not found:
        raise ConfigError(
            "the SavedModel has no signatures: save it with tf.saved_model.save(model, path, signatures=...)"
        )
    return found


def _read_signature(name: str, written: Any, graph: Any) -> SavedSignature:
    method = _METHODS.get(written.method_name, "predict")
    try:
        inputs = {alias: _read_tensor(alias, written.inputs[alias]) for alias in sorted(written.inputs)}
        outputs = {alias: _read_tensor(alias, written.outputs[alias]) for alias in sorted(written.outputs)}
    except ConfigError as fault:
        return SavedSignature(name, method, {}, {}, fault=str(fault))
    if not (inputs and outputs):
        return SavedSignature(name, method, {}, {}, fault=f"it has no {'outputs' if inputs else 'inputs'}")
    return SavedSignature(name, method, inputs, outputs, _body_of(inputs, outputs, graph))


def _read_tensor(alias: str, info: Any) -> GraphTensor:
    from tensorflow.core.framework.types_pb2 import DataType

    kind = info.WhichOneof("encoding")
    if kind != "name":
        raise ConfigError(f"tensor {alias!r} is no plain tensor ({kind or 'without a name'})")
    word = DataType.Name(info.dtype)
    if word not in _DTYPES:
        raise ConfigError(f"tensor {alias!r} is of type {word}, which cannot be served")
    shape = None
    if not info.tensor_shape.unknown_rank:
        shape = tuple(int(dim.size) if dim.size >= 0 else -1 for dim in info.tensor_shape.dim)
    return GraphTensor(info.name, TensorSpec(alias, DTYPES[_DTYPES[word]], shape))


def _body_of(
    inputs: Mapping[str, GraphTensor], outputs: Mapping[str, GraphTensor], graph: Any
) -> bytes | None:
    """What one call of a function computes, free of the names that each signature's wrapper has."""
    callers = {tensor.place.partition(":")[0] for tensor in outputs.values()}
    nodes = [node for node in graph.graph_def.node if node.name in callers]
    if len(nodes) != 1 or nodes[0].op not in _CALLS:
        return None
    called = nodes[0].attr["f"].func.name
    function = next((one for one in graph.graph_def.library.function if one.signature.name == called), None)
    if function is None:
        return None
    bare = type(function)()
    bare.CopyFrom(function)
    bare.signature.name = ""
    bare.ClearField("arg_attr")  # names that captured variables had when they were traced
    given = {tensor.place.partition(":")[0]: alias for alias, tensor in inputs.items()}
    sources = [given.get(source, f"^{source}") for source in nodes[0].input]
    results = [(alias, tensor.place.partition(":")[2], tensor.spec) for alias, tensor in outputs.items()]
    takes = [(alias, tensor.spec) for alias, tensor in inputs.items()]
    return bytes(bare.SerializeToString(deterministic=True)) + repr((sources, takes, results)).encode()
