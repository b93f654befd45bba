"""What models ask of the server itself (words: workers/wishes.py), carried out by the process that owns them.

    load, unload        another model, where models are under explicit control
    ready               whether one is there
    family, metric, value, change       metrics of the model's own

A wish was written by a model's code: it is checked as a client's request is, and a wrong one is answered so.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Protocol

import msgspec

from fastserve.backends.base import explain
from fastserve.engine.counters import DeviceCounts, counters_of
from fastserve.engine.lent_closing import LentClosing
from fastserve.errors import Kind, ServeError
from fastserve.metrics.custom import CustomMetrics
from fastserve.repository.catalog import Catalog
from fastserve.repository.overrides import Override
from fastserve.repository.version import Version

log = logging.getLogger(__name__)

TEXT_MAX = 64 << 20
NO_CONTROL = "models cannot be loaded from here"
TOO_LONG = f"a wish has at most {TEXT_MAX} characters"
ITSELF = "a model cannot load itself while it loads"
Tell = Callable[[int, Mapping[str, Any]], bool]
From = tuple[int, int, int]  # version, part, worker


class Loads(Protocol):
    """The repository, as wishes see it."""

    async def load(
        self, name: str, path: tuple[str, ...] = (), override: Override | None = None, *, lent: bool = False
    ) -> None:
        """Raises ServeError."""

    async def unload(self, name: str, *, composing: bool = False) -> None:
        """Raises ServeError."""


class _Wish(msgspec.Struct, tag_field="do"):
    pass


class _Load(_Wish, tag="load"):
    name: str
    config: str = ""
    files: dict[str, str] = {}


class _Unload(_Wish, tag="unload"):
    name: str
    dependents: bool = False


class _Ready(_Wish, tag="ready"):
    name: str
    version: str = ""


class _Family(_Wish, tag="family"):
    name: str
    help: str
    kind: str


class _Metric(_Wish, tag="metric"):
    family: str
    labels: dict[str, str]
    buckets: list[float]


class _Value(_Wish, tag="value"):
    number: int


class _Change(_Wish, tag="change"):
    changes: list[tuple[int, str, float]]


class _Device(_Wish, tag="device"):
    """Not a wish: what a worker says of its device (workers/device_report.py)."""

    device: str
    pinned: bool
    batches: int
    copy_in_ns: int
    compute_ns: int
    copy_out_ns: int


class _NoMemory(_Wish, tag="no_memory"):
    """Nor is this: batches a worker had no memory for (backends/shortage.py)."""

    batches: Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]


class _LentClosed(_Wish, tag="lent_closed"):
    """Nor is this: a worker has let go of a client's device memory (lent_closing.py)."""

    number: int


_Any = _Load | _Unload | _Ready | _Family | _Metric | _Value | _Change | _Device | _NoMemory | _LentClosed
_read = msgspec.json.Decoder(_Any).decode


