"""Log lines that nobody can forge, flood or break, in every process of a server.

Lines are written by the standard logging module; this module gives it formatters under which a line is
always one line, of bounded length, whatever a client put into it (hardening C7), a filter that keeps a
repeated warning from filling the disk, and ways to turn other output on standard error into lines: uncaught
exceptions, Python's warnings, the prints of a model.

    setup_logs("info", "json", fields={"worker": "digits/1#0"})     # once in each process
    log.warning("refused %s", target, extra={"request_id": call.request_id, "model": name})
    2026-01-01T00:00:00.000Z WARNING fastserve.net: refused /v1/x\\n model=digits request_id=4f2a-1
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import msgspec

from fastserve.errors import RemoteTrace

MESSAGE_BYTES = 560  # of one message, after escaping; with its fields a line stays under 1 KiB

FIELD_BYTES = 128  # a request id fits

FIELDS_BYTES = 300  # of all fields together

TRACE_LINES = 60

TRACE_LINE_BYTES = 400

TRACE_CHARACTERS = 8100  # of one that is sent: a control message holds it, however it is escaped there

log = logging.getLogger(__name__)

MODEL = "model"  # the logger of what a model says; its children are stdout and stderr

_UP = b"\x1b[A"  # the cursor, a line up: progress bars below each other

MODEL_BYTES = 4096  # of one line of a model: its words are the operator's own, not a client's


def escape(text: str, limit: int) -> str:
    """Return `text` on one line, without control or invisible characters, at most `limit` bytes of UTF-8."""
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


class _OfThread(threading.local):
    """Fields on the lines of one thread, in place of those on all lines of its process."""

    fields: Mapping[str, str] = {}


_of_thread = _OfThread()


@contextlib.contextmanager
def log_fields(**fields: str) -> Iterator[None]:
    """Add these fields to the lines that this thread logs inside the `with` block."""
    before, _of_thread.fields = _of_thread.fields, fields
    try:
        yield
    finally:
        _of_thread.fields = before


def fields_of(record: logging.LogRecord, always: Mapping[str, str]) -> dict[str, str | int | float]:
    """Return the fields of a record beyond its message: numbers as they are, the rest escaped, at most
    FIELDS_BYTES together."""
    found = {**always, **_of_thread.fields, **{k: v for k, v in vars(record).items() if k not in _STANDARD}}
    suppressed = getattr(record, "suppressed", 0)
    if suppressed:
        found["suppressed"] = suppressed
    kept: dict[str, str | int | float] = {}
    room = FIELDS_BYTES
    for key, value in found.items():
        number = type(value) in (int, float)
        text = escape(str(value), FIELD_BYTES)
        room -= len(key) + len(text.encode()) + text.count('"') + 4
        if room < 0:
            break
        kept[escape(key, 40)] = value if number else text
    return kept


def trace_of(record: logging.LogRecord) -> list[str]:
    """Return the lines of a record's traceback."""
    error = record.exc_info[1] if record.exc_info else None
    return [] if error is None else trace_lines(error)


def trace_lines(error: BaseException) -> list[str]:
    """Return the lines of a traceback, each escaped; the middle of a long one is left out."""
    return [escape(line, TRACE_LINE_BYTES) for line in _trace(error)]


def raw_trace(error: BaseException) -> str:
    """Return a traceback to send to another process, not escaped, at most TRACE_CHARACTERS long."""
    text = "\n".join(line[:TRACE_LINE_BYTES] for line in _trace(error))
    third = TRACE_CHARACTERS // 3
    return text if len(text) <= 3 * third else f"{text[:third]}...\n...{text[8 - 2 * third :]}"


def _trace(error: BaseException) -> list[str]:
    told = [str(error).strip()] if isinstance(error, RemoteTrace) else traceback.format_exception(error)
    lines = "".join(told).splitlines()
    if len(lines) > TRACE_LINES:
        half = TRACE_LINES // 2
        lines = [*lines[:half], f"... ({len(lines) - 2 * half} lines)", *lines[-half:]]
    return lines


def _message(record: logging.LogRecord) -> str:
    limit = MODEL_BYTES if _is_of_model(record) else MESSAGE_BYTES
    try:
        return escape(record.getMessage(), limit)
    except Exception:  # arguments that do not fit the message: the line must still be written
        return escape(str(record.msg), limit)


def _is_of_model(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] == MODEL


