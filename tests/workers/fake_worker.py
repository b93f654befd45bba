"""The entry of a worker whose batch loop is a toy: one byte on the line to the test is one batch.

Its arena is one end of a socketpair. The real loop needs the real arena, and is tested with it.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fastserve.backends import Backend
from fastserve.backends.base import read_specs
from fastserve.workers.control import ControlChannel, PeerGone
from fastserve.workers.main import main


class Fickle:
    """A backend whose batches go over a device until there is a file beside it."""

    def __init__(self, config: Mapping[str, Any], version_dir: Path, instance: int) -> None:
        self.inputs, self.outputs = (read_specs(config[side]) for side in ("inputs", "outputs"))
        self.takes_device_tensors = not (version_dir / "no device").exists()

    def load(self) -> None: ...

    def close(self) -> None: ...

    def run(self, inputs: Any) -> Any:
        return {"y": inputs["x"]}

    run_on_device = run


def serve(
    backend: Backend,
    control: ControlChannel,
    config: Mapping[str, Any],
    message: Mapping[str, Any],
    fds: list[int],
) -> None:
    """Runs the backend on one row of zeros for each byte; answers with what came out, as text."""
    (bell,) = fds
    if message.get("fail_warm_up"):
        raise ValueError("warm-up refused")
    if message.get("warms_up_until"):
        os.read(bell, 1)
    control.send({"op": "ready"})
    while True:
        ready, _, _ = select.select([control, bell], [], [])
        if control in ready:
            try:
                if control.receive().message["op"] == "stop":
                    return
            except PeerGone:
                return
        if bell in ready and os.read(bell, 1):
            zeros = {n: np.zeros((1, *(s.shape or ())), s.dtype.name) for n, s in backend.inputs.items()}
            os.write(bell, repr({k: v.tolist() for k, v in backend.run(zeros).items()}).encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], serve))
