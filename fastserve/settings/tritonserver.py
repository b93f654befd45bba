"""Triton's command line as settings of this server.

`read_flags` takes a command line as Triton's parser does, `--name=value` or `--name value`; `flag_settings`
turns the result into overrides for `load_settings`. What would change an answer, an address or who may
connect, and is not built, is a fault, as is a flag nobody knows. What only tunes Triton's own machinery is
named in `ignored`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastserve.errors import ConfigError
from fastserve.settings.fields import BOOLS, fault_text, unbuilt_fault

Overrides = dict[str, Any]  # dotted path of a setting -> value
Given = Mapping[str, Sequence[str]]  # flag -> its values, in their order
_LOG_LEVELS = (("log-info", "info"), ("log-warning", "warning"), ("log-error", "error"))
_MODES = ("none", "poll", "explicit")
_BOOL_FLAGS = {
    "allow-client-shm": False,
    "allow-grpc": True,
    "allow-http": True,
    "allow-metrics": True,
    "exit-on-error": True,
    "grpc-use-ssl": False,
    "grpc-use-ssl-mutual": False,
    "log-error": True,
    "log-info": True,
    "log-warning": True,
    "strict-readiness": True,
}
_INT_FLAGS = {
    "exit-timeout-secs": 30,
    "grpc-keepalive-time": 7_200_000,
    "grpc-keepalive-timeout": 20_000,
    "grpc-max-connection-age": 0,
    "grpc-max-connection-age-grace": 0,
    "grpc-port": 8001,
    "http-max-input-size": 1 << 26,
    "http-port": 8000,
    "log-verbose": 0,
    "metrics-port": 8002,
    "model-load-retry-count": 0,
    "model-load-thread-count": 4,
    "repository-poll-secs": 15,
    "response-cache-byte-size": 0,
}
_TEXT_FLAGS = {
    "grpc-address": "0.0.0.0",
    "grpc-header-forward-pattern": "",
    "grpc-root-cert": "",
    "grpc-server-cert": "",
    "grpc-server-key": "",
    "http-address": "0.0.0.0",
    "http-header-forward-pattern": "",
    "metrics-address": "",  # that of HTTP
    "model-control-mode": "none",
    "model-repository": "",
    "model-store": "",
    "rate-limit": "off",
    "trace-count": "",
    "trace-file": "",
    "trace-log-frequency": "",
    "trace-rate": "",
}
_MANY_FLAGS = frozenset(
    (
        "cache-config",
        "grpc-restricted-protocol",
        "http-restricted-api",
        "load-model",
        "metrics-config",
        "rate-limit-resource",
        "trace-config",
        "trace-level",
    )
)
# Flags of its own machinery: no answer depends on them.
_IDLE_FLAGS = frozenset(
    (
        "allow-cpu-metrics",
        "allow-gpu-metrics",
        "backend-config",
        "backend-directory",
        "buffer-manager-thread-count",
        "cache-directory",
        "cuda-memory-pool-byte-size",
        "cuda-virtual-address-size",
        "enable-peer-access",
        "grpc-http2-max-ping-strikes",
        "grpc-http2-max-pings-without-data",
        "grpc-http2-min-recv-ping-interval-without-data",
        "grpc-infer-allocation-pool-size",
        "grpc-keepalive-permit-without-calls",
        "host-policy",
        "http-thread-count",
        "log-format",
        "metrics-interval-ms",
        "min-supported-compute-capability",
        "model-load-gpu-limit",
        "pinned-memory-pool-byte-size",
        "repoagent-directory",
    )
)
# Flags that are not built, and the values under which they ask for nothing.
_UNBUILT_FLAGS = {
    "allow-sagemaker": "false",
    "allow-vertex-ai": "false",
    "disable-auto-complete-config": "false",
    "grpc-infer-response-compression-level": "none",
    "id": "triton",
    "log-file": "",
    "model-config-name": "",
    "model-namespacing": "false",
    "reuse-grpc-port": "false",
    "reuse-http-port": "false",
    "sagemaker-port": "",
    "sagemaker-safe-port-range": "",
    "sagemaker-thread-count": "",
    "strict-model-config": "false",
    "vertex-ai-default-model": "",
    "vertex-ai-port": "",
    "vertex-ai-thread-count": "",
}
_ALONE = frozenset(("disable-auto-complete-config",))  # given without a value
_KNOWN = {*_BOOL_FLAGS, *_INT_FLAGS, *_TEXT_FLAGS, *_MANY_FLAGS, *_IDLE_FLAGS, *_UNBUILT_FLAGS}


@dataclass(slots=True)
class TritonFlags:
    """A command line as it was read: what was given, by flag, and what cannot be taken."""

    given: dict[str, list[str]] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def read_triton_flags(argv: Sequence[str]) -> TritonFlags:
    """Read `--name=value` or `--name value`. Of a flag given twice the last counts, unless it may repeat."""
    flags = TritonFlags()
    rest = iter(argv)
    for argument in rest:
        name, equals, value = argument[2:].partition("=")
        if not argument.startswith("--") or name not in _KNOWN:
            flags.faults.append(f"unknown argument: {argument}, allowed: flags of tritonserver")
        elif not equals and name in _ALONE:
            _take(flags, name, "true")
        else:
            _take_value(flags, name, value if equals else next(rest, None))
    return flags


def _take_value(flags: TritonFlags, name: str, value: str | None) -> None:
    if value is None:
        flags.faults.append(f"--{name}: missing its value, write --{name}=VALUE")
    else:
        _take(flags, name, value)


def _take(flags: TritonFlags, name: str, value: str) -> None:
    fault = _find_fault(name, value)
    if fault:
        flags.faults.append(fault)
    elif name in _IDLE_FLAGS:
        flags.ignored.append(f"--{name}")
    elif name in _MANY_FLAGS:
        flags.given.setdefault(name, []).append(value)
    else:
        flags.given[name] = [value]


def _find_fault(name: str, value: str) -> str:
    """Return the fault of a flag's value by itself, "" for none."""
    allowed = ""
    if name in _UNBUILT_FLAGS:
        return unbuilt_fault(name, value, _UNBUILT_FLAGS[name])
    if name in _BOOL_FLAGS and value.lower() not in BOOLS:
        allowed = "true or false or 1 or 0"
    elif name in _INT_FLAGS and not re.fullmatch(r"[0-9]{1,15}", value):
        allowed = "a whole number from 0 on"
    elif name == "model-control-mode" and value not in _MODES:
        allowed = ", ".join(_MODES)
    return fault_text(f"--{name}", value, allowed) if allowed else ""


