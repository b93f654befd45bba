"""Classify, Regress and MultiInference: examples in messages, classifications and regressions out (spec 4.4).

What examples mean, how a model is fed with them and what its outputs must be is `examples`, `features` and
`results`, as over REST. MultiInference runs each of its tasks as a request of its own, on one version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from fastserve._ext.flatten import unpack_bytes
from fastserve.dialects.tfserving.classify import WORK
from fastserve.dialects.tfserving.examples import Example, ExampleList, Feature, FeatureKind
from fastserve.dialects.tfserving.features import feed
from fastserve.dialects.tfserving.grpc_spec import fill_spec, find_model, refuse_rpc, target_of
from fastserve.dialects.tfserving.results import ResultPlan, classify_results, plan_results, regress_results
from fastserve.dialects.tfserving.service import Service
from fastserve.dialects.tfserving.signatures import find_signature
from fastserve.errors import Kind, ServeError, invalid
from fastserve.protos import load
from fastserve.repository.signature import DEFAULT_SIGNATURE, Signature
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.exchange import deadline_of
from fastserve.serving.rpc import answer_rpc, serialize
from fastserve.serving.slow_path import SlowRequest
from fastserve.wire.grpc import Awaited, Rpc

MESSAGES = load("tfserving")
MOST_VALUES = 1 << 19  # examples, features and values of one request: each becomes an object
MOST_TASKS = 1024
METHODS = {"tensorflow/serving/classify": "classify", "tensorflow/serving/regress": "regress"}
_APIS = {"classify": "Classify", "regress": "Regress"}
_KINDS: dict[str, FeatureKind] = {"int64_list": "int64", "float_list": "float", "bytes_list": "bytes"}
_EMPTY = "Input is empty."


class ByExamples:
    """One of the two verbs as an RPC."""

    def __init__(self, service: Service, verb: str) -> None:
        self._service, self._verb = service, verb

    async def __call__(self, request: Any, rpc: Rpc) -> bytes:
        """A ClassificationRequest or RegressionRequest -> the serialized response. Raises ServeError."""
        try:
            target = target_of(request)
            version = find_model(self._service.catalog, target)
            signature = find_signature(version, request.model_spec.signature_name)
        except ServeError as fault:
            raise refuse_rpc(self._service, request.model_spec.name, fault) from None
        asked = Asked(self._service, rpc, version, request.input)
        return await asked.run(signature, self._verb, self._write)

    def _write(self, signature: Signature, version: Version, result: Any) -> bytes:
        kind = MESSAGES.ClassificationResponse if self._verb == "classify" else MESSAGES.RegressionResponse
        response = kind(result=result)
        fill_spec(response.model_spec, version, signature.name)
        return serialize(response)


class MultiInference:
    """Several signatures of one model on the same examples."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, request: Any, rpc: Rpc) -> bytes:
        """A MultiInferenceRequest -> a serialized MultiInferenceResponse. Raises ServeError."""
        try:
            version, tasks = self._read_tasks(request)
        except ServeError as fault:
            name = request.tasks[0].model_spec.name if request.tasks else ""
            raise refuse_rpc(self._service, name, fault, on_page=False) from None
        asked = Asked(self._service, rpc, version, request.input, on_page=False)
        runs = [asked.run(signature, verb, _write_task) for signature, verb in tasks]
        response = MESSAGES.MultiInferenceResponse()
        for written in await all_of(runs):
            response.results.add().ParseFromString(written)
        self._service.observe_tasks(version.model, asked.ran_ns, asked.count)
        return serialize(response)

    def _read_tasks(self, request: Any) -> tuple[Version, list[tuple[Signature, str]]]:
        if not request.tasks:
            raise invalid("ModelSpec has no name specified.")
        version = find_model(self._service.catalog, target_of(request.tasks[0]))
        return version, check_tasks(version, request.tasks)


def check_tasks(version: Version, given: Any) -> list[tuple[Signature, str]]:
    """The signature and the verb of each InferenceTask. Raises ServeError."""
    if not given:
        raise invalid("ModelSpec has no name specified.")
    if len(given) > MOST_TASKS:
        raise invalid(f"{len(given)} tasks, allowed: up to {MOST_TASKS}")
    tasks: dict[str, tuple[Signature, str]] = {}
    for task in given:
        name = task.model_spec.signature_name or DEFAULT_SIGNATURE
        _check_task(task, given[0].model_spec.name, name in tasks)
        tasks[name] = _find_task(version, task, name)
    return list(tasks.values())


def _check_task(task: Any, model: str, doubled: bool) -> None:
    name = task.model_spec.signature_name or DEFAULT_SIGNATURE
    if not task.model_spec.name:
        raise invalid("Found ModelSpec with an empty model name.")
    if task.model_spec.name != model:
        raise invalid("All ModelSpecs in a MultiInferenceRequest must access the same model name.")
    if doubled:
        raise invalid(f"Duplicate evaluation of signature: {name}")


def _find_task(version: Version, task: Any, name: str) -> tuple[Signature, str]:
    signature = version.signatures.get(name)
    if signature is None:
        raise invalid(f"Requested signature not found in model graph: {name}")
    verb = METHODS.get(task.method_name)
    if verb is None:
        text = f"Unsupported signature method_name: {task.method_name}"
        raise ServeError(Kind.UNIMPLEMENTED, text)
    return signature, verb


