"""The config of one model: the fields of model.yaml, and the ModelConfig that every form is converted to.

    backend: onnx
    max_batch_size: 64
    inputs: {image: {dtype: float32, shape: [64]}}      # shapes without the batch axis
    outputs: {scores: {dtype: float32, shape: [10]}}

Only fields, bounds and their relations are here. `version` has the version policies; `layout` finds the file.

A Signature is a named way into a model, resolved against the tensors that the model really has.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta

from fastserve.backends.registry import BACKENDS, NAMES, find_backend
from fastserve.devices.inventory import MACHINE
from fastserve.errors import ConfigError
from fastserve.repository.placement import MOST_INSTANCES, Placement, place_on
from fastserve.settings import DEFAULT_POLICY, VersionPolicy, convert
from fastserve.settings.fields import fault_text
from fastserve.settings.model_options import (
    OPTIONAL_INPUTS,
    Options,
    PlacementOptions,
    RequestLogOptions,
    ShadowOptions,
    StickyOptions,
    TextOptions,
    TorchOptions,
    TrafficRules,
    check_traffic,
)
from fastserve.settings.server_settings import VersionNumber
from fastserve.tensor import DTYPES, TensorSpec

# Spelled out because a type checker cannot read DTYPES; tests hold the two together.
DTypeName = Literal[
    "bool",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "bytes",
]

Name = Annotated[str, Meta(min_length=1, max_length=1024)]


class TensorConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One input or output: dtype, and shape without the batch axis."""

    dtype: DTypeName
    """Element type."""
    shape: list[Annotated[int, Meta(ge=-1)]] | None
    """Without the batch axis; -1 for any length, null for any rank."""


class SignatureConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A named way into the model."""

    method: Literal["predict", "classify", "regress"] = "predict"
    """The TensorFlow Serving API that this signature answers."""
    inputs: dict[Name, Name] | None = None
    """Name clients use -> input of the model; null for all."""
    outputs: dict[Name, Name] | None = None
    """Name clients use -> output of the model; null for all."""
    features: dict[Name, Name] | None = None
    """classify, regress: feature of an example -> name in inputs; null for the same."""


class WarmupSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One batch run before a version becomes available."""

    inputs: dict[Name, Any]
    """Input -> nested lists with the batch axis, or "zeros"."""
    rows: Annotated[int, Meta(ge=1)] = 1
    """Rows of the inputs given as zeros."""
    count: Annotated[int, Meta(ge=1, le=1000)] = 1
    """How many times it runs."""


class NativeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fields of model.yaml."""

    backend: Annotated[str, Meta(extra={"allowed": NAMES})]
    """The code that runs the model; workers must be able to import a class of your own."""
    inputs: dict[Name, TensorConfig] = {}
    """Inputs by name; onnx models may leave them out."""
    outputs: dict[Name, TensorConfig] = {}
    """Outputs by name; onnx models may leave them out."""
    max_batch_size: Annotated[int, Meta(ge=0, le=1 << 20)] = 32
    """Most rows of a batch; 1024 for models of rows (sklearn, xgboost, ...). 0: no batch axis, nothing is
    merged."""
    max_queue_delay_us: Annotated[int, Meta(ge=0, le=60000000)] = 0
    """Microseconds a row may wait for company."""
    allowed_batch_sizes: list[Annotated[int, Meta(ge=1)]] | None = None
    """Batches are filled up to the next of these; ends with max_batch_size."""
    instances: Annotated[int, Meta(ge=1, le=64)] = 1
    """Worker processes of each version, on each of its devices."""
    # Plain: a union of texts with patterns breaks msgspec 0.22's count of references.
    devices: str | list[str] = "cpu"
    """Where they compute: cpu, cuda (every GPU), cuda:N, auto; or a list; =dtype behind."""
    device_memory_mb: Annotated[int, Meta(ge=0)] = 0
    """Megabytes of its GPU that each worker may take; 0: not bounded."""
    shared_worker: Annotated[str, Meta(pattern="^[A-Za-z0-9_.-]{0,40}$")] = ""
    """Name of a worker process that models share, one for each device and instance."""
    cache: bool = False
    """Keep answers: a request with the inputs of an earlier one gets its answer, without a run."""
    pin: bool = False
    """Where the server has a memory_budget: loaded at the start and never unloaded for other models."""
    max_queue_rows: Annotated[int, Meta(ge=1)] = 1024
    """Rows that may wait."""
    max_queue_bytes: Annotated[int, Meta(ge=1)] = 268435456
    """Bytes of inputs that may wait."""
    split_large_requests: bool = True
    """Split requests of more rows than max_batch_size; false: refuse them."""
    max_request_rows: Annotated[int, Meta(ge=0)] = 0
    """Most rows of a request that is split; 0: as many as fill 10000 batches."""
    mixed_shapes: Literal["group", "pad", "error"] = "group"
    """Rows of different shapes: batched separately, padded to the largest, or refused."""
    version_policy: VersionPolicy = DEFAULT_POLICY
    """{latest: N}, all, or {specific: [N, ...]}."""
    labels: dict[Name, VersionNumber] = {}
    """Label -> version."""
    traffic: dict[Name, float] = {}
    """Version or label -> weight: where requests go that name neither. None: to the highest version."""
    sticky: StickyOptions | None = None
    """The header or input that keeps a client at one version of `traffic`."""
    shadow: ShadowOptions | None = None
    """A version that runs copies of requests to the others; its answers are compared and thrown away."""
    signatures: dict[Name, SignatureConfig] = {}
    """Named ways into the model; serving_default is added unless given."""
    class_labels: list[str] | str = []
    """Names of the classes, or a file beside model.yaml with one per line."""
    warmup: Literal["auto", "off"] | list[WarmupSample] = "auto"
    """Runs before a version is available: zeros, none, or these samples."""
    parameters: dict[str, Any] = {}
    """Handed to the model as they are."""
    threads: Annotated[int, Meta(ge=0, le=1024)] = 1
    """Threads a worker computes with; 0 leaves it to the framework."""
    env: dict[Annotated[str, Meta(pattern="^[A-Za-z_][A-Za-z0-9_]*$")], str] = {}
    """Environment variables of the worker."""
    run_timeout_ms: Annotated[int, Meta(ge=0)] = 120_000
    """Milliseconds a batch may run before its worker is killed; 0: no limit."""
    isolate_failures: bool = True
    """Run a failed batch again in parts, so a bad request fails alone; false: runs have effects."""
    load_timeout_s: Annotated[float, Meta(gt=0)] = 300.0
    """Seconds a worker may take until it is ready."""
    restart_backoff_s: Annotated[float, Meta(gt=0)] = 0.1
    """Seconds before a dead worker's first restart; doubles each time."""
    restart_backoff_max_s: Annotated[float, Meta(gt=0)] = 30.0
    """Longest wait after a start that failed, in seconds; after a death at work 1."""
    placement: PlacementOptions | None = None
    """Where workers run, if not here: {remote: {listen, ...}} or {ray: {num_cpus, ...}}; then `instances`
    may be {min, max}."""
    request_log: RequestLogOptions | None = None
    """Requests that are logged with their inputs and outputs, under the server's request_log_folder."""
    text: TextOptions | None = None
    """Bounds and settings of a model that generates text."""
    device_tensors: bool = False
    """python models: run gets tensors of its device (torch's, with DLPack), not arrays."""
    batches_in_flight: Annotated[int, Meta(ge=1, le=16)] = 3
    """Batches a worker has on its GPU at a time. 1: ONNX Runtime copies by itself."""
    torch: TorchOptions | None = None
    """torch models: how the program is opened and run."""
    loose_inputs: bool = False
    """V2 requests may name and type their inputs as MLServer's clients do: a matrix of any name, a tensor for
    each column, any type of numbers."""
    default_outputs: list[Name] = []
    """Outputs of V2 replies to requests that name none; none: all."""
    class_name: Annotated[str, Meta(pattern="^[A-Za-z_][A-Za-z0-9_]*$")] = msgspec.field(
        name="class", default="Model"
    )
    """Class in model.py."""

    def __post_init__(self) -> None:
        check_batches(self)
        entry = find_backend(self.backend)
        if not entry.native and type(self) is NativeConfig:
            raise ValueError(fault_text("backend", self.backend, NAMES))
        _check_text(self, generates=entry.takes == "text")
        if entry.needs_tensors and not (self.inputs and self.outputs):
            missing = "outputs" if self.inputs else "inputs"
            raise ValueError(f"{missing}: given nothing, allowed: a mapping of name: dtype, shape")
        if self.shared_worker and not entry.shares:
            raise ValueError(
                fault_text("shared_worker", self.shared_worker, f"nothing with backend {self.backend}")
            )
        if self.device_tensors and self.backend != "python":
            raise ValueError(fault_text("device_tensors", True, f"false with backend {self.backend}"))
        if self.torch is not None and self.backend != "torch":
            raise ValueError(fault_text("torch", "settings", f"nothing with backend {self.backend}"))
        if self.placement is not None:
            _check_placement(self)
        check_traffic(self)
        for name, signature in self.signatures.items():
            _check_signature(name, signature, self)

    @property
    def rules(self) -> TrafficRules:
        """The versions that requests without a version go to."""
        return TrafficRules(traffic=self.traffic, sticky=self.sticky, shadow=self.shadow)

    @property
    def most_rows(self) -> int:
        """Rows that one request may have; 0: as many as fill the MOST_BATCHES of its scheduler."""
        return self.max_request_rows if self.split_large_requests else self.max_batch_size

    @property
    def batching(self) -> bool:
        """True when tensors carry a batch axis and requests may share a batch."""
        return self.max_batch_size > 0

    @property
    def class_texts(self) -> tuple[str, ...]:
        """The class names; empty while `class_labels` is still the name of a file."""
        return tuple(self.class_labels) if isinstance(self.class_labels, list) else ()


