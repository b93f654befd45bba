"""Settings of the server: one YAML file, overridden field by field by command line flags."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from fastserve.errors import ConfigError
from fastserve.settings.fields import convert, fault_text, hint, list_fields
from fastserve.settings.grps import GrpsOptions
from fastserve.settings.kserve_options import INPUT_BYTES, TritonOptions, read_metrics_config
from fastserve.settings.model_options import TextgenOptions

VersionNumber = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class PolicyChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Policy for versions: `{latest: N}` or `{specific: [N, ...]}`, exactly one of them."""

    latest: Annotated[int, Meta(ge=0)] | None = None
    """The N highest versions; 0 means 1."""
    specific: Annotated[list[VersionNumber], Meta(min_length=1)] | None = None
    """These versions."""

    def __post_init__(self) -> None:
        if (self.latest is None) == (self.specific is None):
            raise ValueError("latest, specific: exactly one of them must be given")


VersionPolicy = PolicyChoice | Literal["all"]
DEFAULT_POLICY: VersionPolicy = PolicyChoice(latest=1)
PASSWORD_VARIABLE = "FASTSERVE_TLS_KEY_PASSWORD"  # of the front processes' environment, not of models'
PEM = "-----BEGIN "  # what a value that is the text itself begins with


class TlsOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """TLS for every listener whose address does not begin with tcp://. None without `cert`."""

    cert: str = ""
    """PEM file of the certificate and its chain, or the text itself; empty: no TLS."""
    key: str = ""
    """PEM file of its private key, or the text itself; empty: it is in `cert`."""
    key_password_file: str = ""
    """File whose first line opens the key; else $FASTSERVE_TLS_KEY_PASSWORD does."""
    client_ca: str = ""
    """PEM file, or text, of authorities whose clients are let in; empty: anyone."""
    client_auth: Literal["required", "optional"] = "required"
    """Whether a client may come without a certificate, where client_ca is set."""
    min_version: Literal["1.2", "1.3"] = "1.2"
    """Oldest version of TLS spoken."""
    poll_s: Annotated[float, Meta(gt=0)] = 5.0
    """Seconds between two looks whether the files have changed."""
    handshake_timeout_s: Annotated[float, Meta(gt=0)] = 10.0
    """Seconds a client may take for its handshake."""
    handshakes: Annotated[int, Meta(ge=1)] = 1024
    """Handshakes under way per listener and front; one more ends the oldest."""

    def __post_init__(self) -> None:
        given = [name for name in ("key", "key_password_file", "client_ca") if getattr(self, name)]
        if given and not self.cert:
            raise ValueError(f"{given[0]}: given without cert, allowed: with it")
        if self.client_auth == "optional" and not self.client_ca:
            raise ValueError('client_auth: given "optional" without client_ca, allowed: with it')


def names_file(value: str) -> bool:
    """Return whether a value of `cert`, `key` or `client_ca` is a path."""
    return bool(value) and not value.lstrip().startswith(PEM)


LEAST_MEMORY_BYTES = 512 << 20
"""The least budget of a front process for requests, where limits.memory_bytes is 0."""

