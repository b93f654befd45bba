"""Certificates that change while the server runs: looked for every `tls.poll_s` seconds, and at SIGHUP."""

from __future__ import annotations

import asyncio
import logging

from fastserve.errors import ConfigError
from fastserve.wire.tls import Credentials

log = logging.getLogger(__name__)


class CertificateWatch:
    """One front's. A pair that cannot be used is said once, and what there was stays."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._told = ""
        self._timer: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """On the running loop."""
        self._timer = asyncio.get_running_loop().call_later(self._credentials.options.poll_s, self._turn)

    def look(self) -> None:
        """Now."""
        try:
            if self._credentials.renew():
                log.info("the certificates were renewed: new connections have them")
            self._told = ""
        except ConfigError as fault:
            if str(fault) != self._told:
                log.error("the certificates stay as they were: %s", fault)
            self._told = str(fault)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _turn(self) -> None:
        self.open()  # first: what nobody foresaw must not end the watch
        self.look()
