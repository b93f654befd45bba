"""Connections by front process: SO_REUSEPORT's hash beside fastserve's balancer, on loopback.

    python -m bench.accept_shares

All fronts live in this process, each with sockets of its own, as processes have them. The kernel's choice is
the same as between processes; a connection's way through an inbox is too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import statistics
from collections.abc import Callable

import uvloop

from fastserve.net.accept_balance import AcceptBalancer

CONNECTIONS, FRONTS = (8, 16, 64), (2, 3, 4, 8)
TRIALS = 100
Shares = list[int]


def share_by_hash(fronts: int, connections: int) -> Shares:
    """Return the connections of each front with SO_REUSEPORT."""
    with contextlib.ExitStack() as stack:
        listening = list[socket.socket]()
        for _ in range(fronts):
            one = stack.enter_context(socket.socket())
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            one.bind(listening[0].getsockname() if listening else ("127.0.0.1", 0))
            one.listen(connections)
            one.setblocking(False)
            listening.append(one)
        for _ in range(connections):
            stack.enter_context(socket.create_connection(listening[0].getsockname()))
        return [_accept_all(one) for one in listening]


def _accept_all(listening: socket.socket) -> int:
    count = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            listening.accept()[0].close()
            count += 1
    return count


def share_evenly(fronts: int, connections: int) -> Shares:
    """Return the same with fastserve's balancer, of connections that all come at once."""
    return uvloop.run(_share_evenly(fronts, connections))


async def _share_evenly(fronts: int, connections: int) -> Shares:
    owner = AcceptBalancer.create(fronts)
    balancers = [owner]
    balancers += [AcceptBalancer(i, fronts, [os.dup(fd) for fd in owner.fds()]) for i in range(1, fronts)]
    taken: list[list[socket.socket]] = [[] for _ in balancers]
    listening = socket.create_server(("127.0.0.1", 0), backlog=connections)
    listening.setblocking(False)
    with contextlib.ExitStack() as stack:
        for balancer, own in zip(balancers, taken, strict=True):
            count = balancer.attach("port", listening if balancer is owner else listening.dup(), own.append)
            balancer._take[0] = _counting(own, count.arrive, count.expect)
            balancer.open()
        for _ in range(connections):
            stack.enter_context(socket.create_connection(listening.getsockname()))
        while sum(map(len, taken)) < connections:
            await asyncio.sleep(0)
        for balancer in balancers[::-1]:
            balancer.detach(balancer._listening[0])
            balancer.close()
    for own in taken:
        for one in own:
            one.close()
    return [len(own) for own in taken]


def _counting(
    own: list[socket.socket], arrive: Callable[[int], None], expect: Callable[[], None]
) -> Callable[[socket.socket], None]:
    def take(accepted: socket.socket) -> None:
        expect()
        own.append(accepted)
        arrive(len(own))

    return take


def main() -> None:
    """Print the table."""
    print("| connections, fronts | hash: busiest front of its share, a front has none | balanced |")
    print("|---|---|---|")
    for connections in CONNECTIONS:
        for fronts in FRONTS:
            cells = []
            for share in (share_by_hash, share_evenly):
                found = [share(fronts, connections) for _ in range(TRIALS)]
                busiest = statistics.fmean(max(one) * fronts / connections for one in found)
                none = statistics.fmean(min(one) == 0 for one in found)
                cells.append(f"{busiest:.2f} x, {none:.0%}")
            print(f"| {connections}, {fronts} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
