"""The script backends: functions and classes that a script declares with `@fastserve.model`.

    ScriptBackend         functions of arrays: the rows of a batch in one call
    ScriptJsonBackend     anything else: the body of each request as JSON, in turn; of generators and async
                          functions any number of answers, and async functions run beside one another

The script is run in every worker. An exception of a function is the error of its own request: a ServeError
keeps its kind, a body that does not fit is INVALID_ARGUMENT and names the member.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastserve.backends import model_callbacks
from fastserve.backends.base import read_specs
from fastserve.backends.batch_io import OutputCheck, output_fault
from fastserve.backends.cancellation import WatchedCall
from fastserve.backends.frameworks.python import CopyOnWrite
from fastserve.backends.model_errors import end_if_lost, explain, kind_of
from fastserve.backends.script.async_line import AsyncLine
from fastserve.backends.script.declaration import BODY, ModelSteps, ScriptModel
from fastserve.backends.script.json_body import BodyReader, write_json
from fastserve.backends.script.loading import load_script
from fastserve.backends.script.remote import running
from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.settings.model_options import may_isolate

if TYPE_CHECKING:
    from fastserve.backends.base import Arrays, OnFailure
    from fastserve.backends.model_callbacks import CallbackChannel
    from fastserve.backends.triton_api.requests import InferenceRequest, ResponseSender

log = logging.getLogger(__name__)

STREAM = "stream"
"""The parameter of a request whose client takes the answers one by one."""
CONTENT_TYPE = "content_type"
"""The parameter of a request's body, and of an answer, that is not JSON."""
RAW = "application/octet-stream"


def open_model(config: Mapping[str, Any], version_dir: Path) -> tuple[ScriptModel, ModelSteps]:
    """Run the script, and return the declaration of the model with its steps, ready to be called. Raises
    ConfigError, and what the script raises."""
    script = (config.get("parameters") or {}).get("script") or {}
    file = Path(str(script.get("file", "")))
    file = file if file.is_absolute() else version_dir / file
    number = int(version_dir.name) if version_dir.name.isdecimal() else 1
    key = f"{config.get('name')}/{number}"
    found = {one.key: one for one in load_script(file, str(script.get("stamp", "")))}
    if key not in found:
        raise ConfigError(f"{file.name} declares no model {key}: there are {', '.join(found) or 'none'}")
    made = found[key]
    if inspect.isroutine(made.target):
        return made, ModelSteps.of(made.target, made.name)
    instance = made.target() if isinstance(made.target, type) else made.target
    setup = getattr(instance, "setup", None)
    if setup is not None:
        setup(config.get("device") or "cpu")
    return made, ModelSteps.of(instance, made.name)


class ScriptBackend:
    """Runs a function of arrays on the rows of a batch."""

    def __init__(self, config: Mapping[str, Any], version_dir: Path, instance: int) -> None:
        self.inputs = read_specs(config.get("inputs"))
        self.outputs = read_specs(config.get("outputs"))
        self._config, self._folder = config, version_dir
        batched = int(config.get("max_batch_size", 0)) > 0
        self._check = OutputCheck(self.outputs, batched=batched)
        self._names = list(self.outputs)
        self._run: Any = None
        self._steps: ModelSteps | None = None

    def load(self) -> None:
        """Run the script and set the model up. Raises what either raises, and ConfigError."""
        made, self._steps = open_model(self._config, self._folder)
        if made.kind != "arrays":
            raise ConfigError(f"{made.name} is no function of arrays any more")
        predict = self._steps.predict
        self._run = CopyOnWrite(lambda inputs: predict(**inputs), again=may_isolate(self._config))

    def run(self, inputs: Arrays) -> Arrays:
        """Run one batch; see Backend.run. Raises ServeError (INTERNAL) for outputs that break their
        declaration."""
        found = self._run(inputs)
        if not isinstance(found, Mapping):
            several = found if isinstance(found, tuple) and len(self._names) > 1 else (found,)
            if len(several) != len(self._names):
                raise output_fault(f"{len(several)} arrays were returned for {len(self._names)} outputs")
            found = dict(zip(self._names, several, strict=True))
        return self._check(inputs, {name: _as_array(value) for name, value in found.items()})

    def close(self) -> None:
        """Call the model's close, if it has one."""
        steps, self._steps, self._run = self._steps, None, None
        close_model(steps)


def close_model(steps: ModelSteps | None) -> None:
    """Call the close of the instance that the steps belong to, if it has one."""
    close = getattr(getattr(steps and steps.predict, "__self__", None), "close", None)
    if callable(close):
        close()


def _as_array(value: Any) -> Any:
    """Return a tensor of torch's as an array, anything else as it is."""
    return value.detach().cpu().numpy() if hasattr(value, "detach") else value


