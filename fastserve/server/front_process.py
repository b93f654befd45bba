"""Another front process: the owner's listeners, dialects and queues, without workers of its own.

    python -m fastserve.server.front_process FD      FD: the control channel to the owner (front_pool.py)

It trusts its owner and keeps nothing on disk. When the control channel ends it ends at once: nobody could
answer its requests any more, and a new server needs its port.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import uvloop

from fastserve.codec.generation import Info
from fastserve.engine.batch_queue import BatchQueue, QueueMetrics
from fastserve.engine.counters import COUNTERS, RequestCounters, counters_of
from fastserve.engine.engine import SCHEDULER, Engine, Scheduler, find_scheduler
from fastserve.engine.relay.channel import CHANNEL_FDS, RelayChannel
from fastserve.engine.relay.client import RelayClient, RelayScheduler
from fastserve.engine.request_log import RequestLogs
from fastserve.engine.schedulers.cache import CachedScheduler, ResponseCache
from fastserve.engine.schedulers.schedule import open_queue, simple_scheduler
from fastserve.engine.shared_counts import CountsMemory
from fastserve.metrics import Readiness, Registry
from fastserve.metrics.registry import FailedRequest
from fastserve.net.accept_balance import AcceptBalancer
from fastserve.repository.catalog import Catalog
from fastserve.repository.model_config import load_config_json
from fastserve.repository.residency import LoadWaiters
from fastserve.repository.version import Version
from fastserve.server.front import Front, FrontGauges
from fastserve.server.front_messages import CachePart, FailuresPart, RemoteModelControl, apply_catalog
from fastserve.serving.replication import Content
from fastserve.settings import Listener, Settings
from fastserve.tensor import DTYPES, TensorSpec
from fastserve.util.logs import log_uncaught, setup_logs
from fastserve.util.memory import gc_freeze, keep_freed_memory, share_heap
from fastserve.workers.arena import Arena
from fastserve.workers.control import ControlChannel, PeerGone, die_with_owner, exit_now
from fastserve.workers.pinning import take_affinity

log = logging.getLogger(__name__)

BEAT_S = 0.5

# Descriptors of `start`: the memory of metrics, those of the relay channel, inboxes of connections.
RELAY_END = 1 + CHANNEL_FDS

# The owner pings every two seconds: one that is silent for so long hangs. Time counts as our own loop turns.
OWNER_SILENT_S = 10.0

OWNER_SILENT = "the server's first process gives no sign of life"


@dataclass
class FollowedVersion:
    """A version of the owner's as this process serves it, and its queues by the ids of its parts."""

    version: Version
    queues: dict[int, BatchQueue] = field(default_factory=dict)


