"""POST /v1/embeddings: texts or tokens in, a vector each, as numbers or as base64 of float32.

    {"model": "m", "input": ["a", "b"]}  ->  {"object":"list","data":[{"object":"embedding","index":0,
                                              "embedding":[0.6,-0.8]}, ...],"model":"m","usage":{...}}

A model that makes no vectors says so (400, `not_supported`).
"""

from __future__ import annotations

from array import array
from base64 import b64encode
from collections.abc import Sequence
from functools import partial
from math import hypot

import msgspec

from fastserve._ext.json_writer import MODE_SHORTEST, write_values
from fastserve.dialects.openai.errors import refuse
from fastserve.dialects.openai.requests import EmbeddingRequest, Prompt, find_model, read_embedding
from fastserve.dialects.text_common.endpoint_parts import (
    BodyUse,
    TargetParts,
    TextRoute,
    TextService,
    check,
    read_offloaded,
)
from fastserve.dialects.text_common.event_streams import RequestTimeout, deadline_ns
from fastserve.errors import ServeError
from fastserve.net.access_control import Scope
from fastserve.net.request import Call, Endpoint
from fastserve.serving.dialect import HttpRoute
from fastserve.serving.text import TextAsk, TextModel, Vector
from fastserve.serving.text.models import PromptsTooLong, TextCall
from fastserve.tensor import DTYPES

UNIT = 1e-3
"""A length this near to 1 is meant to be 1."""
WORK = 8
"""Times a byte of a vector that is written as a number."""
FLOAT32 = DTYPES["float32"].code


def embed(service: TextService, named: TargetParts) -> Endpoint:
    """The endpoint."""

    async def answer(call: Call, about: TextCall) -> bool:
        body, prompts = await read_offloaded(service, call, read_embedding, call.body)
        model = about.model = find_model(service, body.model or "", embeds=True)
        vectors = await _run(service, call, model, body, prompts)
        work = sum(len(each.data) for each in vectors) * WORK
        call.reply(200, await service.offload(work, write_vectors, model.shown_name, vectors, body))
        return True

    return lambda call: service.answer(call, partial(answer, call), refuse)


async def _run(
    service: TextService, call: Call, model: TextModel, body: EmbeddingRequest, prompts: list[Prompt]
) -> list[Vector]:
    """Raises ServeError."""
    timeout_s, width = body.timeout or service.options.timeout_s, model.info.embeds
    if width and body.dimensions is not None:
        check(body.dimensions <= width, "dimensions", f"must be at most {width}, got {body.dimensions}")
    due_ns, priority = deadline_ns(call, timeout_s, service.options), body.priority or 5
    asks = [
        TextAsk(prompt=prompt, priority=priority, deadline_ns=due_ns, request_id=call.request_id)
        for prompt in prompts
    ]
    try:
        embedding = await model.embedding(asks)
    except PromptsTooLong as fault:
        fault.field = "input"
        raise
    service.read(call, model)
    async with embedding:
        with RequestTimeout(embedding, call, timeout_s, service.options) as patience:
            try:
                return await embedding.run()
            except ServeError as fault:
                raise patience.cause_of(fault) from None


def write_vectors(model: str, vectors: Sequence[Vector], body: EmbeddingRequest) -> bytes:
    """The reply."""
    tokens = sum(each.tokens for each in vectors)
    data = [
        {"object": "embedding", "index": index, "embedding": _write(each.data, body)}
        for index, each in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return msgspec.json.encode({"object": "list", "data": data, "model": model, "usage": usage})


def _write(data: bytes, body: EmbeddingRequest) -> str | msgspec.Raw:
    if body.dimensions is not None:
        data = cut(data, body.dimensions)
    if body.encoding_format == "base64":
        return b64encode(data).decode()
    return msgspec.Raw(bytes(write_values(data, FLOAT32, (len(data) // 4,), MODE_SHORTEST)))


def cut(data: bytes, dimensions: int) -> bytes:
    """Return the first numbers of a vector; of length 1 again where the whole had it."""
    whole = array("f", data)
    first = whole[:dimensions]
    if abs(hypot(*whole) - 1) < UNIT:
        length = max(hypot(*first), 1e-12)
        first = array("f", [each / length for each in first])
    return first.tobytes()


PATHS = (
    TextRoute(
        HttpRoute("embeddings", "/v1/embeddings", {"POST": Scope.INFER}), embed, refuse, room=BodyUse.TEXTS
    ),
)
