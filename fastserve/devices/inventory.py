"""The GPUs that CUDA gives to a process of this server, found without initialising CUDA in this one.

    devices = find_devices()        [] on a machine without any
    devices[1].select               what CUDA_VISIBLE_DEVICES says to mean this one

A child process is asked and gone again (30 ms where there is no driver): the numbers are those of CUDA's own
order, of CUDA_VISIBLE_DEVICES, of MIG and of whatever a container leaves, which no file under /proc tells. It
makes no context, so it takes nothing of a device.

NVML, the driver's library for looking, tells how busy and how full GPUs are; it makes no CUDA context:

    GPUS.latest()     the last reading, at once; a thread reads again meanwhile
    GPUS.read()       a reading of now; waits for the driver

All GPUs of the machine, or of the container, are shown, those too that no model uses. NVML numbers them by
their place on the bus, CUDA may not: a UUID names one.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


LIBRARY = "libnvidia-ml.so.1"
_TEXT = 96
_FRESH_S = 1.0
NOT_SUPPORTED, NO_PERMISSION = 3, 4


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU at one moment. What this model of GPU does not tell is None; `energy_j` since the driver was
    loaded. Of a GPU in parts (MIG) NVML tells no utilization."""

    uuid: str
    name: str
    utilization: float | None
    memory_used_bytes: int
    memory_total_bytes: int
    power_w: float | None
    power_limit_w: float | None
    energy_j: float | None


class _Rates(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class NvmlFault(Exception):
    """A call failed; `code` is NVML's."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call}: error {code}")
        self.code = code


class Nvml:
    """The library, initialised. Raises NvmlFault."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._do("nvmlInit_v2")

    def read(self) -> list[Gpu]:
        """Return every GPU that can be read. Raises NvmlFault when none can."""
        found, fault = [], None
        for number in range(self._get("nvmlDeviceGetCount_v2", ctypes.c_uint).value):
            try:
                found.append(self._read_one(number))
            except NvmlFault as silent:  # fallen off the bus, or not for this container to see
                fault = silent
        if fault is not None and not found:
            raise fault
        return found

    def _read_one(self, number: int) -> Gpu:
        handle = self._get("nvmlDeviceGetHandleByIndex_v2", ctypes.c_void_p, ctypes.c_uint(number))
        rates = self._maybe(lambda: self._get("nvmlDeviceGetUtilizationRates", _Rates, last=handle))
        memory = self._get("nvmlDeviceGetMemoryInfo", _Memory, last=handle)
        return Gpu(
            uuid=self._text("nvmlDeviceGetUUID", handle),
            name=self._text("nvmlDeviceGetName", handle),
            utilization=None if rates is None else rates.gpu / 100,
            memory_used_bytes=int(memory.used),
            memory_total_bytes=int(memory.total),
            power_w=self._milli("nvmlDeviceGetPowerUsage", handle),
            power_limit_w=self._milli("nvmlDeviceGetEnforcedPowerLimit", handle),
            energy_j=self._milli("nvmlDeviceGetTotalEnergyConsumption", handle, ctypes.c_ulonglong),
        )

    def _milli(self, call: str, handle: Any, kind: Any = ctypes.c_uint) -> float | None:
        found = self._maybe(lambda: self._get(call, kind, last=handle))
        return None if found is None else found.value / 1000

    def _maybe(self, ask: Callable[[], Any]) -> Any:
        """Return None for what this GPU does not report."""
        try:
            return ask()
        except NvmlFault as fault:
            if fault.code not in (NOT_SUPPORTED, NO_PERMISSION):
                raise
            return None

    def _text(self, call: str, handle: Any) -> str:
        text = ctypes.create_string_buffer(_TEXT)
        self._do(call, handle, text, ctypes.c_uint(_TEXT))
        return text.value.decode("utf-8", "replace")

    def _get(self, call: str, kind: Any, *before: Any, last: Any = None) -> Any:
        found = kind()
        self._do(call, *(before if last is None else (last,)), ctypes.byref(found))
        return found

    def _do(self, call: str, *arguments: Any) -> None:
        function = getattr(self._library, call, None)
        code = NOT_SUPPORTED if function is None else function(*arguments)
        if code:
            raise NvmlFault(call, code)


class Gpus:
    """The GPUs of this machine; none where there is no library. One look at a time, and not more often than
    once a second, however many ask."""

    def __init__(self, library: str = LIBRARY) -> None:
        self._name = library
        self._nvml: Nvml | None = None
        self._none = False
        self._turn = threading.Lock()
        self._seen: list[Gpu] = []
        self._seen_s = float("-inf")

    def read(self) -> list[Gpu]:
        """Read, unless that was done within a second. Waits for the driver; from any thread."""
        if self._none:
            return []
        with self._turn:
            if time.monotonic() - self._seen_s >= _FRESH_S:
                self._look()
            return self._seen

    def latest(self) -> list[Gpu]:
        """Return the last reading at once; a thread reads again if that is old."""
        seen, old = self._seen, time.monotonic() - self._seen_s >= _FRESH_S
        if old and not self._none and not self._turn.locked():
            threading.Thread(target=self.read, name="gpus", daemon=True).start()
        return seen

    def _look(self) -> None:
        try:
            self._nvml = self._nvml or Nvml(ctypes.CDLL(self._name))
            self._seen = self._nvml.read()
        except OSError:  # there is no such library, and will be none
            self._none = True
        except (
            NvmlFault
        ) as fault:  # a GPU that has fallen off the bus, say: nothing is shown until it is back
            if self._seen or self._nvml is None:
                log.warning("GPUs cannot be looked at: %s", fault)
            self._seen = []
        self._seen_s = time.monotonic()


GPUS = Gpus()
"""Of this machine."""
