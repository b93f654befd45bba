"""`fastserve mlserver start` beside the original: the same folders and requests.

mlserver_replies.json has what MLServer 1.7.1 with scikit-learn 1.9 and XGBoost 3.2 replied to them, without
its tracebacks and generated ids. What differs on purpose is in `OTHERS`, with its reason.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.running import CLI, START_S, STOP_S, free_port

SKLEARN, XGBOOST = "mlserver_sklearn.SKLearnModel", "mlserver_xgboost.XGBoostModel"
CASES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("mlserver_replies.json").read_text())
BY_TITLE = {case["title"]: case for case in CASES}
# The status here where it is another: the original answers 500 and a traceback, or 422 of its web framework.
OTHERS = {
    "pd with a column less": 400,
    "columns without pd": 200,  # names and types are unambiguous
    "wrong width": 400,
    "wrong count": 500,  # as Triton, whose JSON reader this is
    "string for number": 500,
    "BYTES": 400,
    "no shape": 500,
    "one row, one axis": 400,
    "unknown datatype": 400,
    "nan": 400,
}

SOLVED = ("logit", "framed", "names", "table")
"""Logistic regressions: their solver stops at another place in another release of scikit-learn."""


def save(folder: Path, name: str, kind: str, file: str, **more: Any) -> Path:
    """Return the place of a model's file, beside its model-settings.json."""
    (folder / name).mkdir(parents=True)
    parameters = {"uri": f"./{file}", **more}
    written = {"name": name, "implementation": kind, "parameters": parameters}
    (folder / name / "model-settings.json").write_text(json.dumps(written))
    return folder / name / file


def write_models(folder: Path) -> None:
    """Write the models that mlserver_replies.json was recorded of."""
    pandas, xgboost = pytest.importorskip("pandas"), pytest.importorskip("xgboost")
    joblib, datasets = pytest.importorskip("joblib"), pytest.importorskip("sklearn.datasets")
    from sklearn.compose import make_column_transformer
    from sklearn.linear_model import LinearRegression, LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder
    from sklearn.svm import SVC

    rows, kinds = datasets.load_iris(return_X_y=True)
    words = np.array(["setosa", "versicolor", "virginica"])[kinds]
    named = pandas.DataFrame(rows, columns=list("abcd"))
    table = pandas.DataFrame({"age": [31.0, 20.0, 55.0, 40.0], "city": ["Linz", "Graz", "Linz", "Wien"]})
    encoded = make_column_transformer((OneHotEncoder(), ["city"]), remainder="passthrough")
    fitted = {
        "iris": SVC(gamma="scale").fit(rows, kinds),
        "logit": LogisticRegression(max_iter=1000).fit(rows, kinds),
        "framed": LogisticRegression(max_iter=1000).fit(named, kinds),
        "names": LogisticRegression(max_iter=1000).fit(rows, words),
        "reg": LinearRegression().fit(rows, kinds),
        "table": make_pipeline(encoded, LogisticRegression()).fit(table, [0, 1, 0, 1]),
    }
    for name, model in fitted.items():
        versions = {"version": "v1.0.0"} if name == "iris" else {}
        joblib.dump(model, save(folder, name, SKLEARN, "model.joblib", **versions))
    size = {"n_estimators": 5, "max_depth": 3}
    boosted = {
        "boost": xgboost.XGBClassifier(**size).fit(rows, kinds),
        "binary": xgboost.XGBClassifier(**size).fit(rows, kinds > 0),
        "boostreg": xgboost.XGBRegressor(**size).fit(rows, kinds),
    }
    for name, objective in (("booster", "multi:softmax"), ("booster2", "binary:logistic")):
        several = name == "booster"
        options = {"objective": objective, "max_depth": 3, **({"num_class": 3} if several else {})}
        matrix = xgboost.DMatrix(rows, label=kinds if several else kinds > 0)
        boosted[name] = xgboost.train(options, matrix, 5)
    for name, model in boosted.items():
        model.save_model(save(folder, name, XGBOOST, "model.ubj" if name == "binary" else "model.json"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("mlserver")
    write_models(root / "models")
    port = free_port()
    written = {"host": "127.0.0.1", "http_port": port, "grpc_port": free_port(), "metrics_port": free_port()}
    (root / "models/settings.json").write_text(json.dumps({**written, "debug": False}))
    environment = {"FASTSERVE_DRAIN_DELAY_S": "0", "FASTSERVE_FRONTENDS": "2"}
    with (root / "log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", CLI, "mlserver", "start", str(root / "models")],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=log,
        )
    try:
        assert server.stdout is not None
        assert b"ready" in server.stdout.readline(), (root / "log").read_text()
        yield f"http://127.0.0.1:{port}"
        server.send_signal(signal.SIGTERM)
        assert server.wait(STOP_S) == 0
        assert "ignored: debug of settings.json" in (root / "log").read_text()
    finally:
        server.kill()
        server.wait()
        assert server.stdout is not None
        server.stdout.close()


def ask(url: str, body: object) -> tuple[int, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=START_S) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as fault:
        with fault:
            return fault.code, json.load(fault)


def outputs(reply: Any) -> dict[str, Any]:
    return {one["name"]: {key: one[key] for key in ("shape", "datatype", "data")} for one in reply["outputs"]}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["title"])
