"""The placer: the server's one process that imports ray, and Ray's driver. `python -m
fastserve.workers.remote.placer FD`.

    owner   --- begin {ray, listen, logs} --->  placer  --- actors ---> Ray
    runner  --- place, remove -------------->   (places.py has these messages)

It decides nothing. Each runner has a line; an actor is placed, watched until it ends, and ended with its
line. Actors are not detached and Ray restarts none: all of them end with this process as well, which ends
with the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
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
PROBE_S = 5.0
AGAIN_S = 5.0  # between two tries to reach Ray
NODE_LOOK_S = 5.0  # between two looks whether the driver's own node lives
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
        """Return whether the node that this driver belongs to has died: Ray ends its actors then, and lets
        the driver live, which can place nothing any more. Blocks."""
        if self._ray is None:
            return False
        return all(node["NodeID"] != self._node_id for node in self._nodes(self._ray))

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


async def _serve(control: ControlChannel, listener: socket.socket, cluster: RayCluster) -> None:
    """Serve runners until the owner says stop, or is gone."""
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    control.watch(lambda message: stopped.set(), lambda reason: stopped.set())
    lines: set[asyncio.Task[None]] = set()

    async def serve_line(line: socket.socket) -> None:
        served = RunnerLine(cluster, line)
        served.open()
        waits = [asyncio.ensure_future(event.wait()) for event in (served.over, stopped)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        await served.close()

    def accept() -> None:
        try:
            line, _ = listener.accept()
            check_peer(line)
        except (OSError, ConfigError) as error:
            log.warning("a line was not accepted: %s", error)
            return
        cluster.reach()
        task = loop.create_task(serve_line(line))
        lines.add(task)
        task.add_done_callback(lines.discard)

    async def watch_node() -> None:
        while not await asyncio.to_thread(cluster.lost_node):
            await asyncio.sleep(NODE_LOOK_S)
        log.error("this machine's node of Ray has died, and all workers that were placed from here with it")
        exit_now(1)

    loop.add_reader(listener.fileno(), accept)
    watching = loop.create_task(watch_node())
    await stopped.wait()
    watching.cancel()
    loop.remove_reader(listener.fileno())
    if lines:
        await asyncio.wait(lines)


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
