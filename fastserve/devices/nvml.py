"""How busy and how full GPUs are, from NVML: the driver's library for looking, which makes no CUDA context.

    GPUS.latest()     the last reading, at once; a thread reads again meanwhile
    GPUS.read()       a reading of now; waits for the driver

All GPUs of the machine, or of the container, are shown, those too that no model uses. NVML numbers them by
their place on the bus, CUDA may not: a UUID names one.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)

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
