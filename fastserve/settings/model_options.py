"""Options of a model beyond its tensors, in words of no dialect: queues, sequences, ensembles, text, places.

A config.pbtxt is compiled into these (`repository.triton_config.reading`); the engine, the workers and the
backends read nothing else of it. They travel to workers as plain values, `read_options` reads them back.

    ModelConfig.options -> Options(queue=QueueOptions(...), decoupled=True, ...)

Sizes are rows, times microseconds, shapes without the batch axis; dtypes are names of `tensor.DTYPES`.

The section `text` of model.yaml has sizes in tokens, unless a field says otherwise. The settings of the text
APIs (`textgen`) are here too:

    backend: text                    # a Hugging Face style folder: config.json, *.safetensors, tokenizer.json
    text: {max_sequences: 32, max_new_tokens: 512}

The section `placement` says where a model's workers run, if not on the server's machine:

    placement: {remote: {listen: "0.0.0.0:7300-7301", key: /etc/fastserve/server.key}}
    placement: {ray: {num_cpus: 1, num_gpus: 0.5}}

`fastserve worker --connect HOST:7300-7301 --key worker.key` on any machine joins in; workers of `ray` are
started on the nodes of the cluster that the server was given with `--ray`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterator, Mapping
from math import inf
from types import MappingProxyType
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta

from fastserve.errors import ConfigError
from fastserve.settings.fields import fault_text


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


# The tensors of a text model, for clients of tensors, as vLLM's backend is in Triton.
INPUTS: Mapping[str, Any] = MappingProxyType(
    {
        "text_input": {"dtype": "bytes", "shape": [1]},
        "stream": {"dtype": "bool", "shape": [1]},
        "sampling_parameters": {"dtype": "bytes", "shape": [1]},
        "exclude_input_in_output": {"dtype": "bool", "shape": [1]},
    }
)

OPTIONAL_INPUTS = ("stream", "sampling_parameters", "exclude_input_in_output")
OUTPUTS: Mapping[str, Any] = MappingProxyType({"text_output": {"dtype": "bytes", "shape": [1]}})


class RequestLogOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The `request_log` section of model.yaml: requests of the model that are written to a file."""

    sample: Annotated[float, Meta(ge=0, le=1)] = 0.01
    """Share of the requests that are logged."""
    max_bytes: Annotated[int, Meta(ge=4096)] = 104857600
    """Bytes of the model's files, of all front processes; the oldest lines go first."""
    max_tensor_bytes: Annotated[int, Meta(ge=0, le=1 << 20)] = 4096
    """Bytes of a tensor that are logged; of a larger one its beginning."""
    redact: list[str] = []
    """Inputs and outputs whose values are not logged."""


class StickyOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The `sticky` section of model.yaml: the header or the input that keeps a client at one version of
    `traffic`."""

    header: Annotated[str, Meta(pattern="^[A-Za-z0-9!#$%&'*+.^_`|~-]{0,128}$")] = ""
    """Header over HTTP, metadata over gRPC: requests with the same value of it go to the same version."""
    input: Annotated[str, Meta(max_length=1024)] = ""
    """Input, of strings or integers: requests with the same first element of it go to the same version."""

    def __post_init__(self) -> None:
        if bool(self.header) == bool(self.input):
            raise ValueError(fault_text("sticky", self.header, "a header or an input"))

    def describe(self) -> str:
        """Return what draws, in words."""
        return f"header {self.header}" if self.header else f"input {self.input}"


class ShadowOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The `shadow` section of model.yaml: a version that runs copies of requests; nobody gets its answers."""

    version: Annotated[int, Meta(ge=0)]
    """Version that the copies are run on. Requests that name no version never go there."""
    percent: Annotated[float, Meta(ge=0, le=100)] = 10.0
    """Percent of the requests to other versions that are copied."""
    most_per_second: Annotated[float, Meta(gt=0)] = 50.0
    """Most copies a second in each front process; further ones are dropped. A copy costs the front half a
    millisecond."""
    tolerance: Annotated[float, Meta(ge=0, le=1)] = 1e-5
    """Largest relative difference of floats that count as equal; all else must be the same."""


class TrafficRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The versions that requests without a version go to: the fields of model.yaml, or of the client who has
    set others."""

    traffic: dict[str, float] = {}
    """Version or label -> weight."""
    sticky: StickyOptions | None = None
    shadow: ShadowOptions | None = None

    def __post_init__(self) -> None:
        check_traffic(self)

    @property
    def shadowed(self) -> int:
        """The version that is a shadow; -1 for none."""
        return -1 if self.shadow is None else self.shadow.version

    def describe(self) -> Iterator[str]:
        """Yield a sentence for traffic and for the shadow, where there are some."""
        total = sum(self.traffic.values())
        shares = [f"{arm} {100 * weight / total:.4g} percent" for arm, weight in self.traffic.items()]
        if shares:
            sticky = "" if self.sticky is None else f", sticky by {self.sticky.describe()}"
            yield f"requests without a version: {', '.join(shares)}{sticky}"
        if self.shadow is not None:
            yield f"shadow: {self.shadow.percent:g} percent of requests, copied to version {self.shadowed}"

    def find_problems(self, labels: Mapping[str, int], served: Collection[int]) -> Iterator[str]:
        """Yield what is wrong with the rules where these versions are served."""
        for arm in self.traffic:
            number = arm_number(arm, labels)
            if number is None:
                yield f"traffic.{arm}: neither a version nor a label"
            elif number not in served:
                yield f"traffic.{arm}: version {number} would not be served"
            elif number == self.shadowed:
                yield f"traffic.{arm}: version {number} is the shadow"
        if self.shadow is not None and self.shadowed not in served:
            yield f"shadow.version: version {self.shadowed} would not be served"
        elif self.shadow is not None and len(served) < 2:
            yield f"shadow.version: version {self.shadowed} is the only one, and answers no requests"


MOST_ARMS = 32
_NUMBER = re.compile("0|[1-9][0-9]{0,18}")


class HasTraffic(Protocol):
    """Rules, or a config that has them."""

    @property
    def traffic(self) -> Mapping[str, float]: ...
    @property
    def sticky(self) -> StickyOptions | None: ...
    @property
    def shadow(self) -> ShadowOptions | None: ...


def check_traffic(rules: HasTraffic) -> None:
    """Check the weights of versions. Raises ValueError naming the field."""
    if len(rules.traffic) > MOST_ARMS:
        raise ValueError(fault_text("traffic", f"{len(rules.traffic)} versions", f"at most {MOST_ARMS}"))
    for arm, weight in rules.traffic.items():
        if not 0 < weight < inf:
            raise ValueError(fault_text(f"traffic.{arm}", weight, "a number above 0"))
    if rules.sticky is not None and not rules.traffic:
        raise ValueError(
            fault_text("sticky", rules.sticky.header or rules.sticky.input, "nothing without traffic")
        )
    if rules.shadow is not None and str(rules.shadow.version) in rules.traffic:
        raise ValueError(
            fault_text("shadow.version", rules.shadow.version, "a version that traffic does not name")
        )


def arm_number(arm: str, labels: Mapping[str, int]) -> int | None:
    """Return the version that a key of `traffic` stands for; None for a label that there is not."""
    return int(arm) if _NUMBER.fullmatch(arm) else labels.get(arm)


NO_RULES = TrafficRules()


class TextOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The `text` section of model.yaml. 0 leaves a bound to the model."""

    max_sequences: Annotated[int, Meta(ge=1, le=1024)] = 32
    """Sequences that run at a time."""
    max_waiting: Annotated[int, Meta(ge=0)] = 1024
    """Requests that may wait besides."""
    max_tokens: Annotated[int, Meta(ge=0)] = 0
    """Tokens of prompt and answer together; 0: what the model was made for."""
    max_prompt_tokens: Annotated[int, Meta(ge=0)] = 0
    """Tokens of a prompt; 0: one less than max_tokens."""
    max_new_tokens: Annotated[int, Meta(ge=1)] = 512
    """Tokens of an answer, whatever a request asks for."""
    step_tokens: Annotated[int, Meta(ge=1)] = 128
    """Tokens of one step: a long prompt is read in chunks, between steps of the others."""
    step_ms: Annotated[float, Meta(ge=0)] = 10.0
    """Milliseconds of a step that reads prompts while others write, or twice a step that only writes; as long
    as more wait to be read than write, and for 0, step_tokens alone counts."""
    kv_bytes: Annotated[int, Meta(ge=0)] = 0
    """Bytes of the KV cache; 0: max_sequences of max_tokens, at most a quarter of memory."""
    prefix_cache: bool = False
    """Prompts that begin as one before use what is computed of it."""
    prompt_lookup_num_tokens: Annotated[int, Meta(ge=0, le=64)] = 0
    """Tokens drafted for a sequence in a step, at most, from where its last tokens occurred before
    (speculative decoding by prompt look-up); 0: none."""
    ageing_s: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds after which a waiting request counts as one priority higher; 0: never."""
    runtime: Literal["auto", "torch", "numpy"] = "auto"
    """Library that computes the model; auto: torch where it is installed, else numpy where that can."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type that the model computes in; auto: float32 on a CPU, the weights' own on a GPU."""
    quantization: Literal["none", "int8"] = "none"
    """Linear layers have int8 weights, and round their inputs to 7 bits, row by row: on a CPU with torch."""
    tokenizer: Literal["folder", "words", ""] = "folder"
    """tokenizer.json of the folder, one token a word, or none: the engine takes text."""
    tool_parser: Literal["auto", "hermes", "llama3", "mistral", "none"] = "auto"
    """Form of the calls of tools in answers; auto: as the chat template has it; none: calls stay text."""
    pooling: Literal["", "mean", "last", "cls"] = ""
    """Vectors of texts (/v1/embeddings) are made of the states of all tokens, the last or the first; empty:
    as the folder's modules.json says, else mean of encoders and none of others."""
    normalize: bool | None = None
    """Vectors have length 1; null: as modules.json of the folder says, else true."""
    reader_tokens: Annotated[int, Meta(ge=1)] = 256
    """Tokens a client may be behind before its sequence stands still, while nobody waits for its row."""


