"""The server in a process of its own, with a probe that measures the longest block of its event loop.

    python -m tests.faults.probed serve MODELS --http ...      as `python -m fastserve.cli`

A timer of the loop fires every PERIOD_S; its delay is time in which no client was served. Delays caused by
other processes on the machine do not count: time in which the loop's thread was ready to run but had no
processor is subtracted, and a delay never counts more than the CPU time of the whole process meanwhile. A
thread that keeps the GIL counts as the loop does.

The longest delay is a double in a file that both sides map, named by PROBE_FILE; its reader resets it to 0.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import struct
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.running import FREE, Running

PROBE_FILE = "FASTSERVE_TEST_PROBE"
PERIOD_S = 0.001
_DOUBLE = struct.Struct("d")


class Instrument:
    """The file's other end: what a test reads."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_DOUBLE.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _DOUBLE.size)

    def reset(self) -> None:
        _DOUBLE.pack_into(self._map, 0, 0.0)

    @property
    def longest_s(self) -> float:
        (found,) = _DOUBLE.unpack_from(self._map, 0)
        return float(found)

    def raise_to(self, held_s: float) -> None:
        if held_s > self.longest_s:
            _DOUBLE.pack_into(self._map, 0, held_s)

    def close(self) -> None:
        self._map.close()


class Probed(Running):
    """Such a server. `meter` tells how long its loop was held."""

    def __init__(
        self, repository: Path, log: Path, *options: str, http: str = FREE, grpc: str = FREE
    ) -> None:
        super().__init__(repository, log, *options, http=http, grpc=grpc, module="tests.faults.probed")
        probe = log.with_name("probe")
        self.meter = Instrument(probe)
        self._more[PROBE_FILE] = str(probe)

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, fault, trace)
        self.meter.close()


class Probe:
    """The timer."""

    def __init__(self, meter: Instrument) -> None:
        self._meter, self._loop = meter, asyncio.get_running_loop()
        self._schedstat = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        self._before = self._now()
        self._loop.call_later(PERIOD_S, self._turn)

    def _now(self) -> tuple[float, float, float]:
        """Seconds on the clock, of work of the process, and in which this thread waited for a processor."""
        waited_ns = int(os.pread(self._schedstat, 80, 0).split()[1])
        return time.monotonic(), time.process_time(), waited_ns / 1e9

    def _turn(self) -> None:
        now = self._now()
        passed_s, worked_s, waited_s = (
            after - before for after, before in zip(now, self._before, strict=True)
        )
        self._before = now
        self._meter.raise_to(min(passed_s - PERIOD_S - waited_s, worked_s))
        self._loop.call_later(PERIOD_S, self._turn)


def main() -> None:
    import uvloop

    from fastserve.cli import main as serve

    meter, run = Instrument(Path(os.environ[PROBE_FILE])), uvloop.run

    def run_probed(work: Coroutine[Any, Any, Any], **options: Any) -> Any:
        async def probed() -> Any:
            Probe(meter)
            return await work

        return run(probed(), **options)

    uvloop.run = run_probed
    serve(prog_name="fastserve")


if __name__ == "__main__":
    main()
