"""Connections of workers that a test plays: sound ones, those that break the protocol, and strangers."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from fastserve._ext.remote_batches import (
    PROTOCOL,
    MessageKind,
    RemoteBatch,
    WireMessage,
    read_messages,
)
from fastserve.errors import ConfigError
from fastserve.settings.model_options import read_address
from fastserve.workers.remote import connections as hubs
from fastserve.workers.remote.connections import WorkerConnections
from fastserve.workers.remote.keys import make_keys, read_key, write_keys
from fastserve.workers.remote.protocol import Failure, Words, pack_message, read_body
from tests.workers.remote.rig import Player, answer, bench, damaged, floats, welcome

(HELLO,) = WireMessage(MessageKind.HELLO).pack()


@pytest.fixture
def connections() -> Iterator[WorkerConnections]:
    made = WorkerConnections("127.0.0.1:0", None, welcome(), None, answer_bytes=4096)
    yield made
    made.close()


@pytest.fixture
def players(connections: WorkerConnections) -> Iterator[Any]:
    made: list[Player] = []

    def make(**options: Any) -> Player:
        made.append(Player(connections.address, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_worker_is_welcomed(connections: WorkerConnections, players: Any) -> None:
    player = players()
    player.hello(node="here")
    assert bytes(player.expect(connections, MessageKind.WELCOME).parts[0]).startswith(b'{"key":"k"')
    assert [peer.name for peer in connections.peers.values()] == ["here:1"]


@pytest.mark.parametrize(
    ("greeting", "words"),
    [
        ({"fastserve": "9.9"}, "it is fastserve 9.9"),
        ({"node": "x" * 300}, "a body that is no Hello"),
    ],
)
def test_a_worker_that_does_not_fit_is_told_why(
    connections: WorkerConnections, players: Any, greeting: dict[str, Any], words: str
) -> None:
    player = players()
    player.hello(**greeting)
    refused = read_body(player.expect(connections, MessageKind.REFUSED), Words)
    assert words in refused.reason
    assert not connections.peers


def test_a_worker_of_another_protocol_is_told_why(connections: WorkerConnections, players: Any) -> None:
    player = players()
    frame = bytearray(HELLO)
    frame[4] = 7
    player.send([bytes(frame), b"whatever it says in that version"])
    assert (
        f"protocol 7, and {PROTOCOL} is spoken here"
        in read_body(player.expect(connections, MessageKind.REFUSED), Words).reason
    )


HOSTILE = {
    "no frames": [b""],
    "noise": [b"GET / HTTP/1.1\r\n\r\n"],
    "short": [HELLO[:-1]],
    "kind": damaged([HELLO], kind=0xFFFF),
    "no body": [HELLO],
    "many frames": [HELLO, *[b"x"] * 5000],
    "many messages": [HELLO * 5000],
    "deep": WireMessage(MessageKind.HELLO, parts=[b"[" * 3000]).pack(),
}


@pytest.mark.parametrize("frames", HOSTILE.values(), ids=HOSTILE)
def test_a_stranger_is_refused_and_costs_nobody_anything(
    connections: WorkerConnections, players: Any, frames: list[bytes]
) -> None:
    stranger, sound = players(), players()
    stranger.send(frames)
    stranger.expect(connections, MessageKind.REFUSED)
    assert not connections.peers
    sound.hello()
    sound.expect(connections, MessageKind.WELCOME)


BROKEN = {
    "noise": lambda batch: [b"noise"],
    "a greeting": lambda batch: pack_message(MessageKind.READY),
    "a batch": lambda batch: damaged(answer(batch), kind=MessageKind.BATCH),
    "a file": lambda batch: WireMessage(MessageKind.DATA, parts=[b"x"]).pack(),
    "short column": lambda batch: answer(batch, b"1234567"),
    "long column": lambda batch: answer(batch, bytes(9)),
    "no column": lambda batch: answer(batch),
    "two columns": lambda batch: answer(batch, bytes(8), bytes(8)),
    "cut off": lambda batch: [answer(batch, bytes(8))[0][:-1]],
    "noise behind it": lambda batch: [answer(batch, bytes(8))[0] + b"noise"],
    "a column apart": lambda batch: [*answer(batch, bytes(8)), bytes(8)],
    "lies of entries": lambda batch: damaged(answer(batch, bytes(8)), entries=2**32 - 1),
    "lies of parts": lambda batch: damaged(answer(batch, bytes(8)), parts=2**32 - 1),
    "lies of bytes": lambda batch: damaged(answer(batch, bytes(8)), nbytes=2**63),
    "fault without text": lambda batch: answer(batch, status=13),
    "a fault and a column less": lambda batch: answer(batch, b"text", entries=[(0, 13)]),
}


@pytest.mark.logs_errors
@pytest.mark.parametrize("damage", BROKEN.values(), ids=BROKEN)
def test_a_worker_that_breaks_the_protocol_is_lost_and_its_batch_run_elsewhere(damage: Any) -> None:
    with bench() as it:
        bad = it.player()
        lease = it.put([1, 2])
        batch = bad.expect(it.connections, MessageKind.BATCH)
        good = it.player()
        bad.send(damage(batch))
        again = good.expect(it.connections, MessageKind.BATCH, it.runner.turn)
        assert list(map(bytes, again.parts)) == [floats([1, 2])]
        assert it.result(lease) is None
        good.send(answer(again, floats([3, 4])))
        it.until(lambda: not it.runner.flying)
        assert it.result(lease) == floats([3, 4])
        assert len(it.connections.peers) == 1


@pytest.mark.logs_errors
def test_a_message_beyond_the_limit_ends_its_connection(connections: WorkerConnections, players: Any) -> None:
    player = players()
    player.hello()
    player.expect(connections, MessageKind.WELCOME)
    player.send(WireMessage(MessageKind.LOADED, parts=[bytes(4096 + (2 << 20))]).pack())
    end = time.monotonic() + 60
    while connections.peers:
        assert time.monotonic() < end
        connections.wait(0.05)
        connections.turn()


def test_strangers_are_counted(
    connections: WorkerConnections, players: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hubs, "MOST_STRANGERS", 3)
    for _ in range(3):
        player = players()
        player.hello()
        player.expect(connections, MessageKind.WELCOME)
    last = players()
    last.hello()
    assert "as many workers load" in read_body(last.expect(connections, MessageKind.REFUSED), Words).reason
    assert len(connections.peers) == 3


@pytest.mark.logs_errors
def test_a_load_that_failed_is_known_by_its_text(connections: WorkerConnections, players: Any) -> None:
    player = players()
    player.hello()
    player.expect(connections, MessageKind.WELCOME)
    player.send(pack_message(MessageKind.FAILED, Failure("no weights", 9)))
    player.expect(connections, MessageKind.BYE)
    assert connections.failure is not None
    assert connections.failure.message == "no weights"


@pytest.mark.logs_errors
def test_an_idle_worker_that_is_silent_is_lost() -> None:
    with bench() as it:
        silent = it.player()
        until = time.monotonic() + 60
        while it.connections.peers:
            assert time.monotonic() < until
            it.connections.wait(0.05)
            it.connections.turn()  # it answers no PING; ZMTP's own are answered, as libzmq goes on
        silent.expect(it.connections, MessageKind.BYE)


@pytest.mark.logs_errors
def test_a_late_answer_is_refused() -> None:
    """Of an earlier generation of the slot, of an earlier try of the batch, and over another connection."""
    with bench() as it:
        first, second = it.player(), it.player()
        lease = it.put([1, 2])
        batch = first.expect(it.connections, MessageKind.BATCH)
        it.connections.drop(next(iter(it.connections.peers.values())), "a test says so")
        again = second.expect(it.connections, MessageKind.BATCH, it.runner.turn)
        assert again.batch != batch.batch
        first.send(answer(batch, floats([9, 9])))
        second.send(answer(batch, floats([8, 8])))  # under the number of the earlier try
        first.expect(it.connections, MessageKind.BYE)
        first.expect(it.connections, MessageKind.BYE)  # for the answer of a connection that was given up
        assert it.result(lease) is None
        second.send(answer(again, floats([3, 4])))
        it.until(lambda: not it.runner.flying)
        assert it.result(lease) == floats([3, 4])
        lease = it.put([5, 6])
        second.expect(it.connections, MessageKind.BATCH)
        second.send(answer(again, floats([7, 7])))  # of the generation before
        second.send(pack_message(MessageKind.PONG))
        it.connections.wait(0.2)
        it.connections.turn()
        assert it.result(lease) is None


@pytest.mark.logs_errors
@pytest.mark.parametrize(("isolate", "workers"), [(True, 3), (False, 2)])
def test_a_batch_runs_twice_at_most_and_once_if_runs_have_effects(isolate: bool, workers: int) -> None:
    with bench(isolate_failures=isolate) as it:
        players = [it.player() for _ in range(workers)]
        lease = it.put([1, 2])
        for _ in range(workers - 1):
            assert it.result(lease) is None
            busy = next(peer for peer in it.connections.ready if peer.flights)
            it.connections.drop(busy, "a test says so")
            it.runner.turn()
        status, text = it.result(lease)
        assert status & 0xFF == 14
        assert "died" in text
        assert players


@pytest.mark.logs_errors
def test_batches_that_lost_their_worker_run_one_at_a_time() -> None:
    with bench(remote={"in_flight": 3}) as it:
        first = it.player()
        leases = [it.put([number, number]) for number in range(3)]
        for _ in leases:
            first.expect(it.connections, MessageKind.BATCH)
        second = it.player()
        it.connections.drop(it.connections.ready[0], "a test says so")
        for lease in leases:
            batch = second.expect(it.connections, MessageKind.BATCH, it.runner.turn)
            assert second.receive(it.connections, it.runner.turn, limit_s=0.05) is None
            assert it.runner.take() is (lease == leases[-1])
            second.send(answer(batch, bytes(batch.parts[0])))
            it.until(lambda: not it.runner.flying)
            assert it.result(lease) == bytes(batch.parts[0])
        assert it.runner.take()


def test_batches_of_one_turn_leave_in_one_frame_and_so_may_their_answers() -> None:
    with bench(remote={"in_flight": 4}) as it:
        player = it.player()
        leases = [it.commit([number, number]) for number in range(3)]
        assert not it.runner.take()  # from two on, only full ones
        batches: list[WireMessage] = []
        until = time.monotonic() + 60
        while not batches:
            assert time.monotonic() < until
            if player.socket.poll(5):
                (frame,) = player.socket.recv_multipart()
                batches = [one for one in read_messages([frame]) if one.kind is not MessageKind.PING]
        assert [batch.kind for batch in batches] == [MessageKind.BATCH] * 2
        player.send([b"".join(answer(batch, bytes(batch.parts[0]))[0] for batch in batches)])
        it.until(lambda: not it.runner.flying)
        assert [it.result(lease) for lease in leases] == [floats([0, 0]), floats([1, 1]), None]
        assert it.runner.take()
        last = player.expect(it.connections, MessageKind.BATCH)
        player.send(answer(last, bytes(last.parts[0])))
        it.until(lambda: not it.runner.flying)
        assert it.result(leases[2]) == floats([2, 2])


@pytest.mark.logs_errors
def test_a_batch_beyond_its_time_fails_and_ends_its_worker() -> None:
    with bench(run_timeout_ms=50) as it:
        it.player(), it.player()
        lease = it.put([1, 2])
        until = time.monotonic() + 60
        found = None
        while found is None:
            assert time.monotonic() < until
            it.connections.wait(0.01)
            it.runner.turn()
            found = it.result(lease)
        assert found[0] == 4
        assert "run_timeout_ms 50" in found[1]
        assert len(it.connections.peers) == 1


def test_batches_go_to_who_has_least_to_do() -> None:
    with bench(remote={"in_flight": 2}) as it:
        players = [it.player() for _ in range(3)]
        for number in range(6):
            it.put([number, number])
            assert (
                max(len(p.flights) for p in it.connections.ready)
                - min(len(p.flights) for p in it.connections.ready)
                <= 1
            )
        assert not it.runner.room
        assert len(players) == 3


def test_a_worker_gets_as_many_batches_as_take_two_milliseconds() -> None:
    with bench() as it:
        player = it.player()
        (peer,) = it.connections.ready
        for ran_ns, most in ((0, 1), (3_000_000, 1), (600_000, 3), (1_000, 16)):
            for _ in range(60 if ran_ns else 0):  # on average of the last ones
                lease = it.put([1, 2])
                batch = player.expect(it.connections, MessageKind.BATCH)
                player.send(answer(batch, floats([2, 4]), ran_ns=ran_ns))
                peer.flights[batch.batch].sent_s -= 1.0  # it has taken no less than it says
                it.until(lambda: not it.runner.flying)
                assert it.result(lease) == floats([2, 4])
            while it.runner.room:
                peer.flights[-len(peer.flights)] = RemoteBatch(0, 0, 0, 0.0, 1)
            assert len(peer.flights) == most
            peer.flights.clear()


def test_only_the_key_of_its_workers_is_let_in(tmp_path: Path) -> None:
    server, worker = make_keys()
    _, other = make_keys()
    stranger = type(worker)("worker", other.public, other.secret, server.public)
    connections = WorkerConnections("127.0.0.1:0", server, welcome(), None, answer_bytes=4096)
    players = [Player(connections.address, key) for key in (worker, other, stranger, None)]
    try:
        for player in players:
            player.hello()
        players[0].expect(connections, MessageKind.WELCOME)
        for player in players[1:]:
            assert player.receive(connections, limit_s=0.5) is None
        assert len(connections.peers) == 1
    finally:
        for player in players:
            player.close()
        connections.close()


def test_keys_are_read_by_their_side_alone(tmp_path: Path) -> None:
    server, worker = write_keys(tmp_path / "keys")
    assert read_key(server, "server").other == read_key(worker, "worker").public
    assert server.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match=r"is the server's, allowed: worker\.key"):
        read_key(server, "worker")
    with pytest.raises(ConfigError, match="is there already"):
        write_keys(tmp_path / "keys")
    (tmp_path / "noise").write_bytes(b"\xff{")
    for path in (tmp_path / "noise", tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match=f"key {path}"):
            read_key(path, "worker")


def test_a_hub_listens_in_the_open_with_a_key_alone() -> None:
    with pytest.raises(ConfigError, match="without a key only a loopback address"):
        WorkerConnections("0.0.0.0:0", None, welcome(), None, answer_bytes=1)


def test_a_hub_takes_the_first_free_port_and_says_where_none_is() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        with pytest.raises(ConfigError, match="taken; a version that loads while another serves"):
            WorkerConnections(f"127.0.0.1:{port}", None, welcome(), None, answer_bytes=1)


@pytest.mark.parametrize("text", ["x", "x:", ":1", "x:1-", "x:-1", "x:2-1", "x:99999", "x:1-99", "x:a"])
def test_an_address_that_is_none_says_so(text: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT" if "99" not in text and "2-1" not in text else "ports"):
        read_address(text)
    assert read_address("h:1-3") == ("h", range(1, 4))
    assert zmq.has("curve")
