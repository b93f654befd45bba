"""config.pbtxt -> TritonConfig -> ModelConfig, and back to the JSON of Triton's config call.

    read_triton_config(folder)     text, names checked, defaults filled in as Triton does
    parse_triton_json(text, name)  the same of the JSON a load call brings
    to_model_config(config)        the config of the engine and the workers; `fault`: why it cannot be run
    config_json(config, version)   GET /v2/models/NAME/config

The message and its JSON form are in `messages`, contradictions and refusals in `validation`, defaults in
`completion`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fastserve.backends.registry import BACKENDS, BY_TRITON_NAME, find_backend
from fastserve.devices.inventory import MACHINE
from fastserve.errors import ConfigError
from fastserve.repository.model_config import ModelConfig, TensorConfig, WarmupSample, with_places
from fastserve.repository.placement import Placement, place_group
from fastserve.repository.triton_config.completion import (
    DATA_TYPE,
    DTYPE_OF,
    IDLE_US,
    complete,
    fill_defaults,
)
from fastserve.repository.triton_config.messages import (
    ModelDynamicBatching,
    ModelEnsembling,
    ModelInput,
    ModelInstanceGroup,
    ModelOutput,
    ModelQueuePolicy,
    ModelSequenceBatching,
    ModelSequenceBatchingControl,
    ModelSequenceBatchingControlInput,
    ModelSequenceBatchingState,
    ModelTransactionPolicy,
    ModelVersionPolicy,
    ModelWarmup,
    TritonConfig,
    config_schema,
    plain_from_json,
    to_json,
)
from fastserve.repository.triton_config.validation import (
    HISTOGRAMS,
    check,
    dtype_of,
    ignored_fields,
    instances_of,
    refusals,
)
from fastserve.settings import DEFAULT_POLICY, PolicyChoice, VersionPolicy, convert
from fastserve.settings.config_files import read_text
from fastserve.settings.model_options import (
    EnsembleOptions,
    EnsembleStep,
    MadeInput,
    Needs,
    Options,
    QueueOptions,
    QueuePolicy,
    Reshape,
    Scatter,
    SequenceControl,
    SequenceOptions,
    SequenceStateOptions,
    SessionOptions,
)
from fastserve.settings.text_proto import parse_text
from fastserve.tensor import DTYPES, TensorSpec

if TYPE_CHECKING:
    from fastserve.repository.version import Version


TRITON_FILE = "config.pbtxt"

QUEUE_ROWS = 1024  # shared memory's bound; queue policies count requests before it


def read_triton_config(folder: Path, name: str = "") -> TritonConfig:
    """Read the config.pbtxt of a model folder, check it and fill in defaults; `name` replaces the folder's
    own.

    Raises ConfigError naming the field, what was given and what is allowed.
    """
    return parse_triton_text(read_text(folder / TRITON_FILE, TRITON_FILE), name or folder.name)


def parse_triton_text(text: str, name: str) -> TritonConfig:
    """Parse a config.pbtxt's text as the config of model `name`. Raises ConfigError."""
    return make_triton_config(parse_text(text, config_schema(), TRITON_FILE), name)


def parse_triton_json(text: str, name: str) -> TritonConfig:
    """Parse the JSON a load call brings as `config`, as the config of model `name`. Raises ConfigError."""
    return make_triton_config(plain_from_json(text, "config"), name, "config")


def make_triton_config(raw: Mapping[str, Any], name: str, origin: str = TRITON_FILE) -> TritonConfig:
    """Convert plain values to a checked config with defaults filled in. Raises ConfigError."""
    config = fill_defaults(convert(dict(raw), TritonConfig, origin), name)
    try:
        check(config, name)
    except ConfigError as fault:
        raise ConfigError(f"{origin}: {fault}") from None
    return config


