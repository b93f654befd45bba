"""What a Triton config may not say: faults of the file itself, and features this server does not have.

`check` raises for a config that contradicts itself (Triton would not take it up either); `refusals`
lists, field by field, what is well-formed and cannot be run here. A field in neither is honoured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from pathlib import PurePath
from typing import Any

import msgspec

from fastserve.config.fields import fault_text
from fastserve.errors import ConfigError
from fastserve.repository.triton_schema import (
    Control,
    DynamicBatching,
    Ensembling,
    InstanceGroup,
    ModelInput,
    ModelOutput,
    SequenceBatching,
    TritonConfig,
)

RUNNABLE = ("onnxruntime", "python")
MOST_INSTANCES = 64
MOST_BATCH = 1 << 20
MOST_WARMUPS = 1000
MOST_DELAY_US = 60_000_000
GRAPH_LEVELS = (0, -1, 1, 2)  # onnxruntime's: everything, basic, extended, nothing
CORRID_TYPES = ("TYPE_UINT64", "TYPE_INT64", "TYPE_UINT32", "TYPE_INT32", "TYPE_STRING")


def check(config: TritonConfig, name: str) -> None:
    """Raises ConfigError with the first thing that contradicts itself. Tensors may still be incomplete."""
    for fault in _faults(config, name):
        raise ConfigError(fault)


def _faults(config: TritonConfig, name: str) -> Iterator[str]:
    if config.name != name:
        yield fault_text("name", config.name, f"the name of the model's folder, {name}, or nothing")
    if config.max_batch_size < 0:
        yield fault_text("max_batch_size", config.max_batch_size, "a whole number from 0")
    yield from _policy_faults(config)
    yield from _tensor_faults("input", config.input, batching=config.max_batch_size > 0)
    yield from _tensor_faults("output", config.output, batching=config.max_batch_size > 0)
    for number, group in enumerate(config.instance_group):
        yield from _group_faults(f"instance_group[{number}]", group)
    if config.dynamic_batching is not None:
        yield from _dynamic_faults(config.dynamic_batching, config.max_batch_size)
    if config.sequence_batching is not None:
        yield from _sequence_faults(config.sequence_batching)
    if config.ensemble:
        yield from _ensemble_faults(config)
    yield from _warmup_faults(config)


def _policy_faults(config: TritonConfig) -> Iterator[str]:
    policy = config.version_policy
    if policy is None:
        return
    if policy.latest is not None and policy.latest.num_versions < 1:
        yield fault_text("version_policy.latest.num_versions", 0, "a whole number from 1")
    if policy.specific is not None and (not policy.specific.versions or min(policy.specific.versions) < 1):
        yield fault_text("version_policy.specific.versions", policy.specific.versions, "numbers from 1")


def _tensor_faults(
    side: str, tensors: Sequence[ModelInput | ModelOutput], *, batching: bool
) -> Iterator[str]:
    seen: set[str] = set()
    for number, tensor in enumerate(tensors):
        place = f"{side}[{number}]"
        if not tensor.name:
            yield fault_text(f"{place}.name", "", "text")
        if tensor.name in seen:
            yield fault_text(f"{place}.name", tensor.name, "a name given once")
        seen.add(tensor.name)
        if any(dim < 1 and dim != -1 for dim in tensor.dims):
            yield fault_text(f"{place}.dims", tensor.dims, "-1 and whole numbers from 1")
        if tensor.reshape is not None:
            yield from _reshape_faults(place, tensor.dims, tensor.reshape.shape, batching=batching)
        if isinstance(tensor, ModelInput) and tensor.format != "FORMAT_NONE" and len(tensor.dims) != 3:
            yield fault_text(f"{place}.dims", tensor.dims, f"3 of them with format {tensor.format}")


def _reshape_faults(place: str, dims: list[int], shape: list[int], *, batching: bool) -> Iterator[str]:
    if not dims:
        yield fault_text(f"{place}.dims", dims, "at least one, since reshape is given")
    elif not shape and (not batching or prod(dims) != 1):
        yield fault_text(f"{place}.reshape.shape", shape, "[] only where dims hold one element of a batch")
    elif any(dim < 1 and dim != -1 for dim in shape):
        yield fault_text(f"{place}.reshape.shape", shape, "-1 and whole numbers from 1")
    elif _runs(dims) != _runs(shape):
        yield fault_text(f"{place}.reshape.shape", shape, f"as many elements as dims {dims}")


def _runs(dims: Sequence[int]) -> list[int]:
    """Elements before, between and after the axes of any length: what a reshape must keep."""
    runs = [1]
    for dim in dims:
        if dim == -1:
            runs.append(1)
        else:
            runs[-1] *= dim
    return runs


def _group_faults(place: str, group: InstanceGroup) -> Iterator[str]:
    if group.count < 0:
        yield fault_text(f"{place}.count", group.count, "a whole number from 1, or 0 for the default")
    if group.gpus and group.kind in ("KIND_CPU", "KIND_MODEL"):
        yield fault_text(f"{place}.gpus", group.gpus, f"nothing with kind {group.kind}")


def _dynamic_faults(dynamic: DynamicBatching, max_batch_size: int) -> Iterator[str]:
    place, sizes = "dynamic_batching", dynamic.preferred_batch_size
    if any(not 1 <= size <= max_batch_size for size in sizes):
        yield fault_text(
            f"{place}.preferred_batch_size", sizes, f"whole numbers from 1 to max_batch_size {max_batch_size}"
        )
    levels, default = dynamic.priority_levels, dynamic.default_priority_level
    if default > levels or (levels and not default):
        yield fault_text(
            f"{place}.default_priority_level",
            default,
            f"a whole number from 1 to priority_levels {levels}" if levels else "0 without priority_levels",
        )
    for level in dynamic.priority_queue_policy:
        if not 1 <= level <= levels:
            yield fault_text(f"{place}.priority_queue_policy", level, f"a level from 1 to {levels}")
    if dynamic.preserve_ordering and levels > 1:
        yield f"{place}.preserve_ordering: cannot be kept together with priority_levels {levels}"


def _sequence_faults(sequence: SequenceBatching) -> Iterator[str]:
    place = "sequence_batching"
    if sequence.oldest is not None and sequence.oldest.max_candidate_sequences < 0:
        yield fault_text(f"{place}.oldest.max_candidate_sequences", sequence.oldest, "a whole number from 0")
    if sequence.direct is not None and not 0.0 <= sequence.direct.minimum_slot_utilization <= 1.0:
        given = sequence.direct.minimum_slot_utilization
        yield fault_text(f"{place}.direct.minimum_slot_utilization", given, "a number from 0 to 1")
    kinds: set[str] = set()
    names: set[str] = set()
    for number, tensor in enumerate(sequence.control_input):
        where = f"{place}.control_input[{number}]"
        if not tensor.name or tensor.name in names:
            yield fault_text(f"{where}.name", tensor.name, "a name of its own")
        names.add(tensor.name)
        if not tensor.control:
            yield fault_text(f"{where}.control", [], "at least one control")
        for control in tensor.control:
            if control.kind in kinds:
                yield fault_text(f"{where}.control.kind", control.kind, "each kind once")
            kinds.add(control.kind)
            yield from _control_faults(where, control)
    for number, state in enumerate(sequence.state):
        yield from _state_faults(f"{place}.state[{number}]", state)


def _control_faults(place: str, control: Control) -> Iterator[str]:
    pairs = (control.int32_false_true, control.fp32_false_true, control.bool_false_true)
    given = [pair for pair in pairs if pair]
    if control.kind == "CONTROL_SEQUENCE_CORRID":
        if given:
            yield f"{place}: {control.kind} takes data_type and no pair of false and true"
        if control.data_type not in CORRID_TYPES:
            yield fault_text(f"{place}.control.data_type", control.data_type, " or ".join(CORRID_TYPES))
    elif len(given) != 1 or len(given[0]) != 2:
        yield (
            f"{place}: {control.kind} takes exactly one of int32_false_true, fp32_false_true and "
            "bool_false_true, with two values"
        )


def _state_faults(place: str, state: Any) -> Iterator[str]:
    for side in ("input_name", "output_name"):
        if not getattr(state, side):
            yield fault_text(f"{place}.{side}", "", "text")
    if state.data_type == "TYPE_INVALID":
        yield fault_text(f"{place}.data_type", state.data_type, "a type")
    if any(dim < 1 and dim != -1 for dim in state.dims) or not state.dims:
        yield fault_text(f"{place}.dims", state.dims, "-1 and whole numbers from 1")
    for initial in state.initial_state:
        if initial.data_type != state.data_type:
            yield fault_text(f"{place}.initial_state.data_type", initial.data_type, state.data_type)
        if initial.zero_data is None and initial.data_file is None:
            yield f"{place}.initial_state: takes zero_data or data_file"
        if any(dim < 1 for dim in initial.dims):
            yield fault_text(f"{place}.initial_state.dims", initial.dims, "whole numbers from 1")


def _ensemble_faults(config: TritonConfig) -> Iterator[str]:
    steps = config.ensemble_scheduling
    if config.platform != "ensemble":
        yield fault_text("platform", config.platform, "ensemble, since ensemble_scheduling is given")
    if steps is None or not steps.step:
        yield fault_text("ensemble_scheduling.step", [], "at least one step")
        return
    for field in ("instance_group", "optimization", "model_warmup", "backend"):
        if getattr(config, field):
            yield f"{field}: an ensemble runs no model of its own and takes none"
    for side in ("input", "output"):
        if not getattr(config, side):
            yield fault_text(side, [], "at least one tensor")
    yield from _step_faults(config, steps)


def _step_faults(config: TritonConfig, steps: Ensembling) -> Iterator[str]:
    """Every tensor is made once, before anybody needs it, and every output is made."""
    made = {tensor.name for tensor in config.input}
    waiting = list(enumerate(steps.step))
    for number, step in waiting:
        place = f"ensemble_scheduling.step[{number}]"
        if not step.model_name:
            yield fault_text(f"{place}.model_name", "", "text")
        if step.model_version < -1:
            yield fault_text(f"{place}.model_version", step.model_version, "-1 or a version")
        for side, given in (("input_map", step.input_map), ("output_map", step.output_map)):
            if not given or not all(given.values()):
                yield fault_text(f"{place}.{side}", given, "at least one tensor, each with a name")
    outputs = [name for step in steps.step for name in step.output_map.values()]
    for name in outputs:
        if outputs.count(name) > 1 or name in made:
            yield f"ensemble_scheduling: tensor {name} is made more than once"
    while waiting:
        ready = [pair for pair in waiting if made.issuperset(pair[1].input_map.values())]
        if not ready:
            number, step = waiting[0]
            missing = ", ".join(sorted(set(step.input_map.values()) - made))
            yield f"ensemble_scheduling.step[{number}].input_map: nothing makes {missing} in time"
            return
        made.update(name for _, step in ready for name in step.output_map.values())
        waiting = [pair for pair in waiting if pair not in ready]
    for number, tensor in enumerate(config.output):
        if tensor.name not in outputs:
            yield f"output[{number}]: no step of ensemble_scheduling makes {tensor.name}"


def _warmup_faults(config: TritonConfig) -> Iterator[str]:
    for number, sample in enumerate(config.model_warmup):
        place = f"model_warmup[{number}]"
        if not sample.inputs:
            yield fault_text(f"{place}.inputs", {}, "every input of the model")
        if sample.count > MOST_WARMUPS:
            yield fault_text(f"{place}.count", sample.count, f"up to {MOST_WARMUPS}")
        if sample.batch_size > max(config.max_batch_size, 1):
            yield fault_text(f"{place}.batch_size", sample.batch_size, f"up to {config.max_batch_size}")
        for name, given in sample.inputs.items():
            if given.data_type == "TYPE_INVALID":
                yield fault_text(f"{place}.inputs.{name}.data_type", given.data_type, "a type")
            if any(dim < 1 for dim in given.dims):
                yield fault_text(f"{place}.inputs.{name}.dims", given.dims, "whole numbers from 1")
            if (
                given.input_data_file is not None
                and PurePath(given.input_data_file).name != given.input_data_file
            ):
                wanted = "the name of a file in the model's folder warmup"
                yield fault_text(f"{place}.inputs.{name}.input_data_file", given.input_data_file, wanted)
            if given.zero_data is None and given.random_data is None and given.input_data_file is None:
                yield f"{place}.inputs.{name}: takes zero_data, random_data or input_data_file"


def refusals(config: TritonConfig) -> list[str]:
    """Every field that asks for what this server does not have, in words; [] for a config it can run."""
    return list(_refused(config))


def _refused(config: TritonConfig) -> Iterator[str]:
    if not config.ensemble and config.backend not in RUNNABLE:
        yield (  # Triton's words, vector "load bad"
            f"unable to find backend library for backend '{config.backend}', "
            "try specifying runtime on the model configuration."
        )
    if config.runtime:
        yield fault_text("runtime", config.runtime, "nothing: the backend's own")
    if config.max_batch_size > MOST_BATCH:
        yield fault_text("max_batch_size", config.max_batch_size, f"up to {MOST_BATCH}")
    for side in ("input", "output"):
        for number, tensor in enumerate(getattr(config, side)):
            yield from _refused_of_tensor(f"{side}[{number}]", tensor, config.backend)
    for field in ("batch_input", "batch_output", "cc_model_filenames"):
        yield from _only_empty(field, getattr(config, field), "nothing: no backend of this server uses it")
    for number, group in enumerate(config.instance_group):
        yield from _refused_of_group(f"instance_group[{number}]", group)
    instances = sum(group.count for group in config.instance_group)
    if instances > MOST_INSTANCES:
        yield fault_text("instance_group.count", instances, f"up to {MOST_INSTANCES} over all groups")
    yield from _refused_of_optimization(config)
    yield from _refused_of_scheduling(config)
    yield from _refused_of_the_rest(config)


def _refused_of_tensor(place: str, tensor: ModelInput | ModelOutput, backend: str) -> Iterator[str]:
    for flag in ("is_shape_tensor", "is_non_linear_format_io"):
        if getattr(tensor, flag):
            yield fault_text(f"{place}.{flag}", True, "false: only TensorRT has such tensors")
    if backend == "onnxruntime":
        for flag in ("allow_ragged_batch", "optional"):
            if getattr(tensor, flag, False):
                yield fault_text(f"{place}.{flag}", True, "false for onnxruntime models")


def _refused_of_group(place: str, group: InstanceGroup) -> Iterator[str]:
    if group.kind == "KIND_GPU":
        yield fault_text(f"{place}.kind", group.kind, "KIND_AUTO, KIND_CPU or KIND_MODEL: there is no GPU")
    if group.passive:
        yield fault_text(f"{place}.passive", True, "false")
    for field in ("gpus", "secondary_devices", "profile", "host_policy"):
        yield from _only_empty(f"{place}.{field}", getattr(group, field))


def _refused_of_optimization(config: TritonConfig) -> Iterator[str]:
    given = config.optimization
    if given is None:
        return
    for name in ("gpu_execution_accelerator", "cpu_execution_accelerator"):
        asked = getattr(given.execution_accelerators, name, [])
        yield from _only_empty(f"optimization.execution_accelerators.{name}", asked)
    for name in ("graphs", "busy_wait_events", "graph_spec", "output_copy_stream"):
        asked = getattr(given.cuda, name, False)
        yield from _only_empty(f"optimization.cuda.{name}", asked, "nothing: there is no GPU")
    if given.graph is not None and given.graph.level:
        levels = GRAPH_LEVELS if config.backend == "onnxruntime" else (0,)
        if given.graph.level not in levels:
            yield fault_text("optimization.graph.level", given.graph.level, " or ".join(map(str, levels)))
    if given.gather_kernel_buffer_threshold:
        yield fault_text(
            "optimization.gather_kernel_buffer_threshold", given.gather_kernel_buffer_threshold, "0"
        )
    if given.priority != "PRIORITY_DEFAULT":
        yield fault_text("optimization.priority", given.priority, "PRIORITY_DEFAULT")


def _refused_of_scheduling(config: TritonConfig) -> Iterator[str]:
    dynamic, sequence, ensemble = (
        config.dynamic_batching,
        config.sequence_batching,
        config.ensemble_scheduling,
    )
    if dynamic is not None and dynamic.max_queue_delay_microseconds > MOST_DELAY_US:
        given = dynamic.max_queue_delay_microseconds
        yield fault_text(
            "dynamic_batching.max_queue_delay_microseconds", given, f"a whole number to {MOST_DELAY_US}"
        )
    if sequence is not None:
        if sequence.iterative_sequence:
            yield fault_text("sequence_batching.iterative_sequence", True, "false")
        for number, state in enumerate(sequence.state):
            if state.use_growable_memory:
                yield fault_text(f"sequence_batching.state[{number}].use_growable_memory", True, "false")
    for number, step in enumerate(ensemble.step if ensemble is not None else ()):
        if step.model_namespace:
            place = f"ensemble_scheduling.step[{number}].model_namespace"
            yield fault_text(place, step.model_namespace, "nothing: models have no namespaces")


def _refused_of_the_rest(config: TritonConfig) -> Iterator[str]:
    for field, inner in (
        ("model_operations", "op_library_filename"),
        ("model_repository_agents", "agents"),
        ("model_metrics", "metric_control"),
    ):
        yield from _only_empty(f"{field}.{inner}", getattr(getattr(config, field), inner, []))


def _only_empty(place: str, given: object, allowed: str = "nothing") -> Iterator[str]:
    if given:
        yield fault_text(place, msgspec.to_builtins(given), allowed)
