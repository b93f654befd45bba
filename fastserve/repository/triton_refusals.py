"""What a well-formed Triton config asks for that is not here: what is refused, and what has no effect.

A field that Triton on a machine without a GPU takes up and passes over is taken up here too, and named in the
log (`idle`); everything else that this server does not have keeps the model from being loaded (`refusals`). A
field in neither is honoured.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from fastserve.backends.registry import BACKENDS, BY_TRITON_NAME
from fastserve.config.fields import fault_text
from fastserve.devices.found import MACHINE
from fastserve.repository.placement import DTYPES
from fastserve.repository.triton_schema import InstanceGroup, ModelInput, ModelOutput, TritonConfig

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
HISTOGRAMS = ("nv_inference_first_response_histogram_ms",)


def refusals(config: TritonConfig) -> list[str]:
    """Every field that asks for what this server does not have, in words; [] for a config it can run."""
    return list(_refused(config))


def _refused(config: TritonConfig) -> Iterator[str]:
    if config.backend == "vllm":
        yield VLLM
    elif not config.ensemble and config.backend not in BY_TRITON_NAME:
        yield (  # Triton's words, vector "load bad"
            f"unable to find backend library for backend '{config.backend}', "
            "try specifying runtime on the model configuration."
        )
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


def _refused_of_tensor(place: str, tensor: ModelInput | ModelOutput, config: TritonConfig) -> Iterator[str]:
    for flag in ("is_shape_tensor", "is_non_linear_format_io"):
        if getattr(tensor, flag):
            yield fault_text(f"{place}.{flag}", True, "false: only TensorRT has such tensors")
    if config.backend == "onnxruntime" and config.max_batch_size and getattr(tensor, "optional", False):
        yield fault_text(f"{place}.optional", True, "false for onnxruntime models that batch")


def _refused_of_group(place: str, group: InstanceGroup) -> Iterator[str]:
    there = {device.number for device in MACHINE.devices()} if group.kind == "KIND_GPU" else set()
    if group.kind == "KIND_GPU" and not there:
        yield fault_text(f"{place}.kind", group.kind, "KIND_AUTO, KIND_CPU or KIND_MODEL: there is no GPU")
    elif missing := [gpu for gpu in group.gpus if gpu not in there]:
        allowed = " or ".join(map(str, sorted(there))) or "nothing: there is no GPU"
        yield fault_text(f"{place}.gpus", missing[0], allowed)
    yield from _only_empty(f"{place}.profile", group.profile)


def dtype_of(config: TritonConfig, group: InstanceGroup) -> str:
    """What parameters of ours say of the type a PyTorch model computes in, in this group; "" for nothing."""
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
    """Workers of all groups; those of passive ones never run anything."""
    groups = [group for group in config.instance_group if not group.passive]
    return sum(group.count * (len(group.gpus) if group.kind == "KIND_GPU" else 1) for group in groups)


def idle(config: TritonConfig) -> list[str]:
    """Fields that are taken up and do nothing here, as they do nothing in Triton without a GPU."""
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
