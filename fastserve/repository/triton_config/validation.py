"""Checks of a Triton config: contradictions, unsupported fields, and fields without effect.

`check` raises for a config that contradicts itself; Triton would not load it either. `refusals` lists fields
that need what this server does not have: the model is not loaded. `idle` lists fields that Triton on a
machine without a GPU accepts and ignores: they are ignored here too, and logged. Every other field is
honoured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from pathlib import PurePath
from typing import Any

import msgspec

from fastserve.backends.registry import BACKENDS, BY_TRITON_NAME
from fastserve.devices.inventory import MACHINE
from fastserve.errors import ConfigError
from fastserve.repository.placement import DTYPES
from fastserve.repository.triton_config.completion import FIL_FILES
from fastserve.repository.triton_config.messages import (
    BatchInput,
    BatchOutput,
    ModelDynamicBatching,
    ModelEnsembling,
    ModelInput,
    ModelInstanceGroup,
    ModelOutput,
    ModelSequenceBatching,
    ModelSequenceBatchingControl,
    TritonConfig,
)
from fastserve.settings.confined_file import is_inner_path
from fastserve.settings.fields import fault_text

MOST_WARMUPS = 1000

BATCH_TYPES = ("TYPE_INT32", "TYPE_FP32")

CORRID_TYPES = ("TYPE_UINT64", "TYPE_INT64", "TYPE_UINT32", "TYPE_INT32", "TYPE_STRING")


def check(config: TritonConfig, name: str) -> None:
    """Raise ConfigError for the first contradiction in the config. Tensors may still be incomplete."""
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
    """Yield faults of file names, which must stay inside the model's folder: a client may have written this
    config."""
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
    """Return the elements before, between and after the axes of any length: a reshape must keep them."""
    runs = [1]
    for dim in dims:
        if dim == -1:
            runs.append(1)
        else:
            runs[-1] *= dim
    return runs


def _group_faults(place: str, group: ModelInstanceGroup) -> Iterator[str]:
    if group.count < 0:
        yield fault_text(f"{place}.count", group.count, "a whole number from 1, or 0 for the default")
    if group.gpus and group.kind in ("KIND_CPU", "KIND_MODEL"):
        yield fault_text(f"{place}.gpus", group.gpus, f"nothing with kind {group.kind}")


def _dynamic_faults(dynamic: ModelDynamicBatching, max_batch_size: int) -> Iterator[str]:
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


def _sequence_faults(sequence: ModelSequenceBatching) -> Iterator[str]:
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


def _control_faults(place: str, control: ModelSequenceBatchingControl) -> Iterator[str]:
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


def _step_faults(config: TritonConfig, steps: ModelEnsembling) -> Iterator[str]:
    """Yield faults of the steps: every tensor is made once, before its first use, and every output is
    made."""
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


MOST_INSTANCES = 64

MOST_BATCH = 1 << 20

MOST_DELAY_US = 60_000_000

DTYPE = "dtype"

ACCELERATORS = ("openvino",)  # that onnxruntime models may name for a CPU

VLLM = (
    "backend 'vllm' is not run here: the text engine serves the same weights and clients. Put the files of "
    "the folder that model.json names as `model` (config.json, *.safetensors, tokenizer.json) into the "
    "version's folder, and model.yaml with `backend: text` in the place of config.pbtxt"
)

SAVED_MODEL_ALONE = (
    "tensorflow_savedmodel: write the graph as a SavedModel (tf.compat.v1.saved_model.simple_save) into "
    "model.savedmodel"
)

# Parameters of the backend fil that choose what it answers; others are about its speed.
FIL_PARAMETERS = (
    *("model_type", "output_class", "is_classifier", "predict_proba", "threshold"),
    "xgboost_allow_unknown_field",
)

HISTOGRAMS = ("nv_inference_first_response_histogram_ms",)


def refusals(config: TritonConfig) -> list[str]:
    """Return every field that needs what this server does not have, in words; [] for a config it can run."""
    return list(_refused(config))


def _refused(config: TritonConfig) -> Iterator[str]:
    if config.backend == "vllm":
        yield VLLM
    elif not config.ensemble and config.backend not in BY_TRITON_NAME:
        yield (  # Triton's words, vector "load bad"
            f"unable to find backend library for backend '{config.backend}', "
            "try specifying runtime on the model configuration."
        )
    if config.platform == "tensorflow_graphdef":
        yield fault_text("platform", config.platform, SAVED_MODEL_ALONE)
    if config.backend == "fil":
        yield from _refused_of_fil(config)
    library = f"libtriton_{config.backend}.so"
    if config.runtime not in ("", library):
        yield fault_text("runtime", config.runtime, f"nothing, or the backend's own, {library}")
    if config.max_batch_size > MOST_BATCH:
        yield fault_text("max_batch_size", config.max_batch_size, f"up to {MOST_BATCH}")
    for side in ("input", "output"):
        for number, tensor in enumerate(getattr(config, side)):
            yield from _refused_of_tensor(f"{side}[{number}]", tensor, config)
    for number, group in enumerate(config.instance_group):
        yield from _refused_of_group(f"instance_group[{number}]", group)
    yield from _refused_of_dtypes(config)
    if config.instance_group and all(group.passive for group in config.instance_group):
        yield fault_text("instance_group.passive", True, "false in at least one group")
    if config.ensemble and config.response_cache is not None and config.response_cache.enable:
        yield fault_text("response_cache.enable", True, "false for an ensemble: its models' may be kept")
    instances = instances_of(config)
    if instances > MOST_INSTANCES:
        yield fault_text("instance_group.count", instances, f"up to {MOST_INSTANCES} over all groups")
    yield from _refused_of_optimization(config)
    yield from _refused_of_scheduling(config)
    yield from _refused_of_the_rest(config)


def _refused_of_fil(config: TritonConfig) -> Iterator[str]:
    told = {name: parameter.string_value for name, parameter in config.parameters.items()}
    kind = told.get("model_type", "xgboost")
    if kind not in FIL_FILES:
        yield fault_text('parameters["model_type"]', kind, ", ".join(FIL_FILES))
    for name in ("output_class", "is_classifier", "predict_proba"):
        if told.get(name, "false").lower() not in ("true", "false"):
            yield fault_text(f'parameters["{name}"]', told[name], "true or false")
    try:
        float(told.get("threshold", "0.5"))
    except ValueError:
        yield fault_text('parameters["threshold"]', told["threshold"], "a number")


def _refused_of_tensor(place: str, tensor: ModelInput | ModelOutput, config: TritonConfig) -> Iterator[str]:
    for flag in ("is_shape_tensor", "is_non_linear_format_io"):
        if getattr(tensor, flag):
            yield fault_text(f"{place}.{flag}", True, "false: only TensorRT has such tensors")
    if config.backend == "onnxruntime" and config.max_batch_size and getattr(tensor, "optional", False):
        yield fault_text(f"{place}.optional", True, "false for onnxruntime models that batch")


def _refused_of_group(place: str, group: ModelInstanceGroup) -> Iterator[str]:
    there = {device.number for device in MACHINE.devices()} if group.kind == "KIND_GPU" else set()
    if group.kind == "KIND_GPU" and not there:
        yield fault_text(f"{place}.kind", group.kind, "KIND_AUTO, KIND_CPU or KIND_MODEL: there is no GPU")
    elif missing := [gpu for gpu in group.gpus if gpu not in there]:
        allowed = " or ".join(map(str, sorted(there))) or "nothing: there is no GPU"
        yield fault_text(f"{place}.gpus", missing[0], allowed)
    yield from _only_empty(f"{place}.profile", group.profile)


def dtype_of(config: TritonConfig, group: ModelInstanceGroup) -> str:
    """Return the dtype that our own parameters set for a PyTorch model in this group; "" for none."""
    if config.backend != BACKENDS["torch"].triton:
        return ""
    told = config.parameters.get(f"{DTYPE}.{group.name}") or config.parameters.get(DTYPE)
    return told.string_value if told is not None else ""


def _refused_of_dtypes(config: TritonConfig) -> Iterator[str]:
    if config.backend != BACKENDS["torch"].triton:
        return  # a parameter of that name is the model's own
    names = [group.name for group in config.instance_group]
    for key, parameter in config.parameters.items():
        kind, _, group = key.partition(".")
        if kind != DTYPE:
            continue
        if group and group not in names:
            yield fault_text(f"parameters[{key!r}]", group, "a group's name: " + ", ".join(names))
        elif parameter.string_value not in DTYPES:
            yield fault_text(f"parameters[{key!r}]", parameter.string_value, ", ".join(DTYPES))


def _refused_of_optimization(config: TritonConfig) -> Iterator[str]:
    given = config.optimization
    if given is None:
        return
    asked = given.execution_accelerators
    for accelerator in asked.cpu_execution_accelerator if asked and config.backend == "onnxruntime" else ():
        if accelerator.name not in ACCELERATORS:
            place = "optimization.execution_accelerators.cpu_execution_accelerator"
            yield fault_text(place, accelerator.name, " or ".join(ACCELERATORS))


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
    agents = config.model_repository_agents
    yield from _only_empty("model_repository_agents.agents", agents.agents if agents else [])
    libraries = config.model_operations
    if config.backend == "onnxruntime" and libraries is not None:
        yield from _only_empty("model_operations.op_library_filename", libraries.op_library_filename)


def instances_of(config: TritonConfig) -> int:
    """Return the workers of all groups; those of passive ones never run anything."""
    groups = [group for group in config.instance_group if not group.passive]
    return sum(group.count * (len(group.gpus) if group.kind == "KIND_GPU" else 1) for group in groups)


def ignored_fields(config: TritonConfig) -> list[str]:
    """Return the fields that are accepted and have no effect here, as in Triton without a GPU."""
    return list(_idle(config))


def _idle(config: TritonConfig) -> Iterator[str]:
    if config.cc_model_filenames:
        yield "cc_model_filenames"
    for number, group in enumerate(config.instance_group):
        for field in ("host_policy", "secondary_devices"):
            if getattr(group, field):
                yield f"instance_group[{number}].{field}"
        if group.passive:
            yield f"instance_group[{number}], being passive,"
    for control in config.model_metrics.metric_control if config.model_metrics else ():
        family = control.metric_identifier.family if control.metric_identifier else ""
        if family not in HISTOGRAMS:
            yield f"model_metrics.metric_control of {family!r}"
    yield from _idle_optimization(config)
    if config.backend == "fil":
        yield from (f'parameters["{name}"]' for name in config.parameters if name not in FIL_PARAMETERS)
    if config.backend == "python":
        libraries = config.model_operations.op_library_filename if config.model_operations else []
        for field, given in (
            ("batch_input", config.batch_input),
            ("batch_output", config.batch_output),
            ("model_operations", libraries),
        ):
            if given:
                yield field


def _idle_optimization(config: TritonConfig) -> Iterator[str]:
    given = config.optimization
    if given is None:
        return
    if given.priority != "PRIORITY_DEFAULT":
        yield "optimization.priority"
    if given.cuda is not None:
        yield "optimization.cuda"
    if given.gather_kernel_buffer_threshold:
        yield "optimization.gather_kernel_buffer_threshold"
    if given.graph is not None and given.graph.level and config.backend != "onnxruntime":
        yield "optimization.graph.level"
    asked = given.execution_accelerators
    if asked is not None and asked.gpu_execution_accelerator:
        yield "optimization.execution_accelerators.gpu_execution_accelerator"
    if asked is not None and asked.cpu_execution_accelerator and config.backend != "onnxruntime":
        yield "optimization.execution_accelerators.cpu_execution_accelerator"


def _only_empty(place: str, given: object, allowed: str = "nothing") -> Iterator[str]:
    if given:
        yield fault_text(place, msgspec.to_builtins(given), allowed)
