"""The onnx backend: ONNX Runtime on NAME/VERSION/model.onnx.

Inputs and outputs are read from the model; what model.yaml declares narrows them (a length for a
symbolic axis, a choice of outputs) and is checked against the model. With max_batch_size > 0 the first
axis of every tensor is the batch and must be symbolic in the model. A config.pbtxt may also name another
file, reshape tensors and set the session's options.

Numeric inputs reach the session without a copy: ONNX Runtime wraps contiguous arrays where they lie. On a
device batches overlap where they can. They are bound to the session (I/O binding), on the stream that the
worker computes on:

    place = find_device_place(config)           None: one batch at a time, as ONNX Runtime copies by itself
    session = InferenceSession(..., providers=place.provider_options(...))
    bound = BoundSession(place, session, ...)
    bound.run({"x": tensor}) -> {"y": tensor}   enqueued, not waited for

The pipeline is torch's (workers/device/cuda.py): its memory, events and streams. ONNX Runtime is given its
compute stream (user_compute_stream, which makes it the only one of the session) and told not to wait at the
end of a run (disable_synchronize_execution_providers): results are there when the stream has come so far. A
session that does not say it has this very stream is not used so: it would be read before it has written.

Nor is one that takes an input, or gives an output, on the host: of such an input binding makes a copy at
once, in some releases on the legacy default stream, which does not wait for ours: of what lay there before. A
session tells where they are from ONNX Runtime 1.23 on; an older one is not used so.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastserve.backends.base import read_specs
from fastserve.backends.batch_io import BatchIO, JoinsRequests, OutputCheck, reshape, reshapes_of
from fastserve.backends.frameworks.torch_tensors import CAPTURING, release_cached, torch_dtype
from fastserve.backends.model_errors import clean, kind_of
from fastserve.backends.registry import find_backend
from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.settings.model_options import Options, SessionOptions, read_options
from fastserve.tensor import DTYPES, TensorSpec, fits_shape
from fastserve.util.memory import gc_paused

if TYPE_CHECKING:
    from fastserve.backends.base import Arrays


# ONNX Runtime's names of tensor types that numpy can carry
_WORDS = {"float32": "float", "float64": "double", "bytes": "string"}
_DTYPES = {
    f"tensor({_WORDS.get(name, name)})": name for name in DTYPES if not name.startswith(("bfloat", "complex"))
}


log = logging.getLogger(__name__)
CUDA, OPENVINO = "CUDAExecutionProvider", "OpenVINOExecutionProvider"
NOT_ON_CUDA = (
    "device {!r}: ONNX Runtime has opened the model on the CPU; its log says which library it misses"
)


class OnnxBackend(JoinsRequests):
    """Runs an ONNX model."""

    def __init__(self, config: Mapping[str, Any], version_dir: Path, instance: int) -> None:
        self.inputs: dict[str, TensorSpec] = {}
        self.outputs: dict[str, TensorSpec] = {}
        self._config = config
        self._batched = int(config.get("max_batch_size", 0)) > 0
        self._version_dir = version_dir
        self._session: Any = None
        self._on_device = str(config.get("device") or "cpu").startswith("cuda")
        self._place: Any = None
        self._bound: Any = None
        self._strings: list[str] = []
        self._wanted: list[str] = []
        options = read_options(config)
        self._file = options.model_file or "model.onnx"
        self._said = options.origin
        self._reshapes = reshapes_of(options)
        self.batch_io = BatchIO(options if self._batched else Options())
        self._optional = options.optional_inputs

    def load(self) -> None:
        """Open the session. Raises ConfigError when model.yaml and the model disagree, ServeError when ONNX
        Runtime is missing or refuses the model."""
        path = self._version_dir / self._file
        if not path.is_file():
            raise ConfigError(f"the version's folder has no file {self._file}")
        self._place = self._find_place()
        with CAPTURING if self._on_device else nullcontext():
            self._session = _open_session(path, self._config, self._place.options if self._place else {})
        declared_inputs = read_specs(self._config.get("inputs"))
        declared_outputs = read_specs(self._config.get("outputs"))
        nodes = [node for node in self._session.get_inputs() if node.name not in self.batch_io.names]
        self.inputs = self._merge("input", nodes + self._defaults(), declared_inputs)
        self.outputs = self._merge("output", self._session.get_outputs(), declared_outputs)
        self._wanted = list(self.outputs)
        self._strings = [name for name, spec in self.inputs.items() if spec.dtype.name == "bytes"]
        self._check = OutputCheck(self.outputs, batched=self._batched)
        self._bound = self._bind() if self._place is not None else None

    def _find_place(self) -> Any:
        if str(self._config.get("device") or "cpu") == "cpu":
            return None
        return find_device_place(self._config)

    def _bind(self) -> Any:
        place, session = self._place, self._session
        plain = not (self.batch_io or any(self._reshapes) or self._optional)
        if not (plain and may_bind({**self.inputs, **self.outputs}) and place.may_run(session)):
            return None
        return BoundSession(place, session, self.inputs, self.outputs, batched=self._batched)

    @property
    def takes_device_tensors(self) -> bool:
        """Whether `run_on_device` may be called."""
        return self._bound is not None

    @property
    def compute_stream(self) -> Any:
        """The stream that runs are enqueued on; None for any."""
        return self._place.stream if self._place is not None else None

    def run_on_device(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Enqueue one batch of tensors of the device; the results are there too, once the stream has come so
        far. Raises as `run` does."""
        try:
            found: Mapping[str, Any] = self._bound.run(inputs)
        except Exception as error:
            raise _run_fault(error) from error
        return found

    def release_memory(self) -> None:
        """Give back what torch's allocator keeps, after the device ran out of memory."""
        if self._bound is not None:
            self._bound.release_memory()

    def run(self, inputs: Arrays) -> Arrays:
        """Run one batch; see Backend.run. Raises ServeError: INVALID_ARGUMENT when the model refuses the
        inputs, INTERNAL otherwise."""
        if self.batch_io:
            return self.run_requests([inputs])[0]
        outputs = self._run(self._feed(inputs))
        return self._check(inputs, reshape(outputs, self._reshapes[1], batched=self._batched))

    def run_requests(self, requests: Sequence[Arrays]) -> list[Arrays]:
        """Run several requests as one batch; see SupportsRequestJoining."""
        joined = self.batch_io.join([self._feed(request) for request in requests])
        parts = self.batch_io.split(self._run(joined), requests)
        return [
            self._check(request, reshape(part, self._reshapes[1], batched=True))
            for request, part in zip(requests, parts, strict=True)
        ]

    def _feed(self, inputs: Arrays) -> Arrays:
        feed = inputs if not self._strings else self._decode_strings(inputs)
        return reshape(feed, self._reshapes[0], batched=self._batched)

    def _run(self, feed: Arrays) -> Arrays:
        try:
            results = self._session.run(self._wanted, feed)
        except Exception as error:
            raise _run_fault(error) from error
        return dict(zip(self._wanted, results, strict=True))

    @property
    def binds_outputs(self) -> bool:
        """Whether `run_into` may be called: on a device, for numbers that need no conversion."""
        numbers = all(spec.dtype.name != "bytes" for spec in (*self.inputs.values(), *self.outputs.values()))
        return self._on_device and numbers and not self.batch_io and not any(self._reshapes)

    def run_into(self, inputs: Arrays, outputs: Arrays) -> None:
        """Run one batch by I/O binding: the session copies its outputs into `outputs` itself. Raises as `run`
        does, also for outputs of other shapes."""
        binding = self._session.io_binding()
        try:
            for name, array in inputs.items():
                binding.bind_cpu_input(name, array)
            for name, array in outputs.items():
                at = array.__array_interface__["data"][0]
                binding.bind_output(name, "cpu", 0, array.dtype, list(array.shape), at)
            self._session.run_with_iobinding(binding)
        except Exception as error:
            raise _run_fault(error) from error

    def close(self) -> None:
        """Drop the session."""
        self._session = self._bound = None

    def _defaults(self) -> list[Any]:
        """Return the inputs that the model has default values for, where the config makes them optional."""
        nodes = self._session.get_overridable_initializers()
        return [node for node in nodes if node.name in self._optional]

    def _merge(self, role: str, nodes: list[Any], declared: dict[str, TensorSpec]) -> dict[str, TensorSpec]:
        names = [node.name for node in nodes]
        for name in declared:
            if name not in names:
                raise ConfigError(f"the model has no {role} {name!r}; its {role}s are {', '.join(names)}")
        if role == "input" and declared and len(declared) < len(names):
            missing = ", ".join(name for name in names if name not in declared)
            raise ConfigError(f"the model needs inputs that {self._said} does not declare: {missing}")
        by_name = {node.name: node for node in nodes}
        for name in declared or names:
            _refuse_type(role, by_name[name])
        return {name: self._merge_one(role, by_name[name], declared.get(name)) for name in declared or names}

    def _merge_one(self, role: str, node: Any, declared: TensorSpec | None) -> TensorSpec:
        if declared is not None and node.name in (*self.batch_io.ragged, *self.batch_io.scattered):
            return _merge_flat(role, node, declared)
        if declared is None and self._batched and role == "output" and _is_fixed(node):
            raise ConfigError(_no_rows_text(node, self._session.get_outputs()))
        if declared is not None and self._batched and role == "output" and _is_fixed(node):
            return _merge_fixed(node, declared, self._said)
        found = self._read_node(role, node)
        if declared is None:
            return found
        if declared.dtype is not found.dtype:
            text = f"{self._said} says {declared.dtype.name}, the model {found.dtype.name}"
            raise ConfigError(f"{role} {node.name!r}: {text}")
        if found.shape is None or declared.shape is None:
            return declared if declared.shape is not None else found
        seen = declared.shape
        if role == "input" and node.name in self._reshapes[0]:
            seen = self._reshapes[0][node.name][1]
        if role == "output" and node.name in self._reshapes[1]:
            seen = self._reshapes[1][node.name][0]
        if not fits_shape(seen, found.shape):
            text = f"{self._said} says shape {list(seen)}, the model {list(found.shape)}"
            raise ConfigError(f"{role} {node.name!r}: {text}" + " (without the batch axis)" * self._batched)
        return declared

    def _read_node(self, role: str, node: Any) -> TensorSpec:
        dims = [dim if isinstance(dim, int) and dim >= 0 else -1 for dim in node.shape]
        dtype = DTYPES[_DTYPES[node.type]]
        if not self._batched:
            return TensorSpec(node.name, dtype, tuple(dims))
        if not dims and role == "output":  # ONNX Runtime shows an unknown rank as no axes
            return TensorSpec(node.name, dtype, None)
        if not dims or dims[0] != -1:
            text = f"{role} {node.name!r} has no batch axis: its shape is {dims}"
            raise ConfigError(f"{text}; set max_batch_size to 0, or export it with a symbolic first axis")
        return TensorSpec(node.name, dtype, tuple(dims[1:]))

    def _decode_strings(self, inputs: Arrays) -> Arrays:
        feed = dict(inputs)
        for name in self._strings:
            if name in feed:
                feed[name] = _decode(name, inputs[name])
        return feed


