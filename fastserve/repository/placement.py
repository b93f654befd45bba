"""Places the workers of a version: the devices that a config names, on the GPUs of this machine.

    devices: cuda, instances: 2        on a machine of two GPUs -> [gpu 0, gpu 1, gpu 0, gpu 1]
    devices: [cuda=bfloat16, cpu]      the same model, in another type on a GPU
    KIND_AUTO                          GPUs where there are any and the backend can use them, else the CPU

A worker on a GPU sees its own first, as cuda:0 (`visible` is its CUDA_VISIBLE_DEVICES), and the others behind
it: whatever a model calls plain `cuda` is its own, no context is created on another by mistake, and a model
that wants more of them can have them. CPU workers see what the server sees.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from fastserve.backends.registry import BackendEntry
from fastserve.devices.inventory import DeviceInventory, VisibleDevice
from fastserve.settings.fields import fault_text

DTYPES = ("float32", "bfloat16", "float16")
AUTO, CPU, GPU = "auto", "cpu", "cuda"
MOST_INSTANCES = 64
_ONE = re.compile(r"cuda:([0-9]{1,4})")
NO_GPU = "there is no GPU"
TORCH_WITHOUT = "cuda: Optional[str] = None"
ONNX_PROVIDER = "capi/libonnxruntime_providers_cuda.so"


class Placement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The device of one worker. `device` is its name for frameworks in that worker; `gpu` is the server's
    number of it, -1 for none."""

    device: str = CPU
    gpu: int = -1
    visible: str = ""
    bytes: int = 0
    """Bytes of its device that the worker may allocate; 0: no bound."""
    dtype: str = ""
    """The dtype of a torch model's weights and floating inputs there; "": as its options say."""


def place_on(
    devices: str | Sequence[str], count: int, entry: BackendEntry, machine: DeviceInventory
) -> list[Placement]:
    """Return `count` places on each of the devices that a model.yaml names. Raises ValueError for one that
    does not exist."""
    asked = [devices] if isinstance(devices, str) else list(devices)
    if not asked:
        raise ValueError(fault_text("devices", asked, "at least one device"))
    found: list[Placement] = []
    for one in asked:
        name, dtype = _read(one, entry)
        placed = _automatic(entry, machine) if name == AUTO and len(asked) == 1 else _named(name, machine)
        found += [replace(place, dtype=dtype) for place in placed]
    return found * count


def place_group(gpus: Sequence[int], count: int, machine: DeviceInventory) -> list[Placement]:
    """Return `count` places of an instance group on each of these GPUs, of those that exist."""
    return _spread(machine.devices(), gpus, count)


def check_dtype(field: str, given: str, entry: BackendEntry) -> str:
    """Return the dtype of an instance. Raises ValueError for one that it cannot have."""
    if given not in DTYPES:
        raise ValueError(fault_text(field, given, ", ".join(DTYPES)))
    if entry.name != "torch":
        raise ValueError(
            fault_text(field, given, f"none with the {entry.name} backend: only torch has types")
        )
    return given


def _read(asked: str, entry: BackendEntry) -> tuple[str, str]:
    name, has, dtype = asked.partition("=")
    return name, check_dtype("devices", dtype, entry) if has else ""


def _automatic(entry: BackendEntry, machine: DeviceInventory) -> list[Placement]:
    there = machine.devices()
    return [Placement()] if why_no_gpu(entry, machine) else _spread(there, range(len(there)), 1)


def why_no_gpu(entry: BackendEntry, machine: DeviceInventory) -> str:
    """Return why a model of this backend cannot compute on a GPU here, "" if it can."""
    if not entry.gpu:
        return f"the {entry.name} backend computes on the CPU"
    if not machine.devices():
        return NO_GPU
    if entry.framework == "torch" and not _is_for_cuda("torch", "version.py", TORCH_WITHOUT):
        return "the PyTorch that is installed was built without CUDA"
    if entry.framework == "onnxruntime" and not _is_for_cuda("onnxruntime", ONNX_PROVIDER):
        return "the ONNX Runtime that is installed has no CUDA (onnxruntime-gpu has)"
    return ""


def _named(name: str, machine: DeviceInventory) -> list[Placement]:
    if name == CPU:
        return [Placement()]
    number = _ONE.fullmatch(name)
    if name != GPU and number is None:
        raise ValueError(
            fault_text("devices", name, "cpu, cuda, cuda:N, or auto by itself, each with =dtype")
        )
    there = machine.devices()
    wanted = range(len(there)) if number is None else [int(number[1])]
    if not wanted or wanted[-1] >= len(there):
        names = ", ".join([CPU, AUTO, *([GPU] if there else []), *(f"cuda:{d.number}" for d in there)])
        allowed = names if there else f"{names}: {NO_GPU}"
        raise ValueError(fault_text("devices", name, allowed))
    return _spread(there, wanted, 1)


def _spread(there: Sequence[VisibleDevice], numbers: Sequence[int], count: int) -> list[Placement]:
    """Return places round by round over the devices: the first workers are on different ones."""
    return [
        Placement("cuda:0", number, ",".join([there[number].select, *_others(there, number)]))
        for _ in range(count)
        for number in numbers
    ]


def _others(there: Sequence[VisibleDevice], number: int) -> list[str]:
    return [device.select for device in there if device.number != number]


def _is_for_cuda(package: str, file: str, unless: str = "") -> bool:
    """Return whether an installed framework was built for CUDA, by its files: an import would cost the server
    its memory."""
    from importlib.util import find_spec

    spec = find_spec(package)
    folder = Path(spec.origin).parent if spec is not None and spec.origin else None
    if folder is None or not (folder / file).is_file():
        return False
    return not unless or unless not in (folder / file).read_text("utf-8", "replace")
