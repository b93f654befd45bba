"""Trace and logging settings as clients read and change them (spec 9). No HTTP, no JSON text here.

Settings are kept and shown per front process; what they switch lies elsewhere: `log_*` in the server's own
log (logs.py), `trace_*` in `serving/traces`. Files are named by who starts the server, never by a client.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from fastserve.codec.client_text import leading_int
from fastserve.config.triton import TRACE_LEVELS
from fastserve.dialects.kserve_v2.values import Value, as_array, as_string, find
from fastserve.errors import Kind, ServeError, invalid, unsupported
from fastserve.logs import switch_logs
from fastserve.serving.traces import OFF, Setting

# Of the settings that are numbers, what is said of their range.
RANGES = {"trace_rate": (0, 2**32 - 1), "trace_count": (-1, 2**31 - 1), "log_frequency": (0, 2**32 - 1)}


def read_trace(given: Value, gap: str) -> dict[str, Setting | None]:
    """The changes that a JSON object asks for, None for null; what is not known is passed over. Raises
    ServeError. `gap`: one text has a space over gRPC."""
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
    """The levels there are, in their order; [] for none of them. Raises ServeError."""
    given = [as_string(item) for item in as_array(value)]
    if "OFF" in given and len(given) > 1:
        raise invalid("Expect only one trace level 'OFF' is specified")
    return [level for level in TRACE_LEVELS if level in given]


def _read_number(name: str, value: Value, gap: str) -> Setting:
    """A number in a string; whatever follows the digits does not count, as for stoi. Raises ServeError."""
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
    """Raises ServeError for tracing that cannot be done."""
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
"""Those that can be changed."""
_LEVELS = {
    "log_verbose_level": logging.DEBUG,
    "log_info": logging.INFO,
    "log_warning": logging.WARNING,
    "log_error": logging.ERROR,
}


def _as_level(given: int) -> int:
    """24.10 keeps the low 32 bits, and takes those below zero for none."""
    low = given & 0xFFFFFFFF
    return low if low < 1 << 31 else 0


class LogSettings:
    """What this process writes to its log, as switches; `level` is what it was started with."""

    def __init__(self, level: str = "info") -> None:
        self._values: dict[str, bool | int | str] = {
            "log_file": "",
            "log_info": level in ("debug", "info"),
            "log_warning": level != "error",
            "log_error": True,
            "log_verbose_level": int(level == "debug"),
            "log_format": "default",
        }

    def show(self) -> Mapping[str, bool | int | str]:
        return self._values

    def change(self, changes: Mapping[str, bool | int | str], over_http: bool) -> None:
        """Take over settings whose types have been checked. Raises ServeError."""
        chosen = changes.get("log_format", "default")
        if chosen not in FORMATS:
            if over_http:
                raise ServeError(Kind.UNAVAILABLE, f"invalid argument for --log_format, got: {chosen}")
            raise invalid(f"invalid argument for log_format, got: {chosen}")
        if changes:
            self._values.update(changes)
            self._values["log_verbose_level"] = _as_level(int(self._values["log_verbose_level"]))
            levels = frozenset(level for name, level in _LEVELS.items() if self._values[name])
            switch_logs(levels, iso8601=self._values["log_format"] == "ISO8601")
