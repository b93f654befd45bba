"""What files of rows are refused, and with which words; how their tensors are found."""

from __future__ import annotations

import importlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastserve.backends.registry import BACKENDS
from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.repository.single_model import find_single
from tests.backends.tabular.trained import (
    catboost_columns,
    lightgbm_columns,
    sklearn_classes,
    sklearn_columns,
    xgboost_trees,
)


def opened(backend: str, folder: Path, **config: Any) -> Any:
    """Return a loaded backend."""
    module, name = BACKENDS[backend].entry_point.split(":")
    made = getattr(importlib.import_module(module), name)({"max_batch_size": 8, **config}, folder, 0)
    made.load()
    return made


@pytest.fixture(scope="module")
def linear() -> Any:
    return pytest.importorskip("sklearn.linear_model")


@pytest.fixture
def line(tmp_path: Path, linear: Any) -> Path:
    """y = 2 a - b, in a pickle."""
    rows = np.array([[0.0, 1.0], [1.0, 0.0], [2.0, 1.0]])
    model = linear.LinearRegression().fit(rows, rows @ [2.0, -1.0])
    (tmp_path / "model.pkl").write_bytes(pickle.dumps(model))
    return tmp_path


TRUST: dict[str, Any] = {"parameters": {"trust_pickle": True}}


