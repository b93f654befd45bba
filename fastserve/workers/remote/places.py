"""The places of one version's remote workers in a Ray cluster, as its runner keeps them.

    runner                                                placer (placer.py), which alone speaks to Ray
      | <-- greeting {address, error} ---------------------|   the address by which Ray knows this machine
      | --- place {number, order, key, options, demand} -->|   an actor that starts this worker
      | <-- waits {number, reason} ------------------------|   no node has room for it yet
      | <-- placed {number, node} -------------------------|
      | <-- ended {number, reason} ------------------------|   the worker, its actor or its node
      | --- remove {number} ------------------------------>|   the actor ends soon
      | <-- leaving ---------------------------------------|   it can place nothing more; the next placer will

Ray starts nothing again: how many workers there are, when one that ended is started anew, and which ends when
fewer are enough, is decided here. The line's end ends all of them. When a placer leaves, its workers serve
until those of the next one do.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fastserve._ext.remote_batches import RemotePeer
from fastserve.errors import ConfigError
from fastserve.settings.model_options import RayPlacement
from fastserve.workers.control import ControlChannel, ControlFault
from fastserve.workers.group import Backoff
from fastserve.workers.remote.connections import PeerState, WorkerConnections
from fastserve.workers.remote.main import WorkerOrder

log = logging.getLogger(__name__)

GREETING_S = 120.0  # for a placer that is started, and for Ray
LOOK_S = 0.1
CONNECT_S = 1.0  # between two tries to reach the next placer
REPLACE_S = (
    25.0  # for the next placer's workers: Ray ends the others after some 15 s, and requests wait for 10
)
BUSY_S = 2.0  # over which workers at work are averaged
MOST_FAILED_STARTS = 3  # of a version's first workers
_CREDENTIALS = struct.Struct("3i")


class PlacerGone(Exception):
    """The placer has ended, and with it all workers that it has placed."""


class PlacerLink:
    """The runner's line to the server's placer. Owns its socket; `address` is this machine's, for others."""

    def __init__(self, name: str, limit_s: float = GREETING_S, *, greet: bool = True) -> None:
        """Connect, and wait for Ray; without `greet` the greeting is left to `receive`. Raises
        ConfigError."""
        until_s = time.monotonic() + limit_s
        self.name, self.address = name, ""
        self._control = ControlChannel(_connect(name, until_s), owner=True, trusted=True)
        self.fileno = self._control.fileno
        if not greet:
            return
        greeting = self.wait(until_s - time.monotonic())
        self.address = str(greeting["address"])
        if greeting["error"]:
            self.close()
            raise ConfigError(str(greeting["error"]))

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message. Raises PlacerGone."""
        try:
            self._control.send(message)
        except ControlFault as fault:
            raise PlacerGone(str(fault)) from None

    def receive(self) -> dict[str, Any] | None:
        """Return a message that has arrived, None where there is none. Raises PlacerGone."""
        try:
            return self._control.receive().message
        except BlockingIOError:
            return None
        except ControlFault as fault:
            raise PlacerGone(str(fault)) from None

    def close(self) -> None:
        """Close the line: the placer ends every worker that it has placed for it."""
        self._control.close()

    def wait(self, limit_s: float = GREETING_S) -> dict[str, Any]:
        """Return the next message. Raises ConfigError, and the line is closed, where none comes."""
        until_s = time.monotonic() + limit_s
        while time.monotonic() < until_s:
            try:
                found = self.receive()
            except PlacerGone:
                break
            if found is not None:
                return found
            time.sleep(0.01)
        self.close()
        raise ConfigError("placement.ray: the placer, which is the server's client of Ray, does not answer")


def _connect(name: str, until_s: float) -> socket.socket:
    """Connect to the placer of this name, once there is one. Raises ConfigError."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    while True:
        try:
            made.connect("\0" + name)
            break
        except OSError as error:
            if time.monotonic() > until_s:
                made.close()
                raise ConfigError(f"placement.ray: there is no placer: {error.strerror}") from None
            time.sleep(0.05)
    check_peer(made)
    made.setblocking(False)
    return made


def check_peer(line: socket.socket) -> None:
    """Close a line whose other end is another user's, who may have taken its name. Raises ConfigError."""
    _, uid, _ = _CREDENTIALS.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid != os.geteuid():
        line.close()
        raise ConfigError("placement.ray: the other end of the line to the placer is another user's")


