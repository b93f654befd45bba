"""The tensorflow backend: a SavedModel in NAME/VERSION (saved_model.pb, variables, assets), on the CPU.

Every signature is served. The model's tensors are those of all signatures: `x` of serving_default is called
"x", `x` of any other "SIGNATURE/x". A batch brings the inputs of one signature, and gets the outputs of all
that take no more than these:

    {"x": ...}          -> serving_default              {"regress/inputs": ...}  -> regress

Signatures are read from saved_model.pb alone, by TensorFlow's messages; nothing of the model is run for it. A
tensor belongs to the graph, not to a signature: two signatures that name one tensor share it. Keras writes
one function under two names (`serve`, `serving_default`), each with placeholders of its own: equal functions
make them one signature with two names.

TensorFlow is imported by `load`, so by workers only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastserve.backends.base import read_specs
from fastserve.backends.batch_io import OutputCheck
from fastserve.backends.model_errors import clean
from fastserve.backends.registry import find_backend
from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.settings.model_options import read_options
from fastserve.tensor import DTYPE_BY_TENSORFLOW, TensorSpec, fits_shape

if TYPE_CHECKING:
    from fastserve.backends.base import Arrays


FILES = ("saved_model.pb", "saved_model.pbtxt")
TAGS = ("serve",)
DEFAULT = "serving_default"
_OWN = "__saved_model_"  # TensorFlow's own: what initialises and trains

_METHODS = {
    "tensorflow/serving/classify": "classify",
    "tensorflow/serving/regress": "regress",
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
    """Return the graph to serve. Raises ConfigError for a file that is no SavedModel or has no such graph."""
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
    """Return the signatures that a client may name. Raises ConfigError when there are none."""
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
    if word not in DTYPE_BY_TENSORFLOW:
        raise ConfigError(f"tensor {alias!r} is of type {word}, which cannot be served")
    shape = None
    if not info.tensor_shape.unknown_rank:
        shape = tuple(int(dim.size) if dim.size >= 0 else -1 for dim in info.tensor_shape.dim)
    return GraphTensor(info.name, TensorSpec(alias, DTYPE_BY_TENSORFLOW[word], shape))


def _body_of(
    inputs: Mapping[str, GraphTensor], outputs: Mapping[str, GraphTensor], graph: Any
) -> bytes | None:
    """Return what one call of a function computes, free of the names that each signature's wrapper has."""
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


