"""The runtimes of deploy/kserve: each argument list starts our command, which then answers."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fastserve.cli.compatible import kserve_settings, mlserver_settings
from fastserve.errors import ConfigError
from fastserve.settings.sources import list_variables
from tests.running import START_S, free_port
from tests.server.rig import write_model

FOLDER = Path(__file__).resolve().parents[2] / "deploy/kserve"
RUNTIMES = ("mlserver", "predictiveserver", "tensorflow-serving", "tritonserver")
# What KServe's own runtimes are started with; the files have to keep to it.
ORIGINAL = {
    "tensorflow-serving": [
        *("--model_name={{.Name}}", "--port=9000", "--rest_api_port=8080", "--model_base_path=/mnt/models"),
        "--rest_api_timeout_in_ms=60000",
    ],
    "tritonserver": [
        *("tritonserver", "--model-store=/mnt/models", "--grpc-port=9000", "--http-port=8080"),
        *("--allow-grpc=true", "--allow-http=true"),
    ],
    "predictiveserver": [
        *("--model_name={{.Name}}", "--model_dir=/mnt/models", "--http_port=8080"),
        *("--framework={{.Annotations.modelFormat}}", "--nthread=1"),
    ],
    "mlserver": [],
}
ROWS = [[5.1, 3.5, 1.4, 0.2], [6.7, 3.0, 5.2, 2.3]]


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    return found


def container(name: str) -> dict[str, Any]:
    (found,) = read(name)["spec"]["containers"]
    assert found["name"] == "kserve-container"
    return dict(found)


@contextlib.contextmanager
def started(name: str, models: Path, labels: dict[str, str]) -> Iterator[str]:
    """Start what the runtime starts, on a free port and this folder; HOST:PORT of its HTTP."""
    ports = {"8080": str(free_port()), "9000": str(free_port()), "8002": str(free_port())}

    def fill(text: str) -> str:
        text = re.sub(r"{{\.(?:\w+\.)?(\w+)}}", lambda found: labels[found[1]], text)
        for fixed, free in ports.items():
            text = re.sub(rf"\b{fixed}\b", free, text)
        return text.replace("/mnt/models", str(models))

    asked = container(name)
    command = [*asked.get("command", []), *map(fill, asked.get("args", []))]
    assert command.pop(0) == "fastserve"
    if name == "tritonserver":  # the only default that a test cannot have
        command.append(f"--metrics-port={ports['8002']}")
    environment = {one["name"]: fill(one["value"]) for one in asked.get("env", [])}
    if name == "mlserver":  # by KServe's controller
        environment |= {"MLSERVER_MODEL_NAME": labels["Name"], "MLSERVER_MODEL_URI": str(models)}
    environment |= {"FASTSERVE_DRAIN_DELAY_S": "0"} if "FASTSERVE_DRAIN_DELAY_S" in environment else {}
    with (models.parent / "log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "fastserve.cli", *command],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=log,
        )
    try:
        assert server.stdout is not None
        assert b"ready" in server.stdout.readline(), (models.parent / "log").read_text()
        place = f"127.0.0.1:{ports['8080']}"
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert asked[probe]["httpGet"]["port"] == 8080
            with urllib.request.urlopen(
                f"http://{place}{asked[probe]['httpGet']['path']}", timeout=60
            ) as reply:
                assert reply.status == 200
        scraped = read(name)["spec"]["annotations"]
        port = ports[scraped["prometheus.kserve.io/port"]]
        path = scraped["prometheus.kserve.io/path"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as reply:
            assert b"# TYPE " in reply.read()
        yield place
        server.send_signal(signal.SIGTERM)
        assert server.wait(START_S) == 0
    finally:
        server.kill()
        server.wait()
        assert server.stdout is not None
        server.stdout.close()


def post(place: str, path: str, body: object) -> Any:
    with urllib.request.urlopen(f"http://{place}{path}", json.dumps(body).encode(), 60) as reply:
        return json.load(reply)


@pytest.fixture(scope="module")
def iris(tmp_path_factory: pytest.TempPathFactory) -> Path:
    linear_model = pytest.importorskip("sklearn.linear_model")
    rows = np.array([*ROWS, [5.9, 3.0, 4.2, 1.5], [5.0, 3.4, 1.5, 0.2]])
    folder = tmp_path_factory.mktemp("iris") / "models"
    folder.mkdir()
    model = linear_model.LogisticRegression().fit(rows, [0, 2, 1, 0])
    (folder / "model.joblib").write_bytes(pickle.dumps(model))
    return folder


@pytest.mark.parametrize("name", RUNTIMES)
def test_arguments_are_the_originals(name: str) -> None:
    assert container(name).get("args", []) == ORIGINAL[name]


def test_the_predictive_servers_arguments_serve_a_pickle(iris: Path) -> None:
    labels = {"Name": "flowers", "modelFormat": "sklearn"}
    with started("predictiveserver", iris, labels) as place:
        assert post(place, "/v1/models/flowers:predict", {"instances": ROWS}) == {"predictions": [0, 2]}


def test_mlservers_variables_serve_a_pickle(iris: Path) -> None:
    labels = {"Name": "flowers", "modelClass": "mlserver_sklearn.SKLearnModel"}
    tensor = {"name": "input", "shape": [2, 4], "datatype": "FP64", "data": [n for row in ROWS for n in row]}
    with started("mlserver", iris, labels) as place:
        (answer,) = post(place, "/v2/models/flowers/infer", {"inputs": [tensor]})["outputs"]
        assert answer["data"] == [0, 2]


def test_tritons_arguments_serve_a_repository(tmp_path: Path) -> None:
    write_model(tmp_path / "models")
    tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}
    with started("tritonserver", tmp_path / "models", {}) as place:
        (answer,) = post(place, "/v2/models/twice/infer", {"inputs": [tensor]})["outputs"]
        assert answer["data"] == [2.0, 4.0]


def test_tensorflow_servings_arguments_serve_a_model_of_versions(tmp_path: Path) -> None:
    model = write_model(tmp_path / "models")
    with started("tensorflow-serving", model, {"Name": "flowers"}) as place:
        assert post(place, "/v1/models/flowers:predict", {"instances": [[1, 2]]}) == {
            "predictions": [[2.0, 4.0]]
        }


@pytest.mark.parametrize("name", RUNTIMES)
def test_a_runtime_is_whole(name: str) -> None:
    whole, asked = read(name), container(name)
    assert (whole["apiVersion"], whole["kind"]) == ("serving.kserve.io/v1alpha1", "ClusterServingRuntime")
    volumes = {volume["name"] for volume in whole["spec"]["volumes"]}
    assert {mount["name"] for mount in asked["volumeMounts"]} == volumes
    security = asked["securityContext"]
    assert security["runAsNonRoot"]
    assert security["readOnlyRootFilesystem"]
    assert not security["allowPrivilegeEscalation"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    ports = {port["containerPort"] for port in asked["ports"]}
    assert int(whole["spec"]["annotations"]["prometheus.kserve.io/port"]) in ports
    ours = {one["name"] for one in asked.get("env", []) if one["name"].startswith("FASTSERVE_")}
    assert ours <= set(list_variables())


def test_the_service_names_one_of_them() -> None:
    service = read("inference-service")
    model = service["spec"]["predictor"]["model"]
    names = {read(name)["metadata"]["name"]: name for name in RUNTIMES}
    spec = read(names[model["runtime"]])["spec"]
    assert model["modelFormat"]["name"] in {one["name"] for one in spec["supportedModelFormats"]}
    assert model["protocolVersion"] in spec["protocolVersions"]


def test_every_file_is_tested() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == {*RUNTIMES, "inference-service"}


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--nonsense=1"], "unknown argument: --nonsense=1"),
        (["--framework=paddle"], 'given "paddle", allowed: sklearn, xgboost, lightgbm, catboost, onnx'),
        (["--http_port=x"], '--http_port: given "x", allowed: a whole number from 0 on'),
        (["--enable_grpc=maybe"], '--enable_grpc: given "maybe", allowed: true or false'),
        (["--model_name"], "--model_name: missing its value"),
        (["--framework=sklearn"], "given none, allowed: one file that ends in .joblib, .pkl, .pickle"),
    ],
)
def test_what_cannot_be_taken_is_said(tmp_path: Path, flags: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        kserve_settings([f"--model_dir={tmp_path}", *flags], {})
    assert told in str(caught.value)


def test_a_pickle_needs_its_framework_to_be_named(iris: Path) -> None:
    with pytest.raises(ConfigError, match="is a pickle"):
        kserve_settings([f"--model_dir={iris}"], {})


def test_flags_and_variables_together(iris: Path) -> None:
    flags = ["--model_dir", str(iris), "--framework=sklearn", "--workers=2", "--enable_grpc=false"]
    settings = kserve_settings([*flags, "--http_port", "9", "--max_threads=4"], {"FASTSERVE_DRAIN_S": "7"})
    assert [one.address for one in (*settings.http, *settings.grpc)] == ["0.0.0.0:9"]
    assert (settings.frontends, settings.drain_s, settings.log.format) == (2, 7.0, "json")
    assert [(one.name, one.file) for one in settings.models] == [("model", "model.joblib")]


def test_model_settings_of_mlserver(iris: Path, tmp_path: Path) -> None:
    written = {
        "name": "flowers",
        "implementation": "mlserver_sklearn.SKLearnModel",
        "parameters": {"uri": f"{iris}/model.joblib"},
    }
    (tmp_path / "model-settings.json").write_text(json.dumps(written))
    settings = mlserver_settings(str(tmp_path), {"MLSERVER_HTTP_PORT": "9"})
    assert settings.http[0].address == "0.0.0.0:9"
    assert [(one.name, one.base_path) for one in settings.models] == [("flowers", str(iris))]
    (tmp_path / "model-settings.json").write_text("[")
    with pytest.raises(ConfigError, match=r"model-settings\.json"):
        mlserver_settings(str(tmp_path), {})
    with pytest.raises(
        ConfigError, match=r'given "mlserver_mlflow\.MLflowRuntime", allowed: mlserver_sklearn'
    ):
        mlserver_settings("/", {"MLSERVER_MODEL_IMPLEMENTATION": "mlserver_mlflow.MLflowRuntime"})
