"""The grps backend: a converter and an inferer of a grps project, as one node of its inference.yml.

    preprocess -> infer -> postprocess         of a request, in one of `max_concurrency` threads
    batch_preprocess -> batch_infer -> ...     of a batch

A request is one serialized GrpsMessage, and so is each part of its answer; whether the client wants parts,
and the HTTP request of a customised predict, are parameters. The worker takes requests on while others run.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastserve.backends.base import read_specs
from fastserve.backends.grps_framework import GrpsContext, make_http_request
from fastserve.backends.model_errors import explain, kind_of
from fastserve.errors import ConfigError
from fastserve.protos import load

if TYPE_CHECKING:
    from fastserve.backends.base import OnFailure
    from fastserve.backends.triton_api.requests import InferenceRequest, ResponseSender

log = logging.getLogger(__name__)
MESSAGE = "message"
SOURCES = ("customized_converter", "customized_inferer")
INTERNAL = 1  # among Triton's codes
NO_MESSAGE = "Output type must be GrpsMessage."


class GrpsBackend:
    """Runs one node of a grps deployment; the version's folder is the deployment's."""

    batching = decoupled = True

    def __init__(self, config: Mapping[str, Any], version_dir: Path, instance: int) -> None:
        self.inputs = read_specs(config.get("inputs"))
        self.outputs = read_specs(config.get("outputs"))
        self.name = self.instance_name = str(config.get("name"))
        self.version = 1
        self.config: dict[str, Any] = {"output": [{"name": MESSAGE}]}
        self._node: dict[str, Any] = dict(config.get("parameters") or {})
        self._folder = version_dir
        self._message: Any = None
        self._converter: Any = None
        self._inferer: Any = None
        self._threads: ThreadPoolExecutor | None = None

    def load(self) -> None:
        """Import the project's code, make and load converter and inferer. Raises what they raise, and
        ConfigError for a name that is not registered."""
        from fastserve.backends import grps_framework

        grps_framework.install()
        self._message = load("grps").GrpsMessage
        self._import_project()
        node = self._node
        if node["converter_name"]:
            found = _make_registered(grps_framework.converter_register, node["converter_name"], "converter")
            found.init(node["converter_path"], node["converter_args"])
            self._converter = found
        inferer = _make_registered(grps_framework.inferer_register, node["inferer_name"], "inferer")
        inferer.init(node["inferer_path"], node["device"], node["inferer_args"])
        if inferer.load() is False:
            raise ConfigError(f"inferer {node['inferer_name']!r} could not load its model")
        self._inferer = inferer
        most = int(node["max_concurrency"])
        self._threads = ThreadPoolExecutor(most, thread_name_prefix="grps")

    def execute(self, requests: list[InferenceRequest], failed: OnFailure) -> Sequence[Any] | None:
        """Start a batch; every request is answered from its own thread."""
        assert self._threads is not None
        jobs = [GrpsJob(self._message, request) for request in requests]
        if self._node["batching"]:
            self._threads.submit(self._run_batch, jobs)
        else:
            for job in jobs:
                self._threads.submit(self._run, job)
        return None

    def run(self, inputs: Any) -> Any:
        """Raise NotImplementedError: a message cannot be made up for a warm-up."""
        raise NotImplementedError("a grps model is asked by messages")

    def where(self, error: BaseException) -> str:
        """Return "": clients get the text of an exception, the log has the traceback."""
        return ""

    def close(self) -> None:
        """Stop the threads."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, job: GrpsJob) -> None:
        try:
            context = job.open(self._converter, self._inferer)
            found = job.message
            steps = [self._inferer.infer]
            if self._converter is not None:
                steps = [self._converter.preprocess, self._inferer.infer, self._converter.postprocess]
            for step in steps:
                found = step(found, context)
                if context.has_err():
                    break
            job.answer(found)
        # A model may raise anything; the thread goes on, and its caller hears.
        except BaseException as error:
            job.fail(error)

    def _run_batch(self, jobs: list[GrpsJob]) -> None:
        try:
            contexts = [job.open(self._converter, self._inferer) for job in jobs]
            found: Any = [job.message for job in jobs]
            steps = [self._inferer.batch_infer]
            if self._converter is not None:
                converter = self._converter
                steps = [converter.batch_preprocess, self._inferer.batch_infer, converter.batch_postprocess]
            for step in steps:
                found = step(found, contexts)
                if all(context.has_err() for context in contexts):
                    break
            else:
                found = self._share(found, jobs)
            for number, job in enumerate(jobs):
                job.answer(None if job.failed else found[number])
        except BaseException as error:
            for job in jobs:
                job.fail(error)

    def _share(self, found: Any, jobs: list[GrpsJob]) -> Any:
        """Return the outputs of a batch, one for each request. Raises ValueError for another number of
        them."""
        if all(job.streaming or job.failed for job in jobs):
            return [None] * len(jobs)
        if not isinstance(found, list | tuple) or len(found) != len(jobs):
            given = f"{len(found)} outputs" if isinstance(found, list | tuple) else type(found).__name__
            raise ValueError(f"a batch of {len(jobs)} requests was answered with {given}")
        return found

    def _import_project(self) -> None:
        sys.dont_write_bytecode = True
        os.chdir(self._folder)  # paths in inference.yml begin there, and so do those in projects
        for folder in (str(self._folder / "src"), str(self._folder)):
            if folder not in sys.path:
                sys.path.insert(0, folder)
        for name in SOURCES:
            if (self._folder / "src" / f"{name}.py").is_file():
                importlib.import_module(f"src.{name}")


