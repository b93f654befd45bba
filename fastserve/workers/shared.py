"""Worker processes that several models share, as their owner sees them: one process for each name, device and
instance, one tenant in it for each worker that would have a process of its own.

    shared = SharedWorkers()
    tenant = shared.tenant(key, title, environment, on_message, on_exit)     the face of a WorkerProcess
    tenant.spawn()                                                           the first one starts the process

A tenant has a control line, an arena and a thread of its own (tenants.py): it loads, warms up, takes batches
and leaves while the others work. What cannot be had apart is the end of a process: a crash, a kill, and a run
that is ended from outside take all tenants, and each group starts its own again. A tenant that has no batches
in its hands yet, or none any more, is never a reason to end the others: it is let go of, and its thread ends
when whatever it is doing ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple

from fastserve._ext.meter import Gauge
from fastserve.each import each
from fastserve.errors import Kind, ServeError
from fastserve.logs import current_logs
from fastserve.metrics.registry import Family
from fastserve.workers.control import Control, ControlFault
from fastserve.workers.process import ENTRY, HANGUP_GRACE_S, KILL_WAIT_S, WorkerProcess

log = logging.getLogger(__name__)

ENTRY_SHARED: tuple[str, ...] = (*ENTRY[:-1], "fastserve.workers.tenants")
# An empty process has nothing left to say.
STOP_GRACE_S = 2.0
OTHER_ENVIRONMENT = (
    "shared_worker {!r} runs with another environment ({}): models that share a worker have the same "
    "env and threads"
)

OnMessage = Callable[[dict[str, Any]], None]
OnExit = Callable[[str], None]


class Key(NamedTuple):
    """Which process: the name that configs give it, what it computes on, and which of those there."""

    name: str
    device: str = "cpu"
    gpu: int = -1
    number: int = 0

    @property
    def title(self) -> str:
        """For logs."""
        where = f"@{self.gpu}" if self.gpu >= 0 else "" if self.device == "cpu" else f"@{self.device}"
        return f"{self.name}{where}#{self.number}"


class SharedWorkers:
    """All of one owner's. Everything happens on its loop. `counts` shows how many are in each."""

    def __init__(self, counts: Family[Gauge] | None = None, entry: Sequence[str] = ENTRY_SHARED) -> None:
        self._entry, self._counts = entry, counts
        self._houses: dict[Key, _House] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def tenant(
        self, key: Key, title: str, environment: Mapping[str, str], on_message: OnMessage, on_exit: OnExit
    ) -> Tenant:
        """A place in the process `key`, which is started by the first that moves in."""
        return Tenant(partial(self._house, key, environment), title, on_message, on_exit)

    async def close(self) -> None:
        """Returns when no process is left that its last tenant has left."""
        while self._ending:
            await asyncio.wait(set(self._ending))

    def _house(self, key: Key, environment: Mapping[str, str]) -> _House:
        """Raises ServeError INVALID_ARGUMENT for a process with another environment."""
        house = self._houses.get(key)
        if house is None or not house.open:
            house = self._houses[key] = _House(key, environment, self._entry, self._changed)
        elif house.environment != environment:
            names = {n for n, v in house.environment.items() ^ environment.items()}
            text = OTHER_ENVIRONMENT.format(key.name, ", ".join(sorted(names)))
            raise ServeError(Kind.INVALID_ARGUMENT, text)
        return house

    def _changed(self, house: _House, tenants: int) -> None:
        """Somebody has come or gone; an empty process ends."""
        current = self._houses.get(house.key) is house
        if self._counts is not None and current:
            self._counts.of(house.key.title).set(tenants)
        if tenants or not house.open:
            return
        house.open = False
        if current:
            del self._houses[house.key]
        task = asyncio.get_running_loop().create_task(house.process.stop(STOP_GRACE_S))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


class _House:
    """One process and who is in it."""

    def __init__(
        self,
        key: Key,
        environment: Mapping[str, str],
        entry: Sequence[str],
        on_change: Callable[[_House, int], None],
    ) -> None:
        self.key, self.environment = key, environment
        self.process = WorkerProcess(environment, self._hear, self._end, entry=entry)
        self.open = True
        self._tenants: dict[int, Tenant] = {}
        self._last = 0
        self._on_change = on_change

    def admit(self, tenant: Tenant, line: socket.socket) -> int:
        """Its number here. Raises OSError when there can be no process, ControlFault when it is gone."""
        if not self.process.running:
            self.process.spawn()
        self._last += 1
        told = {"op": "join", "id": self._last, "title": self.key.title, "logs": current_logs()}
        self.process.send(told, [line.fileno()])
        self._tenants[self._last] = tenant
        self._on_change(self, len(self._tenants))
        return self._last

    def leave(self, number: int) -> None:
        """No effect when it has left."""
        if self._tenants.pop(number, None) is not None:
            self._on_change(self, len(self._tenants))

    def _hear(self, message: dict[str, Any]) -> None:
        tenant = self._tenants.get(message.get("id", 0))
        if message["op"] not in ("freed", "left"):
            raise ControlFault("a message that is neither freed nor left")
        if tenant is not None:
            tenant.freed() if message["op"] == "freed" else tenant.over("it has left")

    def _end(self, words: str) -> None:
        self.open = False
        each(list(self._tenants.values()), methodcaller("over", words))


