"""config.pbtxt -> TritonConfig -> our ModelConfig, and back to what the config call shows.

    read_triton_config(folder)     text, names checked, defaults filled in as Triton does
    parse_triton_json(text, name)  the same of the JSON a load call brings
    to_model_config(config)        what the engine and the workers go by; `fault` says why it cannot be run
    config_json(config, version)   GET /v2/models/NAME/config

The messages are `triton_schema`, what contradicts itself `triton_rules`, what is refused `triton_refusals`,
what is filled in `triton_defaults`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fastserve.backends.registry import BY_TRITON_NAME, find_backend
from fastserve.config import DEFAULT_POLICY, PolicyChoice, VersionPolicy, convert
from fastserve.config.options import Options
from fastserve.config.text_proto import parse_text
from fastserve.config.yaml_text import read_text
from fastserve.devices.found import MACHINE
from fastserve.errors import ConfigError
from fastserve.repository.model_config import ModelConfig, TensorConfig, WarmupSample, with_places
from fastserve.repository.placement import Place, place_group
from fastserve.repository.triton_defaults import DATA_TYPE, DTYPE_OF, complete, fill_defaults
from fastserve.repository.triton_json import plain_from_json, to_json
from fastserve.repository.triton_options import options_of
from fastserve.repository.triton_refusals import dtype_of, instances_of, refusals
from fastserve.repository.triton_rules import check
from fastserve.repository.triton_schema import (
    DynamicBatching,
    InstanceGroup,
    ModelInput,
    ModelOutput,
    TritonConfig,
    TritonPolicy,
    Warmup,
)
from fastserve.repository.triton_text import config_schema
from fastserve.tensor import DTYPES, TensorSpec

if TYPE_CHECKING:
    from fastserve.repository.version import Version

TRITON_FILE = "config.pbtxt"
QUEUE_ROWS = 1024  # shared memory's bound; queue policies count requests before it


def read_triton_config(folder: Path, name: str = "") -> TritonConfig:
    """The config.pbtxt of a model folder, checked and with defaults filled in; `name` for the folder's own.

    Raises ConfigError naming the field, what was given and what is allowed.
    """
    return parse_triton_text(read_text(folder / TRITON_FILE, TRITON_FILE), name or folder.name)


def parse_triton_text(text: str, name: str) -> TritonConfig:
    """A config.pbtxt's text as the config of model `name`. Raises ConfigError."""
    return make_triton_config(parse_text(text, config_schema(), TRITON_FILE), name)


def parse_triton_json(text: str, name: str) -> TritonConfig:
    """The JSON a load call brings as `config`, as the config of model `name`. Raises ConfigError."""
    return make_triton_config(plain_from_json(text, "config"), name, "config")


def make_triton_config(raw: Mapping[str, Any], name: str, origin: str = TRITON_FILE) -> TritonConfig:
    """Plain values as a checked config with defaults filled in. Raises ConfigError."""
    config = fill_defaults(convert(dict(raw), TritonConfig, origin), name)
    try:
        check(config, name)
    except ConfigError as fault:
        raise ConfigError(f"{origin}: {fault}") from None
    return config


