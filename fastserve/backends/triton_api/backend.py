"""The triton_python backend: class TritonPythonModel in NAME/VERSION/model.py of a Triton repository.

    class TritonPythonModel:
        @staticmethod
        def auto_complete_config(config): ...        # optional
        def initialize(self, args): ...              # optional
        def execute(self, requests): ...             # a list of responses; None when decoupled; may be async
        def finalize(self): ...                      # optional

model.py is a module of the package that its version's folder is, and imports files beside it and beside its
config:

    NAME/config.pbtxt      NAME/beside.py          import beside
    NAME/1/model.py        NAME/1/helper.py        from .helper import F        import helper

Requests and responses are those of `triton_python_backend_utils`; the worker transports them
(workers/requests.py).
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fastserve.backends.base import CompletedConfig, read_specs
from fastserve.backends.model_errors import explain
from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.tensor import DTYPES, TensorSpec

if TYPE_CHECKING:
    from fastserve.backends.base import Arrays, OnFailure
    from fastserve.backends.triton_api.requests import InferenceRequest, InferenceResponse


def import_from(folder: Path, filename: str) -> ModuleType:
    """Import a .py file of a version's folder. Raises what the module raises.

    The package has the folder's name, as in Triton: the model's own subprocesses find there what the model
    pickles.
    """
    package = folder.name
    own = [name for name in list(sys.modules) if name == package or name.startswith(f"{package}.")]
    for name in own:  # a copy: models that share a process are loaded in threads
        del sys.modules[name]  # of another model in this process, whose version has the same number
    init = folder / "__init__.py"
    if init.is_file():
        _execute(package, init, [str(folder)])
    else:
        sys.modules[package] = _bare_package(package, folder)
    return _execute(f"{package}.{Path(filename).stem}", folder / filename)


def _bare_package(name: str, folder: Path) -> ModuleType:
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    return module_from_spec(spec)


def _execute(name: str, path: Path, locations: list[str] | None = None) -> ModuleType:
    spec = spec_from_file_location(name, path, submodule_search_locations=locations)
    assert spec is not None, "a .py file has a loader"
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


MOST_FRAMES = 20


def locate_error(error: BaseException, repository: Path) -> str:
    """Return where in the model's files an exception was raised, to put behind its text; "" when no frame is
    the model's.

    Only files of the repository are named, from it on: a client learns nothing of the machine or of the
    server. Triton names every frame, by its whole path. The innermost frame comes first:

        At:
          NAME/1/model.py(12): scale
          NAME/1/model.py(7): execute
    """
    root = f"{repository}/"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(root)]
    if not frames:
        return ""
    inner_first = frames[: -MOST_FRAMES - 1 : -1]
    lines = [f"  {f.filename.removeprefix(root)}({f.lineno}): {f.name}\n" for f in inner_first]
    return "\n\nAt:\n" + "".join(lines)


CLASS = "TritonPythonModel"

# The fields that auto_complete_config can set.
COMPLETED = ("input", "output", "max_batch_size", "dynamic_batching", "model_transaction_policy")


class TritonPythonBackend:
    """Runs a model written for Triton's Python backend."""

    def __init__(self, config: Mapping[str, Any], version_dir: Path, instance: int) -> None:
        self.inputs = read_specs(config.get("inputs"))
        self.outputs = read_specs(config.get("outputs"))
        self.config: dict[str, Any] = dict(config.get("triton") or _config_of_native(config))
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
        """The version's number, -1 where its folder has none."""
        number = self._version_dir.name
        return int(number) if number.isdecimal() else -1

    def load(self) -> None:
        """Import model.py, complete the configuration, make and initialize the model. Raises what the model
        raises, and ConfigError when the class does not fit."""
        from fastserve.backends.triton_api import utils

        utils.install(str(self._version_dir))
        factory = self._import_class()
        if hasattr(factory, "auto_complete_config"):
            self._complete(factory.auto_complete_config(utils.ModelConfig(self.config)))
        # Declared inputs come first; a scheduler may have added controls and states.
        self.inputs = {**_specs("input", self.config), **self.inputs}
        self.outputs = {**_specs("output", self.config), **self.outputs}
        self._model = factory()
        if not callable(getattr(self._model, "execute", None)):
            raise ConfigError(f"class {CLASS!r} has no method execute(self, requests)")
        if hasattr(self._model, "initialize"):
            self._model.initialize(self._arguments())

    def execute(self, requests: list[InferenceRequest], failed: OnFailure) -> Sequence[Any] | None:
        """Run a batch; see RequestBackend. Raises what the model raises; `failed` gets what an asynchronous
        decoupled model raises later."""
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
        """Run one warm-up sample as a request of its own. Raises what the model raises, and ServeError for an
        error it answers with."""
        from fastserve.backends.triton_api.requests import InferenceRequest
        from fastserve.backends.triton_api.tensor import BY_DTYPE, Tensor

        kinds = {name: BY_DTYPE[spec.dtype.name].number for name, spec in self.inputs.items()}
        tensors = [Tensor.made_of(name, array, kinds[name], True) for name, array in inputs.items()]
        request = InferenceRequest("", 0, tensors, list(self.outputs), self.name)
        reply = _ResponseCollector(self.decoupled)
        request._reply = reply
        errors: list[BaseException] = []
        reply.responses += [r for r in self.execute([request], errors.append) or () if r is not None]
        for response in reply.responses:
            if response.has_error():
                raise ServeError(Kind.INTERNAL, str(response.error()))
        return {t.name(): t.raw for response in reply.responses[:1] for t in response.output_tensors()}

    def where(self, error: BaseException) -> str:
        """Return where in the model's own code it was raised, in Triton's form; "" for nowhere."""
        return locate_error(error, self._version_dir.parent.parent)

    def close(self) -> None:
        """Call the model's finalize, if it has one, and stop its event loop."""
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
        """Return the folders of the model's own modules: beside model.py, and beside config.pbtxt."""
        return str(self._version_dir), str(self._version_dir.parent)

    def _complete(self, completed: Any) -> None:
        if completed is None:
            raise ConfigError("auto_complete_config returned nothing, not the configuration")
        # Queue, arena and plans depend on these before any worker has loaded: the server takes them into the
        # configuration and loads the model once more.
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


class _ResponseCollector:
    """Collects the responses of a request that no client waits for."""

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
    """Return (name, kind) of one instance: NAME_GROUP_INDEX, counted through the groups, NAME_INDEX where
    there is no group; kinds are CPU and GPU."""
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
    from fastserve.backends.triton_api.tensor import BY_CONFIG_NAME

    specs = {}
    for entry in config.get(side) or ():
        row = BY_CONFIG_NAME.get(entry.get("data_type", ""))
        if row is None:
            raise ConfigError(f"{side} {entry.get('name')!r} has no data_type")
        dims = tuple(int(n) for n in entry.get("dims") or ())
        specs[entry["name"]] = TensorSpec(entry["name"], DTYPES[row.dtype], dims)
    return specs


def _config_of_native(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Triton configuration for a model that came without one."""
    from fastserve.backends.triton_api.tensor import BY_DTYPE

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
