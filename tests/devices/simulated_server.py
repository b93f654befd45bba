"""The server with one more device, `devices: simulated`.

    python -m tests.devices.simulated_server serve ...

Its workers start at simulated_worker.py. Where there are GPUs (simulated.py) the device stands for the first.
"""

from __future__ import annotations

from functools import partial

from fastserve.cli import main
from fastserve.devices.inventory import DeviceInventory
from fastserve.engine import loader
from fastserve.repository import placement
from fastserve.repository.placement import Placement
from tests.devices.simulated_device import NAME
from tests.devices.simulated_worker import SHARED, WORKER

_named = placement._named


def find_places(name: str, machine: DeviceInventory) -> list[Placement]:
    """As the server does, of a device that it does not know as well. Raises ValueError."""
    return [Placement(NAME, 0 if machine.devices() else -1)] if name == NAME else _named(name, machine)


if __name__ == "__main__":
    placement._named = find_places
    loader.WorkerGroup = partial(loader.WorkerGroup, entry=WORKER)
    loader.SharedWorkers = partial(loader.SharedWorkers, entry=SHARED)
    main(prog_name="fastserve")