class ScalePolicy:
    """How many workers a version is to have: more at once when rows wait for longer than `queue_target_s`,
    fewer after `down_after_s` in which fewer would have done."""

    def __init__(self, placement: RayPlacement) -> None:
        self._least, self._most = placement.workers.min, placement.workers.max
        self._target_s, self._down_s = placement.queue_target_s, placement.down_after_s
        self._enough, self._since_s = 0, 0.0  # the most that was needed since then, less than wanted
        self.wanted = self._least

    def decide(self, now: float, alive: int, queue_s: float, busy: float) -> int:
        """Return the number of workers. `queue_s` is how long the rows that wait will take, `busy` how many
        workers have had a batch lately, on average: an empty queue does not say that they were idle."""
        needed = max(math.ceil(alive * queue_s / self._target_s), math.ceil(busy - 0.05))
        needed = min(max(needed, self._least), self._most)
        if needed >= self.wanted:
            self.wanted, self._enough, self._since_s = needed, 0, now
            return self.wanted
        self._enough = max(self._enough, needed)
        if now - self._since_s >= self._down_s:
            self.wanted, self._enough, self._since_s = self._enough, 0, now
        return self.wanted


@dataclass(slots=True, eq=False)
class WorkerPlace:
    """One worker that the version wants, through all its lives. `number` is that of the present life, 0
    between two."""

    backoff: Backoff
    number: int = 0
    node: str = ""
    starts_s: float = 0.0
    ready_s: float = 0.0
    peer: RemotePeer | None = None


@dataclass(slots=True)
class WorkerLaunch:
    """Order, key and resources that every worker of a version is started with."""

    order: WorkerOrder
    key: bytes
    placement: RayPlacement
    restarts: Backoff = field(default_factory=Backoff)

    def message(self, number: int) -> dict[str, Any]:
        """Return the message that has a worker placed."""
        order = msgspec.structs.replace(self.order, place=number)
        return {
            "op": "place",
            "number": number,
            "order": msgspec.json.encode(order).decode(),
            "key": self.key.decode(),
            "strategy": self.placement.scheduling_strategy,
            "demand": self.placement.demand,
        }


