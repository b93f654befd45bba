"""Calls from one model of an app to another: `fastserve.remote(other)(x)` inside a model that `uses` it.

    @fastserve.model(uses=[embed])
    def search(text: str):
        vector = fastserve.remote(embed)(text)     in an async function: await fastserve.remote(embed)(text)

The call goes through the server: to the other's queue, batches and workers. It has what is left of the
caller's own time. Outside of a worker, in a test or at a prompt, the function itself is called.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from fastserve.backends.script.declaration import BODY, DECLARED, ScriptModel, steps_of
from fastserve.backends.script.json_body import write_json
from fastserve.errors import Kind, ServeError, internal

if TYPE_CHECKING:
    from fastserve.backends.triton_api.requests import BlsChannel, InferenceResponse


CALLS_SHARE = 0.9
"""The part of a request's time that calls of others may take; the rest is for an answer, if only an error."""


@dataclass(frozen=True, slots=True)
class CallingModel:
    """A model that answers a request: itself, the channel of its calls, and when its time is up by
    time.monotonic(), 0 for never."""

    model: ScriptModel
    channel: BlsChannel
    until_s: float


_running: ContextVar[CallingModel | None] = ContextVar("fastserve_running", default=None)


@contextmanager
def running(model: ScriptModel, *limits_us: int) -> Iterator[None]:
    """Let model code in here call the models that it uses. Of the limits, 0 for none, the shortest counts."""
    from fastserve.backends.triton_api.requests import channel_of_models

    shortest = min((limit for limit in limits_us if limit), default=0)
    until_s = time.monotonic() + CALLS_SHARE * shortest / 1e6 if shortest else 0.0
    before = _running.set(CallingModel(model, channel_of_models(), until_s))
    try:
        yield
    finally:
        _running.reset(before)


def remote(target: Callable[..., Any]) -> RemoteModel:
    """Return the served form of a function or class that was declared with `@fastserve.model`. Raises
    TypeError for any other."""
    made = getattr(target, DECLARED, None)
    if made is None:
        raise TypeError(f"remote: {getattr(target, '__name__', target)!r} is no model: @fastserve.model")
    return RemoteModel(made)


class RemoteModel:
    """Calls a model of the app as its function is called; on an event loop the result is awaited.

    Of a generator the result is the list of its parts; Arrays are arrays of numpy; everything else is what
    JSON makes of it. Raises ServeError with the other model's kind and text, DEADLINE_EXCEEDED once the
    caller's own time is up.
    """

    def __init__(self, model: ScriptModel) -> None:
        self._model = model

    def __call__(self, *positional: Any, **named: Any) -> Any:
        if _on_loop():
            return self._call_later(positional, named)
        return self._call(positional, named)

    async def _call_later(self, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if _running.get() is None:
            found = self._call(positional, named)
            return await found if inspect.isawaitable(found) else found
        return await asyncio.to_thread(self._call, positional, named)

    def _call(self, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
        caller, model = _running.get(), self._model
        if caller is None:
            return _call_here(model, positional, named)
        if model.name not in caller.model.uses:
            raise internal(
                f"{caller.model.name} does not say that it calls {model.name}: uses=[{model.name}]"
            )
        left_us = 0
        if caller.until_s:
            left_us = int((caller.until_s - time.monotonic()) * 1e6)
            if left_us <= 0:
                raise ServeError(Kind.DEADLINE_EXCEEDED, f"no time is left to call {model.name!r}")
        if model.kind == "arrays":
            return self._call_arrays(caller, left_us, positional, named)
        return self._call_json(caller, left_us, positional, named)

    def _call_json(
        self, caller: CallingModel, left_us: int, positional: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        import numpy as np

        reader = steps_of(self._model).reader(batched=self._model.batched)
        value: Any = reader.arguments(positional, named)
        array = np.empty(1, object)
        array[0] = write_json(value)
        answer = self._ask(caller, left_us, {BODY: array})
        body = bytes(answer[BODY].reshape(-1)[0])
        return body if CONTENT_TYPE in answer else msgspec.json.decode(body)

    def _call_arrays(
        self, caller: CallingModel, left_us: int, positional: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        arrays, lone = _arrays_of(self._model, positional, named)
        found = self._ask(caller, left_us, arrays)
        answers = {name: found[name][0] if lone else found[name] for name in self._model.outputs}
        return next(iter(answers.values())) if len(answers) == 1 else answers

    def _ask(self, caller: CallingModel, left_us: int, arrays: dict[str, Any]) -> dict[str, Any]:
        """Return the outputs as arrays, and CONTENT_TYPE where they are not JSON. Raises ServeError."""
        from fastserve.backends.triton_api.requests import InferenceRequest
        from fastserve.backends.triton_api.tensor import Tensor

        inputs = [Tensor(name, array) for name, array in arrays.items()]
        outputs = list(self._model.outputs)
        request = InferenceRequest(
            inputs=inputs, requested_output_names=outputs, model_name=self._model.name, timeout=left_us
        )
        response: InferenceResponse = caller.channel.answer(request)
        found = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
        missing = [name for name in outputs if name not in found]
        if missing:
            raise internal(f"model {self._model.name!r} gave no {missing[0]!r}")
        return {**found, **response.plain_parameters}


CONTENT_TYPE = "content_type"


def _arrays_of(
    model: ScriptModel, positional: tuple[Any, ...], named: dict[str, Any]
) -> tuple[dict[str, Any], bool]:
    """Return the arrays of a call with their axis of rows, and whether it is added here: one row was given.
    Raises TypeError."""
    import numpy as np

    given = {**dict(zip(model.inputs, positional, strict=False)), **named}
    if given.keys() != model.inputs.keys() or len(positional) > len(model.inputs):
        raise TypeError(f"{model.name} takes {', '.join(model.inputs)}")
    arrays, lone = {}, True
    for name, spec in model.inputs.items():
        kind = {"bytes": object}.get(spec["dtype"], spec["dtype"])
        arrays[name] = np.asarray(given[name], kind)
        lone = lone and spec["shape"] is not None and arrays[name].ndim == len(spec["shape"])
    return {name: array[np.newaxis] if lone else array for name, array in arrays.items()}, lone


def _call_here(model: ScriptModel, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Call the function itself, as the server would: no server is there. Raises TypeError for classes."""
    steps = steps_of(model)
    if isinstance(model.target, type):
        raise TypeError(f"{model.name} is a class: outside of a server make an instance and call that")
    if model.kind == "arrays":
        arrays, lone = _arrays_of(model, positional, named)
        found = steps.predict(**arrays)
        if not isinstance(found, Mapping):
            several = found if isinstance(found, tuple) else (found,)
            found = dict(zip(model.outputs, several, strict=True))
        answers = {name: found[name][0] if lone else found[name] for name in model.outputs}
        return next(iter(answers.values())) if len(answers) == 1 else answers
    if model.batched:
        return steps.predict([steps.reader(batched=True).arguments(positional, named)])[0]
    found = steps.predict(*positional, **named)
    return list(found) if inspect.isgenerator(found) else found


def _on_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
