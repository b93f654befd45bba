"""Notifies a service manager (systemd's Type=notify) that the server is ready, runs, and stops.

    NOTIFY_SOCKET=/run/systemd/notify     where to; without it nothing is sent
    WATCHDOG_USEC=20000000                the event loop has to say so often that it turns

sd_notify(3) has the words.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, MutableMapping

log = logging.getLogger(__name__)

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
