"""The server as a process: what SIGTERM does, and a second one, and what it says when it cannot start."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.running import CLI, FREE, Started, run_command, start
from tests.server.rig import HOLD, Client, release, run, seen, write_model

pytestmark = pytest.mark.waits


@contextmanager
def command(folder: Path, *flags: str) -> Iterator[Started]:
    words = [sys.executable, "-m", CLI, "serve", str(folder), "--drain-delay-s", "0", *flags]
    with tempfile.TemporaryFile() as log:
        server = start([*words, "--http", FREE, "--grpc", "off"], log.fileno())
    assert server.stdout is not None
    try:
        yield server
    finally:
        server.kill()
        server.wait(120)
        server.stdout.close()


def port_of(server: Started) -> int:
    assert server.stdout is not None
    line = server.stdout.readline().decode()
    assert "ready" in line, line
    return int(line.split(":")[-1])


async def connect(port: int) -> Client:
    return Client(*await asyncio.open_connection("127.0.0.1", port))


async def started(folder: Path, batches: int = 1) -> None:
    while len(seen(folder)) < batches:
        await asyncio.sleep(0.002)


async def refused(port: int) -> None:
    """Until nobody listens any more: the server is draining."""
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return
        writer.close()
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("fronts", ["1", "2"])
def test_sigterm_under_load_loses_no_reply_and_exits_0(tmp_path, fronts):
    write_model(tmp_path, max_batch_size=2, instances=4)

    async def work() -> None:
        with command(tmp_path, "--frontends", fronts) as server:
            port = port_of(server)
            clients = [await connect(port) for _ in range(4)]
            for number, client in enumerate(clients):
                client.send(HOLD, float(number))
            await started(tmp_path, batches=4)
            server.send_signal(signal.SIGTERM)
            await refused(port)
            release(tmp_path)
            for number, client in enumerate(clients):
                assert await client.reply() == (200, [2 * HOLD, 2.0 * number])
                client.close()
            assert await asyncio.to_thread(server.wait, 60) == 0

    run(work())


def test_a_second_sigterm_ends_it_at_once(tmp_path):
    write_model(tmp_path)

    async def work() -> None:
        with command(tmp_path) as server:
            port = port_of(server)
            client = await connect(port)
            client.send(HOLD)
            await started(tmp_path)
            server.send_signal(signal.SIGTERM)
            await refused(port)
            server.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(server.wait, 60) == 130  # drain_s is 30
            client.close()

    run(work())


def test_a_request_that_never_ends_does_not_hold_the_stop_for_longer_than_drain_s(tmp_path):
    write_model(tmp_path)

    async def work() -> None:
        with command(tmp_path, "--drain-s", "0.2") as server:
            client = await connect(port_of(server))
            client.send(HOLD)
            await started(tmp_path)
            server.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(server.wait, 28) == 0
            client.close()

    run(work())


def test_sigterm_while_models_load(tmp_path):
    (write_model(tmp_path) / "1" / "model.py").write_text(
        "import pathlib, time\npathlib.Path(__file__).with_name('loading').touch()\ntime.sleep(600)\n"
    )

    async def work() -> None:
        with command(tmp_path) as server:
            while not (tmp_path / "twice" / "1" / "loading").exists():
                await asyncio.sleep(0.002)
            server.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(server.wait, 60) == 0

    run(work())


def test_what_keeps_it_from_starting_is_said_without_a_traceback(tmp_path):
    (write_model(tmp_path) / "1" / "model.py").write_text("raise ValueError('no luck')")
    options = ("--http", "127.0.0.1:0", "--grpc", "off", "--log-level", "error")
    done = run_command("serve", str(tmp_path), *options)
    assert (done.returncode, done.stdout) == (1, "")
    assert "twice: version 1: " in done.stderr
    assert "no luck" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("fronts", ["1", "2"])
def test_a_port_that_is_taken(tmp_path, fronts):
    write_model(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        place = ("--http", f"127.0.0.1:{port}", "--grpc", "off")
        done = run_command("serve", str(tmp_path), *place, "--frontends", fronts)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("fastserve: ")


@pytest.mark.parametrize("fronts", ["1", "4"])
@pytest.mark.parametrize("mode", ["", "?mode=Force"])
def test_a_client_that_may_ends_it(tmp_path, fronts, mode):
    """MindIE's stopService, in whatever front it arrives."""
    write_model(tmp_path)

    async def work() -> None:
        flags = ("--frontends", fronts, "--textgen-stop-service")
        with command(tmp_path, *flags, "--drain-s", "1" if mode == "" else "60") as server:
            client, other = await connect(port := port_of(server)), await connect(port)
            client.send(HOLD)
            await started(tmp_path)
            assert await other.get("/stopService" + mode) == (200, b"")
            assert await asyncio.to_thread(server.wait, 55) == 0
            client.close()

    run(work())
