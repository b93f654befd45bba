"""Settings of `fastserve mlserver`: what is read of MLServer's files and variables, and said of others."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from fastserve.cli.predictive import kserve_settings, mlserver_settings
from fastserve.errors import ConfigError
from fastserve.repository.model_config import parse_model_config
from fastserve.settings import ModelEntry

SKLEARN = "mlserver_sklearn.SKLearnModel"


def write(folder: Path, name: str = "iris", **more: Any) -> Path:
    """Write a model's folder as MLServer has it."""
    pytest.importorskip("sklearn")
    (folder / name).mkdir(parents=True)
    (folder / name / "model.joblib").write_bytes(pickle.dumps(None))  # nothing is opened here
    told = {"name": name, "implementation": SKLEARN, "parameters": {"uri": "./model.joblib"}, **more}
    (folder / name / "model-settings.json").write_text(json.dumps(told))
    return folder


def only(folder: Path, environment: dict[str, str] | None = None) -> ModelEntry:
    (entry,) = mlserver_settings(str(folder), environment or {}).models
    assert parse_model_config(entry.fields).backend == entry.fields["backend"]
    return entry


def test_a_model_has_the_originals_outputs(tmp_path: Path) -> None:
    entry = only(write(tmp_path, parameters={"uri": ".", "version": "v0.1.0"}))
    assert (entry.name, entry.file, entry.labels) == ("iris", "model.joblib", {"v0.1.0": 1})
    assert entry.fields["loose_inputs"] is True
    assert entry.fields["default_outputs"] == ["predict"]
    names = entry.fields["parameters"]["output_names"]
    assert names == {"predictions": "predict", "probabilities": "predict_proba", "transformed": "transform"}


def test_a_function_and_batches_are_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extra = {"uri": "model.joblib", "extra": {"predict_fn": "predict_proba"}, "environment_tarball": "e.tgz"}
    fields = only(
        write(tmp_path, parameters=extra, max_batch_size=64, max_batch_time=0.005, inputs=[])
    ).fields
    assert fields["default_outputs"] == ["predict_proba"]
    assert (fields["max_batch_size"], fields["max_queue_delay_us"]) == (64, 5000)
    said = capsys.readouterr().err.splitlines()
    assert said == [
        f"ignored: {name} of model-settings.json" for name in ("inputs", "parameters.environment_tarball")
    ]


def test_several_models_share_processes(tmp_path: Path) -> None:
    write(write(tmp_path, "one"), "two")
    server = {"host": "127.0.0.1", "http_port": 9000, "grpc_port": 9001, "parallel_workers": 3}
    (tmp_path / "settings.json").write_text(json.dumps(server))
    settings = mlserver_settings(str(tmp_path), {"MLSERVER_HTTP_PORT": "7", "MLSERVER_METRICS_PORT": "9002"})
    assert [one.address for one in settings.http] == ["127.0.0.1:9000", "127.0.0.1:9002"]
    assert [one.address for one in settings.grpc] == ["127.0.0.1:9001"]
    found = [(one.name, one.fields["instances"], one.fields["shared_worker"]) for one in settings.models]
    assert found == [("one", 3, "mlserver"), ("two", 3, "mlserver")]


def test_variables_name_a_model_without_files(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "iris/model-settings.json").unlink()
    told = {"MLSERVER_MODEL_IMPLEMENTATION": SKLEARN, "MLSERVER_MODEL_URI": str(tmp_path / "iris")}
    assert only(tmp_path, {**told, "MLSERVER_MODEL_NAME": "flowers"}).name == "flowers"


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"implementation": "models.Mine"}, "a class of your own is a Python model (backend: python)"),
        ({"implementation": ""}, 'implementation: given "", allowed: mlserver_sklearn.SKLearnModel'),
        ({"implementation": "mlserver_xgboost.XGBoostModel"}, "allowed: one of .bst, .json, .ubj"),
        ({"parameters": {"uri": "gone"}}, "parameters.uri: given"),
        ({"parameters": ["x"]}, "parameters: given"),
        (
            {"parameters": {"uri": ".", "extra": {"predict_fn": "fit"}}},
            'predict_fn: given "fit", allowed: predict,',
        ),
        ({"max_batch_size": "many"}, 'max_batch_size: given "many", allowed: a number from 0 on'),
        ({"max_batch_time": -1}, "max_batch_time: given -1"),
        ({"implementation": "mlserver_mlflow.MLflowRuntime"}, "allowed: a folder that MLflow has written"),
    ],
)
def test_what_a_model_cannot_have_is_said(tmp_path: Path, more: dict[str, Any], told: str) -> None:
    write(tmp_path, **{"parameters": {"uri": "."}, **more})
    with pytest.raises(ConfigError) as caught:
        mlserver_settings(str(tmp_path), {})
    assert str(tmp_path / "iris/model-settings.json") in str(caught.value)
    assert told.replace("one of", "one file that ends in") in str(caught.value)


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ({"kafka_enabled": True}, "kafka_enabled: given true, allowed: false"),
        ({"root_path": "/x"}, "root_path: given"),
        ({"http_port": "x"}, 'http_port: given "x", allowed: a whole number'),
        ({"metrics_endpoint": "/other"}, "metrics_endpoint: given"),
        ([], "given a list, allowed: an object"),
    ],
)
def test_what_a_server_cannot_have_is_said(tmp_path: Path, written: object, told: str) -> None:
    write(tmp_path)
    (tmp_path / "settings.json").write_text(json.dumps(written))
    with pytest.raises(ConfigError) as caught:
        mlserver_settings(str(tmp_path), {})
    assert f"{tmp_path}/settings.json: " in str(caught.value)
    assert told in str(caught.value)


