"""Compiled trees in place of each library: used where they are equal to the last bit, and only there."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastserve.backends.tabular import trees
from fastserve.errors import ServeError
from tests.backends.tabular.test_files import opened
from tests.backends.tabular.trained import resample

USED, LEFT = "run by compiled trees", "run by its library"


@pytest.fixture(autouse=True)
def _debug(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, trees.__name__)


def check(model: Any, library: dict[str, Any], data: Any, dtype: str, *, missing: float = 0.1) -> None:
    """Compare outputs of batches of several sizes, over data that is moved a little."""
    rows = resample(data, 200, missing).astype(dtype)
    rows[:20] = np.round(rows[:20], 1)
    for some in (slice(None), slice(0, 1), slice(3, 40)):
        found = model.run({"input": rows[some]})
        assert set(found) == set(library)
        for output, compute in library.items():
            wanted = compute(rows[some])
            if wanted.dtype.kind in "OU":
                assert found[output].tolist() == wanted.tolist(), output
            else:
                assert found[output].tobytes() == np.ascontiguousarray(wanted).tobytes(), output


# ---- scikit-learn


def test_scikit_learn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    datasets, ensemble = pytest.importorskip("sklearn.datasets"), pytest.importorskip("sklearn.ensemble")
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.tree import DecisionTreeRegressor
    from threadpoolctl import threadpool_limits

    threadpool_limits(1, "openmp")
    iris, names = datasets.load_iris(return_X_y=True)[0], np.array(["a", "bb", "c"], object)
    kinds, target = datasets.load_iris().target, iris[:, 3] - 1.5
    hist = ensemble.HistGradientBoostingClassifier(max_iter=5)
    for model, goal, takes_missing in (
        (ensemble.RandomForestClassifier(9, random_state=0), names[kinds], True),
        (ensemble.ExtraTreesRegressor(9, random_state=0), target, True),
        (DecisionTreeRegressor(max_depth=4), target, True),
        (ensemble.GradientBoostingClassifier(n_estimators=5), names[kinds], False),
        (ensemble.GradientBoostingClassifier(n_estimators=5), kinds > 0, False),
        (ensemble.GradientBoostingRegressor(n_estimators=5, loss="huber"), target, False),
        (hist, names[kinds], True),
        (ensemble.HistGradientBoostingRegressor(max_iter=5), target, True),
        (make_pipeline(StandardScaler(), ensemble.ExtraTreesClassifier(5)), kinds, True),
    ):
        model.fit(iris, goal)
        (tmp_path / "model.pkl").write_bytes(pickle.dumps(model))
        caplog.clear()
        served = opened("sklearn", tmp_path, parameters={"trust_pickle": True}, threads=1)
        assert USED in caplog.text, model
        assert LEFT not in caplog.text, model
        methods = {"predictions": "predict", "probabilities": "predict_proba"}
        library = {output: getattr(model, methods[output]) for output in served.outputs}
        check(served, library, iris, "float64", missing=0.1 * takes_missing)
        if not str(type(model)).count("Hist"):
            with pytest.raises(ServeError, match="refuses these rows: Input X contains infinity"):
                served.run({"input": np.array([[1.0, 2.0, 3.0, 1e300]])})


def test_what_of_scikit_learn_is_left_to_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ensemble = pytest.importorskip("sklearn.ensemble")
    linear = pytest.importorskip("sklearn.linear_model")
    rows = np.random.default_rng(0).normal(size=(60, 3))
    for model, goal, told in (
        (ensemble.RandomForestRegressor(2), rows[:, :2], "several outputs"),
        (
            ensemble.GradientBoostingRegressor(n_estimators=2, init=linear.LinearRegression()),
            rows[:, 0],
            "Linear",
        ),
        (ensemble.GradientBoostingClassifier(n_estimators=2, loss="exponential"), rows[:, 0] > 0, "in a bit"),
        (ensemble.HistGradientBoostingRegressor(max_iter=2, loss="poisson"), abs(rows[:, 0]), "in a bit"),
        (
            ensemble.HistGradientBoostingRegressor(max_iter=2, categorical_features=[1]),
            rows[:, 1],
            "categories",
        ),
    ):
        data = np.abs(np.round(rows)) if told == "categories" else rows
        model.fit(data, goal)
        (tmp_path / "model.pkl").write_bytes(pickle.dumps(model))
        caplog.clear()
        served = opened("sklearn", tmp_path, parameters={"trust_pickle": True, "outputs": ["predictions"]})
        assert f"{LEFT}: " in caplog.text
        assert told in caplog.text
        np.testing.assert_array_equal(served.run({"input": data})["predictions"], model.predict(data))


@pytest.mark.parametrize("threads", [2, 0])
def test_a_forest_of_several_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, threads: int
) -> None:
    """Few rows are run by compiled trees, many by the library's threads, or by those of the file."""
    ensemble = pytest.importorskip("sklearn.ensemble")
    rows = np.random.default_rng(0).normal(size=(60, 3))
    model = ensemble.RandomForestRegressor(4, n_jobs=2 if not threads else None).fit(rows, rows[:, 0])
    (tmp_path / "model.pkl").write_bytes(pickle.dumps(model))
    monkeypatch.setattr(trees, "FEW_VISITS", 80)
    asked: list[tuple[int, Any]] = []
    predict = ensemble.RandomForestRegressor.predict

    def noted(self: Any, rows: Any) -> Any:
        asked.append((len(rows), self.n_jobs))
        return predict(self, rows)

    monkeypatch.setattr(ensemble.RandomForestRegressor, "predict", noted)
    served = opened("sklearn", tmp_path, parameters={"trust_pickle": True}, threads=threads)
    assert {jobs for count, jobs in asked if count > 1} == {1}  # compared in the order of one thread
    assert max(count for count, _ in asked) > 80
    assert USED in caplog.text
    wanted = [predict(model, rows[:count]) for count in (1, 20, 21)]
    asked.clear()
    for one in wanted:
        np.testing.assert_allclose(served.run({"input": rows[: len(one)]})["predictions"], one)
    assert asked == [(21, 2)]


