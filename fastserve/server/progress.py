"""Progress of a server's start: how many models are loaded, which are not yet, and for how long.

On a terminal it is a bar below the lines of the log, drawn anew as long as models load; elsewhere it is lines
of the log, at the beginning and then more and more seldom.

    loading [############----------] 2 of 4, 1 failed, 12 s: resnet, scribe

A service manager (systemd's Type=notify) is notified that the server is ready, runs, and stops:

    NOTIFY_SOCKET=/run/systemd/notify     where to; without it nothing is sent
    WATCHDOG_USEC=20000000                the event loop has to say so often that it turns

sd_notify(3) has the words.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import IO

log = logging.getLogger(__name__)

BAR = 24
NAMES = 8  # of a line; the number of the others follows
FIRST_LINE_S, LONGEST_PAUSE_S = 10.0, 60.0
CLEAR = "\r\x1b[2K"


def find_terminal() -> IO[str] | None:
    """Return standard error where it is a terminal that can draw a line anew, else None."""
    return sys.stderr if os.isatty(2) and os.environ.get("TERM", "dumb") != "dumb" else None


class StartProgress:
    """Tells of the models of one start: `begin`, `settle` each, `look` now and then, `end`."""

    def __init__(
        self,
        terminal: IO[str] | None = None,
        width: Callable[[], int] = lambda: shutil.get_terminal_size().columns,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._terminal, self._width, self._clock = terminal, width, clock
        self._left: dict[str, None] = {}
        self._total = self._failed = 0
        self._began = clock()
        self._next_line_s = FIRST_LINE_S
        self._drawn = False
        self._handlers: list[logging.Handler] = []

    @property
    def seconds(self) -> float:
        """Return for how long models have been loading."""
        return self._clock() - self._began

    def begin(self, names: Iterable[str]) -> None:
        """Tell which models will be loaded."""
        self._left = dict.fromkeys(sorted(names))
        self._total, self._began = len(self._left), self._clock()
        if self._terminal is not None:
            self._handlers = list(logging.getLogger().handlers)
            for handler in self._handlers:
                handler.addFilter(self._make_room)
            self.look()
        elif self._total:
            log.info("loading %s: %s", _count(self._total), _names_text(list(self._left)))

    def settle(self, name: str, *, failed: bool) -> None:
        """Tell that a model is loaded, or has failed."""
        self._left.pop(name, None)
        self._failed += failed
        if self._terminal is not None:
            self.look()

    def look(self) -> None:
        """Draw the bar anew, or log a line if it is time for one. Called twice a second."""
        if not self._left:
            return
        if self._terminal is not None:
            self._draw(CLEAR + self.bar()[: max(0, self._width() - 1)] + "\r")
            self._drawn = True
        elif self.seconds >= self._next_line_s:
            self._next_line_s += min(self._next_line_s, LONGEST_PAUSE_S)
            done = self._total - len(self._left)
            log.info(
                "%d of %s are loaded after %.0f s; not yet: %s",
                *(done - self._failed, _count(self._total), self.seconds, _names_text(list(self._left))),
            )

    def bar(self) -> str:
        """Return the bar and the words behind it."""
        done = self._total - len(self._left)
        full = BAR * done // self._total
        failed = f", {self._failed} failed" if self._failed else ""
        return (
            f"loading [{'#' * full}{'-' * (BAR - full)}] {done - self._failed} of {self._total}{failed}, "
            f"{self.seconds:.0f} s: {_names_text(list(self._left))}"
        )

    def end(self) -> None:
        """Remove the bar. Idempotent."""
        self._make_room()
        for handler in self._handlers:
            handler.removeFilter(self._make_room)
        self._handlers, self._left = [], {}

    def _make_room(self, record: logging.LogRecord | None = None) -> bool:
        """Remove the bar before a line of the log is written; a filter of the log's handlers."""
        if self._drawn:
            self._drawn = False
            self._draw(CLEAR)
        return True

    def _draw(self, text: str) -> None:
        if self._terminal is None:
            return
        try:
            self._terminal.write(text)
            self._terminal.flush()
        except (OSError, ValueError):  # the terminal is gone, and the server is not
            self._terminal = None


def _count(total: int) -> str:
    return "1 model" if total == 1 else f"{total} models"


def _names_text(names: Sequence[str]) -> str:
    shown = ", ".join(names[:NAMES])
    return shown if len(names) <= NAMES else f"{shown} and {len(names) - NAMES} more"


VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class ServiceManager:
    """The manager that the environment names, or none. Its variables are removed: no child is meant."""

    def __init__(
        self, environment: MutableMapping[str, str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        place, usec, pid = (environment.pop(name, "") for name in VARIABLES)
        self._place = f"\0{place[1:]}" if place.startswith("@") else place
        watched = usec.isdecimal() and pid in ("", str(os.getpid()))
        self._interval_s = int(usec) / 2e6 if watched else 0.0  # half of what it grants
        self._clock, self._due = clock, 0.0
        self._failed = False

    def ready(self, status: str) -> None:
        """Tell that the server serves."""
        self._send(f"READY=1\nSTATUS={status}")

    def stopping(self) -> None:
        """Tell that the server stops."""
        self._send("STOPPING=1\nSTATUS=finishing requests")

    def beat(self) -> None:
        """Tell that the event loop turns, when that is due."""
        now = self._clock()
        if self._interval_s and now >= self._due:
            self._due = now + self._interval_s
            self._send("WATCHDOG=1")

    def _send(self, text: str) -> None:
        if not self._place:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as link:
                link.sendto(text.encode(), self._place)
        except OSError as error:
            if not self._failed:
                log.warning("the service manager cannot be notified: %s", error.strerror or error)
            self._failed = True
