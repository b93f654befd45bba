"""What a Triton config may not say: faults of the file itself. What is not here is `triton_refusals`.

`check` raises for a config that contradicts itself; Triton would not take it up either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from pathlib import PurePath
from typing import Any

from fastserve.config.confined import is_inner_path
from fastserve.config.fields import fault_text
from fastserve.errors import ConfigError
from fastserve.repository.triton_schema import (
    BatchInput,
    BatchOutput,
    Control,
    DynamicBatching,
    Ensembling,
    InstanceGroup,
    ModelInput,
    ModelOutput,
    SequenceBatching,
    TritonConfig,
)

MOST_WARMUPS = 1000
BATCH_TYPES = ("TYPE_INT32", "TYPE_FP32")
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
    yield from _batch_io_faults(config)
    yield from _warmup_faults(config)
    yield from _file_faults(config)


def _file_faults(config: TritonConfig) -> Iterator[str]:
    """Files are named inside the model's folder: a client may have written this config."""
    files = [("default_model_filename", config.default_model_filename, "version's")]
    files += [(f"output {one.name}: label_filename", one.label_filename, "model's") for one in config.output]
    for field, name, whose in files:
        if name and not is_inner_path(name):
            yield fault_text(field, name, f"a path inside the {whose} folder")


def _batch_io_faults(config: TritonConfig) -> Iterator[str]:
    inputs, outputs = ({tensor.name for tensor in side} for side in (config.input, config.output))
    made: list[tuple[str, BatchInput | BatchOutput]] = [
        *((f"batch_input[{number}]", one) for number, one in enumerate(config.batch_input)),
        *((f"batch_output[{number}]", one) for number, one in enumerate(config.batch_output)),
    ]
    for place, one in made:
        if len(one.source_input) != 1 or one.source_input[0] not in inputs:
            yield fault_text(f"{place}.source_input", one.source_input, "the name of one input")
        if not one.target_name:
            yield fault_text(f"{place}.target_name", [], "at least one name")
        if isinstance(one, BatchInput) and one.data_type not in BATCH_TYPES:
            yield fault_text(f"{place}.data_type", one.data_type, " or ".join(BATCH_TYPES))
    names = [name for one in config.batch_output for name in one.target_name]
    for name in names:
        if name not in outputs or names.count(name) > 1:
            yield fault_text("batch_output.target_name", name, "names of outputs, each once")


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
