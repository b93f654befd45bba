"""The general path with a request of the test's own: what becomes of it when it fails after its answer."""

from __future__ import annotations

import asyncio
from time import monotonic_ns
from types import SimpleNamespace
from typing import Any

import pytest

from fastserve.errors import ServeError
from fastserve.metrics import Registry
from fastserve.metrics.names import Traffic
from fastserve.request import InferRequest
from fastserve.serving.slow_path import SlowRequest, answer_slowly


class Version:
    model, number = "m", 1


class Response:
    def release(self) -> None: ...


class Learner(SlowRequest):
    """It answers, and then what it has seen cannot be learned."""

    def __init__(self, registry: Registry) -> None:
        self.service: Any = SimpleNamespace(traffic=Traffic(registry, "test", {"m"}))
        self.sent: list[str] = []

    async def read(self) -> Any:
        self.version: Any = Version()
        return InferRequest({})

    async def run(self, request: Any) -> Any:
        return Response()

    async def write(self, response: Any) -> None:
        self.sent.append("answer")

    def answered(self, took_ns: int) -> None:
        raise ZeroDivisionError

    def refused(self, fault: ServeError) -> None:
        self.sent.append("refusal")


class Exchange:
    received_ns = monotonic_ns()


@pytest.mark.logs_errors
def test_what_cannot_be_learned_takes_no_answer_back(caplog: pytest.LogCaptureFixture) -> None:
    registry, exchange = Registry(), Exchange()
    request = Learner(registry)
    asyncio.run(answer_slowly(exchange, request))  # type: ignore[arg-type]
    assert request.sent == ["answer"]
    assert "nothing could be learned" in caplog.text
    assert (
        b'fastserve_requests_total{dialect="test",model="m",status="OK",version="1"} 1.0' in registry.expose()
    )
    caplog.clear()  # its traceback holds the meters, and they the registry's memory
    registry.close()
