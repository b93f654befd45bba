"""The RPCs of TensorFlow Serving's two services (spec 4.4): all but Predict, and the table of them.

Examples, the feeding of models and the checks of their outputs are REST's (`examples`, `classify`).
MultiInference runs each of its tasks as a request of its own, on one version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from google.protobuf.json_format import ParseDict

from fastserve._ext.flatten import unpack_bytes
from fastserve.dialects.tfserving.classify import (
    EXAMPLES_BYTES,
    WORK,
    Example,
    ExampleList,
    Feature,
    FeatureKind,
    ResultPlan,
    classify_results,
    feed,
    plan_results,
    regress_results,
)
from fastserve.dialects.tfserving.grpc_predict import PredictRpc
from fastserve.dialects.tfserving.metadata import find_versions, signature_def, status_of
from fastserve.dialects.tfserving.routes import MODEL_SERVICE, PREDICTION_SERVICE, RPCS, Target
from fastserve.dialects.tfserving.service import (
    TFServingService,
    fill_spec,
    find_model,
    find_signature,
    refuse_rpc,
    status_error,
    target_of,
)
from fastserve.errors import ConfigError, Kind, ServeError, invalid
from fastserve.net.grpc import AwaitedExchange, Method, Rpc
from fastserve.protos import load
from fastserve.repository.catalog import Catalog
from fastserve.repository.model_config import DEFAULT_SIGNATURE, Signature
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.exchange import deadline_of
from fastserve.serving.rpc import answer_rpc, parse_message, serialize
from fastserve.serving.slow_path import SlowRequest
from fastserve.settings import ModelEntry
from fastserve.settings.fields import convert
from fastserve.settings.tensorflow import check_paths

MESSAGES = load("tfserving")
MOST_VALUES = 1 << 19  # examples, features and values of one request: each becomes an object
MOST_TASKS = 1024
METHODS = {"tensorflow/serving/classify": "classify", "tensorflow/serving/regress": "regress"}
_APIS = {"classify": "Classify", "regress": "Regress"}
_KINDS: dict[str, FeatureKind] = {"int64_list": "int64", "float_list": "float", "bytes_list": "bytes"}
_EMPTY = "Input is empty."


class ExamplesRpc:
    """One of the two verbs as an RPC."""

    def __init__(self, service: TFServingService, verb: str) -> None:
        self._service, self._verb = service, verb

    async def __call__(self, request: Any, rpc: Rpc) -> bytes:
        """A ClassificationRequest or RegressionRequest -> the serialized response. Raises ServeError."""
        try:
            target = target_of(request)
            version = find_model(self._service.catalog, target)
            signature = find_signature(version, request.model_spec.signature_name)
        except ServeError as fault:
            raise refuse_rpc(self._service, rpc, request.model_spec.name, fault) from None
        asked = ExamplesCall(self._service, rpc, version, request.input)
        return await asked.run(signature, self._verb, self._write)

    def _write(self, signature: Signature, version: Version, result: Any) -> bytes:
        kind = MESSAGES.ClassificationResponse if self._verb == "classify" else MESSAGES.RegressionResponse
        response = kind(result=result)
        fill_spec(response.model_spec, version, signature.name)
        return serialize(response)


class MultiInferenceRpc:
    """Several signatures of one model on the same examples."""

    def __init__(self, service: TFServingService) -> None:
        self._service = service

    async def __call__(self, request: Any, rpc: Rpc) -> bytes:
        """A MultiInferenceRequest -> a serialized MultiInferenceResponse. Raises ServeError."""
        try:
            version, tasks = self._read_tasks(request)
        except ServeError as fault:
            name = request.tasks[0].model_spec.name if request.tasks else ""
            raise refuse_rpc(self._service, rpc, name, fault, on_page=False) from None
        asked = ExamplesCall(self._service, rpc, version, request.input, on_page=False)
        runs = [asked.run(signature, verb, _write_task) for signature, verb in tasks]
        response = MESSAGES.MultiInferenceResponse()
        for written in await gather_all(runs):
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


async def gather_all(runs: Sequence[Awaitable[bytes]]) -> list[bytes]:
    """Return the results when all have ended. Raises the error of the first that failed."""
    found = []
    for result in await asyncio.gather(*runs, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
        found.append(result)
    return found


# --- one run -------------------------------------------------------------------------------------

Write = Callable[[Signature, Version, Any], bytes]


class ExamplesCall:
    """The version and the examples, read once, of all runs of one RPC. `on_page`: each run is a request on
    the original's metrics page."""

    def __init__(
        self, service: TFServingService, rpc: Rpc, version: Version, given: Any, *, on_page: bool = True
    ) -> None:
        self.service, self.rpc, self.version, self.given = service, rpc, version, given
        self.on_page = on_page
        self.ran_ns = self.count = 0  # by the run that took longest; of examples
        self._examples: ExampleList | None = None

    async def run(self, signature: Signature, verb: str, write: Write) -> bytes:
        """Run a signature, and return its result as `write` serializes it. Raises ServeError."""
        return await answer_rpc(self.rpc.received_ns, partial(SignatureRun, self, signature, verb, write))

    async def examples(self) -> ExampleList:
        """Raises ServeError."""
        if self._examples is None:
            work = self.given.ByteSize() * WORK
            self._examples = await self.service.offload(work, read_input, self.given)
        return self._examples


