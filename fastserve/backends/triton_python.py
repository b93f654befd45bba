"""The triton_python backend: class TritonPythonModel in NAME/VERSION/model.py of a Triton repository.

    class TritonPythonModel:
        @staticmethod
        def auto_complete_config(config): ...        # optional
        def initialize(self, args): ...              # optional
        def execute(self, requests): ...             # a list of responses; None when decoupled; may be async
        def finalize(self): ...                      # optional

Requests and responses are those of `triton_python_backend_utils`. How they get here and what becomes of
them is the worker's business (workers/requests.py).
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastserve.backends.base import CompletedConfig, explain, read_specs
from fastserve.backends.triton_import import import_from
from fastserve.backends.triton_place import tell_place
from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.tensor import DTYPES, TensorSpec

if TYPE_CHECKING:
    from fastserve.backends.base import Arrays
    from fastserve.backends.triton_requests import InferenceRequest, InferenceResponse

CLASS = "TritonPythonModel"
# What auto_complete_config can say.
COMPLETED = ("input", "output", "max_batch_size", "dynamic_batching", "model_transaction_policy")
Failed = Callable[[BaseException], None]


class TritonPythonBackend:
    """Runs a model written for Triton's Python backend."""

    def __init__(self, config: Mapping[str, Any], version_dir: Path, instance: int) -> None:
        self.inputs = read_specs(config.get("inputs"))
        self.outputs = read_specs(config.get("outputs"))
        self.config: dict[str, Any] = dict(config.get("triton") or _plain_triton(config))
        self.batching = int(config.get("max_batch_size", 0)) > 0
        self.name = str(config.get("name") or version_dir.parent.name)
        instance += int(config.get("first_instance", 0))  # each instance of a sequence model is a group
        self.instance_name, self.kind = name_instance(self.name, self.config, instance)
        self._version_dir = version_dir
        self._model: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def decoupled(self) -> bool:
        """Whether a request has any number of responses."""
        return bool((self.config.get("model_transaction_policy") or {}).get("decoupled"))

    @property
    def version(self) -> int:
        """Its number, -1 where its folder has none."""
        number = self._version_dir.name
        return int(number) if number.isdecimal() else -1

    def load(self) -> None:
        """Imports model.py, completes the configuration, makes and initializes the model. Raises what the
        model raises, and ConfigError when the class does not fit."""
        from fastserve.backends import triton_utils

        triton_utils.install(str(self._version_dir))
        factory = self._import_class()
        if hasattr(factory, "auto_complete_config"):
            self._complete(factory.auto_complete_config(triton_utils.ModelConfig(self.config)))
        # What the configuration declares comes first; a scheduler may have added controls and states.
        self.inputs = {**_specs("input", self.config), **self.inputs}
        self.outputs = {**_specs("output", self.config), **self.outputs}
        self._model = factory()
        if not callable(getattr(self._model, "execute", None)):
            raise ConfigError(f"class {CLASS!r} has no method execute(self, requests)")
        if hasattr(self._model, "initialize"):
            self._model.initialize(self._arguments())

    def execute(self, requests: list[InferenceRequest], failed: Failed) -> Sequence[Any] | None:
        """The responses, None when the model sends them itself. Raises what the model raises; `failed` gets
        what an asynchronous decoupled model raises later."""
        answer = self._model.execute(requests)
        if type(answer) is list or not inspect.isawaitable(answer):
            return answer
        running = asyncio.run_coroutine_threadsafe(_finish(answer), self._event_loop())
        if not self.decoupled:
            return running.result()  # type: ignore[no-any-return]

        def done(future: Any) -> None:
            error = CancelledError() if future.cancelled() else future.exception()
            if error is not None:
                failed(error)

        running.add_done_callback(done)
        return None

    def run(self, inputs: Arrays) -> Arrays:
        """One request of these arrays, outside of any batch: a warm-up sample. Raises what the model raises,
        and ServeError for an error it answers with."""
        from fastserve.backends.triton_requests import InferenceRequest
        from fastserve.backends.triton_tensor import Tensor
        from fastserve.backends.triton_types import BY_DTYPE

        kinds = {name: BY_DTYPE[spec.dtype.name].number for name, spec in self.inputs.items()}
        tensors = [Tensor.made_of(name, array, kinds[name], True) for name, array in inputs.items()]
        request = InferenceRequest("", 0, tensors, list(self.outputs), self.name)
        reply = _Gather(self.decoupled)
        request._reply = reply
        errors: list[BaseException] = []
        reply.responses += [r for r in self.execute([request], errors.append) or () if r is not None]
        for response in reply.responses:
            if response.has_error():
                raise ServeError(Kind.INTERNAL, str(response.error()))
        return {t.name(): t.raw for response in reply.responses[:1] for t in response.output_tensors()}

    def where(self, error: BaseException) -> str:
        """Where in the model's own code it was raised, as Triton says it; "" for nowhere."""
        return tell_place(error, self._version_dir.parent.parent)

    def close(self) -> None:
        """Calls the model's finalize, if there is one, and ends its event loop."""
        model, self._model = self._model, None
        for folder in self._folders():
            if folder in sys.path:
                sys.path.remove(folder)
        try:
            if hasattr(model, "finalize"):
                model.finalize()
        finally:
            if self._loop is not None and self._thread is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join(1.0)

    def _import_class(self) -> Any:
        filename = str(self.config.get("default_model_filename") or "model.py")
        if not (self._version_dir / filename).is_file():
            raise ConfigError(f"the version's folder has no file {filename}")
        if not filename.endswith(".py"):
            raise ConfigError(f"{filename} is not a file Python can import")
        sys.dont_write_bytecode = True  # a repository may be read-only, and is watched for changes
        # Last, as Triton has them: what is installed comes before what lies beside a model.
        sys.path.extend(folder for folder in self._folders() if folder not in sys.path)
        factory = getattr(import_from(self._version_dir, filename), CLASS, None)
        if not isinstance(factory, type):
            raise ConfigError(f"{filename} has no class {CLASS!r}")
        return factory

    def _folders(self) -> tuple[str, str]:
        """Where a model's own modules lie: beside model.py, and beside config.pbtxt."""
        return str(self._version_dir), str(self._version_dir.parent)

    def _complete(self, completed: Any) -> None:
        if completed is None:
            raise ConfigError("auto_complete_config returned nothing, not the configuration")
        # Queue, arena and plans are made by these before any worker has loaded: the server is told, takes
        # them into the configuration and loads the model once more.
        said = json.loads(json.dumps(completed.as_dict()))
        fields = {name: said.get(name) for name in COMPLETED if said.get(name) != self.config.get(name)}
        if fields:
            raise CompletedConfig(fields)

    def _arguments(self) -> dict[str, str]:
        return {
            "model_config": json.dumps(self.config),
            "model_instance_kind": self.kind,
            "model_instance_name": self.instance_name,
            "model_instance_device_id": "0",  # the worker's own device is the first that it sees
            "model_repository": str(self._version_dir.parent),
            "model_version": self._version_dir.name,
            "model_name": self.name,
        }

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="execute", daemon=True)
            self._thread.start()
        return self._loop