def _refuse_type(role: str, node: Any) -> None:
    if node.type in _DTYPES:
        return
    text = f"{role} {node.name!r} is a {node.type}, which cannot be served"
    if "map(" in node.type:
        text += (
            ": ZipMap makes a dictionary of each row; convert the model without it "
            "(skl2onnx.to_onnx(model, X[:1], options={'zipmap': False}), "
            "onnxmltools.convert_lightgbm(model, initial_types=..., zipmap=False))"
        )
    raise ConfigError(text + "; or declare the outputs to serve, without it" * (role == "output"))


def _is_fixed(node: Any) -> bool:
    """Return whether an output declares a fixed number of rows."""
    return bool(node.shape) and isinstance(node.shape[0], int)


def _merge_fixed(node: Any, declared: TensorSpec, said: str) -> TensorSpec:
    """Return the declared spec of an output with a fixed number of rows. Converters write wrong shapes
    (LightGBM's label is [1]); each run is checked."""
    if _DTYPES[node.type] != declared.dtype.name:
        text = f"{said} says {declared.dtype.name}, the model {_DTYPES[node.type]}"
        raise ConfigError(f"output {node.name!r}: {text}")
    return declared


def _no_rows_text(fixed: Any, outputs: Sequence[Any]) -> str:
    """Return the error of an output without a batch axis, with the model.yaml that declares one."""
    shapes = {one.name: [n if isinstance(n, int) else -1 for n in one.shape[1:]] for one in outputs}
    lines = ", ".join(
        f"{one.name}: {{dtype: {_DTYPES.get(one.type, '?')}, shape: {shapes[one.name]}}}" for one in outputs
    )
    return (
        f"output {fixed.name!r} has no batch axis: its shape is {list(fixed.shape)}; if it has a row for "
        "each row of the inputs all the same (LightGBM's converter writes labels so), say it in model.yaml: "
        f"backend: onnx, outputs: {{{lines}}}; if not, set max_batch_size to 0"
    )


