"""The runtimes of deploy/kserve: each argument list starts our command, which then answers."""

from __future__ import annotations

import base64
import contextlib
import json
import pickle
import re
import signal
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fastserve.cli.predictive import kserve_settings
from fastserve.errors import ConfigError
from fastserve.settings.sources import list_variables
from tests.running import CLI, START_S, free_port, start
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
    if name == "predictiveserver":
        command.append(f"--grpc_port={ports['9000']}")
    if name == "mlserver":  # by KServe's controller
        environment |= {"MLSERVER_MODEL_NAME": labels["Name"], "MLSERVER_MODEL_URI": str(models)}
        environment["MLSERVER_METRICS_PORT"] = ports["8002"]
    environment |= {"FASTSERVE_DRAIN_DELAY_S": "0"} if "FASTSERVE_DRAIN_DELAY_S" in environment else {}
    with (models.parent / "log").open("wb") as log:
        server = start([sys.executable, "-m", CLI, *command], log.fileno(), more=environment)
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


# The bodies of KServe's own samples: docs/samples/v1beta1/sklearn, and of its end-to-end tests.
SAMPLE_ROWS = [[6.8, 2.8, 4.8, 1.4], [6.0, 3.4, 4.5, 1.6]]
SAMPLE = {"inputs": [{"name": "input-0", "shape": [2, 4], "datatype": "FP32", "data": SAMPLE_ROWS}]}


def test_kserves_samples_of_iris(tmp_path: Path) -> None:
    svm, datasets = pytest.importorskip("sklearn.svm"), pytest.importorskip("sklearn.datasets")
    (tmp_path / "models").mkdir()
    model = svm.SVC(gamma="scale").fit(*datasets.load_iris(return_X_y=True))
    (tmp_path / "models/model.joblib").write_bytes(pickle.dumps(model))
    with started(
        "predictiveserver", tmp_path / "models", {"Name": "iris", "modelFormat": "sklearn"}
    ) as place:
        assert post(place, "/v1/models/iris:predict", {"instances": SAMPLE_ROWS}) == {"predictions": [1, 1]}
        wanted = {"name": "output-0", "shape": [2], "datatype": "INT64", "data": [1, 1]}
        assert post(place, "/v2/models/iris/infer", SAMPLE)["outputs"] == [wanted]
        named = {**SAMPLE, "outputs": [{"name": "output-0"}]}
        assert post(place, "/v2/models/iris/infer", named)["outputs"] == [wanted]
        body = json.dumps({**SAMPLE, "parameters": {"binary_data_output": True}}).encode()
        with urllib.request.urlopen(f"http://{place}/v2/models/iris/infer", body, 60) as reply:
            whole = reply.read()[int(reply.headers["Inference-Header-Content-Length"]) :]
            assert np.frombuffer(whole, np.int64).tolist() == [1, 1]
    with started("mlserver", tmp_path / "models", {"Name": "iris", "modelClass": SKLEARN}) as place:
        wanted = {"name": "predict", "shape": [2, 1], "datatype": "INT64", "data": [1, 1]}
        assert post(place, "/v2/models/iris/infer", SAMPLE)["outputs"] == [wanted]


SKLEARN = "mlserver_sklearn.SKLearnModel"
WINE = (
    *("fixed acidity", "volatile acidity", "citric acid", "residual sugar", "chlorides"),
    *("free sulfur dioxide", "total sulfur dioxide", "density", "pH", "sulphates", "alcohol"),
)
GLASS = (7.4, 0.7, 0.0, 1.9, 0.076, 11, 34, 0.9978, 3.51, 0.56, 9.4)


def test_kserves_sample_of_mlflow(tmp_path: Path) -> None:
    """The wine of KServe's end-to-end test: a column a tensor, of FP32, for an MLflow folder."""
    linear_model = pytest.importorskip("sklearn.linear_model")
    rows = np.random.default_rng(0).uniform(0, 10, (30, len(WINE)))
    model = linear_model.ElasticNet().fit(rows, rows.sum(axis=1))
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "model.pkl").write_bytes(pickle.dumps(model))
    columns = json.dumps([{"type": "double", "name": name} for name in WINE])
    flavors = {"sklearn": {"pickled_model": "model.pkl"}, "python_function": {"predict_fn": "predict"}}
    (folder / "MLmodel").write_text(yaml.safe_dump({"flavors": flavors, "signature": {"inputs": columns}}))
    inputs = [
        {"name": name, "shape": [1], "datatype": "FP32", "data": [value]}
        for name, value in zip(WINE, GLASS, strict=True)
    ]
    body = {"parameters": {"content_type": "pd"}, "inputs": inputs}
    labels = {"Name": "wine", "modelClass": "mlserver_mlflow.MLflowRuntime"}
    with started("mlserver", folder, labels) as place:
        (output,) = post(place, "/v2/models/wine/infer", body)["outputs"]
    wanted = model.predict(np.array([GLASS], np.float32).astype(float))
    assert output == {"name": "output-1", "shape": [1, 1], "datatype": "FP64", "data": wanted.tolist()}


FLOWERS = """
import numpy as np

class Model:
    def __init__(self, config):
        pass

    def run(self, inputs):
        sizes = np.array([len(image) for image in inputs["image_bytes"]])
        scores = np.eye(6, dtype=np.float32)[sizes % 6]
        return {"scores": scores, "prediction": scores.argmax(axis=1), "key": inputs["key"]}
"""


def test_kserves_sample_of_flowers(tmp_path: Path) -> None:
    """The request and the reply's shape of the flower model, whose images come in base64."""
    word = {"dtype": "bytes", "shape": []}
    outputs = {
        "scores": {"dtype": "float32", "shape": [6]},
        "prediction": {"dtype": "int64", "shape": []},
        "key": word,
    }
    config = {"backend": "python", "inputs": {"image_bytes": word, "key": word}, "outputs": outputs}
    (tmp_path / "flowers/0001").mkdir(parents=True)
    (tmp_path / "flowers/0001/model.py").write_text(FLOWERS)
    (tmp_path / "flowers/model.yaml").write_text(yaml.safe_dump(config))
    image = base64.b64encode(bytes(range(256)) * 4 + b"xy").decode()  # 1026 bytes, divisible by 6
    body = {"instances": [{"image_bytes": {"b64": image}, "key": "   1"}]}
    with started("tensorflow-serving", tmp_path / "flowers", {"Name": "flowers"}) as place:
        (found,) = post(place, "/v1/models/flowers:predict", body)["predictions"]
    assert found == {"scores": [1.0, 0.0, 0.0, 0.0, 0.0, 0.0], "prediction": 0, "key": "   1"}


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
