"""The protocols a load can be made of, by the names `fastserve bench --protocol` has for them."""

from __future__ import annotations

from collections.abc import Callable

from fastserve.cli.load.chats import Chats, Completions
from fastserve.cli.load.requests import LoadProtocol
from fastserve.cli.load.tfserving import TFServingRaw, TFServingRows
from fastserve.cli.load.v2 import V2Binary, V2Grpc, V2Json
from fastserve.cli.load.v2_memory import V2GrpcMemory, V2Memory

PROTOCOLS: dict[str, Callable[[], LoadProtocol]] = {
    "tfserving": TFServingRows,
    "tfserving-raw": TFServingRaw,
    "v2": V2Json,
    "v2-binary": V2Binary,
    "v2-shm": V2Memory,
    "v2-grpc": V2Grpc,
    "v2-grpc-shm": V2GrpcMemory,
    "text": Completions,
    "chat": Chats,
}
