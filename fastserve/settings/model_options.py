"""Options of a model beyond its tensors, in words of no dialect: queues, sequences, ensembles, sessions.

A config.pbtxt is compiled into these (`repository.triton_config.reading`); the engine, the workers and the
backends read nothing else of it. They travel to workers as plain values, `read_options` reads them back.

    ModelConfig.options -> Options(queue=QueueOptions(...), decoupled=True, ...)

Sizes are rows, times microseconds, shapes without the batch axis; dtypes are names of `tensor.DTYPES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec


class _Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class QueuePolicy(_Options, frozen=True):
    """How one level queues. 0 is no time, and any number of requests."""

    reject: bool = True
    """The fate of a request past its time: turned away, or run after those in time."""
    timeout_us: int = 0
    may_override: bool = False
    """A request may ask for a shorter time."""
    max_requests: int = 0


class QueueOptions(_Options, frozen=True):
    """How requests wait and form batches. `policies` are those of the priority levels 1, 2, ..."""

    policies: list[QueuePolicy] = msgspec.field(default_factory=lambda: [QueuePolicy()])
    default_level: int = 1
    preferred_sizes: list[int] = []
    keep_order: bool = False


class SequenceControl(_Options, frozen=True):
    """An input that tells the model where it is in a sequence. `values` are those for false and true, empty
    for an id."""

    name: str
    signal: Literal["start", "ready", "end", "id"]
    dtype: str
    values: list[float] = []


class SequenceStateOptions(_Options, frozen=True):
    """An output that becomes an input of the sequence's next request.

    A sequence begins with `first_file` in the model's folder, of `first_shape`, or zeros without a file.
    Clients do not see a hidden output.
    """

    input: str
    output: str
    dtype: str
    shape: list[int]
    first_shape: list[int]
    first_file: str = ""
    first_name: str = ""
    hidden: bool = True


class SequenceOptions(_Options, frozen=True):
    """How batches of sequences are formed: a row of its own for each (direct), or the oldest of up to
    `max_candidates` (0: max_batch_size)."""

    direct: bool = True
    max_candidates: int = 0
    delay_us: int = 0
    preferred_sizes: list[int] = []
    fill: float = 0.0
    """The share of rows in use that ends the wait."""
    idle_us: int = 1_000_000
    controls: list[SequenceControl] = []
    states: list[SequenceStateOptions] = []

    @property
    def inputs(self) -> set[str]:
        """Inputs of the model that no client sends."""
        return {one.name for one in self.controls} | {one.input for one in self.states}


class EnsembleStep(_Options, frozen=True):
    """One model run. `inputs` and `outputs` map the model's names to the ensemble's tensors; no `version`
    is the latest."""

    model: str
    version: int | None
    inputs: dict[str, str]
    outputs: dict[str, str]


class EnsembleOptions(_Options, frozen=True):
    """Steps that answer in place of workers. `inputs` say whether they may be left out; `max_inflight`
    requests at a time in each step, 0 for any number."""

    steps: list[EnsembleStep]
    inputs: dict[str, bool]
    outputs: list[str]
    max_inflight: int = 0


class Needs(_Options, frozen=True):
    """Shared resources that a batch takes while it runs; `priority` 1 runs twice as often as 2."""

    resources: dict[str, int] = {}
    priority: int = 1


class Reshape(_Options, frozen=True):
    """A tensor that clients see as `dims` and the model as `shape`, of as many elements."""

    dims: list[int]
    shape: list[int]


MadeKind = Literal[
    "element_count",
    "accumulated_element_count",
    "accumulated_element_count_with_zero",
    "max_element_count_as_shape",
    "item_shape",
    "item_shape_flatten",
]


class MadeInput(_Options, frozen=True):
    """Inputs `names` that tell the model where in a batch the requests' elements of `source` lie."""

    kind: MadeKind
    names: list[str]
    source: str
    dtype: Literal["int32", "float32"]


class Scatter(_Options, frozen=True):
    """An output handed out by elements: `dims`, with the batch axis, take the lengths of `source` for -1."""

    source: str
    dims: list[int]


class SessionOptions(_Options, frozen=True):
    """How a framework runs a graph. `graph_level`: -1 basic, 0 everything, 1 extended, 2 nothing."""

    graph_level: int = 0
    inter_op_threads: int = 0
    parallel: bool = False
    accelerators: list[str] = []


class Options(_Options, frozen=True):
    """All options of a model."""

    origin: str = "model.yaml"
    """The file that says it, as messages name it."""
    model_file: str = ""
    """The file in a version's folder; "" for the backend's own."""
    idle: list[str] = []
    """Fields of the file that are taken up and do nothing here."""
    queue: QueueOptions | None = None
    sequences: SequenceOptions | None = None
    ensemble: EnsembleOptions | None = None
    cached: bool = False
    """Responses may be kept."""
    decoupled: bool = False
    """A request has any number of responses."""
    parts_if_asked: bool = False
    """Decoupled, but a request that does not ask for parts gets one."""
    needs: list[Needs] = []
    """Of each group of workers."""
    optional_inputs: list[str] = []
    signature_inputs: list[str] = []
    """Of these the ones that a signature has and others do not: a request of that one must bring them."""
    ragged_inputs: list[str] = []
    made_inputs: list[MadeInput] = []
    scattered_outputs: dict[str, Scatter] = {}
    reshaped_inputs: dict[str, Reshape] = {}
    reshaped_outputs: dict[str, Reshape] = {}
    session: SessionOptions = SessionOptions()
    metric_tags: dict[str, str] = {}
    first_response_ms: list[float] | None = None
    """Bounds of the histogram of first responses; null for the usual ones."""

    @property
    def tells_requests(self) -> bool:
        """Whether the model sees where one request of a batch ends and the next begins."""
        return bool(self.made_inputs or self.scattered_outputs)


def read_options(config: Mapping[str, Any]) -> Options:
    """Return the options of a model's config as a worker gets it."""
    return msgspec.convert(config.get("options") or {}, Options)


def may_isolate(config: Mapping[str, Any]) -> bool:
    """Return whether the model's failed batches may run again in parts.

    `config` is model.yaml as plain values; a config.pbtxt has a parameter of the setting's name.
    """
    options = read_options(config)
    told = (
        (config.get("parameters") or {}).get("isolate_failures") if options.origin != "model.yaml" else None
    )
    wanted = config.get("isolate_failures", True) and str(told).lower() != "false"
    return bool(wanted) and options.sequences is None and not options.decoupled


class TorchOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The `torch` section of model.yaml."""

    file: str = ""
    """File in a version's folder; nothing: model.pt2, model.pt or model.py."""
    weights: str = ""
    """State dict in a version's folder for the module of a model.py."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type that floating-point weights and inputs are converted to; auto: left as they are."""
    autocast: Literal["off", "bfloat16", "float16"] = "off"
    """Type that torch.autocast computes in where that loses little."""
    compile: Literal["off", "default", "reduce-overhead", "max-autotune"] = "off"
    """Mode of torch.compile; batching models need allowed_batch_sizes with it."""
    compile_backend: str = "inductor"
    """Backend of torch.compile."""
    cuda_graphs: bool = False
    """Replay a CUDA graph for each of allowed_batch_sizes; without effect on a CPU."""


def read_torch(config: Mapping[str, Any]) -> TorchOptions:
    """Return the section of a model's config as a worker gets it."""
    return msgspec.convert(config.get("torch") or {}, TorchOptions)
