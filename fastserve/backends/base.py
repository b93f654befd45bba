"""The protocols of backends: the minimum that each one is, and the capabilities that one may declare.

A backend runs one loaded version inside a worker process. Its life:

    create(config, version_dir, instance) -> load() -> run(inputs) ... -> close()

A capability is a protocol `Supports...`: the worker asks for it once, by isinstance, after `load`.
No framework is imported here, and no numpy at run time: the owner of the workers reads this file too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from fastserve.errors import ConfigError
from fastserve.tensor import DTYPES, TensorSpec

if TYPE_CHECKING:
    from typing import TypeAlias

    import numpy as np
    from numpy.typing import NDArray

    from fastserve.backends.triton_api.requests import InferenceRequest

    Arrays: TypeAlias = Mapping[str, NDArray[np.generic]]
    OnFailure: TypeAlias = Callable[[BaseException], None]

_RANK_MAX = 64


class CompletedConfig(ConfigError):
    """The model has completed fields of its configuration that its queue depends on: load it again with these
    `fields`, which are in Triton's form."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        said = ", ".join(f"{name}: {value}" for name, value in fields.items())
        super().__init__(f"auto_complete_config sets {said}")
        self.fields = dict(fields)


class Backend(Protocol):
    """The minimum: one loaded version on one device. `inputs` and `outputs` are valid once `load` has
    returned."""

    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]

    def load(self) -> None:
        """Load the model; may take minutes. What it raises fails the load, with that text."""

    def run(self, inputs: Arrays) -> Arrays:
        """Run one batch: arrays by name in, arrays by name out.

        Shapes are `[rows, *spec.shape]`, or `spec.shape` when max_batch_size is 0. Numbers are arrays of the
        spec's dtype (bfloat16: uint16 holding its bits), strings are object arrays of bytes (in; out also of
        str). The inputs are read-only views of shared memory, valid only during the call. Every declared
        output is returned, exactly of its dtype, with as many rows as came in. A ServeError keeps its kind
        and text; anything else is INTERNAL.
        """

    def close(self) -> None:
        """Release everything. Called once, also after a load that failed half-way."""


@runtime_checkable
class SupportsSignatures(Protocol):
    """A backend whose models have several entry points, each with tensors of its own."""

    @property
    def signatures(self) -> Mapping[str, Mapping[str, Any]]:
        """Signatures by name: `{"method": "predict", "inputs": {alias: input}, "outputs": {alias: output}}`.

        Empty where the model has none. `method` is predict, classify or regress; aliases are the names that
        clients use. A batch brings the inputs of one signature, and `run` returns the outputs of those alone
        whose inputs are there.
        """


@runtime_checkable
class SupportsRequestJoining(Protocol):
    """A backend that is given the requests of a batch one by one, and joins them by itself."""

    @property
    def joins_requests(self) -> bool:
        """Whether this model's requests are joined so; where False, `run` gets them joined."""

    @property
    def ragged_inputs(self) -> Collection[str]:
        """Names of inputs whose rows may differ in shape from request to request of one batch."""

    def run_requests(self, requests: Sequence[Arrays]) -> Sequence[Arrays]:
        """Run one batch: the inputs of each request in, `[rows, ...]`, and the outputs of each out, in order.

        Raises as `run` does; a failure is the whole batch's.
        """


@runtime_checkable
class SupportsOutputBinding(Protocol):
    """A backend that computes into memory it is given (ONNX Runtime's I/O binding)."""

    @property
    def binds_outputs(self) -> bool:
        """Whether `run_into` may be called for this model."""

    def run_into(self, inputs: Arrays, outputs: Arrays) -> None:
        """Run one batch into `outputs`: writable arrays of shared memory, `[rows, *spec.shape]` and of the
        specs' dtypes, every one of which is filled. Raises as `run` does."""