def to_model_config(config: TritonConfig, folder: Path = Path()) -> ModelConfig:
    """Convert a Triton config to the ModelConfig of the engine and the workers; `triton` keeps the whole
    config.

    `folder` is the model's, where the files of warm-up samples lie. A config that cannot be run here has
    `fault`: its versions then fail to load with that text.
    """
    reasons = refusals(config)
    if reasons:
        fault = reasons[0] if len(reasons) == 1 else "; ".join(reasons)
        return ModelConfig(
            backend="ensemble",  # which has no worker: nothing of it runs
            version_policy=policy_of(config),
            options=Options(origin=TRITON_FILE, model_file=config.default_model_filename),
            triton=to_json(config),
            fault=f"Invalid argument: {fault}",
        )
    fields: dict[str, Any] = {
        "backend": "ensemble" if config.ensemble else BY_TRITON_NAME[config.backend].name,
        "inputs": _tensors(config.input),
        "outputs": _tensors(config.output),
        "max_batch_size": config.max_batch_size,
        "max_queue_delay_us": delay_us(config),
        "instances": max(1, instances_of(config)),
        "max_queue_rows": max(QUEUE_ROWS, config.max_batch_size),
        "split_large_requests": False,
        "mixed_shapes": "group",
        "version_policy": policy_of(config),
        "warmup": [_warmup(sample, folder) for sample in config.model_warmup] or "off",
        "parameters": {name: parameter.string_value for name, parameter in config.parameters.items()},
        "threads": threads_of(config),
        "options": options_of(config),
        "triton": to_json(config),
    }
    return _place(ModelConfig(**fields), config)


def _place(made: ModelConfig, config: TritonConfig) -> ModelConfig:
    """Return the config with the devices of its groups, and the dtypes of the parameters `dtype` and
    `dtype.GROUP`."""
    places: list[Placement] = []
    for group in config.instance_group:
        if group.passive:
            continue
        on_gpus, dtype = group.kind == "KIND_GPU", dtype_of(config, group)
        found = place_group(group.gpus, group.count, MACHINE) if on_gpus else [Placement()] * group.count
        places += [msgspec.structs.replace(place, dtype=dtype) for place in found]
    return made if all(place == Placement() for place in places) else with_places(made, places)


def _tensors(tensors: list[ModelInput] | list[ModelOutput]) -> dict[str, TensorConfig]:
    """Return the tensors, or nothing unless every description is whole: the backend then describes them after
    loading."""
    if any(t.data_type not in DTYPE_OF or not (t.dims or t.reshape is not None) for t in tensors):
        return {}
    return {
        tensor.name: TensorConfig(dtype=DTYPE_OF[tensor.data_type], shape=list(tensor.dims))  # type: ignore[arg-type]
        for tensor in tensors
    }


def _warmup(sample: ModelWarmup, folder: Path) -> WarmupSample:
    inputs: dict[str, Any] = {}
    for name, given in sample.inputs.items():
        file = given.input_data_file
        data = "file" if file is not None else "random" if given.random_data else "zeros"
        inputs[name] = {"dims": given.dims, "data": data}
        if file is not None:
            inputs[name]["file"] = str(folder / "warmup" / Path(file).name)
    return WarmupSample(inputs=inputs, rows=sample.batch_size or 1, count=min(sample.count or 1, 1000))


def policy_of(config: TritonConfig) -> VersionPolicy:
    """Convert version_policy to ours."""
    given = config.version_policy
    if given is None:
        return DEFAULT_POLICY
    if given.all is not None:
        return "all"
    if given.specific is not None:
        return PolicyChoice(specific=list(given.specific.versions))
    return PolicyChoice(latest=given.latest.num_versions if given.latest else 1)


def delay_us(config: TritonConfig) -> int:
    """Return the microseconds a request may wait for a fuller batch, whichever batcher is used."""
    if config.dynamic_batching is not None:
        return config.dynamic_batching.max_queue_delay_microseconds
    sequence = config.sequence_batching
    if sequence is None:
        return 0
    strategy = sequence.oldest or sequence.direct
    return strategy.max_queue_delay_microseconds if strategy is not None else 0


_THREADS = {"onnxruntime": "intra_op_thread_count", "pytorch": "INTRA_OP_THREAD_COUNT"}


