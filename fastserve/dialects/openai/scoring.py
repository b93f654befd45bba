"""POST /v1/rerank (Jina's, Cohere's, TEI's form), /v1/score and /v1/classify (vLLM's), on models of tensors.

    {"query": "cat", "documents": ["a dog", "a cat"], "top_n": 1}
    -> {"results":[{"index":1,"relevance_score":0.98,"document":{"text":"a cat"}}],...}
    {"query": "cat", "texts": ["a dog", "a cat"], "return_text": true}
    -> [{"index":1,"score":0.98,"text":"a cat"},{"index":0,"score":0.02,"text":"a dog"}]
    {"text_1": "cat", "text_2": ["a dog", "a cat"]}
    -> {"data":[{"index":0,"object":"score","score":0.02},{"index":1,"object":"score","score":0.98}],...}
    {"input": ["fine"]}
    -> {"data":[{"index":0,"label":"POSITIVE","probs":[0.1,0.9],"num_classes":2}],...}

Any backend's model will do, by the tensors that it declares. A model of pairs has two inputs of texts, `text`
and `text_pair` or any two in their order, and an output of one number a row, `scores`, `score` or its only
one. A classifier has one input of texts and an output of numbers for each class; an output of texts has the
labels. An output `tokens` of one whole number a row is the number of its tokens, and gives the reply its
`usage`; other replies have none. A text is a row of a model with a batch axis; of a model without one, an
item of its only axis.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from math import isnan, prod
from secrets import token_hex
from time import time
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import UNSET, Meta

from fastserve._ext.flatten import pack_bytes, unpack_bytes
from fastserve.codec.json_text import FreeJSON
from fastserve.dialects.openai.errors import refuse
from fastserve.dialects.openai.requests import (
    MOST_INPUTS,
    NO_NAME,
    Refused,
    no_model,
    refused_keys,
    takes_any,
)
from fastserve.dialects.text_common.endpoint_parts import (
    BOUNDS,
    BodyUse,
    InvalidBody,
    TargetParts,
    TextRoute,
    TextService,
    check,
    is_neutral,
    read_offloaded,
    read_typed,
)
from fastserve.dialects.text_common.event_streams import deadline_ns
from fastserve.errors import Kind, ServeError, internal
from fastserve.net.access_control import Scope
from fastserve.net.request import Call, Endpoint
from fastserve.net.router import Yields
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.dialect import HttpRoute
from fastserve.serving.slow_path import SlowRequest, answer_slowly
from fastserve.tensor import ARRAY_CODE, DTYPES, Tensor, TensorSpec

MOST_REPEATED = 4 << 20
"""Bytes of a text that is paired with several, all its copies together."""
FLOATS = ("float32", "float64")
INTEGERS = ("int32", "int64")
BYTES = DTYPES["bytes"]
TOKENS = "tokens"
PAIRED, SCORES, PROBABILITIES, LABELS = (
    ("text", "text_pair"),
    ("scores", "score"),
    ("scores", "probabilities", "probs"),
    ("labels", "label"),
)
_encode = msgspec.json.Encoder().encode
Timeout = Annotated[int, Meta(ge=1, le=65535)]


class ScoringFields(msgspec.Struct, kw_only=True):
    """Keys that the three share."""

    model: str | None = None
    timeout: Timeout | None = None
    user: str | None = None
    priority: Refused = UNSET
    truncate_prompt_tokens: Refused = UNSET
    add_special_tokens: Refused = UNSET
    activation: Refused = UNSET
    use_activation: Refused = UNSET
    softmax: Refused = UNSET
    mm_processor_kwargs: Refused = UNSET


class TextDocument(msgspec.Struct):
    text: str


class RerankRequest(ScoringFields, kw_only=True):
    """POST /v1/rerank. `texts` in place of `documents` makes it a request of TEI's."""

    query: str
    documents: Annotated[list[str | TextDocument], Meta(min_length=1)] | None = None
    texts: Annotated[list[str], Meta(min_length=1)] | None = None
    return_text: bool | None = None
    top_n: Annotated[int, Meta(ge=0)] | None = None
    return_documents: bool | None = None
    rank_fields: Refused = UNSET
    max_chunks_per_doc: Refused = UNSET
    max_tokens_per_doc: Refused = UNSET