def _merge_flat(role: str, node: Any, declared: TensorSpec) -> TensorSpec:
    """Return the declared spec of a ragged tensor: the model sees all requests concatenated, without axes."""
    found = _DTYPES.get(node.type, node.type)
    if found != declared.dtype.name:
        raise ConfigError(f"{role} {node.name!r}: config.pbtxt says {declared.dtype.name}, the model {found}")
    if role == "input" and (len(node.shape) != 1 or isinstance(node.shape[0], int)):
        text = f"allow_ragged_batch wants a model that takes it with shape [-1], not {node.shape}"
        raise ConfigError(f"input {node.name!r}: {text}")
    return declared


def _open_session(path: Path, config: Mapping[str, Any], on_cuda: Mapping[str, Any] = {}) -> Any:
    # Read once, at import. Without it, 1.29 and later write a device id under the user's cache folder
    # and send events to their maker (microsoft/onnxruntime#27379).
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        with gc_paused():
            import onnxruntime
    except ImportError as error:
        raise ServeError(Kind.FAILED_PRECONDITION, find_backend("onnx").missing_text) from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = config.get("threads", 1)  # 0: as ONNX Runtime sees fit
    # Idle pool threads must not spin away the core the front process needs.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    asked = read_options(config).session
    _set_options(options, asked, onnxruntime)
    device, nbytes = str(config.get("device") or "cpu"), int(config.get("device_memory_bytes") or 0)
    providers = _providers(device, onnxruntime.get_available_providers(), nbytes, on_cuda)
    if "openvino" in asked.accelerators:  # the one Triton knows on a CPU: another way to the same results
        if OPENVINO in onnxruntime.get_available_providers():
            providers.insert(0, OPENVINO)
        else:
            log.warning(
                "cpu_execution_accelerator openvino has no effect: this ONNX Runtime has no %s", OPENVINO
            )
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=providers)
    except Exception as error:
        raise ServeError(Kind.FAILED_PRECONDITION, _words(error, str(path.parent))) from error
    session.disable_fallback()  # else failed device runs move to the CPU in silence
    if device.startswith("cuda") and CUDA not in session.get_providers():
        raise ServeError(Kind.FAILED_PRECONDITION, NOT_ON_CUDA.format(device))
    return session


