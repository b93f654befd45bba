"""POST ...:classify and ...:regress. Read the examples, await the engine, write the results.

Examples are read the general way, an object per value, so these bodies have a bound of their own, and from
64 KiB on are read apart from the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fastserve.dialects.tfserving.errors import invalid
from fastserve.dialects.tfserving.examples import read_examples
from fastserve.dialects.tfserving.features import feed
from fastserve.dialects.tfserving.lookup import find_example_signature, find_version
from fastserve.dialects.tfserving.results import (
    ResultPlan,
    plan_classify,
    plan_regress,
    write_classify,
    write_regress,
)
from fastserve.dialects.tfserving.routes import Target
from fastserve.dialects.tfserving.service import MAX_DEPTH, Service
from fastserve.errors import ServeError
from fastserve.request import InferRequest
from fastserve.tensor import Tensor
from fastserve.wire.call import Call

EXAMPLES_BYTES = 4 << 20
"""Largest body: 40 bytes of objects for one of text, at worst."""

WORK = 16
"""Times a body read into memory: what a byte of examples takes."""

PlanResult = Callable[..., ResultPlan]
WriteResult = Callable[[ResultPlan, Mapping[str, Tensor], int, tuple[str, ...]], bytes]
VERBS: dict[str, tuple[PlanResult, WriteResult]] = {
    "classify": (plan_classify, write_classify),
    "regress": (plan_regress, write_regress),
}


class Examples:
    """The endpoint of one target with one of VERBS."""

    __slots__ = ("_service", "_target")

    def __init__(self, service: Service, target: Target) -> None:
        self._service = service
        self._target = target

    async def __call__(self, call: Call) -> None:
        service, target = self._service, self._target
        try:
            reply = await self._run(call)
        except ServeError as fault:
            service.refuse(call, target.name, fault)
        else:
            service.answer(call, target.name, reply, target.verb)

    async def _run(self, call: Call) -> bytes:
        service = self._service
        make_plan, write = VERBS[self._target.verb]
        body = _bounded(await service.body(call))
        work = len(body) * WORK
        examples = await service.apart(work, read_examples, body, MAX_DEPTH)
        version = find_version(service.catalog, self._target)
        signature = find_example_signature(version, examples.signature_name)
        plan = make_plan(signature, batching=version.batching)
        request = InferRequest(
            await service.apart(work, feed, examples, signature, batching=version.batching),
            tuple(plan.outputs.values()),
            deadline_ns=service.deadline_ns(call),
        )
        response = await service.engine.infer(version, request)
        try:
            return write(plan, response.outputs, len(examples.examples), service.options.result_keys)
        finally:
            response.release()


def _bounded(body: bytes | bytearray) -> bytes | bytearray:
    if len(body) > EXAMPLES_BYTES:
        raise invalid(f"Request body of {len(body)} bytes is over the limit of {EXAMPLES_BYTES} for examples")
    return body