class ScoreRequest(ScoringFields, kw_only=True):
    """POST /v1/score: one text and one or several, or as many as there are others."""

    text_1: str | list[str]
    text_2: str | list[str]


class ClassifyRequest(ScoringFields, kw_only=True):
    """POST /v1/classify."""

    input: str | list[str]


NEUTRAL = dict.fromkeys(("activation", "use_activation", "softmax", "add_special_tokens"), (b"true",))
_rerank: FreeJSON[RerankRequest] = FreeJSON(RerankRequest, BOUNDS)
_score: FreeJSON[ScoreRequest] = FreeJSON(ScoreRequest, BOUNDS)
_classify: FreeJSON[ClassifyRequest] = FreeJSON(ClassifyRequest, BOUNDS)


class ScoringTask(NamedTuple):
    """One request, as read: the columns of texts, one for each input of the model."""

    body: Any
    columns: Sequence[Sequence[str]]
    source: str
    """The key whose texts are counted."""
    flavor: str = "jina"
    """`textgen.rerank_flavor`."""


class ScoringTensors(NamedTuple):
    """The tensors of a model that scores texts."""

    inputs: tuple[TensorSpec, ...]
    scores: TensorSpec
    labels: TensorSpec | None = None
    tokens: TensorSpec | None = None


def read_rerank(data: bytes | bytearray) -> ScoringTask:
    """POST /v1/rerank. Raises InvalidBody."""
    body = _read(_rerank, data)
    source = "documents" if body.texts is None else "texts"
    check(getattr(body, source) is not None, source, "is required")
    check(body.texts is None or body.documents is None, source, "cannot be beside `documents`")
    documents = [each if isinstance(each, str) else each.text for each in getattr(body, source)]
    return ScoringTask(body, (_repeat(body.query, len(documents), "query"), documents), source)


def read_score(data: bytes | bytearray) -> ScoringTask:
    """POST /v1/score. Raises InvalidBody."""
    body = _read(_score, data)
    ones = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    others = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if len(ones) == 1:
        ones = _repeat(ones[0], len(others), "text_1")
    check(
        len(ones) == len(others), "text_1", f"has {len(ones)} texts, allowed: 1, or {len(others)} as `text_2`"
    )
    return ScoringTask(body, (ones, others), "text_2")


def read_classify(data: bytes | bytearray) -> ScoringTask:
    """POST /v1/classify. Raises InvalidBody."""
    body = _read(_classify, data)
    return ScoringTask(body, ([body.input] if isinstance(body.input, str) else body.input,), "input")


def _read(reader: FreeJSON[Any], data: bytes | bytearray) -> Any:
    body = read_typed(reader, data)
    for key in refused_keys(type(body)):
        check(is_neutral(getattr(body, key), NEUTRAL.get(key, ())), key, "is not supported")
    return body


def _repeat(text: str, count: int, key: str) -> list[str]:
    """Return a text once for each that it is paired with. Raises InvalidBody."""
    size = len(text.encode()) * count
    check(
        count <= 1 or size <= MOST_REPEATED,
        key,
        f"has {size} bytes, once for each of {count} texts, allowed: at most {MOST_REPEATED}",
    )
    return [text] * count


def find_pairs(version: Version) -> ScoringTensors | None:
    """Return the tensors of a model that scores pairs of texts; None for another model."""
    texts = _texts_of(version)
    if texts is None or len(texts) != 2:
        return None
    by_name = {spec.name: spec for spec in texts}
    if all(name in by_name for name in PAIRED):
        texts = [by_name[name] for name in PAIRED]
    scores = _pick(version, SCORES, lambda spec: spec.dtype.name in FLOATS and _row_of(version, spec) == 1)
    return None if scores is None else ScoringTensors(tuple(texts), scores, tokens=_tokens_of(version))