Count = Annotated[int, Meta(ge=1)]
ModelName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
_COLLECTOR = re.compile(r"(https?://)?(\[[0-9A-Fa-f:.]+\]|[^/\s@:\[\]]+)(:[0-9]{1,5})?(/\S*)?")
_FILE = re.compile(r"^unix:(?P<path>[^=\x00]{1,107})$")  # sockaddr_un has 108 bytes, the last of them 0
_ADDRESS = re.compile(r"^(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[^:\[\]=\s]*)):(?P<port>[0-9]{1,5})$")


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of one connection in bytes, seconds and counts. Each is named in the error it causes."""

    header_bytes: Annotated[int, Meta(ge=256)] = 65536
    """Bytes of a request's header block."""
    header_count: Annotated[int, Meta(ge=1)] = 100
    """Header lines of one request."""
    target_bytes: Annotated[int, Meta(ge=16)] = 8192
    """Bytes of a request's path and query."""
    body_bytes: Annotated[int, Meta(ge=0)] = 134217728
    """Bytes of a request body as sent."""
    body_chunks: Annotated[int, Meta(ge=1)] = 65536
    """Chunks of a chunked request body."""
    inflated_bytes: Annotated[int, Meta(ge=0)] = 104857600
    """Bytes of a body after decompression."""
    inflate_ratio: Annotated[int, Meta(ge=1)] = 200
    """How many times larger than sent a decompressed body may be."""
    pipelined_calls: Annotated[int, Meta(ge=1)] = 16
    """Requests of one connection that may wait for a reply."""
    streams: Annotated[int, Meta(ge=1)] = 128
    """Requests at once on one HTTP/2 connection."""
    connections: Annotated[int, Meta(ge=1)] = 10000
    """Open connections per listener and front."""
    request_timeout_s: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds that an inference request may take whose client does not say; 0 for any time."""
    most_request_timeout_s: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds that an inference request may take at most, whatever its client says; 0 for any time."""
    header_timeout_s: Annotated[float, Meta(gt=0)] = 10.0
    """Seconds a client may take to send a header block."""
    idle_timeout_s: Annotated[float, Meta(gt=0)] = 75.0
    """Seconds a connection may stay open between requests."""
    max_connection_age_s: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds after which an HTTP/2 connection is ended; 0 for never."""
    max_connection_age_grace_s: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds its requests have left then; 0 for as long as they take."""
    body_bytes_per_s: Annotated[int, Meta(ge=0)] = 1024
    """Slowest average rate of a request body; 0 for any rate."""
    write_stall_s: Annotated[float, Meta(gt=0)] = 30.0
    """Seconds a client may go without reading its reply."""
    reply_bytes_per_s: Annotated[int, Meta(ge=0)] = 256
    """Slowest rate at which a client may read while bytes of a reply wait for it, over every write_stall_s; 0
    for any rate."""
    memory_bytes: Annotated[int, Meta(ge=0)] = 0
    """Bytes of requests and unread replies that a front holds; 0: four largest bodies."""


