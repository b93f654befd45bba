"""Listeners with a name in the file system: whose file it is, and what becomes of it."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fastserve.net import HttpListener
from fastserve.net.listener import open_socket
from fastserve.net.request import Call
from fastserve.settings import Limits, Listener
from tests.net.kit import Paths, echo, read_replies, run

ASK = b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n"
LAST = b"GET /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@asynccontextmanager
async def listening(path: Path, dialect: Paths | None = None) -> AsyncIterator[HttpListener]:
    listener = HttpListener(f"unix:{path}", 0, [dialect or Paths({"/x": echo})], Limits())
    await listener.open()
    try:
        yield listener
    finally:
        await listener.close()


async def ask(path: Path, request: bytes = LAST) -> bytes:
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(request)
    data = await reader.read()
    writer.close()
    return data


def leave_behind(path: Path) -> None:
    """Leave a socket file as a server does that was killed."""
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))


def test_it_is_a_listener_like_others_and_its_file_goes_with_it(tmp_path: Path) -> None:
    path = tmp_path / "s"

    async def scene() -> None:
        async with listening(path) as listener:
            assert listener.address == (f"unix:{path}", 0)
            assert stat.S_ISSOCK(path.stat().st_mode)
            replies = read_replies(await ask(path, ASK + LAST))
            assert [reply.body for reply in replies] == [b"GET /x "] * 2
        assert not path.exists()

    run(scene())


def test_who_may_write_to_the_file_may_connect(tmp_path: Path) -> None:
    path = tmp_path / "s"

    async def scene() -> None:
        async with listening(path):
            assert stat.S_IMODE(path.stat().st_mode) == 0o770

    before = os.umask(0o007)
    try:
        run(scene())
    finally:
        os.umask(before)


def test_a_socket_that_nobody_listens_on_makes_room(tmp_path: Path) -> None:
    path = tmp_path / "s"
    leave_behind(path)

    async def scene() -> None:
        async with listening(path):
            assert b"GET /x" in await ask(path)

    run(scene())


def test_what_is_somebodys_stays(tmp_path: Path) -> None:
    path, text = tmp_path / "s", tmp_path / "t"
    text.write_text("kept")
    deep = tmp_path / "nowhere" / "s"

    async def scene() -> None:
        async with listening(path):
            for taken, words in (
                (path, "Address already in use"),
                (text, "there is a file that is no socket"),
                (deep, "No such file or directory"),
            ):
                with pytest.raises(OSError, match=f"cannot listen on unix:{taken}: {words}"):
                    async with listening(taken):
                        pass
            assert b"GET /x" in await ask(path)

    run(scene())
    assert text.read_text() == "kept"


def test_a_file_is_somebodys_from_the_first_moment(tmp_path: Path) -> None:
    """Two servers begin at once: the second finds the first before that accepts anybody."""
    path = tmp_path / "s"
    with open_socket(f"unix:{path}", 0), pytest.raises(OSError, match="already in use"):
        open_socket(f"unix:{path}", 0)
    assert path.exists()


def test_a_file_that_another_has_put_there_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"

    async def scene() -> None:
        async with listening(path):
            path.unlink()
            leave_behind(path)
        assert path.exists()

    run(scene())


def test_a_drain_answers_who_is_connected_and_lets_nobody_else_in(tmp_path: Path) -> None:
    path = tmp_path / "s"
    held: list[Call] = []

    async def scene() -> None:
        async with listening(path, Paths({"/x": held.append})) as listener:
            asked = asyncio.ensure_future(ask(path, ASK))
            while not held:
                await asyncio.sleep(0)
            draining = asyncio.ensure_future(listener.drain(20))
            while path.exists():
                await asyncio.sleep(0)
            with pytest.raises(FileNotFoundError):
                await ask(path)
            held[0].reply(200, b"late")
            assert (await asked).endswith(b"late")
            assert await draining == 0

    run(scene())


@pytest.mark.parametrize("address", ["unix:", "unix:" + "x" * 108, "unix:/a=b", "unix:" + "ä" * 60])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(ValueError, match="unix:PATH with a path of at most 107 bytes"):
        Listener(address)


def test_an_address_and_where_it_may_stand() -> None:
    listener = Listener("unix:/run/x.sock")
    assert (listener.in_file, listener.host, listener.port) == (True, "unix:/run/x.sock", 0)
