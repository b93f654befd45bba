"""The messages of model_config.proto as structs, in the order Triton prints them (triton_v2 spec 17).

Shape only: how they are read is `triton_text` and `triton_json`, which values are refused
`triton_rules`, what the fields lead to `triton_config`. An unset message is None.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

Bool = Annotated[bool, Meta(extra={"proto": "bool"})]
Text = Annotated[str, Meta(extra={"proto": "string"})]
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1, extra={"proto": "int32"})]
UInt32 = Annotated[int, Meta(ge=0, le=2**32 - 1, extra={"proto": "uint32"})]
Int64 = Annotated[int, Meta(extra={"proto": "int64"})]
UInt64 = Annotated[int, Meta(ge=0, extra={"proto": "uint64"})]
Float = Annotated[float, Meta(extra={"proto": "float"})]
Double = Annotated[float, Meta(extra={"proto": "double"})]

# Every enum of the file counts up from 0, so a name's place is its number.
DataType = Literal[
    "TYPE_INVALID",
    "TYPE_BOOL",
    "TYPE_UINT8",
    "TYPE_UINT16",
    "TYPE_UINT32",
    "TYPE_UINT64",
    "TYPE_INT8",
    "TYPE_INT16",
    "TYPE_INT32",
    "TYPE_INT64",
    "TYPE_FP16",
    "TYPE_FP32",
    "TYPE_FP64",
    "TYPE_STRING",
    "TYPE_BF16",
]
InputFormat = Literal["FORMAT_NONE", "FORMAT_NHWC", "FORMAT_NCHW"]
InstanceKind = Literal["KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL"]
BatchInputKind = Literal[
    "BATCH_ELEMENT_COUNT",
    "BATCH_ACCUMULATED_ELEMENT_COUNT",
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO",
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE",
    "BATCH_ITEM_SHAPE",
    "BATCH_ITEM_SHAPE_FLATTEN",
]
ControlKind = Literal[
    "CONTROL_SEQUENCE_START", "CONTROL_SEQUENCE_READY", "CONTROL_SEQUENCE_END", "CONTROL_SEQUENCE_CORRID"
]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A message: fields by their proto names. CHOICES: oneof -> the fields that exclude each other."""

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {}


class Empty(Message, frozen=True):
    """A message without fields of its own."""


class RateResource(Message, frozen=True):
    name: Text = ""
    is_global: Bool = msgspec.field(name="global", default=False)
    count: UInt32 = 0


class RateLimiter(Message, frozen=True):
    resources: list[RateResource] = []
    priority: UInt32 = 0


class SecondaryDevice(Message, frozen=True):
    kind: Literal["KIND_NVDLA"] = "KIND_NVDLA"
    device_id: Int64 = 0


class InstanceGroup(Message, frozen=True):
    name: Text = ""
    kind: InstanceKind = "KIND_AUTO"
    count: Int32 = 0
    rate_limiter: RateLimiter | None = None
    gpus: list[Int32] = []
    secondary_devices: list[SecondaryDevice] = []
    profile: list[Text] = []
    passive: Bool = False
    host_policy: Text = ""


class Reshape(Message, frozen=True):
    shape: list[Int64] = []


class ModelInput(Message, frozen=True):
    name: Text = ""
    data_type: DataType = "TYPE_INVALID"
    format: InputFormat = "FORMAT_NONE"
    dims: list[Int64] = []
    reshape: Reshape | None = None
    is_shape_tensor: Bool = False
    allow_ragged_batch: Bool = False
    optional: Bool = False
    is_non_linear_format_io: Bool = False


class ModelOutput(Message, frozen=True):
    name: Text = ""
    data_type: DataType = "TYPE_INVALID"
    dims: list[Int64] = []
    reshape: Reshape | None = None
    label_filename: Text = ""
    is_shape_tensor: Bool = False
    is_non_linear_format_io: Bool = False


