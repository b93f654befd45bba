"""Models of each library, trained on real data in a second, with what the library itself answers.

Each has missing values, and columns of texts where the library takes them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

SEED = 7
Arrays = Mapping[str, Any]


@dataclass(frozen=True)
class Trained:
    """One model in a folder of a repository, rows for it, and the library's own answers to them."""

    inputs: Arrays
    outputs: Arrays
    config: dict[str, Any] = field(default_factory=dict)


def resample(values: Any, rows: int, missing: float = 0.05) -> Any:
    """Return so many rows of data, moved a little, some of whose values are missing."""
    random = np.random.default_rng(SEED)
    picked = values[random.integers(len(values), size=rows)]
    moved = picked + random.normal(scale=0.01 * values.std(axis=0), size=picked.shape)
    moved[random.random(moved.shape) < missing] = np.nan
    return moved


def texts(values: Any) -> Any:
    """Return texts as they come from clients."""
    return np.array([str(value).encode() for value in values], object)


def sklearn_forest(folder: Path, rows: int) -> Trained:
    """A forest of numbers, in a pickle."""
    datasets, ensemble = pytest.importorskip("sklearn.datasets"), pytest.importorskip("sklearn.ensemble")
    data, target = datasets.load_diabetes(return_X_y=True)
    model = ensemble.RandomForestRegressor(20, max_depth=6, random_state=0, n_jobs=2).fit(data, target)
    (folder / "model.pkl").write_bytes(pickle.dumps(model))
    asked = resample(data, rows)
    model.set_params(n_jobs=1)
    return Trained(
        {"input": asked},
        {"predictions": model.predict(asked)},
        {"backend": "sklearn", "parameters": {"trust_pickle": True}},
    )


def sklearn_classes(folder: Path, rows: int) -> Trained:
    """A classifier whose labels are texts, in a file of skops."""
    datasets, linear_model = (
        pytest.importorskip("sklearn.datasets"),
        pytest.importorskip("sklearn.linear_model"),
    )
    io = pytest.importorskip("skops.io")
    iris = datasets.load_iris()
    model = linear_model.LogisticRegression(max_iter=500).fit(iris.data, iris.target_names[iris.target])
    io.dump(model, folder / "model.skops")
    asked = resample(iris.data, rows, missing=0.0)
    return Trained(
        {"input": asked},
        {
            "predictions": texts(model.predict(asked)),
            "probabilities": model.predict_proba(asked),
            "scores": model.decision_function(asked),
        },
        {"backend": "sklearn", "parameters": {"outputs": ["predictions", "probabilities", "scores"]}},
    )


def sklearn_votes(folder: Path, rows: int) -> Trained:
    """A forest whose labels are texts and follow from its probabilities, behind a scaler."""
    datasets, ensemble = pytest.importorskip("sklearn.datasets"), pytest.importorskip("sklearn.ensemble")
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    iris = datasets.load_iris()
    forest = ensemble.RandomForestClassifier(10, max_depth=3, random_state=0)
    model = make_pipeline(StandardScaler(), forest).fit(iris.data, iris.target_names[iris.target])
    (folder / "model.joblib").write_bytes(pickle.dumps(model))
    asked = resample(iris.data, rows)
    return Trained(
        {"input": asked},
        {"predictions": texts(model.predict(asked)), "probabilities": model.predict_proba(asked)},
        {"backend": "sklearn", "parameters": {"trust_pickle": True}},
    )


def sklearn_columns(folder: Path, rows: int) -> Trained:
    """A pipeline over a table with a column of texts, one of whose values is missing at times."""
    pandas = pytest.importorskip("pandas")
    compose, pipeline = pytest.importorskip("sklearn.compose"), pytest.importorskip("sklearn.pipeline")
    from sklearn.ensemble import GradientBoostingClassifier
    from sklearn.impute import SimpleImputer
    from sklearn.preprocessing import OrdinalEncoder

    table, kinds = people(pandas, 400)
    parts = [
        ("numbers", SimpleImputer(), ["age", "pay"]),
        ("words", OrdinalEncoder(encoded_missing_value=-1), ["city"]),
    ]
    model = pipeline.make_pipeline(
        compose.ColumnTransformer(parts), GradientBoostingClassifier(n_estimators=10, random_state=0)
    ).fit(table, kinds)
    (folder / "model.joblib").write_bytes(pickle.dumps(model))  # joblib reads plain pickles
    asked, _ = people(pandas, rows)
    cities = [b"" if city is None or city != city else city.encode() for city in asked["city"]]
    return Trained(
        {
            "age": asked["age"].to_numpy(float),
            "pay": asked["pay"].to_numpy(float),
            "city": np.array(cities, object),
        },
        {"predictions": texts(model.predict(asked)), "probabilities": model.predict_proba(asked)},
        {"backend": "sklearn", "parameters": {"trust_pickle": True}},
    )


def people(pandas: Any, rows: int) -> tuple[Any, Any]:
    """Return a table of numbers and texts, some missing, and a class for each row."""
    random = np.random.default_rng(rows)
    age = random.integers(18, 90, rows).astype(float)
    pay = random.gamma(2.0, 2000.0, rows)
    city = np.array(["Graz", "Linz", "Wien"], object)[random.integers(3, size=rows)]
    kinds = np.where((age > 50) ^ (city == "Wien"), "old", "new")
    age[random.random(rows) < 0.1] = np.nan
    city[random.random(rows) < 0.1] = np.nan
    return pandas.DataFrame({"age": age, "pay": pay, "city": pandas.Series(city, dtype=object)}), kinds


