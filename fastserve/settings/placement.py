"""Where a model's workers run, if not on the server's machine: the `placement` of model.yaml.

    placement: {remote: {listen: "0.0.0.0:7300-7301", key: /etc/fastserve/server.key}}

`fastserve worker --connect HOST:7300-7301 --key worker.key` on any machine joins in.
"""

from __future__ import annotations

import ipaddress
from typing import Annotated

import msgspec
from msgspec import Meta

from fastserve.errors import ConfigError


class WorkerRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many remote workers a version has."""

    min: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Workers that a version waits for before it is available."""
    max: Annotated[int, Meta(ge=1, le=1024)] = 1024
    """Workers that are started at most, where they are started for it."""

    def __post_init__(self) -> None:
        if self.max < self.min:
            raise ValueError(f"max: given {self.max}, allowed: a whole number from min {self.min}")


class RemotePlacement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Workers that connect to the server, from any machine."""

    listen: Annotated[str, Meta(min_length=3, max_length=300)] = "127.0.0.1:0"
    """HOST:PORT or HOST:PORT-PORT that workers connect to; a version takes the first free port."""
    key: str = ""
    """server.key of `fastserve worker --make-keys`; empty: none, on loopback addresses only."""
    path: str = ""
    """Folder of the model's versions where workers see it too; empty: files are sent to them."""
    in_flight: Annotated[int, Meta(ge=0, le=16)] = 0
    """Batches a worker has at a time; 0: four of less than 0.5 ms, two of less than 2 ms, else one."""
    heartbeat_s: Annotated[float, Meta(ge=0.1, le=60)] = 1.0
    """Seconds between heartbeats; three that are missed are a worker's death."""
    max_answer_mb: Annotated[int, Meta(ge=1, le=4096)] = 256
    """Megabytes that the outputs of a batch may have."""
    workers: WorkerRange = WorkerRange()
    """Filled from `instances`: N, or {min: N, max: M}."""


class PlacementOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the workers of a model run."""

    remote: RemotePlacement | None = None
    """On machines from which they connect."""

    def __post_init__(self) -> None:
        if self.remote is None:
            raise ValueError("remote: given nothing, allowed: settings of workers that connect")


def is_loopback(host: str) -> bool:
    """Return whether nobody outside this machine reaches an address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def read_address(text: str) -> tuple[str, range]:
    """Read "HOST:PORT" or "HOST:PORT-PORT". Raises ConfigError."""
    host, _, ports = text.rpartition(":")
    first, _, last = ports.partition("-")
    if not host or not first.isdigit() or ("-" in ports and not last.isdigit()):
        raise ConfigError(f"{text!r}: given no address, allowed: HOST:PORT, or HOST:PORT-PORT")
    found = range(int(first), int(last or first) + 1)
    if not found or found[-1] > 65535 or len(found) > 64:
        raise ConfigError(f"{text!r}: given ports {ports}, allowed: up to 64 ports below 65536")
    return host, found


def check_listen(text: str, key: str) -> tuple[str, range]:
    """Read the address that workers connect to. Raises ConfigError for one in the open without a key."""
    host, ports = read_address(text)
    if not key and not is_loopback(host):
        raise ConfigError(f"placement.remote.listen {text}: without a key only a loopback address is allowed")
    return host, ports
