"""What is said loudly at the start: an address anybody can reach, and something there only few should use."""

from __future__ import annotations

import ipaddress
import logging

from fastserve.config import Listener, Settings
from fastserve.server.speaking import choose, find_specs

log = logging.getLogger(__name__)


def is_public(listener: Listener) -> bool:
    """Whether other machines may reach the address. A name may stand for any."""
    if listener.in_file or listener.host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(listener.host).is_loopback
    except ValueError:
        return True


def exposures(settings: Settings) -> list[str]:
    """A sentence for each thing that whoever reaches a public address may do."""
    places: dict[str, list[str]] = {}
    for listener in (*settings.listen, *settings.http, *settings.grpc):
        if is_public(listener):
            spoken = choose(find_specs(settings), listener)
            for what in dict.fromkeys(what for spec in spoken for what in spec.exposes(settings)):
                places.setdefault(what, []).append(listener.address)
    return [
        f"whoever reaches {', '.join(found)} may {what}: there are no keys; see docs/security.md"
        for what, found in places.items()
    ]


def warn_of_exposures(settings: Settings) -> None:
    """A line of the log for each."""
    for sentence in exposures(settings):
        log.warning("%s", sentence)
