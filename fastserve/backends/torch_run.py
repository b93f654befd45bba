"""One run of a PyTorch model: names to arguments, the types it computes in, compiled or replayed, outputs
held to their specs.

    call = make_call(backend, opened, config)
    call(tensors) -> tensors                    on the device and its current stream; no synchronisation

CUDA graphs: one for each size of batch, of inputs of its own. A replay is what fills them, runs the graph and
copies its outputs, all in the order of the stream: the next replay may begin while these are being read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from fastserve.backends.capturing import CAPTURING
from fastserve.backends.reshape import reshape
from fastserve.backends.torch_names import InputPlan, OutputPlan
from fastserve.backends.torch_tensors import TensorCheck, Tensors, rows_of, torch_dtype
from fastserve.config.options import read_options
from fastserve.errors import ConfigError

if TYPE_CHECKING:
    from fastserve.backends.torch import TorchBackend
    from fastserve.backends.torch_files import Opened
    from fastserve.config.torch_options import TorchOptions
    from fastserve.tensor import TensorSpec

log = logging.getLogger(__name__)

Call = Callable[[Tensors], Tensors]
_GRAPHED = ("reduce-overhead", "max-autotune")  # modes of torch.compile that make CUDA graphs themselves
_GRAPH_WARMUPS = 3  # before a capture: what allocates and chooses kernels has to have done it


def make_call(backend: TorchBackend, opened: Opened, config: Mapping[str, Any]) -> Call:
    """Compiles and captures what the options ask for, and runs every size of batch it is for."""
    import torch

    from fastserve.config.torch_options import read_torch

    options, batched = read_torch(config), int(config.get("max_batch_size", 0)) > 0
    _turn(opened, options)
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
                call(_made_up(backend, size))
    return own_outputs(call) if graphed else call


def own_outputs(call: Call) -> Call:
    """Outputs in memory of their own: what torch.compile replays as a CUDA graph leaves them where its next
    run writes, and that may begin, in its stream, while these are being copied out in another."""
    return lambda tensors: {name: tensor.clone() for name, tensor in call(tensors).items()}


def _turn(opened: Opened, options: TorchOptions) -> None:
    """Floating-point weights become the type asked for."""
    if options.dtype == "auto":
        return
    if opened.kind == "export":
        raise ConfigError("torch.dtype: a torch.export program has its types; export it of model.to(dtype)")
    opened.model = opened.model.to(torch_dtype(options.dtype))


def _compiled(opened: Opened, options: TorchOptions, config: Mapping[str, Any]) -> Any:
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
    """Sizes of batch there are. Raises ConfigError where there are too many."""
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


def _made_up(backend: TorchBackend, size: int) -> dict[str, Any]:
    """Zeros for a batch of this size; 0: no batch axis."""
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
    """The outputs as the model gives them; clients see them reshaped."""
    from fastserve.tensor import TensorSpec

    options = read_options(config)
    turned = options.reshaped_outputs
    found = {
        n: TensorSpec(n, s.dtype, tuple(turned[n].shape)) if n in turned else s for n, s in specs.items()
    }
    if options.tells_requests or options.ragged_inputs:  # what of a batch is whose is seen when it is split
        return {name: TensorSpec(name, spec.dtype, None) for name, spec in found.items()}
    return found


def _grad_mode(torch: Any, config: Mapping[str, Any]) -> Any:
    """inference_mode, unless a config.pbtxt says INFERENCE_MODE false: views of weights may then be kept."""
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
    """A CUDA graph for each size of batch, captured at once. Other sizes run as they are.

    One side stream for all warm-ups and captures: libraries keep workspaces and handles by stream, which must
    not be made during a capture, and captures that share a pool should share a stream (torch.cuda.graph). The
    inputs and outputs of each graph are kept, so no later capture is given their memory; what lies between is
    shared, and a replay is over, in the order of the stream, before the next one begins. A capture forbids
    unsafe calls to its own thread alone: in a shared worker other models go on.
    """

    def __init__(self, call: Call, sizes: list[int], backend: TorchBackend, grad: Any) -> None:
        import torch

        self._call, self._torch, self._grad = call, torch, grad
        self._graphs: dict[int, tuple[Any, dict[str, Any], Tensors]] = {}
        self._batched = sizes != [0]
        pool, self._aside = None, torch.cuda.Stream()
        for size in reversed(sizes):  # the largest first: smaller ones share its memory
            given = _made_up(backend, size)
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
