"""Places of workers that Ray starts, with a placer that a test plays: what is asked for, and when again."""

from __future__ import annotations

import importlib.metadata
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fastserve._ext.remote_batches import MessageKind
from fastserve.errors import ConfigError
from fastserve.repository.check import explain
from fastserve.settings import Settings
from fastserve.settings.model_options import PlacementOptions, RayPlacement, WorkerRange
from fastserve.workers.control import ControlChannel, PeerGone
from fastserve.workers.remote.connections import PeerState, WorkerConnections
from fastserve.workers.remote.main import WorkerOrder
from fastserve.workers.remote.placer_process import NOT_GIVEN, check_ray
from fastserve.workers.remote.places import (
    LOOK_S,
    REPLACE_S,
    PlacerGone,
    PlacerLink,
    ScalePolicy,
    WorkerLaunch,
    WorkerPlaces,
)
from fastserve.workers.remote.protocol import pack_message
from tests.server.rig import write_model
from tests.workers.remote.rig import Player, answer, bench, floats, welcome

RAY = RayPlacement(workers=WorkerRange(1, 4), queue_target_s=0.1, down_after_s=60.0)


def test_more_workers_are_wanted_at_once_and_fewer_after_a_while() -> None:
    policy = ScalePolicy(RAY)
    assert policy.decide(0, 0, 0.0, 0.0) == 1
    assert policy.decide(1, 1, 0.05, 1.0) == 1
    assert policy.decide(2, 1, 0.25, 1.0) == 3  # alive x queue seconds / target
    assert policy.decide(3, 1, 99.0, 1.0) == 4  # and no more than max
    for now in range(4, 63):
        assert policy.decide(now, 4, 0.0, 1.9) == 4  # busy ones count, though nothing waits
    assert policy.decide(63, 4, 0.0, 0.0) == 2  # the most that was needed meanwhile
    assert policy.decide(64, 2, 0.0, 0.0) == 2
    assert policy.decide(122, 2, 0.15, 1.0) == 3
    assert policy.decide(181, 3, 0.0, 0.0) == 3
    assert policy.decide(182, 3, 0.0, 0.0) == 1


class Placer:
    """The placer's end of one line, in the hands of a test, and a clock."""

    def __init__(self, error: str = "") -> None:
        self.name, self.now = f"test-placer-{secrets.token_hex(8)}", 100.0
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("\0" + self.name)
        self._listener.listen()
        self._greeting = threading.Thread(target=self._greet, args=(error,))
        self._greeting.start()

    def _greet(self, error: str) -> None:
        line, _ = self._listener.accept()
        self.line = ControlChannel(line, owner=True, trusted=True)
        self.line.send({"op": "greeting", "address": "127.0.0.1", "error": error})
        line.settimeout(0.0)

    def link(self) -> PlacerLink:
        try:
            return PlacerLink(self.name, 30.0)
        finally:
            self._greeting.join()

    def accept(self, error: str = "") -> ControlChannel:
        """Be the next placer; returns the line to the one before."""
        former = self.line
        self._listener.settimeout(30.0)
        self._greet(error)
        return former

    def asked(self) -> list[tuple[str, int]]:
        """Everything that the runner has asked for since the last time."""
        found = []
        while True:
            try:
                message = self.line.receive().message
            except (BlockingIOError, PeerGone):
                return found
            found.append((message["op"], message["number"]))

    def close(self) -> None:
        self.line.close()
        self._listener.close()


