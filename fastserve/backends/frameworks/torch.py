"""The torch backend: a program of PyTorch's in NAME/VERSION/model.pt2, model.pt or model.py (torch_program).

    run(arrays)             numpy in and out, on whichever device the instance has; waits for it
    run_on_device(tensors)  torch's tensors of the device, on its current stream; waits for nothing
    make_call(...)          names to arguments, dtypes, torch.compile or CUDA graphs, checked outputs

Nothing of a CPU's batch is copied on the way in: tensors lie over the rows. A model that writes into its
inputs is noticed, at its warm-up at the latest, and gets copies from then on.

There is one CUDA graph for each batch size, with inputs of its own. A replay fills them, runs the graph and
copies its outputs, all in the order of the stream: the next replay may begin while these are being read.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastserve.backends.base import read_specs
from fastserve.backends.batch_io import BatchIO, JoinsRequests, OutputCheck, reshape, reshapes_of
from fastserve.backends.frameworks.python import forget_folder
from fastserve.backends.frameworks.torch_program import InputPlan, OutputPlan
from fastserve.backends.frameworks.torch_tensors import (
    CAPTURING,
    TensorCheck,
    Tensors,
    as_array,
    as_tensor,
    bound_memory,
    device_of,
    import_torch,
    open_device,
    release_cached,
    rows_of,
    torch_dtype,
    unbound_memory,
)
from fastserve.errors import ConfigError
from fastserve.settings.model_options import Options, read_options, read_torch
from fastserve.tensor import DTYPES, TensorSpec

if TYPE_CHECKING:
    from fastserve.backends.base import Arrays
    from fastserve.backends.frameworks.torch_program import OpenedProgram
    from fastserve.settings.model_options import TorchOptions


log = logging.getLogger(__name__)
Call = Callable[[Tensors], Tensors]
_GRAPHED = ("reduce-overhead", "max-autotune")  # modes of torch.compile that make CUDA graphs themselves
_GRAPH_WARMUPS = 3  # before a capture: what allocates and chooses kernels has to have done it


def make_call(backend: TorchBackend, opened: OpenedProgram, config: Mapping[str, Any]) -> Call:
    """Return the callable that runs a batch of tensors. Compiles and captures what the options ask for, and
    runs every batch size once."""
    import torch

    options, batched = read_torch(config), int(config.get("max_batch_size", 0)) > 0
    _cast_weights(opened, options)
    names = [*backend.inputs, *sorted(backend.batch_io.names)]
    inputs, outputs = InputPlan(names, opened.forward), OutputPlan(list(backend.outputs))
    mixed = options.dtype != "auto" or options.autocast != "off"
    specs = _before_reshape(backend.outputs, config)
    check = TensorCheck(specs, batched=batched and not backend.batch_io, mixed=mixed)
    model = _compiled(opened, options, config)
    kind = backend.device.partition(":")[0]
    grad = _grad_mode(torch, config)

    def call(tensors: Tensors) -> Tensors:
        with grad(), _autocast(torch, kind, options):
            result = inputs.call(model, _cast_inputs(tensors, options))
            return check(rows_of(tensors, batched=batched), outputs.read(result))

    if options.cuda_graphs and kind == "cuda":
        return _Graphs(call, _sizes(backend, config, "cuda_graphs"), backend, grad)
    if options.compile == "off":
        return call
    graphed = options.compile in _GRAPHED and kind == "cuda"
    with CAPTURING if graphed else nullcontext():
        for size in _sizes(backend, config, "compile"):
            for _ in range(
                _GRAPH_WARMUPS if graphed else 1
            ):  # torch warms up, records, and only then replays
                call(_zeros(backend, size))
    return own_outputs(call) if graphed else call


def own_outputs(call: Call) -> Call:
    """Return a call whose outputs are cloned. torch.compile's CUDA graphs leave outputs where their next run
    writes, and that may begin, in its stream, while these are being copied out in another."""
    return lambda tensors: {name: tensor.clone() for name, tensor in call(tensors).items()}


def _cast_weights(opened: OpenedProgram, options: TorchOptions) -> None:
    """Convert floating-point weights to the dtype of the options."""
    if options.dtype == "auto":
        return
    if opened.kind == "export":
        raise ConfigError("torch.dtype: a torch.export program has its types; export it of model.to(dtype)")
    opened.model = opened.model.to(torch_dtype(options.dtype))


def _compiled(opened: OpenedProgram, options: TorchOptions, config: Mapping[str, Any]) -> Any:
    import torch

    if options.compile == "off":
        return opened.model
    if opened.kind == "script":
        raise ConfigError(
            "torch.compile: a TorchScript program is compiled already; serve a model.py or model.pt2"
        )
    mode = None if options.compile == "default" else options.compile
    return torch.compile(opened.model, mode=mode, backend=options.compile_backend)


def _sizes(backend: TorchBackend, config: Mapping[str, Any], field: str) -> list[int]:
    """Return the batch sizes to compile for. Raises ConfigError where axes are free or no sizes are given."""
    free = [name for name, spec in backend.inputs.items() if spec.row_bytes is None]
    if free:
        raise ConfigError(
            f"torch.{field}: input {free[0]!r} has axes of any length, each of which is a program"
        )
    if not config.get("max_batch_size"):
        return [0]
    sizes = list(config.get("allowed_batch_sizes") or ())
    if not sizes:
        raise ConfigError(
            f"torch.{field}: allowed_batch_sizes must say the sizes, each of which is a program"
        )
    return sizes


def _zeros(backend: TorchBackend, size: int) -> dict[str, Any]:
    """Return zeros for a batch of this size; 0: no batch axis."""
    import torch

    lead = (size,) if size else ()
    zeros = {
        name: torch.zeros(
            (*lead, *(spec.shape or ())), dtype=torch_dtype(spec.dtype.name), device=backend.device
        )
        for name, spec in backend.inputs.items()
    }
    return dict(reshape(zeros, backend.reshapes[0], batched=bool(size)))


def _before_reshape(specs: Mapping[str, TensorSpec], config: Mapping[str, Any]) -> dict[str, TensorSpec]:
    """Return the outputs as the model returns them; clients see them reshaped."""
    options = read_options(config)
    turned = options.reshaped_outputs
    found = {
        n: TensorSpec(n, s.dtype, tuple(turned[n].shape)) if n in turned else s for n, s in specs.items()
    }
    if options.tells_requests or options.ragged_inputs:  # what of a batch is whose is seen when it is split
        return {name: TensorSpec(name, spec.dtype, None) for name, spec in found.items()}
    return found


def _grad_mode(torch: Any, config: Mapping[str, Any]) -> Any:
    """Return inference_mode, or no_grad where a config.pbtxt says INFERENCE_MODE false: views of weights may
    then be kept."""
    told = (config.get("parameters") or {}).get("INFERENCE_MODE")
    off = read_options(config).origin != "model.yaml" and str(told).lower() == "false"
    return torch.no_grad if off else torch.inference_mode


def _autocast(torch: Any, kind: str, options: TorchOptions) -> Any:
    dtype = torch_dtype(options.autocast) if options.autocast != "off" else None
    return torch.autocast(kind, dtype=dtype, enabled=dtype is not None)


def _cast_inputs(tensors: Tensors, options: TorchOptions) -> Tensors:
    if options.dtype == "auto":
        return tensors
    dtype = torch_dtype(options.dtype)
    return {
        name: tensor.to(dtype)
        if hasattr(tensor, "is_floating_point") and tensor.is_floating_point()
        else tensor
        for name, tensor in tensors.items()
    }


class _Graphs:
    """A CUDA graph for each batch size, captured at load. Other sizes run without one.

    One side stream serves all warm-ups and captures: libraries keep workspaces and handles by stream, which
    must not be made during a capture, and captures that share a pool should share a stream
    (torch.cuda.graph). The inputs and outputs of each graph are kept, so no later capture is given their
    memory; what lies between is shared, and a replay is over, in the order of the stream, before the next one
    begins. A capture forbids unsafe calls to its own thread alone: in a shared worker other models go on.
    """

    def __init__(self, call: Call, sizes: list[int], backend: TorchBackend, grad: Any) -> None:
        import torch

        self._call, self._torch, self._grad = call, torch, grad
        self._graphs: dict[int, tuple[Any, dict[str, Any], Tensors]] = {}
        self._batched = sizes != [0]
        pool, self._aside = None, torch.cuda.Stream()
        for size in reversed(sizes):  # the largest first: smaller ones share its memory
            given = _zeros(backend, size)
            with CAPTURING:
                graph, results = self._capture(given, pool)
            pool = pool or graph.pool()
            self._graphs[size] = graph, given, results
        log.info("CUDA graphs captured for batches of %s", ", ".join(map(str, sizes)))

    def _capture(self, given: dict[str, Any], pool: Any) -> tuple[Any, Tensors]:
        torch, aside = self._torch, self._aside
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(_GRAPH_WARMUPS):
                self._call(given)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=aside, capture_error_mode="thread_local"):
            results = self._call(given)
        return graph, results

    def __call__(self, tensors: Tensors) -> Tensors:
        size = rows_of(tensors, batched=self._batched) if self._batched else 0
        found = self._graphs.get(size)
        if found is None:
            return self._call(tensors)
        graph, given, results = found
        with self._grad():
            for name, tensor in tensors.items():
                given[name].copy_(tensor, non_blocking=True)
            graph.replay()
            return {name: tensor.clone() for name, tensor in results.items()}


class TorchBackend(JoinsRequests):
    """Runs a PyTorch model. `device` is torch's name of its device."""

    def __init__(self, config: Mapping[str, Any], version_dir: Path, instance: int) -> None:
        self.inputs: dict[str, TensorSpec] = {}
        self.outputs: dict[str, TensorSpec] = {}
        self.device = device_of(config)
        self._config, self._version_dir, self._instance = config, version_dir, instance
        self._batched = int(config.get("max_batch_size", 0)) > 0
        self._options = read_torch(config)
        options = read_options(config)
        self._file, self._said = options.model_file, options.origin
        self.reshapes = reshapes_of(options)
        self.batch_io = BatchIO(options if self._batched else Options())
        self._call: Any = None
        self._place: Any = None
        self._bound = 0
        self._copies = False

    @property
    def takes_device_tensors(self) -> bool:
        """Whether `run_on_device` may be called: not for strings and joined requests, which stay on the
        host."""
        specs = [*self.inputs.values(), *self.outputs.values()]
        return not self.batch_io and all(spec.dtype.name != "bytes" for spec in specs)

    def load(self) -> None:
        """Open the model and compile it as the options say. Raises ConfigError when the config and the model
        disagree or the file is no program, ServeError when torch is missing or refuses it."""
        from fastserve.backends.frameworks import torch_program

        # A file that is no program is refused before PyTorch is imported, which takes seconds.
        path = torch_program.find_file(self._version_dir, self._options, self._file)
        if path.suffix != ".py":
            torch_program.kind_of_file(path)
        torch = import_torch()
        _set_threads(torch, self._config)
        place = open_device(torch, self.device)
        self._place, self._bound = place, int(self._config.get("device_memory_bytes") or 0)
        bound_memory(torch, place, self._bound)
        opened = torch_program.open_model(path, place, self._options, self._config, self._instance)
        self._describe(opened)
        self._call = make_call(self, opened, self._config)

    def _describe(self, opened: Any) -> None:
        declared = [read_specs(self._config.get(side)) for side in ("inputs", "outputs")]
        told = [_rows_of_specs(specs, self._batched) for specs in (opened.inputs, opened.outputs)]
        for side, specs, known in zip(("inputs", "outputs"), declared, told, strict=True):
            if not specs and not known:
                text = f"a file of this kind does not tell its {side}: declare them in {self._said}"
                raise ConfigError(text)
        self.inputs, self.outputs = declared[0] or told[0], declared[1] or told[1]
        self._check = OutputCheck(self.outputs, batched=self._batched)  # of what was split

    def run(self, inputs: Arrays) -> Arrays:
        """Run one batch; see Backend.run."""
        if self.batch_io:
            return self.run_requests([inputs])[0]
        return self._run(reshape(inputs, self.reshapes[0], batched=self._batched))

    def run_requests(self, requests: Sequence[Arrays]) -> Sequence[Arrays]:
        """Run several requests as one batch; see SupportsRequestJoining."""
        feed = [reshape(request, self.reshapes[0], batched=self._batched) for request in requests]
        parts = self.batch_io.split(self._run(self.batch_io.join(feed)), requests)
        return [self._check(request, part) for request, part in zip(requests, parts, strict=True)]

    def run_on_device(self, inputs: Tensors) -> Tensors:
        """Enqueue one batch that is on the device; see SupportsDevice."""
        outputs = self._call(reshape(inputs, self.reshapes[0], batched=self._batched))
        found: Tensors = reshape(outputs, self.reshapes[1], batched=self._batched)
        return found

    def _run(self, inputs: Arrays) -> Arrays:
        specs = self.inputs
        tensors = {
            name: as_tensor(array, specs.get(name) or _spec_of(name, array)) for name, array in inputs.items()
        }
        if self.device == "cpu":
            outputs = self._call_watched(tensors)
        else:
            there = {n: t.to(self.device) if hasattr(t, "to") else t for n, t in tensors.items()}
            outputs = self._call(there)
        arrays = {name: as_array(tensor, self.outputs[name]) for name, tensor in outputs.items()}
        return reshape(arrays, self.reshapes[1], batched=self._batched)

    def _call_watched(self, tensors: dict[str, Any]) -> Any:
        """Run a CPU batch, and notice whether the model writes into its inputs: a second run of the batch
        must see what was sent."""
        if self._copies:
            return self._call({n: t.clone() if hasattr(t, "clone") else t for n, t in tensors.items()})
        try:
            return self._call(tensors)
        finally:
            if any(getattr(tensor, "_version", 0) for tensor in tensors.values()):
                self._copies = True
                log.warning("the model writes into its inputs: from now on it is given copies")

    def release_memory(self) -> None:
        """Empty torch's cache, after the device ran out of memory."""
        if self.device != "cpu":
            release_cached(import_torch())

    def close(self) -> None:
        """Drop the model and the device memory that torch keeps for it."""
        self._call = None
        forget_folder(self._version_dir)
        if self.device != "cpu":
            release_cached(import_torch())
            with contextlib.suppress(RuntimeError):  # of a device that has failed
                unbound_memory(import_torch(), self._place, self._bound)


def _set_threads(torch: Any, config: Mapping[str, Any]) -> None:
    if config.get("threads", 1):
        torch.set_num_threads(int(config.get("threads", 1)))
    inter_op = read_options(config).session.inter_op_threads or 1
    with contextlib.suppress(RuntimeError):  # may be said once in a process
        torch.set_num_interop_threads(inter_op)


def _rows_of_specs(specs: Sequence[TensorSpec], batched: bool) -> dict[str, TensorSpec]:
    """Return the specs without the batch axis, which must be free in the model. Raises ConfigError."""
    found = {}
    for spec in specs:
        if batched and (not spec.shape or spec.shape[0] != -1):
            text = f"{spec.name!r} has no free first axis: its shape is {list(spec.shape or ())}"
            raise ConfigError(f"{text}; export it with dynamic_shapes, or set max_batch_size to 0")
        found[spec.name] = TensorSpec(spec.name, spec.dtype, (spec.shape or ())[int(batched) :])
    return found


def _spec_of(name: str, array: Any) -> TensorSpec:
    """Return the spec of an input that the server computes and no client declares."""
    return TensorSpec(name, DTYPES[array.dtype.name], None)