def triton_overrides(given: Given) -> Overrides:
    """Return overrides for `load_settings`. Raises ConfigError for flags that exclude each other."""
    bools = {name: BOOLS[_last(given, name, str(idle)).lower()] for name, idle in _BOOL_FLAGS.items()}
    ints = {name: int(_last(given, name, str(idle))) for name, idle in _INT_FLAGS.items()}
    texts = {name: _last(given, name, idle) for name, idle in _TEXT_FLAGS.items()}
    out = _listeners(bools, ints, texts)
    out |= _models(given, bools, ints, texts) | _tls(bools, texts) | _connections(ints)
    out |= {
        "log.level": _log_level(bools, ints),
        "drain_s": ints["exit-timeout-secs"],
        "strict_readiness": bools["strict-readiness"],
        "allow_client_shm": bools["allow-client-shm"],
        "allow_metrics": bools["allow-metrics"],
        "kserve_replies": False,  # health has no body there
        "metrics_config": tuple(given.get("metrics-config", ())),
        "response_cache_bytes": _cache_bytes(given, ints),
        "rate_limit": texts["rate-limit"],
        "rate_limit_resources": tuple(given.get("rate-limit-resource", ())),
        "triton.http_max_input_size": ints["http-max-input-size"],
        "triton.http_header_forward_pattern": texts["http-header-forward-pattern"],
        "triton.grpc_header_forward_pattern": texts["grpc-header-forward-pattern"],
        "triton.http_restricted_api": tuple(given.get("http-restricted-api", ())),
        "triton.grpc_restricted_protocol": tuple(given.get("grpc-restricted-protocol", ())),
        "triton.trace_config": tuple(_trace_config(given, texts)),
    }
    return out


def _last(given: Given, name: str, idle: str) -> str:
    return given[name][-1] if name in given else idle