class Rig:
    """Places of a version, the connections of its workers, and a placer."""

    def __init__(self, workers: WorkerRange) -> None:
        self.placer = Placer()
        self.connections = WorkerConnections("127.0.0.1:0", None, welcome(), None, answer_bytes=4096)
        order = WorkerOrder(self.connections.address, "", "", once=True)
        placement = RayPlacement(workers=workers, queue_target_s=0.1, down_after_s=10.0)
        launch = WorkerLaunch(order, b"", placement)
        self.places = WorkerPlaces(
            self.placer.link(), launch, self.connections, clock=lambda: self.placer.now
        )
        self.players: list[Player] = []

    def look(self, after_s: float = LOOK_S, queue_s: float = 0.0) -> list[tuple[str, int]]:
        """What is asked of the placer at the next look."""
        self.placer.now += after_s
        self.connections.turn()
        self.places.turn(lambda: queue_s)
        return self.placer.asked()

    def connect(self, place: int) -> Player:
        """The worker of a place connects, and gets ready."""
        player = Player(self.connections.address)
        self.players.append(player)
        before = len(self.connections.ready)
        player.hello(place=place)
        player.expect(self.connections, MessageKind.WELCOME)
        player.loaded()
        self.until(lambda: any(p.place == place and p.model for p in self.connections.peers.values()))
        self.connections.go(dense=True)
        player.expect(self.connections, MessageKind.GO)
        player.send(pack_message(MessageKind.READY))
        self.until(lambda: len(self.connections.ready) > before)
        return player

    def until(self, true: Callable[[], bool]) -> None:
        for _ in range(3000):
            if true():
                return
            self.connections.wait(0.01)
            self.connections.turn()
        raise AssertionError("it never came to be so")

    def close(self) -> None:
        for player in self.players:
            player.close()
        self.connections.close()
        self.places.close()
        self.placer.close()


@pytest.fixture
def make() -> Iterator[Callable[[int, int], Rig]]:
    made: list[Rig] = []

    def rig(least: int, most: int) -> Rig:
        made.append(Rig(WorkerRange(least, most)))
        return made[-1]

    yield rig
    for one in made:
        one.close()


@pytest.mark.logs_errors
def test_a_worker_that_ends_is_started_again_after_a_while(make: Callable[[int, int], Rig]) -> None:
    it = make(2, 2)
    assert it.look() == [("place", 1), ("place", 2)]
    it.placer.line.send({"op": "placed", "number": 1, "node": "a"})
    it.placer.line.send({"op": "ended", "number": 2, "reason": "no module named fastserve"})
    assert it.look() == []
    assert (it.places.failed_starts, it.places.trouble.partition(": ")[2]) == (1, "no module named fastserve")
    assert it.look(0.15) == [("place", 3)]
    it.placer.line.send({"op": "ended", "number": 2, "reason": "of a life that is over"})
    it.placer.line.send({"op": "ended", "number": 3, "reason": "again"})
    assert it.look() == []
    assert it.look(0.15) == []  # twice as long as before
    assert it.look(0.15) == [("place", 4)]


@pytest.mark.logs_errors
def test_what_ray_says_of_an_actor_ends_its_connection_and_the_other_way_round(
    make: Callable[[int, int], Rig],
) -> None:
    it = make(2, 2)
    it.look()
    one, two = it.connect(1), it.connect(2)
    it.look()
    it.placer.line.send({"op": "ended", "number": 1, "reason": "its node has died"})
    it.look()
    assert [peer.place for peer in it.connections.ready] == [2]
    one.expect(it.connections, MessageKind.BYE)
    assert it.look(1.0) == [("place", 3)]
    it.connections.drop(it.connections.ready[0], "a test says so")
    assert it.look() == [("remove", 2)]
    assert it.look(1.0) == [("place", 4)]
    two.expect(it.connections, MessageKind.BYE)


def test_a_worker_that_begins_anew_keeps_its_place(make: Callable[[int, int], Rig]) -> None:
    """With the model's environment, once it knows the model."""
    it = make(1, 1)
    it.look()
    first = Player(it.connections.address)
    first.hello(place=1)
    first.expect(it.connections, MessageKind.WELCOME)
    assert it.look() == []
    first.close()
    it.until(lambda: not it.connections.peers)
    assert it.look() == []
    it.connect(1)
    assert it.look() == []
    assert [peer.place for peer in it.connections.ready] == [1]


def test_workers_that_do_not_serve_yet_are_given_up_first(make: Callable[[int, int], Rig]) -> None:
    it = make(1, 3)
    assert it.look() == [("place", 1)]
    it.connect(1)
    assert it.look(queue_s=0.3) == [("place", 2), ("place", 3)]
    it.connect(3)
    assert it.look() == []
    assert it.look(10.0) == [("remove", 2), ("remove", 3)]
    assert [peer.place for peer in it.connections.peers.values()] == [1]
    assert it.places.wanted == 1