# ---- boosters


def test_xgboost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    xgboost, datasets = pytest.importorskip("xgboost"), pytest.importorskip("sklearn.datasets")
    data, kinds = datasets.load_wine(return_X_y=True)
    value = data[:, 0]
    classes, number = xgboost.XGBClassifier, xgboost.XGBRegressor
    holes = np.where(np.random.default_rng(0).random(data.shape) < 0.2, np.nan, data)
    many = {"num_parallel_tree": 3, "subsample": 0.5}
    for model, rows, goal in (
        (classes(n_estimators=9), holes, kinds > 0),
        (classes(n_estimators=9, objective="binary:logitraw"), data, kinds > 0),
        (classes(n_estimators=5, **many), holes, kinds),
        (classes(n_estimators=5, objective="multi:softmax"), data, kinds),
        (number(n_estimators=9, max_depth=9, min_child_weight=0), holes, value),
        (number(n_estimators=9, objective="count:poisson", base_score=3.3), data, kinds),
        (number(n_estimators=9, objective="reg:gamma"), data, value),
        (number(n_estimators=4, objective="reg:logistic"), data, kinds / 2),
        (number(n_estimators=4), data, data[:, :2]),
    ):
        booster = model.fit(rows, goal).get_booster()
        booster.save_model(tmp_path / "model.json")
        caplog.clear()
        served = opened("xgboost", tmp_path, parameters={"outputs": ["predictions", "margins"]})
        assert f"XGBoost's predictions, {model.objective}: {USED}" in caplog.text
        library = {"predictions": booster.inplace_predict}
        library["margins"] = lambda rows, booster=booster: booster.inplace_predict(
            rows, predict_type="margin"
        )
        check(served, library, data, "float32")


def test_rounds_of_xgboost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    xgboost, datasets = pytest.importorskip("xgboost"), pytest.importorskip("sklearn.datasets")
    data, kinds = datasets.load_wine(return_X_y=True)
    model = xgboost.XGBClassifier(n_estimators=40, early_stopping_rounds=2)
    model.fit(data[::2], kinds[::2], eval_set=[(data[1::2], kinds[1::2])], verbose=False)
    model.save_model(tmp_path / "model.ubj")
    served = opened(
        "xgboost", tmp_path, parameters={"best_iteration": True, "outputs": ["predictions", "labels"]}
    )
    assert model.best_iteration + 1 < model.get_booster().num_boosted_rounds()
    assert USED in caplog.text
    check(served, {"predictions": model.predict_proba, "labels": model.predict}, data, "float32")


def test_what_of_xgboost_is_left_to_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    xgboost = pytest.importorskip("xgboost")
    rows = np.random.default_rng(0).normal(size=(80, 3)).astype(np.float32)
    for options, goal, told in (
        ({"booster": "dart", "rate_drop": 0.5}, rows[:, 0], "it is a dart"),
        ({"booster": "gblinear"}, rows[:, 0], "it is a gblinear"),
        ({"multi_strategy": "multi_output_tree"}, rows[:, :2], "leaves of several values"),
    ):
        model = xgboost.XGBRegressor(n_estimators=4, **options).fit(rows, goal)
        model.save_model(tmp_path / "model.json")
        caplog.clear()
        served = opened("xgboost", tmp_path)
        assert f"{LEFT}: " in caplog.text
        assert told in caplog.text
        np.testing.assert_array_equal(served.run({"input": rows})["predictions"], model.predict(rows))


