"""Specs there and back, and what of an exception a client may read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve.backends import create
from fastserve.backends.base import read_specs, write_specs
from fastserve.backends.model_errors import MAX_TEXT, clean, explain, kind_of
from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.tensor import DTYPES


def test_specs_go_there_and_back() -> None:
    declared = {
        "a": {"dtype": "float32", "shape": [-1, 3]},
        "b": {"dtype": "bytes", "shape": []},
        "c": {"dtype": "bfloat16", "shape": None},
    }
    assert write_specs(read_specs(declared)) == declared
    assert read_specs(None) == {}
    assert all(write_specs(read_specs({"x": {"dtype": name, "shape": []}})) for name in DTYPES)


@pytest.mark.parametrize(
    "spec",
    [None, {}, {"dtype": 3, "shape": []}, {"dtype": "float", "shape": []}]
    + [{"dtype": "int8", "shape": shape} for shape in (3, [-2], [1.5], [True], ["n"], [2**63], [1] * 65)],
)
def test_a_broken_spec_is_named(spec: object) -> None:
    with pytest.raises(ConfigError, match="tensor 'x'"):
        read_specs({"x": spec})


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("bad"), "ValueError: bad"),
        (ValueError(), "ValueError"),
        (KeyError("x"), "KeyError: 'x'"),
        (ServeError(Kind.NOT_FOUND, "no such label"), "no such label"),
        (ConfigError("threads must be at least 1"), "threads must be at least 1"),
        (SystemExit(3), "the model called exit(3)"),
        (FileNotFoundError(2, "No such file", "/srv/models/m/1/w.bin"), "[Errno 2] No such file: 'w.bin'"),
        (RuntimeError("at 0x7f00deadbeef in /a/b/c.py:3, or /d/e"), "RuntimeError: at 0x… in c.py:3, or e"),
        (RuntimeError("and/or, 1/2/3 are no paths"), "RuntimeError: and/or, 1/2/3 are no paths"),
        (RuntimeError("line\r\n\x1b[31mred\0"), "RuntimeError: line   [31mred"),
    ],
)
def test_an_exception_is_told_without_what_is_ours(error: BaseException, words: str) -> None:
    assert explain(error).removeprefix("FileNotFoundError: ") == words


def test_the_versions_folder_is_never_told() -> None:
    folder = "/my models/with space/1"
    assert clean(f"in {folder}/sub/x.py and {folder}", folder) == "in sub/x.py and (the version's folder)"


@given(st.text(max_size=3 * MAX_TEXT))
def test_words_are_bounded_and_printable(text: str) -> None:
    words = clean(text)
    assert len(words) <= MAX_TEXT
    assert all(char.isprintable() for char in words)


@given(st.lists(st.text("abc._-", min_size=1, max_size=5), min_size=2, max_size=6))
def test_no_absolute_path_survives(parts: list[str]) -> None:
    assert "/" not in clean(f"cannot open '/{'/'.join(parts)}'")


def test_kinds() -> None:
    assert kind_of(ServeError(Kind.NOT_FOUND, "")) is Kind.NOT_FOUND
    assert kind_of(ConfigError("")) is Kind.FAILED_PRECONDITION
    assert kind_of(ValueError("")) is Kind.INTERNAL


def test_a_backend_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_backend.py").write_text(
        "class Own:\n    def __init__(self, config, version_dir, instance): self.what = (config, instance)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = {"backend": "own_backend:Own"}
    assert create(config, tmp_path, 7).what == (config, 7)  # type: ignore[attr-defined]
    del sys.modules["own_backend"]


@pytest.mark.parametrize("name", ["", "caffe", None])
def test_an_unknown_backend_is_refused_with_the_known_ones(name: object, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match="allowed: python, onnx, torch, tensorflow, sklearn, xgboost, "
        "lightgbm, catboost, treelite, transformers, text, text_python or module:Class",
    ):
        create({"backend": name}, tmp_path, 0)