def _write_task(signature: Signature, version: Version, result: Any) -> bytes:
    kind = (
        "classification_result" if result.DESCRIPTOR.name == "ClassificationResult" else "regression_result"
    )
    task = MESSAGES.InferenceResult(**{kind: result})
    fill_spec(task.model_spec, version, signature.name)
    return serialize(task)


async def all_of(runs: Sequence[Awaitable[bytes]]) -> list[bytes]:
    """What each of them gives, when all have ended. Raises what the first that failed raised."""
    found = []
    for result in await asyncio.gather(*runs, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
        found.append(result)
    return found


# --- one run -------------------------------------------------------------------------------------

Write = Callable[[Signature, Version, Any], bytes]


class Asked:
    """What one RPC brings for all its runs; the examples are read once. `on_page`: each run is a request on
    the original's metrics page."""

    def __init__(
        self, service: Service, rpc: Rpc, version: Version, given: Any, *, on_page: bool = True
    ) -> None:
        self.service, self.rpc, self.version, self.given = service, rpc, version, given
        self.on_page = on_page
        self.ran_ns = self.count = 0  # by the run that took longest; of examples
        self._examples: ExampleList | None = None

    async def run(self, signature: Signature, verb: str, write: Write) -> bytes:
        """What `write` makes of the result. Raises ServeError."""
        return await answer_rpc(self.rpc.received_ns, partial(Run, self, signature, verb, write))

    async def examples(self) -> ExampleList:
        """Raises ServeError."""
        if self._examples is None:
            work = self.given.ByteSize() * WORK
            self._examples = await self.service.apart(work, read_input, self.given)
        return self._examples


class Run(SlowRequest):
    """One signature on the examples of an RPC."""

    service: Service

    def __init__(
        self, asked: Asked, signature: Signature, verb: str, write: Write, exchange: Awaited
    ) -> None:
        self.service, self._asked, self._exchange = asked.service, asked, exchange
        self._signature, self._verb, self._write = signature, verb, write
        self.version = asked.version

    async def read(self) -> InferRequest:
        asked, signature, batching = self._asked, self._signature, self.version.batching
        by_method = self.service.options.check_methods
        self._plan = plan_results(self._verb, signature, batching=batching, by_method=by_method)
        examples = await asked.examples()
        self._count = asked.count = len(examples.examples)
        work = asked.given.ByteSize() * WORK
        inputs = await self.service.apart(work, feed, examples, signature, batching=batching)
        return InferRequest(inputs, tuple(self._plan.outputs.values()), deadline_ns=deadline_of(asked.rpc))

    async def write(self, response: InferResponse) -> None:
        make = make_classifications if self._verb == "classify" else make_regressions
        self._result = make(self._plan, response.outputs, self._count)

    async def send(self) -> None:
        self._exchange.reply(self._write(self._signature, self.version, self._result))

    def answered(self, took_ns: int) -> None:
        asked = self._asked
        asked.ran_ns = max(asked.ran_ns, self.ran_ns)
        if asked.on_page:
            self.service.observe(self.version.model, _APIS[self._verb], took_ns, self.ran_ns, "GRPC")

    def refused(self, fault: ServeError) -> None:
        on_page = self._asked.on_page
        self._exchange.refuse(refuse_rpc(self.service, self.version.model, fault, on_page=on_page))


# --- messages ------------------------------------------------------------------------------------


def read_input(given: Any) -> ExampleList:
    """An Input. Raises ServeError."""
    kind = given.WhichOneof("kind")
    if kind is None or not getattr(given, kind).examples:
        raise invalid(_EMPTY)
    chosen = getattr(given, kind)
    context = None
    if kind == "example_list_with_context" and chosen.HasField("context"):
        context = chosen.context
    reader = _Reader(MOST_VALUES)
    return ExampleList(
        "", [reader.read(one) for one in chosen.examples], None if context is None else reader.read(context)
    )


class _Reader:
    """Examples as objects, so many at most."""

    def __init__(self, most: int) -> None:
        self._left = most

    def read(self, given: Any) -> Example:
        """Raises ServeError."""
        found = {name: self._read_feature(feature) for name, feature in given.features.feature.items()}
        self._take(1 + len(found))
        return found

    def _read_feature(self, given: Any) -> Feature:
        kind = given.WhichOneof("kind")
        if kind is None:
            return Feature()
        values = getattr(given, kind).value
        self._take(len(values))
        return Feature(_KINDS[kind] if values else "", list(values))

    def _take(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise invalid(f"the examples have more than {MOST_VALUES} features and values")


def make_classifications(plan: ResultPlan, outputs: Any, examples: int) -> Any:
    """A ClassificationResult. Raises ServeError."""
    count, labels, scores = classify_results(plan, outputs, examples)
    values = [0.0] * (count * examples) if scores is None else memoryview(scores).cast("B").cast("f").tolist()
    texts = [b""] * (count * examples) if labels is None else unpack_bytes(labels, count * examples)
    result = MESSAGES.ClassificationResult()
    for example in range(examples):
        classes = result.classifications.add().classes
        for index in range(example * count, (example + 1) * count):
            classes.add(label=texts[index].decode("utf-8", "replace"), score=values[index])
    return result


def make_regressions(plan: ResultPlan, outputs: Any, examples: int) -> Any:
    """A RegressionResult. Raises ServeError."""
    values = memoryview(regress_results(plan, outputs, examples)).cast("B").cast("f").tolist()
    return MESSAGES.RegressionResult(regressions=[MESSAGES.Regression(value=value) for value in values])
