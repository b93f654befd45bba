"""The state of one front process for HTTP and gRPC: engine, trace and log settings, errors (spec 1.2, 9).

Settings are the same in all front processes and take effect elsewhere: `log_*` in the server's own log
(logs.py), `trace_*` in `serving/traces`. The operator names the files, never a client. Every error kind has
its HTTP status in one table; an error in a request's JSON is INTERNAL here, as in Triton.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

from fastserve._ext.json_writer import write_string
from fastserve.codec.json_text import leading_int, to_bytes
from fastserve.dialects.kserve.json_values import INT64_MAX, Value, as_array, as_string, find
from fastserve.dialects.kserve.request import HeaderForwarding, id_prefix
from fastserve.errors import DeadlineError, Kind, Reason, ServeError, invalid, unsupported
from fastserve.net.limits import JSON
from fastserve.net.request import Call
from fastserve.net.router import CANONICAL_STATUS, common_status, fault_headers
from fastserve.repository.version import Version
from fastserve.serving.dialect import DialectService, ServingContext
from fastserve.serving.model_view import ModelView, find_version
from fastserve.serving.replication import Content, ReplicatedPart, ReplicatedState, StateRecord
from fastserve.serving.traces import OFF, Setting, Traces
from fastserve.settings import TritonOptions
from fastserve.settings.kserve_options import OPENTELEMETRY, TRACE_LEVELS, parse_trace_config
from fastserve.util.logs import switch_logs

# The ranges of settings that are numbers.
RANGES = {"trace_rate": (0, 2**32 - 1), "trace_count": (-1, 2**31 - 1), "log_frequency": (0, 2**32 - 1)}


def read_trace(given: Value, gap: str) -> dict[str, Setting | None]:
    """Return the changes in a JSON object, None for a reset; unknown settings are ignored.

    Raises ServeError.

    `gap` is the space that one text has over gRPC.
    """
    if find(given, "trace_file")[0]:
        raise unsupported("trace file location can not be updated through network protocol")
    changes: dict[str, Setting | None] = {}
    for name, read in (("trace_level", _read_levels), *((name, _read_number) for name in RANGES)):
        found, value = find(given, name)
        setting = None if value is None else read(name, value, gap)
        if found and (setting is None or setting):
            changes[name] = setting
    return changes


def _read_levels(name: str, value: Value, gap: str) -> Setting:
    """Return the known levels in their order, [] for none. Raises ServeError."""
    given = [as_string(item) for item in as_array(value)]
    if "OFF" in given and len(given) > 1:
        raise invalid("Expect only one trace level 'OFF' is specified")
    return [level for level in TRACE_LEVELS if level in given]


def _read_number(name: str, value: Value, gap: str) -> Setting:
    """Return a number given as text; characters after its digits are ignored, as by stoi.

    Raises ServeError.
    """
    text = as_string(value)
    number, (least, most) = leading_int(text), RANGES[name]
    if number is None:
        raise invalid(f"Unable to parse '{name}', got: {text}")
    if not -(1 << 31) <= number < 1 << 31:
        raise invalid(f"Unable to parse '{name}', value is out of range [ {least}, {most} ], got: {text}")
    if name == "trace_count" and number < least:
        raise invalid(f"Unable to parse '{name}'. Expecting value >= {least}, got:{gap}{text}")
    return str(number if least else number & most)


def check_trace(settings: Mapping[str, Setting]) -> None:
    """Raise ServeError for settings that cannot trace, and for any change in the mode opentelemetry."""
    if settings["trace_mode"] == OPENTELEMETRY:
        raise unsupported("trace settings of mode opentelemetry are given at the start, by --trace-config")
    if settings["trace_level"] == OFF:
        return
    failed = "Attempting to set invalid trace setting :"
    if settings["trace_rate"] == "0":
        raise invalid(f"{failed}sample rate must be non-zero")
    if not settings["trace_file"]:
        raise invalid(f"{failed}trace file name is not given")


FORMATS = ("default", "ISO8601")

LOG_SETTINGS: dict[str, type] = {
    "log_info": bool,
    "log_warning": bool,
    "log_error": bool,
    "log_verbose_level": int,
    "log_format": str,
}
"""The log settings that clients can change, and their types."""

_LEVELS = {
    "log_verbose_level": logging.DEBUG,
    "log_info": logging.INFO,
    "log_warning": logging.WARNING,
    "log_error": logging.ERROR,
}


def _as_level(given: int) -> int:
    """Return the low 32 bits, or 0 below zero, as Triton 24.10 does."""
    low = given & 0xFFFFFFFF
    return low if low < 1 << 31 else 0


class LogSettings(ReplicatedPart):
    """The log settings, which all front processes have alike. They start with those of `level`."""

    PART = "kserve log settings"

    def __init__(self, level: str, state: ReplicatedState) -> None:
        self._state = state
        self._values: dict[str, bool | int | str] = {
            "log_file": "",
            "log_info": level in ("debug", "info"),
            "log_warning": level != "error",
            "log_error": True,
            "log_verbose_level": int(level == "debug"),
            "log_format": "default",
        }
        self._changed = False  # a front process that starts has the level of the server's settings
        state.add(self.PART, self)

    def show(self) -> dict[str, bool | int | str]:
        """Return the settings that hold now."""
        return dict(self._values)

    async def change(self, changes: Mapping[str, bool | int | str], over_http: bool) -> None:
        """Apply settings whose types have been checked, in every front process. Raises ServeError."""
        chosen = changes.get("log_format", "default")
        if chosen not in FORMATS:
            if over_http:
                raise ServeError(Kind.UNAVAILABLE, f"invalid argument for --log_format, got: {chosen}")
            raise invalid(f"invalid argument for log_format, got: {chosen}")
        if changes and self._state.ask is not None:
            await self._state.ask(self.PART, changes)
        elif changes:
            await self.carry_out(changes)

    async def carry_out(self, change: Content) -> None:
        self.apply(change, [])
        if self._state.publish is not None:
            await self._state.publish(self.PART, [StateRecord(change)])

    def apply(self, content: Content, fds: list[int]) -> None:
        self._values.update(content)
        self._values["log_verbose_level"] = _as_level(int(self._values["log_verbose_level"]))
        levels = frozenset(level for name, level in _LEVELS.items() if self._values[name])
        switch_logs(levels, iso8601=self._values["log_format"] == "ISO8601")
        self._changed = True

    def records(self) -> Iterator[StateRecord]:
        if self._changed:
            yield StateRecord(self._values)


QUEUE_FULL = "Exceeds maximum queue size"

HTTP_STATUS = CANONICAL_STATUS | {
    Kind.CANCELLED: 400,
    Kind.UNKNOWN: 400,
    Kind.DEADLINE_EXCEEDED: 503,
    Kind.ALREADY_EXISTS: 400,
    Kind.RESOURCE_EXHAUSTED: 503,
    Kind.ABORTED: 503,
}


def too_large(what: str, most: int) -> ServeError:
    """Return the error for more than `--http-max-input-size` (spec 3.3)."""
    return invalid(f"{what} of {most} bytes. Use --http-max-input-size to increase the limit.")


def triton_error(fault: ServeError) -> ServeError:
    """Return an engine's error with Triton's kind and text."""
    if isinstance(fault, DeadlineError) and fault.queued:
        return ServeError(Kind.UNAVAILABLE, "Request timeout expired")
    return fault


def rpc_error(fault: ServeError, request_id: str) -> ServeError:
    """Return an engine's error as gRPC has it: the text of a full queue names the request."""
    if fault.reason is Reason.QUEUE_DEADLINE:  # the call's own deadline, not one of the model's queue policy
        return fault
    error = triton_error(fault)
    if error.reason is Reason.QUEUE_FULL:
        return ServeError(
            Kind.UNAVAILABLE, id_prefix(request_id) + QUEUE_FULL, retry_after_s=error.retry_after_s
        )
    return error


