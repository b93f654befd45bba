"""`fastserve check`: what would be served, and why the rest would not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastserve.errors import ConfigError
from fastserve.repository.check import ModelReport, explain
from fastserve.settings import RepositorySettings
from tests.repository.folders import write_config, write_version


def report_of(root: Path, name: str = "m") -> ModelReport:
    report = explain(RepositorySettings(repository=str(root)))
    return next(model for model in report.models if model.name == name)


def test_a_folder_of_mlserver_names_its_command(tmp_path: Path) -> None:
    (tmp_path / "iris").mkdir()
    (tmp_path / "iris/model-settings.json").write_text("{}")
    report = explain(RepositorySettings(repository=str(tmp_path)))
    wanted = "iris: passed over, it holds model-settings.json: `fastserve mlserver start` serves MLServer's"
    assert wanted in report.text()


def test_a_good_model_and_a_folder_passed_over(tmp_path: Path) -> None:
    write_config(tmp_path, "m", labels={"stable": 2}, version_policy={"latest": 2})
    for number in (1, 2, 3):
        write_version(tmp_path, "m", number)
    (tmp_path / "docs").mkdir()
    report = explain(RepositorySettings(repository=str(tmp_path)))
    assert report.ok
    assert report.text() == (
        "m: version 2, 3\n"
        "  versions at hand: 1, 2, 3; policy: the latest 2 versions\n"
        "  backend python, batches of up to 32 rows, 1 worker a version\n"
        "  instance 0 on the CPU (devices: cpu, the default)\n"
        "  inputs: x float32[4]\n"
        "  outputs: y float32[3]\n"
        "  signatures: serving_default (predict)\n"
        "  labels: stable -> 2\n\n"
        "docs: passed over, neither a config nor a numbered folder\n\n"
        "1 model(s) would be served, going by their files, 0 with problems\n"
    )


@pytest.mark.parametrize(
    ("changes", "code", "problem"),
    [
        (
            {"backend": "tf"},
            "class Model: pass",
            'model.yaml: backend: given "tf", '
            "allowed: python, onnx, torch, tensorflow, sklearn, xgboost, "
            "lightgbm, catboost, treelite, transformers, text, text_python or module:Class",
        ),
        (
            {"version_policy": {"specific": [1, 5]}},
            "class Model: pass",
            "version 5: wanted by version_policy",
        ),
        (
            {"labels": {"s": 7}},
            "class Model: pass",
            "label s: points at version 7, which would not be served",
        ),
        ({}, "class Model(:", "version 1: SyntaxError: "),
        ({}, "class Other: pass", "version 1: model.py has no class 'Model'"),
        ({"class": "Net"}, "class Model: pass", "version 1: model.py has no class 'Net'"),
        ({"backend": "onnx"}, "", "no version that can be loaded; version 1: no model.onnx"),
    ],
)
def test_problems_are_explained(tmp_path: Path, changes: dict[str, Any], code: str, problem: str) -> None:
    write_config(tmp_path, "m", **changes)
    write_version(tmp_path, "m", 1, code)
    model = report_of(tmp_path)
    assert any(problem in found for found in model.problems), model.problems
    assert not explain(RepositorySettings(repository=str(tmp_path))).ok


@pytest.mark.parametrize("code", ["Model = make()", "from a import Model", "if True:\n    class Model: pass"])
def test_a_class_may_be_bound_in_any_way(tmp_path: Path, code: str) -> None:
    write_config(tmp_path, "m")
    write_version(tmp_path, "m", 1, code)
    assert report_of(tmp_path).problems == []


def test_a_repository_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="allowed: a folder that exists, or demo"):
        explain(RepositorySettings(repository=str(tmp_path / "none")))


def test_language_models_have_batches_of_sequences() -> None:
    text = explain(RepositorySettings(repository="demo")).text()
    assert "backend text, sequences batched at every token, 1 worker a version" in text
