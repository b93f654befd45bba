"""The tensorflow backend: a SavedModel in NAME/VERSION (saved_model.pb, variables, assets), on the CPU.

Every signature is served. What the model takes and gives is the tensors of all of them: `x` of
serving_default is called "x", `x` of any other "SIGNATURE/x" (saved_model.py says which are the same).
A batch brings the inputs of one signature, and gets the outputs of all that take no more than these:

    {"x": ...}          -> serving_default              {"regress/inputs": ...}  -> regress

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

from fastserve.backends.base import clean, read_specs
from fastserve.backends.outputs import OutputCheck
from fastserve.backends.registry import find_backend
from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.tensor import TensorSpec, fits_shape

if TYPE_CHECKING:
    from fastserve.backends.base import Arrays
    from fastserve.backends.saved_model import GraphTensor, SavedSignature

log = logging.getLogger(__name__)


_TRACES = "<stack traces unavailable>\n"
_CALL = re.compile(r"\s*\[Op:[^\]]*\].*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Signature:
    """One way in. `inputs` and `outputs`: its own names -> the model's."""

    name: str
    method: str
    inputs: dict[str, str]
    outputs: dict[str, str]
    same_as: str = ""


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is called for batches with the same inputs."""

    calls: tuple[tuple[Any, _Signature], ...]
    check: OutputCheck


class TensorFlowBackend:
    """Runs a SavedModel. `signatures` is read by the owner, as `signatures` of a model.yaml has them."""

    def __init__(self, config: Mapping[str, Any], version_dir: Path, instance: int) -> None:
        self.inputs: dict[str, TensorSpec] = {}
        self.outputs: dict[str, TensorSpec] = {}
        self.signatures: dict[str, dict[str, Any]] = {}
        self._config, self._version_dir = config, version_dir
        self._batched = int(config.get("max_batch_size", 0)) > 0
        self._tf: Any = None
        self._model: Any = None
        self._found: list[_Signature] = []
        self._plans: dict[frozenset[str], _Plan] = {}

    def load(self) -> None:
        """Reads the signatures, then loads the model. Raises ConfigError when model.yaml and the model
        disagree or there is nothing to serve, ServeError when TensorFlow is missing or refuses the model."""
        self._tf = _import_tensorflow(int(self._config.get("threads", 1)))
        from fastserve.backends.saved_model import TAGS, read_graph, read_signatures

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
        """Runs one batch; see Backend.run. Raises ServeError with the code TensorFlow fails with."""
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
        """Drops the model."""
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
        """Why its tensors are no rows of a batch; "" when they are, or when there is no batch."""
        sides = (("input", signature.inputs), ("output", signature.outputs)) if self._batched else ()
        for side, tensors in sides:
            for alias, tensor in tensors.items():
                shape = tensor.spec.shape
                if shape is not None and shape[:1] != (-1,):
                    text = f"{side} {alias!r} has no free first axis: its shape is {list(shape)}"
                    return text + "; set max_batch_size to 0 in model.yaml"
        return ""

    def _narrow(self, side: str, specs: dict[str, TensorSpec]) -> None:
        """Lengths that model.yaml says of axes the model leaves open. Raises ConfigError."""
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
    """Raises ServeError saying what to install."""
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
    """What a kernel said, in the words TensorFlow Serving passes on: without where Python built the graph."""
    text = str(error.message)
    return clean(_CALL.sub("", text.partition(_TRACES)[2] or text))


def _kind_of(error: Any) -> Kind:
    """TensorFlow's codes are gRPC's, as ours are."""
    return Kind(error.error_code) if error.error_code in Kind._value2member_map_ else Kind.INTERNAL
