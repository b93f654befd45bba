"""Options of the dialect kserve_v2: names and values of flags as Triton spells them.

    --http-restricted-api model-repository,shared-memory:admin-key=secret
    --trace-config triton,file=trace.json --trace-config level=TIMESTAMPS --trace-config rate=100

Values with a form of their own are checked when the settings are read, and parsed again where they are used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta

CATEGORIES = (
    "health",
    "metadata",
    "inference",
    "shared-memory",
    "model-config",
    "model-repository",
    "statistics",
    "trace",
    "logging",
)

TRACE_LEVELS = ("OFF", "TIMESTAMPS", "TENSORS")
OPENTELEMETRY = "opentelemetry"  # the trace mode, and what comes before its own settings
INPUT_BYTES = 1 << 26
_RESTRICTION = re.compile(r"(?P<names>[a-z,-]+):(?P<header>[!#$%&'*+.^_`|~0-9A-Za-z-]+)=(?P<value>.+)")
_TRACE = re.compile(r"(?:(?P<mode>[a-z]+),)?(?P<name>[a-z_-]+)=(?P<value>.+)")

# (mode, name) of --trace-config -> the setting clients see, and the form of its value
_TRACE_SETTINGS = {
    (None, "level"): ("trace_level", "|".join(TRACE_LEVELS)),
    (None, "rate"): ("trace_rate", r"[1-9][0-9]{0,8}"),
    (None, "count"): ("trace_count", r"-1|[0-9]{1,9}"),
    (None, "mode"): ("trace_mode", f"triton|{OPENTELEMETRY}"),
    ("triton", "file"): ("trace_file", r".+"),
    ("triton", "log-frequency"): ("log_frequency", r"[0-9]{1,9}"),
    (OPENTELEMETRY, "url"): ("url", r"https?://[^/\s@]+(/\S*)?"),
    (OPENTELEMETRY, "resource"): ("resource", r"[^=]+=.*"),
    (OPENTELEMETRY, "bsp_max_queue_size"): ("bsp_max_queue_size", r"[1-9][0-9]{0,5}"),
}

Restrictions = Mapping[str, tuple[str, str]]  # category -> header and its value
TraceValues = dict[str, str | list[str]]


class TritonOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The kserve_v2 dialect, as Triton's flags of the same names set it."""

    http_max_input_size: Annotated[int, Meta(ge=1)] = INPUT_BYTES
    """Bytes of a request's JSON, of a tensor in it, and of a raw body."""
    http_header_forward_pattern: str = ""
    """HTTP headers whose names hold this pattern become request parameters."""
    grpc_header_forward_pattern: str = ""
    """gRPC metadata whose keys hold this pattern become request parameters."""
    http_restricted_api: tuple[str, ...] = ()
    """APIs that want a header, whatever the dialect: API,...:HEADER=VALUE."""
    grpc_restricted_protocol: tuple[str, ...] = ()
    """RPCs that want metadata, whatever the dialect: API,...:KEY=VALUE, sent as triton-grpc-protocol-KEY."""
    trace_config: tuple[str, ...] = ()
    """mode=triton|opentelemetry, level=L, rate=N, count=N; triton,file=F, triton,log-frequency=N;
    opentelemetry,url=U."""

    def __post_init__(self) -> None:
        for name in ("http_header_forward_pattern", "grpc_header_forward_pattern"):
            try:
                re.compile(getattr(self, name))
            except re.error as fault:
                given = getattr(self, name)
                raise ValueError(
                    f'{name}: given "{given}", allowed: a regular expression ({fault})'
                ) from None
        _ = self.restrictions_over_http, self.restrictions_over_grpc
        parse_trace_config(self.trace_config)

    @property
    def restrictions_over_http(self) -> Restrictions:
        return parse_restrictions("http_restricted_api", self.http_restricted_api)

    @property
    def restrictions_over_grpc(self) -> Restrictions:
        return parse_restrictions("grpc_restricted_protocol", self.grpc_restricted_protocol)


def parse_restrictions(field: str, given: Sequence[str]) -> Restrictions:
    """Return the restrictions of several API,...:HEADER=VALUE. Raises ValueError."""
    found: dict[str, tuple[str, str]] = {}
    for text in given:
        match = _RESTRICTION.fullmatch(text)
        names = match["names"].split(",") if match else [""]
        for name in names:
            if match is None or name not in CATEGORIES or name in found:
                allowed = f"API,...:HEADER=VALUE, each once of {', '.join(CATEGORIES)}"
                raise ValueError(f'{field}: given "{text}", allowed: {allowed}')
            found[name] = match["header"], match["value"]
    return found


