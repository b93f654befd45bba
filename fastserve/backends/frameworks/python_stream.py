"""Python models whose `run` yields: any number of answers to each request.

    class Model:
        def run(self, inputs):                          the inputs of one request: [rows, ...]
            for word in write(inputs["prompt"][0]):
                yield {"word": np.array([[word]])}      one answer: every output, with as many rows

A model.yaml says `backend: python`; the load finds out that `run` yields, and the model is loaded again by
this backend. Generators take turns, a step at a time, and async generators run beside one another, by what
runs those of scripts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import aclosing, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastserve.backends.batch_io import OutputCheck
from fastserve.backends.frameworks.python import check_run, forget_folder, open_class, yields
from fastserve.backends.script.backend import ScriptJsonBackend
from fastserve.backends.script.declaration import ModelSteps
from fastserve.errors import ConfigError

if TYPE_CHECKING:
    from fastserve.backends.triton_api.requests import InferenceRequest


class PythonStreamBackend(ScriptJsonBackend):
    """Runs a class whose `run` is a generator, or an async generator. See RequestBackend."""

    def __init__(self, config: Mapping[str, Any], version_dir: Path, instance: int) -> None:
        super().__init__(config, version_dir, instance)
        self.decoupled = True
        self.batching = int(config.get("max_batch_size", 0)) > 0
        self.version = int(version_dir.name) if version_dir.name.isdecimal() else -1
        self.config = {"output": [{"name": name} for name in self.outputs]}
        self._instance = instance
        self._model: Any = None
        self._check = OutputCheck(self.outputs, batched=self.batching)

    def load(self) -> None:
        """Make the model and load it. Raises what the model raises, and ConfigError when the class does not
        fit."""
        from fastserve.backends.triton_api import requests, tensor

        self._api = requests, tensor
        for name, spec in {**self.inputs, **self.outputs}.items():
            if spec.dtype.name not in tensor.BY_DTYPE:
                raise ConfigError(f"{name}: dtype {spec.dtype.name} is not for a run that yields")
        self._model = model = open_class(self._config, self._folder, self._instance)
        check_run(model)
        if not yields(model.run):
            raise ConfigError("run must yield with backend python_stream; without that it is python")
        self._steps = ModelSteps(self.name, checked(model.run, self._check))
        for name in ("load", "warmup"):
            getattr(model, name, lambda: None)()
        self.open_line()

    def run(self, inputs: Any) -> Any:
        """Run one batch, a sample of the warm-up, to its end; returns the last answer."""
        assert self._steps is not None
        found = self._steps.predict(inputs)
        if inspect.isasyncgen(found):
            raise ConfigError("warmup: given samples, allowed: off or auto for an async run")
        answers = list(found)
        return answers[-1] if answers else {}

    def close(self) -> None:
        """Call the model's close, if it has one."""
        super().close()
        model, self._model = self._model, None
        forget_folder(self._folder)
        if hasattr(model, "close"):
            model.close()

    def arguments(self, request: InferenceRequest) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs of a request by name."""
        inputs = {one.name(): one.as_numpy() for one in request.inputs()}
        return (inputs,), {}

    def is_whole(self, request: InferenceRequest) -> bool:
        """Return False: every request takes the answers one by one."""
        return False

    def pack(self, value: Any) -> Any:
        """Return the outputs that `run` yielded as an answer."""
        requests, tensor = self._api
        kinds = {name: tensor.BY_DTYPE[spec.dtype.name].number for name, spec in self.outputs.items()}
        tensors = [tensor.Tensor.made_of(name, value[name], kind) for name, kind in kinds.items()]
        return requests.InferenceResponse(tensors)


def checked(run: Callable[[Any], Any], check: OutputCheck) -> Callable[[Any], Any]:
    """Return a generator function that holds each answer of `run` to its declaration."""

    async def answers_async(inputs: Any) -> Any:
        async with aclosing(run(inputs)) as found:
            async for answer in found:
                yield check(inputs, answer)

    def answers(inputs: Any) -> Any:
        with closing(run(inputs)) as found:
            for answer in found:
                yield check(inputs, answer)

    return answers_async if inspect.isasyncgenfunction(run) else answers