def test_replies_are_the_originals(place: str, case: dict[str, Any]) -> None:
    status, reply = ask(f"{place}/v2/models/{case['model']}/{case['path']}", case["body"])
    assert status == OTHERS.get(case["title"], case["status"]), reply
    if status != 200:
        assert set(reply) == {"error"}
        assert reply["error"]
        return
    if case["status"] != 200:
        return
    wanted, found = outputs(case["reply"]), outputs(reply)
    assert set(found) == set(wanted)
    for name, one in wanted.items():
        assert (found[name]["shape"], found[name]["datatype"]) == (one["shape"], one["datatype"])
        if one["datatype"].startswith("FP"):
            again = 0.02 if case["model"] in SOLVED else 1e-5  # another machine trained
            np.testing.assert_allclose(found[name]["data"], one["data"], rtol=again)
        else:
            assert found[name]["data"] == one["data"]
    assert reply["model_name"] == case["reply"]["model_name"]
    assert reply.get("id") == case["body"].get("id")


def test_probabilities_are_those_of_the_model(place: str) -> None:
    """Trained again as `logit`, which gives the same bits on one machine."""
    model = pytest.importorskip("sklearn.linear_model").LogisticRegression(max_iter=1000)
    model.fit(*pytest.importorskip("sklearn.datasets").load_iris(return_X_y=True))
    case = BY_TITLE["predict_proba"]
    (given,), (found,) = (
        case["body"]["inputs"],
        outputs(ask(f"{place}/v2/models/logit/infer", case["body"])[1]).values(),
    )
    rows = np.reshape(given["data"], given["shape"])
    np.testing.assert_array_equal(np.reshape(found["data"], found["shape"]), model.predict_proba(rows))


def test_repeated_requests_are_answered_alike(place: str) -> None:
    """The second and third are read by a template where they can have one."""
    for title in ("any name, flat FP64", "iris sample", "pd mixed", "predict_proba", "boost nan"):
        case = BY_TITLE[title]
        replies = [ask(f"{place}/v2/models/{case['model']}/infer", case["body"])[1] for _ in range(3)]
        assert outputs(replies[0]) == outputs(replies[1]) == outputs(replies[2])
        assert set(outputs(replies[0])) == set(outputs(case["reply"]))


def test_columns_are_found_by_their_names(place: str) -> None:
    """Rows whose columns come in another order have the same labels."""
    case = BY_TITLE["pd mixed"]
    _, wanted = ask(f"{place}/v2/models/table/infer", case["body"])
    turned = {**case["body"], "inputs": case["body"]["inputs"][::-1]}
    assert outputs(ask(f"{place}/v2/models/table/infer", turned)[1]) == outputs(wanted)


def test_columns_of_a_matrix_are_found_by_the_names_of_its_table(place: str) -> None:
    """Over both front processes: connections are spread."""
    rows = [[6.8, 2.8, 4.8, 1.4], [5.0, 3.4, 1.5, 0.2]]
    tensors = [
        {"name": name, "shape": [2], "datatype": "FP64", "data": [row[at] for row in rows]}
        for at, name in enumerate("abcd")
    ]
    table = {"parameters": {"content_type": "pd"}}
    matrix = {"inputs": [{"name": "x", "shape": [2, 4], "datatype": "FP64", "data": rows}]}
    for _ in range(4):
        for body in (matrix, {**table, "inputs": tensors}, {**table, "inputs": tensors[::-1]}):
            status, reply = ask(f"{place}/v2/models/framed/infer", body)
            assert (status, outputs(reply)["predict"]["data"]) == (200, [1, 0])
    status, reply = ask(f"{place}/v2/models/framed/infer", {**table, "inputs": tensors[:3]})
    assert status == 400
    assert "missing columns d" in reply["error"]


def test_a_large_request(place: str) -> None:
    """What is converted in a thread is what single rows have."""
    random = np.random.default_rng(0)
    rows = random.uniform(0.1, 7.0, (20_000, 4)).astype(np.float32)
    tensor = {"name": "x", "shape": list(rows.shape), "datatype": "FP32", "data": rows.ravel().tolist()}
    body = {"inputs": [tensor], "outputs": [{"name": "predict_proba"}]}
    status, reply = ask(f"{place}/v2/models/logit/infer", body)
    assert status == 200
    found = np.array(outputs(reply)["predict_proba"]["data"]).reshape(-1, 3)
    for at in (0, 9_999, 19_999):
        one = {**tensor, "shape": [1, 4], "data": rows[at].tolist()}
        _, alone = ask(f"{place}/v2/models/logit/infer", {**body, "inputs": [one]})
        np.testing.assert_allclose(outputs(alone)["predict_proba"]["data"], found[at], rtol=1e-12)
