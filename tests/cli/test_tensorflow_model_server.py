"""`fastserve tensorflow-model-server` as a script runs it: what it prints, waits for and ends of."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from fastserve.dialects.tfserving.service import NO_DIMENSIONS, OTHER_ROWS
from fastserve.protos import load
from tests.running import START_S, free_port, run_command, started, until

pytestmark = pytest.mark.waits

COMMAND = "tensorflow-model-server"
CONFIG = """
backend: python
inputs: {x: {dtype: float32, shape: []}}
outputs: {scores: {dtype: float32, shape: []}}
signatures:
  value: {method: regress, inputs: {inputs: x}, outputs: {outputs: scores}, features: {x: inputs}}
warmup: "off"
"""
# x: -1 -> an output without axes; -2 -> a row too many; otherwise itself
MODEL = """
import numpy as np

class Model:
    def __init__(self, config): pass

    def run(self, inputs):
        x = inputs["x"]
        if x[0] == -1:
            return {"scores": np.float32(7)}
        return {"scores": np.append(x, x[:1]) if x[0] == -2 else x}
"""
UNREADABLE = "model_config_list { config { name: 'm' base_path: } }"


def write_version(base: Path, code: str = MODEL) -> None:
    (base / "1").mkdir(parents=True)
    (base / "1" / "model.py").write_text(code)
    (base / "model.yaml").write_text(CONFIG)


def start(*flags: str) -> tuple[int, str, str]:
    """A start that ends by itself: exit status, standard output, standard error."""
    done = run_command(COMMAND, *flags)
    return done.returncode, done.stdout, done.stderr


@contextmanager
def serving(base: Path, log: Path) -> Iterator[str]:
    port = free_port()
    flags = ["--port=0", f"--rest_api_port={port}", "--model_name=m", f"--model_base_path={base}"]
    with log.open("wb") as out, started(COMMAND, *flags, stderr=out.fileno()) as process:
        yield f"http://127.0.0.1:{port}/v1/models/m"
        process.send_signal(signal.SIGTERM)
        assert process.wait(START_S) == 0, log.read_text()


@contextmanager
def serving_grpc(base: Path, log: Path, *flags: str) -> Iterator[grpc.Channel]:
    place = next((flag.partition("=")[2] for flag in flags if "grpc_socket_path" in flag), "")
    port = 0 if place else free_port()
    given = [f"--port={port}", "--model_name=m", f"--model_base_path={base}", *flags]
    with log.open("wb") as out, started(COMMAND, *given, stderr=out.fileno()) as process:
        with grpc.insecure_channel(f"unix:{place}" if place else f"127.0.0.1:{port}") as channel:
            grpc.channel_ready_future(channel).result(START_S)
            yield channel
        process.send_signal(signal.SIGTERM)
        assert process.wait(START_S) == 0, log.read_text()


def ask(url: str, body: Any = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=60) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as refused:
        return refused.code, json.load(refused)
    except OSError:
        return 0, None


def is_available(url: str) -> bool:
    status, body = ask(url)
    return status == 200 and body["model_version_status"][0]["state"] == "AVAILABLE"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that was started before its base path was there."""
    folder = tmp_path_factory.mktemp("tf")
    base, log = folder / "models" / "m", folder / "log"
    with serving(base, log) as found:
        until(lambda: log.exists() and "base_path is not a folder" in log.read_text(), "it waits", START_S)
        write_version(folder / "coming")
        base.parent.mkdir()
        os.rename(folder / "coming", base)
        until(lambda: is_available(found), "the model was taken up", START_S)
        yield found


def test_it_waits_for_a_base_path(url: str) -> None:
    assert ask(f"{url}:predict", {"instances": [1.0, 2.0]}) == (200, {"predictions": [1.0, 2.0]})


def test_results_alone(url: str) -> None:
    asked = {"signature_name": "value", "examples": [{"x": 3.0}]}
    assert ask(f"{url}:regress", asked) == (200, {"results": [3.0]})


