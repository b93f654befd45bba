"""What the files of a Triton model say beyond its config: the backend they are for, an ONNX model's tensors.

As Triton, this takes a config that names no backend for the one whose model file lies there, and reads
tensors from the model only where the config leaves them out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from fastserve.backends.registry import BY_TRITON_NAME
from fastserve.repository.onnx_graph import read_onnx_graph
from fastserve.repository.triton_defaults import complete, fill_defaults
from fastserve.repository.triton_schema import DynamicBatching, ModelInput, ModelOutput, TritonConfig

FOUND_BATCH_SIZE = 4  # Triton's default for a model that batches and whose config says nothing


def find_file(numbered: Mapping[int, Path], file_name: str, root: Path) -> Path | None:
    """The file of this name in the highest version that has one inside the repository."""
    for _, folder in sorted(numbered.items(), reverse=True):
        file = folder / file_name
        if file.is_file() and file.resolve().is_relative_to(root.resolve()):
            return file
    return None


def complete_from_files(config: TritonConfig, numbered: Mapping[int, Path], root: Path) -> TritonConfig:
    """The config with backend and tensors filled in from version folders. Raises OSError."""
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
        dynamic = None if config.sequence_batching else config.dynamic_batching or DynamicBatching()
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