class Tenant:
    """A worker that is a thread of a shared process; used as a WorkerProcess is."""

    def __init__(
        self, house: Callable[[], _House], title: str, on_message: OnMessage, on_exit: OnExit
    ) -> None:
        self._find, self._title = house, title
        self._on_message, self._on_exit = on_message, on_exit
        self._house: _House | None = None
        self._number = 0
        self._control: Control | None = None
        self._exited: asyncio.Future[None] | None = None
        self._hangup: asyncio.TimerHandle | None = None
        self._serving = False

    @property
    def pid(self) -> int:
        """That of the process, 0 when there is none."""
        return self._house.process.pid if self._house is not None else 0

    @property
    def running(self) -> bool:
        """From spawn until it has left, or was let go of."""
        return self._control is not None

    def spawn(self) -> None:
        """Moves in. Raises OSError, and ServeError for a process with another environment."""
        house = self._find()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control = Control(ours, owner=True)
        try:
            with theirs:
                self._number = house.admit(self, theirs)
        except ControlFault as fault:
            control.close()
            raise OSError(0, str(fault)) from fault
        except BaseException:
            control.close()
            raise
        self._house, self._control = house, control
        self._exited = asyncio.get_running_loop().create_future()
        control.watch(self._hear, self._lose)

    def send(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Says something to the thread. Raises ControlFault when it cannot arrive."""
        if self._control is None:
            raise ControlFault("the worker is not running")
        self._serving = self._serving or message["op"] == "serve"
        self._control.send(message, fds)

    def catch_up(self) -> bool:
        """See WorkerProcess."""
        return self._control is None or self._control.catch_up()

    def kill(self, reason: str) -> None:
        """Ends the process where batches are in this thread's hands, and else lets go of the thread."""
        if self._control is None or self._house is None:
            return
        if self._serving:
            self._house.process.kill(f"{self._title}: {reason}")
            return
        log.warning(
            "%s, in shared worker %s, is left to itself: %s", self._title, self._house.key.title, reason
        )
        asyncio.get_running_loop().call_soon(self.over, f"killed: {reason}")

    async def stop(self, grace_s: float) -> None:
        """Asks it to leave, and ends it after `grace_s` seconds; returns when it has left. It has that time
        also when nobody waits for it any more: ending it may end the others in its process."""
        if self._control is None:
            return
        with contextlib.suppress(ControlFault):  # a line that is closed is of one that is leaving
            self.send({"op": "stop"})
        late = f"it did not stop within {grace_s:g} s"
        try:
            stopped = await self.wait(grace_s)
        except asyncio.CancelledError:
            self._kill_in(grace_s, late)
            raise
        if not stopped:
            self.kill(late)
            await self.wait(KILL_WAIT_S)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until it has left; False when that took longer."""
        if self._exited is None:
            return True
        await asyncio.wait({self._exited}, timeout=timeout_s)
        return self._exited.done()

    def abandon(self) -> None:
        """Ends the whole process, without the loop."""
        if self._control is not None and self._house is not None:
            self._house.open = False
            self._house.process.abandon()
            self._control.close()
            self._control = None

    # --- what the process says ----------------------------------------------------------------------

    def freed(self) -> None:
        """It touches its arena no more."""
        self._serving = False

    def over(self, words: str) -> None:
        """It has left, or is gone with its process."""
        if self._control is None or self._house is None or self._exited is None:
            return
        self._control.drain(self._hear)
        self._control.close()
        self._control = None
        if self._hangup is not None:
            self._hangup.cancel()
        self._exited.set_result(None)
        self._house.leave(self._number)
        self._on_exit(words)

    def _hear(self, message: dict[str, Any]) -> None:
        try:
            self._on_message(message)
        except ControlFault as fault:
            self.kill(f"it sent {fault}")

    def _lose(self, reason: str) -> None:
        if reason:
            self.kill(f"it sent {reason}")
            return
        # It has said that it leaves, or its process dies: either is heard of in a moment.
        self._kill_in(HANGUP_GRACE_S, "it closed its control line")

    def _kill_in(self, seconds: float, reason: str) -> None:
        """Unless it has left by then."""
        if self._hangup is not None:
            self._hangup.cancel()
        if self.running:
            self._hangup = asyncio.get_running_loop().call_later(seconds, self.kill, reason)


def place_in(config: Mapping[str, Any], number: int) -> Key | None:
    """The shared process of worker `number` of a version, None for one of its own; `config` is model.yaml as
    plain values. The first workers of all models on a device share one, their second workers another: a
    model's own workers are never in one process, and one may die without the other."""
    name = config.get("shared_worker")
    if not name:
        return None
    places = config.get("places") or ()
    number += int(config.get("first_instance") or 0)
    if not places:
        return Key(name, number=number)
    mine = places[number]["device"], places[number]["gpu"]
    before = sum((one["device"], one["gpu"]) == mine for one in places[:number])
    return Key(name, *mine, before)
