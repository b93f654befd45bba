"""The dialect `console`: the operator's page, on every HTTP listener.

    GET /console                        the page
    GET /console/console.css, .js       its style and script
    GET /console/numbers[?after=N]      its numbers as JSON (numbers.py), with the points from N on

The page loads nothing from other servers: its content security policy forbids it. It is shown where metrics
are (`allow_metrics`).
"""

from __future__ import annotations

import asyncio
import time
from importlib.resources import files
from typing import TYPE_CHECKING

import msgspec

from fastserve.dialects.admin.history import INTERVAL_S, History
from fastserve.dialects.admin.numbers import NumbersReader
from fastserve.dialects.admin.probes import refuse_probe_method
from fastserve.net.access_control import Scope
from fastserve.net.router import Route
from fastserve.serving.dialect import (
    Dialect,
    DialectSpec,
    HttpRoute,
    ListenerPolicy,
    NoOptions,
    ServingContext,
)

if TYPE_CHECKING:
    from fastserve.net import Call
    from fastserve.net.request import Endpoint


SCOPES = dict.fromkeys(("GET", "HEAD"), Scope.METRICS)
PAGE = HttpRoute("page", "/console", SCOPES)
STYLE = HttpRoute("style", "/console/console.css", SCOPES)
SCRIPT = HttpRoute("script", "/console/console.js", SCOPES)
NUMBERS = HttpRoute("numbers", "/console/numbers", SCOPES)
ROUTES = (PAGE, STYLE, SCRIPT, NUMBERS)

_FILES = {
    PAGE.path: ("console.html", b"text/html; charset=utf-8"),
    STYLE.path: ("console.css", b"text/css; charset=utf-8"),
    SCRIPT.path: ("console.js", b"text/javascript; charset=utf-8"),
}

POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'self'"  # the grps API's own page shows it
)

HEADERS = (
    (b"Content-Security-Policy", POLICY),
    (b"X-Content-Type-Options", b"nosniff"),
    (b"Referrer-Policy", b"no-referrer"),
    (b"Cache-Control", b"no-store"),
)


class Console(Dialect):
    """Routes of the page, and the timer that samples the counters for its history."""

    def __init__(self, context: ServingContext, options: NoOptions) -> None:
        self._history = History(context.registry)
        self._reader = NumbersReader(
            context.registry, context.engine.catalog, context.readiness, self._history
        )
        self._shown = context.settings.allow_metrics
        self._files: dict[str, bytes] = {}
        self._next: asyncio.TimerHandle | None = None

    def open(self) -> None:
        if self._shown:
            self._look()

    def close(self) -> None:
        if self._next is not None:
            self._next.cancel()

    def route(self, method: str, target: str) -> Route | None:
        path = target.partition("?")[0]
        if not self._shown or not path.startswith(PAGE.path):
            return None
        if path == NUMBERS.path:
            return Route(self.show_numbers if method in SCOPES else refuse_probe_method, Scope.METRICS)
        if path not in _FILES:
            return None
        return Route(self._shower(path) if method in SCOPES else refuse_probe_method, Scope.METRICS)

    def show_numbers(self, call: Call) -> None:
        query = call.target.partition("?")[2]
        after = next((part[6:] for part in query.split("&") if part.startswith("after=")), "0")
        if not (after.isascii() and after.isdecimal() and len(after) < 16):
            body = b'{"error":"after: a whole number of at most 15 digits is wanted"}'
            call.reply(400, body, headers=HEADERS)
            return
        call.reply(200, msgspec.json.encode(self._reader.read(int(after))), headers=HEADERS)

    def _shower(self, path: str) -> Endpoint:
        return lambda call: call.reply(200, self._read(path), _FILES[path][1], HEADERS)

    def _read(self, path: str) -> bytes:
        """Return a file of the page, cached from the first time on."""
        found = self._files.get(path)
        if found is None:
            found = self._files[path] = (files(__package__) / "page" / _FILES[path][0]).read_bytes()
        return found

    def _look(self) -> None:
        self._next = asyncio.get_running_loop().call_later(INTERVAL_S, self._look)
        self._history.look(time.monotonic_ns())


CONSOLE = DialectSpec(
    name="console",
    options=NoOptions,
    build=Console,
    routes=ROUTES,
    listeners=ListenerPolicy.EVERY_HTTP,
)