class ModelConfig(NativeConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fields of a native model, and those only a config.pbtxt leads to (`triton_config`)."""

    options: Options = Options()
    """Options of the model beyond its tensors."""
    places: list[Placement] = []
    """Where each of its workers computes; none: all on the CPU."""
    triton: dict[str, Any] | None = None
    """The whole config.pbtxt as the config call shows it; null for a native model."""
    fault: str = ""
    """Why no version of this model can be loaded; empty if it can."""
    output_labels: dict[str, list[str]] = {}
    """Lines of each output's label_filename."""


def parse_model_config(
    raw: Mapping[str, object], origin: str = "model.yaml", defaults: Mapping[str, object] | None = None
) -> ModelConfig:
    """Return a checked ModelConfig of model.yaml's plain values; `defaults` fill fields that are not given.

    Raises ConfigError naming origin, field, given value and allowed values.
    """
    native = convert(_filled(raw, defaults or {}), NativeConfig, origin)
    options = Options()
    if native.text is not None:
        options = Options(decoupled=True, parts_if_asked=True, optional_inputs=list(OPTIONAL_INPUTS))
    elif native.backend == "script_stream":
        options = Options(decoupled=True, parts_if_asked=True)
    elif native.backend == "python_stream":
        options = Options(decoupled=True)
    if native.cache:
        if options.decoupled:
            raise ConfigError(
                f"{origin}: " + fault_text("cache", True, "false with a model that answers in parts")
            )
        options = msgspec.structs.replace(options, cached=True)
    return _place(ModelConfig(**msgspec.structs.asdict(native), options=options), origin)


def with_streams(config: ModelConfig) -> ModelConfig:
    """Return the config of a Python model whose `run` yields: it has a process of its own, and any number of
    answers to a request."""
    options = msgspec.structs.replace(config.options, decoupled=True)
    return msgspec.structs.replace(config, backend="python_stream", options=options, shared_worker="")


def _place(config: ModelConfig, origin: str) -> ModelConfig:
    """Return the config with a place for each instance. Raises ConfigError."""
    if config.devices == "cpu" or config.placement is not None:  # a remote worker looks at its own machine
        return config
    try:
        found = place_on(config.devices, config.instances, find_backend(config.backend), MACHINE)
        return with_places(config, found)
    except ValueError as fault:
        raise ConfigError(f"{origin}: {fault}") from None


def with_places(config: ModelConfig, places: list[Placement]) -> ModelConfig:
    """Return the config with a worker at each of these places. Raises ValueError for too many."""
    if len(places) > MOST_INSTANCES:
        raise ValueError(
            fault_text("instances", len(places), f"up to {MOST_INSTANCES} on all of its devices")
        )
    nbytes = config.device_memory_mb << 20
    places = [msgspec.structs.replace(one, bytes=nbytes) if one.gpu >= 0 else one for one in places]
    return msgspec.structs.replace(config, instances=len(places), places=places)


def may_share(backend: str) -> bool:
    """Return whether model_defaults may put a model of this backend into a shared worker."""
    try:
        return find_backend(backend).shares
    except ConfigError:  # the check of the config says so
        return True


def _filled(raw: Mapping[str, object], defaults: Mapping[str, object]) -> dict[str, object]:
    fill = dict(defaults)
    if "max_batch_size" in raw:
        # sizes to round up to, and to split, belong to the max_batch_size they were written for
        for field in ("allowed_batch_sizes", "max_request_rows"):
            fill.pop(field, None)
    merged = {**fill, **raw}
    if isinstance(traffic := merged.get("traffic"), Mapping):  # a version is a number in YAML
        merged["traffic"] = {
            str(arm) if isinstance(arm, int) else arm: weight for arm, weight in traffic.items()
        }
    backend = merged.get("backend")
    entry = BACKENDS.get(backend) if isinstance(backend, str) else None
    if entry is not None and entry.takes == "text":
        _fill_text(merged, raw)
    if entry is not None and entry.batch_rows:
        merged.setdefault("max_batch_size", entry.batch_rows)
        merged.setdefault("max_queue_rows", 8 * entry.batch_rows)
    _fill_placement(merged, raw)
    if "shared_worker" not in raw and isinstance(backend, str) and not may_share(backend):
        merged.pop("shared_worker", None)
    rows, size = merged.get("max_queue_rows", 1024), merged.get("max_batch_size", 32)
    if "max_queue_rows" not in raw and isinstance(size, int) and isinstance(rows, int) and rows < size:
        merged["max_queue_rows"] = size  # a queue that cannot hold one batch would refuse full batches
    return merged


def _fill_placement(merged: dict[str, object], raw: Mapping[str, object]) -> None:
    """Move `instances` of a placed model to where its remote workers are counted: here it has one worker, the
    runner that sends them batches."""
    placement = merged.get("placement")
    if not isinstance(placement, Mapping):
        return
    kind = next((one for one in ("remote", "ray") if isinstance(placement.get(one), Mapping)), "")
    if not kind:
        return
    wanted = merged.pop("instances", 1)
    workers = {"min": wanted, "max": wanted} if isinstance(wanted, int) else wanted
    merged["placement"] = {**placement, kind: {"workers": workers, **placement[kind]}}
    if "shared_worker" not in raw:
        merged.pop("shared_worker", None)


def _fill_text(merged: dict[str, object], raw: Mapping[str, object]) -> None:
    """Fill in the defaults of a text model. Its sequences share steps, not batches of rows: model_defaults
    for batches do not apply."""
    merged["max_batch_size"] = raw.get("max_batch_size", 0)
    merged.setdefault("text", {})
    if "allowed_batch_sizes" not in raw:
        merged.pop("allowed_batch_sizes", None)


def _check_placement(config: NativeConfig) -> None:
    """Raise ValueError for a model whose workers cannot be elsewhere."""
    entry = find_backend(config.backend)
    if entry.takes == "text":
        raise ValueError("placement: given settings, allowed: nothing yet for a model that generates text")
    if entry.takes != "arrays" or not entry.entry_point:
        raise ValueError(fault_text("placement", "settings", f"nothing with backend {config.backend}"))
    if config.shared_worker:
        raise ValueError(fault_text("shared_worker", config.shared_worker, "nothing beside placement"))


def _check_text(config: NativeConfig, *, generates: bool) -> None:
    if not generates and config.text is not None:
        raise ValueError(f"text: given settings, allowed: nothing with backend {config.backend}")
    if not generates:
        return
    if config.max_batch_size:
        raise ValueError(fault_text("max_batch_size", config.max_batch_size, "0 for a model that generates"))
    for side in ("inputs", "outputs"):
        if getattr(config, side) and type(config) is NativeConfig:
            raise ValueError(f"{side}: given tensors, allowed: nothing for a model that generates text")


def _check_signature(name: str, signature: SignatureConfig, config: NativeConfig) -> None:
    for side, chosen, known in (
        ("inputs", signature.inputs, config.inputs),
        ("outputs", signature.outputs, config.outputs),
    ):
        for alias, target in (chosen or {}).items():
            if known and target not in known:
                raise ValueError(fault_text(f"signatures.{name}.{side}.{alias}", target, " or ".join(known)))
    aliases = list(signature.inputs or config.inputs)
    for feature, alias in (signature.features or {}).items():
        if aliases and alias not in aliases:
            raise ValueError(fault_text(f"signatures.{name}.features.{feature}", alias, " or ".join(aliases)))


def round_up(rows: int, allowed_batch_sizes: list[int] | None) -> int:
    """Return the rows a batch of `rows` is filled up to (spec 6.3); `rows` itself beyond the last size."""
    return next((size for size in allowed_batch_sizes or () if size >= rows), rows)


def build_specs(tensors: Mapping[str, TensorConfig]) -> dict[str, TensorSpec]:
    """Return the TensorSpecs of `inputs` or `outputs`, in the order written; shapes stay without the batch
    axis."""
    return {
        name: TensorSpec(name, DTYPES[t.dtype], None if t.shape is None else tuple(t.shape))
        for name, t in tensors.items()
    }


def config_json(config: ModelConfig) -> dict[str, Any]:
    """Return the config as plain values, as the worker is sent it; `load_config_json` reads it back."""
    plain: dict[str, Any] = msgspec.to_builtins(config)
    return plain


def load_config_json(plain: Mapping[str, object]) -> ModelConfig:
    """Return a ModelConfig from `config_json`'s values. Raises ConfigError."""
    if not isinstance(plain, Mapping):
        raise ConfigError("config: not a mapping")
    return convert(plain, ModelConfig, "config")


def check_batches(config: NativeConfig) -> None:
    """Raise ValueError for sizes of batches, queues and requests that contradict each other."""
    _check_batch_sizes(config.max_batch_size, config.allowed_batch_sizes)
    least = f"a whole number from max_batch_size {config.max_batch_size}"
    if config.max_queue_rows < config.max_batch_size:
        raise ValueError(fault_text("max_queue_rows", config.max_queue_rows, least))
    if 0 < config.max_request_rows < config.max_batch_size:
        raise ValueError(fault_text("max_request_rows", config.max_request_rows, f"0 or {least}"))


def _check_batch_sizes(max_batch_size: int, sizes: list[int] | None) -> None:
    if sizes is None:
        return
    if not sizes or any(b <= a for a, b in itertools.pairwise(sizes)):
        raise ValueError(fault_text("allowed_batch_sizes", sizes, "whole numbers that increase"))
    if sizes[-1] != max_batch_size:  # the words of TensorFlow Serving, spec 6.3
        raise ValueError(
            "Last entry in allowed_batch_sizes must match max_batch_size; "
            f"last entry was {sizes[-1]}; expected {max_batch_size}"
        )


DEFAULT_SIGNATURE = "serving_default"
Method = Literal["predict", "classify", "regress"]


@dataclass(frozen=True, slots=True)
class Signature:
    """A named entry point of a version.

    `inputs` and `outputs` map the client's names to the model's specs (shape without batch axis when the
    model batches; `spec.name` is the model's own name); `input_names` and `output_names` map the client's
    names to the model's. `features` maps a feature of an example to a client's input name (classify and
    regress). `class_labels` names the classes when the model does not.
    """

    name: str
    method: Method
    inputs: dict[str, TensorSpec]
    input_names: dict[str, str]
    outputs: dict[str, TensorSpec]
    output_names: dict[str, str]
    features: dict[str, str] = field(default_factory=dict)
    class_labels: tuple[str, ...] = ()


def build_signatures(
    config: ModelConfig, inputs: Mapping[str, TensorSpec], outputs: Mapping[str, TensorSpec]
) -> dict[str, Signature]:
    """Return every signature of a model with these tensors. Raises ConfigError when one names a missing
    tensor."""
    configs = dict(config.signatures)
    configs.setdefault(DEFAULT_SIGNATURE, SignatureConfig())
    return {name: _build(name, written, config, inputs, outputs) for name, written in configs.items()}


def with_signatures(
    config: ModelConfig,
    inputs: Mapping[str, TensorSpec],
    outputs: Mapping[str, TensorSpec],
    told: Mapping[str, Mapping[str, Any]],
) -> ModelConfig:
    """Return the config with the signatures of the loaded model added; those of model.yaml take precedence.

    Where there is no default among several, the default takes nothing: it exists and answers no request.
    Raises ConfigError.
    """
    own = {name: convert(each, SignatureConfig, f"signatures.{name}") for name, each in told.items()}
    first = next(iter(own.values()))
    spare = first if len(own) == 1 else SignatureConfig(inputs={}, outputs={})
    signatures = {DEFAULT_SIGNATURE: spare, **own, **config.signatures}
    some = [name for name in inputs if any(name not in (each.inputs or {}).values() for each in own.values())]
    options = msgspec.structs.replace(config.options, optional_inputs=some, signature_inputs=some)
    # Clients of a Triton model see the axes that its config has, or was completed with.
    completed = config.triton is not None
    return msgspec.structs.replace(
        config,
        inputs=config.inputs if completed else _written(inputs),
        outputs=config.outputs if completed else _written(outputs),
        signatures=signatures,
        options=options,
    )


def _written(specs: Mapping[str, TensorSpec]) -> dict[str, TensorConfig]:
    return {
        name: TensorConfig(
            cast("DTypeName", spec.dtype.name), None if spec.shape is None else list(spec.shape)
        )
        for name, spec in specs.items()
    }


def _build(
    name: str,
    written: SignatureConfig,
    config: ModelConfig,
    inputs: Mapping[str, TensorSpec],
    outputs: Mapping[str, TensorSpec],
) -> Signature:
    input_names = _names(written.inputs, inputs, f"signatures.{name}.inputs")
    output_names = _names(written.outputs, outputs, f"signatures.{name}.outputs")
    return Signature(
        name=name,
        method=written.method,
        inputs={alias: inputs[target] for alias, target in input_names.items()},
        input_names=input_names,
        outputs={alias: outputs[target] for alias, target in output_names.items()},
        output_names=output_names,
        features=_features(written, input_names, name),
        class_labels=config.class_texts if written.method == "classify" else (),
    )


def _names(written: dict[str, str] | None, known: Mapping[str, TensorSpec], where: str) -> dict[str, str]:
    names = {name: name for name in known} if written is None else dict(written)
    for alias, target in names.items():
        if target not in known:
            raise ConfigError(fault_text(f"{where}.{alias}", target, " or ".join(known)))
    return names


def _features(written: SignatureConfig, input_names: dict[str, str], name: str) -> dict[str, str]:
    if written.method == "predict":
        return {}
    features = {alias: alias for alias in input_names} if written.features is None else dict(written.features)
    for feature, alias in features.items():
        if alias not in input_names:
            raise ConfigError(
                fault_text(f"signatures.{name}.features.{feature}", alias, " or ".join(input_names))
            )
    return features