class BatchInput(Message, frozen=True):
    kind: BatchInputKind = "BATCH_ELEMENT_COUNT"
    target_name: list[Text] = []
    data_type: DataType = "TYPE_INVALID"
    source_input: list[Text] = []


class BatchOutput(Message, frozen=True):
    target_name: list[Text] = []
    kind: Literal["BATCH_SCATTER_WITH_INPUT_SHAPE"] = "BATCH_SCATTER_WITH_INPUT_SHAPE"
    source_input: list[Text] = []


class Latest(Message, frozen=True):
    num_versions: UInt32 = 0


class Specific(Message, frozen=True):
    versions: list[Int64] = []


class TritonPolicy(Message, frozen=True):
    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {"policy_choice": ("latest", "all", "specific")}
    latest: Latest | None = None
    all: Empty | None = None
    specific: Specific | None = None


class Graph(Message, frozen=True):
    level: Int32 = 0


class GraphShape(Message, frozen=True):
    dim: list[Int64] = []


class LowerBound(Message, frozen=True):
    batch_size: Int32 = 0
    input: dict[Text, GraphShape] = {}


class GraphSpec(Message, frozen=True):
    batch_size: Int32 = 0
    input: dict[Text, GraphShape] = {}
    graph_lower_bound: LowerBound | None = None


class Cuda(Message, frozen=True):
    graphs: Bool = False
    busy_wait_events: Bool = False
    graph_spec: list[GraphSpec] = []
    output_copy_stream: Bool = False


class Accelerator(Message, frozen=True):
    name: Text = ""
    parameters: dict[Text, Text] = {}


class Accelerators(Message, frozen=True):
    gpu_execution_accelerator: list[Accelerator] = []
    cpu_execution_accelerator: list[Accelerator] = []


class PinnedMemory(Message, frozen=True):
    enable: Bool = False


class Optimization(Message, frozen=True):
    graph: Graph | None = None
    priority: Literal["PRIORITY_DEFAULT", "PRIORITY_MAX", "PRIORITY_MIN"] = "PRIORITY_DEFAULT"
    cuda: Cuda | None = None
    execution_accelerators: Accelerators | None = None
    input_pinned_memory: PinnedMemory | None = None
    output_pinned_memory: PinnedMemory | None = None
    gather_kernel_buffer_threshold: UInt32 = 0
    eager_batching: Bool = False


class QueuePolicy(Message, frozen=True):
    timeout_action: Literal["REJECT", "DELAY"] = "REJECT"
    default_timeout_microseconds: UInt64 = 0
    allow_timeout_override: Bool = False
    max_queue_size: UInt32 = 0


class DynamicBatching(Message, frozen=True):
    preferred_batch_size: list[Int32] = []
    max_queue_delay_microseconds: UInt64 = 0
    preserve_ordering: Bool = False
    priority_levels: UInt64 = 0
    default_priority_level: UInt64 = 0
    default_queue_policy: QueuePolicy | None = None
    priority_queue_policy: dict[UInt64, QueuePolicy] = {}


class Control(Message, frozen=True):
    kind: ControlKind = "CONTROL_SEQUENCE_START"
    int32_false_true: list[Int32] = []
    fp32_false_true: list[Float] = []
    bool_false_true: list[Bool] = []
    data_type: DataType = "TYPE_INVALID"


class ControlInput(Message, frozen=True):
    name: Text = ""
    control: list[Control] = []


class InitialState(Message, frozen=True):
    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {"state_data": ("zero_data", "data_file")}
    data_type: DataType = "TYPE_INVALID"
    dims: list[Int64] = []
    zero_data: Bool | None = None
    data_file: Text | None = None
    name: Text = ""


class State(Message, frozen=True):
    input_name: Text = ""
    output_name: Text = ""
    data_type: DataType = "TYPE_INVALID"
    dims: list[Int64] = []
    initial_state: list[InitialState] = []
    use_same_buffer_for_input_output: Bool = False
    use_growable_memory: Bool = False


class Direct(Message, frozen=True):
    max_queue_delay_microseconds: UInt64 = 0
    minimum_slot_utilization: Float = 0.0


