"""The dialect `console`: the operator's page, on every HTTP listener.

    GET /console                        the page
    GET /console/console.css, .js       its style and scripts
    GET /console/numbers[?after=N]      all its numbers as JSON (numbers.py), with the points from N on
    GET /console/rows[?after=N]         the server, and a row for each model: what an open page asks for
    GET /console/model?name=M[&after=N] one model whole

    &history=H                          of both: N is a number of this history

The page is shown where metrics are (`allow_metrics`). The owner of the models samples the counters and makes
all replies, also for the clients of other front processes. Those about all models are made in slices of the
event loop's time; those of rows once between two samples, for all pages that are open.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import unquote_plus

import msgspec

from fastserve.dialects.admin.history import INTERVAL_S, History, work_on
from fastserve.dialects.admin.key_page import ask_for_key
from fastserve.dialects.admin.numbers import NumbersReader
from fastserve.dialects.admin.openapi import PAGE_METHODS, Examples, PageFiles, page_headers
from fastserve.dialects.admin.probes import refuse_probe_method
from fastserve.errors import ServeError
from fastserve.net.access_control import Scope
from fastserve.net.router import Route, refuse_plainly
from fastserve.serving.dialect import (
    Dialect,
    DialectSpec,
    HttpRoute,
    ListenerPolicy,
    NoOptions,
    ServingContext,
)
from fastserve.serving.replication import Content, ReplicatedPart

if TYPE_CHECKING:
    from typing import Any

    from fastserve.net import Call
    from fastserve.net.request import Endpoint


SCOPES = dict.fromkeys(PAGE_METHODS, Scope.METRICS)
PAGE = HttpRoute("page", "/console", SCOPES)
STYLE = HttpRoute("style", "/console/console.css", SCOPES)
SCRIPT = HttpRoute("script", "/console/console.js", SCOPES)
PLOTS = HttpRoute("plots", "/console/plots.js", SCOPES)
NUMBERS = HttpRoute("numbers", "/console/numbers", SCOPES)
ROWS = HttpRoute("rows", "/console/rows", SCOPES)
MODEL = HttpRoute("model", "/console/model", SCOPES)
ROUTES = (PAGE, STYLE, SCRIPT, PLOTS, NUMBERS, ROWS, MODEL)

NEAR = 8
"""Points that a page may be behind; one that is further behind, or new, gets all."""

_FILES = {
    PAGE.path: "console.html",
    STYLE.path: "console.css",
    SCRIPT.path: "console.js",
    PLOTS.path: "plots.js",
}

HEADERS = page_headers("frame-ancestors 'self'")  # the grps API's own page shows it


class SharedReplies:
    """Replies of rows by the first point in them, each made once between two samples of the history."""

    def __init__(self, reader: NumbersReader, history: History) -> None:
        self._reader, self._history = reader, history
        self._samples = -1
        self._made: dict[int, asyncio.Task[bytes]] = {}  # at most NEAR + 2
        self._making: set[asyncio.Task[bytes]] = set()

    async def ask(self, after: int) -> bytes:
        """Return the reply with the points from `after` on, or with all of them."""
        history = self._history
        if history.samples != self._samples:
            self._made, self._samples = {}, history.samples
        first = find_first(after, history.seen)
        task = self._made.get(first)
        if task is None:
            task = self._made[first] = asyncio.ensure_future(last_of(self._reader.rows(first)))
            self._making.add(task)
            task.add_done_callback(self._making.discard)
        return await asyncio.shield(task)  # others wait for it when this client leaves

    def close(self) -> None:
        for task in self._making:
            task.cancel()


async def last_of(steps: Iterator[bytes]) -> bytes:
    """Take all steps, in slices of the loop's time, and return the result of the last one."""
    done: list[bytes] = []
    while work_on(steps, done):
        del done[:-1]
        await asyncio.sleep(0)
    return done[-1]


class ConsoleNumbers(ReplicatedPart):
    """The numbers as the owner shows them, and the timer that samples the counters for their history."""

    PART = "console"

    def __init__(self, context: ServingContext) -> None:
        self._history = History(context.registry)
        self._reader = NumbersReader(context, self._history)
        self._rows = SharedReplies(self._reader, self._history)
        self._settings = context.settings
        self._examples: dict[tuple[str, ...], Examples] = {}  # by the dialects of a listener
        self._handles: dict[str, asyncio.Handle] = {}
        self._steps: Iterator[None] | None = None  # of the sample that is being taken

    async def answer(self, question: Content) -> str:
        """Return the reply as JSON, "" for a model that is none."""
        if question["of"] == NUMBERS.name:
            return (await last_of(self._reader.numbers(question["after"]))).decode()
        after = self._translate(question["after"], question["history"])
        if question["of"] == ROWS.name:
            return (await self._rows.ask(after)).decode()
        first = find_first(after, self._history.seen)
        spoken = tuple(question["spoken"])
        examples = self._examples.get(spoken) or Examples(self._settings, ())
        found = self._reader.details(question["name"], first, examples)
        return "" if found is None else msgspec.json.encode(found).decode()

    def speak(self, spoken: Sequence[tuple[DialectSpec[Any], Dialect]]) -> None:
        """Learn the dialects of a listener, for the example requests there."""
        self._examples[_names_of(spoken)] = Examples(self._settings, spoken)

    def open(self) -> None:
        self._look()

    def close(self) -> None:
        for handle in self._handles.values():
            handle.cancel()
        self._rows.close()

    def _translate(self, after: int, history: str) -> int:
        """Return the number of the first point for a page that has one of its own, or of another server's
        history, and then wants the last points."""
        return max(self._history.seen - NEAR, 0) if history not in ("", self._reader.name) else after

    def _look(self) -> None:
        self._handles["look"] = asyncio.get_running_loop().call_later(INTERVAL_S, self._look)
        if self._steps is None:  # else the loop has been busy for as long
            self._steps = self._history.steps(time.monotonic_ns())
            self._step()

    def _step(self) -> None:
        steps = self._steps
        if steps is not None and work_on(steps):
            self._handles["step"] = asyncio.get_running_loop().call_soon(self._step)
        else:
            self._steps = None