def find_classes(version: Version) -> ScoringTensors | None:
    """Return the tensors of a model that gives each text a number for each class; None for another model."""
    texts = _texts_of(version)
    if texts is None or len(texts) != 1:
        return None

    def has_numbers(spec: TensorSpec, *, several: bool) -> bool:
        return spec.dtype.name in FLOATS and (_row_of(version, spec) != 1) is several

    scores = _pick(version, PROBABILITIES, partial(has_numbers, several=True)) or _pick(
        version, PROBABILITIES, partial(has_numbers, several=False)
    )
    labels = _pick(version, LABELS, lambda spec: spec.dtype is BYTES and _row_of(version, spec) == 1)
    return None if scores is None else ScoringTensors(tuple(texts), scores, labels, _tokens_of(version))


def _tokens_of(version: Version) -> TensorSpec | None:
    """Return the output that has the number of each row's tokens."""
    spec = version.outputs.get(TOKENS)
    return spec if spec and spec.dtype.name in INTEGERS and _row_of(version, spec) == 1 else None


def _texts_of(version: Version) -> list[TensorSpec] | None:
    """Return the inputs of a model that are all texts, one a row; None for another model."""
    found = list(version.inputs.values())
    good = version.text is None and all(spec.dtype is BYTES and _row_of(version, spec) == 1 for spec in found)
    return found if good else None


def _row_of(version: Version, spec: TensorSpec) -> int:
    """Return the elements of a row; -1 where that depends, or a tensor has no rows."""
    shape = spec.shape
    if shape is not None and not version.batching:
        shape = shape[1:] if shape[:1] == (-1,) else None
    if shape is None or any(length < 0 for length in shape):
        return -1
    return prod(shape)


def _pick(version: Version, names: Sequence[str], fits: Callable[[TensorSpec], bool]) -> TensorSpec | None:
    """Return the output of one of these names that fits, else the only one that does."""
    found = {name: spec for name, spec in version.outputs.items() if fits(spec)}
    named = next((found[name] for name in names if name in found), None)
    return next(iter(found.values())) if named is None and len(found) == 1 else named


class ScoringApi(NamedTuple):
    """One of the three APIs: its reader, its writer, and what it wants of a model."""

    read: Callable[[bytes | bytearray], ScoringTask]
    write: Callable[[str, ScoringTask, ScoringTensors, Mapping[str, Tensor]], bytes]
    find: Callable[[Version], ScoringTensors | None]
    unfit: str
    """The end of "model 'x' ..." for a model that does not fit."""


