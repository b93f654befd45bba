"""`fastserve serve FILE` and `fastserve serve FOLDER`: one model without a repository around it."""

from __future__ import annotations

import contextlib
import json
import pickle
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fastserve.demo import demo_repository
from fastserve.errors import ConfigError
from fastserve.repository.single_model import find_single
from tests.cli.test_mistakes import refused, write_model
from tests.running import Running, until

DIGITS = Path(__file__).parents[2] / "examples/onnx/digits"
ANYWHERE = "--http", "127.0.0.1:0", "--grpc", "off"
ROWS = [[5.1, 3.5, 1.4, 0.2], [6.7, 3.0, 5.2, 2.3]]


@contextlib.contextmanager
def served(place: Path, log: Path, *options: str, **more: bool) -> Iterator[Running]:
    with Running(place, log, *options, **more) as server:  # type: ignore[arg-type]
        yield server


def predict(server: Running, name: str, rows: object) -> object:
    return post(server, f"/v1/models/{name}:predict", {"instances": rows})["predictions"]


def post(server: Running, path: str, body: object) -> Any:
    with urllib.request.urlopen(f"http://{server.http}{path}", json.dumps(body).encode(), 60) as reply:
        return json.load(reply)


@pytest.fixture(scope="module")
def iris(tmp_path_factory: pytest.TempPathFactory) -> Path:
    linear_model = pytest.importorskip("sklearn.linear_model")
    rows = np.array([*ROWS, [5.9, 3.0, 4.2, 1.5], [5.0, 3.4, 1.5, 0.2]])
    model = linear_model.LogisticRegression().fit(rows, ["setosa", "virginica", "versicolor", "setosa"])
    folder = tmp_path_factory.mktemp("iris")
    (folder / "iris.pkl").write_bytes(pickle.dumps(model))
    return folder / "iris.pkl"


def test_an_onnx_file_and_its_replacement(tmp_path: Path) -> None:
    file = tmp_path / "numbers.onnx"
    shutil.copy(DIGITS / "1/model.onnx", file)
    row = [0.0] * 64
    with served(file, tmp_path / "log", "--poll-s", "0.1") as server:
        (said,) = predict(server, "numbers", [row])  # type: ignore[misc]
        assert set(said) == {"scores", "digit"}
        shutil.copy(file, tmp_path / "new")
        (tmp_path / "new").rename(file)
        until(lambda: server.log.read_text().count("version 1 is available") == 2, "it is read anew")
        assert predict(server, "numbers", [row]) == [said]


def test_a_pickle_of_scikit_learn_by_choice(iris: Path, tmp_path: Path) -> None:
    model = pickle.loads(iris.read_bytes())
    with served(iris, tmp_path / "log", "--trust-pickle", "--name", "flowers") as server:
        said = predict(server, "flowers", ROWS)
    wanted = zip(model.predict(ROWS), model.predict_proba(ROWS), strict=True)
    assert said == [{"predictions": kind, "probabilities": pytest.approx(list(p))} for kind, p in wanted]
    assert "iris.pkl is a pickle" in refused(str(iris))


def test_a_folder_of_mlflow(iris: Path, tmp_path: Path) -> None:
    model, names = pickle.loads(iris.read_bytes()), ["sepal length (cm)", "w", "petal length (cm)", "petal w"]
    flavor = {"pickled_model": "iris.pkl", "serialization_format": "cloudpickle", "sklearn_version": "1.9.1"}
    generic = {"loader_module": "mlflow.sklearn", "model_path": "iris.pkl", "predict_fn": "predict"}
    columns = json.dumps([{"type": "double", "name": name, "required": True} for name in names])
    folders = (({}, "labels"), ({"signature": {"inputs": columns, "params": None}}, "rows"))
    for signature, name in folders:
        shutil.copytree(iris.parent, tmp_path / name / "1")
        written = {"flavors": {"python_function": generic, "sklearn": flavor}, **signature}
        (tmp_path / name / "1/MLmodel").write_text(yaml.safe_dump(written))
    wanted = model.predict(ROWS).tolist()
    with served(tmp_path / "rows/1", tmp_path / "log", "--trust-pickle", "--name", "flowers") as server:
        rows = [dict(zip(names, row, strict=True)) for row in ROWS]
        assert predict(server, "flowers", rows) == wanted
    config = {"backend": "sklearn", "parameters": {"trust_pickle": True}}
    (tmp_path / "labels/model.yaml").write_text(yaml.safe_dump(config))
    shutil.rmtree(tmp_path / "rows")
    with served(tmp_path, tmp_path / "log") as server:
        assert predict(server, "labels", ROWS) == wanted
    (tmp_path / "labels/model.yaml").unlink()
    assert "parameters: {trust_pickle: true}" in refused(str(tmp_path), *ANYWHERE)


