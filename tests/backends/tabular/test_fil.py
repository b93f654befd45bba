"""Triton's folders of the backend fil, as they are: files of each library, classes, chances, thresholds."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastserve.errors import ConfigError
from fastserve.repository.triton_config.reading import parse_triton_text, to_model_config
from tests.running import Running

CONFIG = """
backend: "fil"
max_batch_size: 8192
input [ {{ name: "input__0" data_type: TYPE_FP32 dims: [ {width} ] }} ]
output [ {{ name: "output__0" data_type: TYPE_FP32 dims: [ {places} ] }} ]
instance_group [ {{ kind: KIND_AUTO }} ]
{parameters}
dynamic_batching {{ }}
"""
ROWS = 40


def write_config(folder: Path, width: int, places: int, parameters: Mapping[str, str]) -> Path:
    """Write a model's config.pbtxt, and return the folder of its version."""
    (folder / "1").mkdir(parents=True)
    told = "\n".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
        for key, value in parameters.items()
    )
    (folder / "config.pbtxt").write_text(CONFIG.format(width=width, places=places, parameters=told))
    return folder / "1"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Any, dict[str, Any]]]:
    """The server, rows for it, and what the libraries say of them."""
    pytest.importorskip("treelite")
    xgboost, lightgbm = pytest.importorskip("xgboost"), pytest.importorskip("lightgbm")
    datasets, ensemble = pytest.importorskip("sklearn.datasets"), pytest.importorskip("sklearn.ensemble")
    import treelite

    root = tmp_path_factory.mktemp("fil")
    data, kinds = datasets.load_iris(return_X_y=True)
    rows = data[:: len(data) // ROWS].astype(np.float32)
    three = xgboost.XGBClassifier(n_estimators=4, max_depth=3).fit(data, kinds)
    two = xgboost.XGBClassifier(n_estimators=4, max_depth=3).fit(data, kinds > 0)
    value = xgboost.XGBRegressor(n_estimators=4, max_depth=3).fit(data, kinds)
    light = lightgbm.LGBMClassifier(n_estimators=4, verbose=-1).fit(data, kinds)
    forest = ensemble.RandomForestClassifier(5, random_state=0).fit(data, kinds)
    wanted: dict[str, Any] = {}

    def add(name: str, form: str, file: str, answers: Any, **parameters: str) -> Path:
        wanted[name] = np.asarray(answers, np.float32).reshape(len(rows), -1)
        told = {"model_type": form, **parameters}
        return write_config(root / "models" / name, data.shape[1], wanted[name].shape[1], told) / file

    classes, proba = {"output_class": "true"}, {"output_class": "true", "predict_proba": "true"}
    second = two.predict_proba(rows)[:, 1]
    three.save_model(add("classes", "xgboost_json", "xgboost.json", three.predict(rows), **classes))
    three.save_model(add("chances", "xgboost_ubj", "xgboost.ubj", three.predict_proba(rows), **proba))
    newer = {"is_classifier": "true"}
    three.save_model(add("newer", "xgboost_json", "xgboost.json", three.predict(rows), **newer))
    two.save_model(add("binary", "xgboost_json", "xgboost.json", second > 0.5, **classes))
    two.save_model(add("strict", "xgboost_json", "xgboost.json", second > 0.9, **classes, threshold="0.9"))
    two.save_model(add("chance", "xgboost_json", "xgboost.json", second, **proba, storage_type="SPARSE"))
    two.save_model(add("both", "xgboost_json", "xgboost.json", two.predict_proba(rows), **proba))
    value.save_model(add("value", "xgboost_json", "xgboost.json", value.predict(rows), output_class="false"))
    light.booster_.save_model(add("light", "lightgbm", "model.txt", light.predict_proba(rows), **proba))
    treelite.sklearn.import_model(forest).serialize(
        str(add("forest", "treelite_checkpoint", "checkpoint.tl", forest.predict(rows), **classes))
    )
    (root / "settings.yaml").write_text("model_defaults: {shared_worker: all}")
    options = ["--config", str(root / "settings.yaml")]
    with Running(root / "models", root / "log", *options) as server:
        yield server, rows, wanted


def test_a_forest_answers_as_its_library_does(served: tuple[Running, Any, dict[str, Any]]) -> None:
    server, rows, wanted = served
    assert len(wanted) == 10
    tensor = {
        "name": "input__0",
        "shape": list(rows.shape),
        "datatype": "FP32",
        "data": rows.ravel().tolist(),
    }
    for name, answers in wanted.items():
        body = json.dumps({"inputs": [tensor]}).encode()
        with urllib.request.urlopen(f"http://{server.http}/v2/models/{name}/infer", body, 60) as reply:
            (output,) = json.load(reply)["outputs"]
        assert (output["name"], output["datatype"]) == ("output__0", "FP32"), name
        found = np.array(output["data"], np.float32).reshape(output["shape"])
        np.testing.assert_allclose(found, answers, rtol=2e-5, atol=1e-6, err_msg=name)
    assert len({answers.tobytes() for answers in wanted.values()}) >= 8  # each model has answers of its own


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({"model_type": "cuml"}, 'model_type"]: given "cuml", allowed: xgboost, xgboost_json'),
        (
            {"model_type": "lightgbm", "output_class": "yes"},
            'output_class"]: given "yes", allowed: true or false',
        ),
        ({"model_type": "lightgbm", "threshold": "x"}, 'threshold"]: given "x", allowed: a number'),
    ],
)
def test_what_a_config_cannot_say(parameters: dict[str, str], told: str) -> None:
    told_fields = "\n".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
        for key, value in parameters.items()
    )
    text = CONFIG.format(width=4, places=1, parameters=told_fields)
    assert told in to_model_config(parse_triton_text(text, "forest")).fault


def test_a_file_has_the_name_of_its_type() -> None:
    for form, file in (("xgboost_ubj", "xgboost.ubj"), ("lightgbm", "model.txt")):
        told = f'parameters {{ key: "model_type" value {{ string_value: "{form}" }} }}'
        config = to_model_config(
            parse_triton_text(CONFIG.format(width=4, places=1, parameters=told), "forest")
        )
        assert (config.backend, config.options.model_file) == ("triton_fil", file)
        assert config.options.idle == []
    speed = told + ' parameters { key: "algo" value { string_value: "NAIVE" } }'
    config = to_model_config(parse_triton_text(CONFIG.format(width=4, places=1, parameters=speed), "forest"))
    assert config.options.idle == ['parameters["algo"]']


def test_a_graph_that_is_no_saved_model_is_refused() -> None:
    text = 'platform: "tensorflow_graphdef" max_batch_size: 1'
    assert (
        'given "tensorflow_graphdef", allowed: tensorflow_savedmodel'
        in to_model_config(parse_triton_text(text, "graph")).fault
    )
    with pytest.raises(ConfigError):
        parse_triton_text('platform: "tensorflow_savedmodel" max_batch_size: -1', "graph")
    saved = to_model_config(parse_triton_text('platform: "tensorflow_savedmodel"', "graph"))
    assert (saved.backend, saved.options.model_file) == ("tensorflow", "model.savedmodel/saved_model.pb")
    assert saved.triton is not None
    assert saved.triton["default_model_filename"] == "model.savedmodel"
