"""Completes a Triton config: with Triton's defaults (spec 2), and with what the model's files say.

As in Triton, a config that names no backend is of the backend whose model file lies there, and tensors are
read from the model only where the config leaves them out.

Names, types and shapes of an ONNX model's inputs and outputs are read without ONNX Runtime and numpy:

    ModelProto.graph -> GraphProto.input, .output, .initializer -> ValueInfoProto -> TypeProto.Tensor

The ONNX file is mapped and walked field by field; weights are stepped over. Nothing is checked beyond what is
needed to find the tensors: the backend, which loads the model, has the last word.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from fastserve.backends.registry import BY_TRITON_NAME, BackendEntry
from fastserve.devices.inventory import MACHINE
from fastserve.repository.placement import why_no_gpu
from fastserve.repository.triton_config.messages import (
    ModelDynamicBatching,
    ModelInput,
    ModelInstanceGroup,
    ModelInstanceGroupKind,
    ModelOptimizationPolicy,
    ModelOutput,
    ModelSequenceBatching,
    ModelTensorReshape,
    ModelVersionPolicy,
    TritonConfig,
)
from fastserve.repository.triton_config.messages import (
    ModelOptimizationPolicyPinnedMemoryBuffer as PinnedMemory,
)
from fastserve.repository.triton_config.messages import ModelVersionPolicyLatest as Latest
from fastserve.tensor import DTYPES, TensorSpec

IDLE_US = 1_000_000  # a sequence that says nothing for so long is forgotten (spec 4)

# platform -> backend, for files that name only the older of the two
PLATFORMS = {
    **{entry.triton_platform: name for name, entry in BY_TRITON_NAME.items() if entry.triton_platform},
    "tensorrt_plan": "tensorrt",
    "pytorch_libtorch": "pytorch",
    "tensorflow_graphdef": "tensorflow",
    "tensorflow_savedmodel": "tensorflow",
}
FIL_FILES = {
    "xgboost": "xgboost.model",
    "xgboost_json": "xgboost.json",
    "xgboost_ubj": "xgboost.ubj",
    "lightgbm": "model.txt",
    "treelite_checkpoint": "checkpoint.tl",
}
"""Files of the backend fil by its parameter model_type."""

DTYPE_OF = {
    "TYPE_BOOL": "bool",
    "TYPE_UINT8": "uint8",
    "TYPE_UINT16": "uint16",
    "TYPE_UINT32": "uint32",
    "TYPE_UINT64": "uint64",
    "TYPE_INT8": "int8",
    "TYPE_INT16": "int16",
    "TYPE_INT32": "int32",
    "TYPE_INT64": "int64",
    "TYPE_FP16": "float16",
    "TYPE_FP32": "float32",
    "TYPE_FP64": "float64",
    "TYPE_STRING": "bytes",
    "TYPE_BF16": "bfloat16",
}

DATA_TYPE = {dtype: name for name, dtype in DTYPE_OF.items()}


def fill_defaults(config: TritonConfig, name: str) -> TritonConfig:
    """Fill in the defaults that Triton adds before it shows a config (spec 2). Filling twice changes
    nothing."""
    backend = config.backend or PLATFORMS.get(config.platform, "")
    entry = BY_TRITON_NAME.get(backend)
    changes: dict[str, Any] = {
        "name": config.name or name,
        "version_policy": config.version_policy or ModelVersionPolicy(latest=Latest(num_versions=1)),
        "dynamic_batching": _filled_dynamic(config),
        "sequence_batching": _filled_sequence(config),
    }
    if not config.ensemble:
        changes |= {
            "backend": backend,
            "platform": _filled_platform(config, backend, entry),
            "default_model_filename": config.default_model_filename or _default_file(config, entry),
            "optimization": _filled_optimization(config.optimization or ModelOptimizationPolicy()),
        }
    if (
        backend and not config.ensemble
    ):  # how many workers there are depends on it; without one nothing is loaded
        changes["instance_group"] = _filled_groups(config, name, entry)
    return msgspec.structs.replace(config, **changes)


def _filled_platform(config: TritonConfig, backend: str, entry: BackendEntry | None) -> str:
    if PLATFORMS.get(config.platform) == backend:  # one of several of this backend
        return config.platform
    return (entry.triton_platform if entry else "") or config.platform


def _default_file(config: TritonConfig, entry: BackendEntry | None) -> str:
    if entry is None:
        return ""
    if entry.triton == "fil":
        kind = config.parameters.get("model_type")
        return FIL_FILES.get(kind.string_value if kind else "xgboost", "")
    return entry.triton_file or entry.model_file


def _filled_optimization(given: ModelOptimizationPolicy) -> ModelOptimizationPolicy:
    return msgspec.structs.replace(
        given,
        input_pinned_memory=given.input_pinned_memory or PinnedMemory(enable=True),
        output_pinned_memory=given.output_pinned_memory or PinnedMemory(enable=True),
    )


def _filled_groups(config: TritonConfig, name: str, entry: BackendEntry | None) -> list[ModelInstanceGroup]:
    filled = []
    for number, group in enumerate(config.instance_group or [ModelInstanceGroup(name=config.name or name)]):
        kind = group.kind if group.kind != "KIND_AUTO" else _kind_of(group, entry)
        cpus = entry.triton_instances if entry else 1
        filled.append(
            msgspec.structs.replace(
                group,
                name=group.name or f"{config.name or name}_{number}",
                kind=kind,
                count=group.count or (cpus if kind == "KIND_CPU" else 1),
                gpus=group.gpus or (every_gpu() if kind == "KIND_GPU" else []),
            )
        )
    return filled


def _kind_of(group: ModelInstanceGroup, entry: BackendEntry | None) -> ModelInstanceGroupKind:
    """Return the kind that KIND_AUTO resolves to: GPUs where there are any and the backend can use them. A
    group that names a missing GPU keeps its kind, and is refused."""
    if group.gpus and set(group.gpus) - set(every_gpu()):
        return group.kind
    return "KIND_GPU" if entry is not None and not why_no_gpu(entry, MACHINE) else "KIND_CPU"


def every_gpu() -> list[int]:
    """Return the numbers of all GPUs."""
    return [device.number for device in MACHINE.devices()]


def _filled_dynamic(config: TritonConfig) -> ModelDynamicBatching | None:
    given = config.dynamic_batching
    if given is None or given.preferred_batch_size or config.max_batch_size <= 0:
        return given
    return msgspec.structs.replace(given, preferred_batch_size=[config.max_batch_size])


def _filled_sequence(config: TritonConfig) -> ModelSequenceBatching | None:
    given = config.sequence_batching
    if given is None:
        return None
    oldest = given.oldest
    if oldest is not None and not oldest.preferred_batch_size and config.max_batch_size > 0:
        oldest = msgspec.structs.replace(oldest, preferred_batch_size=[config.max_batch_size])
    idle = given.max_sequence_idle_microseconds or IDLE_US
    return msgspec.structs.replace(given, oldest=oldest, max_sequence_idle_microseconds=idle)


def complete(
    config: TritonConfig, inputs: Mapping[str, TensorSpec], outputs: Mapping[str, TensorSpec]
) -> TritonConfig:
    """Fill in tensors, types and dims that the file leaves out. Shapes are without the batch axis."""
    known_in = {tensor.name: tensor for tensor in config.input}
    known_out = {tensor.name: tensor for tensor in config.output}
    ins = [_completed(known_in.get(name, ModelInput(name=name)), spec) for name, spec in inputs.items()]
    outs = [_completed(known_out.get(name, ModelOutput(name=name)), spec) for name, spec in outputs.items()]
    ins += [tensor for name, tensor in known_in.items() if name not in inputs]
    outs += [tensor for name, tensor in known_out.items() if name not in outputs]
    return msgspec.structs.replace(
        config,
        input=_in_order(config.input, ins),
        output=_in_order(config.output, outs),
    )


def _completed(tensor: Any, spec: TensorSpec) -> Any:
    changes: dict[str, Any] = {}
    if tensor.data_type == "TYPE_INVALID":
        changes["data_type"] = DATA_TYPE.get(spec.dtype.name, "TYPE_INVALID")
    if not tensor.dims and spec.shape is not None and tensor.reshape is None:
        changes["dims"] = list(spec.shape) or [1]
        if not spec.shape:  # a config cannot say "no axes": one element, which the model sees without
            changes["reshape"] = ModelTensorReshape()
    return msgspec.structs.replace(tensor, **changes)


def _in_order(written: list[Any], tensors: list[Any]) -> list[Any]:
    place = {tensor.name: number for number, tensor in enumerate(written)}
    return sorted(tensors, key=lambda tensor: place.get(tensor.name, len(place)))


FOUND_BATCH_SIZE = 4  # Triton's default for a model that batches and whose config says nothing


def find_file(numbered: Mapping[int, Path], file_name: str, root: Path) -> Path | None:
    """Return the file of this name in the highest version that has one inside the repository."""
    for _, folder in sorted(numbered.items(), reverse=True):
        file = folder / file_name
        if file.is_file() and file.resolve().is_relative_to(root.resolve()):
            return file
    return None


def complete_from_files(config: TritonConfig, numbered: Mapping[int, Path], root: Path) -> TritonConfig:
    """Fill in backend and tensors from version folders. Raises OSError."""
    if config.ensemble:
        return config
    if not config.backend:
        config = _with_backend(config, numbered, root)
    if config.backend != "onnxruntime" or _whole(config):
        return config
    file = find_file(numbered, config.default_model_filename, root)
    graph = read_onnx_graph(file) if file is not None else None
    if graph is None:
        return config  # loading says why
    if not (config.input or config.output or config.max_batch_size) and graph.batched:
        dynamic = None if config.sequence_batching else config.dynamic_batching or ModelDynamicBatching()
        config = msgspec.structs.replace(config, max_batch_size=FOUND_BATCH_SIZE, dynamic_batching=dynamic)
        config = fill_defaults(config, config.name)
    if config.max_batch_size > 0:
        graph = graph.without_batch()
    return complete(config, graph.inputs, graph.outputs)


def _with_backend(config: TritonConfig, numbered: Mapping[int, Path], root: Path) -> TritonConfig:
    for backend, entry in BY_TRITON_NAME.items():
        file_name = str(Path(entry.triton_file, entry.model_file))
        if not entry.model_file:
            continue
        given = config.default_model_filename
        suits = not given or Path(given).suffix == Path(file_name).suffix
        if suits and find_file(numbered, given or file_name, root) is not None:
            return fill_defaults(msgspec.structs.replace(config, backend=backend), config.name)
    return config


def _whole(config: TritonConfig) -> bool:
    tensors: list[ModelInput | ModelOutput] = [*config.input, *config.output]
    told = all(tensor.data_type != "TYPE_INVALID" and tensor.dims for tensor in tensors)
    return bool(config.input and config.output) and told


# TensorProto.DataType -> dtype
_DTYPES = {
    1: "float32",
    2: "uint8",
    3: "int8",
    4: "uint16",
    5: "int16",
    6: "int32",
    7: "int64",
    8: "bytes",
    9: "bool",
    10: "float16",
    11: "float64",
    12: "uint32",
    13: "uint64",
    14: "complex64",
    15: "complex128",
    16: "bfloat16",
}
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(slots=True)
class OnnxGraph:
    """The tensors of a model by name, shapes whole: -1 for a symbolic axis, None where no rank is given."""

    inputs: dict[str, TensorSpec] = field(default_factory=dict)
    outputs: dict[str, TensorSpec] = field(default_factory=dict)

    @property
    def batched(self) -> bool:
        """True when the first axis of every tensor may have any length."""
        specs = [*self.inputs.values(), *self.outputs.values()]
        return bool(specs) and all(spec.shape and spec.shape[0] == -1 for spec in specs)

    def without_batch(self) -> OnnxGraph:
        """Return the same graph with every first axis removed."""
        return OnnxGraph(_rows(self.inputs), _rows(self.outputs))


def _rows(specs: dict[str, TensorSpec]) -> dict[str, TensorSpec]:
    return {
        name: TensorSpec(name, spec.dtype, spec.shape[1:] if spec.shape else spec.shape)
        for name, spec in specs.items()
    }


def read_onnx_graph(path: Path) -> OnnxGraph | None:
    """Return the tensors of the model in this file; None when it is no ONNX model. Raises OSError."""
    if not path.stat().st_size:
        return None
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        try:
            return _read_model(memory)
        except (IndexError, ValueError):  # UnicodeDecodeError is one
            return None


Span = tuple[int, int]  # from, to


def _read_model(memory: mmap.mmap) -> OnnxGraph | None:
    graph, weights = OnnxGraph(), set()
    found = False
    for number, value in _fields(memory, (0, len(memory))):
        if number != 7 or not isinstance(value, tuple):
            continue
        found = True
        for part, span in _fields(memory, value):
            if not isinstance(span, tuple):
                continue
            if part == 5:
                weights.add(_text(memory, span, 8))
            elif part in (11, 12):
                spec = _read_value(memory, span)
                (graph.inputs if part == 11 else graph.outputs)[spec.name] = spec
    # Before IR version 4 weights were listed among the inputs as well.
    graph.inputs = {name: spec for name, spec in graph.inputs.items() if name not in weights}
    return graph if found else None


def _read_value(memory: mmap.mmap, span: Span) -> TensorSpec:
    name = _text(memory, span, 1)
    tensor = _inner(memory, _inner(memory, span, 2), 1)
    kind, shape = 0, None
    for number, value in _fields(memory, tensor):
        if number == 1 and isinstance(value, int):
            kind = value
        elif number == 2 and isinstance(value, tuple):
            shape = tuple(_read_axis(memory, axis) for n, axis in _fields(memory, value) if n == 1)
    if kind not in _DTYPES:
        raise ValueError(f"element type {kind}")
    return TensorSpec(name, DTYPES[_DTYPES[kind]], shape)


def _read_axis(memory: mmap.mmap, span: int | Span) -> int:
    sizes = [value for number, value in _fields(memory, span) if number == 1 and isinstance(value, int)]
    return sizes[-1] if sizes and 0 < sizes[-1] < 2**63 else -1


def _inner(memory: mmap.mmap, span: int | Span, number: int) -> Span:
    """Return the message in field `number`, an empty one when it is not given."""
    found = [value for part, value in _fields(memory, span) if part == number and isinstance(value, tuple)]
    return found[-1] if found else (0, 0)


def _text(memory: mmap.mmap, span: Span, number: int) -> str:
    start, end = _inner(memory, span, number)
    return memory[start:end].decode()


def _fields(memory: mmap.mmap, span: int | Span) -> Iterator[tuple[int, int | Span]]:
    """Yield field numbers with their varint or the place of their bytes. Raises IndexError, ValueError."""
    if isinstance(span, int):
        raise ValueError("a number where a message is due")
    at, end = span
    while at < end:
        tag, at = _varint(memory, at)
        wire = tag & 7
        if wire == _VARINT:
            value, at = _varint(memory, at)
            yield tag >> 3, value
        elif wire == _BYTES:
            length, at = _varint(memory, at)
            if length > end - at:
                raise ValueError("a field that ends past its message")
            yield tag >> 3, (at, at + length)
            at += length
        elif wire in (_FIXED32, _FIXED64):
            at += 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"wire type {wire}")


def _varint(memory: mmap.mmap, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = memory[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("a number of more than ten bytes")