def _stamp(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


class TextLines(logging.Formatter):
    """Writes `time LEVEL logger: message key=value ...`; a traceback follows, each line behind a bar."""

    def __init__(self, always: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._always = dict(always or {})

    def format(self, record: logging.LogRecord) -> str:
        pairs = "".join(f" {k}={_quote(v)}" for k, v in fields_of(record, self._always).items())
        line = f"{_stamp(record)} {record.levelname} {escape(record.name, 80)}: {_message(record)}{pairs}"
        return "\n  | ".join([line, *trace_of(record)])


def _quote(field: str | int | float) -> str:
    value = str(field)
    if value and not set(value) & set(' ="'):
        return value
    return '"' + value.replace('"', '\\"') + '"'


class TritonLines(TextLines):
    """Writes lines in Triton's log_format ISO8601: `time LETTER process place] message key=value ...`"""

    def format(self, record: logging.LogRecord) -> str:
        pairs = "".join(f" {k}={_quote(v)}" for k, v in fields_of(record, self._always).items())
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        place = f"{escape(record.name, 80)}:{record.lineno}"
        line = f"{stamp} {record.levelname[0]} {record.process} {place}] {_message(record)}{pairs}"
        return "\n  | ".join([line, *trace_of(record)])


class JSONLines(logging.Formatter):
    """Writes one JSON object per line: time, level, logger, message, fields, and "trace" for a traceback."""

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
    """Counts of one line of code that logs."""

    began: float
    passed: int = 0
    swallowed: int = 0


if TYPE_CHECKING:
    _StreamHandler = logging.StreamHandler[Any]
else:
    _StreamHandler = logging.StreamHandler  # Python 3.10 cannot subscript it


class RepeatFilter(logging.Filter):
    """Lets a line of code log `burst` times per `window_s`; its next line says how many were suppressed.

    Bounded memory: it remembers lines of code, not texts. Loggers named in `exempt` pass, and so do the lines
    of models, all of which come from one line of code.
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
        if record.name in self._exempt or _is_of_model(record):
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
    """Writes to a stream. When it is closed or full, lines are lost, but no request fails (hardening R12).

    `levels` are the levels that `switch_logs` left on; None until it is called.
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


class Printed(io.RawIOBase):
    """Turns every printed line into a log line; `as_text` returns the stream that replaces sys.stdout.

    An unfinished line waits, up to MODEL_BYTES, for its end or for `close`. Of a line that is redrawn, such
    as a progress bar, only the last state is logged, as info. `fileno` returns `fd`: callers that write to
    the descriptor bypass the log.
    """

    name = "<printed>"

    def __init__(self, logger: logging.Logger, level: int, fd: int) -> None:
        super().__init__()
        self._logger, self._level, self._fd = logger, level, fd
        self._begun = b""
        self._lock = threading.RLock()  # a handler that prints comes back here

    def as_text(self) -> io.TextIOWrapper:
        return io.TextIOWrapper(self, "utf-8", "backslashreplace", line_buffering=True, write_through=True)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, data: Any) -> int:
        with self._lock:
            *lines, begun = (self._begun + bytes(data)).split(b"\n")
            self._begun = _last_drawn(begun)
            while len(self._begun) > MODEL_BYTES:
                lines.append(self._begun[:MODEL_BYTES])
                self._begun = self._begun[MODEL_BYTES:]
        for line in lines:
            self._say(line)
        return len(data)

    def close(self) -> None:
        rest, self._begun = self._begun, b""
        if rest and not self.closed:
            self._say(rest)
        super().close()

    def _say(self, line: bytes) -> None:
        drawn = _last_drawn(line)
        redrawn = drawn.startswith(b"\r") or _UP in drawn
        text = drawn.replace(_UP, b"").decode("utf-8", "backslashreplace").strip("\r")
        if text:
            self._logger.log(logging.INFO if redrawn else self._level, "%s", text)


def _last_drawn(line: bytes) -> bytes:
    """Return the part of a line from its last carriage return on, which a terminal would show; the carriage
    return stays as the mark of it. Those at the very end belong to the line's end."""
    at = line.rstrip(b"\r").rfind(b"\r")
    return line if at < 0 else line[at:]


def log_prints() -> None:
    """Turn the prints of Python code in this process into log lines of the loggers model.stdout (info) and
    model.stderr (warning), whatever the level. Call it after `setup_logs`, which keeps the real stream."""
    for word in ("stdout", "stderr"):
        logging.getLogger(f"{MODEL}.{word}").setLevel(logging.INFO)
    sys.stdout = Printed(logging.getLogger(f"{MODEL}.stdout"), logging.INFO, 1).as_text()
    sys.stderr = Printed(logging.getLogger(f"{MODEL}.stderr"), logging.WARNING, 2).as_text()


def log_uncaught() -> None:
    """Write uncaught exceptions and Python's warnings as log lines of this process."""
    sys.excepthook = lambda *error: _log_uncaught("an exception ended the process", *error)
    threading.excepthook = lambda told: _log_uncaught(
        f"an exception ended thread {getattr(told.thread, 'name', '?')}",
        *(told.exc_type, told.exc_value, told.exc_traceback),
    )
    sys.unraisablehook = lambda told: _log_uncaught(
        "an exception was ignored", told.exc_type, told.exc_value, told.exc_traceback
    )
    logging.captureWarnings(True)


def _log_uncaught(text: str, kind: Any, error: BaseException | None, trace: Any) -> None:
    if error is not None and not isinstance(error, KeyboardInterrupt | SystemExit):
        log.critical(text, exc_info=(kind, error, trace))


def switch_logs(levels: frozenset[int], *, iso8601: bool) -> None:
    """Change the logs of the running process: only `levels` are written, in Triton's ISO8601 format or,
    without `iso8601`, in the format of `setup_logs`."""
    logging.getLogger("fastserve").setLevel(min(levels, default=logging.CRITICAL))
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LogStream):
            handler.levels = levels
            handler.setFormatter(TritonLines(handler.fields) if iso8601 else handler.first_formatter)


def setup_logs(
    level: str | int = "info",
    format: str = "text",
    *,
    access: bool = False,
    stream: IO[str] | None = None,
    fields: Mapping[str, str] | None = None,
) -> LogStream:
    """Send every logger of this process to `stream` (standard error), replacing what was set up.

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
    root.setLevel(level.upper() if isinstance(level, str) else level)
    logging.getLogger("fastserve.access").setLevel("INFO" if access else "CRITICAL")
    return stream_handler


def current_logs() -> dict[str, Any]:
    """Return level and format of this process's logs, for `setup_logs` in a child process. The format is
    empty where `setup_logs` was not called, as in a program that uses the library."""
    root = logging.getLogger()
    ours = [handler for handler in root.handlers if isinstance(handler, LogStream)]
    kind = "" if not ours else "json" if isinstance(ours[0].first_formatter, JSONLines) else "text"
    return {"level": root.getEffectiveLevel(), "format": kind}