def _set_options(options: Any, asked: SessionOptions, onnxruntime: Any) -> None:
    levels = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = {
        -1: levels.ORT_ENABLE_BASIC,
        1: levels.ORT_ENABLE_EXTENDED,
        2: levels.ORT_DISABLE_ALL,
    }.get(asked.graph_level, levels.ORT_ENABLE_ALL)
    options.inter_op_num_threads = asked.inter_op_threads or 1
    if asked.parallel:
        options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL


def _providers(
    device: str, available: list[str], nbytes: int = 0, on_cuda: Mapping[str, Any] = {}
) -> list[Any]:
    kind, _, number = device.partition(":")
    if kind == "cpu":
        return ["CPUExecutionProvider"]
    if kind != "cuda" or not (number or "0").isdecimal():
        raise ConfigError(f"device must be cpu, cuda or cuda:N, not {device!r}")
    if CUDA not in available:
        raise ConfigError(f"device {device!r}: this ONNX Runtime has no CUDA (install onnxruntime-gpu)")
    limit = {"gpu_mem_limit": nbytes} if nbytes else {}
    return [(CUDA, {"device_id": int(number or 0), **limit, **on_cuda}), "CPUExecutionProvider"]


def _decode(name: str, array: Any) -> Any:
    # ONNX Runtime takes str, and would pass bytes on as their repr.
    try:
        texts = [item.decode() if isinstance(item, bytes) else item for item in array.flat]
    except UnicodeDecodeError as error:
        text = f"input {name!r} holds a string that is not UTF-8"
        raise ServeError(Kind.INVALID_ARGUMENT, text) from error
    decoded = np.empty(len(texts), dtype=object)
    decoded[:] = texts
    return decoded.reshape(array.shape)


def _run_fault(error: Exception) -> ServeError:
    """Return the ServeError of a run. ONNX Runtime has one exception class per status, INVALID_ARGUMENT among
    them."""
    refused = type(error).__name__ == "InvalidArgument"
    return ServeError(Kind.INVALID_ARGUMENT if refused else kind_of(error), _words(error))


def _words(error: Exception, *private: str) -> str:
    return clean(f"ONNX Runtime: {str(error).removeprefix('[ONNXRuntimeError] : ')}", *private)


CUDA_MEMORY = "Cuda"  # ONNX Runtime's name of a device's memory; of the host's it has Cpu and CudaPinned
ALONE = "%s: ONNX Runtime copies by itself, one batch at a time: %s"
Tensors = Mapping[str, Any]


