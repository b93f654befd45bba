"""Both dialects with device memory, over both transports, read alike: lending it, using it, taking it back.

with speaker("v1", "http", served) as say:
    say.register("r", allocation.handle, 0, 4096)      Told(good, code, words)
    asked = say.infer("near", "r", 2)                  x at 0, y at 512, sum to 1024
    asked.told(), or asked.leave()
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from google.protobuf import text_format

from fastserve.protos import load
from tests.faults.rig import Http, message, request_bytes, tensor
from tests.running import WAIT_S, Running

V1, V2 = load("triton_v1"), load("kserve_v2")
ALL = [(dialect, transport) for dialect in ("v1", "v2") for transport in ("http", "grpc")]
ROW, SUCCESS = 64, 1


@dataclass(frozen=True)
class Told:
    """Whether it went well; the HTTP status or the code of gRPC or of V1; and the words of a refusal."""

    good: bool
    code: int
    words: str


@dataclass(frozen=True)
class Asked:
    """A request that is under way."""

    told: Callable[[], Told]
    leave: Callable[[], object]


class Speaker(Protocol):
    """One client."""

    def begin(self, name: str, handle: bytes, device: int, nbytes: int) -> Asked: ...
    def register(self, name: str, handle: bytes, device: int, nbytes: int) -> Told: ...
    def unregister(self, name: str) -> Told: ...
    def infer(self, model: str, name: str, rows: int, *, size: int = 0, to: int = 1024) -> Asked: ...


def place(name: str, offset: int, nbytes: int) -> dict[str, Any]:
    """Parameters of V2."""
    return {
        "shared_memory_region": name,
        "shared_memory_offset": offset,
        "shared_memory_byte_size": nbytes,
    }


class V2Http:
    def __init__(self, http: Http) -> None:
        self._http = http

    def _post(self, path: str, body: Any) -> Told:
        answer = self._http.post(path, body)
        return Told(answer.status == 200, answer.status, answer.error)

    def begin(self, name: str, handle: bytes, device: int, nbytes: int) -> Asked:
        raw = {"b64": base64.b64encode(handle).decode()}
        body = {"raw_handle": raw, "device_id": device, "byte_size": nbytes}
        path = f"/v2/cudasharedmemory/region/{name}/register"
        self._http.send(request_bytes("POST", path, json.dumps(body).encode()))
        return Asked(self._read, self._http.close)

    def register(self, name: str, handle: bytes, device: int, nbytes: int) -> Told:
        return self.begin(name, handle, device, nbytes).told()

    def unregister(self, name: str) -> Told:
        return self._post(f"/v2/cudasharedmemory/region/{name}/unregister", {})

    def infer(self, model: str, name: str, rows: int, *, size: int = 0, to: int = 1024) -> Asked:
        nbytes = rows * ROW
        body = {
            "inputs": [
                tensor(one, [rows, 16], datatype="FP32", **place(name, at, nbytes))
                for one, at in (("x", 0), ("y", 512))
            ],
            "outputs": [{"name": "sum", "parameters": place(name, to, size or nbytes)}],
        }
        path = f"/v2/models/{model}/infer"
        self._http.send(request_bytes("POST", path, json.dumps(body).encode()))
        return Asked(self._read, self._http.close)

    def _read(self) -> Told:
        answer = self._http.read()
        return Told(answer.status == 200, answer.status, answer.error)


class V1Http:
    def __init__(self, http: Http) -> None:
        self._http = http

    def _read(self) -> Told:
        answer = self._http.read()
        status = text_format.Parse(answer.headers["nv-status"], V1.RequestStatus())
        return Told(answer.status == 200, answer.status, status.msg)

    def _control(self, path: str, body: bytes = b"") -> Asked:
        self._http.send(request_bytes("POST", f"/api/sharedmemorycontrol/{path}", body))
        return Asked(self._read, self._http.close)

    def begin(self, name: str, handle: bytes, device: int, nbytes: int) -> Asked:
        return self._control(f"cudaregister/{name}/{nbytes}/{device}", handle)

    def register(self, name: str, handle: bytes, device: int, nbytes: int) -> Told:
        return self.begin(name, handle, device, nbytes).told()

    def unregister(self, name: str) -> Told:
        return self._control(f"unregister/{name}").told()

    def infer(self, model: str, name: str, rows: int, *, size: int = 0, to: int = 1024) -> Asked:
        there = f'shared_memory {{ name: "{name}" offset: %d byte_size: %d }}'
        inputs = "".join(
            f'input {{ name: "{one}" {there % (at, rows * ROW)} }} ' for one, at in (("x", 0), ("y", 512))
        )
        output = f'output {{ name: "sum" {there % (to, size or rows * ROW)} }}'
        header = f"batch_size: {rows} {inputs}{output}"
        self._http.send(request_bytes("POST", f"/api/infer/{model}", b"", NV_InferRequest=header))
        return Asked(self._read, self._http.close)


class V2Grpc:
    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def _ask(self, method: str, request: Any) -> Asked:
        call = self._channel.unary_unary(f"/inference.GRPCInferenceService/{method}").future(
            request.SerializeToString(), timeout=WAIT_S
        )

        def told() -> Told:
            return Told(call.code().value[0] == 0, call.code().value[0], call.details())

        return Asked(told, call.cancel)

    def begin(self, name: str, handle: bytes, device: int, nbytes: int) -> Asked:
        asked = V2.CudaSharedMemoryRegisterRequest(
            name=name, raw_handle=handle, device_id=device, byte_size=nbytes
        )
        return self._ask("CudaSharedMemoryRegister", asked)

    def register(self, name: str, handle: bytes, device: int, nbytes: int) -> Told:
        return self.begin(name, handle, device, nbytes).told()

    def unregister(self, name: str) -> Told:
        return self._ask("CudaSharedMemoryUnregister", V2.CudaSharedMemoryUnregisterRequest(name=name)).told()

    def infer(self, model: str, name: str, rows: int, *, size: int = 0, to: int = 1024) -> Asked:
        asked = message(model, *((one, "FP32", [rows, 16], None) for one in ("x", "y")))
        wanted = [(one, at, rows * ROW) for one, at in zip(asked.inputs, (0, 512), strict=True)]
        wanted.append((asked.outputs.add(name="sum"), to, size or rows * ROW))
        for one, at, nbytes in wanted:
            one.parameters["shared_memory_region"].string_param = name
            one.parameters["shared_memory_offset"].int64_param = at
            one.parameters["shared_memory_byte_size"].int64_param = nbytes
        return self._ask("ModelInfer", asked)


class V1Grpc:
    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def _ask(self, method: str, request: Any, reply: str) -> Asked:
        call = self._channel.unary_unary(f"/nvidia.inferenceserver.GRPCService/{method}").future(
            request.SerializeToString(), timeout=WAIT_S
        )

        def told() -> Told:
            status = getattr(V1, reply).FromString(call.result()).request_status
            return Told(status.code == SUCCESS, status.code, status.msg)

        return Asked(told, call.cancel)

    def _control(self, asked: Any) -> Asked:
        return self._ask("SharedMemoryControl", asked, "SharedMemoryControlResponse")

    def register(self, name: str, handle: bytes, device: int, nbytes: int) -> Told:
        return self.begin(name, handle, device, nbytes).told()

    def begin(self, name: str, handle: bytes, device: int, nbytes: int) -> Asked:
        asked = V1.SharedMemoryControlRequest()
        asked.register.name, asked.register.byte_size = name, nbytes
        asked.register.cuda_shared_memory.raw_handle = handle
        asked.register.cuda_shared_memory.device_id = device
        return self._control(asked)

    def unregister(self, name: str) -> Told:
        asked = V1.SharedMemoryControlRequest()
        asked.unregister.name = name
        return self._control(asked).told()

    def infer(self, model: str, name: str, rows: int, *, size: int = 0, to: int = 1024) -> Asked:
        asked = V1.InferRequest(model_name=model, model_version=-1)
        asked.meta_data.batch_size = rows
        wanted = [(asked.meta_data.input.add(name=n), at, rows * ROW) for n, at in (("x", 0), ("y", 512))]
        wanted.append((asked.meta_data.output.add(name="sum"), to, size or rows * ROW))
        for one, at, nbytes in wanted:
            one.shared_memory.name, one.shared_memory.offset, one.shared_memory.byte_size = name, at, nbytes
        return self._ask("Infer", asked, "InferResponse")


@contextmanager
def speaker(dialect: str, transport: str, served: Running) -> Iterator[Speaker]:
    """One client of its own connection."""
    if transport == "http":
        with Http(served) as http:
            yield V1Http(http) if dialect == "v1" else V2Http(http)
        return
    with grpc.insecure_channel(served.grpc, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield V1Grpc(channel) if dialect == "v1" else V2Grpc(channel)
