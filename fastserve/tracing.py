"""Following one request: its id, its trace context, and log lines that cannot be forged.

No OpenTelemetry here, only what W3C Trace Context needs on the way in and out. Lines are written by
the standard logging module; this module gives it formatters under which a line is always one line,
of bounded length, whatever a client put into it (hardening C7), and a filter that keeps a warning
that repeats from filling the disk.

    log.warning("refused %s", target, extra={"request_id": call.request_id, "model": name})
    2026-01-01T00:00:00.000Z WARNING fastserve.wire: refused /v1/x\\n model=digits request_id=4f2a-1
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import msgspec

REQUEST_ID_MAX = 128  # characters
MESSAGE_BYTES = 560  # of one message, after escaping; with its fields a line stays under 1 KiB
FIELD_BYTES = 120
FIELDS_BYTES = 300  # of all fields together
TRACE_LINES = 60
TRACE_LINE_BYTES = 400

_SANE_ID = re.compile(rb"[A-Za-z0-9_.:/+=@-]{1,%d}" % REQUEST_ID_MAX)
# https://www.w3.org/TR/trace-context/#traceparent-header: later versions may append fields
_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Trace:
    """Where a request stands in a distributed trace: hexadecimal ids as W3C writes them."""

    trace_id: str
    span_id: str  # the caller's span
    flags: int = 0

    @property
    def sampled(self) -> bool:
        return bool(self.flags & 1)

    def next_hop(self) -> bytes:
        """The traceparent to send on: same trace, a span of our own."""
        return b"00-%b-%b-%02x" % (self.trace_id.encode(), os.urandom(8).hex().encode(), self.flags & 1)


def parse_traceparent(header: bytes) -> Trace | None:
    """The trace a traceparent header names, None when it is absent or not sane."""
    found = _TRACEPARENT.fullmatch(header)
    if found is None or len(header) > 512:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == b"ff" or (version == b"00" and more) or not trace_id.strip(b"0") or not span_id.strip(b"0"):
        return None
    return Trace(trace_id.decode(), span_id.decode(), int(flags, 16))


def choose_request_id(given: bytes = b"", traceparent: bytes = b"") -> str:
    """The X-Request-Id a client sent if it is short and plain, else its trace id, else a new one."""
    if given and _SANE_ID.fullmatch(given):
        return given.decode()
    trace = parse_traceparent(traceparent) if traceparent else None
    return trace.trace_id if trace else make_request_id()


_prefix = os.urandom(6).hex()
_numbers = itertools.count(1)


def make_request_id() -> str:
    """Unique over processes and restarts: a random word per process and a count. About 150 ns."""
    return f"{_prefix}-{next(_numbers):x}"


def _renew_prefix() -> None:
    global _prefix
    _prefix = os.urandom(6).hex()


os.register_at_fork(after_in_child=_renew_prefix)


def escape(text: str, limit: int) -> str:
    """`text` on one line, without control or invisible characters, at most `limit` bytes of UTF-8."""
    shown = text[: limit + 1]  # whatever lies beyond is not even looked at: a target may be a megabyte
    if not (shown.isascii() and shown.isprintable()) or "\\" in shown:
        shown = "".join(c if c.isprintable() and c != "\\" else _escape_one(c) for c in shown)
    raw = shown.encode()
    if len(text) <= limit and len(raw) <= limit:
        return shown
    note = f"...({len(text)} characters)"
    return raw[: max(0, limit - len(note))].decode(errors="ignore") + note


def _escape_one(c: str) -> str:
    return "\\\\" if c == "\\" else c.encode("unicode_escape", "surrogatepass").decode()


_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "suppressed"}


def fields_of(record: logging.LogRecord, always: Mapping[str, str]) -> dict[str, str]:
    """What a record carries beyond its message, escaped, within FIELDS_BYTES together."""
    found = {**always, **{k: v for k, v in vars(record).items() if k not in _STANDARD}}
    suppressed = getattr(record, "suppressed", 0)
    if suppressed:
        found["suppressed"] = suppressed
    kept: dict[str, str] = {}
    room = FIELDS_BYTES
    for key, value in found.items():
        text = escape(str(value), FIELD_BYTES)
        room -= len(key) + len(text.encode()) + text.count('"') + 4
        if room < 0:
            break
        kept[escape(key, 40)] = text
    return kept


def trace_of(record: logging.LogRecord) -> list[str]:
    """The lines of a record's traceback, each escaped; the middle of a long one is left out."""
    if not record.exc_info or record.exc_info[1] is None:
        return []
    lines = "".join(traceback.format_exception(*record.exc_info)).splitlines()
    if len(lines) > TRACE_LINES:
        half = TRACE_LINES // 2
        lines = [*lines[:half], f"... ({len(lines) - 2 * half} lines)", *lines[-half:]]
    return [escape(line, TRACE_LINE_BYTES) for line in lines]


def _message(record: logging.LogRecord) -> str:
    try:
        return escape(record.getMessage(), MESSAGE_BYTES)
    except Exception:  # arguments that do not fit the message: the line must still be written
        return escape(str(record.msg), MESSAGE_BYTES)