def test_a_name_is_given_once(tmp_path: Path) -> None:
    write(tmp_path / "a")
    write(tmp_path / "b")
    with pytest.raises(ConfigError, match="the model iris is given twice"):
        mlserver_settings(str(tmp_path), {})


def test_kserves_variable_asks_for_probabilities(tmp_path: Path) -> None:
    write(tmp_path)
    argv = [f"--model_dir={tmp_path / 'iris'}", "--framework=sklearn"]
    for variable, output in (({}, "predictions"), ({"PREDICT_PROBA": "true"}, "probabilities")):
        (entry,) = kserve_settings(argv, variable).models
        assert entry.fields["parameters"]["output_names"] == {output: "output-0"}
        assert entry.fields["parameters"]["outputs"] == ["output-0"]


HUGGING_FACE = "mlserver_huggingface.HuggingFaceRuntime"


def write_task(folder: Path, kind: str, extra: dict[str, Any], **more: Any) -> Path:
    """Write the folder of a model of transformers as MLServer has it."""
    (folder / "judge").mkdir()
    (folder / "judge" / "config.json").write_text(json.dumps({"architectures": [kind]}))
    told = {"name": "judge", "implementation": HUGGING_FACE, "parameters": {"extra": extra, **more}}
    (folder / "judge" / "model-settings.json").write_text(json.dumps(told))
    return folder


@pytest.mark.parametrize(
    ("task", "kind"),
    [
        ("text-classification", "BertForSequenceClassification"),
        ("sentiment-analysis", "BertForSequenceClassification"),
        ("token-classification", "BertForTokenClassification"),
        ("ner", "BertForTokenClassification"),
        ("feature-extraction", "BertModel"),
    ],
)
def test_a_task_of_hugging_face_is_a_model_of_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], task: str, kind: str
) -> None:
    extra = {"task": task, "framework": "pt", "optimum_model": True}
    entry = only(write_task(tmp_path, kind, extra, uri="."))
    assert (entry.name, entry.base_path, entry.file) == ("judge", str(tmp_path / "judge"), "config.json")
    assert entry.fields["backend"] == "transformers"
    assert entry.fields["parameters"] == {"json_output": "output", "pairs": False}
    assert entry.fields["loose_inputs"] is True
    said = capsys.readouterr().err.splitlines()
    assert said == ["ignored: parameters.extra.optimum_model of model-settings.json"]


def test_a_pretrained_model_is_a_folder_beside_the_settings(tmp_path: Path) -> None:
    write_task(tmp_path, "BertForSequenceClassification", {"pretrained_model": "../weights"})
    (tmp_path / "judge" / "config.json").rename(tmp_path / "config.json")
    (tmp_path / "weights").mkdir()
    (tmp_path / "config.json").rename(tmp_path / "weights" / "config.json")
    entry = only(tmp_path, {"MLSERVER_MODEL_HUGGINGFACE_TASK": "text-classification"})
    assert Path(entry.base_path).resolve() == tmp_path / "weights"


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({}, 'extra.task: given "", allowed: text-classification, '),
        (
            {"task": "text-generation"},
            'given "text-generation", allowed: .*; `fastserve serve FOLDER` serves',
        ),
        (
            {"task": "ner"},
            'given "ner", allowed: text-classification, sentiment-analysis, by config.json: archi',
        ),
        ({"task": "text-classification", "framework": "tf"}, 'extra.framework: given "tf", allowed: pt'),
        (
            {"task": "ner", "pretrained_model": "dslim/bert-base-NER"},
            "allowed: a file or folder that exists; a model of the Hugging Face Hub is hf://ORGANISATION/NAME",
        ),
    ],
)
def test_what_a_task_cannot_have_is_said(tmp_path: Path, extra: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        mlserver_settings(str(write_task(tmp_path, "BertForSequenceClassification", extra)), {})
