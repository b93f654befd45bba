"""A Ray cluster of this machine, in a process of its own: a head and nodes that are added and removed.

    python -m tests.workers.remote.cluster       lines on standard input: add NAME JSON, remove NAME

It answers each line with one, and ends, with every process of Ray's, when its standard input does.
"""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
from types import TracebackType
from typing import Any

STARTS_PROCESSES = True
WAIT_S = 120.0
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}


class RayNodes:
    """The cluster's process. `address` is that of its head, a node named "head" that has one CPU.

    It is nobody's child, as a machine of a cluster is: the process of the tests adopts orphans of its
    descendants while it has one forked (tests/warm.py), and workers of Ray's actors are such orphans."""

    def __enter__(self) -> RayNodes:
        self._process = subprocess.Popen(
            [
                "sh",
                "-c",
                'exec 3<&0; "$@" <&3 3<&- &',
                "sh",
                sys.executable,
                "-m",
                "tests.workers.remote.cluster",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            start_new_session=True,
        )
        self._process.wait()
        self.address = self._answer()
        return self

    def add(self, name: str, **resources: float) -> None:
        """Add a node with one CPU and these resources."""
        self._ask(f"add {name} {json.dumps(resources)}")

    def remove(self, name: str) -> None:
        """Kill a node's processes, as a machine that fails does."""
        self._ask(f"remove {name}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.stdout is not None
        try:
            assert not self._answer(), "the cluster has ended"
        finally:
            self._process.stdout.close()

    def _ask(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        assert self._answer() == "done"

    def _answer(self) -> str:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], WAIT_S)
        assert ready, "the cluster does not answer"
        return self._process.stdout.readline().strip()


def main() -> None:
    """Run the cluster, until standard input ends."""
    from ray.cluster_utils import Cluster

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    out, sys.stdout = sys.stdout, sys.stderr  # Ray prints
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "node_name": "head"})
    nodes: dict[str, Any] = {}
    try:
        print(cluster.address, file=out, flush=True)
        for line in sys.stdin:
            verb, name, *rest = line.split(maxsplit=2)
            if verb == "add":
                nodes[name] = cluster.add_node(**NODE, node_name=name, resources=json.loads(rest[0]))
            else:
                cluster.remove_node(nodes.pop(name), allow_graceful=False)
            print("done", file=out, flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
