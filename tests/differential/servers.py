"""A Triton and a fastserve on copies of one repository, and how both are asked.

Triton is started by the command in FASTSERVE_TRITON, which takes REPOSITORY --http PORT --grpc PORT --metrics
PORT and is stopped with SIGTERM.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc

from fastserve.protos import load
from tests.differential.cases import Case
from tests.running import Running

COMMAND = os.environ.get("FASTSERVE_TRITON", "")
MODELS = Path(__file__).parent / "models"
LEFT_OUT = ("loads",)  # loads another while it loads, which needs explicit control
MESSAGES = load("kserve_v2")
SERVICE = "/inference.GRPCInferenceService/"
START_S, ANSWER_S = 120.0, 20.0
HEADERS = ("content-type", "inference-header-content-length")
DEAD = "is not healthy"  # of a model's process that 2.51 lost, as it may at a call to a decoupled model
Answer = tuple[Any, ...]


class Asked:
    """One server. Answers are plain values that can be compared; the repository's own path is left out."""

    def __init__(self, http_place: str, grpc_place: str, metrics_place: str, repository: Path) -> None:
        self.http, self.metrics = http_place, metrics_place
        self._private = f"{repository}/"
        self._channel = grpc.insecure_channel(grpc_place)

    def get(self, path: str, body: Any = None, place: str = "") -> Answer:
        """(status, headers that matter, body)"""
        connection = http.client.HTTPConnection(place or self.http, timeout=ANSWER_S)
        try:
            data = None if body is None else json.dumps(body)
            headers = {} if body is None else {"Content-Type": "application/json"}
            connection.request("GET" if body is None else "POST", path, data, headers)
            reply = connection.getresponse()
            text = self._clean(reply.read().decode())
            # Of an error 2.51 says text/plain or application/json, by where it noticed.
            told = HEADERS if reply.status == 200 else ()
            said = {name: value for name in told if (value := reply.getheader(name))}
            with contextlib.suppress(ValueError):
                return reply.status, said, json.loads(text)
            return reply.status, said, text
        finally:
            connection.close()

    def infer(self, case: Case) -> Answer:
        """Over HTTP."""
        return self._alive(self._infer, case)

    def infer_grpc(self, case: Case) -> Answer:
        """(code, message or words)"""
        return self._alive(self._infer_grpc, case)

    def _alive(self, ask: Callable[[Case], Answer], case: Case) -> Answer:
        answer = ask(case)
        if DEAD not in str(answer):
            return answer
        for verb in ("unload", "load"):
            assert self.get(f"/v2/repository/models/{case.model}/{verb}", {})[0] == 200
        return ask(case)

    def _infer(self, case: Case) -> Answer:
        body: dict[str, Any] = {"inputs": [one.as_json() for one in case.inputs]}
        if case.outputs:
            body["outputs"] = [{"name": name} for name in case.outputs]
        body |= {"id": case.id} if case.id else {}
        body |= {"parameters": case.parameters} if case.parameters else {}
        return self.get(f"/v2/models/{case.model}/infer", body)

    def _infer_grpc(self, case: Case) -> Answer:
        call = self._channel.unary_unary(SERVICE + "ModelInfer")
        try:
            reply = call(make_message(case).SerializeToString(), timeout=ANSWER_S)
        except grpc.RpcError as error:
            return error.code().name, self._clean(error.details())
        return "OK", show(MESSAGES.ModelInferResponse.FromString(reply))

    def stream(self, case: Case) -> list[Answer]:
        """All parts of an answer, to the empty one that ends it."""
        message = make_message(case)
        message.parameters["triton_enable_empty_final_response"].bool_param = True
        call = self._channel.stream_stream(SERVICE + "ModelStreamInfer")
        found: list[Answer] = []
        for part in call(iter([message.SerializeToString()]), timeout=ANSWER_S):
            reply = MESSAGES.ModelStreamInferResponse.FromString(part)
            found.append((self._clean(reply.error_message), show(reply.infer_response)))
        return found

    def close(self) -> None:
        self._channel.close()

    def _clean(self, text: str | None) -> str:
        return (text or "").replace(self._private, "").replace(self._private.replace("/", "\\/"), "")


def make_message(case: Case) -> Any:
    message = MESSAGES.ModelInferRequest(model_name=case.model, id=case.id)
    for given in case.inputs:
        message.inputs.add(name=given.name, datatype=given.datatype, shape=given.shape)
        message.raw_input_contents.append(given.as_bytes())
    for name in case.outputs:
        message.outputs.add(name=name)
    for name, value in case.parameters.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
        setattr(message.parameters[name], kind, value)
    return message


def show(reply: Any) -> Any:
    """A response as plain values."""
    outputs = [(one.name, one.datatype, list(one.shape)) for one in reply.outputs]
    said = {name: str(value).strip() for name, value in sorted(reply.parameters.items())}
    return reply.model_name, reply.model_version, reply.id, outputs, list(reply.raw_output_contents), said


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@contextlib.contextmanager
def triton(repository: Path, log: Path) -> Iterator[tuple[Asked, int]]:
    """The real one, and its process's id."""
    ports = [_free_port() for _ in range(3)]
    flags = [
        word for pair in zip(("--http", "--grpc", "--metrics"), map(str, ports), strict=True) for word in pair
    ]
    explicit = ("--model-control-mode=explicit", "--load-model=*")
    command = [*shlex.split(COMMAND), str(repository), *flags, "--exit-on-error=false", *explicit]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    places = [f"127.0.0.1:{port}" for port in ports]
    asked = Asked(places[0], places[1], places[2], repository)
    try:
        _await_answers(asked, process, log)
        yield asked, process.pid
    finally:
        asked.close()
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
        process.kill()
        process.wait()


def _await_answers(asked: Asked, process: subprocess.Popen[bytes], log: Path) -> None:
    """Live is enough: one of the models does not load."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-2000:]
        with contextlib.suppress(OSError):
            if asked.get("/v2/models/add_sub/ready")[0] == 200:
                return
        time.sleep(0.1)
    raise AssertionError(f"Triton did not start:\n{log.read_text()[-2000:]}")


@contextlib.contextmanager
def ours(repository: Path, log: Path) -> Iterator[tuple[Asked, int]]:
    """This server, and its process's id."""
    with Running(repository, log, "--keep-going") as running:
        asked = Asked(running.http, running.grpc, running.http, repository)
        try:
            yield asked, running.pid
        finally:
            asked.close()


def copy_models(folder: Path) -> Path:
    """A repository of its own for one server."""
    shutil.copytree(MODELS, folder, ignore=shutil.ignore_patterns(*LEFT_OUT, "__pycache__"))
    return folder
