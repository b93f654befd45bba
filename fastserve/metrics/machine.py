"""How busy the machine is, from /proc, as Triton reports it: all cores and all memory, not this server's."""

from __future__ import annotations

from pathlib import Path

# Columns of the first line of /proc/stat that are work, and that are not: user nice system irq softirq steal.
_BUSY, _IDLE = (0, 1, 2, 5, 6, 7), (3, 4)


class Machine:
    """Utilization is over the time since the last look."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._before = self._read_times()

    def cpu_utilization(self) -> float:
        """Between 0 and 1; 0 at once after another look."""
        now = self._read_times()
        busy, idle = (max(a - b, 0) for a, b in zip(now, self._before, strict=True))
        self._before = now
        return busy / (busy + idle) if busy + idle else 0.0

    def memory_bytes(self) -> tuple[int, int]:
        """(total, used); used is what is not available."""
        found = dict(line.split(":", 1) for line in self._text("meminfo").splitlines() if ":" in line)
        total, available = (_kilobytes(found.get(name, "")) for name in ("MemTotal", "MemAvailable"))
        return total, max(total - available, 0)

    def _read_times(self) -> tuple[int, int]:
        fields = self._text("stat").partition("\n")[0].split()[1:]
        ticks = [int(text) for text in fields[:8] if text.isdecimal()]
        ticks += [0] * (8 - len(ticks))
        return sum(ticks[i] for i in _BUSY), sum(ticks[i] for i in _IDLE)

    def _text(self, name: str) -> str:
        try:
            return (self._proc / name).read_text()
        except OSError:  # a sandbox that hides it: zeros, as of a machine nobody knows
            return ""


def _kilobytes(text: str) -> int:
    number = text.split()[:1]
    return int(number[0]) * 1024 if number and number[0].isdecimal() else 0