class ScoringCall(SlowRequest):
    """One request in progress."""

    def __init__(self, service: TextService, call: Call, api: ScoringApi) -> None:
        self.service: TextService = service
        self._call, self._api = call, api
        self._name = ""

    async def read(self) -> InferRequest:
        call, service = self._call, self.service
        task = await read_offloaded(service, call, self._api.read, call.body)
        self._task = task._replace(flavor=service.options.rerank_flavor)
        count = len(task.columns[0])
        check(count > 0, task.source, "must not be empty")
        check(count <= MOST_INPUTS, task.source, f"has {count} texts, allowed: at most {MOST_INPUTS}")
        self.version, self._tensors = self._find(task.body.model or "")
        self._name = self.version.model
        work = sum(len(text) for texts in task.columns for text in texts)
        inputs = await service.offload(work, self._pack_all)
        wanted = [spec for spec in self._tensors[1:] if isinstance(spec, TensorSpec)]
        due_ns = deadline_ns(call, task.body.timeout or service.options.timeout_s, service.options)
        names = tuple(spec.name for spec in wanted)
        return InferRequest(inputs, names, deadline_ns=due_ns, request_id=call.request_id)

    def _pack_all(self) -> dict[str, Tensor]:
        columns = zip(self._tensors.inputs, self._task.columns, strict=True)
        return {spec.name: self._pack(spec, texts) for spec, texts in columns}

    def _pack(self, spec: TensorSpec, texts: Sequence[str]) -> Tensor:
        shape = spec.shape or ()
        tail = shape if self.version.batching else shape[1:]
        data = pack_bytes(text.encode() for text in texts)
        return Tensor(BYTES, (len(texts), *tail), data)

    def _find(self, name: str) -> tuple[Version, ScoringTensors]:
        """The model of a name, or the only one that fits where the name is nobody's. Raises ServeError."""
        catalog, options = self.service.catalog, self.service.options
        version = catalog.available(name)
        if version is None:
            catalog.explain_absence(name)
            if name in catalog.models:
                raise ServeError(Kind.UNAVAILABLE, f"model '{name}' is not available now")
            found = [one for each in catalog.models if (one := self._fitting(each)) is not None]
            if len(found) == 1 and (not name or options.any_model or takes_any(options)):
                return found[0]
            if not name:
                raise InvalidBody(NO_NAME[options.openai_flavor], "model")
            raise no_model(name)
        tensors = self._api.find(version)
        if tensors is None:
            raise ServeError(Kind.UNIMPLEMENTED, f"model '{name}' {self._api.unfit}")
        return version, tensors

    def _fitting(self, name: str) -> tuple[Version, ScoringTensors] | None:
        version = self.service.catalog.available(name)
        tensors = None if version is None else self._api.find(version)
        return None if version is None or tensors is None else (version, tensors)

    async def write(self, response: InferResponse) -> None:
        work = response.nbytes * 8 + sum(map(len, self._task.columns[-1]))
        body = await self.service.offload(
            work, self._api.write, self._name, self._task, self._tensors, response.outputs
        )
        self._call.reply(200, body)

    def refused(self, fault: ServeError) -> None:
        refuse(self.service, self._call, fault, self._name)


def _numbers(tensors: ScoringTensors, outputs: Mapping[str, Tensor], rows: int) -> list[Sequence[float]]:
    """Return the numbers of each row. Raises ServeError for a model that has answered otherwise."""
    tensor = outputs[tensors.scores.name]
    data = memoryview(tensor.data).cast("B")
    found: array[float] = array(ARRAY_CODE[tensor.dtype.name], data.tobytes())
    width = len(found) // rows
    if not width or len(found) != rows * width:
        raise internal(f"the model gave {len(found)} numbers for {rows} texts")
    return [found[at : at + width].tolist() for at in range(0, len(found), width)]


def _score_of(tensors: ScoringTensors, outputs: Mapping[str, Tensor], rows: int) -> list[float]:
    numbers = _numbers(tensors, outputs, rows)
    if len(numbers[0]) != 1:
        raise internal(f"the model gave {len(numbers[0])} numbers for a pair of texts")
    return [row[0] for row in numbers]


def write_rerank(
    model: str, task: ScoringTask, tensors: ScoringTensors, outputs: Mapping[str, Tensor]
) -> bytes:
    """The reply: the best documents, best first; of equal ones the earlier. NaN is worse than any number.
    A document is an object; in Infinity's form a text. TEI's reply is the results alone."""
    body, documents = task.body, task.columns[1]
    scores = _score_of(tensors, outputs, len(documents))
    order = sorted(range(len(scores)), key=lambda at: (isnan(scores[at]), -scores[at], at))
    best = order[: body.top_n or len(order)]
    if body.texts is not None:
        return _encode(
            [_tei_result(at, scores[at], documents[at] if body.return_text else None) for at in best]
        )
    results = []
    for at in best:
        found: dict[str, Any] = {"index": at, "relevance_score": scores[at]}
        if body.return_documents is not False:
            found["document"] = documents[at] if task.flavor == "infinity" else {"text": documents[at]}
        results.append(found)
    head = {"id": "rerank-" + token_hex(12), "model": model, "results": results}
    return _encode({**head, **_usage(tensors, outputs)})