class WorkerPlaces:
    """The remote workers of one version that Ray places. `turn` is to be called every LOOK_S, and whenever
    the line has something to read."""

    def __init__(
        self,
        link: PlacerLink,
        launch: WorkerLaunch,
        connections: WorkerConnections,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failed_starts, self.trouble = 0, ""  # in a row, before any was ready; why the last is missing
        self._launch, self._connections, self._clock = launch, connections, clock
        self._name, self._greeted, self._connect_s = link.name, True, 0.0
        self._link: PlacerLink | None = link  # None: between two placers
        self._former: list[PlacerLink] = []  # to placers that leave
        self._outgoing: list[RemotePeer] = []  # workers that those have placed
        self._replaced_s = 0.0  # when the next placer's are to serve
        self._policy = ScalePolicy(launch.placement)
        self._places: list[WorkerPlace] = []
        self._retiring: list[RemotePeer] = []
        self._last = 0
        self._busy = self._looked_s = 0.0

    def descriptors(self) -> list[int]:
        """Return descriptors that are readable when `turn` has something to do."""
        links = [*self._former, *([self._link] if self._link is not None else [])]
        return [link.fileno() for link in links]

    @property
    def wanted(self) -> int:
        """How many workers the version is to have."""
        return self._policy.wanted

    @property
    def due(self) -> bool:
        """Whether `turn` is due by the clock."""
        return self._clock() >= self._looked_s + LOOK_S

    @property
    def replacing(self) -> bool:
        """Whether workers are on their way because their placer has left."""
        return self._clock() < self._replaced_s

    def turn(self, queue_s: Callable[[], float]) -> None:
        """Take what the placer says, and start and end workers. `queue_s` returns how long the rows that wait
        will take. Raises PlacerGone."""
        now = self._clock()
        while self._link is not None and (message := self._link.receive()) is not None:
            self._hear(message, now)
        self._hear_former()
        if not self.due:
            return
        self._match(now)
        ready, waits_s = self._connections.ready, queue_s()
        share = min((now - self._looked_s) / BUSY_S, 1.0)
        self._busy += share * (sum(bool(peer.flights) for peer in ready) - self._busy)
        self._looked_s, before = now, self.wanted
        if self._policy.decide(now, len(ready), waits_s, self._busy) != before:
            log.info("%d workers are wanted, after %d: rows wait for %.2f s", self.wanted, before, waits_s)
        self._replace(now)
        if self._greeted:
            self._fill(now)

    def close(self) -> None:
        """End all workers."""
        for link in [*self._former, *([self._link] if self._link is not None else [])]:
            link.close()

    def _say(self, message: Mapping[str, Any]) -> None:
        if self._link is not None:
            self._link.send(message)

    def _hear(self, message: Mapping[str, Any], now: float) -> None:
        assert self._link is not None
        if message["op"] == "leaving":
            log.warning("the placer leaves: another is to place %d workers", self.wanted)
            self._outgoing += [place.peer for place in self._places if place.peer is not None]
            self._places.clear()
            self._former.append(self._link)
            self._link, self._greeted, self._replaced_s = None, False, now + REPLACE_S
        elif message["op"] == "greeting":
            self._greeted, self.trouble = not message["error"], str(message["error"])
            if self.trouble:
                self._link.close()
                self._link, self._connect_s = None, now + CONNECT_S
        else:
            self._take(message)

    def _hear_former(self) -> None:
        """Read what placers that leave say; of their workers the connections know."""
        for link in list(self._former):
            try:
                while link.receive() is not None:
                    pass
            except PlacerGone:
                self._former.remove(link)
                link.close()

    def _replace(self, now: float) -> None:
        """Connect to the next placer. Once as many of its workers serve as are wanted, the others may go."""
        if self._link is None and now >= self._connect_s:
            self._connect_s = now + CONNECT_S
            with suppress(ConfigError):  # there is none yet
                self._link = PlacerLink(self._name, 0.0, greet=False)
        serving = sum(place.ready_s > 0 for place in self._places)
        self._replaced_s = 0.0 if serving else self._replaced_s
        if self._outgoing and serving >= self.wanted:
            for peer in self._outgoing:
                if peer.state is not PeerState.RETIRING:
                    self._connections.retire(peer)
        self._outgoing = [peer for peer in self._outgoing if peer.identity in self._connections.peers]
        while self._former and self._greeted and not self._outgoing:
            self._former.pop().close()

    def _take(self, message: Mapping[str, Any]) -> None:
        place = next((one for one in self._places if one.number == message["number"]), None)
        if place is None:  # of one that was ended before
            return
        if message["op"] == "placed":
            place.node, self.trouble = str(message["node"]), ""
            log.info("Ray has placed worker %d on node %s", place.number, place.node)
        elif message["op"] == "waits":
            self.trouble = str(message["reason"])
            log.warning("worker %d waits: %s", place.number, self.trouble)
        else:  # ended
            self._end(place, str(message["reason"]))

    def _match(self, now: float) -> None:
        """Find the peer of each place, and end places whose peer is lost. One that has not loaded yet may
        come again: it begins anew with the model's environment. If it does not, Ray tells of its end."""
        peers = {peer.place: peer for peer in self._connections.peers.values()}
        for place in self._places:
            known, place.peer = place.peer, peers.get(place.number) if place.number else None
            if place.peer is not None and place.peer.state is PeerState.READY and not place.ready_s:
                place.ready_s, self.failed_starts = now, 0
            if known is not None and known.model is not None and place.peer is None:
                self._say({"op": "remove", "number": place.number})
                self._end(place, "its connection has ended")
        for peer in [peer for peer in self._retiring if not peer.flights]:
            self._retiring.remove(peer)
            self._let_go(peer)

    def _end(self, place: WorkerPlace, reason: str) -> None:
        """End a life of a place; the next begins after a while."""
        now, backoff = self._clock(), place.backoff
        self.trouble = f"its worker on node {place.node or '?'} ended: {reason}"
        log.error("worker %d on node %s ended: %s", place.number, place.node or "?", reason)
        self.failed_starts += not place.ready_s
        wait_s = backoff.after_death(now - place.ready_s) if place.ready_s else backoff.after_failure()
        peer = next((p for p in self._connections.peers.values() if p.place == place.number), None)
        place.number, place.node, place.peer, place.ready_s, place.starts_s = 0, "", None, 0.0, now + wait_s
        if peer is not None:
            self._connections.drop(peer, f"Ray says: {reason}")

    def _fill(self, now: float) -> None:
        """Have as many places as are wanted, and a worker at each."""
        while len(self._places) < self.wanted:
            backoff = self._launch.restarts
            self._places.append(WorkerPlace(Backoff(backoff.first_s, backoff.cap_s)))
        while len(self._places) > self.wanted:
            self._give_up(min(self._places, key=_worth))
        for place in self._places:
            if not place.number and now >= place.starts_s:
                self._last += 1
                place.number = self._last
                self._say(self._launch.message(place.number))

    def _give_up(self, place: WorkerPlace) -> None:
        self._places.remove(place)
        if place.peer is not None and place.peer.flights:
            self._connections.retire(place.peer)
            self._retiring.append(place.peer)
        elif place.peer is not None:
            self._let_go(place.peer)
        elif place.number:
            self._say({"op": "remove", "number": place.number})

    def _let_go(self, peer: RemotePeer) -> None:
        if peer.identity in self._connections.peers:
            self._connections.retire(peer)
        self._say({"op": "remove", "number": peer.place})


def _worth(place: WorkerPlace) -> tuple[bool, int, int]:
    """Order places by how much is lost with them: those that do not serve yet first, then those with few
    batches."""
    peer = place.peer
    return bool(place.ready_s), len(peer.flights) if peer is not None else 0, -place.number
