"""The other front processes as their owner sees them: it starts them, sends them every change, replaces them.

    owner -> front   start {settings, front, listeners, relay} + metrics memory, relay channel, inboxes
                     open {version} + arena, if it has one    listen {places} + listening sockets
                     catalog {models, gone}    ready {...}    close {id}    renew {}    drain {grace_s}
                     hear {id, dialect, word}    settle {id}    ping {id}
                     replicate {records} + descriptors    (serving/replication.py)
    front -> owner   listening    opened {id}    closed {id}    heard {id, meant}    settled {id}    pong {id}
                     ask: model control for its clients (front_messages.py)    note {part, content}

A front that dies, fails a message, or gives no sign of life (workers/liveness.py) is replaced, and its
replacement gets everything anew. While one is silent the server is not ready, since its connections get no
answers; a front whose owner is silent is not ready either. The rows of a dead front in the arenas are
reclaimed first, so that no batch waits for them; requests that it relayed to the owner are cancelled, as if
their clients had left; connections that it had not taken yet go to the others (net/accept_balance.py).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from fastserve.backends.model_errors import explain
from fastserve.engine.counters import counters_of
from fastserve.engine.engine import scheduler_of
from fastserve.engine.loader import LoadedEnsemble, LoadedPart, VersionLoader
from fastserve.engine.relay.channel import RelayChannel
from fastserve.engine.relay.server import RelayServer
from fastserve.errors import Kind, ServeError
from fastserve.metrics import Readiness, Registry, names
from fastserve.net.accept_balance import AcceptBalancer
from fastserve.repository.catalog import Catalog
from fastserve.repository.model_config import config_json
from fastserve.repository.version import Version
from fastserve.server.front_messages import CatalogChanges, OwnerModelControl, catalog_message
from fastserve.serving.replication import ReplicatedState, StateRecord, write_records
from fastserve.settings import Listener, Settings
from fastserve.settings.server_settings import PASSWORD_VARIABLE
from fastserve.workers import liveness
from fastserve.workers.control import MESSAGE_FDS, ControlFault, PeerGone
from fastserve.workers.group import Backoff
from fastserve.workers.liveness import Silence
from fastserve.workers.pinning import affinity_variable
from fastserve.workers.process import ENTRY as WORKER_ENTRY
from fastserve.workers.process import WorkerProcess, worker_environment

if TYPE_CHECKING:
    from fastserve._ext.batch_ring import BatchRing


log = logging.getLogger(__name__)

FRONT_ENTRY = (*WORKER_ENTRY[:-1], "fastserve.server.front_process")

ANSWER_TIMEOUT_S = 60.0

RECORD_FDS = MESSAGE_FDS - 1  # a long message takes one for itself

FIRST_RESTART_S, LONGEST_RESTART_S = 0.2, 10.0

# A living front is only some instructions between claiming rows and saying whose they are.
RECLAIM_AGAIN_S = 0.2
MOST_LOOKS = 50  # one without lost rows, else three and one for each request that settles meanwhile


class FrontPool:
    """All front processes but the owner itself; none of them with `frontends: 1`."""

    def __init__(
        self,
        settings: Settings,
        catalog: Catalog,
        host: VersionLoader,
        registry: Registry,
        loads: OwnerModelControl,
        balancer: AcceptBalancer | None,
        started_ns: int,
    ) -> None:
        self._loads = loads
        loads.settle = self.settle
        self.state = loads.state
        self.links = [
            FrontLink(i, settings, catalog, host, registry, balancer, self._answer, self.state, started_ns)
            for i in range(1, settings.front_count)
            if balancer is not None
        ]
        self._changes = CatalogChanges(catalog)
        self._told_metrics: list[str] = []
        self.hear: Callable[[str, str], bool] = lambda dialect, word: False
        """The owner's own Front.hear."""
        self.on_silent: Callable[[], None] = lambda: None
        """Called whenever other fronts than before give no sign of life."""
        self._silent: frozenset[int] = frozenset()
        self._pinging: asyncio.TimerHandle | None = None
        if self.links:
            self.state.publish = self._publish
            self.state.fronts = lambda: frozenset(link.front for link in self.links if link.pid)
            host.on_opened.append(self._open_version)
            host.on_closing.append(self._close_version)

    async def open(self, http: tuple[Listener, ...], grpc: tuple[Listener, ...]) -> None:
        """Start every front on the owner's own ports. Raises ServeError when one does not come up."""
        for link in self.links:
            link.listeners = http, grpc
        if self.links:
            self._ping()
        await asyncio.gather(*(link.start() for link in self.links))

    async def drain(self, grace_s: float) -> None:
        """Let every front finish and exit; one that gives no sign of life is ended meanwhile."""
        await asyncio.gather(*(link.drain(grace_s) for link in self.links))
        if self._pinging is not None:
            self._pinging.cancel()

    @property
    def trouble(self) -> str:
        """The reason why a front counts as silent, "" for none."""
        return next((link.trouble for link in self.links if link.front in self._silent), "")

    def _ping(self) -> None:
        self._pinging = asyncio.get_running_loop().call_later(liveness.SILENCE_LIMITS.ping_s, self._ping)
        for link in self.links:
            link.ping()
        silent = frozenset(link.front for link in self.links if link.silence.long)
        for link in self.links:
            if link.front in silent - self._silent:
                log.warning("%s", link.trouble)
        if silent != self._silent:
            self._silent = silent
            self.on_silent()

    def tell_renewal(self) -> None:
        """Have every front read its certificates again."""
        for link in self.links:
            link.tell({"op": "renew"})

    def tell_catalog(self, *names: str) -> None:
        """Send every front the models that have changed, of those names or of all: some 200 bytes each."""
        if self.links and (message := self._changes.take(*names)) is not None:
            for link in self.links:
                link.tell(message)

    async def settle(self) -> None:
        """Wait until every front has applied the present catalog."""
        self.tell_catalog()
        await asyncio.gather(*(link.settle() for link in self.links))

    async def _publish(self, part: str, records: Sequence[StateRecord]) -> None:
        """Send records to every front, and return when all have applied them."""
        for link in self.links:
            link.replicate([(part, record) for record in records])
        await asyncio.gather(*(link.settle() for link in self.links))

    def tell_custom_metrics(self, lines: list[str]) -> None:
        """Send every front the models' own metrics."""
        if lines or self._told_metrics:
            self._told_metrics = lines
            for link in self.links:
                link.tell({"op": "metrics", "lines": lines})

    async def spread(self, dialect: str, word: str, but: int = 0) -> bool:
        """Pass a dialect's message to all fronts but one, and return whether it was meant for one of them."""
        links = [link for link in self.links if link.front != but]
        return any(await asyncio.gather(*(link.hear(dialect, word) for link in links)))

    async def _answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        if asked["do"] == "spread":
            dialect, word = asked["dialect"], asked["word"]
            meant = self.hear(dialect, word) or await self.spread(dialect, word, but=asked["front"])
            return {"op": "reply", "id": asked["id"], "meant": meant}
        return await self._loads.answer(asked)

    def tell_readiness(self, readiness: Readiness) -> None:
        """Send every front the readiness to show."""
        for link in self.links:
            link.tell({"op": "ready", "readiness": msgspec.to_builtins(readiness)})

    async def _open_version(self, hosted: LoadedPart | LoadedEnsemble) -> None:
        await asyncio.gather(*(link.offer_version(hosted) for link in self.links))

    async def _close_version(self, hosted: LoadedPart | LoadedEnsemble) -> None:
        await asyncio.gather(*(link.close_version(hosted) for link in self.links))