class Listener(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One listening address and the dialects it speaks; no dialects means every one."""

    address: str
    """HOST:PORT, [IPV6]:PORT, :PORT (every interface) or unix:PATH."""
    dialects: tuple[str, ...] = ()
    """Dialects spoken here; empty for all."""
    tls: bool = True
    """Whether TLS is spoken here, where tls.cert is set."""

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
        """Whether the address is a socket file, on which the first front process alone listens."""
        return self.address.startswith("unix:")

    @property
    def host(self) -> str:
        """The host, or "unix:PATH" for a socket file."""
        match = _ADDRESS.match(self.address)
        return (match["v6"] or match["host"]) if match else self.address

    @property
    def port(self) -> int:
        """The port, 0 for a socket file."""
        return 0 if self.in_file else int(self.address.rpartition(":")[2])


class GrpcOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of the gRPC listeners."""

    message_bytes: Annotated[int, Meta(ge=1)] = 134217728
    """Bytes of one message, either way."""
    concurrent_streams: Annotated[int, Meta(ge=1)] = 1024
    """Calls at the same time on one connection."""
    connections: Annotated[int, Meta(ge=1)] = 1024
    """Open connections per listener and front."""
    metadata_bytes: Annotated[int, Meta(ge=1024)] = 16384
    """Bytes of one call's metadata, names and values."""
    concurrent_calls: Annotated[int, Meta(ge=0)] = 0
    """Calls at the same time over all connections; 0 for any number."""
    keepalive_s: Annotated[float, Meta(gt=0)] = 7200.0
    """Seconds between pings on a quiet connection."""
    keepalive_timeout_s: Annotated[float, Meta(gt=0)] = 20.0
    """Seconds a client may take to answer one."""
    max_connection_idle_s: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds a connection may stay open without a call; 0 for any time."""
    max_connection_age_s: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds after which a connection is ended; 0 for never."""
    max_connection_age_grace_s: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds its calls have left then; 0 for as long as they take."""
    reflection: bool = True
    """Answer gRPC reflection."""


class TFServingOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The TensorFlow Serving dialect."""

    result_keys: Annotated[tuple[Literal["results", "result"], ...], Meta(min_length=1)] = (
        "results",
        "result",
    )
    """Keys that carry the result of classify and regress."""
    cors: bool = False
    """Send Access-Control-Allow headers on /v1/ replies."""
    rest_timeout_ms: Annotated[int, Meta(ge=0)] = 30000
    """Milliseconds a REST call may take; 0 for no limit."""
    monitoring: bool = False
    """Serve TensorFlow Serving's own metrics page."""
    monitoring_path: Annotated[str, Meta(pattern="^/")] = "/monitoring/prometheus/metrics"
    """Where that metrics page is."""
    tensor_content: bool = False
    """Predict over gRPC answers with tensor_content, not with the typed fields."""
    check_methods: bool = False
    """Classify and regress only by signatures of that method."""
    models_file: str = ""
    """A ModelServerConfig as text that is read again every models_file_poll_s."""
    models_file_poll_s: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds between two looks; its models take the place of `models`. 0: none."""
    warmup_records: bool = True
    """Run VERSION/assets.extra/tf_serving_warmup_requests before it is available."""
    warmup_times: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    """How many times each of these records runs."""

    def __post_init__(self) -> None:
        if len(set(self.result_keys)) != len(self.result_keys):
            raise ValueError("result_keys: given the same key twice, allowed: each of results, result once")


class AdminOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Changes that clients may make, beside loads and unloads under explicit control."""

    file_overrides: bool = False
    """A load may bring a model's files: a client that may load then runs code here."""
    log_settings: bool = False
    """Clients may change what is logged: POST /v2/logging, LogSettings."""
    reload_config: bool = False
    """TF Serving's ModelService may replace the models: its callers run code here."""
    reload_saved: bool = False
    """It may replace them by folders of SavedModels, and by those that `models` names."""
    traffic: bool = False
    """Clients may change which versions requests go to: POST and DELETE /traffic/MODEL."""
    origins: tuple[Annotated[str, Meta(pattern="^https?://[^/]+$")], ...] = ()
    """Web sites, http://HOST:PORT, whose pages may load, unload and change settings."""


class LogOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Log lines on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe line written."""
    format: Literal["text", "json"] = "text"
    """One line of text or one JSON object per line."""
    access: bool = False
    """Write a line per request."""


class OtelOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Traces of requests for an OpenTelemetry collector; none without `endpoint` or OpenTelemetry's variable
    for it."""

    endpoint: str = ""
    """The collector, http://HOST:4317 (gRPC) or :4318 (HTTP); https:// for TLS."""
    protocol: Literal["", "grpc", "http/protobuf"] = ""
    """OTLP over gRPC or HTTP; empty: HTTP for port 4318, else gRPC."""
    ratio: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Share of the requests without a traceparent that are traced; none: OTEL_TRACES_SAMPLER_ARG, else
    0.01."""
    headers: tuple[Annotated[str, Meta(pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+=[\x20-\x7e]*$")], ...] = ()
    """Sent to the collector with every export: NAME=VALUE, such as an API key."""
    service_name: str = ""
    """Name of this server in traces; empty: OTEL_SERVICE_NAME, else fastserve."""
    queue_spans: Annotated[int, Meta(ge=1, le=1_000_000)] = 8192
    """Spans that wait for the collector; further ones are lost and counted."""

    def __post_init__(self) -> None:
        if self.endpoint and not _COLLECTOR.fullmatch(self.endpoint):
            raise ValueError(f'endpoint: given "{self.endpoint}", allowed: [http[s]://]HOST:PORT[/PATH]')


class StorageOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The local copy of a repository that lies in an object store."""

    cache: str = ""
    """Folder of the copies; empty: fastserve/storage of $XDG_CACHE_HOME, or of ~/.cache."""
    poll_s: Annotated[float, Meta(ge=1)] = 60.0
    """Seconds between two looks at the store: one list of its files with their ETags."""
    timeout_s: Annotated[float, Meta(ge=1, le=3600)] = 30.0
    """Seconds in which the store must send something; else the look fails, and what is served stays."""
    max_bytes: Annotated[int, Meta(ge=1)] = 107374182400
    """Bytes of one repository's copies, the one that is being fetched included."""
    allow_http: bool = False
    """Read addresses that begin with http://, which are not encrypted."""


class ModelEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model whose folder is named outright, as TensorFlow Serving's model_config_list does."""

    name: ModelName
    """Name of the model, for clients."""
    base_path: str
    """The folder that holds the model's version folders, or a text model's own."""
    version_policy: VersionPolicy | None = None
    """In place of the one in model.yaml."""
    labels: dict[str, VersionNumber] | None = None
    """In place of those in model.yaml."""
    file: str = ""
    """A file of base_path that is the model, as version 1, in place of version folders."""
    fields: dict[str, Any] = {}
    """Fields of model.yaml for such a file, where none lies beside it."""
    saved_model: bool = False
    """Whether its versions must be SavedModels, without a config of their own."""


_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?(?:([KMGT])(i?)B?|B)?", re.ASCII)


def read_size(field: str, given: int | str) -> int:
    """Return the bytes of a number, or of a text such as 500MB, 2GiB or 2G. Raises ValueError."""
    if isinstance(given, int):
        found = None if given < 0 else given
    else:
        match = _SIZE.fullmatch(given.strip())
        unit = 1024 if match and match[3] else 1000
        found = int(float(match[1]) * unit ** " KMGT".index(match[2] or " ")) if match else None
    if found is None:
        raise ValueError(fault_text(field, given, "bytes, or a size such as 500MB, 2GiB; 0 for none"))
    return found


class RepositorySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Models to serve, their folders, and how often these are read again."""

    repository: str = ""
    """The model repository: a folder of NAME/VERSION folders, `demo`, or an address as s3://bucket/models."""
    models: tuple[ModelEntry, ...] = ()
    """Models elsewhere: a list of name, base_path, version_policy, labels, file, fields."""
    deployment: str = ""
    """A grps deployment: a folder with conf/inference.yml and src. Its models are served."""
    model_defaults: dict[str, Any] = {}
    """Fields of model.yaml for models that do not set them."""
    model_control: Literal["none", "poll", "explicit"] = "poll"
    """Look at the repository once, every poll_s seconds, or only when told to."""
    poll_s: Annotated[float, Meta(gt=0)] = 1.0
    """Seconds between two looks at the repository."""
    load_models: tuple[str, ...] = ()
    """Models loaded at start, `*` for all. Empty: all, or none with explicit control."""
    keep_going: bool = False
    """Serve what could be loaded instead of stopping when a model fails at start."""
    strict_readiness: bool = True
    """Ready only while every model serves; false: models that never loaded do not count."""
    version_batching: bool = False
    """A version's batching_params.pbtxt (TensorFlow Serving's) says how it is batched."""
    wait_for_folders: bool = False
    """A base_path of `models` that is not there or holds no version is waited for."""
    parallel_loads: Annotated[int, Meta(ge=1)] = 4
    """Versions loaded at the same time."""
    load_retries: Annotated[int, Meta(ge=0)] = 5
    """How often polling tries a failed version again while it is unchanged."""
    load_retry_s: Annotated[float, Meta(ge=0)] = 1.0
    """Seconds before the first such retry; doubles up to 60 each time."""
    allow_labels_for_unavailable: bool = False
    """A new label may point at a version that is not available yet."""
    memory_budget: int | str = 0
    """Memory that the workers of all models may have together: bytes, or 500MB, 2GiB. Models are loaded when
    they are asked for, and the least recently used unloaded. 0: all are loaded."""
    keep_loaded: tuple[str, ...] = ()
    """Models that are loaded at the start and never unloaded for others; also `pin: true` of model.yaml."""
    keep_alive_s: Annotated[float, Meta(ge=0)] = 2.0
    """Seconds that a model stays after its last request, whatever else is asked for."""
    load_wait_s: Annotated[float, Meta(gt=0, le=3600)] = 30.0
    """Seconds that a request waits for its model to be loaded."""
    load_waiting: Annotated[int, Meta(ge=1)] = 1024
    """Requests that may wait for models, over all of them; one more is refused."""

    @property
    def budget_bytes(self) -> int:
        """The bytes of `memory_budget`, 0 for none. Raises ValueError."""
        return read_size("memory_budget", self.memory_budget)


class Settings(RepositorySettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole configuration of one server."""

    listen: tuple[Listener, ...] = ()
    """Ports for HTTP and gRPC alike: HOST:PORT[=dialect,...]; http and grpc add others."""
    http: tuple[Listener, ...] = (Listener("127.0.0.1:8000"),)
    """HTTP listeners: HOST:PORT[=dialect,...], or `off`."""
    grpc: tuple[Listener, ...] = (Listener("127.0.0.1:8001"),)
    """gRPC listeners: HOST:PORT[=dialect,...], or `off`."""
    frontends: Annotated[int, Meta(ge=1, le=64)] | Literal["auto"] = 1
    """Front processes that share each port; auto: the cores that workers leave."""
    pinning: Literal["none", "cores", "numa"] = "none"
    """Bind processes to cores of their own, or to nodes of memory, with their arenas."""
    ray: Annotated[str, Meta(pattern=r"^(|auto|local|[^\s/]+:[0-9]{1,5})$")] = ""
    """Ray cluster for models with placement.ray: HOST:PORT, auto: this machine's, local: started here."""
    in_process: bool = False
    """Run models in the server's process, for breakpoints and profilers; none is killed then."""
    drain_delay_s: Annotated[float, Meta(ge=0)] = 1.0
    """Seconds after a stop signal in which it is not ready and still serves all."""
    drain_s: Annotated[float, Meta(ge=0)] = 30.0
    """Seconds requests under way may take to finish when stopping."""
    response_cache_bytes: Annotated[int, Meta(ge=0)] = 67108864
    """Bytes of responses kept for all models with cache or response_cache; 0 for none."""
    request_log_folder: str = ""
    """Folder of the files that models with request_log are logged to; empty: none is."""
    rate_limit: Literal["off", "execution_count"] = "off"
    """Whether instance_group.rate_limiter holds batches back; off: it does not."""
    rate_limit_resources: tuple[Annotated[str, Meta(pattern="^[^:]+:[1-9][0-9]{0,8}$")], ...] = ()
    """Sizes of the rate limiter's resources, NAME:COUNT; others: the largest demand."""
    kserve_replies: bool = True
    """V2's health and a model's status over /v1 say what KServe's own client reads."""
    allow_metrics: bool = True
    """Show metrics: /metrics of every HTTP listener, and metrics_port."""
    allow_docs: bool = True
    """Describe what is served: /openapi.json and /docs of every HTTP listener."""
    metrics_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """A port for the nv_* metrics alone; 0 for none."""
    metrics_config: tuple[str, ...] = ()
    """Kinds of nv_* latencies: counter_latencies, summary_latencies, ...=true|false."""
    allow_client_shm: bool = False
    """Clients may name shared memory that tensors are read from and written to."""
    device_memory_share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Of each GPU's memory, what device_memory_mb of all models may claim."""
    dialects: tuple[Annotated[str, Meta(pattern=r"^[\w.]+:\w+$")], ...] = ()
    """Dialects of your own: MODULE:NAME of a DialectSpec."""
    dialect_options: dict[str, dict[str, Any]] = {}
    """Options of dialects without a section here, by the dialect's name."""
    keys: str = ""
    """File of API keys, which every request then needs; `fastserve key new` writes it. Empty: none."""
    keys_poll_s: Annotated[float, Meta(gt=0)] = 1.0
    """Seconds between two looks whether that file has changed."""
    keys_health: bool = False
    """Health is asked for with a key too."""
    audit_log: str = ""
    """File of JSON lines: the use of each key, once a second, and every administrative call. Empty: none."""
    insecure_public: bool = False
    """Serve addresses that other machines reach though nobody needs a key or a certificate."""
    admin: AdminOptions = AdminOptions()
    tls: TlsOptions = TlsOptions()
    limits: Limits = Limits()
    grpc_options: GrpcOptions = GrpcOptions()
    tfserving: TFServingOptions = TFServingOptions()
    triton: TritonOptions = TritonOptions()
    grps: GrpsOptions = GrpsOptions()
    textgen: TextgenOptions = TextgenOptions()
    log: LogOptions = LogOptions()
    otel: OtelOptions = OtelOptions()
    storage: StorageOptions = StorageOptions()

    def __post_init__(self) -> None:
        read_metrics_config(self.metrics_config)
        _ = self.budget_bytes
        self._check_tls()
        if self.audit_log and not self.keys:
            raise ValueError("audit_log: given without keys, allowed: with keys")
        given, most = self.triton.http_max_input_size, self.limits.body_bytes
        if given > max(most, INPUT_BYTES):  # it would never be reached
            raise ValueError(
                f"triton.http_max_input_size: given {given}, allowed: up to limits.body_bytes, {most}"
            )

        given, most = self.limits.memory_bytes, self._largest_body
        if given and given < most:  # it would never be had
            raise ValueError(
                f"limits.memory_bytes: given {given}, allowed: 0, or from {most}, which is the larger of "
                "limits.body_bytes and grpc_options.message_bytes"
            )

    @property
    def front_count(self) -> int:
        """The number of front processes; 1 for auto, until server/sizing.py has worked it out."""
        return 1 if self.frontends == "auto" else self.frontends

    @property
    def _largest_body(self) -> int:
        return max(self.limits.body_bytes, self.grpc_options.message_bytes)

    @property
    def memory_bytes(self) -> int:
        """The value of `limits.memory_bytes`, worked out where it is 0."""
        return self.limits.memory_bytes or max(LEAST_MEMORY_BYTES, 4 * self._largest_body)

    def _check_tls(self) -> None:
        spoken: dict[str, bool] = {}
        for listener in (*self.listen, *self.http, *self.grpc):
            if (listener.port or listener.in_file) and spoken.setdefault(
                listener.address, listener.tls
            ) != listener.tls:
                raise ValueError(f"{listener.address}: given with tcp:// and without, allowed: one of them")


PLAIN = "tcp://"  # before an address that speaks no TLS though tls.cert is set
LISTENER_FIELDS = ("listen", "http", "grpc")


def load_settings(
    file: Path | None = None,
    overrides: Mapping[str, object] | None = None,
    environment: Mapping[str, object] | None = None,
) -> Settings:
    """Return the settings of `file` with those of `environment` and then `overrides` on top: dotted path ->
    value, as in `ConfigField.path`.

    Values of both may be text, as flags are; a list is then split at commas.
    Raises ConfigError naming field, value and what is allowed.
    """
    from fastserve.settings.config_files import (
        read_yaml,  # workers, which have settings too, start 25 ms sooner
    )

    origin = file.name if file else "settings"
    tree = read_yaml(file, origin) if file else {}
    _open_listeners(tree, origin)
    settings = convert(tree, Settings, origin)
    if not overrides and not environment:
        return settings
    origin = "flags" if overrides else "environment"
    known = {field.path: field for field in list_fields(Settings)}
    for path, value in {**(environment or {}), **(overrides or {})}.items():
        if path not in known:
            raise ConfigError(f"flags: {path}: unknown field{hint(path, sorted(known))}")
        is_list = isinstance(known[path].default, tuple) and path not in LISTENER_FIELDS
        _put(tree, path, value.split(",") if is_list and isinstance(value, str) else value)
    _open_listeners(tree, origin)
    return convert(tree, Settings, origin, lax=True)


def parse_listener(text: str) -> dict[str, Any]:
    """Return `[tcp://]HOST:PORT[=dialect,...]` as the fields of a Listener, which checks the address."""
    address, _, dialects = text.partition("=")
    address = address.strip()
    return {
        "address": address.removeprefix(PLAIN),
        "dialects": [d for d in map(str.strip, dialects.split(",")) if d],
        "tls": not address.startswith(PLAIN),
    }


def _open_listeners(tree: dict[str, Any], origin: str) -> None:
    for name in LISTENER_FIELDS:
        given = tree.get(name)
        if given is None and name not in tree:
            continue
        items = [given] if isinstance(given, str) else given
        if not isinstance(items, (list, tuple)):
            wanted = "a list of HOST:PORT[=dialect,...], or off"
            raise ConfigError(f"{origin}: {fault_text(name, given, wanted)}")
        tree[name] = [parse_listener(i) if isinstance(i, str) else i for i in items if i != "off"]
    if tree.get("listen"):  # in place of the two ports that are there when nothing is said
        tree.setdefault("http", [])
        tree.setdefault("grpc", [])


def _put(tree: dict[str, Any], path: str, value: object) -> None:
    *parents, last = path.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[last] = list(value) if isinstance(value, tuple) else value