def _tei_result(index: int, score: float, text: str | None) -> dict[str, Any]:
    return {"index": index, "score": score, **({} if text is None else {"text": text})}


def write_scores(
    model: str, task: ScoringTask, tensors: ScoringTensors, outputs: Mapping[str, Tensor]
) -> bytes:
    """The reply: a score for each pair."""
    scores = _score_of(tensors, outputs, len(task.columns[0]))
    data = [{"index": at, "object": "score", "score": score} for at, score in enumerate(scores)]
    return _listed("score-", model, data, _usage(tensors, outputs))


def write_classes(
    model: str, task: ScoringTask, tensors: ScoringTensors, outputs: Mapping[str, Tensor]
) -> bytes:
    """The reply: the numbers of each text's classes and its label. Of a model that gives no labels, that is
    the name of the column with the largest number, or LABEL_ and its place, as transformers names classes."""
    rows = len(task.columns[0])
    numbers = _numbers(tensors, outputs, rows)
    if tensors.labels is None:
        names = tensors.scores.columns or [f"LABEL_{at}" for at in range(len(numbers[0]))]
        labels = [names[max(range(len(row)), key=row.__getitem__)] for row in numbers]
    else:
        found = unpack_bytes(outputs[tensors.labels.name].data, rows)
        labels = [label.decode("utf-8", "replace") for label in found]
    data = [
        {"index": at, "label": label, "probs": row, "num_classes": len(row)}
        for at, (label, row) in enumerate(zip(labels, numbers, strict=True))
    ]
    return _listed("classify-", model, data, _usage(tensors, outputs))


def _listed(prefix: str, model: str, data: list[dict[str, Any]], beside: dict[str, Any]) -> bytes:
    head = {"id": prefix + token_hex(12), "object": "list", "created": int(time()), "model": model}
    return _encode({**head, "data": data, **beside})


def _usage(tensors: ScoringTensors, outputs: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the tokens of all texts, where the model has counted them."""
    if tensors.tokens is None:
        return {}
    counts = outputs[tensors.tokens.name]
    count = sum(array(ARRAY_CODE[counts.dtype.name], memoryview(counts.data).cast("B").tobytes()))
    return {"usage": {"prompt_tokens": count, "total_tokens": count}}


NO_PAIRS = (
    "scores no pairs of texts: that takes two inputs of texts (BYTES), one a row, and an output of one "
    "number (FP32, FP64) a row"
)
NO_CLASSES = (
    "classifies no texts: that takes one input of texts (BYTES), one a row, and an output of numbers (FP32, "
    "FP64) for each"
)
RERANK = ScoringApi(read_rerank, write_rerank, find_pairs, NO_PAIRS)
SCORE = ScoringApi(read_score, write_scores, find_pairs, NO_PAIRS)
CLASSIFY = ScoringApi(read_classify, write_classes, find_classes, NO_CLASSES)


def _route(name: str, path: str, api: ScoringApi, gives_way: Yields = Yields.FIRST) -> TextRoute:
    """Return a route; an app's function of the name goes first."""

    def make(service: TextService, named: TargetParts) -> Endpoint:
        def answer(call: Call) -> Coroutine[Any, Any, None]:
            return answer_slowly(call, ScoringCall(service, call, api))

        return answer

    return TextRoute(
        HttpRoute(name, path, {"POST": Scope.INFER}), make, refuse, gives_way, room=BodyUse.TEXTS
    )


PATHS = (
    _route("rerank", "/v1/rerank", RERANK),
    _route("rerank_root", "/rerank", RERANK),
    _route("rerank_v2", "/v2/rerank", RERANK, Yields.NEVER),
    _route("score", "/v1/score", SCORE),
    _route("score_root", "/score", SCORE),
    _route("classify", "/v1/classify", CLASSIFY),
    _route("classify_root", "/classify", CLASSIFY),
)
