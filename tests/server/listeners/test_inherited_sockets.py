"""Listening sockets that systemd, or another program, has opened: LISTEN_FDS, and what a stop leaves."""

from __future__ import annotations

import contextlib
import http.client
import json
import operator
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastserve.errors import ConfigError
from fastserve.net import InheritedSockets, take_inherited
from fastserve.net.sockets import take_descriptors
from tests import proc
from tests.running import START_S, until
from tests.server.rig import write_model

# Descriptors 3, 4, ... as sd_listen_fds(3) has them, and this process's own id: then it becomes the server.
LAUNCHER = """
import fcntl, os, sys
count = int(sys.argv[1])
fds = [int(fd) for fd in sys.argv[2 : 2 + count]]
high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in fds]
for number, fd in enumerate(high, 3):
    os.dup2(fd, number, inheritable=True)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(count))
os.execv(sys.executable, [sys.executable, "-m", "fastserve.cli", *sys.argv[2 + count :]])
"""
BODY = json.dumps({"instances": [[1.0, 0.5]]})
ANSWER = {"predictions": [[2.0, 1.0]]}
PAUSE_S = 0.02  # of a client that asks again and again


class Activated:
    """A server that was given listening sockets, as systemd does."""

    def __init__(
        self, folder: Path, *sockets: socket.socket, log: Path, options: tuple[str, ...] = ()
    ) -> None:
        fds = [one.fileno() for one in sockets]
        command = [
            sys.executable,
            "-c",
            LAUNCHER,
            str(len(fds)),
            *map(str, fds),
            "serve",
            str(folder),
            *options,
        ]
        with log.open("wb") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, pass_fds=fds)
        self.log = log

    def __enter__(self) -> Activated:
        return self

    def wait_ready(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        assert "ready" in line, self.log.read_text()
        return line

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(START_S) == 0, self.log.read_text()

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextlib.contextmanager
def listening() -> Iterator[tuple[socket.socket, str]]:
    with socket.create_server(("127.0.0.1", 0)) as one:
        yield one, f"127.0.0.1:{one.getsockname()[1]}"


def ask(place: str, link: http.client.HTTPConnection | None = None) -> object:
    """The answer of a prediction; on a connection of its own unless one is given."""
    own = link or http.client.HTTPConnection(place, timeout=60)
    try:
        own.request("POST", "/v1/models/twice:predict", BODY)
        reply = own.getresponse()
        assert reply.status == 200
        return json.loads(reply.read())
    finally:
        if link is None:
            own.close()


def quick(place: str, *more: str) -> tuple[str, ...]:
    return ("--http", place, "--grpc", "off", "--drain-delay-s", "0", *more)


def test_every_front_accepts_from_the_socket_that_was_passed_on(tmp_path: Path) -> None:
    write_model(tmp_path / "models")
    with listening() as (one, place):
        options = quick(place, "--frontends", "2")
        with Activated(tmp_path / "models", one, log=tmp_path / "log", options=options) as server:
            assert server.wait_ready() == f"fastserve is ready: http://{place}\n"
            assert [ask(place) for _ in range(8)] == [ANSWER] * 8
            holders = processes_with(one)
            assert len(holders & {server.process.pid, *proc.children_of(server.process.pid)}) == 2
            # A front that died comes back on it.
            (front,) = holders - {os.getpid(), server.process.pid}
            os.kill(front, signal.SIGKILL)
            mine = {os.getpid(), server.process.pid, front}
            until(lambda: processes_with(one) - mine, "another front holds the socket")
            assert [ask(place) for _ in range(8)] == [ANSWER] * 8
            server.stop()
        # Who connects while no server runs waits for the next one: the socket is as it was.
        waiting = socket.create_connection(("127.0.0.1", one.getsockname()[1]), timeout=60)
        head = f"POST /v1/models/twice:predict HTTP/1.1\r\nHost: t\r\nContent-Length: {len(BODY)}\r\n\r\n"
        waiting.sendall((head + BODY).encode())
        options = quick(place)
        with Activated(tmp_path / "models", one, log=tmp_path / "log2", options=options) as server, waiting:
            assert waiting.recv(65536).startswith(b"HTTP/1.1 200 ")
            assert server.wait_ready() == f"fastserve is ready: http://{place}\n"
            assert processes_with(one) == {os.getpid(), server.process.pid}, "no worker holds it"
            server.stop()


def processes_with(one: socket.socket) -> set[int]:
    """Processes that hold the socket."""
    inode = os.readlink(f"/proc/self/fd/{one.fileno()}")
    found = set()
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            names = os.listdir(f"/proc/{pid}/fd")
            if any(link_of(pid, name) == inode for name in names):
                found.add(int(pid))
    return found


def link_of(pid: str, name: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/{name}")
    except OSError:
        return ""


def test_two_ports_and_a_socket_file(tmp_path: Path) -> None:
    write_model(tmp_path / "models")
    path = tmp_path / "fs.sock"
    with (
        listening() as (http_one, http_place),
        listening() as (grpc_one, grpc_place),
        socket.socket(socket.AF_UNIX) as file,
    ):
        file.bind(str(path))
        file.listen()
        listeners = ("--http", http_place, "--http", f"unix:{path}", "--grpc", grpc_place)
        options = (*listeners, "--drain-delay-s", "0", "--frontends", "2")
        sockets = (http_one, grpc_one, file)
        with Activated(tmp_path / "models", *sockets, log=tmp_path / "log", options=options) as server:
            line = server.wait_ready()
            assert f"http://{http_place}" in line
            assert f"grpc://{grpc_place}" in line
            with socket.socket(socket.AF_UNIX) as link:
                link.settimeout(60)
                link.connect(str(path))
                link.sendall(b"GET /healthz/ready HTTP/1.0\r\n\r\n")
                assert link.recv(65536).startswith(b"HTTP/1.1 200 ")
            server.stop()
        assert path.exists()  # whoever made it removes it


@pytest.mark.parametrize("times", [1, pytest.param(4, marks=pytest.mark.torture)])
def test_one_server_takes_over_from_another_without_a_failed_request(tmp_path: Path, times: int) -> None:
    """Two servers accept from one socket while they change: nobody is refused, reset or answered wrongly."""
    write_model(tmp_path / "models")
    stop, failed, answered = threading.Event(), list[BaseException](), [0] * 6

    def go_on() -> None:
        """Wait until every client has had another answer."""
        before = list(answered)
        until(lambda: failed or all(map(operator.gt, answered, before)), "every client goes on")

    def client(number: int, place: str) -> None:
        while not stop.is_set():
            try:
                if number % 2:  # a connection for each request
                    assert ask(place) == ANSWER
                else:  # one for as long as the server keeps it
                    link = http.client.HTTPConnection(place, timeout=60)
                    with contextlib.closing(link):
                        while not stop.is_set():
                            assert ask(place, link) == ANSWER
                            answered[number] += 1
                            if link.sock is None:
                                break
                            stop.wait(PAUSE_S)
                answered[number] += 1
                stop.wait(PAUSE_S)
            except BaseException as fault:
                failed.append(fault)

    with listening() as (one, place), contextlib.ExitStack() as stack:
        options = quick(place, "--frontends", "2")
        old = stack.enter_context(Activated(tmp_path / "models", one, log=tmp_path / "0", options=options))
        old.wait_ready()
        clients = [threading.Thread(target=client, args=(i, place)) for i in range(len(answered))]
        for thread in clients:
            thread.start()
        try:
            for turn in range(1, times + 1):
                go_on()
                new = stack.enter_context(
                    Activated(tmp_path / "models", one, log=tmp_path / str(turn), options=options)
                )
                new.wait_ready()
                old.stop()
                old = new
            go_on()
        finally:
            stop.set()
            for thread in clients:
                thread.join(60)
        assert failed == []
        old.stop()


def test_a_socket_that_no_listener_has_ends_the_start(tmp_path: Path) -> None:
    write_model(tmp_path / "models")
    with listening() as (one, place), listening() as (_, other):
        other_port = other.rpartition(":")[2]
        options = ("--http", "127.0.0.1:0", "--grpc", "off")
        with Activated(tmp_path / "models", one, log=tmp_path / "log", options=options) as server:
            assert server.process.wait(START_S) == 1
        told = server.log.read_text()
        assert f"LISTEN_FDS: given a socket on {place}, allowed: listeners' addresses" in told
        assert other_port not in told


def test_variables_of_another_process_are_removed_and_count_for_nothing() -> None:
    environment = {"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "http", "HOME": "/"}
    assert not take_inherited(environment)
    assert environment == {"HOME": "/"}


def test_a_count_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match='LISTEN_FDS: given "two", allowed: a whole number from 0 on'):
        take_inherited({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "two"})


def test_only_listening_sockets_are_taken(tmp_path: Path) -> None:
    with socket.socket() as bound, (tmp_path / "f").open("w") as file:
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(ConfigError, match="given no listening socket"):
            take_descriptors([bound.fileno()])
        with pytest.raises(ConfigError, match="Socket operation on non-socket"):
            take_descriptors([file.fileno()])
        assert bound.getsockname()[1]  # still the test's own


def test_addresses_are_compared_as_the_system_reads_them() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
        found = InheritedSockets([one])
        assert found.find("127.0.0.1", port + 1) is None
        assert found.find("no.such.host.invalid", port) is None
        with pytest.raises(ConfigError):
            found.check()
        taken = found.find("localhost", port) or found.find("127.0.0.1", port)
        assert taken is not None
        with taken:
            assert taken.fileno() != one.fileno()
            assert taken.getsockname() == one.getsockname()
        found.check()
