"""Trace and logging settings as clients read and change them (spec 9). No HTTP, no JSON text here.

Settings are kept and shown per front process; what they switch lies elsewhere: `log_*` moves the level
of the server's own log, traces are written by the file the settings name, which no client may name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from fastserve.dialects.kserve_v2.document import as_array, as_bool, as_string, as_uint
from fastserve.dialects.kserve_v2.errors import invalid, unsupported
from fastserve.errors import Kind, ServeError

if TYPE_CHECKING:
    from fastserve._ext.json_value import Members

TRACE_DEFAULTS: dict[str, str | list[str]] = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "",
    "trace_mode": "triton",
}
LEVELS = ("OFF", "TIMESTAMPS", "TENSORS")
_NUMBERS = {"trace_rate": 0, "trace_count": -1, "log_frequency": 0}  # and their least value
_FIXED = {"trace_file": "trace file location", "trace_mode": "trace mode"}


class TraceSettings:
    """The global settings, and those of single models on top of them."""

    def __init__(self) -> None:
        self._global: dict[str, str | list[str]] = {}
        self._models: dict[str, dict[str, str | list[str]]] = {}

    def show(self, model: str = "") -> dict[str, str | list[str]]:
        """What holds for a model, "" for all."""
        return {**TRACE_DEFAULTS, **self._global, **self._models.get(model, {})}

    def change(self, members: Members, model: str = "") -> None:
        """Take over a JSON object's settings; null goes back to what holds for all. Raises ServeError, and
        then nothing changes."""
        own = dict(self._models.get(model, {}) if model else self._global)
        for key, value in members:
            name = key.decode("utf-8", "replace")
            if name in _FIXED and value is not None:
                raise unsupported(f"{_FIXED[name]} can not be updated through network protocol")
            if name not in TRACE_DEFAULTS:
                continue
            if value is None:
                own.pop(name, None)
            elif name == "trace_level":
                own[name] = check_levels([as_string(item) for item in as_array(value)])
            else:
                own[name] = check_number(name, as_string(value))
        self.put(own, model)

    def put(self, own: dict[str, str | list[str]], model: str = "") -> None:
        """Keep settings that have been checked."""
        if model:
            self._models[model] = own
        else:
            self._global = own


def check_levels(levels: list[str]) -> list[str]:
    """Trace levels a client may set. Raises ServeError."""
    for level in levels:
        if level not in LEVELS:
            raise invalid(f"Unable to parse 'trace_level', got: {level}")
    if "OFF" in levels:
        if len(levels) > 1:
            raise invalid("Expect only one trace level 'OFF' is specified")
        return levels
    raise invalid("Attempting to set invalid trace setting :trace file name is not given")


def check_number(name: str, text: str) -> str:
    """A setting that is a number in a string. Raises ServeError."""
    try:
        number = int(text)
    except ValueError:
        number = _NUMBERS[name] - 1
    if not _NUMBERS[name] <= number < 1 << 32:
        raise invalid(f"Unable to parse '{name}', got: {text}")
    return str(number)


FORMATS = ("default", "ISO8601")
_READ: dict[str, Callable[..., bool | int | str]] = {
    "log_info": as_bool,
    "log_warning": as_bool,
    "log_error": as_bool,
    "log_verbose_level": as_uint,
    "log_format": as_string,
}


class LogSettings:
    """What the server writes to its log, as switches; they set the level of the logger `fastserve`."""

    def __init__(self) -> None:
        self._values: dict[str, bool | int | str] = {
            "log_file": "",
            "log_info": True,
            "log_warning": True,
            "log_error": True,
            "log_verbose_level": 0,
            "log_format": "default",
        }

    def show(self) -> dict[str, bool | int | str]:
        return dict(self._values)

    def change(self, members: Members) -> None:
        """Take over a JSON object's settings; null and unknown ones are passed over. Raises ServeError."""
        changes: dict[str, bool | int | str] = {}
        for key, value in members:
            name = key.decode("utf-8", "replace")
            if value is None:
                continue
            if name == "log_file":
                raise unsupported("log file location can not be updated through network protocol")
            if name in _READ:
                changes[name] = _READ[name](value)
        self.put(changes, "--log_format")

    def put(self, changes: dict[str, bool | int | str], format_name: str = "log_format") -> None:
        """Take over settings whose types have been checked. Raises ServeError."""
        chosen = changes.get("log_format", "default")
        if chosen not in FORMATS:
            raise ServeError(Kind.UNAVAILABLE, f"invalid argument for {format_name}, got: {chosen}")
        if changes:
            self._values.update(changes)
            logging.getLogger("fastserve").setLevel(self._level())

    def _level(self) -> int:
        values = self._values
        if values["log_verbose_level"]:
            return logging.DEBUG
        if values["log_info"]:
            return logging.INFO
        if values["log_warning"]:
            return logging.WARNING
        return logging.ERROR if values["log_error"] else logging.CRITICAL