class FrontLink:
    """One other front process: its life, and the requests it has not answered yet."""

    def __init__(
        self,
        front: int,
        settings: Settings,
        catalog: Catalog,
        host: VersionLoader,
        registry: Registry,
        balancer: AcceptBalancer,
        answer: Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]],
        state: ReplicatedState,
        started_ns: int,
    ) -> None:
        self.front = front
        self._answer, self._state, self._started_ns = answer, state, started_ns
        self._answering: set[asyncio.Task[None]] = set()
        self.listeners: tuple[tuple[Listener, ...], tuple[Listener, ...]] = ((), ())
        self._settings, self._catalog, self._host, self._registry = settings, catalog, host, registry
        self._balancer = balancer
        self._process: WorkerProcess | None = None
        self._waiting: dict[tuple[str, int], asyncio.Future[Mapping[str, Any]]] = {}
        self._numbers = itertools.count(1)
        self._came_up, self._ended = False, ""  # the present process; the words of its end
        self._given: dict[int, Version] = {}  # by id, the parts that the present process was told to open
        self.relay_server: RelayServer | None = None  # for requests of the present process
        self._draining = False
        self._tender: asyncio.Task[None] | None = None
        self._readiness: Mapping[str, Any] | None = None
        self.silence = Silence()
        self._listening = False
        self._pinged = self._ponged = 0

    @property
    def trouble(self) -> str:
        """The front and the reason why it counts as silent."""
        return f"front process {self.front}: {self.silence.reason}"

    def ping(self) -> None:
        """Ask for a sign of life, and end the process that has given none for long."""
        answered = self._listening and self._ponged == self._pinged
        self.silence.look(self.pid, answered=answered, owes=self._listening)
        if self.silence.over:
            self._kill(self.silence.reason)
        elif self._listening and answered:
            self._pinged += 1
            self.tell({"op": "ping", "id": self._pinged})

    @property
    def pid(self) -> int:
        """The process's id, 0 when there is none."""
        return self._process.pid if self._process is not None and self._process.running else 0

    async def start(self) -> None:
        """Start the process and keep one running from now on. Raises ServeError when it does not come up."""
        try:
            await self._start()
        finally:
            self._tender = asyncio.get_running_loop().create_task(self._tend())

    async def offer_version(self, hosted: LoadedPart | LoadedEnsemble) -> None:
        """Open the version there. A front that cannot is replaced, and gets everything then."""
        try:
            await self._open_version(hosted)
        except ServeError as error:
            self._kill(f"{hosted.version!r} could not be opened: {error.message}")

    async def close_version(self, hosted: LoadedPart | LoadedEnsemble) -> None:
        """The front lets its requests on the version finish and closes its queue."""
        key = id(hosted)
        if key in self._given and self.pid:  # what a dead one held is reclaimed
            try:
                await self._ask("closed", key, {"op": "close", "id": key})
            finally:  # until here the requests that it relays find the version
                self._given.pop(key, None)

    async def hear(self, dialect: str, word: str) -> bool:
        """Pass a dialect's message to the front, and return whether it was meant there."""
        key = next(self._numbers)
        message = {"op": "hear", "id": key, "dialect": dialect, "word": word}
        try:
            heard = await self._ask("heard", key, message, timeout_s=ANSWER_TIMEOUT_S)
        except ServeError:
            return False
        return bool(heard["meant"])

    async def settle(self) -> None:
        """Wait until the front has done everything sent so far, or is gone."""
        key = next(self._numbers)
        try:
            await self._ask("settled", key, {"op": "settle", "id": key}, timeout_s=ANSWER_TIMEOUT_S)
        except ServeError as error:
            self._kill(error.message)

    def replicate(self, records: Sequence[tuple[str, StateRecord]]) -> None:
        """Send records without waiting."""
        for message, fds in write_records(records, RECORD_FDS):
            self.tell(message, fds)

    async def drain(self, grace_s: float) -> None:
        """Ask the process to finish, and end it when it does not."""
        self._draining = True
        if self._tender is not None:
            self._tender.cancel()
            await asyncio.gather(self._tender, return_exceptions=True)
        if self._process is not None:
            self.tell({"op": "drain", "grace_s": grace_s})
            await self._process.stop(grace_s + 5.0)

    def tell(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Send without waiting. A front that is gone is replaced, and its replacement gets everything."""
        if message["op"] == "ready":
            self._readiness = message
        if self._process is None or not self._process.running:
            return
        try:
            self._process.send(message, fds)
        except PeerGone:
            pass
        except ControlFault as fault:
            self._kill(str(fault))

    # --- one life

    async def _start(self) -> None:
        secret = {name: os.environ[name] for name in (PASSWORD_VARIABLE,) if name in os.environ}
        place = affinity_variable(self._host.pinning.front(self.front))
        environment = worker_environment(1, {**secret, **place})
        process = WorkerProcess(environment, self._hear, self._end, entry=FRONT_ENTRY, trusted=True)
        try:
            process.spawn()
        except OSError as error:
            raise ServeError(
                Kind.UNAVAILABLE, f"a front process cannot be started: {error.strerror}"
            ) from error
        self._process, self._given, self._came_up = process, {}, False
        self._pinged = self._ponged
        http, grpc = self.listeners
        channel = RelayChannel.create(self._settings.memory_bytes)
        self.relay_server = RelayServer(channel, self._host.engine, self._find, self._host.callbacks.want)
        self.relay_server.open()
        relay, fds = channel.describe()
        start = {
            "op": "start",
            "front": self.front,
            "settings": msgspec.to_builtins(self._settings),
            "http": msgspec.to_builtins(http),
            "grpc": msgspec.to_builtins(grpc),
            "relay": relay,
            "started_ns": self._started_ns,
        }
        self.tell(start, [self._registry.fd, *fds, *self._balancer.fds()])
        self.replicate(self._state.records())  # at once: changes from now on follow
        for hosted in self._host.loaded():
            await self._open_version(hosted)
        self.tell(catalog_message(self._catalog))
        if self._readiness is not None:
            self.tell(self._readiness)
        places = self._balancer.places()
        listen = {"op": "listen", "places": list(places)}
        await self._ask("listening", 0, listen, list(places.values()), timeout_s=ANSWER_TIMEOUT_S)
        self._came_up = self._listening = True

    def _find(self, key: int) -> Version | None:
        """Return the version whose id the process was given."""
        return next((version for version in self._given.values() if id(version) == key), None)

    async def _open_version(self, hosted: LoadedPart | LoadedEnsemble) -> None:
        version, key = hosted.version, id(hosted)
        if not self.pid or key in self._given or hosted.closing:
            return
        self._given[key] = version
        counters = counters_of(version)
        message: dict[str, Any] = {"geometry": None}
        fds = [counters.memory.fd]
        if isinstance(hosted, LoadedPart):
            message, arena_fds = hosted.arena.fds_for_front(self.front)
            fds += arena_fds
        message |= {
            "op": "open",
            "id": key,
            "version": id(version),
            "relayed": isinstance(hosted, LoadedEnsemble) or hosted.relayed,
            "model": version.model,
            "number": version.number,
            "folder": str(version.folder),
            "config": config_json(version.config),
            "inputs": {n: [s.dtype.name, s.shape, s.columns] for n, s in version.inputs.items()},
            "outputs": {n: [s.dtype.name, s.shape, s.columns] for n, s in version.outputs.items()},
            "load_s": counters.load_s,
            "on_device": isinstance(hosted, LoadedPart) and hosted.queue.on_device,
            "cached": scheduler_of(version).cache_number(),
            "text": msgspec.to_builtins(version.text),
        }
        await self._ask("opened", key, message, fds, timeout_s=ANSWER_TIMEOUT_S)

    async def _ask(
        self,
        answer: str,
        key: int,
        message: dict[str, Any],
        fds: Sequence[int] = (),
        timeout_s: float | None = None,
    ) -> Mapping[str, Any]:
        if not self.pid:
            raise ServeError(Kind.UNAVAILABLE, f"front process {self.front} is not running")
        future = self._waiting[answer, key] = asyncio.get_running_loop().create_future()
        self.tell(message, fds)
        try:
            await asyncio.wait({future}, timeout=timeout_s)
            if not future.done():
                raise ServeError(Kind.UNAVAILABLE, f"front process {self.front} does not answer")
            found: Mapping[str, Any] = future.result()
            return found
        finally:
            self._waiting.pop((answer, key), None)

    def _hear(self, message: dict[str, Any]) -> None:
        if message["op"] == "ask":
            task = asyncio.get_running_loop().create_task(self._tell_answer(self._process, message))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
            return
        if message["op"] == "note":
            self._state.noted(message["part"], self.front, json.loads(message["content"]))
            return
        if message["op"] == "pong":
            self._ponged = int(message["id"])
            return
        future = self._waiting.get((str(message.get("op")), int(message.get("id", 0))))
        if future is not None and not future.done():
            future.set_result(message)

    async def _tell_answer(self, asker: WorkerProcess | None, message: dict[str, Any]) -> None:
        told = await self._answer({**message, "front": self.front})
        if asker is self._process:  # not the next one in its place, which has not asked
            self.tell(told)

    def _end(self, words: str) -> None:
        if self.relay_server is not None:
            self.relay_server.close()
            self.relay_server = None
        self._given, self._listening = {}, False
        for (answer, _), future in self._waiting.items():
            if future.done():
                continue
            if answer == "closed":
                future.set_result({})  # what it held is reclaimed below
            else:
                future.set_exception(
                    ServeError(Kind.UNAVAILABLE, f"front process {self.front} ended: {words}")
                )
        self._balancer.bury(self.front)
        for ring in self._rings():
            ring.reclaim_front(self.front)
        self._state.front_ended(self.front)
        self._ended = words

    def _kill(self, reason: str) -> None:
        if self._process is not None:
            self._process.kill(reason)

    # --- and the next

    async def _tend(self) -> None:
        backoff = Backoff(FIRST_RESTART_S, died_cap_s=LONGEST_RESTART_S)
        while self._process is not None:
            born = time.monotonic()
            await self._process.wait()
            lived_s = time.monotonic() - born
            self._registry.counters(names.FRONT_RESTARTS).of().add()
            self._registry.bury(self.front)
            try:
                # Before the new one claims the same number.
                pause = asyncio.sleep(backoff.after_death(lived_s))
                await asyncio.gather(self._reclaim_and_tell(), pause)
                await self._start()
            # Whatever goes wrong here, the next try must come: nobody else would ever start this front.
            except Exception as error:
                trace = error.__cause__ if isinstance(error, ServeError) else error
                log.error(
                    "front process %d could not be started: %s", self.front, explain(error), exc_info=trace
                )
                self._kill(explain(error))

    async def _reclaim_and_tell(self) -> None:
        """Reclaim a dead front's rows and log its end, unless its start failed: `start` reports that."""
        lost = await self._reclaim()
        if self._came_up and not self._draining:
            over = f", over {lost} rows of batches" if lost else ""
            text = "front process %d ended: %s%s; another is started"
            log.error(text, self.front, self._ended, over)

    async def _reclaim(self) -> int:
        """Free the front's rows and return the number of rows of batches that were lost."""
        rows, searches = 0, [LostRows(ring, self.front) for ring in self._rings()]
        for _ in range(MOST_LOOKS):
            await asyncio.sleep(RECLAIM_AGAIN_S)
            rows += sum(search.look() for search in searches)
            if not any(search.suspected for search in searches):
                break
        return rows

    def _rings(self) -> list[BatchRing]:
        return [hosted.queue.ring for hosted in self._host.hosted.values()]


class LostRows:
    """Rows that a dead front claimed in one batch ring and did not say whose they are.

    Rows that a living process is about to account for look the same, for much less than RECLAIM_AGAIN_S. So
    a suspected batch is sealed: by the next look all rows in it have been said whose they are, and from then
    on each living request moves its word once. It goes on without the rows once two of these looks find the
    same number of them and the batch unchanged. tests/exhaustive tries every order.
    """

    def __init__(self, ring: BatchRing, front: int) -> None:
        self._ring, self._front = ring, front
        self.suspected: dict[tuple[int, int], tuple[int, tuple[str, int, int, int]] | None] | None = None
        """(slot, generation) -> rows that look lost and the slot's state then, None until a second look; None
        before the first look."""

    def look(self) -> int:
        """Look RECLAIM_AGAIN_S after the death or the last look; return the number of rows found lost."""
        ring, before, lost = self._ring, self.suspected, 0
        ring.reclaim_front(self._front)
        self.suspected = {}
        for slot, generation, rows in ring.lost():
            batch, now = (slot, generation), (rows, ring.describe(slot))
            if before is None:
                ring.seal(slot << 16)
                self.suspected[batch] = None
            elif batch in before and (not rows or before[batch] != now):
                self.suspected[batch] = now
            elif batch in before and ring.forgive(slot, generation, rows):
                lost += rows
        return lost