MEGABYTE = 1 << 20


class TextgenOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The text generation dialect: MindIE's API, TGI's, vLLM's and OpenAI's."""

    default_model: str = ""
    """The model of calls that name none; empty: the only one that generates text."""
    request_mb: Annotated[int, Meta(ge=1, le=1024)] = 40
    """MiB of a request's body at most (maxRequestLength)."""
    json_depth: Annotated[int, Meta(ge=10, le=100)] = 10
    """Objects and lists within each other in a body (maxJsonDepth)."""
    input_chars: Annotated[int, Meta(ge=1, le=4 * MEGABYTE)] = 4 * MEGABYTE
    """UTF-16 units of a prompt's text, in MindIE's API."""
    timeout_s: Annotated[int, Meta(ge=1)] = 600
    """Seconds of a request that names no timeout."""
    most_timeout_s: Annotated[int, Meta(ge=1, le=65535)] = 3600
    """Most seconds a request may name; MindIE's newer: 65535."""
    token_timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    """Seconds a request may wait for its next token (tokenTimeout)."""
    e2e_timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    """Seconds a request may take, whatever it names (e2eTimeout)."""
    seed_bits: Literal[64, 63] = 64
    """Bits of a seed; MindIE's newer: 63."""
    token_id_style: Literal["scalar", "list"] = "scalar"
    """A token's id in MindIE's events: a number, or a list of one (2.2 and newer)."""
    full_text: bool = False
    """The events of a stream hold the whole text so far (fullTextEnabled)."""
    generated_token_ids: bool = False
    """Token ids in the details of /infer, as MindIE's newer."""
    stream_errors: Literal["event", "raw"] = "event"
    """Form of errors in a stream of MindIE's: an event, or the bare text as there."""
    truncate: bool = False
    """Prompts that are too long lose their beginning (truncation)."""
    max_images: Annotated[int, Meta(ge=0, le=20)] = 1
    """Images of one request."""
    image_root: str = ""
    """The folder whose images requests may name by their paths; empty: none."""
    image_urls: bool = False
    """Fetch images that requests name by http(s) URLs."""
    image_urls_private: bool = False
    """Fetch images from private networks and from this machine too."""
    image_mb: Annotated[int, Meta(ge=1, le=100)] = 20
    """MiB of one image."""
    keepalive_s: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds without a token after which a stream has a comment; 0: none."""
    stop_service: bool = False
    """Let any client stop the server by GET /stopService."""
    any_model: bool | None = None
    """Whether a body's `model` that nobody serves means default_model, or the only one that can do it
    (OpenAI's API; clients send made-up ones). null: where there is one, and openai_flavor is openai."""
    openai_flavor: Literal["openai", "mindie"] = "openai"
    """Original that OpenAI's API follows where the two differ: errors, lists of models, the last piece of a
    chat."""
    rerank_flavor: Literal["jina", "infinity"] = "jina"
    """Original that replies of /rerank follow: a result's document is an object with its text, as Jina,
    Cohere and vLLM have it, or the text itself, as Infinity has it."""
    max_stops: Annotated[int, Meta(ge=1, le=64)] = 4
    """Stop strings of a request (TGI's, OpenAI's and vLLM's)."""
    max_best_of: Annotated[int, Meta(ge=1, le=128)] = 4
    """Sequences a request of TGI's may start (best_of)."""
    metrics: Literal["server", "mindie"] = "server"
    """Names in /metrics on listeners that speak this: the server's or MindIE's."""
    tgi_flavor: Literal["tgi", "mindie"] = "tgi"
    """Original that /, /generate, /generate_stream and /info follow where the two differ."""


class WorkerRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many remote workers a version has."""

    min: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Workers that a version waits for before it is available."""
    max: Annotated[int, Meta(ge=1, le=1024)] = 1024
    """Workers that are started at most, where they are started for it."""

    def __post_init__(self) -> None:
        if self.max < self.min:
            raise ValueError(f"max: given {self.max}, allowed: a whole number from min {self.min}")


class WorkerLinks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How batches go to remote workers, by whatever these are started."""

    path: str = ""
    """Folder of the model's versions where workers see it too; empty: files are sent to them."""
    in_flight: Annotated[int, Meta(ge=0, le=16)] = 0
    """Batches a worker has at a time; 0: as many as take 2 ms, from one to 16."""
    heartbeat_s: Annotated[float, Meta(ge=0.1, le=60)] = 1.0
    """Seconds between heartbeats; three that are missed are a worker's death."""
    max_answer_mb: Annotated[int, Meta(ge=1, le=4096)] = 256
    """Megabytes that the outputs of a batch may have."""
    workers: WorkerRange = WorkerRange()
    """Filled from `instances`: N, or {min: N, max: M}."""


class RemotePlacement(WorkerLinks, frozen=True, forbid_unknown_fields=True):
    """Workers that connect to the server, from any machine."""

    listen: Annotated[str, Meta(min_length=3, max_length=300)] = "127.0.0.1:0"
    """HOST:PORT or HOST:PORT-PORT that workers connect to; a version takes the first free port."""
    key: str = ""
    """server.key of `fastserve worker --make-keys`; empty: none, on loopback addresses only."""


class RayPlacement(WorkerLinks, frozen=True, forbid_unknown_fields=True):
    """Workers that Ray starts, each in an actor that takes these resources of a node."""

    num_cpus: Annotated[float, Meta(ge=0, le=1024)] = 1.0
    """CPUs of a worker's node that it takes."""
    num_gpus: Annotated[float, Meta(ge=0, le=64)] = 0.0
    """GPUs, or a fraction of one; with any, the model computes on cuda:0 of those."""
    memory_mb: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    """Megabytes of memory; 0: not counted."""
    resources: dict[Annotated[str, Meta(min_length=1, max_length=200)], Annotated[float, Meta(gt=0)]] = {}
    """Resources of the cluster's own names."""
    scheduling_strategy: Literal["SPREAD", "DEFAULT"] = "SPREAD"
    """SPREAD: over as many nodes as there are; DEFAULT: as Ray fills nodes."""
    listen: Annotated[str, Meta(max_length=300)] = ""
    """HOST:PORT or HOST:PORT-PORT that workers connect to; empty: any port of this node's address in Ray."""
    queue_target_s: Annotated[float, Meta(gt=0, le=3600)] = 0.1
    """Seconds that rows may wait before more workers are started, up to max."""
    down_after_s: Annotated[float, Meta(ge=0, le=86400)] = 60.0
    """Seconds for which fewer workers must have been enough before some are ended, down to min."""

    @property
    def demand(self) -> dict[str, float]:
        """The resources of one worker, by Ray's names; memory in bytes."""
        named = {"CPU": self.num_cpus, "GPU": self.num_gpus, "memory": float(self.memory_mb << 20)}
        return {name: count for name, count in {**named, **self.resources}.items() if count}


class PlacementOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the workers of a model run."""

    remote: RemotePlacement | None = None
    """On machines from which they connect."""
    ray: RayPlacement | None = None
    """On the nodes of a Ray cluster."""

    def __post_init__(self) -> None:
        if (self.remote is None) == (self.ray is None):
            raise ValueError("remote, ray: exactly one of them must be given")


def read_links(config: Mapping[str, Any]) -> RemotePlacement | RayPlacement:
    """Return the placement of a model whose config, as plain values, has one."""
    placement = config["placement"]
    if placement.get("ray") is not None:
        return msgspec.convert(placement["ray"], RayPlacement)
    return msgspec.convert(placement["remote"], RemotePlacement)


def is_loopback(host: str) -> bool:
    """Return whether nobody outside this machine reaches an address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def read_address(text: str) -> tuple[str, range]:
    """Read "HOST:PORT" or "HOST:PORT-PORT". Raises ConfigError."""
    host, _, ports = text.rpartition(":")
    first, _, last = ports.partition("-")
    if not host or not first.isdigit() or ("-" in ports and not last.isdigit()):
        raise ConfigError(f"{text!r}: given no address, allowed: HOST:PORT, or HOST:PORT-PORT")
    found = range(int(first), int(last or first) + 1)
    if not found or found[-1] > 65535 or len(found) > 64:
        raise ConfigError(f"{text!r}: given ports {ports}, allowed: up to 64 ports below 65536")
    return host, found


def check_listen(text: str, key: str) -> tuple[str, range]:
    """Read the address that workers connect to. Raises ConfigError for one in the open without a key."""
    host, ports = read_address(text)
    if not key and not is_loopback(host):
        raise ConfigError(f"listen {text}: without a key only a loopback address is allowed")
    return host, ports
