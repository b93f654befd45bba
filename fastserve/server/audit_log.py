"""The audit log: a file of JSON lines that says who used the server, and who changed it.

    {"at": "2026-03-01T12:00:00.123Z", "event": "usage", "key": "team", "requests": 41, "rows": 39,
     "compute_s": 0.125, "errors": {"429": 2}}
    {"at": "...", "event": "admin", "key": "ops", "call": "POST /v2/repository/models/m/load", "status": 200}
    {"at": "...", "event": "omitted", "admin": 17}

`usage` has what a key did since the line before, over all front processes; the first of them writes it, once
a second, for keys that did something. Each front writes the administrative calls of its own clients as they
end. Of refused ones it writes MOST_REFUSED a second, so that strangers neither fill the disk nor hide what
others do.

While the disk is full, lines wait: MOST_WAITING of administrative calls, beyond which they are omitted, and
the usage since then, which is one line a key. Half a line that a full disk has left is ended, and written
again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections import Counter, deque
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fastserve.errors import ConfigError
from fastserve.metrics import Registry, names
from fastserve.util.rate_limited_log import RateLimitedLog

log = logging.getLogger(__name__)
EVERY_S = 1.0
MOST_REFUSED = 100
MOST_WAITING = 1000
REFUSED = frozenset((401, 403, 429, "UNAUTHENTICATED", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED"))
CALL_CHARACTERS = 300
USED = {
    "requests": names.KEY_REQUESTS,
    "rows": names.KEY_ROWS,
    "tokens": names.KEY_TOKENS,
    "compute_s": names.KEY_COMPUTE,
}
UNITS = tuple(metric.unit for metric in USED.values())
"""Counts are whole numbers of these."""


class AuditLog:
    """The file as one front process writes it. With `counts` it writes the usage of all of them."""

    def __init__(self, path: Path, counts: Registry | None) -> None:
        self._path, self._counts = path, counts
        self._file = -1
        self._refused = self._omitted = 0  # in this second; omitted ones until that is written
        self._waiting: deque[bytes] = deque()  # lines that are not written
        self._is_cut = False  # the file ends in half a line of this front's
        self._used: list[Counter[str]] = [Counter() for _ in USED]
        self._errors: Counter[tuple[str, str]] = Counter()
        self._limited_log = RateLimitedLog(log)
        self._timer: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """Open the file, and start on the running loop. Raises ConfigError."""
        try:
            self._file = self._open()
        except OSError as fault:
            raise ConfigError(f"audit_log: {self._path}: {fault.strerror}") from None
        if self._counts is not None:
            self._grown()  # what is in the counts already is no news
        self._wait()

    def note(self, key: str, call: str, status: int | str) -> None:
        """Write down an administrative call that has ended."""
        if status in REFUSED:
            if self._refused >= MOST_REFUSED:
                self._omitted += 1
                return
            self._refused += 1
        if len(self._waiting) >= MOST_WAITING:
            self._omitted += 1
            return
        shown = call.partition("?")[0][:CALL_CHARACTERS]
        self._write([{"event": "admin", "key": key, "call": shown, "status": status}])

    def close(self) -> None:
        """Write what is left, and close the file."""
        if self._timer is not None:
            self._timer.cancel()
        self._turn()
        if self._waiting:
            log.error("the audit log has lost lines: %s: %d", self._path, len(self._waiting))
        os.close(self._file)
        self._file = -1

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(EVERY_S, self._tick)

    def _tick(self) -> None:
        self._wait()  # first: a turn that fails is not the last
        self._turn()

    def _turn(self) -> None:
        self._refused = 0
        if not self._write([]):  # usage adds up meanwhile
            return
        lines: list[dict[str, Any]] = []
        if self._omitted:
            lines.append({"event": "omitted", "admin": self._omitted})
        self._omitted = 0
        if self._counts is not None:
            used, errors = self._grown()
            by_key: dict[str, dict[str, int]] = {}
            for (key, code), count in sorted(errors.items()):
                by_key.setdefault(key, {})[code] = count
            for key in sorted({*by_key}.union(*used)):
                line: dict[str, Any] = {"event": "usage", "key": key, "requests": used[0][key]}
                for name, unit, counts in zip(USED, UNITS, used, strict=True):
                    if counts[key]:
                        line[name] = counts[key] if unit == 1 else round(counts[key] * unit, 6)
                lines.append({**line, "errors": by_key[key]} if key in by_key else line)
        if lines:
            self._write(lines)

    def _grown(self) -> tuple[list[Counter[str]], Counter[tuple[str, str]]]:
        """Return how much the counts of USED, and those of errors, have grown since the last call."""
        assert self._counts is not None
        *found, failed = self._counts.read(*USED.values(), names.KEY_ERRORS)
        used = [
            Counter({key: round(value / unit) for (key,), (value,) in counts.items()})
            for counts, unit in zip(found, UNITS, strict=True)
        ]
        errors = Counter({(key, code): int(value) for (key, code), (value,) in failed.items()})
        grown = [now - before for now, before in zip(used, self._used, strict=True)], errors - self._errors
        self._used, self._errors = used, errors
        return grown

    def _write(self, lines: list[dict[str, Any]]) -> bool:
        """Append lines behind those that wait, to a new file if somebody has moved the old one away. Return
        whether none waits."""
        at = datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        self._waiting += [json.dumps({"at": at, **line}).encode() + b"\n" for line in lines]
        try:
            while self._waiting:
                self._reopen()
                self._note_written(os.write(self._file, b"\n" * self._is_cut + b"".join(self._waiting)))
        except OSError as fault:
            count = len(self._waiting)
            text = "the audit log cannot be written, %d lines wait: %s: %s"
            self._limited_log.warn(text, count, self._path, fault.strerror)
        return not self._waiting

    def _note_written(self, nbytes: int) -> None:
        """Drop the lines that are written whole."""
        if not nbytes:
            return
        nbytes -= self._is_cut
        while self._waiting and nbytes >= len(self._waiting[0]):
            nbytes -= len(self._waiting.popleft())
        self._is_cut = nbytes > 0

    def _reopen(self) -> None:
        try:
            there, here = os.stat(self._path), os.fstat(self._file)
            if (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino):
                return
        except FileNotFoundError:
            pass
        fresh = self._open()
        os.close(self._file)
        self._file, self._is_cut = fresh, False

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
