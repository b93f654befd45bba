"""The placer: the server's one process that imports ray, and Ray's driver. `python -m
fastserve.workers.remote.placer FD`.

    owner   --- begin {ray, listen, logs} --->  placer  --- actors ---> Ray
    runner  --- place, remove -------------->   (places.py has these messages)
    owner, runners <-- leaving ---------------  its node of Ray has died: another placer is to be started

It decides nothing. Each runner has a line; an actor is placed, watched until it ends, and ended with its
line. Actors are not detached and Ray restarts none: all of them end with this process as well, which ends
with the server.

A driver whose node (its raylet) has died can place nothing more. Its actors live on until Ray finds out, some
15 s later: so long this process lives on too, and the workers serve while another placer starts others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from fastserve.errors import ConfigError
from fastserve.util.logs import log_prints, log_uncaught, setup_logs
from fastserve.workers.control import ControlChannel, ControlFault, enter_child, exit_now, name_process
from fastserve.workers.remote.main import WorkerOrder
from fastserve.workers.remote.places import check_peer
from fastserve.workers.remote.supervisor import WorkerActor

log = logging.getLogger("fastserve.workers.remote.placer")  # which is run as __main__

TITLE = "placer"
PATIENCE_S = 5.0  # until the runner gets the reason why an actor has no node yet
GRACE_S = 5.0  # for a worker to end by itself
LEAVE_S = 60.0  # for the workers of a lost node's driver to be replaced
PROBE_S = 5.0
AGAIN_S = 5.0  # between two tries to reach Ray
NODE_LOOK_S = 5.0  # between two looks whether the driver's own node lives, for Ray
_CREDENTIALS = struct.Struct("3i")
REASON_CHARACTERS = 400
LOCAL_STORE_BYTES = 80 << 20  # of a Ray of our own: nothing of ours lies in its object store
NODES_NAMED = 4


class RayCluster:
    """The cluster as its driver sees it. `error` is why there is none, "" while there is."""

    def __init__(self, address: str) -> None:
        self.error, self.ip, self._node_id = "", "", ""
        self._address, self._tried_s = address, -AGAIN_S
        self._ray: Any = None

    def reach(self) -> None:
        """Connect to the cluster, unless it is done or was tried just now. Blocks."""
        if self._ray is not None or time.monotonic() < self._tried_s + AGAIN_S:
            return
        try:
            self._ray, self.error = self._connect(), ""
        except Exception as error:  # Ray raises anything: RuntimeError, ConnectionError, ValueError, OSError
            words = " ".join(str(error).split())[:REASON_CHARACTERS]
            self.error = f"Ray ({self._address}) cannot be used: {type(error).__name__}: {words}"
            log.error("%s", self.error)
        self._tried_s = time.monotonic()

    def _connect(self) -> Any:
        records = logging.getLogRecordFactory()
        import ray

        logging.setLogRecordFactory(records)  # Ray's adds a field to every line
        local = self._address == "local"
        if ":" in self._address:  # Ray itself takes a minute to find that nobody listens there
            host, _, port = self._address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), PROBE_S).close()
        own = {"include_dashboard": False, "object_store_memory": LOCAL_STORE_BYTES} if local else {}
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            ray.init(address=self._address, configure_logging=False, log_to_driver=True, **own)
        except BaseException:
            ray.shutdown()  # half of it may be there
            raise
        finally:
            for number, handler in handlers.items():  # Ray's end the process, which ends with its owner alone
                signal.signal(number, handler)
        self._node_id = str(ray.get_runtime_context().get_node_id())
        self.ip = "127.0.0.1" if local else str(ray.util.get_node_ip_address())
        log.info("connected to Ray %s, %d nodes", ray.__version__, len(self._nodes(ray)))
        return ray

    def lost_node(self) -> bool:
        """Return whether the node that this driver belongs to has died, for all that Ray knows. Blocks."""
        if self._ray is None:
            return False
        return all(node["NodeID"] != self._node_id for node in self._nodes(self._ray))

    def watch_node(self) -> int:
        """Return a pidfd of this driver's raylet, which Ray misses only after five health checks; -1 where it
        cannot be had. Ray tells the raylet's socket, and the kernel who listens there."""
        if self._ray is None:
            return -1
        names = [
            node.get("RayletSocketName") for node in self._nodes(self._ray) if node["NodeID"] == self._node_id
        ]
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
                line.connect(str(names[0]))
                told = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            return os.pidfd_open(_CREDENTIALS.unpack(told)[0])
        except (OSError, IndexError) as error:
            log.warning("the raylet of this machine cannot be watched: %s", error)
            return -1

    def start(self, message: Mapping[str, Any]) -> Any:
        """Ask for an actor; returns its handle."""
        demand = {name: float(count) for name, count in message["demand"].items()}
        options: dict[str, Any] = {
            "num_cpus": demand.pop("CPU", 0.0),
            "num_gpus": demand.pop("GPU", 0.0),
            "memory": int(demand.pop("memory", 0.0)) or None,
            "resources": demand,
            "scheduling_strategy": message["strategy"],
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        return self._ray.remote(WorkerActor).options(**options).remote()

    def end(self, actor: Any) -> None:
        """End an actor at once; nothing happens to one that has ended."""
        self._ray.kill(actor, no_restart=True)

    def name_node(self, node_id: str) -> str:
        """Return a node's name in Ray: its --node-name, or its address."""
        found = next((node for node in self._nodes(self._ray) if node["NodeID"] == node_id), None)
        return str(found["NodeName"]) if found is not None else node_id

    def explain_shortage(self, demand: Mapping[str, float], count: int) -> str:
        """Return why so many workers cannot be placed, were nothing else there; "" where they can."""
        nodes = self._nodes(self._ray)
        fitting = sum(_count_fitting(node["Resources"], demand) for node in nodes)
        if fitting >= count:
            return ""
        wanted = _describe(demand)
        if fitting:
            return f"{count} workers of {wanted} are wanted, and the cluster has room for {fitting}"
        shown = "; ".join(
            f"{node['NodeName']} has {_describe(node['Resources'])}" for node in nodes[:NODES_NAMED]
        )
        more = f"; and {len(nodes) - NODES_NAMED} others" if len(nodes) > NODES_NAMED else ""
        return f"no node of the cluster has {wanted}: {shown}{more}"

    def _nodes(self, ray: Any) -> list[dict[str, Any]]:
        return [node for node in ray.nodes() if node["Alive"]]


def _count_fitting(has: Mapping[str, float], demand: Mapping[str, float]) -> int:
    return int(min((has.get(name, 0.0) / count for name, count in demand.items()), default=1 << 16))


def _describe(resources: Mapping[str, float]) -> str:
    named = {
        name: f"{count / 2**30:.1f} GB of memory" if name == "memory" else f"{count:g} {name}"
        for name, count in sorted(resources.items())
        if not name.startswith(("node:", "object_store_memory"))
    }
    return ", ".join(named.values()) or "nothing"


def explain_loss(error: Exception) -> str:
    """Return the sentence of Ray's error that says why an actor is gone; of a traceback its last line too."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    found = next((line for line in lines if " because " in line), lines[0])
    found = found.partition(" Some common causes")[0]
    if any(line.startswith("Traceback") for line in lines):
        found = f"{found[: REASON_CHARACTERS // 2]} {lines[-1]}"
    return found[:REASON_CHARACTERS]


class RunnerLine:
    """One runner's line, and the actors that it has asked for."""

    def __init__(self, cluster: RayCluster, line: socket.socket) -> None:
        self._cluster = cluster
        self._control = ControlChannel(line, owner=True, trusted=True)
        self._actors: dict[int, asyncio.Task[None]] = {}
        self._removed: dict[int, asyncio.Event] = {}
        self.over = asyncio.Event()

    def open(self) -> None:
        """Greet the runner, and serve it."""
        self._control.watch(self._hear, lambda reason: self.over.set())
        self._say(op="greeting", address=self._cluster.ip, error=self._cluster.error)

    def leave(self) -> None:
        """Tell the runner that this placer can place nothing any more."""
        self._say(op="leaving")

    async def close(self) -> None:
        """End its actors: each has GRACE_S, as the runner has told the workers to end."""
        for removed in self._removed.values():
            removed.set()
        await asyncio.gather(*self._actors.values())
        self._control.close()

    def _hear(self, message: dict[str, Any]) -> None:
        number = int(message.get("number", 0))
        if message["op"] == "place" and number not in self._actors:
            self._removed[number] = asyncio.Event()
            self._actors[number] = asyncio.get_running_loop().create_task(self._keep(number, message))
        elif message["op"] == "remove" and number in self._removed:
            self._removed[number].set()
        elif message["op"] == "fits":
            shortage = self._cluster.explain_shortage(message["demand"], int(message["count"]))
            self._say(op="fits", reason=shortage)

    async def _keep(self, number: int, message: Mapping[str, Any]) -> None:
        """One actor's life."""
        actor, reason = None, "it was removed"
        try:
            actor = self._cluster.start(message)
            node_id = await self._unless_removed(number, actor.node.remote(), 0.0, message)
            if node_id is not None:
                node = self._cluster.name_node(node_id)
                self._say(op="placed", number=number, node=node)
                order = msgspec.json.decode(message["order"], type=WorkerOrder)
                whole = msgspec.json.encode(msgspec.structs.replace(order, node=node)).decode()
                running = actor.run.remote(whole, message["key"].encode())
                told = await self._unless_removed(number, running, GRACE_S)
                reason = told or reason
        except Exception as error:  # Ray's own, and whatever making an actor raises: the runner decides
            reason = explain_loss(error)
        finally:
            if actor is not None:
                with contextlib.suppress(Exception):  # Ray is gone, and the actor with it
                    self._cluster.end(actor)
            self._say(op="ended", number=number, reason=reason)
            del self._actors[number], self._removed[number]

    async def _unless_removed(
        self, number: int, reference: Any, grace_s: float, placed: Mapping[str, Any] | None = None
    ) -> Any:
        """Wait for Ray's answer, or until `grace_s` after the actor was removed; None then. With `placed`,
        the message that asked for the actor, the runner gets the reason after PATIENCE_S without a node."""
        answer = asyncio.wrap_future(reference.future())
        answer.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )  # nobody may wait any more
        removed = asyncio.ensure_future(self._removed[number].wait())
        try:
            patience_s = PATIENCE_S if placed is not None else None
            done, _ = await asyncio.wait(
                {answer, removed}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done and placed is not None:
                reason = self._cluster.explain_shortage(placed["demand"], 1)
                self._say(
                    op="waits", number=number, reason=reason or "the nodes that could run it may be full"
                )
                await asyncio.wait({answer, removed}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                await asyncio.wait({answer}, timeout=grace_s)
            return answer.result() if answer.done() else None
        finally:
            removed.cancel()

    def _say(self, **message: Any) -> None:
        with contextlib.suppress(ControlFault):  # the runner is gone: so will be its actors
            self._control.send(message)


class PlacerLoop:
    """Serves runners until the owner says stop or is gone, or this driver's node has died and its last runner
    has gone to another placer. Owns `listener`."""

    def __init__(self, control: ControlChannel, listener: socket.socket, cluster: RayCluster) -> None:
        self._control, self._listener, self._cluster = control, listener, cluster
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        self._lines: dict[RunnerLine, asyncio.Task[None]] = {}
        self._raylet = -1
        self._leaving = False

    async def run(self) -> None:
        """Serve to the end."""
        self._control.watch(lambda message: self._stopped.set(), lambda reason: self._stopped.set())
        self._loop.add_reader(self._listener.fileno(), self._accept)
        self._watch_raylet()
        asking = self._loop.create_task(self._ask_ray())
        await self._stopped.wait()
        asking.cancel()
        self._close_listener()
        if self._lines:
            await asyncio.wait(self._lines.values())

    def _accept(self) -> None:
        try:
            line, _ = self._listener.accept()
            check_peer(line)
        except (OSError, ConfigError) as error:
            log.warning("a line was not accepted: %s", error)
            return
        self._cluster.reach()
        self._watch_raylet()
        served = RunnerLine(self._cluster, line)
        self._lines[served] = self._loop.create_task(self._serve_line(served))

    async def _serve_line(self, served: RunnerLine) -> None:
        served.open()
        waits = [asyncio.ensure_future(event.wait()) for event in (served.over, self._stopped)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        await served.close()
        del self._lines[served]
        if self._leaving and not self._lines:
            self._stopped.set()

    def _watch_raylet(self) -> None:
        if self._raylet < 0 and not self._leaving:
            self._raylet = self._cluster.watch_node()
            if self._raylet >= 0:
                self._loop.add_reader(self._raylet, self._leave)

    async def _ask_ray(self) -> None:
        while not await asyncio.to_thread(self._cluster.lost_node):
            await asyncio.sleep(NODE_LOOK_S)
        self._leave()

    def _leave(self) -> None:
        """Make room for another placer, and live for as long as the workers of this one are needed."""
        if self._raylet >= 0:
            self._loop.remove_reader(self._raylet)
            os.close(self._raylet)
            self._raylet = -1
        if self._leaving or self._stopped.is_set():
            return
        self._leaving = True
        log.error("this machine's node of Ray has died; the workers on Ray go with it, and others are placed")
        self._close_listener()
        for served in self._lines:
            served.leave()
        with contextlib.suppress(ControlFault):  # the owner is gone, which ends this process
            self._control.send({"op": "leaving"})
        self._loop.call_later(LEAVE_S if self._lines else 0.0, self._stopped.set)

    def _close_listener(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()


async def _serve(control: ControlChannel, listener: socket.socket, cluster: RayCluster) -> None:
    await PlacerLoop(control, listener, cluster).run()


def _open_logs(logs: Mapping[str, Any]) -> None:
    """Log as the owner does. What workers on Ray write comes out here too, whole, as Ray hands it on."""
    setup_logs(logs["level"], logs["format"], fields={"worker": TITLE})
    log_uncaught()
    if logs["format"] == "json":
        log_prints()


def main(arguments: list[str]) -> int:
    """Runs the placer to its end; the exit status."""
    control = enter_child(int(arguments[0]))
    order = control.receive().message
    name_process(TITLE)
    _open_logs(order["logs"])
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a server talks to its clients only
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    listener.bind("\0" + order["listen"])
    listener.listen(128)
    cluster = RayCluster(order["ray"])
    cluster.reach()
    asyncio.run(_serve(control, listener, cluster))
    if not cluster.error:
        import ray

        ray.shutdown()
    exit_now(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
