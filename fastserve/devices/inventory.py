"""The GPUs that CUDA gives to a process of this server, found without initialising CUDA in this one.

    devices = find_devices()        [] on a machine without any
    devices[1].select               what CUDA_VISIBLE_DEVICES says to mean this one

A child process is asked and gone again (30 ms where there is no driver): the numbers are those of CUDA's own
order, of CUDA_VISIBLE_DEVICES, of MIG and of whatever a container leaves, which no file under /proc tells. It
makes no context, so it takes nothing of a device.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fastserve.devices.cuda import LIBRARIES

log = logging.getLogger(__name__)

VISIBLE = "CUDA_VISIBLE_DEVICES"
LOADER_FOLDERS = ("/lib", "/usr/lib", "/lib64", "/usr/lib64", "/usr/local/lib")
LOADER_CACHE = "/etc/ld.so.cache"
PROGRAM = Path(__file__).with_name("cuda.py")
# A driver that loads its kernel module for this, and looks at eight devices, takes seconds.
ASK_S = 60.0


class VisibleDevice(NamedTuple):
    """One GPU, or one MIG instance. `number` is CUDA's for a process with our environment."""

    number: int
    uuid: str
    name: str
    memory_bytes: int
    select: str

    @property
    def title(self) -> str:
        """The device as messages to people name it."""
        return f"GPU {self.number} ({self.name}, {self.memory_bytes / 2**30:.1f} GiB)"


def has_driver(environment: Mapping[str, str] | None = None) -> bool:
    """Whether the dynamic loader could find the driver's library at all, without loading it: where it could
    not, nobody needs to be asked."""
    named = (os.environ if environment is None else environment).get("LD_LIBRARY_PATH", "").split(os.pathsep)
    folders = [Path(folder) for folder in (*filter(None, named), *LOADER_FOLDERS)]
    if any((folder / name).exists() for folder in folders for name in LIBRARIES):
        return True
    try:
        return LIBRARIES[-1].encode() in Path(LOADER_CACHE).read_bytes()
    except OSError:  # a system without one
        return False


def find_devices(environment: Mapping[str, str] | None = None) -> list[VisibleDevice]:
    """Find the devices, by a child process. Blocks; a driver that does not answer counts as none, and is
    logged."""
    environment = os.environ if environment is None else environment
    if not has_driver(environment):
        return []
    # -I and -S: the program needs nothing but the standard library, and starts in half the time.
    command = [sys.executable, "-I", "-S", str(PROGRAM)]
    try:
        asked = subprocess.run(
            command, env=dict(environment), stdin=subprocess.DEVNULL, capture_output=True, timeout=ASK_S
        )
        found = json.loads(asked.stdout) if asked.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, ValueError):
        found = None
    if found is None:
        log.error("the CUDA driver could not be asked for its devices: this server goes on without any")
        return []
    return [
        VisibleDevice(number, told["uuid"], told["name"], told["memory_bytes"], select)
        for number, (told, select) in enumerate(zip(found, _selectors(found, environment), strict=True))
    ]


def _selectors(found: list[dict[str, Any]], environment: Mapping[str, str]) -> list[str]:
    """Names of the devices for a child's CUDA_VISIBLE_DEVICES: as in ours, so that a MIG instance keeps its
    name."""
    given = [name.strip() for name in environment.get(VISIBLE, "").split(",") if name.strip()]
    if len(given) >= len(found):
        return given[: len(found)]
    return [f"{'MIG' if told['mig'] else 'GPU'}-{told['uuid']}" for told in found]


class DeviceInventory:
    """The devices of this machine, looked for once in the life of the server, on first use."""

    def __init__(self) -> None:
        self._devices: list[VisibleDevice] | None = None
        self._asking = threading.Lock()

    def devices(self) -> list[VisibleDevice]:
        """Return the devices. Blocks the first time; from any thread."""
        with self._asking:
            if self._devices is None:
                self._devices = find_devices()
            return self._devices


MACHINE = DeviceInventory()
"""This one. What it has does not change while the process lives."""