def test_a_pickle_needs_trust(line: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.pkl is a pickle: .* \{trust_pickle: true\}"):
        opened("sklearn", line)
    for word in ("trust_pickle", "allow_pickle"):
        model = opened("sklearn", line, parameters={word: True})
        np.testing.assert_allclose(model.run({"input": np.array([[3.0, 1.0]])})["predictions"], [5.0])


def test_types_that_skops_does_not_trust(tmp_path: Path, linear: Any) -> None:
    io, ensemble = pytest.importorskip("skops.io"), pytest.importorskip("sklearn.ensemble")
    forest = ensemble.RandomForestRegressor(2).fit([[0.0], [1.0]], [0.0, 1.0])
    io.dump(forest, tmp_path / "model.skops")
    with pytest.raises(ConfigError, match=r"sklearn\.tree\._tree\.Tree.*trusted_types"):
        opened("sklearn", tmp_path)
    types = io.get_untrusted_types(file=tmp_path / "model.skops")
    assert opened("sklearn", tmp_path, parameters={"trusted_types": types}).outputs
    assert opened("sklearn", tmp_path, **TRUST).outputs


def test_columns_of_numbers_by_name(line: Path) -> None:
    declared = {name: {"dtype": "int64", "shape": [1]} for name in ("0", "1")}
    for config in ({"inputs": declared}, {"parameters": {**TRUST["parameters"], "columns": True}}):
        model = opened("sklearn", line, **{**TRUST, **config})
        assert list(model.inputs) == ["0", "1"]
        kind = np.int64 if "inputs" in config else np.float64
        shape = (2, 1) if "inputs" in config else (2,)
        columns = {"0": np.array([3, 1], kind).reshape(shape), "1": np.array([1, 0], kind).reshape(shape)}
        np.testing.assert_allclose(model.run(columns)["predictions"], [5.0, 2.0])


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"max_batch_size": 0}, "max_batch_size: given 0, allowed: from 1"),
        ({"inputs": {"x": {"dtype": "float64", "shape": [3]}}}, "inputs: given x: float64 [3], allowed: "),
        ({"inputs": {"0": {"dtype": "float64", "shape": []}, "b": {"dtype": "float64", "shape": []}}},
         "inputs: given 0, b, allowed: the model's columns 0, 1"),
        ({"inputs": {"0": {"dtype": "bytes", "shape": []}, "1": {"dtype": "float64", "shape": []}}},
         "inputs.0: given bytes [], allowed: numbers of shape [] or [1]"),
        ({"parameters": {"trust_pickle": True, "outputs": ["leaf"]}},
         "parameters.outputs: given 'leaf', allowed: predictions"),
        ({"parameters": {"trust_pickle": True, "outputs": "predictions"}}, "allowed: a list of predictions"),
        ({"outputs": {"predictions": {"dtype": "int64", "shape": []}}},
         "outputs: given predictions: int64 [], allowed: what the model has, predictions: float64 []"),
    ],
)  # fmt: skip
def test_a_config_that_does_not_fit(line: Path, config: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        opened("sklearn", line, **{**TRUST, **config})
    assert told in str(caught.value)


def test_rows_that_a_model_refuses(line: Path) -> None:
    model = opened("sklearn", line, **TRUST)
    with pytest.raises(ServeError, match=r"the model refuses these rows: Input .*contains NaN") as caught:
        model.run({"input": np.array([[np.nan, 1.0]])})
    assert caught.value.kind is Kind.INVALID_ARGUMENT


def test_a_text_that_is_not_utf_8(tmp_path: Path) -> None:
    trained = sklearn_columns(tmp_path, 2)
    model = opened("sklearn", tmp_path, **TRUST)
    cities = np.array([b"Wien", b"\xff"], object)
    with pytest.raises(ServeError, match="input 'city', row 1: not UTF-8") as caught:
        model.run({**trained.inputs, "city": cities})
    assert caught.value.kind is Kind.INVALID_ARGUMENT
    with pytest.raises(ServeError, match="unknown categories"):
        model.run({**trained.inputs, "city": np.array([b"Wien", b"Atlantis"], object)})


@pytest.mark.parametrize(
    ("backend", "file"),
    [
        ("xgboost", "model.json"),
        ("lightgbm", "model.txt"),
        ("catboost", "model.cbm"),
        ("treelite", "model.tl"),
        ("sklearn", "model.skops"),
        ("sklearn", "model.pkl"),
    ],
)
def test_a_file_that_is_broken(tmp_path: Path, backend: str, file: str) -> None:
    pytest.importorskip("skops" if file.endswith("skops") else BACKENDS[backend].framework)
    (tmp_path / file).write_bytes(b"{not a model")
    with pytest.raises(ServeError, match=f"{file} cannot be opened: ") as caught:
        opened(backend, tmp_path, **TRUST)
    assert caught.value.kind is Kind.FAILED_PRECONDITION
    assert str(tmp_path) not in str(caught.value)
    (tmp_path / file).unlink()
    with pytest.raises(ConfigError, match="the version's folder has no file model"):
        opened(backend, tmp_path, **TRUST)


def test_labels_of_another_number_of_classes(tmp_path: Path) -> None:
    xgboost_trees(tmp_path, 1)
    with pytest.raises(ConfigError, match="class_labels: given 2, allowed: 3"):
        opened("xgboost", tmp_path, class_labels=["a", "b"])


def test_columns_keep_the_order_of_training(tmp_path: Path) -> None:
    for backend, train, folder in (
        ("lightgbm", lightgbm_columns, tmp_path / "l"),
        ("catboost", catboost_columns, tmp_path / "c"),
    ):
        folder.mkdir()
        trained = train(folder, 4)
        model = opened(backend, folder)
        assert list(model.inputs) == list(trained.inputs)
        backwards = dict(reversed(trained.inputs.items()))
        np.testing.assert_array_equal(
            model.run(backwards)["predictions"], model.run(trained.inputs)["predictions"]
        )


def test_a_file_of_another_version_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sklearn_classes(tmp_path, 1)
    import sklearn
    from skops import io

    model = io.load(tmp_path / "model.skops", trusted=[])
    state = model.__getstate__()
    (tmp_path / "model.skops").unlink()

    class Older(type(model)):  # type: ignore[misc]
        def __reduce__(self) -> Any:
            return (type(model), (), {**state, "_sklearn_version": "0.1"})

    older = Older()
    older.__dict__.update(model.__dict__)
    (tmp_path / "model.pkl").write_bytes(pickle.dumps(older))
    opened("sklearn", tmp_path, **TRUST)
    assert f"model.pkl was written by scikit-learn 0.1 and is read by {sklearn.__version__}" in caplog.text


@pytest.mark.parametrize(
    ("file", "head", "backend"),
    [
        ("a.txt", b"tree\nversion=v4\n", "lightgbm"),
        ("a.bst", b"tree\nversion=v4\n", "lightgbm"),
        ("a.bst", b"{L\0\0\0\0learner", "xgboost"),
        ("a.json", b'{"learner": {', "xgboost"),
        ("a.cbm", b"CBM1", "catboost"),
        ("a.tl", b"\x04", "treelite"),
        ("a.skops", b"PK", "sklearn"),
    ],
)
def test_a_file_is_known_by_its_name_and_head(tmp_path: Path, file: str, head: bytes, backend: str) -> None:
    pytest.importorskip(BACKENDS[backend].framework)
    (tmp_path / file).write_bytes(head)
    found = find_single(tmp_path / file)
    assert found is not None
    assert (found.name, found.file, found.fields["backend"]) == ("a", file, backend)


def test_a_text_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("trees are green\n")
    with pytest.raises(ConfigError, match="file: given "):
        find_single(tmp_path / "notes.txt")