def error_body(message: str) -> bytes:
    """Return the body of an error reply. Bytes that were not UTF-8 pass through (surrogateescape)."""
    return b'{"error":%b}' % write_string(to_bytes(message))


TEXT = b"text/plain"


def read_version(text: str) -> int | None:
    """Return a version's number, None for the latest. Raises ServeError INVALID_ARGUMENT."""
    if not text:
        return None
    number = leading_int(text)
    if number is None or abs(number) > INT64_MAX:
        raise invalid(
            f"failed to get model version from specified version string '{text}' (details: stol), "
            "version should be an integral value > 0"
        )
    if number < 0:
        raise invalid(f"invalid model version specified '{text}' , version should be an integral value > 0")
    return number


class KServeService(DialectService):
    """The dialect's state in one front process, shared by HTTP and gRPC."""

    def __init__(self, context: ServingContext, options: TritonOptions) -> None:
        super().__init__(context, "kserve_v2")
        self.options = options
        self.health_bodies = context.settings.kserve_replies
        start, fronts = parse_trace_config(options.trace_config), context.settings.front_count
        self.traces = context.share(
            "kserve traces", lambda: Traces(self.engine, start, check_trace, context.state, fronts)
        )
        self.log = context.share(
            LogSettings.PART, lambda: LogSettings(context.settings.log.level, context.state)
        )
        http, grpc = options.http_header_forward_pattern, options.grpc_header_forward_pattern
        self.forward_http = HeaderForwarding(http) if http else None
        self.forward_grpc = HeaderForwarding(grpc) if grpc else None

    def find(self, model: str, version: str) -> ModelView:
        """Return the version of a model, the latest for ""; one that is no number is a label. Raises
        ServeError."""
        return self.views.of(find_version(self.catalog, model, self.read_number(model, version)))

    def read_number(self, model: str, version: str) -> int | None:
        """Return a version's number, also of a label; None for the latest. Raises ServeError
        INVALID_ARGUMENT."""
        labelled = self.catalog.labelled(model, version) if version and not version.isdecimal() else None
        return read_version(version) if labelled is None else labelled.number

    def refuse(
        self,
        call: Call,
        fault: ServeError,
        model: str = "",
        headers: Sequence[tuple[bytes, bytes]] = (),
        version: Version | None = None,
    ) -> None:
        """Reply with an error; `version` is the one of the request, where it was found."""
        number = "" if version is None else version.number
        self.count_fault(model, fault, call, number)
        fault = triton_error(call.cause_of(fault))
        status = common_status(fault) or HTTP_STATUS[fault.kind]
        call.reply(status, error_body(fault.message), JSON, (*headers, *fault_headers(fault)))