class Wishes:
    """Those of all workers. `repository` is set by whoever has one."""

    def __init__(self, catalog: Catalog) -> None:
        self.repository: Loads | None = None
        self.metrics = CustomMetrics()
        self.lent = LentClosing()
        self._catalog = catalog
        self._texts: dict[tuple[From, int], list[str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def hear(self, version: Version, part: int, worker: int, message: Mapping[str, Any], tell: Tell) -> None:
        """A piece of a wish; the last one has it carried out, and `tell` hears what became of it."""
        number = int(message["id"])
        place = ((id(version), part, worker), number)
        pieces = self._texts.setdefault(place, [])
        pieces.append(message["text"])
        if sum(map(len, pieces)) > TEXT_MAX:
            pieces[:] = [" " * TEXT_MAX]  # what follows is not kept either
        if message["more"]:
            return
        text = "".join(self._texts.pop(place))
        try:
            wish = _read(text) if len(text) < TEXT_MAX else None
        except (msgspec.MsgspecError, ValueError, RecursionError):
            wish = None
        if isinstance(wish, _Device):
            _count_device(version, part, worker, wish)
            return
        if isinstance(wish, _NoMemory):
            counters_of(version).out_of_memory += wish.batches
            return
        if isinstance(wish, _LentClosed):
            self.lent.closed((id(version), part, worker), wish.number)
            return
        work = self._carry_out(version, wish, lambda told: self._say(tell, worker, number, told))
        if work is not None:
            task = asyncio.get_running_loop().create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def forget_worker(self, version: Version, part: int, worker: int) -> None:
        """It is dead: what it had begun to say is nothing."""
        gone = (id(version), part, worker)
        self.lent.gone(gone)
        for place in [place for place in self._texts if place[0] == gone]:
            del self._texts[place]

    def forget(self, version: Version) -> None:
        """The version is gone."""
        self.metrics.forget(id(version))
        self.lent.version_gone(id(version))

    async def close(self) -> None:
        """Nothing is carried out any more."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _say(self, tell: Tell, worker: int, number: int, told: Mapping[str, Any]) -> None:
        if number:
            tell(worker, {"op": "told", "id": number, "final": True, **told})

    def _carry_out(self, version: Version, wish: _Wish | None, say: Callable[[dict[str, Any]], None]) -> Any:
        """A coroutine for what takes its time; the rest is done at once, and in the order it came."""
        if isinstance(wish, _Load | _Unload):
            return self._manage(version, wish, say)
        try:
            say(self._answer(version, wish))
        except ServeError as error:
            say({"kind": error.kind.value, "message": error.message})
        except ValueError as error:
            say({"kind": Kind.INVALID_ARGUMENT.value, "message": str(error)})
        return None

    def _answer(self, version: Version, wish: _Wish | None) -> dict[str, Any]:
        metrics, owner = self.metrics, id(version)
        if isinstance(wish, _Ready):
            return {"ready": self._is_ready(wish)}
        if isinstance(wish, _Family):
            metrics.add_family(owner, wish.name, wish.help, wish.kind)
            return {}
        if isinstance(wish, _Metric):
            return {"number": metrics.add_series(owner, wish.family, wish.labels, wish.buckets)}
        if isinstance(wish, _Value):
            return {"value": metrics.value(wish.number)}
        if isinstance(wish, _Change):
            for number, how, value in wish.changes:
                metrics.change(number, how, value)
            return {}
        raise ValueError("the server does not know what this asks for" if wish is None else TOO_LONG)

    def _is_ready(self, wish: _Ready) -> bool:
        if wish.version and not wish.version.lstrip("-").isdecimal():
            text = f"failed to get model version from specified version string {wish.version[:40]!r}"
            raise ServeError(Kind.INVALID_ARGUMENT, f"{text}, version should be an integral value > 0")
        number = int(wish.version) if wish.version and int(wish.version) >= 0 else None
        return self._catalog.available(wish.name, number) is not None

    async def _manage(
        self, version: Version, wish: _Load | _Unload, say: Callable[[dict[str, Any]], object]
    ) -> None:
        try:
            if self.repository is None:
                raise ServeError(Kind.UNIMPLEMENTED, NO_CONTROL)
            if isinstance(wish, _Unload):
                if wish.name == version.model:  # it waits for its requests, and this may be one of them
                    say({})
                    say = log.debug
                await self.repository.unload(wish.name, composing=wish.dependents)
            else:
                await self._load(version, wish)
            say({})
        except ServeError as error:
            say({"kind": error.kind.value, "message": error.message})
        except Exception as error:
            log.exception("a wish of %r failed", version)
            say({"kind": Kind.INTERNAL.value, "message": explain(error)})

    async def _load(self, version: Version, wish: _Load) -> None:
        loading = self._catalog.available(version.model, version.number) is not version
        if loading and wish.name == version.model:
            raise ServeError(Kind.FAILED_PRECONDITION, ITSELF)
        try:
            files = {path: base64.b64decode(data) for path, data in wish.files.items()}
        except ValueError as error:
            raise ServeError(Kind.INVALID_ARGUMENT, f"files: {error}") from None
        override = Override(wish.config or "{}", files) if wish.config or files else None
        assert self.repository is not None
        await self.repository.load(wish.name, override=override, lent=loading)


def _count_device(version: Version, part: int, worker: int, told: _Device) -> None:
    counts = counters_of(version).devices.setdefault((part, worker), DeviceCounts())
    counts.device, counts.pinned = told.device, told.pinned
    for field in ("batches", "copy_in_ns", "compute_ns", "copy_out_ns"):
        setattr(counts, field, getattr(counts, field) + max(getattr(told, field), 0))