def parse_trace_config(given: Sequence[str]) -> TraceValues:
    """Return the initial trace settings; TIMESTAMPS and TENSORS add up. Raises ValueError."""
    found: TraceValues = {}
    levels: list[str] = []
    for text in given:
        match = _TRACE.fullmatch(text)
        setting, form = _TRACE_SETTINGS.get((match["mode"], match["name"]), ("", "")) if match else ("", "")
        if match is None or not setting or not re.fullmatch(form, match["value"]):
            allowed = (
                "mode=triton or opentelemetry, level=OFF or TIMESTAMPS, rate=N, count=N, triton,file=F, "
                "triton,log-frequency=N, opentelemetry,url=URL, opentelemetry,resource=NAME=VALUE, "
                "opentelemetry,bsp_max_queue_size=N"
            )
            raise ValueError(f'trace_config: given "{text}", allowed: {allowed}')
        if setting == "trace_level":
            levels.append(match["value"])
        elif setting == "resource":
            found["resource"] = [*found.get("resource", ()), match["value"]]
        else:
            found[setting] = match["value"]
    if levels:
        found["trace_level"] = [level for level in TRACE_LEVELS[1:] if level in levels] or ["OFF"]
    if found.get("trace_mode") == OPENTELEMETRY:
        _check_opentelemetry(found)
    elif found.get("trace_level", ["OFF"]) != ["OFF"] and "trace_file" not in found:
        raise ValueError('trace_config: given a level and no file, allowed: with "triton,file=FILE"')
    return found


def _check_opentelemetry(found: TraceValues) -> None:
    """Raise ValueError for what only traces in files have."""
    for name, plain in (("trace_count", "-1"), ("trace_file", ""), ("log_frequency", "")):
        if found.get(name, plain) != plain:
            raise ValueError(f"trace_config: given {name} with mode=opentelemetry, allowed: with mode=triton")
    if "TENSORS" in found.get("trace_level", ()):
        raise ValueError("trace_config: given level=TENSORS with mode=opentelemetry, allowed: TIMESTAMPS")


KINDS = ("counter_latencies", "histogram_latencies", "summary_latencies")
QUANTILES = "summary_quantiles"
_PAIR = re.compile(r"(?P<name>[a-z_]+)=(?P<value>.*)")
_RANK = re.compile(r"(?P<quantile>0?\.[0-9]+|0|1|1\.0*):[0-9.]+")


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """Kinds of latencies shown; the quantiles of summaries."""

    counter_latencies: bool = True
    histogram_latencies: bool = False
    summary_latencies: bool = False
    summary_quantiles: tuple[float, ...] = (0.5, 0.9, 0.95, 0.99, 0.999)


def read_metrics_config(given: Sequence[str]) -> MetricsConfig:
    """Return --metrics-config of several NAME=VALUE,... Raises ValueError naming the invalid one."""
    found = MetricsConfig()
    for text in given:
        quantiles = text.startswith(f"{QUANTILES}=")  # whose value has commas of its own
        for pair in [text] if quantiles else text.split(","):
            match = _PAIR.fullmatch(pair)
            if match and match["name"] in KINDS and match["value"] in ("true", "false"):
                found = _with_kind(found, match["name"], match["value"] == "true")
            elif quantiles and match:
                found = replace(found, summary_quantiles=_read_quantiles(match["value"], text))
            else:
                allowed = f"{', '.join(KINDS)}=true|false, {QUANTILES}=QUANTILE:ERROR,..."
                raise ValueError(f'metrics_config: given "{pair}", allowed: {allowed}')
    return found


def _with_kind(config: MetricsConfig, kind: str, shown: bool) -> MetricsConfig:
    kinds: dict[str, Any] = {kind: shown}
    return replace(config, **kinds)


def _read_quantiles(value: str, text: str) -> tuple[float, ...]:
    matches = [_RANK.fullmatch(rank.strip()) for rank in value.split(",")]
    if not all(matches):
        raise ValueError(f'metrics_config: given "{text}", allowed: {QUANTILES}=QUANTILE:ERROR,... of 0 to 1')
    return tuple(sorted(float(match["quantile"]) for match in matches if match))