def _listeners(bools: Mapping[str, bool], ints: Mapping[str, int], texts: Mapping[str, str]) -> Overrides:
    """Return the three ports. gRPC alone may have TLS there."""
    http: list[str] = []
    tls = bools["grpc-use-ssl"] or bools["grpc-use-ssl-mutual"]
    plain = "tcp://" if tls else ""
    if bools["allow-http"]:
        http.append(f"{plain}{_place(texts['http-address'], ints['http-port'])}=kserve_v2")
    if bools["allow-metrics"]:
        host = texts["metrics-address"] or texts["http-address"]
        http.append(f"{plain}{_place(host, ints['metrics-port'])}=metrics")
    grpc = [f"{_place(texts['grpc-address'], ints['grpc-port'])}=kserve_v2"] if bools["allow-grpc"] else []
    return {"http": http, "grpc": grpc}


def _place(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _models(
    given: Given, bools: Mapping[str, bool], ints: Mapping[str, int], texts: Mapping[str, str]
) -> Overrides:
    repository = texts["model-repository"] or texts["model-store"]
    if not repository:
        raise ConfigError("--model-repository must be specified")
    mode = texts["model-control-mode"]
    return {
        "repository": repository,
        "model_control": mode,
        "poll_s": ints["repository-poll-secs"] or 15,
        # They take effect under explicit control only, as there.
        "load_models": tuple(given.get("load-model", ())) if mode == "explicit" else (),
        "keep_going": not bools["exit-on-error"],
        "load_retries": ints["model-load-retry-count"],
        "parallel_loads": max(1, ints["model-load-thread-count"]),
    }


def _tls(bools: Mapping[str, bool], texts: Mapping[str, str]) -> Overrides:
    mutual = bools["grpc-use-ssl-mutual"]
    if not (mutual or bools["grpc-use-ssl"]):
        return {}  # the files are not looked at, as there
    wanted = ("grpc-server-cert", "grpc-server-key", *(("grpc-root-cert",) if mutual else ()))
    missing = [f"--{name}" for name in wanted if not texts[name]]
    if missing:
        raise ConfigError(f"{', '.join(missing)}: missing, name a PEM file with each, as TLS is asked for")
    return {
        "tls.cert": texts["grpc-server-cert"],
        "tls.key": texts["grpc-server-key"],
        "tls.client_ca": texts["grpc-root-cert"] if mutual else "",
    }


def _connections(ints: Mapping[str, int]) -> Overrides:
    """Return limits of connections. Flags are in milliseconds, settings in seconds."""
    settings = {
        "grpc-keepalive-time": "keepalive_s",
        "grpc-keepalive-timeout": "keepalive_timeout_s",
        "grpc-max-connection-age": "max_connection_age_s",
        "grpc-max-connection-age-grace": "max_connection_age_grace_s",
    }
    return {f"grpc_options.{to}": ints[name] / 1000 for name, to in settings.items() if ints[name]}


def _log_level(bools: Mapping[str, bool], ints: Mapping[str, int]) -> str:
    """Return the log level of the flags; errors are always written."""
    if ints["log-verbose"]:
        return "debug"
    return next((level for name, level in _LOG_LEVELS if bools[name]), "error")


def _cache_bytes(given: Given, ints: Mapping[str, int]) -> int:
    size = ints["response-cache-byte-size"]
    for text in given.get("cache-config", ()):
        match = re.fullmatch(r"local,size=([0-9]{1,15})", text)
        if match is None:
            raise ConfigError(fault_text("--cache-config", text, "local,size=N"))
        size = int(match[1])
    return size


def _trace_config(given: Given, texts: Mapping[str, str]) -> Iterator[str]:
    """Replace older flags by those of today."""
    yield from given.get("trace-config", ())
    for level in given.get("trace-level", ()):
        yield f"level={level}"
    for name, setting in (
        ("trace-file", "triton,file"),
        ("trace-log-frequency", "triton,log-frequency"),
        ("trace-rate", "rate"),
        ("trace-count", "count"),
    ):
        if texts[name]:
            yield f"{setting}={texts[name]}"


def triton_usage() -> str:
    """Return the flags that are built, with their defaults."""
    idle = {name: str(value).lower() for name, value in _BOOL_FLAGS.items()}
    defaults = {**idle, **_INT_FLAGS, **_TEXT_FLAGS, **dict.fromkeys(_MANY_FLAGS, "")}
    lines = [f"  --{name} <{defaults[name] or '...'}>" for name in sorted(defaults)]
    return "\n".join(["Usage: tritonserver [options]", *lines])