def test_a_pickle_in_a_repository_by_choice(iris: Path, tmp_path: Path) -> None:
    (tmp_path / "m/1").mkdir(parents=True)
    shutil.copy(iris, tmp_path / "m/1/model.pkl")
    (tmp_path / "m/model.yaml").write_text("backend: sklearn\n")
    assert "parameters: {trust_pickle: true}" in refused(str(tmp_path), *ANYWHERE)
    (tmp_path / "m/1/model.pkl").write_bytes(pickle.dumps({"no": "model"}))
    config = {"backend": "sklearn", "parameters": {"trust_pickle": True}}
    (tmp_path / "m/model.yaml").write_text(yaml.safe_dump(config))
    assert "model.pkl holds a dict" in refused(str(tmp_path), *ANYWHERE)


def test_xgboost(tmp_path: Path) -> None:
    xgboost = pytest.importorskip("xgboost")
    rows, kinds = np.array(ROWS * 8, np.float32), np.array([0, 1] * 8)
    data = xgboost.DMatrix(rows, kinds)
    model = xgboost.train({"objective": "binary:logistic"}, data, num_boost_round=3)
    for name in ("trees.json", "trees.ubj"):
        model.save_model(tmp_path / name)
        with served(tmp_path / name, tmp_path / "log") as server:
            said = predict(server, "trees", ROWS)
        assert said == pytest.approx(model.inplace_predict(rows[:2]).tolist())


def test_programs_of_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    net = torch.nn.Linear(4, 2).eval()
    wanted = net(torch.tensor(ROWS)).tolist()
    free = ({0: torch.export.Dim("rows")},)
    program = torch.export.export(net, (torch.zeros(2, 4),), dynamic_shapes=free)
    torch.export.save(program, str(tmp_path / "net.pt2"))
    script = tmp_path / "script"
    script.mkdir()
    torch.jit.trace(net, torch.zeros(1, 4)).save(str(script / "other.pt"))
    tensors = {
        "inputs": {"x": {"dtype": "float32", "shape": [4]}},
        "outputs": {"y": {"dtype": "float32", "shape": [2]}},
    }
    (script / "model.yaml").write_text(yaml.safe_dump({"backend": "torch", **tensors}))
    entries = [
        {"name": "net", "base_path": str(tmp_path), "file": "net.pt2", "fields": {"backend": "torch"}},
        {"name": "plus", "base_path": str(script), "file": "other.pt"},
    ]
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump({"models": entries}))
    options = ("--config", str(tmp_path / "settings.yaml"))
    with served(script / "other.pt", tmp_path / "log", *options, torch=True) as server:
        for name in ("net", "plus", "other"):
            assert predict(server, name, ROWS) == [pytest.approx(row, abs=1e-5) for row in wanted]


def test_folders_of_one_model(tmp_path: Path) -> None:
    root = write_model(tmp_path / "models")
    with served(root / "m", tmp_path / "log") as server:
        assert predict(server, "m", [[1, 2]]) == [[1, 2]]
    text = tmp_path / "writer"  # as downloaded: files of one version
    shutil.copytree(demo_repository() / "scribe/1", text)
    shutil.copy(demo_repository() / "scribe/model.yaml", text)
    with served(text, tmp_path / "log") as server:
        asked = {"inputs": "In the", "parameters": {"max_new_tokens": 3}}
        assert post(server, "/generate", asked)["generated_text"]


def test_what_a_path_is(tmp_path: Path) -> None:
    def find(place: str, name: str = "") -> tuple[str, str, str]:
        found = find_single(tmp_path / place, name, trust_pickle=True)
        assert found is not None
        return found.name, str(Path(found.base_path).relative_to(tmp_path)), found.file

    for made in ("export/123", "text", "several", "repository/m/1"):
        (tmp_path / made).mkdir(parents=True)
    (tmp_path / "export/123/saved_model.pb").touch()
    assert (
        find("export/123") == find("export/123/saved_model.pb") == ("export", "export/123", "saved_model.pb")
    )
    assert find("export") == ("export", "export", "")
    assert find("export/123", "mine")[0] == "mine"
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "text" / name).write_text("{}")
    assert find("text") == find("text/config.json") == ("text", "text", "")
    shutil.copy(DIGITS / "1/model.onnx", tmp_path / "several/model.onnx")
    assert find("several") == ("several", "several", "model.onnx")
    for place in ("repository", "nowhere", "repository/m"):
        assert find_single(tmp_path / place) is None


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("app.py", "", "fastserve run app.py"),
        ("notes.json", json.dumps({"a": 1}), 'file: given "notes.json", allowed: a repository'),
        ("m.h5", "", "m.h5 is a Keras model; convert it"),
        ("m.pkl", "", "--trust-pickle"),
        ("bad name.onnx", "", "--name gives another"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, name: str, content: str, said: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError) as refusal:
        find_single(tmp_path / name)
    assert said in str(refusal.value)


def test_options_of_one_model_go_with_one_model(tmp_path: Path) -> None:
    assert "with one model" in refused("demo", "--name", "x")
    assert "allowed: a file that exists" in refused(str(tmp_path / "no.onnx"))