def threads_of(config: TritonConfig) -> int:
    """Return the threads of one worker: parameter intra_op_thread_count of onnxruntime models,
    INTRA_OP_THREAD_COUNT of pytorch ones, 1 otherwise."""
    given = config.parameters.get(_THREADS.get(config.backend, ""))
    if given is None or not given.string_value.isdecimal():
        return 1
    return min(int(given.string_value), 1024)


def with_tensors(
    config: ModelConfig, inputs: Mapping[str, TensorSpec], outputs: Mapping[str, TensorSpec]
) -> ModelConfig:
    """Return the config with the loaded model's tensors in `triton`; a native config is unchanged."""
    if config.triton is None:
        return config
    completed = complete(triton_view(config, ""), inputs, outputs)
    return msgspec.structs.replace(
        config,
        inputs=_tensors(completed.input),
        outputs=_tensors(completed.output),
        options=options_of(completed),
        triton=to_json(completed),
    )


def amend(config: ModelConfig, fields: Mapping[str, Any]) -> ModelConfig:
    """Return a Triton model's config with the fields that the model itself has completed. Raises
    ConfigError."""
    said = convert({**(config.triton or {}), **fields}, TritonConfig, "auto_complete_config", lax=True)
    amended = fill_defaults(said, said.name)
    check(amended, amended.name)
    return msgspec.structs.replace(
        config,
        inputs=_tensors(amended.input),
        outputs=_tensors(amended.output),
        max_batch_size=amended.max_batch_size,
        max_queue_delay_us=delay_us(amended),
        max_queue_rows=max(config.max_queue_rows, amended.max_batch_size),
        options=options_of(amended),
        triton=to_json(amended),
    )


def config_json(config: ModelConfig | TritonConfig, version: Version | None = None) -> dict[str, Any]:
    """Return the config as Triton's config call shows it, with the tensors of a loaded `version`.

    A native model's is made from its model.yaml.
    """
    if isinstance(config, ModelConfig):
        config = triton_view(config, version.model if version is not None else "")
    if version is not None and not config.ensemble:
        config = complete(config, version.inputs, version.outputs)
    return to_json(config)


def triton_view(config: ModelConfig, name: str) -> TritonConfig:
    """Return the TritonConfig a ModelConfig was made of; for a native model, an equivalent one."""
    if config.triton is not None:
        # Kept as JSON, where the keys of a map are text.
        return convert(config.triton, TritonConfig, TRITON_FILE, lax=True)
    backend = find_backend(config.backend).triton or config.backend
    policy = config.version_policy
    dynamic = ModelDynamicBatching(max_queue_delay_microseconds=config.max_queue_delay_us)
    made = TritonConfig(
        name=name,
        backend=backend,
        version_policy=convert(
            {"all": {}} if policy == "all" else _policy_plain(policy), ModelVersionPolicy, name
        ),
        max_batch_size=config.max_batch_size,
        input=[_shown(ModelInput, key, tensor) for key, tensor in config.inputs.items()],
        output=[_shown(ModelOutput, key, tensor) for key, tensor in config.outputs.items()],
        dynamic_batching=dynamic if config.batching else None,
        instance_group=_groups_of(config),
        model_transaction_policy=ModelTransactionPolicy(decoupled=True) if _only_parts(config) else None,
    )
    return fill_defaults(made, name)


def _only_parts(config: ModelConfig) -> bool:
    """Return whether every request has any number of answers."""
    return config.options.decoupled and not config.options.parts_if_asked


def _groups_of(config: ModelConfig) -> list[ModelInstanceGroup]:
    """Return a native model's workers as instance groups."""
    gpus = sorted({place.gpu for place in config.places if place.gpu >= 0})
    cpus = sum(place.gpu < 0 for place in config.places) if config.places else config.instances
    on_gpus = ModelInstanceGroup(
        kind="KIND_GPU", count=(config.instances - cpus) // max(len(gpus), 1), gpus=gpus
    )
    on_cpus = ModelInstanceGroup(kind="KIND_CPU", count=cpus)
    return ([on_gpus] if gpus else []) + ([on_cpus] if cpus else [])


