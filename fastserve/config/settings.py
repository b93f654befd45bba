"""Every setting of the server, written once: name, type, bounds, default and help text.

The YAML file, the command line flags and docs/configuration.md all come from these structs. What
a single model may set is not here; that is `repository.model_config`.
"""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from fastserve.config.grps import GrpsOptions
from fastserve.config.metrics import read_metrics_config
from fastserve.config.policy import VersionNumber, VersionPolicy
from fastserve.config.textgen import TextgenOptions
from fastserve.config.tls import TlsOptions
from fastserve.config.triton import INPUT_BYTES, TritonOptions

Count = Annotated[int, Meta(ge=1)]
ModelName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
_FILE = re.compile(r"^unix:(?P<path>[^=\x00]{1,107})$")  # sockaddr_un has 108 bytes, the last of them 0
_ADDRESS = re.compile(r"^(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[^:\[\]=\s]*)):(?P<port>[0-9]{1,5})$")


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one connection may cost. Bytes, seconds and counts, each named in the error it causes."""

    header_bytes: Annotated[int, Meta(ge=256, description="Bytes of a request's header block.")] = 65536
    header_count: Annotated[int, Meta(ge=1, description="Header lines of one request.")] = 100
    target_bytes: Annotated[int, Meta(ge=16, description="Bytes of a request's path and query.")] = 8192
    body_bytes: Annotated[int, Meta(ge=0, description="Bytes of a request body as sent.")] = 134217728
    body_chunks: Annotated[int, Meta(ge=1, description="Chunks of a chunked request body.")] = 65536
    inflated_bytes: Annotated[int, Meta(ge=0, description="Bytes of a body after decompression.")] = 104857600
    inflate_ratio: Annotated[
        int, Meta(ge=1, description="How many times larger than sent a decompressed body may be.")
    ] = 200
    pipelined_calls: Annotated[
        int, Meta(ge=1, description="Requests of one connection that may wait for a reply.")
    ] = 16
    streams: Annotated[int, Meta(ge=1, description="Requests at once on one HTTP/2 connection.")] = 128
    connections: Annotated[int, Meta(ge=1, description="Open connections per listener and front.")] = 10000
    header_timeout_s: Annotated[
        float, Meta(gt=0, description="Seconds a client may take to send a header block.")
    ] = 10.0
    idle_timeout_s: Annotated[
        float, Meta(gt=0, description="Seconds a connection may stay open between requests.")
    ] = 75.0
    max_connection_age_s: Annotated[
        float, Meta(ge=0, description="Seconds after which an HTTP/2 connection is ended; 0 for never.")
    ] = 0.0
    max_connection_age_grace_s: Annotated[
        float, Meta(ge=0, description="Seconds its requests have left then; 0 for as long as they take.")
    ] = 0.0
    body_bytes_per_s: Annotated[
        int, Meta(ge=0, description="Slowest average rate of a request body; 0 for any rate.")
    ] = 1024
    write_stall_s: Annotated[
        float, Meta(gt=0, description="Seconds a client may go without reading its reply.")
    ] = 30.0


class Listener(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One listening address and the dialects it speaks; no dialects means every one."""

    address: Annotated[str, Meta(description="HOST:PORT, [IPV6]:PORT, :PORT (every interface) or unix:PATH.")]
    dialects: Annotated[tuple[str, ...], Meta(description="Dialects spoken here; empty for all.")] = ()
    tls: Annotated[bool, Meta(description="Whether TLS is spoken here, where tls.cert is set.")] = True

    def __post_init__(self) -> None:
        if self.in_file:
            fits = _FILE.match(self.address) is not None and len(os.fsencode(self.address)) <= 112
        else:
            match = _ADDRESS.match(self.address)
            fits = match is not None and int(match["port"]) <= 65535
        if not fits:
            raise ValueError(
                f'address: given "{self.address}", allowed: HOST:PORT, [IPV6]:PORT, :PORT, or '
                "unix:PATH with a path of at most 107 bytes"
            )

    @property
    def in_file(self) -> bool:
        """Whether it is a socket in the file system. The first front process alone listens there."""
        return self.address.startswith("unix:")

    @property
    def host(self) -> str:
        """ "unix:PATH" for a file."""
        match = _ADDRESS.match(self.address)
        return (match["v6"] or match["host"]) if match else self.address

    @property
    def port(self) -> int:
        """0 for a file."""
        return 0 if self.in_file else int(self.address.rpartition(":")[2])


class GrpcOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the gRPC listeners allow."""

    message_bytes: Annotated[int, Meta(ge=1, description="Bytes of one message, either way.")] = 134217728
    concurrent_streams: Annotated[
        int, Meta(ge=1, description="Calls at the same time on one connection.")
    ] = 1024
    connections: Annotated[int, Meta(ge=1, description="Open connections per listener and front.")] = 1024
    metadata_bytes: Annotated[
        int, Meta(ge=1024, description="Bytes of one call's metadata, names and values.")
    ] = 16384
    concurrent_calls: Annotated[
        int, Meta(ge=0, description="Calls at the same time over all connections; 0 for any number.")
    ] = 0
    keepalive_s: Annotated[float, Meta(gt=0, description="Seconds between pings on a quiet connection.")] = (
        7200.0
    )
    keepalive_timeout_s: Annotated[
        float, Meta(gt=0, description="Seconds a client may take to answer one.")
    ] = 20.0
    max_connection_idle_s: Annotated[
        float, Meta(ge=0, description="Seconds a connection may stay open without a call; 0 for any time.")
    ] = 0.0
    max_connection_age_s: Annotated[
        float, Meta(ge=0, description="Seconds after which a connection is ended; 0 for never.")
    ] = 0.0
    max_connection_age_grace_s: Annotated[
        float, Meta(ge=0, description="Seconds its calls have left then; 0 for as long as they take.")
    ] = 0.0
    reflection: Annotated[bool, Meta(description="Answer gRPC reflection.")] = True
    transport: Annotated[
        Literal["native", "grpcio"],
        Meta(description="What speaks HTTP/2: the server itself, or the library grpcio."),
    ] = "native"


class TFServingOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The TensorFlow Serving dialect."""

    result_keys: Annotated[
        tuple[Literal["results", "result"], ...],
        Meta(min_length=1, description="Keys that carry the result of classify and regress."),
    ] = ("results", "result")
    cors: Annotated[bool, Meta(description="Send Access-Control-Allow headers on /v1/ replies.")] = False
    rest_timeout_ms: Annotated[
        int, Meta(ge=0, description="Milliseconds a REST call may take; 0 for no limit.")
    ] = 30000
    monitoring: Annotated[bool, Meta(description="Serve TensorFlow Serving's own metrics page.")] = False
    monitoring_path: Annotated[str, Meta(pattern="^/", description="Where that metrics page is.")] = (
        "/monitoring/prometheus/metrics"
    )
    tensor_content: Annotated[
        bool, Meta(description="Predict over gRPC answers with tensor_content, not with the typed fields.")
    ] = False
    check_methods: Annotated[
        bool, Meta(description="Classify and regress only by signatures of that method.")
    ] = False
    models_file: Annotated[
        str, Meta(description="A ModelServerConfig as text that is read again every models_file_poll_s.")
    ] = ""
    models_file_poll_s: Annotated[
        float,
        Meta(ge=0, description="Seconds between two looks; its models take the place of `models`. 0: none."),
    ] = 0.0
    warmup_records: Annotated[
        bool,
        Meta(description="Run VERSION/assets.extra/tf_serving_warmup_requests before it is available."),
    ] = True
    warmup_times: Annotated[
        int, Meta(ge=1, le=1_000_000, description="How many times each of these records runs.")
    ] = 1

    def __post_init__(self) -> None:
        if len(set(self.result_keys)) != len(self.result_keys):
            raise ValueError("result_keys: given the same key twice, allowed: each of results, result once")


class AdminOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What clients may change about the server, beside loads and unloads under explicit control."""

    file_overrides: Annotated[
        bool, Meta(description="A load may bring a model's files: whoever may load then runs code here.")
    ] = False
    log_settings: Annotated[
        bool, Meta(description="Clients may change what is logged: POST /v2/logging, LogSettings.")
    ] = False
    reload_config: Annotated[
        bool, Meta(description="TF Serving's ModelService may replace the models: its callers run code here.")
    ] = False
    origins: Annotated[
        tuple[Annotated[str, Meta(pattern="^https?://[^/]+$")], ...],
        Meta(description="Web sites, http://HOST:PORT, whose pages may load, unload and change settings."),
    ] = ()


class LogOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is written to standard error."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least severe line written.")
    ] = "info"
    format: Annotated[
        Literal["text", "json"], Meta(description="One line of text or one JSON object per line.")
    ] = "text"
    access: Annotated[bool, Meta(description="Write a line per request.")] = False


class ModelEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model whose folder is named outright, as TensorFlow Serving's model_config_list does."""

    name: Annotated[ModelName, Meta(description="What clients call it.")]
    base_path: Annotated[
        str, Meta(description="The folder that holds the model's version folders, or a text model's own.")
    ]
    version_policy: Annotated[
        VersionPolicy | None, Meta(description="In place of the one in model.yaml.")
    ] = None
    labels: Annotated[
        dict[str, VersionNumber] | None, Meta(description="In place of those in model.yaml.")
    ] = None


class RepositorySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is served from where, and when it is looked at again."""

    repository: Annotated[
        str, Meta(description="The model repository: a folder of NAME/VERSION folders, or `demo`.")
    ] = ""
    models: Annotated[
        tuple[ModelEntry, ...],
        Meta(description="Models elsewhere: a list of name, base_path, version_policy, labels."),
    ] = ()
    deployment: Annotated[
        str,
        Meta(
            description="A grps deployment: a folder with conf/inference.yml and src. Its models are served."
        ),
    ] = ""
    model_defaults: Annotated[
        dict[str, Any], Meta(description="Fields of model.yaml for models that do not set them.")
    ] = {}
    model_control: Annotated[
        Literal["none", "poll", "explicit"],
        Meta(description="Look at the repository once, every poll_s seconds, or only when told to."),
    ] = "poll"
    poll_s: Annotated[float, Meta(gt=0, description="Seconds between two looks at the repository.")] = 1.0
    load_models: Annotated[
        tuple[str, ...],
        Meta(description="Models loaded at start, `*` for all. Empty: all, or none with explicit control."),
    ] = ()
    keep_going: Annotated[
        bool, Meta(description="Serve what could be loaded instead of stopping when a model fails at start.")
    ] = False
    strict_readiness: Annotated[
        bool,
        Meta(
            description="Ready only while every model serves; false: models that never loaded do not count."
        ),
    ] = True
    version_batching: Annotated[
        bool,
        Meta(description="A version's batching_params.pbtxt (TensorFlow Serving's) says how it is batched."),
    ] = False
    wait_for_folders: Annotated[
        bool,
        Meta(description="A base_path of `models` that is not there or holds no version is waited for."),
    ] = False
    parallel_loads: Annotated[int, Meta(ge=1, description="Versions loaded at the same time.")] = 2
    load_retries: Annotated[
        int, Meta(ge=0, description="How often polling tries a failed version again while it is unchanged.")
    ] = 5
    load_retry_s: Annotated[
        float, Meta(ge=0, description="Seconds before the first such retry; doubles up to 60 each time.")
    ] = 1.0
    allow_labels_for_unavailable: Annotated[
        bool, Meta(description="A new label may point at a version that is not available yet.")
    ] = False


class Settings(RepositorySettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole configuration of one server."""

    listen: Annotated[
        tuple[Listener, ...],
        Meta(description="Ports for HTTP and gRPC alike: HOST:PORT[=dialect,...]; http and grpc add others."),
    ] = ()
    http: Annotated[
        tuple[Listener, ...], Meta(description="HTTP listeners: HOST:PORT[=dialect,...], or `off`.")
    ] = (Listener("127.0.0.1:8000"),)
    grpc: Annotated[
        tuple[Listener, ...], Meta(description="gRPC listeners: HOST:PORT[=dialect,...], or `off`.")
    ] = (Listener("127.0.0.1:8001"),)
    frontends: Annotated[int, Meta(ge=1, le=64, description="Front processes that share each port.")] = 1
    drain_delay_s: Annotated[
        float,
        Meta(ge=0, description="Seconds after a stop signal in which it is not ready and still serves all."),
    ] = 1.0
    drain_s: Annotated[
        float, Meta(ge=0, description="Seconds requests under way may take to finish when stopping.")
    ] = 30.0
    response_cache_bytes: Annotated[
        int, Meta(ge=0, description="Bytes of responses kept for models with response_cache; 0 for none.")
    ] = 0
    rate_limit: Annotated[
        Literal["off", "execution_count"],
        Meta(description="Whether instance_group.rate_limiter holds batches back; off: it does not."),
    ] = "off"
    rate_limit_resources: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^[^:]+:[1-9][0-9]{0,8}$")], ...],
        Meta(description="Sizes of the rate limiter's resources, NAME:COUNT; others: the largest demand."),
    ] = ()
    allow_metrics: Annotated[
        bool, Meta(description="Show metrics: /metrics of every HTTP listener, and metrics_port.")
    ] = True
    metrics_port: Annotated[
        int, Meta(ge=0, le=65535, description="A port for the nv_* metrics alone; 0 for none.")
    ] = 0
    metrics_config: Annotated[
        tuple[str, ...],
        Meta(description="Kinds of nv_* latencies: counter_latencies, summary_latencies, ...=true|false."),
    ] = ()
    allow_client_shm: Annotated[
        bool, Meta(description="Clients may name shared memory that tensors are read from and written to.")
    ] = False
    device_memory_share: Annotated[
        float,
        Meta(gt=0, le=1, description="Of each GPU's memory, what device_memory_mb of all models may claim."),
    ] = 1.0
    dialects: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^[\w.]+:\w+$")], ...],
        Meta(description="Dialects of your own: MODULE:NAME of a DialectSpec."),
    ] = ()
    dialect_options: Annotated[
        dict[str, dict[str, Any]],
        Meta(description="Options of dialects without a section here, by the dialect's name."),
    ] = {}
    admin: AdminOptions = AdminOptions()
    tls: TlsOptions = TlsOptions()
    limits: Limits = Limits()
    grpc_options: GrpcOptions = GrpcOptions()
    tfserving: TFServingOptions = TFServingOptions()
    triton: TritonOptions = TritonOptions()
    grps: GrpsOptions = GrpsOptions()
    textgen: TextgenOptions = TextgenOptions()
    log: LogOptions = LogOptions()

    def __post_init__(self) -> None:
        read_metrics_config(self.metrics_config)
        self._check_tls()
        if self.grpc_options.transport == "grpcio" and (
            one := next((g for g in self.grpc if g.in_file), None)
        ):
            raise ValueError(
                f'grpc: given "{one.address}" with grpc_options.transport grpcio, allowed: HOST:PORT'
            )
        if self.allow_client_shm and self.frontends > 1:  # each front keeps the regions it was told of
            raise ValueError(
                f"allow_client_shm: given true with frontends {self.frontends}, allowed: with frontends 1"
            )
        if self.triton.trace_config and self.frontends > 1:  # they would write over each other's files
            raise ValueError(
                f"triton.trace_config: given with frontends {self.frontends}, allowed: with frontends 1"
            )
        given, most = self.triton.http_max_input_size, self.limits.body_bytes
        if given > max(most, INPUT_BYTES):  # it would never be reached
            raise ValueError(
                f"triton.http_max_input_size: given {given}, allowed: up to limits.body_bytes, {most}"
            )

    def _check_tls(self) -> None:
        if self.grpc_options.transport == "grpcio" and self.tls.cert:
            for name, able in (("client_auth", "required"), ("min_version", "1.2")):
                given = getattr(self.tls, name)
                if given != able:
                    raise ValueError(
                        f'tls.{name}: given "{given}" with grpc_options.transport grpcio, allowed: {able}'
                    )
        spoken: dict[str, bool] = {}
        for listener in (*self.listen, *self.http, *self.grpc):
            if (listener.port or listener.in_file) and spoken.setdefault(
                listener.address, listener.tls
            ) != listener.tls:
                raise ValueError(f"{listener.address}: given with tcp:// and without, allowed: one of them")
