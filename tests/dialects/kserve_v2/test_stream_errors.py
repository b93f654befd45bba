"""An error that a decoupled model sends as one of its responses reaches the client, over HTTP and gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from fastserve.dialects.kserve_v2 import generate
from fastserve.dialects.kserve_v2.grpc_stream import _Conversation
from fastserve.errors import Kind, ServeError
from fastserve.request import InferResponse

KABOOM = ServeError(Kind.INTERNAL, "kaboom")


async def one_error(version: Any, request: Any) -> AsyncIterator[InferResponse]:
    yield InferResponse({}, error=KABOOM, final=False)


def test_generate_raises_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "make_request", lambda plan, body: None)
    service: Any = SimpleNamespace(stream=one_error)
    plan: Any = SimpleNamespace(decoupled=True, version=None)

    async def collect() -> list[bytes]:
        return [text async for text in generate._responses(service, plan, Any)]  # type: ignore[arg-type]

    with pytest.raises(ServeError, match="kaboom"):
        asyncio.run(collect())


def test_a_grpc_stream_writes_it_and_may_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[ServeError, bool]] = []

    def write_fault(self: Any, sent: Any, job: Any, fault: ServeError, *, final: bool) -> bytes:
        written.append((fault, final))
        return b"fault"

    monkeypatch.setattr(_Conversation, "_write_fault", write_fault)
    stream = object.__new__(_Conversation)
    response = InferResponse({}, error=KABOOM, final=False)
    assert stream._write_part(None, None, response) == b"fault"  # type: ignore[arg-type]
    assert written == [(KABOOM, False)]
