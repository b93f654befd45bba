"""The torch backend: a program of PyTorch's in NAME/VERSION/model.pt2, model.pt or model.py (torch_files.py).

    run(arrays)             numpy in and out, on whichever device the instance has; waits for it
    run_on_device(tensors)  torch's tensors of the device, on its current stream; waits for nothing

Of a CPU's batch nothing is copied on the way in: tensors lie over the rows. A model that writes into its
inputs is noticed, at its warm-up at the latest, and gets copies from then on.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastserve.backends.base import read_specs
from fastserve.backends.batch_io import BatchIO
from fastserve.backends.beside import forget_folder
from fastserve.backends.device_claims import bound_memory, unbound_memory
from fastserve.backends.outputs import OutputCheck
from fastserve.backends.registry import find_backend
from fastserve.backends.reshape import reshape, reshapes_of
from fastserve.config.options import Options, read_options
from fastserve.config.torch_options import read_torch
from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.garbage import unsearched
from fastserve.tensor import TensorSpec

if TYPE_CHECKING:
    from fastserve.backends.base import Arrays
    from fastserve.backends.torch_tensors import Tensors

log = logging.getLogger(__name__)


class TorchBackend:
    """Runs a PyTorch model. `device` is torch's name of where it lies."""

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
        """Whether `run_on_device` takes what it has: strings and joined requests are the host's."""
        specs = [*self.inputs.values(), *self.outputs.values()]
        return not self.batch_io and all(spec.dtype.name != "bytes" for spec in specs)

    def load(self) -> None:
        """Opens the model and compiles what is asked for. Raises ConfigError when the config and the model
        disagree or the file is no program, ServeError when torch is missing or refuses it."""
        torch = import_torch()
        from fastserve.backends import torch_files, torch_run

        _set_threads(torch, self._config)
        place = open_device(torch, self.device)
        self._place, self._bound = place, int(self._config.get("device_memory_bytes") or 0)
        bound_memory(torch, place, self._bound)
        path = torch_files.find_file(self._version_dir, self._options, self._file)
        opened = torch_files.open_model(path, place, self._options, self._config, self._instance)
        self._describe(opened)
        self._call = torch_run.make_call(self, opened, self._config)

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
        """Runs one batch; see Backend.run."""
        if self.batch_io:
            return self.run_requests([inputs])[0]
        return self._run(reshape(inputs, self.reshapes[0], batched=self._batched))

    def run_requests(self, requests: Sequence[Arrays]) -> Sequence[Arrays]:
        """The same for a model that is told where its requests begin: one run, the outputs of each."""
        feed = [reshape(request, self.reshapes[0], batched=self._batched) for request in requests]
        parts = self.batch_io.split(self._run(self.batch_io.join(feed)), requests)
        return [self._check(request, part) for request, part in zip(requests, parts, strict=True)]

    def run_on_device(self, inputs: Tensors) -> Tensors:
        """Runs one batch that is on the device; what comes back is there too. Raises as `run` does, and for
        what the device itself says of work that it was given before."""
        outputs = self._call(reshape(inputs, self.reshapes[0], batched=self._batched))
        found: Tensors = reshape(outputs, self.reshapes[1], batched=self._batched)
        return found

    def _run(self, inputs: Arrays) -> Arrays:
        from fastserve.backends.torch_tensors import as_array, as_tensor

        specs = self.inputs
        tensors = {
            name: as_tensor(array, specs.get(name) or _like(name, array)) for name, array in inputs.items()
        }
        if self.device == "cpu":
            outputs = self._call_watched(tensors)
        else:
            there = {n: t.to(self.device) if hasattr(t, "to") else t for n, t in tensors.items()}
            outputs = self._call(there)
        arrays = {name: as_array(tensor, self.outputs[name]) for name, tensor in outputs.items()}
        return reshape(arrays, self.reshapes[1], batched=self._batched)

    def _call_watched(self, tensors: dict[str, Any]) -> Any:
        """A batch may have to run again on what was sent: tensors over its rows are not to be written to."""
        if self._copies:
            return self._call({n: t.clone() if hasattr(t, "clone") else t for n, t in tensors.items()})
        try:
            return self._call(tensors)
        finally:
            if any(getattr(tensor, "_version", 0) for tensor in tensors.values()):
                self._copies = True
                log.warning("the model writes into its inputs: from now on it is given copies")

    def forget_memory(self) -> None:
        """Give back what the allocator keeps for later, after it ran out."""
        if self.device != "cpu":
            forget_cached(import_torch())

    def close(self) -> None:
        """Drops the model, and what memory of the device was kept for it."""
        self._call = None
        forget_folder(self._version_dir)
        if self.device != "cpu":
            forget_cached(import_torch())
            with contextlib.suppress(RuntimeError):  # of a device that has failed
                unbound_memory(import_torch(), self._place, self._bound)


def import_torch() -> Any:
    """Raises ServeError saying what to install."""
    try:
        with unsearched():
            import torch
    except ImportError as error:
        raise ServeError(Kind.FAILED_PRECONDITION, find_backend("torch").missing_text) from error
    return torch


def forget_cached(torch: Any) -> None:
    """Give back to the device what torch keeps for later, where it may: not while a thread of this process
    captures a graph, and what the device itself has to say is said by what runs next."""
    with contextlib.suppress(RuntimeError):
        torch.cuda.empty_cache()


def device_of(config: Mapping[str, Any]) -> str:
    """torch's name of an instance's device. A simulated one has the host's memory. Raises ConfigError."""
    name = str(config.get("device") or "cpu")
    kind, _, number = name.partition(":")
    if kind in ("cpu", "simulated"):
        return "cpu"
    if kind != "cuda" or not (number or "0").isdecimal():
        raise ConfigError(f"device must be cpu, cuda or cuda:N, not {name!r}")
    return f"cuda:{int(number or 0)}"


def open_device(torch: Any, name: str) -> Any:
    """The device, made this thread's own. Raises ConfigError when it is not there."""
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        why = "was built without CUDA" if not torch.version.cuda else "sees no GPU"
        raise ConfigError(f"device {name!r}: this PyTorch {torch.__version__} {why}")
    number, count = int(name.partition(":")[2] or 0), torch.cuda.device_count()
    if number >= count:
        raise ConfigError(f"device {name!r}: there are {count} GPUs, counted from 0")
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def _set_threads(torch: Any, config: Mapping[str, Any]) -> None:
    if config.get("threads", 1):
        torch.set_num_threads(int(config.get("threads", 1)))
    inter_op = read_options(config).session.inter_op_threads or 1
    with contextlib.suppress(RuntimeError):  # may be said once in a process
        torch.set_num_interop_threads(inter_op)


def _rows_of_specs(specs: Sequence[TensorSpec], batched: bool) -> dict[str, TensorSpec]:
    """Without the batch axis, which must be free in the model. Raises ConfigError."""
    found = {}
    for spec in specs:
        if batched and (not spec.shape or spec.shape[0] != -1):
            text = f"{spec.name!r} has no free first axis: its shape is {list(spec.shape or ())}"
            raise ConfigError(f"{text}; export it with dynamic_shapes, or set max_batch_size to 0")
        found[spec.name] = TensorSpec(spec.name, spec.dtype, (spec.shape or ())[int(batched) :])
    return found


def _like(name: str, array: Any) -> TensorSpec:
    """Of an input that the server makes, and no client declares."""
    from fastserve.tensor import DTYPES

    return TensorSpec(name, DTYPES[array.dtype.name], None)
