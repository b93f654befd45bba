"""POST ...:classify and ...:regress. Read the examples, await the engine, write the results.

Examples are read the general way, an object per value, so these bodies have a bound of their own, and from
64 KiB on are read apart from the event loop.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import Any

from fastserve._ext.json_writer import WriterCode, WriterFault, write_classifications, write_regressions
from fastserve.dialects.tfserving.errors import writer_error
from fastserve.dialects.tfserving.examples import read_examples
from fastserve.dialects.tfserving.features import feed
from fastserve.dialects.tfserving.results import (
    ResultPlan,
    classify_results,
    plan_results,
    regress_results,
)
from fastserve.dialects.tfserving.routes import Target
from fastserve.dialects.tfserving.service import GeneralRequest, Service
from fastserve.dialects.tfserving.signatures import find_signature, find_version
from fastserve.errors import invalid
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.slow_path import answer_slowly
from fastserve.tensor import Tensor
from fastserve.wire.call import Call

EXAMPLES_BYTES = 4 << 20
"""Largest body: 40 bytes of objects for one of text, at worst."""

WORK = 16
"""Times a body read into memory: what a byte of examples takes."""


class Examples:
    """The endpoint of one target with one of the verbs."""

    __slots__ = ("_service", "_target")

    def __init__(self, service: Service, target: Target) -> None:
        self._service, self._target = service, target

    def __call__(self, call: Call) -> Coroutine[Any, Any, None]:
        return answer_slowly(call, ExamplesRequest(self._service, self._target, call))


class ExamplesRequest(GeneralRequest):
    """One call of either verb."""

    async def read(self) -> InferRequest:
        service = self.service
        body = await service.body(self.call)
        if len(body) > EXAMPLES_BYTES:
            text = f"Request body of {len(body)} bytes is over the limit of {EXAMPLES_BYTES} for examples"
            raise invalid(text)
        work = len(body) * WORK
        examples = await service.apart(work, read_examples, body)
        version = self.version = find_version(service.catalog, self.target)
        signature = find_signature(version, examples.signature_name)
        self._plan = plan_results(
            self.target.verb,
            signature,
            batching=version.batching,
            by_method=service.options.check_methods,
        )
        self._count = len(examples.examples)
        inputs = await service.apart(work, feed, examples, signature, batching=version.batching)
        return InferRequest(inputs, tuple(self._plan.outputs.values()), deadline_ns=self.deadline_ns)

    async def write(self, response: InferResponse) -> None:
        keys = self.service.options.result_keys
        self.body = write_results(self.target.verb, self._plan, response.outputs, self._count, keys)


def write_results(
    verb: str, plan: ResultPlan, outputs: Mapping[str, Tensor], examples: int, keys: tuple[str, ...]
) -> bytes:
    """The body of a reply; `keys` are what the results are called. Raises ServeError."""
    try:
        if verb == "classify":
            return write_classifications(examples, *classify_results(plan, outputs, examples), keys)
        return write_regressions(regress_results(plan, outputs, examples), keys)
    except WriterFault as fault:
        if fault.code is not WriterCode.NO_RESULTS:
            raise writer_error(fault) from None
        noun = "ClassificationResults" if verb == "classify" else "RegressionResults"
        raise invalid(f"Cannot convert empty {noun} to JSON") from None
