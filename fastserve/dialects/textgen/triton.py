"""MindIE's Triton endpoints (spec 3.2, 3.3): text and tokens of a named model, and the end of one by its id.

They give way to the dialect kserve_v2 on a listener that speaks it: the same models have tensors there.
"""

from __future__ import annotations

from collections.abc import Coroutine
from functools import partial
from typing import Any

import msgspec

from fastserve.dialects.textgen.asking import Answer
from fastserve.dialects.textgen.bodies import WORK, read_body
from fastserve.dialects.textgen.errors import refuse
from fastserve.dialects.textgen.infer_request import Asked
from fastserve.dialects.textgen.paths import Named, Path
from fastserve.dialects.textgen.replies import FINISH_REASON, milliseconds, quote
from fastserve.dialects.textgen.service import NAME, Service
from fastserve.dialects.textgen.triton_request import OUTPUT, read_text, read_tokens
from fastserve.errors import Kind, ServeError, invalid
from fastserve.serving.dialect import HttpRoute
from fastserve.serving.text import Ending, Frames, Hole, TextModel, Token
from fastserve.wire.call import Call, Endpoint
from fastserve.wire.scope import Scope

COSTS = b'"first_token_cost":null,"decode_cost":null'


class TritonAnswer(Answer[Asked]):
    """What the two have in common: the model is named, and requests have ids."""

    def __init__(self, service: Service, call: Call, model: str) -> None:
        super().__init__(service, call)
        self._name = model

    async def read(self) -> tuple[TextModel, Asked]:
        model = self.service.texts.find(self._name)
        body = await read_body(self.service, self.call)
        return model, await self.service.apart(len(self.call.body) * WORK, self.read_asked, body)

    def read_asked(self, body: Any) -> Asked:
        """Raises ServeError."""
        raise NotImplementedError


class Generate(TritonAnswer):
    """One generate or generate_stream. `batch_size` is what this process has under way of the model, and
    `queue_wait_time` 0: how a step was filled, only the engine knows."""

    def __init__(self, service: Service, call: Call, model: str, *, stream: bool) -> None:
        super().__init__(service, call, model)
        self._stream = stream

    def read_asked(self, body: Any) -> Asked:
        return read_text(body, self.service.options, stream=self._stream)

    def _head(self, text: str) -> bytes:
        names = (quote(self.asked.request_id), quote(self.model.name), quote(text))
        return b'{"id":%b,"model_name":%b,"model_version":null,"text_output":%b' % names

    def write(self, ending: Ending) -> bytes:
        if not self.asked.details:
            return self._head(ending.text) + b"}"
        count, batch = ending.generated, self.service.running.count(self.model.name)
        return b'%b,"details":{"finish_reason":"%b","generated_tokens":%d,%b,%b,%b}}' % (
            self._head(ending.text),
            FINISH_REASON[ending.reason].encode(),
            count,
            COSTS,
            b'"batch_size":[%b]' % b",".join([b"%d" % batch] * count),
            b'"queue_wait_time":[%b]' % b",".join([b"0"] * count),
        )

    def write_tokens(self, tokens: list[Token]) -> bytes:
        return b"".join(
            self._write_event(token.text, token.index, token.ms, b"") for token in tokens if not token.finish
        )

    def frames(self) -> Frames | None:
        if self.asked.details:
            return None
        before, after = self._head("").rsplit(b'""', 1)
        return Frames((b"data:" + before, Hole.TEXT, after + b"}\n\n"), bare=True, strip=True)

    def write_last(self, ending: Ending, token: Token | None) -> bytes:
        reason = b'"finish_reason":"%b",' % FINISH_REASON[ending.reason].encode()
        if token is None:
            return self._write_event("", max(0, ending.generated - 1), 0.0, reason)
        return self._write_event(token.text, token.index, token.ms, reason)

    def _write_event(self, text: str, index: int, ms: float, reason: bytes) -> bytes:
        if not self.asked.details:
            return b"data:%b}\n\n" % self._head(text)
        details = b'{%b"generated_tokens":%d,%b,"batch_size":%d,"queue_wait_time":0}' % (
            reason,
            index + 1,
            COSTS,
            self.service.running.count(self.model.name),
        )
        prefill, decode = milliseconds(index, ms)
        return b'data:%b,"details":%b,"prefill_time":%b,"decode_time":%b}\n\n' % (
            self._head(text),
            details,
            prefill,
            decode,
        )


class InferTokens(TritonAnswer):
    """One token infer."""

    output = OUTPUT

    def read_asked(self, body: Any) -> Asked:
        read = read_tokens(body, self.service.options)
        self.output = read.output
        return read.asked

    def write(self, ending: Ending) -> bytes:
        ids = msgspec.json.encode(ending.token_ids)
        head = b'{"id":%b,"outputs":[{"name":%b' % (quote(self.asked.request_id), quote(self.output))
        return b'%b,"shape":[1,%d],"datatype":"UINT32","data":%b}]}' % (head, ending.generated, ids)

    def write_tokens(self, tokens: list[Token]) -> bytes:
        raise NotImplementedError("a token infer is no stream")

    def write_last(self, ending: Ending, token: Token | None) -> bytes:
        raise NotImplementedError("a token infer is no stream")


def generate(service: Service, named: Named, *, stream: bool = False) -> Endpoint:
    def run(call: Call) -> Coroutine[Any, Any, None]:
        return Generate(service, call, named.model, stream=stream).run()

    return run


def infer(service: Service, named: Named) -> Endpoint:
    def run(call: Call) -> Coroutine[Any, Any, None]:
        return InferTokens(service, call, named.model).run()

    return run


def stop(service: Service, named: Named) -> Endpoint:
    """End the request of an id."""

    async def run(call: Call) -> None:
        try:
            service.texts.find(named.model)
            body = await read_body(service, call)
            given = body.get("id") if isinstance(body, dict) else None
            if not isinstance(given, str) or not given:
                raise invalid("The id must be non-empty string.")
            if not (service.running.stop(given) or await service.context.spread(NAME, given)):
                raise ServeError(Kind.NOT_FOUND, f"RequestId is {given} not found.")
        except ServeError as fault:
            refuse(service, call, fault, named.model)
        else:
            call.reply(200, b'{"id":%b}' % quote(given))

    return run


_INFER = {"POST": Scope.INFER}
PATHS = (
    Path(HttpRoute("generate", "/v2/models/MODEL/generate", _INFER), generate, refuse, gives_way=True),
    Path(
        HttpRoute("generate_stream", "/v2/models/MODEL/generate_stream", _INFER),
        partial(generate, stream=True),
        refuse,
        gives_way=True,
    ),
    Path(HttpRoute("infer_tokens", "/v2/models/MODEL/infer", _INFER), infer, refuse, gives_way=True),
    Path(HttpRoute("stop", "/v2/models/MODEL/stopInfer", _INFER), stop, refuse),
)