class Oldest(Message, frozen=True):
    max_candidate_sequences: Int32 = 0
    preferred_batch_size: list[Int32] = []
    max_queue_delay_microseconds: UInt64 = 0
    preserve_ordering: Bool = False


class SequenceBatching(Message, frozen=True):
    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {"strategy_choice": ("direct", "oldest")}
    direct: Direct | None = None
    oldest: Oldest | None = None
    max_sequence_idle_microseconds: UInt64 = 0
    control_input: list[ControlInput] = []
    state: list[State] = []
    iterative_sequence: Bool = False


class EnsembleStep(Message, frozen=True):
    model_name: Text = ""
    model_version: Int64 = 0
    input_map: dict[Text, Text] = {}
    output_map: dict[Text, Text] = {}
    model_namespace: Text = ""


class Ensembling(Message, frozen=True):
    step: list[EnsembleStep] = []
    max_inflight_requests: UInt32 = 0


class Parameter(Message, frozen=True):
    string_value: Text = ""


class WarmupInput(Message, frozen=True):
    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {
        "input_data_type": ("zero_data", "random_data", "input_data_file")
    }
    data_type: DataType = "TYPE_INVALID"
    dims: list[Int64] = []
    zero_data: Bool | None = None
    random_data: Bool | None = None
    input_data_file: Text | None = None


class Warmup(Message, frozen=True):
    name: Text = ""
    batch_size: UInt32 = 0
    inputs: dict[Text, WarmupInput] = {}
    count: UInt32 = 0


class Operations(Message, frozen=True):
    op_library_filename: list[Text] = []


class TransactionPolicy(Message, frozen=True):
    decoupled: Bool = False


class Agent(Message, frozen=True):
    name: Text = ""
    parameters: dict[Text, Text] = {}


class Agents(Message, frozen=True):
    agents: list[Agent] = []


class ResponseCache(Message, frozen=True):
    enable: Bool = False


class MetricIdentifier(Message, frozen=True):
    family: Text = ""


class HistogramOptions(Message, frozen=True):
    buckets: list[Double] = []


class MetricControl(Message, frozen=True):
    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {"metric_options": ("histogram_options",)}
    metric_identifier: MetricIdentifier | None = None
    histogram_options: HistogramOptions | None = None


class Metrics(Message, frozen=True):
    metric_control: list[MetricControl] = []


class TritonConfig(Message, frozen=True):
    """ModelConfig of model_config.proto: everything config.pbtxt may say."""

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {
        "scheduling_choice": ("dynamic_batching", "sequence_batching", "ensemble_scheduling")
    }
    name: Text = ""
    platform: Text = ""
    backend: Text = ""
    runtime: Text = ""
    version_policy: TritonPolicy | None = None
    max_batch_size: Int32 = 0
    input: list[ModelInput] = []
    output: list[ModelOutput] = []
    batch_input: list[BatchInput] = []
    batch_output: list[BatchOutput] = []
    optimization: Optimization | None = None
    dynamic_batching: DynamicBatching | None = None
    sequence_batching: SequenceBatching | None = None
    ensemble_scheduling: Ensembling | None = None
    instance_group: list[InstanceGroup] = []
    default_model_filename: Text = ""
    cc_model_filenames: dict[Text, Text] = {}
    metric_tags: dict[Text, Text] = {}
    parameters: dict[Text, Parameter] = {}
    model_warmup: list[Warmup] = []
    model_operations: Operations | None = None
    model_transaction_policy: TransactionPolicy | None = None
    model_repository_agents: Agents | None = None
    response_cache: ResponseCache | None = None
    model_metrics: Metrics | None = None

    @property
    def ensemble(self) -> bool:
        """True when steps of other models answer, and no worker runs."""
        return self.platform == "ensemble" or self.ensemble_scheduling is not None

    @property
    def decoupled(self) -> bool:
        """True when a request may have any number of responses."""
        return self.model_transaction_policy is not None and self.model_transaction_policy.decoupled
