"""config.pbtxt's words for what a model asks beyond its tensors -> `config.options`, which all others read.

Nothing is checked here that `triton_rules` and `triton_refusals` have checked.
"""

from __future__ import annotations

from collections.abc import Iterator

from fastserve.config.options import (
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
    SequenceState,
    SessionOptions,
)
from fastserve.repository.triton_defaults import DTYPE_OF, IDLE_US
from fastserve.repository.triton_refusals import HISTOGRAMS, idle
from fastserve.repository.triton_schema import (
    Control,
    ControlInput,
    Ensembling,
    InstanceGroup,
    ModelInput,
    ModelOutput,
    SequenceBatching,
    State,
    TritonConfig,
)
from fastserve.repository.triton_schema import (
    QueuePolicy as TritonQueuePolicy,
)

LATEST = -1
_FALSE_TRUE = (
    ("int32_false_true", "int32"),
    ("fp32_false_true", "float32"),
    ("bool_false_true", "bool"),
)


def options_of(config: TritonConfig) -> Options:
    """What the config asks of the engine, the workers and the backend."""
    metrics = config.model_metrics
    bounds = [
        control.histogram_options.buckets if control.histogram_options else []
        for control in (metrics.metric_control if metrics else ())
        if control.metric_identifier is not None and control.metric_identifier.family in HISTOGRAMS
    ]
    return Options(
        origin="config.pbtxt",
        model_file=config.default_model_filename,
        idle=idle(config),
        queue=_queue(config),
        sequences=_sequences(config.sequence_batching, config) if config.sequence_batching else None,
        ensemble=_ensemble(config.ensemble_scheduling or Ensembling(), config) if config.ensemble else None,
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


def _queue(config: TritonConfig) -> QueueOptions | None:
    dynamic = config.dynamic_batching
    if dynamic is None:
        return None
    default = _policy(dynamic.default_queue_policy or TritonQueuePolicy())
    own = {level: _policy(policy) for level, policy in dynamic.priority_queue_policy.items()}
    return QueueOptions(
        policies=[own.get(level, default) for level in range(1, max(1, dynamic.priority_levels) + 1)],
        default_level=dynamic.default_priority_level or 1,
        preferred_sizes=dynamic.preferred_batch_size,
        keep_order=dynamic.preserve_ordering,
    )


def _policy(given: TritonQueuePolicy) -> QueuePolicy:
    return QueuePolicy(
        reject=given.timeout_action == "REJECT",
        timeout_us=given.default_timeout_microseconds,
        may_override=given.allow_timeout_override,
        max_requests=given.max_queue_size,
    )


def _sequences(given: SequenceBatching, config: TritonConfig) -> SequenceOptions:
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


def _control(given: ControlInput, control: Control) -> SequenceControl:
    if control.kind == "CONTROL_SEQUENCE_CORRID":
        return SequenceControl(name=given.name, signal="id", dtype=DTYPE_OF[control.data_type])
    signal = control.kind.removeprefix("CONTROL_SEQUENCE_").lower()
    said = [(dtype, getattr(control, field)) for field, dtype in _FALSE_TRUE if getattr(control, field)]
    dtype, values = said[0] if said else ("int32", [])
    return SequenceControl(name=given.name, signal=signal, dtype=dtype, values=[float(v) for v in values])  # type: ignore[arg-type]


def _state(given: State, *, hidden: bool) -> SequenceState:
    first = given.initial_state[0] if given.initial_state else None
    return SequenceState(
        input=given.input_name,
        output=given.output_name,
        dtype=DTYPE_OF[given.data_type],
        shape=given.dims,
        first_shape=list(first.dims) if first and first.dims else [max(size, 1) for size in given.dims],
        first_file=(first.data_file or "") if first else "",
        first_name=first.name if first else "",
        hidden=hidden,
    )


def _ensemble(given: Ensembling, config: TritonConfig) -> EnsembleOptions:
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


def _needs(group: InstanceGroup) -> Needs:
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
