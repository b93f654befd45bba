"""Settings of the server: one YAML file, overridden field by field by command line flags."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from fastserve.config.fields import convert, fault_text, hint, list_fields
from fastserve.config.grps import GrpsOptions
from fastserve.config.text_options import TextgenOptions
from fastserve.config.triton import INPUT_BYTES, TritonOptions, read_metrics_config
from fastserve.errors import ConfigError

VersionNumber = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class PolicyChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Policy for versions: `{latest: N}` or `{specific: [N, ...]}`, exactly one of them."""

    latest: Annotated[int, Meta(ge=0, description="The N highest versions; 0 means 1.")] | None = None
    specific: Annotated[list[VersionNumber], Meta(min_length=1, description="These versions.")] | None = None

    def __post_init__(self) -> None:
        if (self.latest is None) == (self.specific is None):
            raise ValueError("latest, specific: exactly one of them must be given")


VersionPolicy = PolicyChoice | Literal["all"]
DEFAULT_POLICY: VersionPolicy = PolicyChoice(latest=1)
PASSWORD_VARIABLE = "FASTSERVE_TLS_KEY_PASSWORD"  # of the front processes' environment, not of models'
PEM = "-----BEGIN "  # what a value that is the text itself begins with


class TlsOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """TLS for every listener whose address does not begin with tcp://. None without `cert`."""

    cert: Annotated[
        str, Meta(description="PEM file of the certificate and its chain, or the text itself; empty: no TLS.")
    ] = ""
    key: Annotated[
        str,
        Meta(description="PEM file of its private key, or the text itself; empty: it is in `cert`."),
    ] = ""
    key_password_file: Annotated[
        str, Meta(description="File whose first line opens the key; else $FASTSERVE_TLS_KEY_PASSWORD does.")
    ] = ""
    client_ca: Annotated[
        str,
        Meta(description="PEM file, or text, of authorities whose clients are let in; empty: anyone."),
    ] = ""
    client_auth: Annotated[
        Literal["required", "optional"],
        Meta(description="Whether a client may come without a certificate, where client_ca is set."),
    ] = "required"
    min_version: Annotated[Literal["1.2", "1.3"], Meta(description="Oldest version of TLS spoken.")] = "1.2"
    poll_s: Annotated[
        float, Meta(gt=0, description="Seconds between two looks whether the files have changed.")
    ] = 5.0
    handshake_timeout_s: Annotated[
        float, Meta(gt=0, description="Seconds a client may take for its handshake.")
    ] = 10.0
    handshakes: Annotated[
        int, Meta(ge=1, description="Handshakes under way per listener and front; one more ends the oldest.")
    ] = 1024

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
_FILE = re.compile(r"^unix:(?P<path>[^=\x00]{1,107})$")  # sockaddr_un has 108 bytes, the last of them 0
_ADDRESS = re.compile(r"^(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[^:\[\]=\s]*)):(?P<port>[0-9]{1,5})$")


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of one connection in bytes, seconds and counts. Each is named in the error it causes."""

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
    reply_bytes_per_s: Annotated[
        int,
        Meta(
            ge=0,
            description="Slowest rate at which a client may read while bytes of a reply wait for it, over "
            "every write_stall_s; 0 for any rate.",
        ),
    ] = 256
    memory_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="Bytes of requests and unread replies that a front holds; 0: four largest bodies.",
        ),
    ] = 0


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
    """Changes that clients may make, beside loads and unloads under explicit control."""

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
    """Log lines on standard error."""

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
    """Models to serve, their folders, and how often these are read again."""

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
    kserve_replies: Annotated[
        bool,
        Meta(description="V2's health and a model's status over /v1 say what KServe's own client reads."),
    ] = True
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

        given, most = self.limits.memory_bytes, self._largest_body
        if given and given < most:  # it would never be had
            raise ValueError(
                f"limits.memory_bytes: given {given}, allowed: 0, or from {most}, which is the larger of "
                "limits.body_bytes and grpc_options.message_bytes"
            )

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


def load_settings(file: Path | None = None, overrides: Mapping[str, object] | None = None) -> Settings:
    """Return the settings of `file` with `overrides` on top: dotted path -> value, as in `ConfigField.path`.

    Values of overrides may be text, as flags are; a list is then split at commas.
    Raises ConfigError naming field, value and what is allowed.
    """
    from fastserve.config.yaml_text import read_yaml  # workers, which have settings too, start 25 ms sooner

    origin = file.name if file else "settings"
    tree = read_yaml(file, origin) if file else {}
    _open_listeners(tree, origin)
    settings = convert(tree, Settings, origin)
    if not overrides:
        return settings
    known = {field.path: field for field in list_fields(Settings)}
    for path, value in overrides.items():
        if path not in known:
            raise ConfigError(f"flags: {path}: unknown field{hint(path, sorted(known))}")
        is_list = isinstance(known[path].default, tuple) and path not in LISTENER_FIELDS
        _put(tree, path, value.split(",") if is_list and isinstance(value, str) else value)
    _open_listeners(tree, "flags")
    return convert(tree, Settings, "flags", lax=True)


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