def _policy_plain(policy: PolicyChoice) -> dict[str, Any]:
    if policy.specific is not None:
        return {"specific": {"versions": policy.specific}}
    return {"latest": {"num_versions": policy.latest or 1}}


def _shown(kind: type[Any], name: str, tensor: TensorConfig) -> Any:
    dtype = DATA_TYPE.get(DTYPES[tensor.dtype].name, "TYPE_INVALID")
    return kind(name=name, data_type=dtype, dims=list(tensor.shape or []))


LATEST = -1

_FALSE_TRUE = (
    ("int32_false_true", "int32"),
    ("fp32_false_true", "float32"),
    ("bool_false_true", "bool"),
)


def options_of(config: TritonConfig) -> Options:
    """Convert the config's requests to the engine, the workers and the backend into Options."""
    metrics = config.model_metrics
    bounds = [
        control.histogram_options.buckets if control.histogram_options else []
        for control in (metrics.metric_control if metrics else ())
        if control.metric_identifier is not None and control.metric_identifier.family in HISTOGRAMS
    ]
    return Options(
        origin="config.pbtxt",
        model_file=_model_file(config),
        idle=ignored_fields(config),
        queue=_queue(config),
        sequences=_sequences(config.sequence_batching, config) if config.sequence_batching else None,
        ensemble=_ensemble(config) if config.ensemble else None,
        cached=config.response_cache is not None and config.response_cache.enable,
        decoupled=config.decoupled,
        needs=[_needs(group) for group in config.instance_group],
        optional_inputs=[tensor.name for tensor in config.input if tensor.optional],
        ragged_inputs=[tensor.name for tensor in config.input if tensor.allow_ragged_batch],
        made_inputs=list(_made_inputs(config)),
        scattered_outputs=dict(_scattered(config)),
        reshaped_inputs=_reshapes(config.input),
        reshaped_outputs=_reshapes(config.output),
        session=_session(config),
        metric_tags=config.metric_tags,
        first_response_ms=bounds[-1] if bounds else None,
    )


def _model_file(config: TritonConfig) -> str:
    """Return the file that a version's folder must hold: of a SavedModel that of its graph."""
    name = config.default_model_filename
    if not config.ensemble and config.backend == BACKENDS["tensorflow"].triton:
        return f"{name}/{BACKENDS['tensorflow'].model_file}"
    return name


def _queue(config: TritonConfig) -> QueueOptions | None:
    dynamic = config.dynamic_batching
    if dynamic is None:
        return None
    default = _policy(dynamic.default_queue_policy or ModelQueuePolicy())
    own = {level: _policy(policy) for level, policy in dynamic.priority_queue_policy.items()}
    return QueueOptions(
        policies=[own.get(level, default) for level in range(1, max(1, dynamic.priority_levels) + 1)],
        default_level=dynamic.default_priority_level or 1,
        preferred_sizes=dynamic.preferred_batch_size,
        keep_order=dynamic.preserve_ordering,
    )


def _policy(given: ModelQueuePolicy) -> QueuePolicy:
    return QueuePolicy(
        reject=given.timeout_action == "REJECT",
        timeout_us=given.default_timeout_microseconds,
        may_override=given.allow_timeout_override,
        max_requests=given.max_queue_size,
    )


def _sequences(given: ModelSequenceBatching, config: TritonConfig) -> SequenceOptions:
    oldest, direct = given.oldest, given.direct
    chosen = direct if oldest is None else oldest
    seen = {output.name for output in config.output}
    return SequenceOptions(
        direct=oldest is None,
        max_candidates=oldest.max_candidate_sequences if oldest else 0,
        delay_us=chosen.max_queue_delay_microseconds if chosen else 0,
        preferred_sizes=oldest.preferred_batch_size if oldest else [],
        fill=direct.minimum_slot_utilization if direct and oldest is None else 0.0,
        idle_us=given.max_sequence_idle_microseconds or IDLE_US,
        controls=[_control(one, control) for one in given.control_input for control in one.control],
        states=[_state(state, hidden=state.output_name not in seen) for state in given.state],
    )


