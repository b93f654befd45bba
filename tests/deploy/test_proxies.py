"""Proxies before several servers: sequences stay on their replica, and a rollout fails no request."""

from __future__ import annotations

import contextlib
import http.client
import json
import operator
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.running import Running, free_port, until
from tests.server.rig import write_model

FOLDER = Path(__file__).resolve().parents[2] / "deploy/proxies"
BODY = json.dumps({"instances": [[1.0, 0.5]]})
REPLICA = 100.0
PAUSE_S = 0.02  # of each client, between requests
"""What the second replica's model adds, so that answers tell who gave them."""


@contextlib.contextmanager
def nginx(folder: Path, replicas: list[str]) -> Iterator[str]:
    """Run nginx with the configuration of deploy/, whose names are these replicas; HOST:PORT of it."""
    program = shutil.which("nginx")
    if program is None:
        pytest.skip("there is no nginx")
    place = f"127.0.0.1:{free_port()}"
    text = (FOLDER / "nginx.conf").read_text().replace("listen 8080;", f"listen {place};")
    text = text.replace("/tmp/", f"{folder}/")
    for number, replica in enumerate(replicas):
        text = text.replace(f"fastserve-{number}:8000", replica)
    text = text.replace("worker_processes auto", "worker_processes 1")
    text = text.replace("/dev/stderr", str(folder / "error"))
    folder.chmod(0o755)
    (folder / "nginx.conf").write_text(text)
    command = [program, "-e", str(folder / "error"), "-c", str(folder / "nginx.conf"), "-g", "daemon off;"]
    running = subprocess.Popen(command)
    try:
        until(lambda: accepts(place) or running.poll() is not None, "nginx accepts")
        assert running.poll() is None, (folder / "error").read_text()
        yield place
    finally:
        running.terminate()
        running.wait(60)


def accepts(place: str) -> bool:
    link = http.client.HTTPConnection(place, timeout=60)
    try:
        link.connect()
    except OSError:
        return False
    link.close()
    return True


def ask(place: str, correlation: str = "") -> float:
    """The first number that is predicted."""
    link = http.client.HTTPConnection(place, timeout=60)
    try:
        headers = {"X-Correlation-Id": correlation} if correlation else {}
        link.request("POST", "/v1/models/twice:predict", BODY, headers)
        reply = link.getresponse()
        assert reply.status == 200, reply.read()
        return float(json.load(reply)["predictions"][0][0])
    finally:
        link.close()


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    for number in range(2):
        write_model(tmp_path / str(number), parameters={"add": REPLICA * number})
    (tmp_path / "nginx").mkdir()
    return [tmp_path / str(number) for number in range(2)]


def test_sequences_stay_on_their_replica(folders: list[Path], tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(Running(one, one / "log")) for one in folders)
        place = stack.enter_context(nginx(tmp_path / "nginx", [first.http, second.http]))
        ids = [str(number) for number in range(40)]
        found = {one: ask(place, one) for one in ids}
        assert 8 <= list(found.values()).count(2.0) <= 32
        for _ in range(3):
            assert {one: ask(place, one) for one in ids} == found
        assert {ask(place) for _ in range(20)} == {2.0, 2.0 + REPLICA}  # without an id, to any
        second.__exit__(None, None, None)
        after = {one: ask(place, one) for one in ids}
        assert set(after.values()) == {2.0}


def test_a_rollout_behind_nginx_fails_no_request(folders: list[Path], tmp_path: Path) -> None:
    """Both replicas are replaced, one after the other, while clients ask."""
    stop, answered, by_replica = threading.Event(), [0] * 8, [0, 0]
    failed = list[BaseException]()
    ports = [f"127.0.0.1:{free_port()}" for _ in folders]

    def client(number: int, place: str) -> None:
        while not stop.wait(PAUSE_S):
            try:
                answer = ask(place)
                assert answer in (2.0, 2.0 + REPLICA)
                answered[number] += 1
                by_replica[int(answer > 2.0)] += 1
            except BaseException as fault:
                failed.append(fault)
                return

    def go_on() -> None:
        before = list(answered)
        until(lambda: failed or all(map(operator.gt, answered, before)), "every client goes on")

    options = ("--drain-delay-s", "0.5")
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(Running(one, one / "log", *options, http=port))
            for one, port in zip(folders, ports, strict=True)
        ]
        place = stack.enter_context(nginx(tmp_path / "nginx", ports))
        clients = [threading.Thread(target=client, args=(i, place)) for i in range(len(answered))]
        for thread in clients:
            thread.start()
        try:
            for number, old in enumerate(servers):
                go_on()
                old.__exit__(None, None, None)
                go_on()
                folder = folders[number]
                stack.enter_context(Running(folder, folder / "log2", *options, http=ports[number]))
                # The next goes when nginx sends requests here again: minReadySeconds of a Deployment.
                answers_of = by_replica[number]
                until(lambda n=number, a=answers_of: failed or by_replica[n] > a, "nginx asks the new one")
        finally:
            stop.set()
            for thread in clients:
                thread.join(60)
    assert failed == []
    assert sum(answered) > 100
