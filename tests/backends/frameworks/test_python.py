"""The python backend: the model's class, its surroundings, and what it may return."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from fastserve.backends import create
from fastserve.backends.base import read_specs
from fastserve.backends.batch_io import OutputCheck
from fastserve.backends.frameworks import python
from fastserve.backends.script import loading
from fastserve.errors import ConfigError, ServeError
from tests.workers.rig import CONFIG, PLAIN, write_model


@pytest.fixture(autouse=True)
def clean_interpreter() -> Iterator[None]:
    """The backend expects a process of its own; here it shares ours."""
    path, modules, cached = list(sys.path), set(sys.modules), sys.dont_write_bytecode
    yield
    assert sys.path == path
    sys.path[:], sys.dont_write_bytecode = path, cached
    for name in set(sys.modules) - modules:
        del sys.modules[name]


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Any]:
    backends = []

    def make(source: str, **config: Any) -> Any:
        backend = create({**CONFIG, **config}, write_model(tmp_path, source), 3)
        backends.append(backend)
        backend.load()
        return backend

    yield make
    for backend in backends:
        backend.close()


def test_a_plain_model_runs(load: Any) -> None:
    outputs = load(PLAIN).run({"x": np.ones((3, 2), np.float32)})
    np.testing.assert_array_equal(outputs["y"], np.full((3, 2), 2, np.float32))


def test_siblings_import_early_and_late_and_nothing_is_written(load: Any, tmp_path: Path) -> None:
    folder = write_model(tmp_path, "")
    (folder / "early.py").write_text("ONE = 1")
    (folder / "late.py").write_text("TWO = 2")
    backend = load(
        """
        from early import ONE
        class Model:
            def __init__(self, config): pass
            def run(self, inputs):
                from late import TWO
                return {"y": inputs["x"] + ONE + TWO}
        """
    )
    assert backend.run({"x": np.zeros((1, 2), np.float32)})["y"][0, 0] == 3
    assert sorted(path.name for path in folder.iterdir()) == ["early.py", "late.py", "model.py"]


def test_the_config_is_complete_and_read_only(load: Any, tmp_path: Path) -> None:
    backend = load(
        """
        class Mine:
            def __init__(self, config): self.config = config
            def run(self, inputs): ...
        """,
        **{"class": "Mine", "parameters": {"scale": 2}, "name": "demo"},
    )
    config = backend._model.config
    assert dict(config) == {
        "name": "demo",
        "version": 1,
        "version_dir": str(tmp_path / "demo" / "1"),
        "instance": 3,
        "device": "cpu",
        "max_batch_size": 4,
        "parameters": {"scale": 2},
    }
    for mapping in (config, config["parameters"]):
        with pytest.raises(TypeError):
            mapping["name"] = "other"


def test_optional_methods_are_called_in_order(load: Any) -> None:
    backend = load(
        """
        class Model:
            def __init__(self, config): self.calls = ["init"]
            def load(self): self.calls.append("load")
            def warmup(self): self.calls.append("warmup")
            def close(self): self.calls.append("close")
            def run(self, inputs): ...
        """
    )
    calls = backend._model.calls
    backend.close()
    assert calls == ["init", "load", "warmup", "close"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("Model = 3", "model.py has no class 'Model'"),
        ("class Model:\n    def __init__(self, config): pass", "class 'Model' has no method run"),
        (
            "class Model:\n    def __init__(self, config): pass\n    async def run(self, inputs): ...",
            "run must be a plain function",
        ),
    ],
)
def test_a_class_that_does_not_fit_is_explained(load: Any, source: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(source)


def test_inputs_and_outputs_must_be_declared(load: Any) -> None:
    with pytest.raises(ConfigError, match=r"must declare its outputs in model\.yaml"):
        load(PLAIN, outputs=None)


def test_dataclasses_and_annotations_work_in_a_model(load: Any) -> None:
    load(
        """
        from __future__ import annotations
        from dataclasses import dataclass
        @dataclass
        class Model:
            config: dict
            def run(self, inputs: dict) -> dict: return inputs
        """
    )


SPECS = read_specs(
    {
        "y": {"dtype": "float32", "shape": [2]},
        "n": {"dtype": "int64", "shape": [-1]},
        "s": {"dtype": "bytes", "shape": []},
    }
)
ROWS = {"x": np.zeros((3, 1), np.float32)}
Y, N, S = np.zeros((3, 2), np.float32), np.zeros((3, 5), np.int64), np.array([b"a", "b", b""], dtype=object)


def test_good_outputs_pass_untouched() -> None:
    outputs = {"y": Y, "n": N, "s": S}
    checked = OutputCheck(SPECS, batched=True)(ROWS, outputs)
    assert all(checked[name] is outputs[name] for name in outputs)
    only = {"y": Y}
    assert OutputCheck({"y": SPECS["y"]}, batched=True)(ROWS, only) is only


def test_the_two_casts_that_are_made() -> None:
    outputs = {"y": Y.astype(np.float64), "n": N, "s": np.array(["a", "b", ""])}
    checked = OutputCheck(SPECS, batched=True)(ROWS, outputs)
    assert checked["y"].dtype == np.float32
    assert checked["s"].tolist() == ["a", "b", ""]
    assert outputs["y"].dtype == np.float64


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (None, "run must return a dict of arrays by output name, not NoneType"),
        ({"y": None}, "run did not return output 'y'"),
        ({"extra": Y}, "run returned 'extra', which model.yaml does not declare as an output"),
        ({"y": Y.tolist()}, "output 'y' must be a numpy array, not list"),
        ({"y": Y.astype(np.int64)}, "output 'y' is int64, model.yaml says float32"),
        ({"y": Y.astype(np.float16)}, "output 'y' is float16, model.yaml says float32"),
        ({"y": Y.astype(">f4")}, "output 'y' is big-endian float32, model.yaml says float32"),
        ({"n": N.astype(np.int32)}, "output 'n' is int32, model.yaml says int64"),
        ({"y": Y[:2]}, "output 'y' has shape [2, 2], but the batch has 3 rows"),
        ({"y": np.array(1, np.float32)}, "output 'y' has shape [], but the batch has 3 rows"),
        ({"y": np.zeros((3, 3), np.float32)}, "output 'y' has rows of shape [3], model.yaml says [2]"),
        ({"n": np.zeros((3,), np.int64)}, "output 'n' has rows of shape [], model.yaml says [-1]"),
        ({"s": np.array([b"a", 1, b""], dtype=object)}, "output 's' must hold bytes or str, but holds int"),
        ({"s": Y}, "output 's' is float32, model.yaml says bytes (an object array of bytes or str)"),
    ],
)
def test_broken_outputs_are_named(change: dict[str, Any] | None, words: str) -> None:
    outputs = None if change is None else {"y": Y, "n": N, "s": S, **change}
    with pytest.raises(ServeError) as caught:
        OutputCheck(SPECS, batched=True)(ROWS, outputs)
    assert caught.value.message == words


def test_without_a_batch_axis_shapes_are_whole() -> None:
    check = OutputCheck({"y": SPECS["y"]}, batched=False)
    check(ROWS, {"y": np.zeros(2, np.float32)})
    with pytest.raises(ServeError, match=r"output 'y' has rows of shape \[3, 2\]"):
        check(ROWS, {"y": Y})


@pytest.mark.parametrize(
    "drop",
    [partial(python._drop_modules, names={"helper": "helper.py"}), partial(loading._drop_changed, stamp="2")],
    ids=["helpers of a model", "modules of a script"],
)
def test_modules_that_others_import_meanwhile_stop_nothing(
    drop: Callable[[Path], None], tmp_path: Path
) -> None:
    """Models of one process load in threads; whatever a collection of garbage runs may import, too."""
    helper = ModuleType("helper")
    helper.__file__ = f"{tmp_path}/helper.py"
    sys.modules["helper"] = helper
    loading._stamps[tmp_path] = "1"
    limits = gc.get_threshold()

    def import_more(phase: str, info: dict[str, int]) -> None:
        sys.modules[f"more{len(sys.modules)}"] = ModuleType("more")

    gc.callbacks.append(import_more)
    gc.set_threshold(1)
    try:
        drop(tmp_path)
    finally:
        gc.set_threshold(*limits)
        gc.callbacks.remove(import_more)
        del loading._stamps[tmp_path]
    assert "helper" not in sys.modules
    assert any(name.startswith("more") for name in sys.modules)
