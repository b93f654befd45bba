"""Which instance of a model computes where, and why: for a person, before anything is loaded.

    instances 0, 2 on GPU 0 (NAME, 80.0 GiB) (devices: cuda)
    instance 0 on the CPU (instance_group[0]: KIND_AUTO, and there is no GPU)

Why is what its config says, read once more as it is written: once defaults are filled in nobody knows what
was left open.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fastserve.backends.registry import find_backend
from fastserve.config.text_proto import parse_text
from fastserve.config.yaml_text import read_text
from fastserve.devices.found import VISIBLE, Machine
from fastserve.errors import ConfigError
from fastserve.repository.model_config import ModelConfig
from fastserve.repository.placement import AUTO, CPU, Place, why_no_gpu
from fastserve.repository.triton_config import TRITON_FILE
from fastserve.repository.triton_text import config_schema


def tell_places(config: ModelConfig, folder: Path, machine: Machine) -> list[str]:
    """A line for all instances with the same answer. `folder` is the model's."""
    places = config.places or [Place()] * config.instances
    reasons = list(_reasons(config, folder, machine))
    numbers: dict[tuple[str, str], list[int]] = {}
    for number, place in enumerate(places):
        told = _device(place, machine) + (f", in {place.dtype}" if place.dtype else "")
        numbers.setdefault((told, reasons[number % len(reasons)]), []).append(number)
    lines = [f"{_counted(found)} on {told} ({why})" for (told, why), found in numbers.items()]
    if VISIBLE in config.env and any(place.gpu >= 0 for place in places):
        lines.append(f"but {VISIBLE}={config.env[VISIBLE]} in env is what the workers see")
    return lines


def _reasons(config: ModelConfig, folder: Path, machine: Machine) -> Iterator[str]:
    """Of each instance, or of each of a round of them."""
    if config.triton is not None:
        yield from _of_groups(config, folder, machine)
        return
    asked = [config.devices] if isinstance(config.devices, str) else config.devices
    for one in asked:
        name = one.partition("=")[0]
        count = len(machine.devices()) if name == "cuda" else 1
        if name == AUTO:
            why = why_no_gpu(find_backend(config.backend), machine)
            count = 1 if why else len(machine.devices())
            one += f", and {why or 'it can use a GPU'}"
        yield from [f"devices: {one}" + ", the default" * (asked == [CPU])] * count


def _of_groups(config: ModelConfig, folder: Path, machine: Machine) -> Iterator[str]:
    assert config.triton is not None
    written = _written(folder)
    for number, group in enumerate(config.triton.get("instance_group") or [{}]):
        if group.get("passive"):
            continue
        given = written[number] if number < len(written) else {}
        kind = str(given.get("kind") or "KIND_AUTO")
        on_gpus = group.get("kind") == "KIND_GPU"
        where = f", gpus {given['gpus']}" if given.get("gpus") else ", every GPU" if on_gpus else ""
        why = why_no_gpu(find_backend(config.backend), machine) or "it can use a GPU"
        said = f"instance_group[{number}]: " if number < len(written) else "no instance_group: "
        count = max(int(group.get("count") or 1), 1) * (
            max(len(group.get("gpus") or ()), 1) if on_gpus else 1
        )
        yield from [said + kind + where + (f", and {why}" if kind == "KIND_AUTO" else "")] * count


def _written(folder: Path) -> Sequence[dict[str, Any]]:
    """Groups as config.pbtxt has them; none where it has none, or there is no such file."""
    try:
        raw = parse_text(read_text(folder / TRITON_FILE, TRITON_FILE), config_schema(), TRITON_FILE)
    except (ConfigError, OSError):  # made up by the server, or given with a load call
        return []
    return list(raw.get("instance_group") or ())


def _device(place: Place, machine: Machine) -> str:
    if place.gpu < 0:
        return "the CPU" if place.device == CPU else place.device
    device, given = machine.devices()[place.gpu], os.environ.get(VISIBLE)
    mig = f", the MIG instance {device.select}" if device.select.startswith("MIG-") else ""
    return device.title + mig + (f", of {VISIBLE}={given}" if given else "")


def _counted(numbers: Sequence[int]) -> str:
    return ("instance " if len(numbers) == 1 else "instances ") + ", ".join(map(str, numbers))