def _control(
    given: ModelSequenceBatchingControlInput, control: ModelSequenceBatchingControl
) -> SequenceControl:
    if control.kind == "CONTROL_SEQUENCE_CORRID":
        return SequenceControl(name=given.name, signal="id", dtype=DTYPE_OF[control.data_type])
    signal = control.kind.removeprefix("CONTROL_SEQUENCE_").lower()
    said = [(dtype, getattr(control, field)) for field, dtype in _FALSE_TRUE if getattr(control, field)]
    dtype, values = said[0] if said else ("int32", [])
    return SequenceControl(name=given.name, signal=signal, dtype=dtype, values=[float(v) for v in values])  # type: ignore[arg-type]


def _state(given: ModelSequenceBatchingState, *, hidden: bool) -> SequenceStateOptions:
    first = given.initial_state[0] if given.initial_state else None
    return SequenceStateOptions(
        input=given.input_name,
        output=given.output_name,
        dtype=DTYPE_OF[given.data_type],
        shape=given.dims,
        first_shape=list(first.dims) if first and first.dims else [max(size, 1) for size in given.dims],
        first_file=(first.data_file or "") if first else "",
        first_name=first.name if first else "",
        hidden=hidden,
    )


def _ensemble(config: TritonConfig) -> EnsembleOptions:
    given = config.ensemble_scheduling or ModelEnsembling()
    return EnsembleOptions(
        steps=[
            EnsembleStep(
                model=step.model_name,
                version=None if step.model_version in (0, LATEST) else step.model_version,
                inputs=step.input_map,
                outputs=step.output_map,
            )
            for step in given.step
        ],
        inputs={tensor.name: tensor.optional for tensor in config.input},
        outputs=[tensor.name for tensor in config.output],
        max_inflight=given.max_inflight_requests,
    )


def _needs(group: ModelInstanceGroup) -> Needs:
    limiter = group.rate_limiter
    found: dict[str, int] = {}
    for resource in limiter.resources if limiter else ():
        found[resource.name] = found.get(resource.name, 0) + resource.count
    return Needs(resources=found, priority=max(limiter.priority if limiter else 0, 1))


def _made_inputs(config: TritonConfig) -> Iterator[MadeInput]:
    for given in config.batch_input:
        yield MadeInput(
            kind=given.kind.removeprefix("BATCH_").lower(),  # type: ignore[arg-type]
            names=given.target_name,
            source=given.source_input[0],
            dtype=DTYPE_OF[given.data_type],  # type: ignore[arg-type]
        )


def _scattered(config: TritonConfig) -> Iterator[tuple[str, Scatter]]:
    dims = {
        tensor.name: tensor.dims if tensor.reshape is None else tensor.reshape.shape
        for tensor in config.output
    }
    for given in config.batch_output:
        for name in given.target_name:
            yield name, Scatter(source=given.source_input[0], dims=[-1, *dims[name]])


def _reshapes(tensors: list[ModelInput] | list[ModelOutput]) -> dict[str, Reshape]:
    return {
        tensor.name: Reshape(dims=tensor.dims, shape=tensor.reshape.shape)
        for tensor in tensors
        if tensor.reshape is not None
    }


def _session(config: TritonConfig) -> SessionOptions:
    if config.backend == "pytorch":
        said = config.parameters.get("INTER_OP_THREAD_COUNT")
        count = int(said.string_value) if said and said.string_value.isdecimal() else 0
        return SessionOptions(inter_op_threads=count)
    if config.backend != "onnxruntime":
        return SessionOptions()
    given = config.optimization
    asked = given.execution_accelerators if given else None
    threads = config.parameters.get("inter_op_thread_count")
    mode = config.parameters.get("execution_mode")
    return SessionOptions(
        graph_level=given.graph.level if given and given.graph else 0,
        inter_op_threads=int(threads.string_value) if threads and threads.string_value.isdecimal() else 0,
        parallel=mode is not None and mode.string_value == "1",
        accelerators=[one.name for one in asked.cpu_execution_accelerator] if asked else [],
    )