def to_model_config(config: TritonConfig, folder: Path = Path()) -> ModelConfig:
    """What the engine and the workers go by; `triton` keeps the whole config.

    `folder` is the model's, where the files of warm-up samples lie.
    A config that cannot be run here has `fault`: its versions then fail to load with these words.
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
    """With the devices of its groups, and the types that parameters say: `dtype`, `dtype.GROUP`."""
    places: list[Place] = []
    for group in config.instance_group:
        if group.passive:
            continue
        on_gpus, dtype = group.kind == "KIND_GPU", dtype_of(config, group)
        found = place_group(group.gpus, group.count, MACHINE) if on_gpus else [Place()] * group.count
        places += [msgspec.structs.replace(place, dtype=dtype) for place in found]
    return made if all(place == Place() for place in places) else with_places(made, places)


def _tensors(tensors: list[ModelInput] | list[ModelOutput]) -> dict[str, TensorConfig]:
    """Nothing unless every description is whole: the backend then tells them when it has loaded the model."""
    if any(t.data_type not in DTYPE_OF or not (t.dims or t.reshape is not None) for t in tensors):
        return {}
    return {
        tensor.name: TensorConfig(dtype=DTYPE_OF[tensor.data_type], shape=list(tensor.dims))  # type: ignore[arg-type]
        for tensor in tensors
    }


def _warmup(sample: Warmup, folder: Path) -> WarmupSample:
    inputs: dict[str, Any] = {}
    for name, given in sample.inputs.items():
        file = given.input_data_file
        data = "file" if file is not None else "random" if given.random_data else "zeros"
        inputs[name] = {"dims": given.dims, "data": data}
        if file is not None:
            inputs[name]["file"] = str(folder / "warmup" / Path(file).name)
    return WarmupSample(inputs=inputs, rows=sample.batch_size or 1, count=min(sample.count or 1, 1000))


def policy_of(config: TritonConfig) -> VersionPolicy:
    """version_policy in our words."""
    given = config.version_policy
    if given is None:
        return DEFAULT_POLICY
    if given.all is not None:
        return "all"
    if given.specific is not None:
        return PolicyChoice(specific=list(given.specific.versions))
    return PolicyChoice(latest=given.latest.num_versions if given.latest else 1)


def delay_us(config: TritonConfig) -> int:
    """Microseconds a request may wait for company, whichever batcher is asked for."""
    if config.dynamic_batching is not None:
        return config.dynamic_batching.max_queue_delay_microseconds
    sequence = config.sequence_batching
    if sequence is None:
        return 0
    strategy = sequence.oldest or sequence.direct
    return strategy.max_queue_delay_microseconds if strategy is not None else 0


_THREADS = {"onnxruntime": "intra_op_thread_count", "pytorch": "INTRA_OP_THREAD_COUNT"}


def threads_of(config: TritonConfig) -> int:
    """Threads of one worker: parameter intra_op_thread_count of onnxruntime models, INTRA_OP_THREAD_COUNT of
    pytorch ones, 1 otherwise."""
    given = config.parameters.get(_THREADS.get(config.backend, ""))
    if given is None or not given.string_value.isdecimal():
        return 1
    return min(int(given.string_value), 1024)


def with_tensors(
    config: ModelConfig, inputs: Mapping[str, TensorSpec], outputs: Mapping[str, TensorSpec]
) -> ModelConfig:
    """The config with what a loaded model says of its tensors in `triton`; a native one as it is."""
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
    """A Triton model's config with what the model itself has said of these fields. Raises ConfigError."""
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
    """The config as Triton's config call shows it, with what a loaded `version` says of its tensors.

    A native model's is made up of its model.yaml.
    """
    if isinstance(config, ModelConfig):
        config = triton_view(config, version.model if version is not None else "")
    if version is not None and not config.ensemble:
        config = complete(config, version.inputs, version.outputs)
    return to_json(config)


def triton_view(config: ModelConfig, name: str) -> TritonConfig:
    """The TritonConfig a ModelConfig was made of; for a native model, one that says the same."""
    if config.triton is not None:
        # Kept as JSON, where the keys of a map are text.
        return convert(config.triton, TritonConfig, TRITON_FILE, lax=True)
    backend = find_backend(config.backend).triton or config.backend
    policy = config.version_policy
    dynamic = DynamicBatching(max_queue_delay_microseconds=config.max_queue_delay_us)
    made = TritonConfig(
        name=name,
        backend=backend,
        version_policy=convert({"all": {}} if policy == "all" else _policy_plain(policy), TritonPolicy, name),
        max_batch_size=config.max_batch_size,
        input=[_shown(ModelInput, key, tensor) for key, tensor in config.inputs.items()],
        output=[_shown(ModelOutput, key, tensor) for key, tensor in config.outputs.items()],
        dynamic_batching=dynamic if config.batching else None,
        instance_group=_groups_of(config),
    )
    return fill_defaults(made, name)


def _groups_of(config: ModelConfig) -> list[InstanceGroup]:
    """A native model's workers, as groups."""
    gpus = sorted({place.gpu for place in config.places if place.gpu >= 0})
    cpus = sum(place.gpu < 0 for place in config.places) if config.places else config.instances
    on_gpus = InstanceGroup(kind="KIND_GPU", count=(config.instances - cpus) // max(len(gpus), 1), gpus=gpus)
    on_cpus = InstanceGroup(kind="KIND_CPU", count=cpus)
    return ([on_gpus] if gpus else []) + ([on_cpus] if cpus else [])


def _policy_plain(policy: PolicyChoice) -> dict[str, Any]:
    if policy.specific is not None:
        return {"specific": {"versions": policy.specific}}
    return {"latest": {"num_versions": policy.latest or 1}}


def _shown(kind: type[Any], name: str, tensor: TensorConfig) -> Any:
    dtype = DATA_TYPE.get(DTYPES[tensor.dtype].name, "TYPE_INVALID")
    return kind(name=name, data_type=dtype, dims=list(tensor.shape or []))