class Console(Dialect):
    """Routes of the page."""

    def __init__(self, context: ServingContext, options: NoOptions) -> None:
        self._state = context.state
        self._shown = context.settings.allow_metrics
        self._numbers = ConsoleNumbers(context) if self._state.owned else None
        if self._numbers is not None:
            self._state.add(ConsoleNumbers.PART, self._numbers)
        self._endpoints: dict[str, Endpoint] = {
            NUMBERS.path: self.show_numbers,
            ROWS.path: self.show_rows,
            MODEL.path: partial(self.show_model, spoken=()),
            **PageFiles(_FILES, HEADERS).endpoints,
        }

    def open(self) -> None:
        if self._shown and self._numbers is not None:
            self._numbers.open()

    def close(self) -> None:
        if self._numbers is not None:
            self._numbers.close()

    def route(self, method: str, target: str) -> Route | None:
        endpoint = self._endpoints.get(target.partition("?")[0])
        if not self._shown or endpoint is None:
            return None
        return Route(endpoint if method in SCOPES else refuse_probe_method, Scope.METRICS)

    def refuse(self, call: Call, fault: ServeError) -> None:
        if call.target.partition("?")[0] != PAGE.path or not ask_for_key(call, fault):
            refuse_plainly(call, fault)

    async def show_numbers(self, call: Call) -> None:
        await self._show(call, NUMBERS)

    async def show_rows(self, call: Call) -> None:
        await self._show(call, ROWS)

    async def show_model(self, call: Call, spoken: Sequence[str]) -> None:
        await self._show(call, MODEL, name=unquote_plus(read_field(call, "name")), spoken=spoken)

    def on_listener(self, spoken: Sequence[tuple[DialectSpec[Any], Dialect]]) -> Dialect:
        """Return the dialect of one listener, whose example requests are of what that speaks."""
        if self._numbers is not None:
            self._numbers.speak(spoken)
        return ListenerConsole(self, _names_of(spoken))

    async def _show(self, call: Call, route: HttpRoute, **question: Any) -> None:
        """Reply with what the owner answers."""
        after, history = read_after(call), read_field(call, "history")
        if after is None:
            return
        asked = {"of": route.name, "after": after, "history": history, **question}
        try:
            found = await self._state.show(ConsoleNumbers.PART, asked)
        except ServeError as fault:
            refuse_plainly(call, fault)
            return
        if found:
            call.reply(200, found.encode(), headers=HEADERS)
        else:
            call.reply(404, b'{"error":"name: a model that is known here is wanted"}', headers=HEADERS)


def _names_of(spoken: Sequence[tuple[DialectSpec[Any], Dialect]]) -> tuple[str, ...]:
    return tuple(spec.name for spec, _ in spoken)


class ListenerConsole(Dialect):
    """The console as one listener speaks it."""

    def __init__(self, console: Console, spoken: Sequence[str]) -> None:
        self._console = console
        self._show_model = partial(console.show_model, spoken=spoken)

    def refuse(self, call: Call, fault: ServeError) -> None:
        self._console.refuse(call, fault)

    def route(self, method: str, target: str) -> Route | None:
        route = self._console.route(method, target)
        if route is None or method not in SCOPES or target.partition("?")[0] != MODEL.path:
            return route
        return route._replace(endpoint=self._show_model)


def find_first(after: int, seen: int) -> int:
    """Return the number of the first point that a page gets: all, where it is new or far behind."""
    return after if seen - NEAR <= after <= seen else 0


def read_field(call: Call, name: str) -> str:
    """Return a field of the call's query as it was sent, "" for none."""
    fields = (part.partition("=") for part in call.target.partition("?")[2].split("&"))
    return next((value for field, _, value in fields if field == name), "")


def read_after(call: Call) -> int | None:
    """Return the number of the first point wanted; None after a refusal."""
    after = read_field(call, "after") if "after=" in call.target else "0"
    if after.isascii() and after.isdecimal() and len(after) < 16:
        return int(after)
    call.reply(400, b'{"error":"after: a whole number of at most 15 digits is wanted"}', headers=HEADERS)
    return None


CONSOLE = DialectSpec(
    name="console",
    options=NoOptions,
    build=Console,
    routes=ROUTES,
    listeners=ListenerPolicy.EVERY_HTTP,
)