class GrpsJob:
    """One request of a batch: its message, its context, and its one answer."""

    def __init__(self, message: Any, request: InferenceRequest) -> None:
        from fastserve.backends.triton_api.requests import InferenceRequest as Request

        assert isinstance(request, Request)
        given = request.input_by_name(MESSAGE)
        assert given is not None
        self._class = message
        self._data = bytes(given.as_numpy().reshape(-1)[0])
        self._said = dict(request.plain_parameters)
        self._sender: ResponseSender = request.get_response_sender()
        self._context: GrpsContext | None = None
        self._ended = False
        self.message: Any = None
        self.streaming = bool(self._said.get("streaming"))

    @property
    def failed(self) -> bool:
        """Whether the project has reported an error."""
        return self._context is not None and self._context.has_err()

    def open(self, converter: Any, inferer: Any) -> GrpsContext:
        """Read the message. Raises what protobuf raises for one that cannot be read."""
        self.message = self._class.FromString(self._data)
        http = json.loads(str(self._said["http"])) if "http" in self._said else None
        asked = None
        if http is not None:
            headers = [(name, value) for name, value in http["headers"]]
            asked = make_http_request(http["method"], http["target"], headers, self.message.bin_data)
        self._context = GrpsContext(self, streaming=self.streaming, http_request=asked)
        self._context.converter, self._context.inferer = converter, inferer
        return self._context

    def answer(self, found: Any) -> None:
        """Answer with the project's error, with what it returned, or end its stream."""
        context = self._context
        assert context is not None
        if context.has_err():
            self._end_badly(context.get_err_msg(), INTERNAL)
        elif self.streaming:
            self._end(None)
        elif "http" in self._said and "goes_on" not in self._said:
            body, status, headers = context.get_http_response() or (
                b"",
                200,
                [("Content-Type", "text/plain")],
            )
            told = {"http_status": status, "http_headers": json.dumps(headers)}
            self._end(self._pack(self._class(bin_data=body).SerializeToString(), told))
        elif not isinstance(found, self._class):
            self._end_badly(NO_MESSAGE, INTERNAL)
        else:
            self._end(self._pack(found.SerializeToString()))

    def fail(self, error: BaseException) -> None:
        """Answer with an exception."""
        if not self._ended:
            from fastserve.backends.triton_api.requests import KINDS

            log.error("the model failed on a request", exc_info=error)
            kind = kind_of(error)
            self._end_badly(explain(error), KINDS.index(kind) if kind in KINDS else INTERNAL)

    # --- the Sender of its context ---

    def part(self, data: bytes, final: bool) -> None:
        if not self._ended:
            self._ended = final
            self._sender.send(self._pack(data), int(final))

    def cancelled(self) -> bool:
        return not self._ended and self._sender.is_cancelled()

    def _pack(self, data: bytes, told: dict[str, Any] | None = None) -> Any:
        from fastserve.backends.triton_api.requests import InferenceResponse
        from fastserve.backends.triton_api.tensor import Tensor

        array = np.empty(1, object)
        array[0] = data
        return InferenceResponse([Tensor(MESSAGE, array)], parameters=told)

    def _end_badly(self, text: str, code: int) -> None:
        from fastserve.backends.triton_api.requests import InferenceResponse, TritonError

        self._end(InferenceResponse(error=TritonError(text, code)))

    def _end(self, response: Any) -> None:
        if not self._ended:
            self._ended = True
            self._sender.send(response, 1)


def _make_registered(register: Any, name: str, noun: str) -> Any:
    """Return a fresh object of the class registered under a name, as several models may use it. Raises
    ConfigError."""
    found = register.get(name)
    if found is None:
        known = ", ".join(register.names()) or "none"
        raise ConfigError(f"{noun}_name: given {name!r}, allowed: what the project registered ({known})")
    return type(found)()