@pytest.mark.parametrize(("first", "words"), [(-1.0, NO_DIMENSIONS), (-2.0, OTHER_ROWS)])
def test_outputs_without_the_rows_of_the_batch(url: str, first: float, words: str) -> None:
    assert ask(f"{url}:predict", {"instances": [first, 5.0]}) == (400, {"error": words})
    assert ask(f"{url}:predict", {"inputs": [first, 5.0]}) == (400, {"error": words})


def test_version_and_help() -> None:
    status, said, _ = start("--version")
    assert status == 0
    assert [line.partition(": ")[0] for line in said.splitlines()] == [
        "TensorFlow ModelServer",
        "TensorFlow Library",
    ]
    status, said, _ = start("--help")
    assert status == 255
    assert "--rest_api_port=0\tint" in said


def test_a_bad_value_shows_the_usage_on_standard_output() -> None:
    status, said, told = start("--port=12x")
    assert status == 255
    assert said.startswith("usage: tensorflow_model_server\n")
    assert '--port: given "12x"' in told


@pytest.mark.parametrize(
    ("flags", "text", "said", "told"),
    [
        ("--model_config_file={file}", UNREADABLE, "INVALID_ARGUMENT: Invalid protobuf file: '{file}'",
         "Error parsing text-format tensorflow.serving.ModelServerConfig: "),
        ("--model_config_file={file}", None, "NOT_FOUND: {file}; No such file or directory", ""),
        ("--model_base_path=models/m", None,
         "INVALID_ARGUMENT: Expected model default to have an absolute path or URI; got base_path()=models/m",
         ""),
        ("--model_base_path=/m --batching_parameters_file={file}", "",
         "INVALID_ARGUMENT: server_options.batching_parameters_file is set without setting "
         "server_options.enable_batching to true.", ""),
        ("--model_config_file={file}", "model_config_list { config { name: 'a' base_path: '/a' } "
         "config { name: 'a' base_path: '/b' } }",
         "INVALID_ARGUMENT: Illegal to list model a multiple times in config list", ""),
    ],
)  # fmt: skip
def test_startup_errors(tmp_path: Path, flags: str, text: str | None, said: str, told: str) -> None:
    file = tmp_path / "file"
    if text is not None:
        file.write_text(text)
    status, out, err = start(f"--port={free_port()}", *flags.format(file=file).split())
    assert status == 1
    assert out == f"Failed to start server. Error: {said.format(file=file)}\n"
    assert told in err


def test_a_server_that_nobody_could_reach_ends_the_start(tmp_path: Path) -> None:
    write_version(tmp_path / "m")
    status, out, _ = start("--port=0", f"--model_base_path={tmp_path / 'm'}")
    assert status == 1
    text = "At least one of server_options.grpc_port or server_options.grpc_socket_path must be set."
    assert out == f"Failed to start server. Error: INVALID_ARGUMENT: {text}\n"


def test_a_model_that_fails_ends_the_start(tmp_path: Path) -> None:
    write_version(tmp_path / "m", MODEL.replace("pass", "raise ValueError('no weights')"))
    status, out, _ = start(f"--port={free_port()}", "--model_name=m", f"--model_base_path={tmp_path / 'm'}")
    assert status == 1
    assert out == (
        "Failed to start server. Error: UNKNOWN: 1 servable(s) did not become available: "
        "{{name: m version: 1} due to error: ValueError: no weights}, }\n"
    )


def test_a_label_of_no_version_ends_the_start(tmp_path: Path) -> None:
    write_version(tmp_path / "m")
    file = tmp_path / "models"
    file.write_text(
        f"model_config_list {{ config {{ name: 'm' base_path: '{tmp_path / 'm'}' "
        "version_labels { key: 'new' value: 9 } } }"
    )
    status, out, _ = start(f"--port={free_port()}", f"--model_config_file={file}")
    assert status == 1
    assert out == (
        "Failed to start server. Error: FAILED_PRECONDITION: "
        "Request to assign label to version 9 of model m, which is not currently available for inference\n"
    )


