"""V2 with tensors in system shared memory: requests name ranges of two regions, and hold no data at all.

    in     the inputs of one variant after another        out     room for the outputs of each

How much room an output needs is learned from one ordinary request for each variant, whose answer also
tells whether the model can be asked at all. The server must be on this machine, and allow it (here and in
recent Tritons: --allow-client-shm).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any
from urllib.parse import quote

import click

from fastserve.cli.load.requests import Request, Target, Wish, variants
from fastserve.cli.load.tensors import Input, packed
from fastserve.cli.load.v2 import (
    BINARY,
    HEADER_LENGTH,
    JSON,
    SERVICE,
    ask_inputs,
    ask_inputs_over_grpc,
    call,
    described,
    exchange,
    infer_path,
)
from fastserve.tensor import KSERVE_NAME

FOLDER = "/dev/shm"
ALIGN = 64


def align(size: int) -> int:
    return ceil(size / ALIGN) * ALIGN


class Region:
    """A file in shared memory that grows while it is filled. `name` is its name there and for the server."""

    def __init__(self, name: str) -> None:
        self.name, self.byte_size = name, 0
        self._path = os.path.join(FOLDER, name)
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)

    def reserve(self, size: int) -> int:
        """Where the next `size` bytes are."""
        at, self.byte_size = self.byte_size, self.byte_size + align(max(1, size))
        os.ftruncate(self._fd, self.byte_size)
        return at

    def put(self, data: bytes) -> int:
        """Where `data` is now."""
        at = self.reserve(len(data))
        os.pwrite(self._fd, data, at)
        return at

    def close(self) -> None:
        os.close(self._fd)
        os.unlink(self._path)


class V2Memory:
    """Over HTTP."""

    over_grpc = False
    events = False

    def __init__(self) -> None:
        self._regions: list[Region] = []
        self._target: Target | None = None

    def requests(self, target: Target, wish: Wish) -> list[Request]:
        if wish.data is not None:
            raise click.ClickException("--data cannot lie in shared memory")
        self._target = target
        self._regions = [Region(f"fastserve-bench-{os.getpid()}-{side}") for side in ("in", "out")]
        inputs = self.ask_inputs(target, wish)
        made = variants(lambda rng: self._variant(target, wish.model, inputs, rng))
        for region in self._regions:
            self.register(target, region)
        return made

    def close(self) -> None:
        """Take the regions back, from a server that may be gone."""
        for region in self._regions:
            if self._target is not None:
                with contextlib.suppress(click.ClickException):
                    self.unregister(self._target, region)
            region.close()
        self._regions = []

    def _variant(self, target: Target, model: str, inputs: Sequence[Input], rng: random.Random) -> Request:
        blobs = [packed(one, rng) for one in inputs]
        sizes = self.ask_sizes(target, model, inputs, blobs)
        source, room = self._regions
        places = [
            (one, place(source, source.put(blob), len(blob))) for one, blob in zip(inputs, blobs, strict=True)
        ]
        rooms = {name: place(room, room.reserve(size), size) for name, size in sizes.items()}
        return self.request(model, places, rooms)

    # --- what differs over gRPC ---

    def ask_inputs(self, target: Target, wish: Wish) -> list[Input]:
        return ask_inputs(target, wish)

    def ask_sizes(
        self, target: Target, model: str, inputs: Sequence[Input], blobs: Sequence[bytes]
    ) -> dict[str, int]:
        """The bytes of each output, as an ordinary request gets them."""
        tensors = [
            {**described(one), "parameters": {"binary_data_size": len(blob)}}
            for one, blob in zip(inputs, blobs, strict=True)
        ]
        header = json.dumps({"inputs": tensors, "parameters": {"binary_data_output": True}}).encode()
        body = b"".join((header, *blobs))
        answer = target.http.ask(infer_path(model), body, BINARY, {HEADER_LENGTH: str(len(header))})
        # JSON, and bytes after it that need not be read
        shown, _ = json.JSONDecoder().raw_decode(answer.decode("latin-1"))
        return {one["name"]: int(one["parameters"]["binary_data_size"]) for one in shown["outputs"]}

    def register(self, target: Target, region: Region) -> None:
        body = {"key": f"/{region.name}", "offset": 0, "byte_size": region.byte_size}
        target.http.ask(region_path(region, "register"), json.dumps(body).encode())

    def unregister(self, target: Target, region: Region) -> None:
        target.http.ask(region_path(region, "unregister"), b"")

    def request(
        self, model: str, places: Sequence[tuple[Input, dict[str, Any]]], rooms: Mapping[str, dict[str, Any]]
    ) -> Request:
        body = {
            "inputs": [{**described(one), "parameters": where} for one, where in places],
            "outputs": [{"name": name, "parameters": where} for name, where in rooms.items()],
        }
        return Request(infer_path(model), JSON, json.dumps(body).encode())


class V2GrpcMemory(V2Memory):
    """Over gRPC."""

    over_grpc = True
    events = False

    def ask_inputs(self, target: Target, wish: Wish) -> list[Input]:
        return ask_inputs_over_grpc(target, wish)

    def ask_sizes(
        self, target: Target, model: str, inputs: Sequence[Input], blobs: Sequence[bytes]
    ) -> dict[str, int]:
        from fastserve.protos import load

        messages = load("kserve_v2")
        asked = messages.ModelInferRequest(model_name=model, raw_input_contents=list(blobs))
        for one in inputs:
            asked.inputs.add(name=one.name, datatype=KSERVE_NAME[one.dtype], shape=one.shape)
        answer = exchange(target, f"{SERVICE}ModelInfer", asked.SerializeToString())
        found = messages.ModelInferResponse.FromString(answer)
        return {o.name: len(raw) for o, raw in zip(found.outputs, found.raw_output_contents, strict=True)}

    def register(self, target: Target, region: Region) -> None:
        key = f"/{region.name}"
        call(target, "SystemSharedMemoryRegister", name=region.name, key=key, byte_size=region.byte_size)

    def unregister(self, target: Target, region: Region) -> None:
        call(target, "SystemSharedMemoryUnregister", name=region.name)

    def request(
        self, model: str, places: Sequence[tuple[Input, dict[str, Any]]], rooms: Mapping[str, dict[str, Any]]
    ) -> Request:
        from fastserve.protos import load

        message = load("kserve_v2").ModelInferRequest(model_name=model)
        for one, where in places:
            tensor = message.inputs.add(name=one.name, datatype=KSERVE_NAME[one.dtype], shape=one.shape)
            set_place(tensor.parameters, where)
        for name, where in rooms.items():
            set_place(message.outputs.add(name=name).parameters, where)
        return Request(f"{SERVICE}ModelInfer", "", message.SerializeToString())


def place(region: Region, offset: int, size: int) -> dict[str, Any]:
    """A range as both transports name it."""
    return {
        "shared_memory_region": region.name,
        "shared_memory_byte_size": size,
        "shared_memory_offset": offset,
    }


def set_place(parameters: Any, where: Mapping[str, Any]) -> None:
    for name, value in where.items():
        if isinstance(value, str):
            parameters[name].string_param = value
        else:
            parameters[name].int64_param = value


def region_path(region: Region, verb: str) -> str:
    return f"/v2/systemsharedmemory/region/{quote(region.name, safe='')}/{verb}"