class _Gather:
    """Takes the responses of a request that nobody waits for."""

    def __init__(self, decoupled: bool) -> None:
        self.decoupled = decoupled
        self.ended = False
        self.responses: list[InferenceResponse] = []

    def send(self, response: InferenceResponse | None, final: bool) -> None:
        self.responses += [response] if response is not None else []
        self.ended = final

    def cancelled(self) -> bool:
        return False


async def _finish(answer: Any) -> Any:
    try:
        return await answer
    # They would end the event loop, and with it every other answer under way.
    except (SystemExit, KeyboardInterrupt) as error:
        raise ServeError(Kind.INTERNAL, explain(error)) from None


def name_instance(model: str, config: Mapping[str, Any], instance: int) -> tuple[str, str]:
    """(name, kind) of one instance: NAME_GROUP_INDEX, counted through the groups, NAME_INDEX where none is
    written down; kinds are CPU and GPU."""
    groups = config.get("instance_group") or [{"name": model}]
    for number, group in enumerate(groups):
        count = int(group.get("count") or 1)
        if group.get("kind") == "KIND_GPU":
            count *= max(len(group.get("gpus") or ()), 1)
        if instance < count or number == len(groups) - 1:
            kind = "GPU" if group.get("kind") == "KIND_GPU" else "CPU"
            named = group.get("name") or f"{model}_{number}"
            return f"{named}_{instance}", kind
        instance -= count
    raise AssertionError("a list of groups is never empty")


def _specs(side: str, config: Mapping[str, Any]) -> dict[str, TensorSpec]:
    from fastserve.backends.triton_types import BY_CONFIG_NAME

    specs = {}
    for entry in config.get(side) or ():
        row = BY_CONFIG_NAME.get(entry.get("data_type", ""))
        if row is None:
            raise ConfigError(f"{side} {entry.get('name')!r} has no data_type")
        dims = tuple(int(n) for n in entry.get("dims") or ())
        specs[entry["name"]] = TensorSpec(entry["name"], DTYPES[row.dtype], dims)
    return specs


def _plain_triton(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration for a model that came without one of Triton's."""
    from fastserve.backends.triton_types import BY_DTYPE

    def entries(side: str) -> list[dict[str, Any]]:
        return [
            {"name": name, "data_type": BY_DTYPE[spec["dtype"]].config_name, "dims": spec["shape"] or []}
            for name, spec in (config.get(side) or {}).items()
        ]

    return {
        "name": config.get("name", ""),
        "backend": "python",
        "max_batch_size": int(config.get("max_batch_size", 0)),
        "input": entries("inputs"),
        "output": entries("outputs"),
        "instance_group": [{"kind": "KIND_CPU", "count": int(config.get("instances") or 1)}],
    }