def _stamp(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


class TextLines(logging.Formatter):
    """time LEVEL logger: message key=value ...; a traceback follows, each line behind a bar."""

    def __init__(self, always: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._always = dict(always or {})

    def format(self, record: logging.LogRecord) -> str:
        pairs = "".join(f" {k}={_quote(v)}" for k, v in fields_of(record, self._always).items())
        line = f"{_stamp(record)} {record.levelname} {escape(record.name, 80)}: {_message(record)}{pairs}"
        return "\n  | ".join([line, *trace_of(record)])


def _quote(value: str) -> str:
    if value and not set(value) & set(' ="'):
        return value
    return '"' + value.replace('"', '\\"') + '"'


class TritonLines(TextLines):
    """As Triton writes lines with log_format ISO8601: time LETTER process place] message key=value ..."""

    def format(self, record: logging.LogRecord) -> str:
        pairs = "".join(f" {k}={_quote(v)}" for k, v in fields_of(record, self._always).items())
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        place = f"{escape(record.name, 80)}:{record.lineno}"
        line = f"{stamp} {record.levelname[0]} {record.process} {place}] {_message(record)}{pairs}"
        return "\n  | ".join([line, *trace_of(record)])


class JSONLines(logging.Formatter):
    """One JSON object per line: time, level, logger, message, the fields, and "trace" for a traceback."""

    def __init__(self, always: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._always = dict(always or {})

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            **fields_of(record, self._always),
            "time": _stamp(record),
            "level": record.levelname.lower(),
            "logger": escape(record.name, 80),
            "message": _message(record),
        }
        trace = trace_of(record)
        if trace:
            line["trace"] = trace
        return msgspec.json.encode(line).decode()


@dataclass(slots=True)
class _Site:
    """One line of code that logs."""

    began: float
    passed: int = 0
    swallowed: int = 0


if TYPE_CHECKING:
    _StreamHandler = logging.StreamHandler[Any]
else:
    _StreamHandler = logging.StreamHandler  # Python 3.10 cannot subscript it


class RepeatFilter(logging.Filter):
    """Lets a line of code log `burst` times per `window_s`; what it swallowed the next line tells.

    Bounded memory: it remembers lines of code, not texts. Loggers named in `exempt` pass.
    """

    def __init__(
        self, burst: int = 20, window_s: float = 10.0, exempt: tuple[str, ...] = ("fastserve.access",)
    ) -> None:
        super().__init__()
        self._burst = burst
        self._window_s = window_s
        self._exempt = exempt
        self._sites: dict[tuple[str, int], _Site] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name in self._exempt:
            return True
        now = record.created
        site = self._sites.setdefault((record.pathname, record.lineno), _Site(now))
        if not 0 <= now - site.began < self._window_s:  # a clock set back begins a window too
            if site.swallowed:
                record.suppressed = site.swallowed
            site.began, site.passed, site.swallowed = now, 0, 0
        site.passed += 1
        site.swallowed += site.passed > self._burst
        return site.passed <= self._burst


class LogStream(_StreamHandler):
    """Writes to a stream; one that is closed or full costs lines, never a request (hardening R12).

    `levels` are those of Triton's switches that are on, None where nobody has touched one.
    """

    lost = 0
    levels: frozenset[int] | None = None
    fields: Mapping[str, str]
    first_formatter: logging.Formatter

    def filter(self, record: logging.LogRecord) -> Any:
        bucket = min(max(record.levelno // 10 * 10, logging.DEBUG), logging.ERROR)
        return (self.levels is None or bucket in self.levels) and super().filter(record)

    def handleError(self, record: logging.LogRecord) -> None:
        self.lost += 1


def switch_logs(levels: frozenset[int], *, iso8601: bool) -> None:
    """Change what this process logs while it runs: the levels written, each by itself, and how lines look.
    Not `iso8601` is the form the server was started with."""
    logging.getLogger("fastserve").setLevel(min(levels, default=logging.CRITICAL))
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LogStream):
            handler.levels = levels
            handler.setFormatter(TritonLines(handler.fields) if iso8601 else handler.first_formatter)


def setup_logs(
    level: str = "info",
    format: str = "text",
    *,
    access: bool = False,
    stream: IO[str] | None = None,
    fields: Mapping[str, str] | None = None,
) -> LogStream:
    """Sends every logger of this process to `stream` (standard error), replacing what was set up.

    `format` is text or json, `fields` go on every line (say, which process it is). `access` turns
    the logger fastserve.access on. The arguments are the LogOptions of the configuration.
    """
    stream_handler = LogStream(stream or sys.stderr)
    stream_handler.fields = dict(fields or {})
    stream_handler.first_formatter = JSONLines(fields) if format == "json" else TextLines(fields)
    stream_handler.setFormatter(stream_handler.first_formatter)
    stream_handler.addFilter(RepeatFilter())
    root = logging.getLogger()
    root.handlers[:] = [stream_handler]
    root.setLevel(level.upper())
    logging.getLogger("fastserve.access").setLevel("INFO" if access else "CRITICAL")
    return stream_handler
