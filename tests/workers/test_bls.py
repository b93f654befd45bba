"""The worker's end of the line without an owner: what threads do to it at once."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace
from typing import Any

from fastserve.workers.arena import Arena, Geometry
from fastserve.workers.bls import BlsClient, OutgoingCall
from fastserve.workers.control import ControlChannel


def test_the_end_reaches_all_calls_while_another_begins() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    arena = Arena.create(Geometry(4, 8, (), (), 256, 0, 1, 1, True))
    control, ring = ControlChannel(ours, owner=False), arena.ring(worker=0)
    line = BlsClient(control, arena, ring)
    calls = [OutgoingCall(number, 0, 0.0, 1.0) for number in (1, 2)]

    under_way = line._calls

    def begin_another() -> None:
        under_way[3] = OutgoingCall(3, 0, 0.0, 1.0)

    news: Any = SimpleNamespace(set=begin_another)
    calls[0].news = news
    under_way.update({call.number: call for call in calls})
    theirs.close()
    assert line.turn()
    assert isinstance(calls[1].news, threading.Event)
    assert calls[1].news.is_set()
    control.close()
    del line, ring
    arena.close()