@dataclass(frozen=True)
class DevicePlace:
    """The device of a session, as ONNX Runtime names it. `stream` is torch's, None where the host
    computes."""

    kind: str
    number: int
    stream: Any = None

    @property
    def options(self) -> dict[str, Any]:
        """Options of the CUDA provider that select the stream."""
        return {} if self.stream is None else {"user_compute_stream": str(self.stream.cuda_stream)}

    def may_run(self, session: Any) -> bool:
        """Return whether the session computes on this stream, and takes and returns tensors of the device."""
        if self.stream is None:
            return True
        told = session.get_provider_options().get(CUDA, {})
        why = ""
        if any(told.get(name) != value for name, value in self.options.items()):
            why = "it does not compute on the stream it was given"
        elif not hasattr(session, "get_input_memory_infos"):
            why = "this release does not tell where it takes its inputs (1.23 does)"
        elif not all(one.name == CUDA_MEMORY for one in _places_of(session)):
            why = "the model takes or gives tensors on the host"
        if why:
            log.info(ALONE, f"cuda:{self.number}", why)
        return not why


def _places_of(session: Any) -> list[Any]:
    """Return the memory of each input and output, by ONNX Runtime's own plan."""
    return [*session.get_input_memory_infos(), *session.get_output_memory_infos()]


def find_device_place(config: Mapping[str, Any]) -> DevicePlace | None:
    """Return the device of an instance whose batches may overlap, None for others. torch is imported here,
    before ONNX Runtime: it brings the libraries of CUDA along."""
    device = str(config.get("device") or "cpu")
    kind, _, number = device.partition(":")
    if kind != "cuda" or int(config.get("batches_in_flight") or 2) == 1:
        return None
    try:
        import torch
    except (ImportError, OSError):  # or its libraries do not load
        log.info(ALONE, device, "there is no PyTorch")
        return None
    if not torch.cuda.is_available() or int(number or 0) >= torch.cuda.device_count():
        log.info(ALONE, device, "the PyTorch that is installed does not see it")
        return None
    torch.cuda.set_device(int(number or 0))
    return DevicePlace("cuda", int(number or 0), torch.cuda.Stream(int(number or 0)))


def may_bind(specs: Mapping[str, TensorSpec]) -> bool:
    """Return whether all tensors are numbers that torch has, in rows of a fixed size: memory for them can be
    taken before a run."""
    import torch

    return all(
        hasattr(torch, spec.dtype.name) and spec.shape is not None and all(axis > 0 for axis in spec.shape)
        for spec in specs.values()
    )


class BoundSession:
    """Runs a session on tensors of a device, into tensors allocated there."""

    def __init__(
        self,
        place: DevicePlace,
        session: Any,
        inputs: Mapping[str, TensorSpec],
        outputs: Mapping[str, TensorSpec],
        *,
        batched: bool,
    ) -> None:
        import onnxruntime
        import torch

        self._place, self._session, self._batched = place, session, batched
        self._inputs = {name: np.dtype(spec.dtype.name) for name, spec in inputs.items()}
        self._outputs = [
            (name, np.dtype(spec.dtype.name), torch_dtype(spec.dtype.name), tuple(spec.shape or ()))
            for name, spec in outputs.items()
        ]
        self._torch = torch
        self._device = torch.device(place.kind, place.number)
        self._options = onnxruntime.RunOptions()
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def run(self, inputs: Tensors) -> Tensors:
        """Enqueue a run on the current stream, which is the session's. Raises ONNX Runtime's errors, also for
        outputs of another shape."""
        torch, kind, number = self._torch, self._place.kind, self._place.number
        binding = self._session.io_binding()
        given = {name: tensor.contiguous() for name, tensor in inputs.items()}
        for name, tensor in given.items():
            binding.bind_input(name, kind, number, self._inputs[name], list(tensor.shape), tensor.data_ptr())
        rows = next(iter(given.values())).shape[:1] if self._batched else ()
        results = {}
        for name, dtype, kept, shape in self._outputs:
            made = results[name] = torch.empty((*rows, *shape), dtype=kept, device=self._device)
            binding.bind_output(name, kind, number, dtype, list(made.shape), made.data_ptr())
        self._session.run_with_iobinding(binding, self._options)
        return results

    def release_memory(self) -> None:
        """Empty torch's cache, after the device ran out of memory."""
        if self._place.kind == "cuda":
            release_cached(self._torch)