@pytest.mark.logs_errors
def test_workers_of_a_placer_that_leaves_serve_until_those_of_the_next_one_do(
    make: Callable[[int, int], Rig],
) -> None:
    it = make(1, 1)
    it.look()
    old = it.connect(1)
    assert it.look() == []
    it.placer.line.send({"op": "leaving"})
    it.look()
    former = it.placer.accept("Ray (auto) cannot be used: no node of it is here")
    it.look(), it.look(0.5)
    assert it.places.trouble.endswith("no node of it is here")
    assert it.places.replacing
    it.look(1.0)
    it.placer.accept()
    assert it.look() == [("place", 2)]
    assert [peer.place for peer in it.connections.ready] == [1]
    new = it.connect(2)
    assert it.look() == []
    assert [peer.place for peer in it.connections.ready] == [2]
    assert not it.places.replacing
    old.expect(it.connections, MessageKind.BYE)
    with pytest.raises(PeerGone):
        former.receive()
    assert new.receive(it.connections, limit_s=0.05) is None


@pytest.mark.logs_errors
def test_workers_of_a_placer_that_leaves_may_be_lost_before_the_next_ones_come(
    make: Callable[[int, int], Rig],
) -> None:
    it = make(1, 1)
    it.look()
    it.connect(1)
    it.placer.line.send({"op": "leaving"})
    it.look()
    former = it.placer.accept()
    former.close()
    it.connections.drop(it.connections.ready[0], "a test says so")
    assert it.look() == [("place", 2)]
    assert it.places.replacing
    assert it.look(REPLACE_S) == []
    assert not it.places.replacing  # and the runner ends, as without its last worker
    it.connect(2)
    assert it.look() == []


def test_without_its_placer_there_are_no_workers(make: Callable[[int, int], Rig]) -> None:
    it = make(1, 1)
    it.placer.line.close()
    with pytest.raises(PlacerGone):
        it.look()


def test_a_worker_that_is_no_longer_needed_answers_what_it_has() -> None:
    with bench() as it:
        leaving, staying = it.player(), it.player()
        lease = it.put([1, 2])
        batch = leaving.expect(it.connections, MessageKind.BATCH)
        peer = next(peer for peer in it.connections.ready if peer.flights)
        it.connections.retire(peer)
        assert peer.state is PeerState.RETIRING
        other = it.put([3, 4])
        late = staying.expect(it.connections, MessageKind.BATCH)
        leaving.send(answer(batch, floats([2, 4])))
        staying.send(answer(late, floats([6, 8])))
        it.until(lambda: not it.runner.flying)
        assert it.result(lease) == floats([2, 4])
        assert it.result(other) == floats([6, 8])


def test_a_cluster_that_cannot_be_used_says_so() -> None:
    placer = Placer("Ray (auto) cannot be used: nobody is there")
    with pytest.raises(ConfigError, match=r"Ray \(auto\) cannot be used: nobody is there"):
        placer.link()
    placer.close()
    with pytest.raises(ConfigError, match="there is no placer"):
        PlacerLink("nobody-has-this-name", 0.0)


def test_ray_is_there_and_new_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    versions: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(ConfigError, match=r"ray is not installed: pip install 'ray>=2.40' pyzmq"):
        check_ray()
    versions["ray"] = "2.9.3"
    with pytest.raises(ConfigError, match=r"ray is 2\.9\.3 here, allowed: 2\.40 or later"):
        check_ray()
    versions["ray"] = "2.60.0"
    with pytest.raises(ConfigError, match="pyzmq is not installed"):
        check_ray()
    versions["pyzmq"] = "27.1"
    check_ray()


def test_a_placement_is_on_ray_or_for_whoever_connects(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="exactly one"):
        PlacementOptions()
    demand = RayPlacement(num_gpus=0.5, memory_mb=2, resources={"disk": 3.0}).demand
    assert demand == {"CPU": 1.0, "GPU": 0.5, "memory": 2097152.0, "disk": 3.0}
    write_model(tmp_path, instances={"min": 2, "max": 5}, placement={"ray": {}})
    (report,) = explain(Settings(repository=str(tmp_path))).models
    assert report.problems == [NOT_GIVEN]
    assert "2 to 5 workers on nodes of a Ray cluster" in report.facts[1]
    bad: Any = {"ray": {"num_cpus": -1}}
    write_model(tmp_path, placement=bad)
    (report,) = explain(Settings(repository=str(tmp_path))).models
    assert "placement.ray.num_cpus" in report.problems[0]