class ScriptJsonBackend:
    """Runs functions on the bodies of requests. See RequestBackend."""

    batching = True
    version = 1

    def __init__(self, config: Mapping[str, Any], version_dir: Path, instance: int) -> None:
        self.inputs = read_specs(config.get("inputs"))
        self.outputs = read_specs(config.get("outputs"))
        self.name = self.instance_name = str(config.get("name"))
        self.config: dict[str, Any] = {"output": [{"name": BODY}]}
        self.decoupled = config.get("backend") == "script_stream"
        self._config, self._folder = config, version_dir
        self._batched = int(config.get("max_batch_size", 1)) > 1
        self._steps: Any = None
        self._declared: ScriptModel | None = None
        self._reader: BodyReader | None = None
        self._line: AsyncLine | None = None
        self._channel: CallbackChannel | None = None

    def load(self) -> None:
        """Run the script and set the model up. Raises what either raises, and ConfigError."""
        from fastserve.backends.triton_api import requests, tensor

        self._api = requests, tensor
        made, self._steps = open_model(self._config, self._folder)
        self._declared = made
        if made.kind == "arrays" or (made.kind == "stream") != self.decoupled:
            raise ConfigError(f"{made.name} is a model of another kind than it was")
        self._reader = self._steps.reader(batched=self._batched)
        if self.decoupled:
            self.open_line()

    def open_line(self) -> None:
        """Begin to run what answers in parts."""
        limit_ms = int(self._config.get("run_timeout_ms", 0))
        self._line = AsyncLine(limit_ms=limit_ms, overdue=self._say_overdue)

    def execute(self, requests: list[InferenceRequest], failed: OnFailure) -> Sequence[Any] | None:
        """Answer a batch. Raises, for several requests that go through one call, what that call raises."""
        if self._line is not None:
            self._channel = model_callbacks.channel_of_thread()
            for request in requests:
                with self._running([request]):
                    self._line.start(self._answer_stream(request))
            return None
        if self._batched:
            with self._running(requests):
                return self._answer_batch(requests)
        answers = []
        for request in requests:
            with self._running([request]):
                answers.append(self._answer(request))
        return answers

    def run(self, inputs: Any) -> Any:
        """Raise NotImplementedError: a body cannot be made up for a warm-up."""
        raise NotImplementedError("a function of JSON is asked by bodies")

    def where(self, error: BaseException) -> str:
        """Return "": clients get the text of an exception, the log has the traceback."""
        return ""

    def close(self) -> None:
        """Stop the event loop, and call the model's close, if it has one."""
        line, self._line = self._line, None
        if line is not None:
            line.close()
        steps, self._steps = self._steps, None
        close_model(steps)

    @contextmanager
    def _running(self, requests: Sequence[InferenceRequest]) -> Iterator[None]:
        """Let the model ask who still waits, and call those that it uses in what is left of the time."""
        with WatchedCall([request._reply for request in requests if request._reply is not None]):
            if self._declared is None or not self._declared.uses:
                yield
                return
            limit_us = 1000 * int(self._config.get("run_timeout_ms", 0))
            with running(self._declared, limit_us, *(request.timeout() for request in requests)):
                yield

    def _say_overdue(self) -> None:
        log.error("the model has not given way within run_timeout_ms: its worker is ended")
        if self._channel is not None:
            self._channel.tell({"do": "overdue"})

    # --- one answer to each ---

    def _answer(self, request: InferenceRequest) -> Any:
        try:
            value = self._decoded(request)
            steps = self._steps
            found = steps.predict(*value[0], **value[1])
            return self.pack(found if steps.encode is None else steps.encode(found))
        except Exception as error:
            return self._refuse(request, error)

    def _answer_batch(self, requests: list[InferenceRequest]) -> list[Any]:
        """Answer requests by one call. What raises for several raises: the batch is run again in parts."""
        steps = self._steps
        answers: list[Any] = [None] * len(requests)
        values, places = [], []
        for at, request in enumerate(requests):
            try:
                positional, _ = self._decoded(request)
                values.append(positional[0])
                places.append(at)
            except Exception as error:
                answers[at] = self._refuse(request, error)
        if not values:
            return answers
        try:
            found = steps.predict(values)
            if len(found) != len(values):
                raise ServeError(
                    Kind.INTERNAL, f"{len(found)} results were returned for {len(values)} requests"
                )
        except Exception as error:
            if len(requests) > 1:
                raise
            return [self._refuse(requests[0], error)]
        for at, one in zip(places, found, strict=True):
            try:
                answers[at] = self.pack(one if steps.encode is None else steps.encode(one))
            except Exception as error:
                answers[at] = self._refuse(requests[at], error)
        return answers

    def _decoded(self, request: InferenceRequest) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what predict is called with. Raises ServeError, and what decode raises."""
        positional, named = self.arguments(request)
        if self._steps.decode is None:
            return positional, named
        return (self._steps.decode(*positional, **named),), {}

    def arguments(self, request: InferenceRequest) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments that a request brings. Raises ServeError."""
        assert self._reader is not None
        return self._reader.read(body_of(request), content_type_of(request))

    # --- any number of answers ---

    def is_whole(self, request: InferenceRequest) -> bool:
        """Return whether a request takes all parts as one answer."""
        return not request.plain_parameters.get(STREAM)

    async def _answer_stream(self, request: InferenceRequest) -> None:
        """Answer one request, by as many parts as its client takes and the model yields."""
        sender: ResponseSender = request.get_response_sender()
        whole = self.is_whole(request)
        parts: list[Any] = []
        try:
            async with aclosing(self._parts(request)) as found:
                async for part, yields in found:
                    if sender.is_cancelled():
                        break
                    if whole and yields:
                        parts.append(part)
                        continue
                    answer = self.pack(part)
                    if not yields:
                        sender.send(answer, 1)
                        return
                    await asyncio.to_thread(sender.send, answer, 0)
            if whole:
                sender.send(self.pack(parts), 1)
            else:
                sender.send(None, 1)
        except BaseException as error:  # a coroutine that is cancelled answers as well
            refused = self._refuse(request, error)
            if refused is not None:
                sender.send(refused, 1)

    async def _parts(self, request: InferenceRequest) -> Any:
        """Yield what the model answers, each with whether it was yielded."""
        assert self._line is not None
        steps, limited = self._steps, self._line.limited
        positional, named = self.arguments(request)
        if steps.decode is not None:
            async with limited():
                positional, named = (await _awaited(steps.decode(*positional, **named)),), {}
        found = steps.predict(*positional, **named)
        if not inspect.isasyncgen(found) and not inspect.isgenerator(found):
            async with limited():
                answer = await self._encoded(await _awaited(found))
            yield answer, False
            return
        try:
            while (part := await self._next_part(found)) is not _END:
                yield part, True
        finally:
            if inspect.isasyncgen(found):
                async with limited():
                    await found.aclose()
            else:
                await self._line.take_turn(found.close)

    async def _next_part(self, found: Any) -> Any:
        """Return the next part of a generator, _END after the last one. Raises ServeError
        DEADLINE_EXCEEDED."""
        assert self._line is not None
        if inspect.isasyncgen(found):
            async with self._line.limited():
                part = await anext(found, _END)
                return part if part is _END else await self._encoded(part)
        part = await self._line.take_turn(next, found, _END)
        if part is _END:
            return part
        async with self._line.limited():
            return await self._encoded(part)

    async def _encoded(self, value: Any) -> Any:
        return value if self._steps.encode is None else await _awaited(self._steps.encode(value))

    # --- answers ---

    def pack(self, value: Any) -> Any:
        """Return a value as an answer. Raises TypeError for one that JSON has no form for."""
        requests, tensor = self._api
        told = None
        if isinstance(value, bytes | bytearray | memoryview):
            data, told = bytes(value), {CONTENT_TYPE: RAW}
        elif isinstance(value, Response):
            data, told = value.content, {CONTENT_TYPE: value.media_type}
        else:
            data = write_json(value)
        array = np.empty(1, object)
        array[0] = data
        return requests.InferenceResponse([tensor.Tensor(BODY, array)], parameters=told)

    def _refuse(self, request: InferenceRequest, error: BaseException) -> Any:
        """Answer a request with an exception; returns the answer, None where it was given here."""
        end_if_lost(error)
        kind, text = kind_of(error), explain(error)
        if not isinstance(error, ServeError):
            given = request.request_id()
            extra = {"request_ids": given} if given else None
            log.error("the model failed on a request", exc_info=error, extra=extra)
        requests, _ = self._api
        if kind in requests.KINDS:
            fault = requests.TritonError(text, requests.KINDS.index(kind))
            return requests.InferenceResponse(error=fault)
        request._reply.fail(kind, text)
        return None


_END = object()


async def _awaited(found: Any) -> Any:
    return await found if inspect.isawaitable(found) else found


def body_of(request: InferenceRequest) -> bytes:
    """Return the body of a request. Raises ServeError for one without."""
    given = request.input_by_name(BODY)
    rows: Sequence[Any] = [] if given is None else given.as_numpy().reshape(-1)
    if len(rows) != 1:
        raise ServeError(Kind.INVALID_ARGUMENT, f"{BODY}: given {len(rows)} texts of JSON, allowed: one")
    return bytes(rows[0])


def content_type_of(request: InferenceRequest) -> str:
    """Return what the client says its body is; "" for JSON."""
    return str(request.plain_parameters.get(CONTENT_TYPE, ""))


class Response:
    """An answer that is not JSON: its bytes, or text, and what they are."""

    __slots__ = ("content", "media_type")

    def __init__(self, content: bytes | str, media_type: str = "text/plain; charset=utf-8") -> None:
        self.content = content.encode() if isinstance(content, str) else bytes(content)
        self.media_type = media_type
