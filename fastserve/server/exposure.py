"""What is said loudly at the start: an address anybody can reach, and something there only few should use."""

from __future__ import annotations

import ipaddress
import logging

from fastserve.config import Listener, Settings
from fastserve.server.speaking import find_specs
from fastserve.wire.scope import Scope

log = logging.getLogger(__name__)


def is_public(listener: Listener) -> bool:
    """Whether other machines may reach the address. A name may stand for any."""
    if listener.host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(listener.host).is_loopback
    except ValueError:
        return True


def exposures(settings: Settings) -> list[str]:
    """A sentence for each thing that whoever reaches a public address may do."""
    administered = {spec.name for spec in find_specs(settings) if Scope.ADMIN in spec.scopes}
    open_to_all = [
        listener.address
        for listener in (*settings.listen, *settings.http, *settings.grpc)
        if is_public(listener) and (not listener.dialects or administered.intersection(listener.dialects))
    ]
    allowed = {
        "load and unload models": settings.model_control == "explicit",
        "run code of its own, as files of a load": settings.model_control == "explicit"
        and settings.admin.file_overrides,
        "read and write this machine's shared memory": settings.allow_client_shm,
        "change what is logged": settings.admin.log_settings,
    }
    places = ", ".join(open_to_all)
    return [
        f"whoever reaches {places} may {what}: there are no keys; see docs/security.md"
        for what, is_so in allowed.items()
        if is_so and places
    ]


def warn_of_exposures(settings: Settings) -> None:
    """A line of the log for each."""
    for sentence in exposures(settings):
        log.warning("%s", sentence)
