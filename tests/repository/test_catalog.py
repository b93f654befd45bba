"""Names of classes: an output's own file, or those of the model that writes an ensemble's output."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

from fastserve.errors import Kind, ServeError
from fastserve.repository.catalog import OTHER_MODEL, Catalog, PartialCatalog, labels_of
from fastserve.repository.layout import Layout
from fastserve.repository.version import Version, VersionState
from fastserve.settings import RepositorySettings

TENSORS = """max_batch_size: 4
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 4 ] %s } ]
"""
STEP = """{ model_name: "%s" model_version: -1
  input_map { key: "IN" value: "%s" } output_map { key: "OUT" value: "%s" } }"""


def write(root: Path, name: str, config: str, **files: str) -> None:
    (root / name / "1").mkdir(parents=True, exist_ok=True)
    (root / name / "1" / "model.py").write_text("class TritonPythonModel: pass\n")
    (root / name / "config.pbtxt").write_text(config)
    for file, text in files.items():
        (root / name / file).write_text(text)


def catalog_of(root: Path) -> Catalog:
    """Every model of a folder, as if it had been loaded."""
    catalog = Catalog()
    for name, folder in Layout(RepositorySettings(repository=str(root))).scan().items():
        assert folder.config is not None, folder.error
        version = Version(name, 1, folder.folder / "1", folder.config)
        catalog.put(version)
        catalog.move(version, VersionState.LOADING)
        catalog.move(version, VersionState.AVAILABLE)
    return catalog


def ensemble(*steps: str, own: str = "") -> str:
    return 'platform: "ensemble" ' + TENSORS % own + f"ensemble_scheduling {{ step [ {', '.join(steps)} ] }}"


def test_an_ensemble_has_the_labels_of_the_model_that_writes_the_output(tmp_path: Path) -> None:
    labelled = 'backend: "python" ' + TENSORS % 'label_filename: "words"'
    write(tmp_path, "last", labelled, words="a\nb\n\nd e\n")
    write(tmp_path, "first", labelled, words="wrong\n")
    write(tmp_path, "bare", 'backend: "python" ' + TENSORS % "")
    write(tmp_path, "two", ensemble(STEP % ("first", "IN", "mid"), STEP % ("last", "mid", "OUT")))
    write(tmp_path, "outer", ensemble(STEP % ("bare", "IN", "mid"), STEP % ("two", "mid", "OUT")))
    write(tmp_path, "own", ensemble(STEP % ("last", "IN", "OUT"), own='label_filename: "x"'), x="x\r\ny")
    write(tmp_path, "none", ensemble(STEP % ("bare", "IN", "OUT")))
    catalog = catalog_of(tmp_path)

    def found(name: str) -> list[str]:
        version: Any = catalog.available(name)
        return list(labels_of(version, "OUT", catalog))

    assert found("last") == found("two") == found("outer") == ["a", "b", "", "d e"]
    assert (found("own"), found("bare"), found("none")) == (["x", "y"], [], [])


def test_a_label_file_that_changed_is_read_again(tmp_path: Path) -> None:
    write(tmp_path, "m", 'backend: "python" ' + TENSORS % 'label_filename: "words"', words="a\n")
    layout = Layout(RepositorySettings(repository=str(tmp_path)))
    first = layout.scan()["m"].config
    assert layout.scan()["m"].config is first
    (tmp_path / "m" / "words").write_text("a\nb\n")
    second = layout.scan()["m"].config
    assert second is not None
    assert second.output_labels == {"OUT": ["a", "b"]}
    (tmp_path / "m" / "words").unlink()
    assert layout.scan()["m"].error == (
        "output OUT: label_filename 'words': cannot be read: No such file or directory"
    )


def test_a_part_has_the_models_whose_names_fit(tmp_path: Path) -> None:
    catalog = Catalog()
    told: list[str] = []

    def add(name: str) -> Version:
        write(tmp_path, name, 'backend: "python" ' + TENSORS % "")
        folder = Layout(RepositorySettings(repository=str(tmp_path))).scan()[name]
        assert folder.config is not None
        version = Version(name, 1, folder.folder / "1", folder.config)
        catalog.put(version)
        catalog.move(version, VersionState.LOADING)
        catalog.move(version, VersionState.AVAILABLE)
        return version

    before, other = add("a-before"), add("b")
    part = PartialCatalog(catalog, ("a-*", "exact", "[xy]?"))
    part.on_change.append(lambda version: told.append(version.model))
    after = add("a-after")
    add("c")
    assert part.available("a-before") is before
    assert part.available("a-after", 1) is after
    assert part.available("b") is None
    assert catalog.available("b") is other
    assert sorted(part.models) == ["a-after", "a-before"]
    assert set(told) == {"a-after"}
    catalog.remove("a-before")
    assert sorted(part.models) == ["a-after"]
    for name in ("a-", "a-b", "exact", "x1", ""):
        part.explain_absence(name)
    for name in ("b", "A-b", "ba-b", "exact2", "x12", "a", "a-b\nc/../b"[4:], "never"):
        with pytest.raises(ServeError, match=OTHER_MODEL) as caught:
            part.explain_absence(name)
        assert caught.value.kind is Kind.PERMISSION_DENIED
        catalog.check_allowed(name)
    part.explain_absence("exact-1", "exact")  # as grps names versions
    catalog.begin_start("a-soon", may_write=False)
    catalog.begin_start("b-soon", may_write=False)
    assert part.starting == {"a-soon": False}
    with pytest.raises(ServeError) as caught:
        part.explain_absence("a-soon")
    assert caught.value.kind is Kind.UNAVAILABLE


def test_a_part_that_nobody_has_is_let_go_of() -> None:
    catalog = Catalog()
    part = PartialCatalog(catalog, ("*",))
    assert list(catalog.parts) == [part]
    del part
    gc.collect()
    assert not catalog.parts
