"""The list of backends, and what is said of one that is not there; tests/examples has a user's own."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from fastserve.backends.registry import BACKENDS, BY_TRITON_NAME, find_backend
from fastserve.errors import ConfigError, ServeError
from tests.server.rig import run, serving

ROOT = Path(__file__).parents[2]
TENSOR = {"dtype": "float32", "shape": [4]}


def extra_of_pyproject(name: str) -> list[str]:
    """Return the requirements of an extra; Python 3.10 cannot read the whole file."""
    written = re.search(
        rf"^{name} = (\[.*?\])$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL
    )
    assert written is not None
    found: list[str] = ast.literal_eval(written[1])
    return found


@pytest.mark.parametrize("entry", BACKENDS.values(), ids=BACKENDS)
def test_every_entry_is_whole(entry) -> None:
    assert find_backend(entry.name) is entry
    if entry.entry_point:
        module, _, name = entry.entry_point.partition(":")
        assert callable(getattr(import_module(module), name))
    assert not entry.triton or BY_TRITON_NAME[entry.triton] is entry
    assert bool(entry.framework) == bool(entry.extra) == bool(entry.packages)
    if entry.extra:
        brought = {Requirement(one).name.replace("-cpu", "") for one in extra_of_pyproject(entry.extra)}
        assert set(entry.packages.split()) == brought


def test_a_class_of_ones_own_is_a_backend() -> None:
    entry = find_backend("mine.fast:Net")
    assert (entry.entry_point, entry.takes, entry.model_file) == ("mine.fast:Net", "arrays", "")


@pytest.mark.parametrize("name", ["", "caffe", "mine:", ":Net", "mine/fast:Net", "a:b:c"])
def test_anything_else_is_none(name: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"backend: given .*, allowed: python, onnx, torch, tensorflow, sklearn, xgboost, "
        r"lightgbm, catboost, treelite, transformers, text, "
        r"text_python or module",
    ):
        find_backend(name)


def write_model(folder: Path, backend: str) -> Path:
    models = folder / "models"
    (models / "half" / "1").mkdir(parents=True)
    config = {"backend": backend, "inputs": {"x": TENSOR}, "outputs": {"y": TENSOR}}
    (models / "half" / "model.yaml").write_text(yaml.safe_dump(config))
    return models


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("no_such_package.at_all:Net", "no module no_such_package can be imported"),
        ("json:Net", "module json has no Net"),
        (
            "ensemble",
            'backend: given "ensemble", allowed: python, onnx, torch, tensorflow, sklearn, xgboost, '
            "lightgbm, catboost, treelite, transformers, text, ",
        ),
    ],
)
@pytest.mark.logs_errors
def test_a_backend_that_is_not_there_says_so(tmp_path: Path, backend: str, words: str) -> None:
    models = write_model(tmp_path, backend)

    async def work() -> None:
        with pytest.raises((ServeError, ConfigError), match=re.escape(words)):
            async with serving(models):
                pass

    run(work())