def test_lightgbm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lightgbm, datasets = pytest.importorskip("lightgbm"), pytest.importorskip("sklearn.datasets")
    data, kinds = datasets.load_wine(return_X_y=True)
    random = np.random.default_rng(0).random(data.shape)
    holes, zeros = np.where(random < 0.2, np.nan, data), np.where(random < 0.4, 0.0, data)
    some = {"bagging_freq": 1, "bagging_fraction": 0.5}
    for options, rows, goal in (
        ({"objective": "binary", "sigmoid": 1.3}, holes, kinds > 0),
        ({"objective": "multiclass", "num_class": 3}, data, kinds),
        ({"objective": "multiclassova", "num_class": 3}, holes, kinds),
        ({"objective": "binary", "zero_as_missing": True}, zeros, kinds > 0),
        ({"objective": "binary", "use_missing": False}, holes, kinds > 0),
        ({"objective": "regression", "num_leaves": 90, "min_data_in_leaf": 1}, zeros, data[:, 0]),
        ({"objective": "poisson"}, data, kinds),
        ({"objective": "binary", "boosting": "rf", **some}, data, kinds > 0),
        ({"objective": "regression_l1", "boosting": "dart"}, data, data[:, 0]),
    ):
        told = {"verbose": -1, "num_threads": 1, **options}
        booster = lightgbm.train(told, lightgbm.Dataset(rows, np.asarray(goal, float)), 6)
        booster.save_model(tmp_path / "model.txt")
        caplog.clear()
        served = opened("lightgbm", tmp_path)
        assert f"LightGBM's predictions, {options['objective']}" in caplog.text
        assert LEFT not in caplog.text.partition("LightGBM's predictions")[2]
        check(served, {"predictions": booster.predict}, rows, "float64")
    for options, told_reason in (
        ({"linear_tree": True}, "coefficients"),
        ({"categorical_feature": [1]}, "categories"),
    ):
        ages = np.abs(np.round(data))
        ages[:, 1] = np.arange(len(ages)) % 9
        told = {
            "verbose": -1,
            "num_threads": 1,
            "objective": "regression",
            "min_data_per_group": 1,
            **options,
        }
        booster = lightgbm.train(told, lightgbm.Dataset(ages, (ages[:, 1] % 2) + ages[:, 0]), 6)
        booster.save_model(tmp_path / "model.txt")
        caplog.clear()
        served = opened("lightgbm", tmp_path)
        assert told_reason in caplog.text
        np.testing.assert_array_equal(served.run({"input": ages})["predictions"], booster.predict(ages))


def test_treelite(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    treelite, xgboost = pytest.importorskip("treelite"), pytest.importorskip("xgboost")
    lightgbm, datasets = pytest.importorskip("lightgbm"), pytest.importorskip("sklearn.datasets")
    from sklearn.ensemble import RandomForestClassifier

    data, kinds = datasets.load_wine(return_X_y=True)
    two = xgboost.XGBClassifier(n_estimators=9, base_score=0.3).fit(data, kinds > 0)
    three = xgboost.XGBClassifier(n_estimators=9).fit(data, kinds)
    light = lightgbm.LGBMClassifier(n_estimators=5, verbose=-1, num_threads=1).fit(data, kinds > 0)
    votes = RandomForestClassifier(7).fit(data, kinds)
    for forest in (
        treelite.frontend.from_xgboost(two.get_booster()),
        treelite.frontend.from_xgboost(three.get_booster()),
        treelite.frontend.from_lightgbm(light.booster_),
        treelite.sklearn.import_model(votes),
    ):
        forest.serialize(str(tmp_path / "model.tl"))
        caplog.clear()
        served = opened("treelite", tmp_path, parameters={"outputs": ["predictions", "margins"]})
        assert caplog.text.count(USED) == 2
        library = {"predictions": lambda rows, forest=forest: treelite.gtil.predict(forest, rows).squeeze(1)}
        library["margins"] = lambda rows, forest=forest: treelite.gtil.predict(
            forest, rows, pred_margin=True
        ).squeeze(1)
        found = served.run({"input": data[:1].astype(str(forest.input_type))})["predictions"]
        if found.ndim == 1:
            library = {name: lambda rows, one=one: one(rows)[:, 0] for name, one in library.items()}
        check(served, library, data, str(forest.input_type))


# ---- the comparison


def test_one_bit_is_enough(caplog: pytest.LogCaptureFixture) -> None:
    probes = [np.arange(40.0).reshape(20, 2)]

    def library(rows: Any) -> Any:
        return rows[:, 0] * 0.1

    def off(rows: Any) -> Any:
        return np.where(rows[:, 0] == 38, np.nextafter(rows[:, 0] * 0.1, 9), rows[:, 0] * 0.1)

    def zeros(rows: Any) -> Any:
        return np.where(rows[:, 0] == 0, -0.0, rows[:, 0] * 0.1)

    def narrow(rows: Any) -> Any:
        return library(rows).astype(np.float32)

    for quick in (off, zeros, narrow, lambda rows: library(rows)[:, None]):
        assert trees.swap("model", library, quick, probes) is library
    assert trees.swap("model", library, lambda rows: None, probes) is library  # nothing was compared
    assert caplog.text.count(LEFT) == 5
    swapped = trees.swap("model", library, lambda rows: library(rows) if len(rows) < 30 else None, probes)
    assert swapped is not library
    assert swapped(np.ones((31, 2))).tolist() == [0.1] * 31  # what is not taken is the library's
