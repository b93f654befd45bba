"""Completes a Triton config: with Triton's defaults (spec 2), and with what the model's files say.

As in Triton, a config that names no backend is of the backend whose model file lies there, and tensors are
read from the model only where the config leaves them out.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from fastserve.repository.triton_config.onnx_graph import read_onnx_graph
from fastserve.tensor import TensorSpec

IDLE_US = 1_000_000  # a sequence that says nothing for so long is forgotten (spec 4)

# platform -> backend, for files that name only the older of the two
PLATFORMS = {
    **{entry.triton_platform: name for name, entry in BY_TRITON_NAME.items() if entry.triton_platform},
    "tensorrt_plan": "tensorrt",
    "pytorch_libtorch": "pytorch",
    "tensorflow_graphdef": "tensorflow",
    "tensorflow_savedmodel": "tensorflow",
}

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
            "platform": (entry.triton_platform if entry else "") or config.platform,
            "default_model_filename": config.default_model_filename or (entry.model_file if entry else ""),
            "optimization": _filled_optimization(config.optimization or ModelOptimizationPolicy()),
        }
    if (
        backend and not config.ensemble
    ):  # how many workers there are depends on it; without one nothing is loaded
        changes["instance_group"] = _filled_groups(config, name, entry)
    return msgspec.structs.replace(config, **changes)


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
        file_name = entry.model_file
        given = config.default_model_filename
        suits = not given or Path(given).suffix == Path(file_name).suffix
        if suits and find_file(numbered, given or file_name, root) is not None:
            return fill_defaults(msgspec.structs.replace(config, backend=backend), config.name)
    return config


def _whole(config: TritonConfig) -> bool:
    tensors: list[ModelInput | ModelOutput] = [*config.input, *config.output]
    told = all(tensor.data_type != "TYPE_INVALID" and tensor.dims for tensor in tensors)
    return bool(config.input and config.output) and told
