"""Trace and logging settings as clients read and change them (spec 9). No HTTP, no JSON text here.

Settings are kept and shown per front process; what they switch lies elsewhere: `log_*` in the server's own
log (tracing.py), `trace_*` in `traces`. Files are named by who starts the server, never by a client.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from fastserve.config.triton import TRACE_LEVELS
from fastserve.dialects.kserve_v2.document import as_array, as_bool, as_string, as_uint
from fastserve.dialects.kserve_v2.errors import invalid, unsupported
from fastserve.dialects.kserve_v2.traces import OFF, Traces
from fastserve.errors import Kind, ServeError
from fastserve.tracing import switch_logs

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
_NUMBERS = {"trace_rate": 0, "trace_count": -1, "log_frequency": 0}  # and their least value
_FIXED = {"trace_file": "trace file location", "trace_mode": "trace mode"}


class TraceSettings:
    """The global settings, and those of single models on top of them. `start` is what the server began with,
    the file among it; `traces` are told of every change."""

    def __init__(self, start: Mapping[str, str | list[str]], traces: Traces) -> None:
        self._start: dict[str, str | list[str]] = {**TRACE_DEFAULTS, **start}
        self._global: dict[str, str | list[str]] = {}
        self._models: dict[str, dict[str, str | list[str]]] = {}
        self._traces = traces
        self._apply()

    def show(self, model: str = "") -> dict[str, str | list[str]]:
        """What holds for a model, "" for all."""
        return {**self._start, **self._global, **self._models.get(model, {})}

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
        _check({**self._start, **(self._global if model else {}), **own})
        if model and own:
            self._models[model] = own
        elif model:
            self._models.pop(model, None)
        else:
            self._global = own
        self._apply(model)

    def _apply(self, changed: str = "") -> None:
        """A change for all is one for each model that is under part of it."""
        models = ["", *self._models]
        self._traces.take_over(
            {model: self.show(model) for model in models}, [changed] if changed else models
        )


def check_levels(levels: list[str]) -> list[str]:
    """Trace levels that there are. Raises ServeError."""
    for level in levels:
        if level not in TRACE_LEVELS:
            raise invalid(f"Unable to parse 'trace_level', got: {level}")
    if "OFF" in levels and len(levels) > 1:
        raise invalid("Expect only one trace level 'OFF' is specified")
    return levels or OFF


def _check(settings: Mapping[str, str | list[str]]) -> None:
    """Raises ServeError for tracing that cannot be done."""
    if settings["trace_level"] == OFF:
        return
    failed = "Attempting to set invalid trace setting :"
    if settings["trace_rate"] == "0":
        raise invalid(f"{failed}sample rate must be non-zero")
    if not settings["trace_file"]:
        raise invalid(f"{failed}trace file name is not given")


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
_LEVELS = {
    "log_verbose_level": logging.DEBUG,
    "log_info": logging.INFO,
    "log_warning": logging.WARNING,
    "log_error": logging.ERROR,
}
_READ: dict[str, Callable[..., bool | int | str]] = {
    "log_info": as_bool,
    "log_warning": as_bool,
    "log_error": as_bool,
    "log_verbose_level": as_uint,
    "log_format": as_string,
}


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
            levels = frozenset(level for name, level in _LEVELS.items() if self._values[name])
            switch_logs(levels, iso8601=self._values["log_format"] == "ISO8601")
