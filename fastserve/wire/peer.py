"""Who is at the other end of a connection, as far as TLS has shown."""

from __future__ import annotations

import asyncio

SUBJECT = "client_subject"  # what transports that encrypt are asked for by get_extra_info


class Peered:
    """A protocol that knows its transport."""

    __slots__ = ()

    _transport: asyncio.Transport

    @property
    def client(self) -> str:
        """Who the client's certificate says it is, "" without one."""
        return str(self._transport.get_extra_info(SUBJECT, ""))