log = logging.getLogger(__name__)
_TRACES = "<stack traces unavailable>\n"
_CALL = re.compile(r"\s*\[Op:[^\]]*\].*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Signature:
    """One served signature. `inputs` and `outputs`: its own names -> the model's."""

    name: str
    method: str
    inputs: dict[str, str]
    outputs: dict[str, str]
    same_as: str = ""


@dataclass(frozen=True, slots=True)
class _Plan:
    """The functions to call for batches with the same inputs."""

    calls: tuple[tuple[Any, _Signature], ...]
    check: OutputCheck


class TensorFlowBackend:
    """Runs a SavedModel. `signatures` is in the form of model.yaml's."""

    def __init__(self, config: Mapping[str, Any], version_dir: Path, instance: int) -> None:
        self.inputs: dict[str, TensorSpec] = {}
        self.outputs: dict[str, TensorSpec] = {}
        self.signatures: dict[str, dict[str, Any]] = {}
        file = read_options(config).model_file  # of Triton's layout, in a folder of the version's
        self._config, self._version_dir = config, (version_dir / file).parent if file else version_dir
        self._batched = int(config.get("max_batch_size", 0)) > 0
        self._tf: Any = None
        self._model: Any = None
        self._found: list[_Signature] = []
        self._plans: dict[frozenset[str], _Plan] = {}

    def load(self) -> None:
        """Read the signatures, then load the model. Raises ConfigError when model.yaml and the model disagree
        or there is nothing to serve, ServeError when TensorFlow is missing or refuses the model."""
        self._tf = _import_tensorflow(int(self._config.get("threads", 1)))
        self._take(read_signatures(read_graph(self._version_dir)))
        self._narrow("input", self.inputs)
        self._narrow("output", self.outputs)
        try:
            self._model = self._tf.saved_model.load(str(self._version_dir), tags=list(TAGS))
        except Exception as error:
            words = clean(f"TensorFlow cannot load the SavedModel: {error}", str(self._version_dir))
            raise ServeError(Kind.FAILED_PRECONDITION, words) from error
        missing = [one.name for one in self._found if one.name not in self._model.signatures]
        if missing:
            raise ConfigError(f"TensorFlow loads the SavedModel without its signature {missing[0]!r}")

    def run(self, inputs: Arrays) -> Arrays:
        """Run one batch; see Backend.run. Raises ServeError with the code TensorFlow fails with."""
        names = frozenset(inputs)
        plan = self._plans.get(names) or self._make_plan(names)
        tensors = {name: self._to_tensor(array, self.inputs[name]) for name, array in inputs.items()}
        found: dict[str, Any] = {}
        try:
            for function, signature in plan.calls:
                results = function(**{alias: tensors[name] for alias, name in signature.inputs.items()})
                for alias, name in signature.outputs.items():
                    if name not in found:
                        found[name] = _to_array(results[alias], self.outputs[name])
        except self._tf.errors.OpError as error:
            raise ServeError(_kind_of(error), _words(error)) from error
        return plan.check(inputs, found)

    def close(self) -> None:
        """Drop the model."""
        self._plans.clear()
        self._model = None

    # --- what there is ------------------------------------------------------------------------------

    def _take(self, written: list[SavedSignature]) -> None:
        known: tuple[dict[str, str], dict[str, str]] = {}, {}  # place in the graph -> the model's name
        bodies: dict[bytes, _Signature] = {}
        plain = written[0].name  # serving_default, or the first of those there are
        for one in written:
            fault = one.fault or self._rows_fault(one)
            if fault and one.name == plain:
                raise ConfigError(f"signature {one.name!r} cannot be served: {fault}")
            if fault:
                log.warning("signature %r is not served: %s", one.name, fault)
                continue
            same = bodies.get(one.body) if one.body is not None else None
            if same is not None:
                found = _Signature(one.name, one.method, same.inputs, same.outputs, same.name)
            else:
                lead = "" if one.name == plain else f"{one.name}/"
                inputs = self._name(one.inputs, known[0], self.inputs, lead)
                outputs = self._name(one.outputs, known[1], self.outputs, lead)
                found = _Signature(one.name, one.method, inputs, outputs)
                if one.body is not None:
                    bodies[one.body] = found
            self._found.append(found)
            self.signatures[one.name] = {
                "method": one.method, "inputs": dict(found.inputs), "outputs": dict(found.outputs)
            }  # fmt: skip

    def _name(
        self,
        tensors: Mapping[str, GraphTensor],
        known: dict[str, str],
        specs: dict[str, TensorSpec],
        lead: str,
    ) -> dict[str, str]:
        names = {}
        for alias, tensor in tensors.items():
            name = names[alias] = known.setdefault(tensor.place, lead + alias)
            shape = tensor.spec.shape
            if self._batched and shape is not None:
                shape = shape[1:]
            specs.setdefault(name, TensorSpec(name, tensor.spec.dtype, shape))
        return names

    def _rows_fault(self, signature: SavedSignature) -> str:
        """Return why a signature's tensors have no batch axis; "" when they have, or when there is no
        batch."""
        sides = (("input", signature.inputs), ("output", signature.outputs)) if self._batched else ()
        for side, tensors in sides:
            for alias, tensor in tensors.items():
                shape = tensor.spec.shape
                if shape is not None and shape[:1] != (-1,):
                    text = f"{side} {alias!r} has no free first axis: its shape is {list(shape)}"
                    return text + "; set max_batch_size to 0 in model.yaml"
        return ""

    def _narrow(self, side: str, specs: dict[str, TensorSpec]) -> None:
        """Take over the lengths that model.yaml declares for free axes. Raises ConfigError."""
        for name, declared in read_specs(self._config.get(f"{side}s")).items():
            found = specs.get(name)
            if found is None:
                raise ConfigError(f"the model has no {side} {name!r}; its {side}s are {', '.join(specs)}")
            if declared.dtype is not found.dtype:
                text = f"model.yaml says {declared.dtype.name}, the model {found.dtype.name}"
                raise ConfigError(f"{side} {name!r}: {text}")
            if declared.shape is None:
                continue
            if found.shape is not None and not fits_shape(declared.shape, found.shape):
                text = f"model.yaml says shape {list(declared.shape)}, the model {list(found.shape)}"
                raise ConfigError(f"{side} {name!r}: {text}" + " (without the batch axis)" * self._batched)
            specs[name] = declared

    # --- running -----------------------------------------------------------------------------------

    def _make_plan(self, names: frozenset[str]) -> _Plan:
        taking = [one for one in self._found if names.issuperset(one.inputs.values()) and not one.same_as]
        if not taking:
            told = "; ".join(f"{one.name}: {', '.join(one.inputs.values())}" for one in self._found)
            text = f"no signature takes the inputs {', '.join(sorted(names))}; they are {told}"
            raise ServeError(Kind.INVALID_ARGUMENT, text)
        given = {name for one in taking for name in one.outputs.values()}
        specs = {name: spec for name, spec in self.outputs.items() if name in given}
        calls = tuple((self._model.signatures[one.name], one) for one in taking)
        plan = self._plans[names] = _Plan(calls, OutputCheck(specs, batched=self._batched))
        return plan

    def _to_tensor(self, array: Any, spec: TensorSpec) -> Any:
        if spec.dtype.name == "bfloat16":
            array = array.view(self._tf.bfloat16.as_numpy_dtype)
        return self._tf.constant(array)  # a copy: what a model keeps in a variable is none of the next batch


def _import_tensorflow(threads: int) -> Any:
    """Import TensorFlow. Raises ServeError saying what to install."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # errors alone, of the C++ side
    try:
        import tensorflow
    except ImportError as error:
        raise ServeError(Kind.FAILED_PRECONDITION, find_backend("tensorflow").missing_text) from error
    tensorflow.get_logger().setLevel("ERROR")
    with contextlib.suppress(RuntimeError):  # may be said once in a process that models share
        tensorflow.config.set_visible_devices([], "GPU")
        if threads:
            tensorflow.config.threading.set_intra_op_parallelism_threads(threads)
        tensorflow.config.threading.set_inter_op_parallelism_threads(1)
    return tensorflow


def _to_array(tensor: Any, spec: TensorSpec) -> Any:
    array = tensor.numpy()
    if spec.dtype.name == "bfloat16":
        return array.view(np.uint16)
    if not isinstance(array, np.ndarray):  # a string without axes
        array = np.array(array, object if spec.dtype.name == "bytes" else None)
    return array


def _words(error: Any) -> str:
    """Return a kernel's error text as TensorFlow Serving passes it on: without the traceback of the graph's
    construction."""
    text = str(error.message)
    return clean(_CALL.sub("", text.partition(_TRACES)[2] or text))


def _kind_of(error: Any) -> Kind:
    """Return the kind of an error. TensorFlow's codes are gRPC's, as ours are."""
    return Kind(error.error_code) if error.error_code in Kind._value2member_map_ else Kind.INTERNAL