class SignatureRun(SlowRequest):
    """One signature on the examples of an RPC."""

    service: TFServingService

    def __init__(
        self, asked: ExamplesCall, signature: Signature, verb: str, write: Write, exchange: AwaitedExchange
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
        inputs = await self.service.offload(work, feed, examples, signature, batching=batching)
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
        self._exchange.refuse(
            refuse_rpc(self.service, self._exchange, self.version.model, fault, on_page=on_page)
        )


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
    reader = ExampleReader(MOST_VALUES)
    return ExampleList(
        "", [reader.read(one) for one in chosen.examples], None if context is None else reader.read(context)
    )


class ExampleReader:
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


SIGNATURE_DEF = "signature_def"
TYPE_URL = "type.googleapis.com/tensorflow.serving.SignatureDefMap"
PLATFORM = "tensorflow"
NOT_ALLOWED = "Replacing the models is disabled. Start the server with '--admin-reload-config' to enable."


class ModelRpcs:
    """One method for each RPC: a request message in, a response message out. All raise ServeError."""

    def __init__(self, service: TFServingService) -> None:
        self._service = service

    async def get_model_metadata(self, request: Any) -> Any:
        target = target_of(request)
        if not request.metadata_field:
            raise invalid("GetModelMetadataRequest must specify at least one metadata_field")
        for field in request.metadata_field:
            if field != SIGNATURE_DEF:
                raise invalid(f"Metadata field {field} is not supported")
        version = find_model(self._service.catalog, target)
        defs = {
            name: signature_def(signature, batching=version.batching)
            for name, signature in version.signatures.items()
        }
        described = ParseDict({"signature_def": defs}, MESSAGES.SignatureDefMap())
        response = MESSAGES.GetModelMetadataResponse()
        fill_spec(response.model_spec, version, None)
        held = response.metadata[SIGNATURE_DEF]
        held.type_url, held.value = TYPE_URL, described.SerializeToString()
        return response

    async def get_model_status(self, request: Any) -> Any:
        """Every version ever seen, highest first; a label is ignored."""
        target = target_of(request)
        found = find_versions(self._service.catalog, Target(target.name, target.version, None, ""))
        return ParseDict(status_of(found), MESSAGES.GetModelStatusResponse())

    async def reload_config(self, request: Any) -> Any:
        """Serve these models and no others; returns when they are there."""
        service = self._service
        admin = service.admin
        if not (admin.reload_config or admin.reload_saved):
            raise ServeError(Kind.UNIMPLEMENTED, NOT_ALLOWED)
        entries = read_config(request.config, service.catalog)
        if not admin.reload_config:
            own = {(entry.name, entry.base_path) for entry in service.context.settings.models}
            entries = [
                entry
                if (entry.name, entry.base_path) in own
                else msgspec.structs.replace(entry, saved_model=True)
                for entry in entries
            ]
        await service.repository.replace_models(entries)
        response = MESSAGES.ReloadConfigResponse()
        response.status.SetInParent()
        return response


def with_status(run: Any) -> Any:
    """Wrap a method of `ModelRpcs` for the transport: faults have the original's statuses and texts."""

    async def answer(request: Any, rpc: object) -> Any:
        try:
            return await run(request)
        except ServeError as fault:
            raise status_error(fault) from None

    return answer


# --- the list of models --------------------------------------------------------------------------


def read_config(config: Any, catalog: Catalog) -> list[ModelEntry]:
    """A ModelServerConfig. Raises ServeError for a list that cannot be, as a whole."""
    if config.WhichOneof("config") != "model_config_list":
        raise invalid(
            "ServerModelConfig type not supported by HandleReloadConfigRequest. "
            "Only ModelConfigList is currently supported"
        )
    given = config.model_config_list.config
    names: set[str] = set()
    for one in given:
        if one.name in names:
            raise invalid(f"Illegal to list model {one.name} multiple times in config list")
        names.add(one.name)
    try:
        check_paths([{"name": one.name, "base_path": one.base_path} for one in given])
    except ConfigError as fault:
        raise invalid(str(fault)) from None
    return [_read_model(number, one, catalog) for number, one in enumerate(given)]


def _read_model(number: int, given: Any, catalog: Catalog) -> ModelEntry:
    _check_platform(given, catalog)
    if given.HasField("logging_config"):
        raise invalid(f"logging_config of model {given.name}: logs of requests are not built")
    entry = {"name": given.name, "base_path": given.base_path, "version_policy": _policy(given)}
    entry["labels"] = dict(given.version_labels) or None
    try:
        return convert(entry, ModelEntry, f"model_config_list.config[{number}]")
    except ConfigError as fault:
        raise invalid(str(fault)) from None


def _check_platform(given: Any, catalog: Catalog) -> None:
    """One word stands for everything that is served here, as it does in the configuration file."""
    platform = given.model_platform
    if given.model_type:  # the field that came before it
        if platform:
            raise invalid(
                "Illegal setting both ModelServerConfig::model_type (deprecated) and "
                "ModelServerConfig::model_platform."
            )
        if given.model_type != MESSAGES.ModelType.Value("TENSORFLOW"):
            raise invalid(f"ModelServerConfig::model_type choice {given.model_type} not supported.")
        platform = PLATFORM
    if not platform:
        raise invalid(
            "Illegal setting neither ModelServerConfig::model_type (deprecated) nor "
            f"ModelServerConfig::model_platform, model name is {given.name}"
        )
    if platform == PLATFORM:
        return
    if catalog.available(given.name) is not None:
        raise invalid(
            f"Illegal to change a model's platform. For model {given.name} platform was {PLATFORM} and new "
            f"platform requested is {platform}"
        )
    raise invalid(f"Model {given.name} requests unsupported platform {platform}")


def _policy(given: Any) -> object:
    chosen = given.model_version_policy.WhichOneof("policy_choice")
    if chosen == "specific":
        return {"specific": list(given.model_version_policy.specific.versions)}
    if chosen == "latest":
        return {"latest": given.model_version_policy.latest.num_versions or 1}
    return chosen


RunRpc = Callable[[Any, Any], Any]


def make_methods(service: TFServingService) -> list[Method]:
    """Every RPC, over bytes."""
    models, predict = ModelRpcs(service), PredictRpc(service)
    examples: dict[str, tuple[str, RunRpc]] = {
        "Classify": ("ClassificationRequest", ExamplesRpc(service, "classify")),
        "Regress": ("RegressionRequest", ExamplesRpc(service, "regress")),
        "MultiInference": ("MultiInferenceRequest", MultiInferenceRpc(service)),
    }
    about: dict[str, tuple[str, RunRpc]] = {
        PREDICTION_SERVICE + "GetModelMetadata": (
            "GetModelMetadataRequest",
            with_status(models.get_model_metadata),
        ),
        MODEL_SERVICE + "GetModelStatus": ("GetModelStatusRequest", with_status(models.get_model_status)),
        MODEL_SERVICE + "HandleReloadConfigRequest": (
            "ReloadConfigRequest",
            with_status(models.reload_config),
        ),
    }
    method = _method(PREDICTION_SERVICE + "Predict", bytes, predict, bytes)
    methods = [replace(method, start=predict.start, take=predict.take)]
    for name, (request, run) in examples.items():
        methods.append(_method(PREDICTION_SERVICE + name, _reader(request, EXAMPLES_BYTES), run, bytes))
    for path, (request, run) in about.items():
        read = partial(parse_message, getattr(load("tfserving"), request), invalid)  # SMALL_BYTES at most
        methods.append(_method(path, read, run, serialize))
    return methods


def _method(path: str, read: Callable[[bytes], Any], run: RunRpc, write: Callable[[Any], bytes]) -> Method:
    return Method(path, read, run, write, scope=RPCS[path])


def _reader(name: str, most_bytes: int) -> Callable[[bytes], Any]:
    return partial(_read_message, name, getattr(load("tfserving"), name), most_bytes)


def _read_message(name: str, kind: Any, most_bytes: int, data: bytes) -> Any:
    """A message of at most so many bytes. Raises ServeError."""
    if len(data) > most_bytes:
        raise invalid(f"a {name} of {len(data)} bytes, allowed: up to {most_bytes}")
    return parse_message(kind, invalid, data)