@runtime_checkable
class SupportsDevice(Protocol):
    """A backend whose batches stay on the device of its instance: the worker copies in and out."""

    @property
    def takes_device_tensors(self) -> bool:
        """Whether `run_on_device` may be called for this model."""

    def run_on_device(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Enqueue one batch on the current stream, and wait for nothing.

        In are torch tensors of the device, `[rows, *spec.shape]`; out are contiguous tensors of the same
        device, held to the specs. Raises as `run` does, and what the device says of earlier work.
        """


@runtime_checkable
class SupportsComputeStream(Protocol):
    """A backend whose library computes on one stream, chosen when the model was opened."""

    @property
    def compute_stream(self) -> Any:
        """The stream (`torch.cuda.Stream`) that the worker computes on; None for a stream of the worker's."""


@runtime_checkable
class SupportsMemoryRelease(Protocol):
    """A backend whose framework keeps memory for later that a batch may need now."""

    def release_memory(self) -> None:
        """Give back cached memory. Called after a batch ran out of memory, before it is run in parts."""


class RequestBackend(Backend, Protocol):
    """A backend that takes requests, not arrays (`takes="requests"` in its registry entry).

    `run` is called for warm-up samples only. `config` is the config.pbtxt as plain values; `output` and
    `sequence_batching` of it are read.
    """

    name: str
    instance_name: str
    config: dict[str, Any]

    @property
    def version(self) -> int:
        """The version's number, -1 where its folder has none."""

    @property
    def batching(self) -> bool:
        """Whether tensors have a batch axis."""

    @property
    def decoupled(self) -> bool:
        """Whether a request may have any number of responses."""

    def execute(self, requests: list[InferenceRequest], failed: OnFailure) -> Sequence[Any] | None:
        """Run a batch: a response for each request, or None where responses are sent through the requests.
        `failed` takes what is raised after the return."""

    def where(self, error: BaseException) -> str:
        """Return where in the model's code `error` was raised, in Triton's form; "" for nowhere."""


class ElementBackend(Backend, Protocol):
    """A backend that takes Python objects, not tensors: a VectorTransformer of the batching library."""

    def apply(self, batch: Any) -> Any:
        """Run one batch, a list of elements or one array of them, and return a result for each."""


_SWITCHED: tuple[tuple[str, type, tuple[str, ...]], ...] = (
    ("joins_requests", SupportsRequestJoining, ("ragged_inputs", "run_requests")),
    ("binds_outputs", SupportsOutputBinding, ("run_into",)),
    ("takes_device_tensors", SupportsDevice, ("run_on_device",)),
)


def check_capabilities(backend: Backend) -> None:
    """Raise ConfigError for a loaded backend that says it can do something and has no method for it."""
    for switch, capability, members in _SWITCHED:
        if getattr(backend, switch, False) and not isinstance(backend, capability):
            missing = " and ".join(member for member in members if not hasattr(backend, member))
            raise ConfigError(f"backend {type(backend).__qualname__} has {switch} and no {missing}")


def read_specs(declared: Mapping[str, Any] | None) -> dict[str, TensorSpec]:
    """Read specs from `{name: {dtype, shape}}`, as model.yaml and the control channel have them.

    Raises ConfigError naming the tensor and the field.
    """
    return {name: _read_spec(name, spec) for name, spec in (declared or {}).items()}


def write_specs(specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
    """Write specs as the plain values that `read_specs` reads."""
    return {
        name: {
            "dtype": spec.dtype.name,
            "shape": None if spec.shape is None else list(spec.shape),
            **({"columns": list(spec.columns)} if spec.columns else {}),
        }
        for name, spec in specs.items()
    }


def _read_spec(name: str, spec: Any) -> TensorSpec:
    if not isinstance(spec, Mapping) or not isinstance(spec.get("dtype"), str):
        raise ConfigError(f"tensor {name!r} must have a dtype and a shape")
    if spec["dtype"] not in DTYPES:
        raise ConfigError(f"tensor {name!r}: dtype {spec['dtype']!r} is not one of {', '.join(DTYPES)}")
    shape = spec.get("shape")
    if shape is None:
        return TensorSpec(name, DTYPES[spec["dtype"]], None)
    if not isinstance(shape, list | tuple) or len(shape) > _RANK_MAX or not all(map(_is_length, shape)):
        raise ConfigError(f"tensor {name!r}: shape must be a list of lengths, -1 for any, or null")
    columns = tuple(map(str, spec.get("columns") or ()))
    return TensorSpec(name, DTYPES[spec["dtype"]], tuple(shape), columns)


def _is_length(length: Any) -> bool:
    return isinstance(length, int) and not isinstance(length, bool) and -1 <= length < 2**63
