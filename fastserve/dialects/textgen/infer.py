"""POST /infer and /infer_token (spec 1, 2): a prompt, and its answer whole or as events."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from fastserve.dialects.textgen.asking import Answer
from fastserve.dialects.textgen.bodies import WORK, read_body
from fastserve.dialects.textgen.errors import refuse
from fastserve.dialects.textgen.infer_request import Asked, read_infer
from fastserve.dialects.textgen.parameters import make_rules
from fastserve.dialects.textgen.paths import Named, Path
from fastserve.dialects.textgen.replies import EventWriter, details_of, write_answer
from fastserve.dialects.textgen.service import Service
from fastserve.serving.dialect import HttpRoute
from fastserve.serving.text import Ending, Frames, TextModel, Token
from fastserve.wire.call import Call, Endpoint
from fastserve.wire.scope import Scope


class Infer(Answer[Asked]):
    """One call."""

    def __init__(self, service: Service, call: Call) -> None:
        super().__init__(service, call)
        self._writer, self._rules = EventWriter(service.options), make_rules(service.options)

    async def read(self) -> tuple[TextModel, Asked]:
        service = self.service
        body = await read_body(service, self.call)
        model = service.texts.find("")
        work = len(self.call.body) * WORK
        return model, await service.apart(work, read_infer, body, self._rules, service.options)

    def write(self, ending: Ending) -> bytes:
        return write_answer(ending, self._details(ending))

    def write_tokens(self, tokens: list[Token]) -> bytes:
        return self._writer.tokens(tokens)

    def frames(self) -> Frames | None:
        return self._writer.frames

    def write_last(self, ending: Ending, token: Token | None) -> bytes:
        return self._writer.last(ending, token, self._details(ending))

    def _details(self, ending: Ending) -> bytes:
        return details_of(ending, self.stream.seed, self.service.options) if self.asked.details else b""


def infer(service: Service, named: Named) -> Endpoint:
    """The endpoint."""

    def run(call: Call) -> Coroutine[Any, Any, None]:
        return Infer(service, call).run()

    return run


PATHS = (
    Path(HttpRoute("infer", "/infer", {"POST": Scope.INFER}), infer, refuse),
    Path(HttpRoute("infer_token", "/infer_token", {"POST": Scope.INFER}), infer, refuse),
)