class FrontProcess:
    """Carries out the owner's messages one by one."""

    def __init__(self, control: ControlChannel) -> None:
        self.ended = asyncio.Event()
        self.status = 0
        self._draining = False
        self._control = control
        self._catalog = Catalog()
        self._versions: dict[int, FollowedVersion] = {}  # by the owner's id
        self._parts: dict[int, int] = {}  # id of each opened part -> id of its version
        self._front: Front | None = None
        self._number, self._fronts = 0, 1
        self._start: dict[str, Any] = {}
        self._loads: RemoteModelControl | None = None
        self._request_logs: RequestLogs | None = None
        self._custom_metrics: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._told = Readiness()
        self._beat_at = time.monotonic()
        self._handing_over: asyncio.Future[None] | None = None
        self._quiet_s = 0.0  # since the owner last said something

    def watch(self) -> None:
        """Read the owner's messages on the running loop."""
        asyncio.get_running_loop().add_reader(self._control.fileno(), self._on_word)

    def _on_word(self) -> None:
        try:
            self._do(*self._control.receive())
        except PeerGone:
            exit_now(0)
        except Exception as fault:
            self._fail(fault)

    def _fail(self, fault: BaseException) -> None:
        """End, since this process and the owner may differ now, and be replaced."""
        log.error("the front process cannot go on", exc_info=fault)
        self.status = 1
        self.ended.set()

    def _do(self, message: dict[str, Any], fds: list[int]) -> None:
        op = message["op"]
        was_silent, self._quiet_s = self._owner_silent, 0.0
        if was_silent:
            self._show_readiness()
        if op == "start":
            self._begin(message, fds)
        elif op == "open":
            self._open(message, fds)
        elif op == "catalog":
            apply_catalog(self._catalog, message, {key: one.version for key, one in self._versions.items()})
        elif op == "ready" and self._front is not None:
            self._told = msgspec.convert(message["readiness"], Readiness, strict=False)
            self._show_readiness()
        elif op == "renew" and self._front is not None:
            self._front.renew_files()
        elif op == "metrics":
            self._custom_metrics = message["lines"]
        elif op == "hear" and self._front is not None:
            meant = self._front.hear(message["dialect"], message["word"])
            self._control.send({"op": "heard", "id": message["id"], "meant": meant})
        elif op == "ping":
            self._control.send({"op": "pong", "id": message["id"]})
        elif op == "replicate" and self._front is not None:
            self._front.state.apply(message["records"], fds)
        elif op == "settle":  # what was said before it is done
            self._control.send({"op": "settled", "id": message["id"]})
        elif op == "reply" and self._loads is not None:
            self._loads.hear(message)
        elif op == "listen":
            self._later(self._listen(message, fds))
        elif op in ("close", "drain"):
            self._later({"close": self._close, "drain": self._drain}[op](message))
        elif op == "stop" and not self._draining:
            self.ended.set()

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        fault = None if task.cancelled() else task.exception()
        if fault is not None:
            self._fail(fault)

    def _begin(self, message: dict[str, Any], fds: list[int]) -> None:
        settings = msgspec.convert(message["settings"], Settings)
        self._start, self._number, self._fronts = message, message["front"], settings.front_count
        log = settings.log
        setup_logs(log.level, log.format, access=log.access, fields={"front": str(self._number)})
        log_uncaught()
        registry = Registry(sections=settings.front_count, section=self._number, fd=fds[0])
        self._request_logs = RequestLogs(settings.request_log_folder, registry, self._number, self._fronts)
        self._loads = RemoteModelControl(
            settings.model_control == "explicit",
            self._control.send,
            LoadWaiters(settings.load_waiting, settings.load_wait_s),
        )
        self._relay = RelayClient(RelayChannel.join(message["relay"], fds[1:RELAY_END]))
        balancer = AcceptBalancer(self._number, settings.front_count, fds[RELAY_END:])
        self._front = Front(
            settings, Engine(self._catalog), registry, self._loads, number=self._number, balancer=balancer
        )
        self._front.started_ns = message["started_ns"]
        self._relay.open()
        self._front.custom_metrics = lambda: self._custom_metrics
        self._front.stop, self._front.spread = self._loads.stop, self._loads.spread
        self._front.state.add(CachePart.NAME, CachePart(None, self._open_cache))
        self._front.state.ask, self._front.state.note = self._loads.change, self._note
        self._front.state.front = self._number
        self._front.state.show_from_owner = self._loads.show
        self._loads.owner_silent = lambda: self._owner_silent
        self._gauges = FrontGauges(registry)
        self._beat()

    def _open_cache(self, cache: ResponseCache) -> None:
        assert self._front is not None
        self._front.cache = cache

    def _note(self, part: str, content: Content) -> None:
        self._control.send({"op": "note", "part": part, "content": json.dumps(content)})

    def _open(self, message: dict[str, Any], fds: list[int]) -> None:
        counts, *fds = fds
        followed = self._versions.get(message["version"])
        if followed is None:
            followed = self._follow(message, CountsMemory(self._fronts, self._number, counts))
        else:  # another part of it
            os.close(counts)
        self._parts[message["id"]] = message["version"]
        if message["geometry"] is not None:
            queue = self._open_queue(followed.version, Arena.join(message, fds))
            queue.on_device = message["on_device"]
            followed.queues[message["id"]] = queue
        if not message["relayed"]:
            inner = simple_scheduler(followed.queues[message["id"]])
            cached = self._cached(followed.version, inner, message["cached"])
            assert self._request_logs is not None
            SCHEDULER.put(followed.version, self._request_logs.wrap(followed.version, cached))
        self._control.send({"op": "opened", "id": message["id"]})

    def _follow(self, message: dict[str, Any], memory: CountsMemory) -> FollowedVersion:
        """Make the version that a part is opened of for the first time."""
        memory.close_fd()
        version = Version(
            message["model"], message["number"], Path(message["folder"]), load_config_json(message["config"])
        )
        version.describe(_read_specs(message["inputs"]), _read_specs(message["outputs"]))
        if message["text"] is not None:
            version.text = msgspec.convert(message["text"], Info)
        counters = COUNTERS.put(version, RequestCounters(memory))
        counters.load_s = float(message["load_s"])
        if message["relayed"]:
            SCHEDULER.put(version, RelayScheduler(self._relay, message["version"]))
        followed = self._versions[message["version"]] = FollowedVersion(version)
        return followed

    def _open_queue(self, version: Version, arena: Arena) -> BatchQueue:
        """Open a queue of the version; of a relayed one only its counters are read here."""
        assert self._front is not None
        geometry = arena.geometry
        metrics = QueueMetrics(
            self._front.registry, version.model, version.number, geometry.max_delay_ns, geometry.max_rows
        )
        queue = open_queue(arena, self._number, version.inputs, version.outputs, metrics)
        counters_of(version).queues.append(queue)
        return queue

    def _cached(self, version: Version, inner: Scheduler, number: int | None) -> Scheduler:
        """Put the cache before a scheduler, where the version has one; `number` is of its keys."""
        assert self._front is not None
        cache = self._front.cache
        if number is None or cache is None:
            return inner
        return CachedScheduler(cache, inner, counters_of(version), number)

    async def _listen(self, message: dict[str, Any], fds: list[int]) -> None:
        assert self._front is not None
        assert self._front.balancer is not None
        self._front.balancer.inherit(dict(zip(message["places"], fds, strict=True)))
        http = msgspec.convert(self._start["http"], tuple[Listener, ...])
        grpc = msgspec.convert(self._start["grpc"], tuple[Listener, ...])
        await self._front.open(http, grpc)
        keep_freed_memory()
        gc_freeze()
        self._control.send({"op": "listening", "id": 0})

    async def _close(self, message: dict[str, Any]) -> None:
        key = self._parts.pop(message["id"])
        version, queue = self._versions[key].version, self._versions[key].queues.pop(message["id"], None)
        while queue is not None and (queue.waiting or queue.unreleased):
            await queue.drain()
        if (scheduler := find_scheduler(version)) is not None:
            await scheduler.drain()
            SCHEDULER.drop(version)
        if queue is not None:
            queue.close()
            counters_of(version).close(queue)
            queue.arena.close()
        if key not in self._parts.values():
            self._versions.pop(key, None)
            counters_of(version).seal()
        self._control.send({"op": "closed", "id": message["id"]})

    async def _drain(self, message: dict[str, Any]) -> None:
        self._draining = True  # the "stop" that follows is for a front that would not
        if self._front is not None:
            await self._front.drain(message["grace_s"])
        if self._request_logs is not None:
            await asyncio.to_thread(self._request_logs.close)
        self.ended.set()

    @property
    def _owner_silent(self) -> bool:
        return self._quiet_s >= OWNER_SILENT_S

    def _show_readiness(self) -> None:
        """Show the owner's readiness; not ready while it is silent, when nobody replaces a dead worker."""
        if self._front is not None:
            silent = Readiness(False, OWNER_SILENT, self._told.models, self._told.state)
            self._front.set_ready(silent if self._owner_silent else self._told)

    def _beat(self) -> None:
        assert self._front is not None
        asyncio.get_running_loop().call_later(BEAT_S, self._beat)  # first: a beat that fails is not the last
        was_silent, now = self._owner_silent, time.monotonic()
        self._quiet_s += min(now - self._beat_at, 2 * BEAT_S)
        self._beat_at = now
        if self._owner_silent and not was_silent:
            log.error("%s for %g s", OWNER_SILENT, OWNER_SILENT_S)
            self._show_readiness()
        self._front.heartbeat.beat()
        self._front.look_twice_a_second()
        self._gauges.beat(self._front.listeners(), BEAT_S)
        self._gauges.show_memory(self._front.budget)
        if self._handing_over is None and (failed := self._front.registry.failures.take()):
            self._handing_over = asyncio.ensure_future(self._hand_over(failed))

    async def _hand_over(self, failed: list[tuple[str, FailedRequest]]) -> None:
        """Give the owner failed requests to keep. What fails meanwhile waits until it has them."""
        assert self._loads is not None
        try:
            await self._loads.change(FailuresPart.NAME, {"failed": [(model, *one) for model, one in failed]})
        finally:
            self._handing_over = None


def _read_specs(written: dict[str, Any]) -> dict[str, TensorSpec]:
    return {
        name: TensorSpec(name, DTYPES[dtype], None if shape is None else tuple(shape), tuple(columns))
        for name, (dtype, shape, columns) in written.items()
    }


async def run_front_process(fd: int) -> NoReturn:
    """Serve until the owner says drain, then end the process: no thread is waited for."""
    os.set_inheritable(fd, False)
    control = ControlChannel(socket.socket(fileno=fd), owner=False, trusted=True)
    follower = FrontProcess(control)
    follower.watch()
    await follower.ended.wait()
    asyncio.get_running_loop().remove_reader(control.fileno())
    control.close()
    exit_now(follower.status)


if __name__ == "__main__":
    die_with_owner(int(sys.argv[1]))
    take_affinity()
    share_heap()
    uvloop.run(run_front_process(int(sys.argv[1])))