@pytest.mark.lingers  # grpcio keeps its poller's thread and pipe
def test_its_grpc_port(tmp_path: Path) -> None:
    """Predict, with tensor_content as a flag asks for it, and a client that replaces the models."""
    messages = load("tfserving")
    for name in ("m", "n"):
        write_version(tmp_path / name)
    flags = ("--enable_serialization_as_tensor_content", "--file_system_poll_wait_seconds=0")
    with serving_grpc(tmp_path / "m", tmp_path / "log", *flags) as channel:
        predict = channel.unary_unary(
            "/tensorflow.serving.PredictionService/Predict",
            response_deserializer=messages.PredictResponse.FromString,
        )

        def asked(model: str) -> bytes:
            request = messages.PredictRequest(model_spec={"name": model})
            request.inputs["x"].dtype = 1
            request.inputs["x"].tensor_shape.dim.add(size=2)
            request.inputs["x"].float_val.extend([3.0, 4.0])
            data: bytes = request.SerializeToString()
            return data

        def is_served(model: str) -> bool:
            with contextlib.suppress(grpc.RpcError):
                reply = predict(asked(model), timeout=START_S)
                return list(memoryview(reply.outputs["scores"].tensor_content).cast("f")) == [3, 4]
            return False

        until(lambda: is_served("m"), "m is served", START_S)
        request = messages.ReloadConfigRequest()
        request.config.model_config_list.config.add(
            name="n", base_path=str(tmp_path / "n"), model_platform="tensorflow"
        )
        reload = channel.unary_unary("/tensorflow.serving.ModelService/HandleReloadConfigRequest")
        with pytest.raises(
            grpc.RpcError
        ) as refused:  # its model.py would run: whoever reaches the port may ask
            reload(request.SerializeToString(), timeout=START_S)
        assert "clients name folders of SavedModels alone" in refused.value.details()
        assert not is_served("n")
        del request.config.model_config_list.config[:]
        request.config.model_config_list.config.add(
            name="m", base_path=str(tmp_path / "m"), model_platform="tensorflow"
        )
        reload(request.SerializeToString(), timeout=START_S)  # the one that the operator has named
        assert is_served("m")


@pytest.mark.lingers  # grpcio keeps its poller's thread and pipe
def test_its_socket_and_a_list_that_changes(tmp_path: Path) -> None:
    """A server whose only door is a file, whose list of models is edited, and that looks at methods."""
    messages = load("tfserving")
    file, socket_file = tmp_path / "models.config", tmp_path / "tf.sock"

    def replace(text: str) -> None:  # at once: an empty file is a list of no models
        (tmp_path / "next").write_text(text)
        (tmp_path / "next").rename(file)

    def write(name: str) -> None:
        replace(f'model_config_list {{ config {{ name: "{name}" base_path: "{tmp_path / name}" }} }}')

    for name in ("m", "n"):
        write_version(tmp_path / name)
    write("m")
    flags = (
        f"--model_config_file={file}",
        "--model_config_file_poll_wait_seconds=1",
        f"--grpc_socket_path={socket_file}",
        "--enable_signature_method_name_check",
    )
    with serving_grpc(tmp_path / "m", tmp_path / "log", *flags) as channel:
        regress = channel.unary_unary(
            "/tensorflow.serving.PredictionService/Regress",
            response_deserializer=messages.RegressionResponse.FromString,
        )

        def ask(model: str, signature: str) -> str:
            request = messages.RegressionRequest(model_spec={"name": model, "signature_name": signature})
            example = request.input.example_list.examples.add()
            example.features.feature["x"].float_list.value.append(3)
            try:
                reply = regress(request.SerializeToString(), timeout=START_S)
            except grpc.RpcError as refused:
                return str(refused.details())
            return str(reply.result.regressions[0].value)

        until(lambda: ask("m", "value") == "3.0", "m is served", START_S)
        assert ask("m", "") == (
            "Expected regression signature method_name to be tensorflow/serving/regress. "
            "Was: tensorflow/serving/predict"
        )
        write("n")
        until(lambda: ask("n", "value") == "3.0", "n is served", START_S)
        until(lambda: "Servable not found" in ask("m", "value"), "m has gone", START_S)
        replace("model_config_list {")
        until(lambda: "Error parsing text-format" in (tmp_path / "log").read_text(), "it is told", START_S)
        assert ask("n", "value") == "3.0"
    assert not socket_file.exists()
