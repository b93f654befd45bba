"""Where a model's workers run, if not on the server's machine: the `placement` of model.yaml.

    placement: {remote: {listen: "0.0.0.0:7300-7301", key: /etc/fastserve/server.key}}
    placement: {ray: {num_cpus: 1, num_gpus: 0.5}}

`fastserve worker --connect HOST:7300-7301 --key worker.key` on any machine joins in; workers of `ray` are
started on the nodes of the cluster that the server was given with `--ray`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Annotated, Any, Literal

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


class WorkerLinks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How batches go to remote workers, by whatever these are started."""

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


class RemotePlacement(WorkerLinks, frozen=True, forbid_unknown_fields=True):
    """Workers that connect to the server, from any machine."""

    listen: Annotated[str, Meta(min_length=3, max_length=300)] = "127.0.0.1:0"
    """HOST:PORT or HOST:PORT-PORT that workers connect to; a version takes the first free port."""
    key: str = ""
    """server.key of `fastserve worker --make-keys`; empty: none, on loopback addresses only."""


class RayPlacement(WorkerLinks, frozen=True, forbid_unknown_fields=True):
    """Workers that Ray starts, each in an actor that takes these resources of a node."""

    num_cpus: Annotated[float, Meta(ge=0, le=1024)] = 1.0
    """CPUs of a worker's node that it takes."""
    num_gpus: Annotated[float, Meta(ge=0, le=64)] = 0.0
    """GPUs, or a fraction of one; with any, the model computes on cuda:0 of those."""
    memory_mb: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    """Megabytes of memory; 0: not counted."""
    resources: dict[Annotated[str, Meta(min_length=1, max_length=200)], Annotated[float, Meta(gt=0)]] = {}
    """Resources of the cluster's own names."""
    scheduling_strategy: Literal["SPREAD", "DEFAULT"] = "SPREAD"
    """SPREAD: over as many nodes as there are; DEFAULT: as Ray fills nodes."""
    listen: Annotated[str, Meta(max_length=300)] = ""
    """HOST:PORT or HOST:PORT-PORT that workers connect to; empty: any port of this node's address in Ray."""
    queue_target_s: Annotated[float, Meta(gt=0, le=3600)] = 0.1
    """Seconds that rows may wait before more workers are started, up to max."""
    down_after_s: Annotated[float, Meta(ge=0, le=86400)] = 60.0
    """Seconds for which fewer workers must have been enough before some are ended, down to min."""

    @property
    def demand(self) -> dict[str, float]:
        """The resources of one worker, by Ray's names; memory in bytes."""
        named = {"CPU": self.num_cpus, "GPU": self.num_gpus, "memory": float(self.memory_mb << 20)}
        return {name: count for name, count in {**named, **self.resources}.items() if count}


class PlacementOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the workers of a model run."""

    remote: RemotePlacement | None = None
    """On machines from which they connect."""
    ray: RayPlacement | None = None
    """On the nodes of a Ray cluster."""

    def __post_init__(self) -> None:
        if (self.remote is None) == (self.ray is None):
            raise ValueError("remote, ray: exactly one of them must be given")


def read_links(config: Mapping[str, Any]) -> RemotePlacement | RayPlacement:
    """Return the placement of a model whose config, as plain values, has one."""
    placement = config["placement"]
    if placement.get("ray") is not None:
        return msgspec.convert(placement["ray"], RayPlacement)
    return msgspec.convert(placement["remote"], RemotePlacement)


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
        raise ConfigError(f"listen {text}: without a key only a loopback address is allowed")
    return host, ports