def xgboost_trees(folder: Path, rows: int) -> Trained:
    """A Booster with classes, every output of it."""
    xgboost = pytest.importorskip("xgboost")
    datasets = pytest.importorskip("sklearn.datasets")
    data, target = datasets.load_wine(return_X_y=True)
    model = xgboost.XGBClassifier(n_estimators=20, max_depth=4, nthread=1).fit(data, target)
    model.save_model(folder / "model.json")
    booster = model.get_booster()
    asked = resample(data, rows).astype(np.float32)
    matrix = xgboost.DMatrix(asked)
    return Trained(
        {"input": asked},
        {
            "predictions": booster.predict(matrix),
            "labels": texts(np.array(["red", "white", "rose"])[model.predict(asked)]),
            "margins": booster.predict(matrix, output_margin=True),
            "leaves": booster.predict(matrix, pred_leaf=True),
            "contributions": booster.predict(matrix, pred_contribs=True),
        },
        {
            "backend": "xgboost",
            "class_labels": ["red", "white", "rose"],
            "parameters": {"outputs": ["predictions", "labels", "margins", "leaves", "contributions"]},
        },
    )


def lightgbm_columns(folder: Path, rows: int) -> Trained:
    """A Booster trained on a table with a category of texts and one of numbers."""
    pandas, lightgbm = pytest.importorskip("pandas"), pytest.importorskip("lightgbm")
    kinds = {"city": pandas.CategoricalDtype(["Graz", "Linz", "Wien"])}

    def table(count: int) -> tuple[Any, Any]:
        found, old = people(pandas, count)
        found = found.astype(kinds)
        found["floor"] = pandas.Categorical(np.arange(count) % 4, categories=[0, 1, 2, 3])
        return found, old

    trained, old = table(400)
    model = lightgbm.LGBMClassifier(n_estimators=10, verbose=-1, num_threads=1).fit(trained, old == "old")
    model.booster_.save_model(folder / "model.txt")
    asked, _ = table(rows)
    cities = [b"" if city != city else city.encode() for city in asked["city"].astype(object)]
    outputs = model.booster_.predict
    return Trained(
        {
            "age": asked["age"].to_numpy(float),
            "pay": asked["pay"].to_numpy(float),
            "city": np.array(cities, object),
            "floor": asked["floor"].to_numpy(float),
        },
        {
            "predictions": outputs(asked),
            "labels": np.asarray(model.predict(asked), np.int64),
            "margins": outputs(asked, raw_score=True),
            "leaves": np.asarray(outputs(asked, pred_leaf=True), np.int64),
            "contributions": outputs(asked, pred_contrib=True),
        },
        {
            "backend": "lightgbm",
            "parameters": {"outputs": ["predictions", "labels", "margins", "leaves", "contributions"]},
        },
    )


def catboost_columns(folder: Path, rows: int) -> Trained:
    """A classifier with a column of categories."""
    pandas, catboost = pytest.importorskip("pandas"), pytest.importorskip("catboost")

    def table(count: int) -> tuple[Any, Any]:
        found, old = people(pandas, count)
        return found.fillna({"city": "none"}), old

    trained, old = table(400)
    options = {"iterations": 10, "verbose": 0, "allow_writing_files": False, "thread_count": 1}
    model = catboost.CatBoostClassifier(cat_features=["city"], **options).fit(trained, old)
    model.save_model(str(folder / "model.cbm"))
    asked, _ = table(rows)
    asked = asked.astype({"age": np.float32, "pay": np.float32})
    pool = catboost.Pool(asked, cat_features=["city"])
    return Trained(
        {
            "age": asked["age"].to_numpy(np.float32),
            "pay": asked["pay"].to_numpy(np.float32),
            "city": texts(asked["city"]),
        },
        {
            "predictions": texts(model.predict(asked)),
            "probabilities": model.predict_proba(asked),
            "margins": model.predict(asked, prediction_type="RawFormulaVal"),
            "leaves": np.asarray(model.calc_leaf_indexes(asked), np.int64),
            "contributions": model.get_feature_importance(pool, type="ShapValues"),
        },
        {
            "backend": "catboost",
            "parameters": {"outputs": ["predictions", "probabilities", "margins", "leaves", "contributions"]},
        },
    )


def treelite_forest(folder: Path, rows: int) -> Trained:
    """A forest of scikit-learn, in Treelite's own file."""
    treelite = pytest.importorskip("treelite")
    datasets, ensemble = pytest.importorskip("sklearn.datasets"), pytest.importorskip("sklearn.ensemble")
    data, target = datasets.load_iris(return_X_y=True)
    model = ensemble.RandomForestClassifier(20, random_state=0).fit(data, target)
    forest = treelite.sklearn.import_model(model)
    forest.serialize(folder / "model.tl")
    asked = resample(data, rows, missing=0.0)
    return Trained(
        {"input": asked},
        {"predictions": treelite.gtil.predict(forest, asked)[:, 0]},
        {"backend": "treelite"},
    )


TRAINED: dict[str, Callable[[Path, int], Trained]] = {
    train.__name__: train
    for train in (
        sklearn_forest,
        sklearn_classes,
        sklearn_votes,
        sklearn_columns,
        xgboost_trees,
        lightgbm_columns,
        catboost_columns,
        treelite_forest,
    )
}


def save(root: Path, name: str, rows: int) -> Trained:
    """Train a model into a repository."""
    (root / name / "1").mkdir(parents=True)
    trained = TRAINED[name](root / name / "1", rows)
    (root / name / "model.yaml").write_text(yaml.safe_dump(trained.config))
    return trained
